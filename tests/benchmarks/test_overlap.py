"""Predictions of benchmarks/overlap.py from recorded messages, against closed forms.

There are no processes and no times.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.replay import replay

pytestmark = pytest.mark.campaign("benchmarks")


@pytest.fixture
def overlap_replay(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("overlap_replay")


def window(overlap: bool) -> dict[str, Any]:
    """Record two messages of 1e6 bytes in a step of 4 s that began at 100.

    The second rank waits like the first.

    Without overlap, computing (3 s) comes first, then both messages, each waited for in 0.5 s. With
    overlap they are posted after 1 and 2 s of computing, and waited for when all 4 s of it are
    done.
    """
    if overlap:
        times = [(101.0, (104.0, 104.0)), (102.0, (104.0, 104.0))]
    else:
        times = [(103.0, (103.0, 103.5)), (103.5, (103.5, 104.0))]
    messages = [
        ["reduce", "group 0", 1e6, posted, posted, posted, posted, waited]
        for posted, waited in times
    ]
    return {"started": 100.0, "ended": 104.0, "computed": [], "messages": messages}


@pytest.mark.parametrize("gigabytes_per_s, carrying", [(None, 0.0), (0.002, 0.5), (0.0005, 2.0)])
def test_step_time_follows_the_link(
    overlap_replay: Any, gigabytes_per_s: float | None, carrying: float
) -> None:
    """Step time follows the link.

    Without overlap, computing and messages add up: 3 + 2 (transfer + latency). With overlap the
    step is 4 s of computing or the time of the last message. They are posted after 1 and 2 s, on
    one link.
    """
    latency = 0.25
    for overlap in (False, True):
        actions = overlap_replay.actions_of_window(window(overlap), latency, gigabytes_per_s)
        predicted = replay([actions, actions]).makespan
        last = max(2.0, 1.0 + carrying) + carrying + latency
        assert predicted == pytest.approx(
            max(4.0, last) if overlap else 3.0 + 2 * (carrying + latency)
        )


def test_ends_of_a_message_find_each_other(overlap_replay: Any) -> None:
    """The n-th message of a link is the same one on both ranks, despite other links' messages."""
    one, two = window(True), window(True)
    two["messages"].insert(1, ["allreduce", "group 1", 4.0, 101.5, 101.5, 101.5, 101.5, None])
    alone = {**two, "messages": [two["messages"][1]]}
    result = replay([overlap_replay.actions_of_window(w, 0.0, None) for w in (one, two, alone)])
    assert sorted(map(str, result.crossings)) == ["group 0 #0", "group 0 #1", "group 1 #0"]


def test_trace_has_a_lane_for_computing_waiting_and_each_link(
    overlap_replay: Any, tmp_path: Path
) -> None:
    """Time without waiting is computing: 3 s before the first message, and none after it."""
    overlap_replay.write_trace(window(False), 3, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["tid"] for e in events if e["name"] == "thread_name"} == {0, 1, 2}
    found = [(e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert found[:3] == [(0, 0.0, 3e6), (0, 4e6, 0.0), (1, 3e6, 5e5)]
