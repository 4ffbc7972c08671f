"""Ranks that have different kernels are found out at the start, on every rank."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.kernels import choose, library
from megatron.parallel.topology import Layout, Topology
from megatron.training.kernels import check_agreement, describe_kernels
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

MODEL = dict(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, vocab_size=50)
NOTHING = library.Found(None, "", "", "nobody built one")


def host(path: str) -> library.Found:
    return library.Found(Path(path), "host", "x86-64-v3", "", object())


def outcome(rank: int, paths: list[str | None], prints: list[int], faster: bool = True, world: int = 4) -> str:
    """What check_agreement says on a rank that has the library `paths[rank]` of the fingerprint `prints[rank]`."""
    with pytest.MonkeyPatch.context() as patch:
        path = paths[rank]
        patch.setattr(library, "find", lambda device_type: NOTHING if path is None else host(path))
        patch.setattr(library, "fingerprint", lambda device_type: prints[rank], raising=False)
        result = choose.HostResult(choose.EVERY_TYPE if faster or rank > 0 else (), "")
        patch.setattr(choose, "HOST_FASTER", dict.fromkeys(choose.OPERATORS, result))
        topology = join(tensor=2)
        try:
            check_agreement(Config.create(**MODEL, tensor_model_parallel_size=2, world_size=world), topology)
        except ConfigError as error:
            return str(error)
    return ""


LARGE = 2**63 - 1


@pytest.mark.parametrize(("paths", "prints"), [([None] * 4, [0] * 4), (["/l.so"] * 4, [LARGE] * 4)])
def test_equal_ranks_go_on(paths, prints):
    assert run_processes(4, outcome, paths, prints) == [""] * 4


def test_a_rank_without_a_library_stops_all():
    (text, *others) = run_processes(4, outcome, ["/l.so", "/l.so", None, "/l.so"], [LARGE, LARGE, 0, LARGE])
    assert others == [text] * 3
    assert "ranks 0-1, 3: fused kernels: host x86-64-v3 (/l.so)" in text
    assert "rank 2: fused kernels: none, nobody built one" in text
    assert "through them: nothing" in text and "python setup.py build_kernels" in text
    assert "MEGATRON_KERNELS_LIBRARY=none for all ranks" in text


@pytest.mark.parametrize("prints", [[7, 7, 7, 8], [9, 8, 8, 8], [-1, 0, 0, 0]])
def test_libraries_of_different_sources_stop_all(prints):
    """The same path on each node's own disk."""
    texts = run_processes(4, outcome, ["/l.so"] * 4, prints)
    assert len(set(texts)) == 1 and "different fused kernels" in texts[0]
    for number in set(prints):
        assert f"[{number & 0xFFFFFFFF:08x}]" in texts[0]


def test_different_choices_stop_all():
    (text, other) = run_processes(2, outcome, ["/l.so"] * 2, [5, 5], False, 2)
    assert text == other and "rank 0: " in text and "through them: nothing" in text
    assert "rank 1: " in text and ", bias_activation" in text


def test_one_process_asks_nobody(monkeypatch):
    monkeypatch.setattr(library, "fingerprint", None, raising=False)
    check_agreement(Config.create(**MODEL), Topology.from_layout(Layout(), 0, device="cpu"))


def test_the_lines_of_the_log(monkeypatch):
    monkeypatch.setattr(library, "find", lambda device_type: host("/l.so"))
    lines = describe_kernels(Config.create(**MODEL, norm_implementation="apex"), torch.device("cpu"))
    assert lines[0] == "fused kernels: host x86-64-v3 (/l.so)" and lines[1].startswith("through fused kernels: ")
    assert lines[2].startswith("flash-attn") and lines[3].startswith("apex norm") and len(lines) == 4
