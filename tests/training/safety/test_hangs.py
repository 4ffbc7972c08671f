"""The culprit by the observed states of ranks, for known cases."""

from __future__ import annotations

from megatron.parallel.flight import KINDS, FlightState, PendingCall
from megatron.parallel.host_processes import GONE, STOPPED
from megatron.parallel.layout import Layout
from megatron.training.safety.watchdog import judge, report

LIMIT = 30.0


def seen(
    rank: int,
    call: PendingCall | None = None,
    quiet_s: float = 40.0,
    process: str = "sleeping",
    stack: str = "loop.py:1 train",
    **posted: int,
) -> FlightState:
    return FlightState(
        rank,
        100 + rank,
        1,
        f"n{rank // 2}:cuda:{rank % 2}",
        16,
        "training",
        "FORWARD of stage 0, micro-batch 2",
        call,
        quiet_s,
        [posted.get(kind, 0) for kind in KINDS],
        1,
        stack,
        process,
    )


def receive(peer: int) -> PendingCall:
    return PendingCall("receive", "pipeline", peer, 64, 0)


def collective(kind: str, number: int, name: str = "all_reduce", size: int = 8) -> PendingCall:
    return PendingCall(name, kind, -1, size, number)


def test_the_end_of_a_chain_of_waits_is_at_fault() -> None:
    layout = Layout(pipeline=4)
    ranks = {0: seen(0, receive(1)), 1: seen(1, receive(2)), 3: seen(3, receive(2))}
    ranks[2] = seen(2, process=STOPPED)
    verdict = judge(ranks, layout, LIMIT)
    assert verdict is not None and verdict.culprits == [2]
    names = ("rank 2", "n1:cuda:0", "SIGSTOP", "17", "FORWARD", "micro-batch 2", "40 s", "0-1, 3")
    assert all(name in verdict.conclusion for name in names)


def test_who_has_not_come_to_a_collective_is_at_fault() -> None:
    layout = Layout(data=4)
    ranks = {r: seen(r, collective("data", 5), data=5) for r in (0, 1, 3)}
    ranks[2] = seen(2, data=4, stack="train.py:1 main\ndata.py:7 read")
    verdict = judge(ranks, layout, LIMIT)
    assert verdict is not None and verdict.culprits == [2]
    assert "data.py:7" in verdict.conclusion and "0-1, 3" in verdict.conclusion


def test_who_is_at_work_is_waited_for() -> None:
    layout = Layout(data=2)
    ranks = {0: seen(0, collective("data", 5), data=5), 1: seen(1, quiet_s=10.0, data=4)}
    assert judge(ranks, layout, LIMIT) is None


def test_a_rank_that_stopped_a_moment_ago_is_given_its_time_but_one_that_died_is_not() -> None:
    layout = Layout(data=2)
    waiting = seen(0, collective("data", 5), data=5)
    for process, hang in ((STOPPED, False), (GONE, True)):
        ranks = {0: waiting, 1: seen(1, quiet_s=10.0, process=process, data=4)}
        assert (judge(ranks, layout, LIMIT) is not None) == hang


def test_a_node_without_a_sign_of_life_is_named_by_its_places() -> None:
    layout = Layout(data=4)
    ranks = {r: seen(r, collective("world", 9), world=9) for r in (0, 1)}
    verdict = judge(ranks, layout, LIMIT, ["", "", "n7:cuda:0", "n7:cuda:1"])
    assert verdict is not None and verdict.culprits == [2, 3]
    assert "2-3" in verdict.conclusion and "n7" in verdict.conclusion


def test_a_lost_process_explains_more_than_one_that_is_stuck() -> None:
    """A lost process explains more than a stuck one.

    The latter may wait, in an unrecorded call, for the lost one.
    """
    layout = Layout(data=3)
    ranks = {
        0: seen(0, collective("data", 5), data=5),
        1: seen(1, data=4),
        2: seen(2, process=STOPPED, data=4),
    }
    verdict = judge(ranks, layout, LIMIT)
    assert verdict is not None and verdict.culprits == [2]


def test_different_calls_under_one_number() -> None:
    layout = Layout(data=2)
    ranks = {
        0: seen(0, collective("data", 5), data=5),
        1: seen(1, collective("data", 5, "reduce", 4), data=5),
    }
    verdict = judge(ranks, layout, LIMIT)
    assert verdict is not None and verdict.culprits == [0, 1]
    assert all(
        name in verdict.conclusion
        for name in ("all_reduce", "8 bytes", " reduce", "4 bytes", "number 5")
    )


def test_a_circle_of_waits() -> None:
    layout = Layout(pipeline=3)
    ranks = {0: seen(0, receive(1)), 1: seen(1, receive(2)), 2: seen(2, receive(1))}
    verdict = judge(ranks, layout, LIMIT)
    assert verdict is not None and verdict.culprits == [1, 2]
    assert all(name in verdict.conclusion for name in ("rank 1", "rank 2", "receive", "64 bytes"))


def test_a_collective_that_all_have_entered_and_none_leaves() -> None:
    layout = Layout(data=2)
    ranks = {r: seen(r, collective("data", 5), data=5) for r in (0, 1)}
    verdict = judge(ranks, layout, LIMIT)
    assert verdict is not None and verdict.culprits == [0, 1]
    ranks[1] = seen(1, collective("data", 5), quiet_s=1.0, data=5)  # it has only just arrived
    assert judge(ranks, layout, LIMIT) is None


def test_a_rank_that_nobody_waits_for_yet_hangs_too() -> None:
    layout = Layout(data=2)
    ranks = {0: seen(0, quiet_s=1.0), 1: seen(1)}
    verdict = judge(ranks, layout, LIMIT)
    assert verdict is not None and verdict.culprits == [1]


def test_the_report_puts_equal_stacks_together_and_survives_the_store() -> None:
    layout = Layout(data=4)
    stack = "loop.py:1 train\n\nthread x: y.py:2 z"
    ranks = {r: seen(r, collective("data", 5), data=5, stack=stack) for r in (0, 1, 3)}
    ranks[2] = seen(2, process=STOPPED, stack="", data=4)
    ranks = {rank: FlightState.from_json(of.to_json()) for rank, of in ranks.items()}
    verdict = judge(ranks, layout, LIMIT)
    assert verdict is not None
    text = report(verdict, ranks, layout)
    (line,) = [line for line in text.splitlines() if line.startswith("  rank 0: ")]
    assert all(
        part in line
        for part in ("17", "FORWARD", "micro-batch 2", "all_reduce", "number 5", "rank 2")
    )
    assert text.count("loop.py:1 train") == 1 and "n1:cuda:0" in text
