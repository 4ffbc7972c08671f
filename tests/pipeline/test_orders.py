"""User-defined order function: run like any other, or refused with a reason."""

import numpy as np
import pytest

from megatron.errors import ConfigError
from megatron.pipeline.clock import Pipeline, StageTimes, run_pipeline
from megatron.pipeline.orders import (
    ORDERS,
    SCHEDULES,
    SENDS_IN_FLIGHT,
    Instruction,
    Op,
    group_sizes,
    passes_of_rank,
)
from megatron.pipeline.schedule import build_rank_schedule, build_schedule, moments_of_rank
from tools.show_schedule import peak_activations


def gpipe(pipeline_size, chunks, micro_batches, rank):
    """Return all forward passes, then all backward passes from the last micro-batch on."""
    each = [
        (chunk * pipeline_size + rank, i) for chunk in range(chunks) for i in range(micro_batches)
    ]
    forward = [Instruction(Op.FORWARD, *of) for of in each]
    return forward + [Instruction(Op.BACKWARD, *of) for of in reversed(each)]


def split_late(pipeline_size, chunks, micro_batches, rank):
    """Return 1F1B for one micro-batch at a time, with all weight gradients at the end."""
    order = []
    for i in range(micro_batches):
        order += [Instruction(op, rank, i) for op in (Op.FORWARD, Op.BACKWARD_INPUT)]
    return order + [Instruction(Op.BACKWARD_WEIGHT, rank, i) for i in range(micro_batches)]


def whole_v(pipeline_size, chunks, micro_batches, rank):
    """Return V-half with whole backward passes: an order that places its stages itself."""
    rows = passes_of_rank("v-half", pipeline_size, chunks, micro_batches, rank)
    split = rows[rows[:, 0] < Op.BACKWARD_WEIGHT]
    return np.where(split == [Op.BACKWARD_INPUT, -1, -1], [Op.BACKWARD, -1, -1], split)


whole_v.stage_owners = lambda size, chunks: [*range(size), *reversed(range(size))]


def test_the_step_of_an_order_of_ones_own():
    """A step of GPipe takes (m + p - 1)(t_f + t_b): Huang et al., arXiv 1811.06965.

    One micro-batch at a time takes m p of them, except for the weight gradients: those are computed
    while other ranks work, and m of them on the first rank at the end.
    """
    ones = (1.0,) * 4
    run = run_pipeline(Pipeline(gpipe, 4, 1, 6, StageTimes(ones, (2.0,) * 4)))
    assert run.makespan == (6 + 3) * 3
    assert run.busy == (18.0,) * 4
    assert (
        run_pipeline(Pipeline(split_late, 4, 1, 6, StageTimes(ones, ones, ones))).makespan
        == 6 * 8 + 6
    )
    assert (
        run_pipeline(Pipeline(gpipe, 1, 2, 3, StageTimes((1.0, 1.0), (2.0, 2.0)))).makespan
        == 3 * 2 * 3
    )


@pytest.mark.parametrize("chunks", [1, 3])
def test_what_ranks_hold_and_send(chunks):
    schedule = build_schedule(gpipe, 4, chunks, 5)
    assert schedule.name == "gpipe"
    assert peak_activations(schedule) == (5 * chunks,) * 4
    for rank in range(4):
        moments = moments_of_rank(gpipe, 4, chunks, 5, rank)
        assert (moments.in_flight + moments.waiting).sum(axis=1).max() + 1 == 5 * chunks
        assert build_rank_schedule(gpipe, 4, chunks, 5, rank) == schedule[rank]
    waiting = moments_of_rank(split_late, 4, 1, 5, 2)
    assert waiting.in_flight.max() == 0 and waiting.waiting.max() == 4


def test_results_for_the_same_rank_are_kept_until_they_are_used():
    """The last rank of a V with GPipe's order keeps all results before its second stage uses one.

    Its first pass there has taken one of five; sends in flight come to those of its backward passes.
    """

    def folded(size, chunks, micro_batches, rank):
        op, stage, micro_batch = np.array(gpipe(size, chunks, micro_batches, rank)).T
        stage = np.where(stage < size, stage, 2 * size - 1 - rank)
        return np.stack([op, stage, micro_batch], axis=1)

    folded.stage_owners = whole_v.stage_owners
    messages = moments_of_rank(folded, 2, 2, 5, 1).messages
    assert (messages[5], messages[15]) == (4, 4 + SENDS_IN_FLIGHT)


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_name_is_its_function(forward_only):
    def named(p, v, m, rank):
        return passes_of_rank("interleaved", p, v, m, rank)

    expected = build_schedule("interleaved", 3, 2, 7, forward_only)
    assert build_schedule(named, 3, 2, 7, forward_only).ranks == expected.ranks


def changed(change):
    return lambda p, v, m, rank: change(gpipe(p, v, m, rank)) if rank == 1 else gpipe(p, v, m, rank)


@pytest.mark.parametrize(
    "change",
    [
        lambda order: order[:-1],
        lambda order: [*order, order[-1]],
        lambda order: list(reversed(order)),
        lambda order: [*order, Instruction(Op.BACKWARD_WEIGHT, 1, 0)],
        lambda order: [order[0]._replace(micro_batch=3), *order[1:]],
        lambda order: [
            Instruction(Op.BACKWARD_WEIGHT, 1, 2),
            *order[:-1],
            Instruction(Op.BACKWARD_INPUT, 1, 2),
        ],
        lambda order: [],
    ],
)
def test_passes_that_are_not_the_ranks_are_refused(
    change,
):
    with pytest.raises(ConfigError, match="rank 1 of 2"):
        build_schedule(changed(change), 2, 1, 3)


@pytest.mark.parametrize(
    "owners", [[0, 1, 1], [0, 0, 0, 1], [0, 1, 2, 1], [0.0, 1.0, 1.5, 0.5], list("0110"), None]
)
def test_a_rank_without_its_chunks_is_refused(owners):
    def misplaced(*sizes):
        return gpipe(*sizes)

    misplaced.stage_owners = lambda size, chunks: owners
    with pytest.raises(ConfigError, match="misplaced"):
        build_schedule(misplaced, 2, 2, 3)


def test_ranks_that_wait_for_each_other_are_refused():
    """Ranks that wait for each other are refused.

    The second rank wants the last micro-batch first, which the first rank only has after a backward
    pass.
    """

    def one_at_a_time(p, v, m, rank):
        each = range(m) if rank == 0 else reversed(range(m))
        return [Instruction(op, rank, i) for i in each for op in (Op.FORWARD, Op.BACKWARD)]

    with pytest.raises(ConfigError, match="one_at_a_time"):
        build_schedule(one_at_a_time, 2, 1, 3)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p, m", [(2, 31), (4, 61), (5, 34), (8, 95)])
def test_what_a_long_step_holds_is_what_its_first_groups_hold(name, p, m):
    """Memory of a long step equals that of its first groups.

    It is counted over few groups of micro-batches of each size.
    """
    least, most = ORDERS[name].chunks
    chunks = min(least + 1, most)
    assert len(group_sizes(p, m)) >= 6

    def custom(p, v, m, rank):
        return passes_of_rank(name, p, v, m, rank)

    custom.stage_owners = ORDERS[name].places
    for rank in range(p):
        short, long = (
            {tuple(row) for row in np.column_stack([o, c, n, h, w]).tolist()}
            for o, c, h, w, n in (moments_of_rank(of, p, chunks, m, rank) for of in (name, custom))
        )
        assert short == long
