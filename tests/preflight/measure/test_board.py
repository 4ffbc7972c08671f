"""Questions and answers over a real store, one thread for each rank."""
from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from megatron.errors import LaunchError
from megatron.parallel.launch import Launch
from megatron.preflight.measure import board
from megatron.preflight.measure.board import Conductor, StoreLostError, Worker, connect_store, serve_store
from tests.helpers.processes import free_port


@pytest.fixture
def server() -> Any:
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def client(server: Any) -> Any:
    return dist.TCPStore("127.0.0.1", server.port, None, is_master=False, wait_for_workers=False)


def answering(server: Any, rank: int, delays: list[float | threading.Event]) -> threading.Thread:
    """A rank that is there, and answers one order after another, after a delay or an event each."""
    there = threading.Event()

    def body() -> None:
        worker = Worker(client(server), rank, 1500)
        there.set()
        for delay in delays:
            order = worker.next_order(200)
            delay.wait() if isinstance(delay, threading.Event) else time.sleep(delay)
            worker.answer({"was": order, "rank": rank})

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    assert there.wait(200)
    return thread


def test_each_rank_gets_its_order_and_only_the_asked_count(server: Any) -> None:
    threads = [answering(server, rank, [0.0, 0.0]) for rank in range(3)]
    conductor = Conductor(server)
    for first in ("a", "b"):
        asked = {rank: {"task": f"{first}{rank}"} for rank in range(3)}
        assert conductor.ask(asked, 200) == {rank: {"was": asked[rank], "rank": rank} for rank in range(3)}
    for thread in threads:
        thread.join()


def test_more_ranks_than_fit_into_one_request(server: Any) -> None:
    """Ranks 0, 1100 and 1499 live."""
    for rank in (0, 1100, 1499):
        answering(server, rank, [0.0])
    answers = Conductor(server).ask({rank: {} for rank in range(1500)}, 2.0)
    assert sorted(answers) == [0, 1100, 1499]


def test_a_late_answer_belongs_to_its_own_question(server: Any) -> None:
    answering(server, 0, [0.0, 0.0])
    asked_again = threading.Event()
    late = answering(server, 1, [asked_again, 0.0])
    conductor = Conductor(server)
    assert sorted(conductor.ask({0: {"task": "a"}, 1: {"task": "a"}}, 1.0)) == [0]
    asked_again.set()
    assert conductor.ask({0: {"task": "b"}}, 200)[0]["was"] == {"task": "b"}
    assert conductor.ask({1: {"task": "c"}}, 200)[1]["was"] == {"task": "c"}
    late.join()


def test_with_patience_those_who_come_twice_as_late_are_waited_for(server: Any) -> None:
    answering(server, 0, [1.0])
    answering(server, 1, [2.0])
    answers = Conductor(server).ask({0: {}, 1: {}}, 1.5, patience_s=30.0, at_most_s=200.0)
    assert sorted(answers) == [0, 1]


def test_stragglers_are_given_up(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_STRAGGLE_S", 0.5)
    for rank in range(9):
        answering(server, rank, [0.0])
    answers = Conductor(server).ask({rank: {} for rank in range(10)}, 3600.0)  # the test's own limit is 300 s
    assert sorted(answers) == list(range(9))


def test_a_rank_that_two_processes_claim(server: Any) -> None:
    Worker(client(server), 3, 8)
    with pytest.raises(LaunchError, match="two processes say they are rank 3"):
        Worker(client(server), 3, 8)


def test_no_order_and_no_server(server: Any) -> None:
    worker = Worker(client(server), 0, 8)
    with pytest.raises(StoreLostError, match="rank 0 is there, but gave no order within 0.3 s"):
        worker.next_order(0.3)
    with pytest.raises(StoreLostError, match="does not reach rank 0's store at 127.0.0.1:"):
        connect_store(Launch(rank=1, world_size=2), free_port(), 0.3)


def test_a_port_that_is_taken(server: Any) -> None:
    with pytest.raises(LaunchError, match=f"cannot serve port {server.port}, perhaps because another run uses it"):
        serve_store(Launch(world_size=2, master_port=server.port, node="n1"), 5.0)
