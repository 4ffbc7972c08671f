"""The clock, against closed forms, bounds, and a second implementation."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline import clock
from megatron.pipeline import schedule as schedule_module
from megatron.pipeline.clock import (
    Boundaries,
    Pipeline,
    StageTimes,
    run_pipeline,
    timeline,
)
from megatron.pipeline.orders import Op
from tests.helpers.replay import run_lists


def even(stages, forward=1.0, backward=2.0, weight=0.0):
    return StageTimes((forward,) * stages, (backward,) * stages, (weight,) * stages)


def in_python(patch):
    """Make tests/helpers/replay.py run the lists in place of csrc/schedule_clock.cpp."""
    for module in (schedule_module, clock):
        patch.setattr(module, "run", run_lists)
    for cached in (clock._small_lists, clock._large_lists, clock.timeline):
        cached.cache_clear()


# Closed forms, with whole numbers of ticks: exact.


@pytest.mark.parametrize("size, m", [(1, 5), (3, 2), (5, 33)])
@pytest.mark.parametrize("forward, backward", [(1.0, 2.0), (5.0, 1.0)])
def test_1f1b(size, m, forward, backward):
    """1F1B takes (m + p - 1)(t_f + t_b): Narayanan et al., arXiv 2104.04473, section 2.2.1."""
    run = run_pipeline(Pipeline("1f1b", size, 1, m, even(size, forward, backward)))
    assert run.makespan == (m + size - 1) * (forward + backward)
    assert run.busy == (m * (forward + backward),) * size
    assert run.bubble_fraction == pytest.approx((size - 1) / (m + size - 1), abs=1e-12)


@pytest.mark.parametrize("size, chunks, m", [(2, 2, 2), (2, 3, 7), (4, 2, 8), (3, 4, 11)])
@pytest.mark.parametrize("forward, backward", [(1.0, 2.0), (2.0, 2.0)])
def test_interleaved(size, chunks, m, forward, backward):
    """The bubble is (p - 1)(t_f + t_b) of one chunk, here for any m >= p.

    Source: section 2.2.2 of the same.
    """
    times = even(size * chunks, forward, backward)
    run = run_pipeline(Pipeline("interleaved", size, chunks, m, times))
    assert run.message_wait == (0.0,) * size
    assert run.makespan == (m * chunks + size - 1) * (forward + backward)


@pytest.mark.parametrize("size, more", [(2, 0), (3, 4), (4, 0), (6, 9)])
@pytest.mark.parametrize(
    "forward, backward, weight", [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (3.0, 3.0, 2.0)]
)
def test_zb_h1(size, more, forward, backward, weight):
    """The bubble is (p - 1)(t_f + t_b - t_w), with enough micro-batches.

    Source: Qi et al., arXiv 2401.10241, table 2.
    """
    m = 2 * size + more
    run = run_pipeline(Pipeline("zb-h1", size, 1, m, even(size, forward, backward, weight)))
    assert run.makespan == m * (forward + backward + weight) + (size - 1) * (
        forward + backward - weight
    )


@pytest.mark.parametrize("size, m", [(2, 4), (6, 12), (7, 33)])
def test_orders_in_the_shape_of_a_v(size, m):
    """ZB-V and DualPipeV have a sixth of the bubble B of 1F1B, V-half a half, V-min two thirds.

    These are the passes that fill the pipeline, and Qi et al., arXiv 2405.15362, section 3. V-half
    with an odd number of ranks has a little less, V-min a few passes more or less.
    """

    def bubble(name):
        return run_pipeline(Pipeline(name, size, 2, m, even(2 * size, 1, 1, 1))).makespan - 6 * m

    # under 1F1B a pass takes two ticks
    of_1f1b = run_pipeline(Pipeline("1f1b", size, 1, m, even(size, 2, 4))).makespan - 6 * m
    assert bubble("zb-v") == bubble("dualpipev") == of_1f1b / 6 == size - 1
    assert bubble("v-half") == of_1f1b / 2 - 2 * (size % 2)
    assert bubble("v-min") == of_1f1b * 2 / 3 + (-1 if size % 3 else 1)


positive = st.integers(1, 6).map(float)


@given(st.integers(2, 6), st.integers(1, 20), positive, positive, positive)
def test_bounds_of_zb_h1(size, m, forward, backward, weight):
    """ZB-H1 is never slower than 1F1B with an undivided backward pass, nor faster than the bounds.

    The bounds are the first micro-batch's way there and back, and the last rank's work behind p - 1
    forward passes.
    """
    undivided = run_pipeline(
        Pipeline("1f1b", size, 1, m, even(size, forward, backward + weight))
    ).makespan
    run = run_pipeline(Pipeline("zb-h1", size, 1, m, even(size, forward, backward, weight)))
    least = max(
        size * (forward + backward) + weight,
        (size - 1) * forward + m * (forward + backward + weight),
    )
    assert least <= run.makespan <= undivided


def test_one_micro_batch_pays_for_each_boundary_twice():
    """One micro-batch crosses each boundary twice, with nothing else to do meanwhile."""
    there = ((1.0, 0.5), (2.0, 0.25), (4.0, 0.125), (9.0, 9.0))
    back = ((9.0, 9.0), (8.0, 1.0), (16.0, 2.0), (32.0, 4.0))
    run = run_pipeline(Pipeline("1f1b", 4, 1, 1, even(4), Boundaries(there, back)))
    assert run.makespan == run.ends[0] == 4 * 3 + 7.875 + 63
    assert run.first_forward_start == (0.0, 2.5, 5.75, 10.875)
    assert run.last_backward_start == (11.875 + 6 + 63, 11.875 + 4 + 54, 11.875 + 2 + 36, 11.875)
    # The last receive, and the last send: a rank is done when that has arrived.
    assert run.message_wait == (9.0, 1.5 + 18 + 9, 2.25 + 36 + 18, 4.125 + 36)


def test_the_link_is_the_pace_where_messages_take_longest():
    """The link sets the pace where messages take longest.

    The first two activations arrive at 6 and 11. Each further receive is posted behind the forward
    pass before it, which ends 1 after that pass's input arrives: one arrives every 6, the last at
    71, and is used for 1 + 1 + 1.
    """
    free = ((0.0, 0.0),) * 2
    slow = ((5.0, 0.0),) * 2
    run = run_pipeline(Pipeline("1f1b", 2, 1, 12, even(2, 1.0, 1.0), Boundaries(slow, free)))
    assert run.makespan == 74
    assert run.message_wait[1] == 5 + 3 + 10 * 4
    # Where one link carries both directions, its 24 messages are serialised, two passes before and
    # one behind.
    one, two = (
        run_pipeline(Pipeline("1f1b", 2, 1, 12, even(2, 1.0, 1.0), Boundaries(slow, slow, duplex)))
        for duplex in (False, True)
    )
    assert one.makespan >= 1 + 24 * 5 + 1 > two.makespan


# In C++ and in Python.


def stage_times(draw, stages):
    def of_stages():
        return tuple(draw(st.lists(time, min_size=stages, max_size=stages)))

    time = st.sampled_from([1.0, 1.0, 1.5, 0.1, 2.7, 1 / 3])
    return StageTimes(
        of_stages(), of_stages(), of_stages(), of_stages() if draw(st.booleans()) else ()
    )


def message_times(draw, stages):
    def of_stages():
        return tuple(draw(st.lists(st.tuples(cost, cost), min_size=stages, max_size=stages)))

    cost = st.sampled_from([0.0, 0.05, 0.3, 1.1])
    return (
        Boundaries(of_stages(), of_stages(), draw(st.booleans())) if draw(st.booleans()) else None
    )


@st.composite
def pipelines(draw, most=40):
    name, chunks = draw(
        st.sampled_from([("1f1b", 1), ("zb-h1", 1), ("interleaved", 3), ("v-min", 2), ("zb-v", 2)])
    )
    size = draw(st.integers(1, 6))
    m = draw(st.integers(1, most))
    stages = size * chunks
    return Pipeline(name, size, chunks, m, stage_times(draw, stages), message_times(draw, stages))


@given(pipelines(most=24))
def test_both_give_the_same_ticks(pipeline):
    run = run_pipeline(pipeline)
    lanes = timeline(run)
    with pytest.MonkeyPatch.context() as patch:
        in_python(patch)
        assert run_pipeline(pipeline) == run
        assert timeline(run) == lanes


@given(pipelines(), st.sampled_from([0.7, 1.0, 2.3, 50.0]), st.sampled_from([0.5, 1.0, 1.7]))
def test_both_share_cores_alike(pipeline, cores, demand):
    pipeline = dataclasses.replace(pipeline, cores=cores, demand=demand)
    run = run_pipeline(pipeline)
    with pytest.MonkeyPatch.context() as patch:
        in_python(patch)
        expected = run_pipeline(pipeline)
    for name in ("busy", "waited", "message_wait", "ends", "last_backward_start"):
        assert getattr(run, name) == pytest.approx(getattr(expected, name), rel=1e-9, abs=1e-9)


@given(pipelines(most=24))
def test_what_holds_of_every_step(pipeline):
    run = run_pipeline(pipeline)
    spans = timeline(run).ranks
    near = 1e-9
    for rank, of_rank in enumerate(spans):
        assert run.busy[rank] == pytest.approx(sum(span.end - span.start for span in of_rank))
        assert run.busy[rank] + run.waited[rank] == pytest.approx(run.ends[rank])
        assert -near <= run.message_wait[rank] <= run.waited[rank] + near
        assert run.ends[rank] <= run.makespan + near and of_rank[-1].end <= run.ends[rank] + near
        assert all(before.end <= after.start for before, after in pairwise(of_rank))
    assert run.makespan == pytest.approx(max(of_rank[-1].end for of_rank in spans))
    passes = [span for of_rank in spans for span in of_rank]
    for stage in range(pipeline.size * pipeline.chunks):
        of_stage = [span for span in passes if span.instruction.stage == stage]
        assert run.first_forward_start[stage] == pytest.approx(min(span.start for span in of_stage))
        gives = [s for s in of_stage if s.instruction.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)]
        assert run.last_backward_end[stage] == pytest.approx(max(span.end for span in gives))
        assert run.last_backward_start[stage] == pytest.approx(max(span.start for span in gives))


def test_the_first_forward_pass_may_take_longer():
    times = dataclasses.replace(even(2), first=(3.0, 20.0))
    run = run_pipeline(Pipeline("1f1b", 2, 1, 4, times))
    # The second stage waits for the first one's first pass, then takes 21; nothing waits for
    # anything else.
    assert run.makespan == 4 + 21 + 2 + 3 * 3 + 2
    assert run.busy == (4 * 3 + 3, 4 * 3 + 20)
    assert (
        run_pipeline(
            Pipeline("zb-h1", 1, 1, 3, StageTimes((1.0,), (1.0,), (2.0,), (5.0,)))
        ).makespan
        == 3 * 4 + 5
    )


@pytest.mark.parametrize(
    "passes",
    [
        [[(1, 0, 0), (0, 0, 0)], [(0, 1, 0), (1, 1, 0)]],  # backward before forward
        [[(0, 0, 0), (1, 0, 0)], [(0, 2, 0), (1, 2, 0)]],  # no rank has stage 1
        [[(9, 0, 0)], [(0, 1, 0)]],
        [[(0, 0, -1)], [(0, 1, 0)]],
    ],
)
def test_lists_that_cannot_be_run_are_refused(passes):
    micro_batches = 1 + max(i for rank in passes for *_, i in rank)
    lists = schedule_module.Lists.of([np.array(rank) for rank in passes], micro_batches)
    free = [np.zeros((kinds, len(lists.owner)), np.int64) for kinds in (5, 4)]
    with pytest.raises(ValueError):
        schedule_module.run(lists, schedule_module.ScheduleCosts(*free), posted=False)
