"""Ranks that share cores: by hand, by conservation of work, and against unshared cores."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.clock import (
    Pipeline,
    StageTimes,
    run_pipeline,
    timeline,
)
from tests.pipeline.test_clock import pipelines


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


@given(pipelines(), st.floats(1.0, 3.0))
def test_enough_cores_are_no_limit(pipeline, demand):
    free = run_pipeline(pipeline)
    enough = run_pipeline(replace(pipeline, cores=demand * pipeline.size, demand=demand))
    assert enough.makespan == pytest.approx(free.makespan, rel=1e-9)
    assert enough.busy == pytest.approx(free.busy, rel=1e-9)
    assert enough.message_wait == pytest.approx(free.message_wait, rel=1e-9, abs=1e-6)


@given(pipelines(), st.floats(0.5, 4.0))
def test_one_rank_at_a_time_keeps_the_cores_busy(pipeline, demand):
    """A computing rank uses all cores, and one always computes without messages.

    The step is all work.
    """
    alone = replace(pipeline, boundaries=None, demand=demand)
    work = sum(run_pipeline(alone).busy)
    for share in (1, 2):
        shared = run_pipeline(replace(alone, cores=demand / share))
        assert shared.makespan == pytest.approx(share * work, rel=1e-9)


@given(pipelines(), st.floats(0.5, 6.0), st.floats(1.0, 2.0))
def test_between_the_work_and_all_of_it_in_turn(pipeline, cores, demand):
    free = run_pipeline(pipeline)
    shared = run_pipeline(replace(pipeline, cores=cores, demand=demand))
    slowest = max(1.0, pipeline.size * demand / cores)
    near = 1 + 1e-9
    assert max(free.makespan, sum(free.busy) * demand / cores) <= shared.makespan * near
    assert shared.makespan <= slowest * free.makespan * near
    for rank, spans in enumerate(timeline(shared).ranks):
        assert all(before.end <= after.start + 1e-12 for before, after in pairwise(spans))
        assert shared.busy[rank] + shared.waited[rank] == pytest.approx(shared.ends[rank])
