"""Real processes: two nodes of four, over gloo, some of which are slow, dead, stuck or missing."""
from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from megatron.preflight.measure import board
from megatron.preflight.measure.session import Tasks
from tests.preflight.measure.allocation import allocate, found_by_rank_0, throttle


def test_a_good_allocation() -> None:
    for _ in range(3):  # again where a busy machine has kept a rank from running: it is rightly named then
        found = found_by_rank_0(seconds=30.0)
        if not found["findings"]:
            break
    assert found["findings"] == []
    assert (found["exit_code"], found["good_hosts"], found["exclude"]) == (0, ["node01", "node02"], "")
    for host in ("node01", "node02"):
        assert found["hosts"][host]["skew_s"] == pytest.approx(0, abs=0.1)  # one machine, one clock
        for rank in found["hosts"][host]["ranks"].values():
            assert {"host_gflops", "host_copy_gb_per_s", "allreduce_gb_per_s", "p2p_gb_per_s"} <= set(rank)
    assert sorted(pair[:2] for pair in found["pairs"]) == [[local, local + 4] for local in range(4)]
    assert all(bandwidth > 0 for *_, bandwidth in found["pairs"])


def _throttled(rank: int) -> None:
    if rank == 5:
        throttle()


@pytest.mark.slow
def test_a_throttled_rank_is_named() -> None:
    found = found_by_rank_0(_throttled, 60.0)  # all of them answer, nothing waits for the limit
    (finding,) = found["findings"]
    assert (finding["kind"], finding["host"], finding["local_rank"]) == ("stopped", "node02", 1)
    assert found["bad_hosts"] == ["node02"]
    assert found["exclude"] == "--exclude=node02"
    assert found["exit_code"] == 4


def _missing(rank: int) -> None:
    if rank == 2:
        del os.environ["ROCR_VISIBLE_DEVICES"]
    if rank == 7:
        os._exit(0)


@pytest.mark.slow
def test_a_rank_that_never_starts_and_one_without_a_device() -> None:
    found = found_by_rank_0(_missing, nodes_needed=1)
    assert [(f["kind"], f["host"], f["local_rank"]) for f in found["findings"]] == [
        ("missing", "node02", 3), ("device", "node01", 2),
    ]  # fmt: skip
    assert "did not come" in found["lines"][0]
    assert "it has no process on its node" in found["lines"][0]
    assert found["exit_code"] == 4


class _KilledWhenMeasured(Tasks):
    def device(self, order: Mapping[str, Any]) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}


class _StoppedInACollective(Tasks):
    def group(self, order: Mapping[str, Any]) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGSTOP)
        return {}


def _dying(rank: int) -> type[Tasks] | None:
    return {3: _StoppedInACollective, 5: _KilledWhenMeasured}.get(rank)


@pytest.mark.slow
def test_one_that_is_killed_and_one_that_is_stopped_on_the_way() -> None:
    """Each in a step of its own: the others go on, and nobody else is accused."""
    found = found_by_rank_0(_dying)
    assert [(f["kind"], f["host"], f["local_rank"]) for f in found["findings"]] == [
        ("missing", "node02", 1), ("stopped", "node01", 3),
    ]  # fmt: skip
    assert "has ended" in found["lines"][0]
    assert "is stopped 100% of the time" in found["lines"][1]
    assert found["seconds"] < 60


class _SlowNode(Tasks):
    """Node 3's card: messages that it carries take a hundred times as long. (CPUs are not blamed for slow messages.)"""

    def device(self, order: Mapping[str, Any]) -> dict[str, Any]:
        return super().device(order) | {"kind": "cuda"}

    def group(self, order: Mapping[str, Any]) -> dict[str, Any]:
        found = super().group(order)
        across = not order["whole_node"] and {8, 9, 10, 11}.intersection(order["members"])
        return found | {"p2p_gb_per_s": 0.1 if across else 10.0}


def _slow_card(rank: int) -> type[Tasks]:
    return _SlowNode


@pytest.mark.slow
def test_a_slow_card_is_told_from_its_neighbours() -> None:
    """Five nodes of four processes, whose messages are real and whose figures are not."""
    hosts = [f"node{k:02d}" for k in range(1, 6)]
    found = found_by_rank_0(_slow_card, 30.0, hosts, nodes_needed=4)
    assert found["bad_hosts"] == ["node03"]
    assert [f["kind"] for f in found["findings"]] == ["network"] * 4
    assert (found["exit_code"], found["good_hosts"]) == (0, ["node01", "node02", "node04", "node05"])


# Kills $1 when it is the last child of $2, or after some minutes.
_KILL_THE_LAST = """for _ in $(seq 600); do
    sleep 0.2; read -ra children </proc/$2/task/$2/children; ((${#children[@]} > 1)) || break
done; kill -KILL $1"""


class _StoppedWhenMeasured(Tasks):
    """When all have come, so that each has its connection to the store."""

    def device(self, order: Mapping[str, Any]) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGSTOP)
        return {}


def _rank_0_stops(rank: int) -> type[Tasks] | None:
    board._PROBE_S = 2.0
    if rank:
        return None
    subprocess.Popen(["bash", "-c", _KILL_THE_LAST, "bash", str(os.getpid()), str(os.getppid())])
    return _StoppedWhenMeasured


@pytest.mark.slow
def test_all_others_end_when_rank_0_stops() -> None:
    for ended, text in allocate(_rank_0_stops, 30.0)[1:]:
        assert not ended
        assert "StoreLostError: rank 0's store gave no answer within" in text
