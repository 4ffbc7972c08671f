"""Simulated step times, against the closed forms of the papers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.clock import Timeline
from megatron.pipeline.orders import Instruction, Op
from megatron.pipeline.schedule import build_schedule
from tests.helpers.replay import simulate


def busy(timeline: Timeline) -> list[float]:
    """Return the computing time of each rank."""
    return [sum(span.end - span.start for span in spans) for spans in timeline.ranks]


def bubble_time(name: str, size: int, chunks: int, micro_batches: int) -> float:
    """Return the waiting time per rank.

    A chunk's forward pass takes 1 and its backward pass 2 (1 + 1 if split).

    Small whole numbers are exact in floating point.
    """
    timeline = simulate(build_schedule(name, size, chunks, micro_batches))
    computing = 3 * micro_batches * chunks
    assert set(busy(timeline)) == {computing}
    assert timeline.bubble_fraction == pytest.approx(1 - computing / timeline.makespan, abs=1e-12)
    return timeline.makespan - computing


@given(st.integers(1, 8), st.integers(1, 24))
def test_1f1b_bubble(size: int, micro_batches: int) -> None:
    """The bubble is (p - 1)(t_f + t_b), a fraction (p - 1) / (m + p - 1) of the step.

    Source: Narayanan et al., section 2.2.1.
    """
    assert bubble_time("1f1b", size, 1, micro_batches) == 3 * (size - 1)
    fraction = simulate(build_schedule("1f1b", size, 1, micro_batches)).bubble_fraction
    assert fraction == pytest.approx((size - 1) / (micro_batches + size - 1), abs=1e-12)


@given(st.integers(2, 8), st.integers(2, 4), st.integers(0, 16))
def test_interleaved_bubble_is_smaller_by_the_number_of_chunks(
    size: int, chunks: int, more: int
) -> None:
    """The interleaved bubble is smaller by the number of chunks (section 2.2.2 of the same).

    This holds for every number of micro-batches from the pipeline's size on.

    The same model without interleaving has one chunk that takes `chunks` times as long.
    """
    in_one_chunk = chunks * bubble_time("1f1b", size, 1, size + more)
    assert chunks * bubble_time("interleaved", size, chunks, size + more) == in_one_chunk


@given(st.integers(2, 8), st.integers(1, 24))
def test_zero_bubble_h1(size: int, micro_batches: int) -> None:
    """The bubble is (p - 1)(t_f + t_b - t_w), a third of 1F1B's, with enough micro-batches.

    Source: Qi et al., table 2. With fewer, the last backward pass of inputs goes down and up the
    pipeline, after m - 1 others on the last rank, and one pass for weights follows it on the first
    rank: 2 p - 2 + 2 m + 1 in all.
    """
    bubble = bubble_time("zb-h1", size, 1, micro_batches)
    assert bubble == max(size - 1, 2 * size - 1 - micro_batches)
    assert bubble < bubble_time("1f1b", size, 1, micro_batches)
    if micro_batches >= size:
        assert 3 * bubble == bubble_time("1f1b", size, 1, micro_batches)


@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 16))
def test_forward_only_has_the_bubble_of_one_fill(
    size: int, chunks: int, micro_batches: int
) -> None:
    name = "interleaved" if chunks > 1 else "1f1b"
    makespan = simulate(
        build_schedule(name, size, chunks, micro_batches, forward_only=True)
    ).makespan
    # With few micro-batches, the next chunk waits until the first one has come round.
    assert makespan == (chunks - 1) * max(size, micro_batches) + micro_batches + size - 1


def test_latency_of_one_micro_batch() -> None:
    """One micro-batch crosses every boundary twice; nothing overlaps."""
    schedule = build_schedule("1f1b", 4, 1, 1)
    assert simulate(schedule, latency=0.5).makespan == 4 * 3 + 6 * 0.5

    def slow_between_1_and_2(send: Instruction) -> float:
        return (
            10.0 if (send.op, send.stage) in ((Op.SEND_FORWARD, 1), (Op.SEND_BACKWARD, 2)) else 0.0
        )

    assert simulate(schedule, latency=slow_between_1_and_2).makespan == 4 * 3 + 20


def test_durations_per_instruction() -> None:
    """A slower last stage sets the pace of all: m passes of it, and the way there and back."""

    def duration(instruction: Instruction) -> float:
        return 5.0 if instruction.stage == 3 else 1.0

    schedule = build_schedule("1f1b", 4, 1, 12)
    timeline = simulate(schedule, duration)
    assert timeline.makespan == 3 + 12 * 10 + 3
    assert busy(timeline) == [24, 24, 24, 120]
    assert timeline.ranks[3][0].start == 3
