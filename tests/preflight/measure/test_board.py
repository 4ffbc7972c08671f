"""Questions and answers over a store: virtual seconds, and answers that come when the test says so."""
from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from megatron.errors import LaunchError
from megatron.parallel.launch import Launch
from megatron.preflight.measure import board
from megatron.preflight.measure.board import Conductor, StoreLostError, Worker, connect_store, serve_store
from tests.helpers.clock import VirtualClock
from tests.helpers.processes import free_port


class Board:
    """A conductor and workers, which answer after so many seconds."""

    def __init__(self) -> None:
        self.store, self.clock = dist.HashStore(), VirtualClock()
        self.conductor = Conductor(self.store, self.clock, self.clock.sleep)
        self.workers: dict[int, Worker] = {}

    def reply(self, rank: int) -> None:
        if rank not in self.workers:
            self.workers[rank] = Worker(self.store, rank, 1500)
        worker = self.workers[rank]
        worker.answer({"was": worker.next_order(60)["task"]})

    def ask(self, delays: dict[int, float | None], limit_s: float, *more: float, task: str = "a") -> tuple[Any, float]:
        """(answers, seconds that the conductor took) where each rank answers after so long; None: never."""
        start = self.clock()
        for rank, delay in delays.items():
            if delay is not None:
                self.clock.at(delay, lambda rank=rank: self.reply(rank))  # type: ignore[misc]
        answers = self.conductor.ask({rank: {"task": f"{task}{rank}"} for rank in delays}, limit_s, *more)
        return answers, self.clock() - start


def test_each_rank_answers_its_own_order() -> None:
    one = Board()
    for task in "ab":
        answers, _ = one.ask({0: 0.1, 1: 0.2, 2: 0.3}, 60.0, task=task)
        assert answers == {rank: {"was": f"{task}{rank}"} for rank in range(3)}
    # More ranks than fit into one request, of which three live.
    many = Board()
    answers, seconds = many.ask({rank: 0.5 if rank in (0, 1100, 1499) else None for rank in range(1500)}, 2.0)
    assert (sorted(answers), seconds) == ([0, 1100, 1499], pytest.approx(2.0, abs=0.01))


def test_a_late_answer_belongs_to_its_own_question() -> None:
    one = Board()
    assert sorted(one.ask({0: 0.1, 1: 1.5}, 1.0)[0]) == [0]
    assert one.ask({0: 1.0}, 60.0, task="b")[0] == {0: {"was": "b0"}}  # that of rank 1 comes meanwhile
    assert one.ask({1: 0.1}, 60.0, task="c")[0] == {1: {"was": "c1"}}


@pytest.mark.parametrize(("delays", "limits", "came", "seconds"), [
    # With patience: twice the time of the last one and 30 s, but not beyond the third number.
    ([1.0, 31.0], (1.5, 30.0, 200.0), 2, 31.0), ([1.0, 33.0], (1.5, 30.0, 200.0), 1, 32.0),
    ([1.0, 20.0], (1.5, 30.0, 10.0), 1, 10.0),
    # Without: stragglers get four times what nine of ten took, and 10 s at least.
    ([0.5] * 9 + [9.0], (3600.0,), 10, 9.0), ([0.5] * 9 + [11.0], (3600.0,), 9, 10.0),
    ([5.0] * 9 + [19.0], (3600.0,), 10, 19.0), ([5.0] * 9 + [21.0], (3600.0,), 9, 20.0),
    ([0.5] * 8 + [300.0] * 2, (3600.0,), 10, 300.0),  # too few to say what is usual
])  # fmt: skip
def test_who_is_waited_for(delays: list[float], limits: tuple[float, ...], came: int, seconds: float) -> None:
    answers, took = Board().ask(dict(enumerate(delays)), *limits)
    assert (len(answers), took) == (came, pytest.approx(seconds, abs=0.5))


def test_a_rank_that_two_processes_claim() -> None:
    store = dist.HashStore()
    Worker(store, 3, 8)
    with pytest.raises(LaunchError, match="rank 3"):
        Worker(store, 3, 8)


def test_rank_0_that_asks_nothing_hangs_or_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As real seconds: none of these can come, however long one waits."""
    worker = Worker(dist.HashStore(), 0, 8)
    with pytest.raises(StoreLostError, match=r"0\.05 s"):
        worker.next_order(0.05)
    port = free_port()
    with pytest.raises(StoreLostError, match=f"127.0.0.1:{port}"):
        connect_store(Launch(rank=1, world_size=2), port, 0.05)
    monkeypatch.setattr(board, "_PROBE_S", 0.05)
    worker._slice_s = 0.05
    monkeypatch.setattr(dist.HashStore, "wait", lambda *_: threading.Event().wait())
    with pytest.raises(StoreLostError, match="store"):
        worker.next_order(3600.0)


def test_a_port_that_is_taken() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with pytest.raises(LaunchError, match=f"n1.*{server.port}"):
        serve_store(Launch(world_size=2, master_port=server.port, node="n1"), 5.0)
