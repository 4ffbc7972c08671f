"""Pipeline schedules: which rank computes, sends and receives what, in which order. Pure data;
needs no torch.

>>> for instructions in build_schedule("1f1b", pipeline_size=2, chunks=1, micro_batches=2):
...     print(" ".join(f"{i.op.letters}{i.micro_batch}" for i in instructions))
F0 SF0 F1 SF1 RB0 B0 RB1 B1
RF0 RF1 F0 B0 SB0 F1 B1 SB1
"""

from __future__ import annotations

from functools import lru_cache

from megatron.config.parallel import SCHEDULES
from megatron.errors import ConfigError
from megatron.pipeline.instructions import COMPUTE, RECEIVES, SENDS, Instruction, Op, Schedule
from megatron.pipeline.lists import Lists, with_messages
from megatron.pipeline.orders import (
    ORDERS,
    AnyOrder,
    check_sizes,
    name_of,
    passes_of_rank,
)

__all__ = [
    "SCHEDULES",
    "Instruction",
    "Op",
    "Schedule",
    "build_lists",
    "build_rank_schedule",
    "build_schedule",
    "count_messages",
    "peak_activations",
    "peak_receives",
    "splits_backward",
]


@lru_cache(maxsize=2)  # a large pipeline's lists for all ranks take hundreds of megabytes
def build_schedule(
    name: AnyOrder, pipeline_size: int, chunks: int, micro_batches: int, forward_only: bool = False
) -> Schedule:
    """The instructions of every pipeline rank for one step (or, with `forward_only`, for one
    evaluation).

    name           '1f1b' and 'zb-h1' have one chunk of layers per rank, 'interleaved' two or more.
                   A pipeline of one rank computes micro-batch by micro-batch under any name. Or an
                   order itself (orders.py).
    chunks         chunks (virtual stages) per rank; global stage g is on rank g % pipeline_size.
    micro_batches  any positive number.

    Raises ConfigError for a name, a size or a combination that does not exist, and for an order
    that cannot be run.
    """
    lists = build_lists(name, pipeline_size, chunks, micro_batches, forward_only)
    ranks = tuple(map(lists.instructions, range(pipeline_size)))
    return Schedule(name_of(name), pipeline_size, chunks, micro_batches, forward_only, ranks)


def build_rank_schedule(
    name: AnyOrder,
    pipeline_size: int,
    chunks: int,
    micro_batches: int,
    rank: int,
    forward_only: bool = False,
) -> tuple[Instruction, ...]:
    """`build_schedule(...)[rank]`, with objects for the instructions of this rank only: what a
    running job needs.
    """
    assert 0 <= rank < pipeline_size, f"pipeline rank {rank} of {pipeline_size}"
    return build_lists(name, pipeline_size, chunks, micro_batches, forward_only).instructions(rank)


def build_lists(
    name: AnyOrder, pipeline_size: int, chunks: int, micro_batches: int, forward_only: bool = False
) -> Lists:
    """`build_schedule(...)` as arrays."""
    p, v, m = pipeline_size, chunks, micro_batches
    check_sizes(name, p, v, m)
    passes = [passes_of_rank(name, p, v, m, rank) for rank in range(p)]
    if forward_only:
        passes = [rows[rows[:, 0] == Op.FORWARD] for rows in passes]
    try:
        return with_messages(Lists.of(passes, m))
    except ValueError as error:
        raise ConfigError(f"order {name_of(name)!r} cannot be run by {p} ranks: {error}") from None


def count_messages(schedule: Schedule) -> int:
    """Return the number of messages of one step, over all ranks."""
    return sum(i.op in SENDS for instructions in schedule for i in instructions)


def peak_activations(schedule: Schedule, *, until_weights: bool = True) -> tuple[int, ...]:
    """Return for each rank the most activations (of one micro-batch in one chunk) that are alive at
    once.

    An activation lives from its forward to its backward pass. A split backward pass frees what only
    the input's gradient needs in its first half, and the inputs of linear layers in its second:
    `until_weights` counts an activation until the second half (an upper bound of memory), without
    it until the first.
    """
    frees = {Op.BACKWARD, Op.BACKWARD_WEIGHT if until_weights else Op.BACKWARD_INPUT}
    peaks = []
    for instructions in schedule:
        alive = peak = 0
        for instruction in instructions:
            if instruction.op is Op.FORWARD:
                alive += 1
                peak = max(peak, alive)
                alive -= schedule.forward_only
            elif instruction.op in frees:
                alive -= 1
        peaks.append(peak)
    return tuple(peaks)


def peak_receives(schedule: Schedule) -> tuple[int, ...]:
    """Return for each rank the most buffers that are posted or filled and whose message is not yet
    in use.
    """
    peaks = []
    for instructions in schedule:
        held: set[tuple[bool, int, int]] = set()
        peak = 0
        for op, stage, micro_batch in instructions:
            if op in RECEIVES:
                held.add((op is Op.RECV_FORWARD, stage, micro_batch))
                peak = max(peak, len(held))
            elif op in COMPUTE and op is not Op.BACKWARD_WEIGHT:
                held.discard((op is Op.FORWARD, stage, micro_batch))
        peaks.append(peak)
    return tuple(peaks)


@lru_cache(maxsize=256)
def splits_backward(
    schedule: AnyOrder, pipeline_size: int, chunks: int, micro_batches: int
) -> bool:
    """Return whether backward passes run in two halves, of inputs and of weights."""
    if isinstance(schedule, str):
        return pipeline_size > 1 and ORDERS[schedule].splits
    rows = passes_of_rank(schedule, pipeline_size, chunks, micro_batches, 0)
    return bool((rows[:, 0] == Op.BACKWARD_INPUT).any())
