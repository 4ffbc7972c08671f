"""One rank's instructions without those of the others: what a running job needs, at a small part of the cost.

`build_schedule` simulates all ranks with objects for every instruction and lists the messages of all. Here the nominal
step is timed with numbers only, in an order of computation in which nothing has to wait, and one list is made. It is
the list of `build_schedule`, which stays what defines a schedule; tests compare the two.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline.instructions import Instruction, Op
from megatron.pipeline.messages import merge_messages, planned_latency
from megatron.pipeline.orders import group_sizes, interleaved_warm_up
from megatron.pipeline.simulate import NOMINAL_DURATIONS, Span


@dataclass(frozen=True)
class _Ends:
    """When the computations of the nominal step end: [rank][place], with places in the order of a rank's passes."""

    forward: list[list[float]]
    backward: list[list[float]]


def with_messages(
    name: str, order: Sequence[Instruction], rank: int, pipeline_size: int, chunks: int, micro_batches: int
) -> tuple[Instruction, ...]:
    """`order`, the computations of `rank` (orders.py), with this rank's sends and receives between them.

    The schedule is `name`, or of forward passes alone where `order` has no others. Needs pipeline_size >= 2 and, with
    several chunks, micro_batches >= pipeline_size.
    """
    behind = _previous_chunk(pipeline_size, chunks, micro_batches)
    forward_only = not any(i.op is not Op.FORWARD for i in order)
    ends = _end_times("forward" if forward_only else name, pipeline_size, chunks, micro_batches, behind)
    spans, messages = [], []
    forward_place = backward_place = 0
    clock = 0.0
    for instruction in order:
        if instruction.op is Op.FORWARD:
            clock = ends.forward[rank][forward_place]
            messages += _messages(instruction, clock, _forward_input(ends, rank, forward_place, behind), chunks, rank,
                                  pipeline_size)  # fmt: skip
            forward_place += 1
        elif instruction.op is Op.BACKWARD_WEIGHT:
            clock += NOMINAL_DURATIONS[Op.BACKWARD_WEIGHT]
        else:
            clock = ends.backward[rank][backward_place]
            messages += _messages(instruction, clock, _backward_input(ends, rank, backward_place, behind), chunks, rank,
                                  pipeline_size)  # fmt: skip
            backward_place += 1
        spans.append(Span(instruction, 0.0, clock))
    messages.sort(key=lambda message: message[:2])
    return merge_messages(spans, deque((time, message) for time, _, message in messages))


def _messages(
    done: Instruction, end: float, input_made: float, chunks: int, rank: int, size: int
) -> list[tuple[float, int, Instruction]]:
    """(time, sending rank, message) of a computation's input and of its result, as far as they leave their rank."""
    forward = done.op is Op.FORWARD
    before, after = (done.stage > 0, done.stage + 1 < size * chunks)
    found = []
    if before if forward else after:
        receive = Op.RECV_FORWARD if forward else Op.RECV_BACKWARD
        found.append((input_made, (rank - 1 if forward else rank + 1) % size, Instruction(receive, *done[1:])))
    if after if forward else before:
        send = Op.SEND_FORWARD if forward else Op.SEND_BACKWARD
        found.append((end, rank, Instruction(send, *done[1:])))
    return found


def _forward_input(ends: _Ends, rank: int, place: int, behind: Sequence[int]) -> float:
    """When the input of the forward pass at `place` is made; 0 for the first stage."""
    if rank:
        return ends.forward[rank - 1][place]
    return ends.forward[-1][behind[place]] if behind[place] >= 0 else 0.0


def _backward_input(ends: _Ends, rank: int, place: int, behind: Sequence[int]) -> float:
    """When the gradient for the backward pass at `place` is made; 0 for the last stage."""
    if rank + 1 < len(ends.backward):
        return ends.backward[rank + 1][place]
    return ends.backward[0][behind[place]] if behind[place] >= 0 else 0.0


def _previous_chunk(pipeline_size: int, chunks: int, micro_batches: int) -> list[int]:
    """For each place the place of the same micro-batch in the chunk that runs before; -1 where none does.

    Forward and backward passes go through a group of micro-batches chunk by chunk, so the list holds for both.
    """
    behind: list[int] = []
    for size in group_sizes(pipeline_size, micro_batches):
        for chunk in range(chunks):
            at = len(behind)
            behind += range(at - size, at) if chunk else [-1] * size
    return behind


def _end_times(name: str, size: int, chunks: int, micro_batches: int, behind: Sequence[int]) -> _Ends:
    """The nominal step, computed in steps: in step j rank r does its forward pass at place j - (size - 1 - r) + w and
    its backward pass at place j - (size - 1 - r), where w is its number of warm-up passes.

    That is each rank's own order. What a pass waits for stands in an earlier step, or in the same step on a lower rank:
    the argument of orders.interleaved, which holds for one chunk too (there the forward passes of a step have the same
    place on all ranks).
    """
    total = len(behind)
    forward: list[list[float]] = [[] for _ in range(size)]
    backward: list[list[float]] = [[] for _ in range(size)]
    ends = _Ends(forward, backward)
    split = name == "zb-h1"
    forward_s = NOMINAL_DURATIONS[Op.FORWARD]
    backward_s = NOMINAL_DURATIONS[Op.BACKWARD_INPUT if split else Op.BACKWARD]
    weight_s = NOMINAL_DURATIONS[Op.BACKWARD_WEIGHT]
    if name == "interleaved":
        warm_up = [interleaved_warm_up(rank, size, chunks, micro_batches) for rank in range(size)]
    else:
        warm_up = [size - rank - 1 for rank in range(size)]
    latency = planned_latency(chunks)
    clocks = [0.0] * size
    backwards = 0 if name == "forward" else total
    for step in range(min(size - 1 - r - w for r, w in enumerate(warm_up)), total + size - 1):
        place = step - size  # of the backward pass
        for rank in range(size):
            place += 1
            clock = clocks[rank]
            ahead = place + warm_up[rank]
            if 0 <= ahead < total:
                if rank:
                    made = forward[rank - 1][ahead] + latency
                else:
                    made = forward[-1][behind[ahead]] + latency if behind[ahead] >= 0 else 0.0
                clock = (made if made > clock else clock) + forward_s
                forward[rank].append(clock)
            if 0 <= place < backwards:
                if rank + 1 < size:
                    made = backward[rank + 1][place] + latency
                else:
                    made = backward[0][behind[place]] + latency if behind[place] >= 0 else 0.0
                clock = (made if made > clock else clock) + backward_s
                backward[rank].append(clock)
                if split and place >= rank:
                    clock += weight_s
            clocks[rank] = clock
    return ends
