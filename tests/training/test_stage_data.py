"""--stage-data-to in a run: who copies, what is read, and that nobody is left behind."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.data.datasets import build_datasets
from megatron.errors import LaunchError
from megatron.parallel.topology import Layout, Topology
from megatron.training import stage_data
from megatron.training.stage_data import staged_locations, wait_for_all
from tests.helpers.clock import VirtualClock
from tests.helpers.processes import run_processes
from tests.training.test_run import run_and_listen, write_numbers

SINGLE = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))


def config(**changes: Any) -> Config:
    fields: dict[str, Any] = dict(
        num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=80, train_iters=4, split="1"
    )
    return Config.create(**{**fields, **changes})


def test_the_copy_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "disk"))
    prefix, said = write_numbers(tmp_path / "x", 80), list[str]()
    asked = config(data_path=(prefix,), stage_data_to="$NODE_DISK/me")
    locations = staged_locations(asked, SINGLE, said.append)
    assert Path(locations[prefix]).is_relative_to(tmp_path / "disk" / "me")
    assert any("1 of 1" in line for line in said)
    before = build_datasets(asked, 4, 0, 0).train
    (tmp_path / "x.bin").write_bytes(bytes(160))  # the same size, all zeros
    built = build_datasets(asked, 4, 0, 0, locations=locations).train
    assert before is not None and built is not None
    assert all(built[i].tolist() == list(range(built[i][0], built[i][0] + 9)) for i in range(len(built)))
    assert all(not before[i].any() for i in range(len(before)))
    assert locations[prefix] in built.where(0) and built.name == prefix


def test_a_variable_that_is_not_set_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NODE_DISK", raising=False)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    assert staged_locations(config(data_path=("x",), stage_data_to="$NODE_DISK/me"), SINGLE, said.append) == {}
    assert len(said) == 1 and "--stage-data-to $NODE_DISK/me" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    prefix, said = write_numbers(tmp_path / "x", 80), list[str]()
    asked = config(data_path=(prefix,), stage_data_to=str(tmp_path / "file"))
    assert staged_locations(asked, SINGLE, said.append) == {prefix: prefix}
    assert "1 of 1" in said[-1]


def test_all_wait_for_all() -> None:
    """Three ranks by one virtual clock: the second comes while the first waits, the third while both do."""
    store, clock, found = dist.HashStore(), VirtualClock(), dict[int, tuple[int, float]]()

    def come(rank: int) -> None:
        topology = Topology.from_layout(Layout(data=3), rank, device=torch.device("cpu"))
        incomplete = wait_for_all(topology, incomplete=rank == 1, store=store, clock=clock, sleep=clock.sleep)
        found[rank] = incomplete, clock()

    start = clock()
    clock.at(1000.0, lambda: come(1))
    clock.at(7200.0, lambda: come(2))
    come(0)
    assert {rank: incomplete for rank, (incomplete, _) in found.items()} == {0: 1, 1: 1, 2: 1}
    assert all(7200.0 <= at - start <= 7210.0 for _, at in found.values())


def test_the_wait_has_an_end() -> None:
    topology, clock = Topology.from_layout(Layout(data=2), 0, device=torch.device("cpu")), VirtualClock()
    with pytest.raises(LaunchError, match="--stage-data-to: 1 of 2"):
        wait_for_all(topology, incomplete=False, store=dist.HashStore(), clock=clock, sleep=clock.sleep)


def test_only_stages_that_read_data_copy_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three pipeline stages the middle one reads nothing."""
    monkeypatch.setattr(stage_data, "wait_for_all", lambda topology, incomplete: int(incomplete))
    prefix = write_numbers(tmp_path / "x", 80)
    copied = []
    for rank in range(3):
        topology = Topology.from_layout(Layout(pipeline=3), rank, device=torch.device("cpu"))
        target = tmp_path / f"disk{rank}"
        fields = dict(num_layers=3, pipeline_model_parallel_size=3, world_size=3, data_path=(prefix,))
        staged = staged_locations(config(**fields, stage_data_to=str(target)), topology, lambda _: None)
        assert bool(staged) == target.exists()
        copied.append(bool(staged))
    assert copied == [True, False, True]


@pytest.mark.slow
def test_a_whole_run_from_copies(tmp_path: Path) -> None:
    prefix, target = write_numbers(tmp_path / "x", 80), tmp_path / "disk"
    fields = dict(mock_data=False, data_path=(prefix,), split="1", num_layers=2, vocab_size=80, eval_iters=0)
    said = run_processes(2, run_and_listen, dict(fields, stage_data_to=str(target)))
    assert all(f"{24 * 8} tokens" in lines[-1] and f"x {24 * 8 / 80:.3f}" in lines[-1] for lines in said)
    assert len(list(target.glob("**/*.bin"))) == 1
