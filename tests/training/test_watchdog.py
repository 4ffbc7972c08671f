"""Jobs of real processes that hang: who is at fault is named, and all end with the exit code of a hang."""
from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.failures import EXIT_LOST_RANK
from megatron.training.watchdog import REPORT_NAME
from tests.helpers.processes import run_processes_raw
from tests.training.hanging_ranks import train, train_on_two_nodes

ENDED = f"ended with exit code {EXIT_LOST_RANK} and no result"
KILLED = "ended with exit code -9 and no result"


def hang(tmp_path: Path, n: int, tensor: int, pipeline: int, victim: int, way: str) -> tuple[str, list[str]]:
    """The report, and how each rank ended."""
    outcomes = run_processes_raw(n, train, tensor, pipeline, victim, way, str(tmp_path))
    path = tmp_path / REPORT_NAME
    return path.read_text() if path.exists() else "", [str(value) for _, value in outcomes]


@pytest.mark.parametrize(
    ("n", "tensor", "pipeline", "victim", "words"),
    [
        (3, 1, 3, 1, "ranks 0, 2 wait for it"),
        (3, 1, 1, 2, "ranks 0-1 wait for it"),
        (4, 2, 1, 3, "ranks 0-2 wait for it"),
        (3, 1, 3, 0, "ranks 1-2 wait for it"),  # which serves the store
    ],
    ids=["pipeline", "data", "tensor", "store"],
)
def test_a_stopped_rank_is_named(tmp_path: Path, n: int, tensor: int, pipeline: int, victim: int, words: str) -> None:
    text, ends = hang(tmp_path, n, tensor, pipeline, victim, "stop")
    conclusion = text.splitlines()[0]
    assert f"rank {victim} (" in conclusion and "is stopped (SIGSTOP) since step 4, in FORWARD" in conclusion
    assert words in conclusion
    assert text.count("the job hangs") == 1
    assert ends == [KILLED if rank == victim else ENDED for rank in range(n)]


def test_an_endless_loop_is_named_with_its_place(tmp_path: Path) -> None:
    text, ends = hang(tmp_path, 2, 1, 2, 1, "loop")
    conclusion = text.splitlines()[0]
    assert "rank 1 (" in conclusion and "is in no collective and makes no progress" in conclusion
    assert "hanging_ranks.py" in conclusion and "endless_loop" in conclusion
    assert "rank 0: step 4" in text and "receive of 32 bytes from rank 1" in text
    assert "exchange.py" in text.split("Python stacks of rank 0")[1]
    assert ends == [ENDED, ENDED]


def test_a_held_interpreter_is_named_with_its_stack(tmp_path: Path) -> None:
    text, ends = hang(tmp_path, 2, 1, 1, 1, "hold")
    conclusion = text.splitlines()[0]
    assert "rank 1 (" in conclusion and "its Python interpreter is held up" in conclusion
    assert "hold_interpreter" in text.split("Python stacks of rank 1")[1]
    assert ends == [ENDED, KILLED]


def test_a_collective_that_was_left_out_is_named(tmp_path: Path) -> None:
    text, ends = hang(tmp_path, 4, 2, 1, 3, "skip")
    conclusion = text.splitlines()[0]
    assert "ranks wait for each other" in conclusion and "left out" in conclusion
    assert "rank 1 waits in all_reduce of 64 bytes over its data group (number 4) for rank 3" in conclusion
    assert "rank 3 waits in all_reduce of 16 bytes over its world group (number 4) for rank 1" in conclusion
    assert ends == [ENDED] * 4


def hang_on_two_nodes(tmp_path: Path, victims: tuple[int, ...], way: str) -> tuple[list[str], list[str]]:
    """The conclusions, and how each rank ended."""
    outcomes = run_processes_raw(4, train_on_two_nodes, victims, way, str(tmp_path))
    text = (tmp_path / REPORT_NAME).read_text()
    return sorted(line for line in text.splitlines() if "the job hangs" in line), [str(value) for _, value in outcomes]


@pytest.mark.slow
def test_a_node_that_is_silent_as_a_whole_is_named(tmp_path: Path) -> None:
    conclusions, ends = hang_on_two_nodes(tmp_path, (2, 3), "node")
    assert len(conclusions) == 1
    assert "ranks 2-3 (on node1) gave no sign of life, and no rank of its node did" in conclusions[0]
    assert "ranks 0-1 wait for them" in conclusions[0]
    assert ends == [ENDED, ENDED, KILLED, KILLED]


@pytest.mark.slow
def test_each_node_reports_for_itself_where_the_store_is_silent(tmp_path: Path) -> None:
    conclusions, ends = hang_on_two_nodes(tmp_path, (0,), "stop")
    assert ends == [KILLED, ENDED, ENDED, ENDED]
    assert len(conclusions) == 2
    named = [line for line in conclusions if "rank 0 (node0:cpu" in line]
    assert len(named) == 1 and "is stopped (SIGSTOP)" in named[0]
    assert sum("the store, which rank 0 serves, does not answer" in line for line in conclusions) == 1


@pytest.mark.parametrize("way", ["slow", "first"])
def test_a_rank_that_is_slow_but_alive_is_no_hang(tmp_path: Path, way: str) -> None:
    text, ends = hang(tmp_path, 3, 1, 1, 1, way)
    assert text == ""
    assert ends == ["done"] * 3
