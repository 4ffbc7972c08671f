"""tools/preflight.py measure as srun starts it: two nodes of two processes, over gloo, healthy and not."""
from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.preflight.measure.board import Conductor
from tests.helpers.launching import Outcome, Script
from tests.helpers.processes import free_port

pytestmark = pytest.mark.slow

STOPS, ABSENT = 1, 3


def variables(rank: int, port: int) -> dict[str, str]:
    """What srun gives this task."""
    node, local = divmod(rank, 2)
    return {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node), "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "node[01-02]",
        "SLURMD_NODENAME": f"node0{node + 1}", "ROCR_VISIBLE_DEVICES": str(local), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "RES_OPTIONS": "timeout:1",
    }  # fmt: skip


def measured(folder: Path, ranks: Sequence[int], waited_for: Sequence[int], arm: Any) -> list[Outcome]:
    """Starts these ranks, of which some end by themselves."""
    port, arguments = free_port(), ["measure", "--out", str(folder), "--backend", "gloo", "--seconds", "600"]
    with contextlib.ExitStack() as stack:
        scripts = {}
        for rank in ranks:
            log = folder.with_name(f"rank_{rank}.log")
            script = Script("tools/preflight.py", arguments, log, variables(rank, port), (arm, rank))
            scripts[rank] = stack.enter_context(script)
        return [scripts[rank].wait() for rank in waited_for]


def with_known_speeds(rank: int) -> None:
    """A busy machine would have them differ, and a rank that got no core is rightly named."""
    from megatron.preflight.measure import device

    speeds = {"host_gflops": 60.0, "host_copy_gb_per_s": 20.0, "stopped": 0.0, "waited": 0.0}
    device.host_speed = lambda seconds: speeds


def test_a_good_allocation(tmp_path: Path) -> None:
    first, *others = measured(tmp_path / "out", range(4), range(4), with_known_speeds)
    assert [first.code, *others] == [0, *[Outcome(0, "")] * 3], first.output
    assert "2 of 2 nodes" in first.output and "--exclude" not in first.output
    found = json.loads((tmp_path / "out/preflight.json").read_text())
    assert found["findings"] == []
    assert (found["exit_code"], found["good_hosts"], found["exclude"]) == (0, ["node01", "node02"], "")
    assert (tmp_path / "out/good_hosts").read_text() == "node01\nnode02\n"
    assert (tmp_path / "out/bad_hosts").read_text() == ""
    for host in ("node01", "node02"):
        assert found["hosts"][host]["skew_s"] == pytest.approx(0, abs=0.1)  # one machine, one clock
        for one in found["hosts"][host]["ranks"].values():
            assert one["host_gflops"] == 60.0 and one["allreduce_gb_per_s"] > 0 and one["p2p_gb_per_s"] > 0
    assert sorted(pair[:2] for pair in found["pairs"]) == [[0, 2], [1, 3]]
    groups = {step["step"]: step["answered"] for step in found["steps"] if step["step"].startswith("groups, ")}
    assert groups == {"groups, tensor": 4, "groups, data": 4, "groups, model": 4, "groups, world": 4}
    assert all(bandwidth > 0 for *_, bandwidth in found["pairs"])


class Patient(Conductor):
    """Waits for those who live as long as they take, and for the lost for seconds that do not pass."""

    def __init__(self, store: Any) -> None:
        self.seconds, self.living = 0.0, 0
        super().__init__(store, lambda: self.seconds, self.pause)

    def ask(self, orders: Mapping[int, Mapping[str, Any]], *limits: float) -> dict[int, dict[str, Any]]:
        meeting = any(order["task"] == "hello" for order in orders.values())
        self.living = len(set(orders) - {ABSENT} - (set() if meeting else {STOPS}))
        return super().ask(orders, *limits)

    def pause(self, seconds: float) -> None:
        if self._store.add(f"came/{self._step}", 0) < self.living:
            time.sleep(0.01)
        else:
            self.seconds += seconds


def with_faults(rank: int) -> None:
    from megatron.preflight.measure import session

    if rank == 0:
        session.Conductor = Patient  # type: ignore[misc]
    if rank == STOPS:
        session.Tasks.device = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign]


def test_who_does_not_come_and_who_stops(tmp_path: Path) -> None:
    (first,) = measured(tmp_path / "out", [0, STOPS, 2], [0], with_faults)
    found = json.loads((tmp_path / "out/preflight.json").read_text())
    assert {(f["host"], f["local_rank"]): f["kind"] for f in found["findings"]} == {
        ("node02", 1): "missing", ("node01", 1): "stopped",
    }, found["findings"]  # fmt: skip
    assert (first.code, found["exit_code"], found["bad_hosts"]) == (4, 4, ["node01", "node02"])
    assert "--exclude=node01,node02" in first.output
    assert (tmp_path / "out/good_hosts").read_text() == ""
