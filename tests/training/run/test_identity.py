"""Settings and files that all ranks must share.

A difference ends the run on each rank, and says which rank has what.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config import Config
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import LaunchError
from megatron.parallel.launch import Launch
from megatron.parallel.participants import Alike
from megatron.training.run import provenance as module
from megatron.training.run.provenance import files, identity
from tests.helpers.launching import TINY, launch
from tests.parallel.ranks import ranks_in_threads

FIELDS: dict[str, Any] = dict(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=8,
    vocab_size=24,
    train_iters=4,
    lr=1e-3,
    global_batch_size=4,
    mock_data=True,
    world_size=4,
    seed=1,
)


def meet(alike: list[Alike | None]) -> list[Any]:
    """Return None for each rank that met the others, or its error."""
    return ranks_in_threads(range(len(alike)), len(alike), alike=alike)


def refused(found: list[Any], *words: str) -> None:
    """Check that all report the same, with these words, after their own names."""
    assert all(isinstance(error, LaunchError) for error in found), found
    assert len({str(error) for error in found}) == 1 and all(
        word in str(found[0]) for word in words
    ), found[0]


@pytest.mark.parametrize(
    ("setting", "flag", "value", "shown"),
    [
        ("seed", "--seed", 2, ("1", "2")),
        ("lr", "--lr", 2e-3, ("0.001", "0.002")),
        ("adam_beta2", "--adam-beta2", 0.95, ("0.999", "0.95")),
        ("vocab_size", "--vocab-size", 32, ("24", "32")),
        ("global_batch_size", "--global-batch-size", 8, ("4", "8")),
        ("clip_grad", "--clip-grad", 0.5, ("1.0", "0.5")),
        ("hidden_dropout", "--hidden-dropout", 0.2, ("0.1", "0.2")),
    ],
)
def test_a_setting_that_one_rank_has_otherwise_ends_all(
    setting: str, flag: str, value: Any, shown: tuple[str, str]
) -> None:
    usual = Config.create(**FIELDS, hidden_dropout=0.1)
    other = usual.replace(**{setting: value})
    ranks = [
        identity(config, Launch(rank=i, local_rank=i, local_world_size=4, world_size=4))
        for i, config in enumerate((usual, usual, other, usual))
    ]
    refused(meet(ranks), f"{flag} is {shown[0]} on rank 0-1, 3, {shown[1]} on rank 2")


def test_scratch_folders_and_addresses_may_differ(tmp_path: Path) -> None:
    usual = Config.create(**FIELDS)
    scratch = {
        "data_cache_path": str(tmp_path),
        "stage_data_to": "/nvme",
        "tensorboard_dir": str(tmp_path),
        "local_rank": 1,
        "master_addr": "10.0.0.1",
        "wandb_exp_name": "$RANDOM",
    }
    ranks = [
        identity(c, Launch(rank=i, local_rank=0, world_size=2))
        for i, c in enumerate((usual, usual.replace(**scratch)))
    ]
    assert meet(ranks) == [None, None]


def test_of_a_random_value_on_every_rank_some_are_named() -> None:
    text = str(meet([{"settings": {"--seed": 1000 + rank}} for rank in range(12)])[5])
    assert "1000 on rank 0" in text and len(text) < 1000


def test_another_file_of_the_same_name_and_size_on_one_node_ends_all(tmp_path: Path) -> None:
    """Another file of the same name and size on one node ends all ranks.

    It is code, tokenizer or index. Only the first process of a node reads them; the second has none
    to report.
    """
    package, prefix, vocabulary = tmp_path / "megatron", tmp_path / "text", tmp_path / "vocab.json"
    package.mkdir()
    fields = {
        **FIELDS,
        "mock_data": False,
        "data_path": (str(prefix),),
        "tokenizer_type": "GPT2BPETokenizer",
    }
    config = Config.create(
        **fields, vocab_file=str(vocabulary), merge_file=str(tmp_path / "absent")
    )

    def node(code: str, documents: list[int], entry: str) -> Alike:
        (package / "model.py").write_text(code)
        vocabulary.write_text(json.dumps({entry: 0}))
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            for length in documents:
                writer.add_document(range(length))
        return {"files": dict(files(config, package))}

    usual = node("x = 1", [5, 7], "a")
    for code, documents, entry, name in (
        ("x = 2", [5, 7], "a", "megatron/model.py"),
        ("x = 1", [7, 5], "a", f"{prefix}.idx"),
        ("x = 1", [5, 7], "b", str(vocabulary)),
    ):
        text = str(meet([usual, {}, node(code, documents, entry), {}])[1])
        assert f"{name} is " in text and "rank 0" in text and "rank 2" in text, text
        assert not any(
            f"{other} is " in text for other in {"megatron/model.py", str(vocabulary)} - {name}
        )
    assert meet([usual, {}, node("x = 1", [5, 7], "a"), {}]) == [None] * 4


def test_who_reads_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "versions", lambda: {"torch": "2", "system": "one kernel or another"}
    )
    first, second = (
        identity(Config.create(**FIELDS), Launch(local_rank=i, local_world_size=2))
        for i in range(2)
    )
    assert "files" in first and "files" not in second and first["settings"] == second["settings"]
    assert first["settings"]["torch"] == "2" and "system" not in first["settings"]


def also(*flags: str) -> None:
    """Give this process more flags than the others."""
    import sys

    sys.argv += flags


@pytest.mark.slow
def test_a_pipeline_with_two_seeds_does_not_train() -> None:
    arguments = [*TINY, "--pipeline-model-parallel-size", "2"]
    for outcome in launch(2, arguments, arm={1: (also, "--seed", "4711")}):
        assert outcome is not None and outcome.code == 2
        assert (
            "--seed" in outcome.output
            and "1234 on rank 0" in outcome.output
            and "4711 on rank 1" in outcome.output
        )
        assert "iteration " not in outcome.output
