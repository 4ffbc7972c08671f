"""Slow ranks are named, and those that wait for them are not."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.parallel import flight
from megatron.parallel.collectives import all_reduce
from megatron.parallel.topology import Layout
from megatron.pipeline.executor import Executor
from megatron.training.stragglers import Stragglers, summarise
from tests.helpers.groups import join
from tests.helpers.processes import run_processes


def test_ranks_are_compared_with_those_of_their_stage() -> None:
    """The second stage does twice the work: that makes none of its ranks slow."""
    layout = Layout(pipeline=2, data=4)
    seconds = [1.0, 1.0, 1.5, 1.0, 2.0, 2.0, 2.0, 2.2]
    places = [f"n{rank // 4}:cuda:{rank % 4}" for rank in range(8)]
    result = summarise(seconds, layout, places)
    slow = result.record["slow"]
    assert [(one["rank"], one["place"]) for one in slow] == [(2, "n0:cuda:2"), (7, "n1:cuda:3")]
    assert [one["ratio"] for one in slow] == [1.5, 1.1]
    assert "rank 2 (n0:cuda:2) 1500.0 ms, 1.50x, rank 7 (n1:cuda:3) 2200.0 ms, 1.10x" in result.lines[1]
    assert result.record["slow_nodes"] == []


def test_stages_are_told_apart_in_any_order_of_ranks() -> None:
    """Every second rank is of the second stage, which does twice the work."""
    result = summarise([1.0, 2.0, 1.0, 2.0, 1.0, 3.0], Layout(pipeline=2, data=3, order="pp-dp-tp"))
    assert [(one["rank"], one["ratio"]) for one in result.record["slow"]] == [(5, 1.5)]


def test_a_slow_node_is_named_as_one() -> None:
    layout = Layout(data=6)
    places = [f"n{rank // 2}:cpu" for rank in range(6)]
    result = summarise([1.0, 1.0, 1.0, 1.0, 1.2, 1.2], layout, places)
    assert result.record["slow_nodes"] == [{"node": "node n2", "ratio": 1.2}]
    assert result.lines[-1].endswith("slow together: node n2 1.20x")


def test_without_peers_nothing_is_said_about_slowness() -> None:
    result = summarise([1.0, 3.0], Layout(pipeline=2))
    assert "no rank has another one of its stage" in result.lines[1] and result.record["slow_ranks"] == 0
    assert len(summarise([1.0, 1.01], Layout(data=2)).lines) == 1


def measure(rank: int) -> dict[str, Any] | None:
    """Rank 1 is slow in every forward pass, and rank 0 waits for it in a collective of the same pass. A clock that both
    set: on a busy machine no real one would tell them apart."""
    topology, plain, now = join(tensor=2), dist.all_reduce, [0.0]
    monkeypatch = pytest.MonkeyPatch()  # never undone: the process is the test's own
    monkeypatch.setattr(flight, "_clock", lambda: now[0])

    def wait_and_reduce(*args: Any, **kwargs: Any) -> Any:
        now[0] += 0.0 if rank == 1 else 0.029
        return plain(*args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", wait_and_reduce)

    def chunk(_: int, hidden: torch.Tensor | None) -> torch.Tensor:
        now[0] += 0.03 if rank == 1 else 0.001
        all_reduce(torch.ones(4), topology.tensor)
        return torch.zeros((), requires_grad=True) * 1.0

    executor = Executor(topology, {0: chunk}, "1f1b", 1, (1,), torch.float32)
    stragglers = Stragglers(topology, topology.flight, ["a:cpu", "b:cpu"])
    with stragglers.paused():  # not counted, however long it takes
        executor.train([0, 1])
        executor.train([0, 1])
    for _ in range(2):
        executor.train([0, 1])
    result = stragglers.report(2)
    return None if result is None else result.record


def test_waiting_for_a_slow_rank_does_not_make_a_rank_slow() -> None:
    record, nothing = run_processes(2, measure)
    assert nothing is None
    assert [one["rank"] for one in record["slow"]] == [1] and record["slow"][0]["place"] == "b:cpu"
    assert record["max_ms"] == pytest.approx(60.0)  # two micro-batches of 30 ms; with those paused it would be 120
