"""Order lists of torch.distributed.pipelining on our clock: our schedules and others."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from megatron.pipeline import schedule as schedule_module
from megatron.pipeline.clock import Boundaries, Pipeline, StageTimes, run_pipeline
from tests.pipeline.test_torch_orders import executed_order, fake_stage

Lists = list[list[tuple[int, int, int]]]  # of each rank (number of the op, stage, micro-batch)
OP = {"F": 0, "B": 1, "I": 2, "W": 3}


def torch_lists(
    name: str, size: int, chunks: int, micro_batches: int
) -> tuple[Lists, list[int], list[int]]:
    """Return torch's lists: passes of each rank, rank of each stage, slots of each rank's table.

    Empty slots are included.
    """
    stages = [fake_stage(0, size, size * chunks) for _ in range(chunks)]
    v_shaped = name == "ScheduleZBVZeroBubble"
    for chunk, stage in enumerate(stages):
        stage.stage_index = 2 * size - 1 if v_shaped and chunk else chunk * size
    single = name == "ScheduleGPipe"
    built = getattr(torch_schedules, name)(stages[0] if single else stages, micro_batches)
    table = [
        [a for a in built.pipeline_order[r] if a is None or a.computation_type.value in OP]
        for r in range(size)
    ]
    owner = (
        list(range(size))
        if single
        else [built.stage_index_to_group_rank[stage] for stage in range(size * chunks)]
    )
    passes = [[a for a in rank if a is not None] for rank in table]
    lists = [
        [(OP[a.computation_type.value], a.stage_index, a.microbatch_index) for a in rank]
        for rank in passes
    ]
    return lists, owner, [len(rank) for rank in table]


def makespan(
    passes: Lists,
    owner: list[int],
    times: StageTimes,
    boundaries: Boundaries | None = None,
    quarters: int = 0,
) -> float:
    """Return a step's time with any lists.

    `quarters` of a forward pass is the latency by which messages are placed.
    """
    with mock.patch.object(schedule_module, "planned_latency", lambda _: quarters / 4):
        placed = schedule_module.with_messages(arrays(passes))
    assert placed.owner.tolist() == owner
    none = (0.0,) * len(owner)
    costs = np.zeros((4, len(owner)))
    if boundaries is not None:
        costs = np.concatenate([np.array(boundaries.forward).T, np.array(boundaries.backward).T])[
            :, owner
        ]
    seconds = np.array([times.forward, times.backward, times.backward, times.weight, none])
    ticks = [np.rint(of * 2.0**40).astype(np.int64) for of in (seconds, costs)]
    return float(schedule_module.run(placed, schedule_module.Costs(*ticks)).done.max()) / 2**40


def arrays(passes: Lists) -> schedule_module.Lists:
    return schedule_module.Lists.of(
        [np.array(rank) for rank in passes], 1 + max(i for rank in passes for *_, i in rank)
    )


def ones(
    stages: int, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0
) -> StageTimes:
    return StageTimes((forward,) * stages, (backward,) * stages, (weight,) * stages)


SIZES = [(2, 4), (3, 6), (4, 12)]


@pytest.mark.parametrize("size, m", SIZES)
@pytest.mark.parametrize("forward, backward", [(1.0, 2.0), (3.0, 1.0)])
def test_gpipe(size: int, m: int, forward: float, backward: float) -> None:
    """GPipe takes (m + p - 1)(t_f + t_b): Huang et al., arXiv 1811.06965.

    Lists are torch's and our own, backward in either order.
    """
    closed_form = (m + size - 1) * (forward + backward)
    theirs, owner, _ = torch_lists("ScheduleGPipe", size, 1, m)
    assert makespan(theirs, owner, ones(size, forward, backward)) == closed_form
    for last_first in (False, True):
        back = range(m)[::-1] if last_first else range(m)
        ours = [
            [(0, rank, i) for i in range(m)] + [(1, rank, i) for i in back] for rank in range(size)
        ]
        assert makespan(ours, owner, ones(size, forward, backward)) == closed_form


@pytest.mark.parametrize("size, m", SIZES)
@pytest.mark.parametrize(
    "name, chunks",
    [("ScheduleLoopedBFS", 2), ("ScheduleInterleavedZeroBubble", 1), ("ScheduleZBVZeroBubble", 2)],
)
def test_tables_in_slots_of_time(name: str, chunks: int, size: int, m: int) -> None:
    """A step lasts as long as the longest row of torch's table.

    The table has a slot for each pass and an empty one for each wait.

    (This needs enough micro-batches. torch's table of interleaved 1F1B has empty slots that nothing
    waits for.)
    """
    lists, owner, slots = torch_lists(name, size, chunks, m)
    assert makespan(lists, owner, ones(size * chunks)) == max(slots)


UNEVEN = [1.0, 1.25, 0.75, 1.5, 1.0, 2.0, 0.5, 1.0]
COSTS = [None, (0.0, 0.125), (0.25, 0.0625)]


def uneven(stages: int) -> StageTimes:
    forward = tuple(UNEVEN[stage % 8] for stage in range(stages))
    return StageTimes(
        forward, tuple(2 * time for time in forward), tuple(time + 0.25 for time in forward)
    )


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("size, more", [(2, 0), (3, 5), (4, 4)])
def test_their_lists_take_the_time_of_ours(
    size: int, more: int, cost: tuple[float, float] | None
) -> None:
    m = size + more
    boundaries = None if cost is None else Boundaries((cost,) * size, (cost,) * size)
    called = [
        [(OP[op], stage, i) for op, stage, i in executed_order(rank, size, m)]
        for rank in range(size)
    ]
    ours = run_pipeline(Pipeline("1f1b", size, 1, m, uneven(size), boundaries)).makespan
    assert makespan(called, list(range(size)), uneven(size), boundaries) == ours
    split, owner, _ = torch_lists("ScheduleInterleavedZeroBubble", size, 1, m)
    ours = run_pipeline(Pipeline("zb-h1", size, 1, m, uneven(size), boundaries)).makespan
    assert makespan(split, owner, uneven(size), boundaries) == ours


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("size, chunks, rounds", [(2, 2, 1), (2, 3, 4), (4, 2, 2)])
def test_their_interleaved_list_too(
    size: int, chunks: int, rounds: int, cost: tuple[float, float] | None
) -> None:
    m, stages = size * rounds, size * chunks
    boundaries = None if cost is None else Boundaries((cost,) * size, (cost,) * size)
    lists, owner, _ = torch_lists("ScheduleInterleaved1F1B", size, chunks, m)
    ours = run_pipeline(
        Pipeline("interleaved", size, chunks, m, uneven(stages), boundaries)
    ).makespan
    assert makespan(lists, owner, uneven(stages), boundaries, quarters=1) == ours


@pytest.mark.parametrize(
    "passes",
    [
        [[(1, 0, 0), (0, 0, 0)], [(0, 1, 0), (1, 1, 0)]],  # backward before forward
        [[(0, 0, 0), (1, 0, 0)], [(0, 2, 0), (1, 2, 0)]],  # no rank has stage 1
        [[(9, 0, 0)], [(0, 1, 0)]],
        [[(0, 0, -1)], [(0, 1, 0)]],
    ],
)
def test_lists_that_cannot_be_run_are_refused(passes: Lists) -> None:
    placed = arrays(passes)
    free = schedule_module.Costs(
        *(np.zeros((kinds, len(placed.owner)), np.int64) for kinds in (5, 4))
    )
    with pytest.raises(ValueError):
        schedule_module.run(placed, free, posted=False)
