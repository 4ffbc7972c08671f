"""Programs over slow links against closed forms, and schedules against the simulator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.schedule import Schedule, build_schedule
from tests.helpers.replay import Action, Compute, Post, Wait, actions_of, replay, simulate


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name, chunks = draw(
        st.sampled_from([("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 3)])
    )
    return build_schedule(name, draw(st.integers(2, 6)), chunks, draw(st.integers(1, 14)))


@given(schedules(), st.integers(1, 4), st.booleans())
def test_without_delay_it_is_the_simulated_step(
    schedule: Schedule, sends_in_flight: int, ahead: bool
) -> None:
    """A step without delay is the simulated one, for any limit on sends.

    Small whole numbers are exact in floating point.

    Receives that are posted late come in another order than they are sent where a pair of ranks
    exchanges both kinds.
    """
    ahead = ahead or schedule.chunks > 1
    actions = actions_of(schedule, sends_in_flight=sends_in_flight, posted_ahead=ahead)
    assert replay(actions).makespan == simulate(schedule).makespan


@given(schedules(), st.sampled_from([0.125, 0.25, 0.5, 1.0, 3.0]))
def test_no_sooner_than_if_messages_travelled_by_themselves(
    schedule: Schedule, latency: float
) -> None:
    """No message arrives sooner than if it travelled by itself.

    The link's time adds at least as much as latency, since messages may queue for it.
    """
    ideal = simulate(schedule, latency=latency).makespan
    by_latency = replay(actions_of(schedule, latency=latency)).makespan
    assert by_latency >= ideal
    assert replay(actions_of(schedule, occupies=latency)).makespan >= by_latency


@pytest.mark.parametrize("size, chunks, micro_batches", [(2, 2, 8), (4, 2, 16), (4, 3, 13)])
@pytest.mark.parametrize("latency", [0.0625, 0.25, 0.5])
def test_interleaved_messages_are_posted_ahead_of_need(
    size: int, chunks: int, micro_batches: int, latency: float
) -> None:
    """A step with passes of equal length takes as long as if no message needed a posted receive."""
    schedule = build_schedule("interleaved", size, chunks, micro_batches)
    assert (
        replay(actions_of(schedule, latency=latency)).makespan
        == simulate(schedule, latency=latency).makespan
    )


@pytest.mark.parametrize("in_flight, end", [(1, 14.0), (2, 11.0), (3, 11.0)])
def test_a_rank_waits_for_the_oldest_of_the_messages_on_their_way(
    in_flight: int, end: float
) -> None:
    """A rank waits for the oldest message in flight.

    Three forward passes of 1 send results that keep the link for 2, arrive 2 later, and are used
    for 1.

    With one in flight each leaves when the one before has arrived: at 1, 5 and 9; the last arrives
    at 13. With more, the first two depart at 1 and 3. The third could depart at 5, but its receive
    is posted after the receiver's first pass, which has its input at 5: it departs at 6 and arrives
    at 10. The sender never waits for more than the first, at 5.
    """
    schedule = build_schedule("1f1b", 2, 1, 3, forward_only=True)
    result = replay(actions_of(schedule, occupies=2.0, latency=2.0, sends_in_flight=in_flight))
    assert result.makespan == end


def test_a_link_carries_one_message_at_a_time_and_another_link_goes_on() -> None:
    """A link carries one message at a time; other links are independent.

    Rank 0 posts a, b, c at 0; rank 1 posts a and b at 1 and c, on a link of its own, at 1.
    """
    messages = [Post("a", "x", 2.0, 5.0), Post("b", "x", 3.0, 5.0), Post("c", "y", 1.0, 0.0)]
    waits: list[Action] = [Wait("c"), Wait("b"), Wait("a")]
    ranks: list[list[Action]] = [
        [*messages, *waits],
        [Compute("late", 1.0), *messages, *waits, Compute("end", 1.0)],
    ]
    result = replay(ranks)
    assert [result.crossings[m][1:] for m in "abc"] == [
        (1.0, 1.0, 8.0),
        (1.0, 3.0, 11.0),
        (1.0, 1.0, 2.0),
    ]
    assert result.ends == (11.0, 12.0)
    assert [(lane.label, lane.start, lane.end) for lane in result.waited[0]] == [
        ("c", 0.0, 2.0),
        ("b", 2.0, 11.0),
    ]
    assert [lane[1:] for lane in result.computed[1]] == [(0.0, 1.0), (11.0, 12.0)]


def test_computing_hides_a_message() -> None:
    """Computing hides a message: 2 + max(3, 4).

    A collective of two ranks takes 3 after 2 of computing, with 4 of computing after it.
    """

    def program(hidden: bool) -> list[list[Action]]:
        message: list[Action] = [Post("sum", "ring", 3.0, 0.0)]
        after: list[Action] = [Compute("after", 4.0)]
        wait: list[Action] = [Wait("sum")]
        return [
            [Compute("before", 2.0), *message, *(after + wait if hidden else wait + after)]
            for _ in range(2)
        ]

    assert replay(program(hidden=True)).makespan == 6
    assert replay(program(hidden=False)).makespan == 9


def test_a_deadlock_is_reported() -> None:
    ranks: list[list[Action]] = [
        [Post("a", 0, 0.0, 0.0), Wait("a"), Post("b", 1, 0.0, 0.0)],
        [Post("b", 1, 0.0, 0.0), Wait("b"), Post("a", 0, 0.0, 0.0)],
    ]
    with pytest.raises(ValueError, match="0 .* a.* 1 .* b"):
        replay(ranks)
