"""Add the messages to the computations of all ranks.

Messages carry no tags: the n-th message that one rank sends to another is the n-th that the other receives. Nor may
they deadlock where a send holds up everything behind it until its receive is posted, as on a NCCL or RCCL communicator.
Both follow from one rule: all messages of a step stand in one sequence, and every rank posts its sends and receives in
that sequence. A cycle of ranks that wait for each other would need a message that stands before itself.

The sequence is that of the messages' production in a simulated step. So a message never waits behind another one that
is made later, as long as computations take about their nominal times.

With several chunks messages go round in a ring, and in a simulated step without latency a rank makes one at the very
moment at which its neighbour does. On a network each rank runs a little behind the one before it, so a rank that must
send before it posts its receive posts it too late. There the simulated messages take `planned_latency`, which puts them
in the order of the real ones. With one chunk ranks compute in turn, and the order without latency is the best one.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron.pipeline.instructions import SENDS, Instruction, Op
from megatron.pipeline.simulate import Span, run_orders


def planned_latency(chunks: int) -> float:
    """Time that messages take in the step from which their sequence is read, in forward passes of one chunk.

    Measured on simulated links (links.py) for latencies from 0.05 to 0.5 with passes of unequal length: 8 ranks with 4
    chunks wait 0.1 % of the step for messages that were posted too late instead of 3 to 7 %; sixteenths do as well.
    """
    return 0.25 if chunks > 1 else 0.0


def add_messages(orders: Sequence[Sequence[Instruction]], num_stages: int) -> tuple[tuple[Instruction, ...], ...]:
    """The computations of each rank with sends directly behind what they send, and receives posted ahead of need.

    A receive is posted before the computation that this rank runs while the message is made, so that the message
    travels behind it; later only where a send of this rank stands before it in the sequence. It is never posted earlier
    than that, which bounds the buffers to messages that are made and not yet used and those in the making: 2 per rank
    with one chunk; with more at most 3 and the largest group of micro-batches (orders.py), usually a third of that.
    """
    size = len(orders)
    spans = run_orders(orders, latency=planned_latency(num_stages // size))
    produced = [
        (span.end, rank, send)
        for rank in range(size)
        for span in spans[rank]
        if (send := _message_of(span.instruction, num_stages, size)) is not None
    ]
    produced.sort(key=lambda message: message[:2])
    queues: list[deque[tuple[float, Instruction]]] = [deque() for _ in range(size)]
    for time, rank, send in produced:
        receive = Op.RECV_FORWARD if send.op is Op.SEND_FORWARD else Op.RECV_BACKWARD
        queues[rank].append((time, send))
        queues[send.peer_stage % size].append((time, Instruction(receive, send.peer_stage, send.micro_batch)))
    return tuple(merge_messages(spans[rank], queues[rank]) for rank in range(size))


def _message_of(done: Instruction, num_stages: int, size: int) -> Instruction | None:
    """The send that follows a computation; None where the result stays on its rank or is nobody's input."""
    if size == 1 or done.op is Op.BACKWARD_WEIGHT:
        return None
    if done.op is Op.FORWARD:
        return Instruction(Op.SEND_FORWARD, *done[1:]) if done.stage + 1 < num_stages else None
    return Instruction(Op.SEND_BACKWARD, *done[1:]) if done.stage > 0 else None


def merge_messages(spans: Sequence[Span], queue: deque[tuple[float, Instruction]]) -> tuple[Instruction, ...]:
    """One rank's list; `queue` is its messages with their times, in the common sequence, and is used up."""
    merged: list[Instruction] = []
    for span in spans:
        while queue and queue[0][0] <= span.end and queue[0][1].op not in SENDS:
            merged.append(queue.popleft()[1])
        merged.append(span.instruction)
        # The only send that can stand at the head or behind receives of this time is the one of this computation.
        while queue and queue[0][0] <= span.end:
            merged.append(queue.popleft()[1])
    assert not queue, "a message is made after its receiver has finished"
    return tuple(merged)
