"""Messages of the ZeRO plan (engine/zero_plan.py), with their sizes in bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from megatron.engine.buckets import BucketPlan
from megatron.engine.zero_plan import BucketInstruction, BucketOp, Reductions, Zero, ZeroPlan
from megatron.planner.events import GroupMessage


def messages_of(plan: ZeroPlan, instructions: Iterable[BucketInstruction]) -> list[GroupMessage]:
    """List the collectives that the instructions run; their bytes include padding."""
    return [
        message
        for op, number, _ in instructions
        for message in _messages(plan.zero, plan.buckets[number], op)
    ]


@functools.lru_cache(maxsize=1 << 16)
def _messages(zero: Zero, bucket: BucketPlan, op: BucketOp) -> tuple[GroupMessage, ...]:
    """Return the collectives of an instruction on a bucket."""
    sizes = zero.sizes_of(bucket.kind.experts)
    # if as many ranks share an expert as another parameter, they are the same ones
    dimension = "data" if sizes == zero.sizes else "expert_data"
    ranks = {
        "inner": sizes.inner,
        "outer": sizes.states // sizes.inner,
        "copies": sizes.gradient_ranks // sizes.states,
    }
    messages = list[GroupMessage]()
    for hop in zero.hops(op, bucket):
        of_weights = hop.kind == "all_gather"
        each = zero.bytes_of_weight(bucket) if of_weights else zero.gradient_bytes
        size = each * bucket.padded(sizes.states) / hop.divided
        # a group of all data-parallel ranks is the data-parallel group
        of_all = ranks[hop.ranks] == sizes.gradient_ranks
        group = dimension if of_all else f"{dimension}.{hop.ranks}"
        messages.append(GroupMessage(hop.kind, size, group))
    return tuple(messages)


@functools.lru_cache(maxsize=1 << 10)
def messages_at_end(plan: ZeroPlan) -> tuple[tuple[GroupMessage, ...], tuple[GroupMessage, ...]]:
    """Return (messages that reduce gradients at the end of a step, those that gather new weights).

    The former include those that overlap with the last backward pass. With ZeRO stages 2 and 3 they
    exclude the reductions within each backward pass, which are in stage.messages_in_passes.
    """
    end = list(plan.end(Reductions(plan)))
    returns = [one for one in end if one.op is BucketOp.RETURN]
    sums = [one for one in end if one.op is not BucketOp.RETURN]
    return tuple(messages_of(plan, sums)), tuple(messages_of(plan, returns))
