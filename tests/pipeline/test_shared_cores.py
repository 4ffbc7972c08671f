"""Ranks that share cores: by hand, by conservation of work, and against unshared cores."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.clock import (
    Boundaries,
    Pipeline,
    StageTimes,
    run_pipeline,
    timeline,
)

pipelines = st.tuples(
    st.sampled_from([("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 3)]),
    st.integers(1, 5),
    st.integers(1, 9),
)
costs = st.sampled_from([None, (0.0, 0.3), (0.4, 0.0), (0.1, 0.1)])


def run(
    pipeline,
    cost=None,
    *,
    cores,
    demand=1.0,
):
    (name, chunks), size, m = pipeline
    stages = size * chunks
    times = StageTimes((1.0,) * stages, (*((1.75,) * (stages - 1)), 2.5), (0.75,) * stages)
    boundaries = Boundaries((cost,) * size, (cost,) * size) if cost else None
    return run_pipeline(
        Pipeline(name, size, chunks, m, times, boundaries, cores=cores, demand=demand)
    )


def test_two_ranks_on_one_core():
    """Two ranks on one core take twice as long while both compute.

    Forward passes take 1 and backward passes 2, in two micro-batches.
    """
    times = StageTimes((1.0, 1.0), (2.0, 2.0))
    one = run_pipeline(Pipeline("1f1b", 2, 1, 2, times, cores=1.0))
    first, second = ([(span.start, span.end) for span in rank] for rank in timeline(one).ranks)
    assert first == [(0, 1), (1, 3), (5, 9), (10, 12)]
    assert second == [(1, 3), (3, 5), (5, 7), (7, 10)]
    assert one.makespan == 12
    assert one.busy == (1 + 2 + 4 + 2, 2 + 2 + 2 + 3)
    assert one.last_backward_end == (12, 10)


@given(pipelines, costs, st.floats(1.0, 3.0))
def test_enough_cores_are_no_limit(pipeline, cost, demand):
    free = run(pipeline, cost, cores=None)
    enough = run(pipeline, cost, cores=demand * pipeline[1], demand=demand)
    assert enough.makespan == pytest.approx(free.makespan, rel=1e-9)
    assert enough.busy == pytest.approx(free.busy, rel=1e-9)
    assert enough.message_wait == pytest.approx(free.message_wait, rel=1e-9, abs=1e-6)


@given(pipelines, st.floats(0.5, 4.0))
def test_one_rank_at_a_time_keeps_the_cores_busy(pipeline, demand):
    """A computing rank uses all cores, and one always computes without messages.

    The step is all work.
    """
    work = sum(run(pipeline, cores=None).busy)
    assert run(pipeline, cores=demand, demand=demand).makespan == pytest.approx(work, rel=1e-9)
    assert run(pipeline, cores=demand / 2, demand=demand).makespan == pytest.approx(
        2 * work, rel=1e-9
    )


@given(pipelines, costs, st.floats(0.5, 6.0), st.floats(1.0, 2.0))
def test_between_the_work_and_all_of_it_in_turn(
    pipeline,
    cost,
    cores,
    demand,
):
    free = run(pipeline, cost, cores=None)
    shared = run(pipeline, cost, cores=cores, demand=demand)
    slowest = max(1.0, pipeline[1] * demand / cores)
    near = 1 + 1e-9
    assert max(free.makespan, sum(free.busy) * demand / cores) <= shared.makespan * near
    assert shared.makespan <= slowest * free.makespan * near
    for rank, spans in enumerate(timeline(shared).ranks):
        assert all(before.end <= after.start + 1e-12 for before, after in pairwise(spans))
        assert shared.busy[rank] + shared.waited[rank] == pytest.approx(shared.ends[rank])
