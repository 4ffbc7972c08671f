"""Pipeline schedules: which rank computes, sends and receives what, in which order. Pure data; needs no torch.

>>> for instructions in build_schedule("1f1b", pipeline_size=2, chunks=1, micro_batches=2):
...     print(" ".join(f"{i.op.value}{i.micro_batch}" for i in instructions))
F0 SF0 F1 SF1 RB0 B0 RB1 B1
RF0 RF1 F0 B0 SB0 F1 B1 SB1
"""
from __future__ import annotations

from collections import Counter
from functools import lru_cache

from megatron.config.pieces import Order
from megatron.errors import ConfigError
from megatron.pipeline import orders
from megatron.pipeline.instructions import COMPUTE, RECEIVES, SENDS, Instruction, Op, Schedule
from megatron.pipeline.messages import add_messages
from megatron.pipeline.one_rank import with_messages

__all__ = [
    "SCHEDULES",
    "Instruction",
    "Op",
    "Schedule",
    "build_rank_schedule",
    "build_schedule",
    "count_messages",
    "peak_activations",
    "peak_receives",
    "splits_backward",
]

SCHEDULES = ("1f1b", "interleaved", "zb-h1")


@lru_cache(maxsize=2)  # a large pipeline's lists for all ranks take hundreds of megabytes
def build_schedule(
    name: str | Order, pipeline_size: int, chunks: int, micro_batches: int, forward_only: bool = False
) -> Schedule:
    """The instructions of every pipeline rank for one step (or, with `forward_only`, for one evaluation).

    name           '1f1b' and 'zb-h1' have one chunk of layers per rank, 'interleaved' two or more. A pipeline of one
                   rank computes micro-batch by micro-batch under any name. Or an order of one's own.
    chunks         chunks (virtual stages) per rank; global stage g is on rank g % pipeline_size.
    micro_batches  any positive number.

    Raises ConfigError for a name, a size or a combination that does not exist.
    """
    check_sizes(name, pipeline_size, chunks, micro_batches)
    p, v, m = pipeline_size, chunks, micro_batches
    computations = [_computations(name, rank, p, v, m, forward_only) for rank in range(p)]
    return Schedule(name, p, v, m, forward_only, add_messages(computations, p * v))


def build_rank_schedule(
    name: str | Order, pipeline_size: int, chunks: int, micro_batches: int, rank: int, forward_only: bool = False
) -> tuple[Instruction, ...]:
    """`build_schedule(...)[rank]` without the lists of the other ranks: what a running job needs.

    Time and memory grow with the passes of the pipeline as there, but with numbers in place of objects. Raises
    ConfigError as build_schedule does.
    """
    check_sizes(name, pipeline_size, chunks, micro_batches)
    p, v, m = pipeline_size, chunks, micro_batches
    assert 0 <= rank < p, f"pipeline rank {rank} of {p}"
    if p > 1 and ((callable(name) and not forward_only) or (v > 1 and m < p)):
        # Fewer micro-batches than ranks: their last pass meets the first one coming round. The lists are short. Of an
        # order of one's own nothing is known but its lists.
        return build_schedule(name, p, v, m, forward_only)[rank]
    order = _computations(name, rank, p, v, m, forward_only)
    return with_messages("" if callable(name) else name, order, rank, p, v, m) if p > 1 else tuple(order)


def _computations(name: str | Order, rank: int, p: int, v: int, m: int, forward_only: bool) -> list[Instruction]:
    """What `rank` of `p` computes, in order, in `v` chunks of `m` micro-batches."""
    if forward_only:
        return orders.forward_passes(rank, p, v, m)
    if p == 1:
        return orders.one_rank(v, m)
    if callable(name):
        return _checked(name, p, v, m, rank)
    if name == "interleaved":
        return orders.interleaved(rank, p, v, m)
    if name == "zb-h1":
        return orders.zero_bubble_h1(rank, p, m)
    return orders.one_forward_one_backward(rank, p, m)


def _checked(order: Order, p: int, v: int, m: int, rank: int) -> list[Instruction]:
    """What an order of one's own gives for a rank. Raises ConfigError unless it is each pass once."""
    found = list(order(p, v, m, rank))
    passes = Counter(
        (i.op if i.op is not Op.BACKWARD else half, i.stage, i.micro_batch)
        for i in found for half in ((Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if i.op is Op.BACKWARD else (None,))
    )  # fmt: skip
    stages, kinds = range(rank, p * v, p), (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    if passes != Counter((op, stage, i) for op in kinds for stage in stages for i in range(m)):
        raise ConfigError(
            f"schedule {getattr(order, '__name__', order)}: on rank {rank} of {p}, with {v} chunks and {m} "
            f"micro-batches, it is not one forward and one backward pass (whole, or its two halves) of each"
        )
    return found


@lru_cache(maxsize=256)
def splits_backward(name: str | Order, pipeline_size: int, chunks: int, micro_batches: int) -> bool:
    """Whether backward passes run in two halves, of inputs and of weights."""
    if pipeline_size == 1 or not callable(name):
        return pipeline_size > 1 and name == "zb-h1"
    return any(i.op is Op.BACKWARD_INPUT for i in name(pipeline_size, chunks, micro_batches, 0))


def check_sizes(name: str | Order, pipeline_size: int, chunks: int, micro_batches: int) -> None:
    if not callable(name) and name not in SCHEDULES:
        raise ConfigError(f"pipeline schedule {name!r} does not exist: choose one of {', '.join(SCHEDULES)}")
    for what, value in (("pipeline size", pipeline_size), ("chunks", chunks), ("micro-batches", micro_batches)):
        if value < 1:
            raise ConfigError(f"pipeline schedule {name!r}: {what} must be at least 1, got {value}")
    if pipeline_size == 1 or callable(name):
        return
    if name == "interleaved" and chunks < 2:
        raise ConfigError("pipeline schedule 'interleaved' needs at least 2 chunks per rank, got 1: use '1f1b'")
    if name != "interleaved" and chunks > 1:
        raise ConfigError(f"pipeline schedule {name!r} has 1 chunk per rank, got {chunks}: use 'interleaved'")


def count_messages(schedule: Schedule) -> int:
    """How many messages one step sends, over all ranks."""
    return sum(i.op in SENDS for instructions in schedule for i in instructions)


def peak_activations(schedule: Schedule, *, until_weights: bool = True) -> tuple[int, ...]:
    """For each rank the most activations (of one micro-batch in one chunk) that are alive at once.

    An activation lives from its forward to its backward pass. A split backward pass frees what only the input's
    gradient needs in its first half, and the inputs of linear layers in its second: `until_weights` counts an
    activation until the second half (an upper bound of memory), without it until the first.
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
    """For each rank the most buffers that are posted or filled and whose message is not yet in use."""
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
