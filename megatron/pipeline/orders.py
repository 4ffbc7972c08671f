"""In which order each rank computes: 1F1B, interleaved 1F1B, zero-bubble ZB-H1, and forward passes alone.

Every function returns the computations of one rank; messages are added afterwards (messages.py).
"""
from __future__ import annotations

from megatron.pipeline.instructions import Instruction, Op


def one_forward_one_backward(rank: int, pipeline_size: int, micro_batches: int) -> list[Instruction]:
    """1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.1): at most pipeline_size - rank live micro-batches."""
    warm_up = min(micro_batches, pipeline_size - rank - 1)
    order = [Instruction(Op.FORWARD, rank, i) for i in range(warm_up)]
    for i in range(micro_batches):
        if warm_up + i < micro_batches:
            order.append(Instruction(Op.FORWARD, rank, warm_up + i))
        order.append(Instruction(Op.BACKWARD, rank, i))
    return order


def zero_bubble_h1(rank: int, pipeline_size: int, micro_batches: int) -> list[Instruction]:
    """ZB-H1 (Qi et al., arXiv 2401.10241, section 2.3): 1F1B whose weight gradients wait for idle time.

    Rank r keeps r of them back, so that live micro-batches plus waiting weight gradients stay within pipeline_size
    on every rank, which is what the first rank of 1F1B holds.
    """
    order = []
    for instruction in one_forward_one_backward(rank, pipeline_size, micro_batches):
        if instruction.op is Op.FORWARD:
            order.append(instruction)
            continue
        done = instruction.micro_batch
        order.append(Instruction(Op.BACKWARD_INPUT, rank, done))
        if done >= rank:
            order.append(Instruction(Op.BACKWARD_WEIGHT, rank, done - rank))
    order += [Instruction(Op.BACKWARD_WEIGHT, rank, i) for i in range(max(0, micro_batches - rank), micro_batches)]
    return order


def group_sizes(pipeline_size: int, micro_batches: int) -> list[int]:
    """The groups of micro-batches that pass through one chunk before the next chunk starts, larger ones first.

    Groups have pipeline_size micro-batches when these divide; what is left over is spread, so that a group is never
    smaller than the pipeline (a rank would wait for its own output to come round) and rarely much larger.

    >>> group_sizes(4, 8), group_sizes(4, 11), group_sizes(4, 3)
    ([4, 4], [6, 5], [3])
    """
    groups = max(1, micro_batches // pipeline_size)
    each, rest = divmod(micro_batches, groups)
    return [each + 1] * rest + [each] * (groups - rest)


def _by_groups(rank: int, pipeline_size: int, chunks: int, micro_batches: int, op: Op) -> list[Instruction]:
    """The forward or the backward passes of one rank, group by group and chunk by chunk."""
    order_of_chunks = range(chunks) if op is Op.FORWARD else range(chunks)[::-1]
    passes = []
    first = 0
    for size in group_sizes(pipeline_size, micro_batches):
        for chunk in order_of_chunks:
            passes += [Instruction(op, chunk * pipeline_size + rank, first + i) for i in range(size)]
        first += size
    return passes


def interleaved_warm_up(rank: int, pipeline_size: int, chunks: int, micro_batches: int) -> int:
    """Forward passes of interleaved 1F1B before the first backward pass, where there are so many."""
    return 2 * (pipeline_size - rank - 1) + (chunks - 1) * group_sizes(pipeline_size, micro_batches)[0]


def interleaved(rank: int, pipeline_size: int, chunks: int, micro_batches: int) -> list[Instruction]:
    """Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.2) for any number of micro-batches.

    With p ranks, v chunks and g micro-batches in the largest group, rank r holds at most
    min(v m, 2 (p - r - 1) + (v - 1) g + 1) activations, each of one micro-batch in one chunk.

    Free of deadlock: let w = 2 (p - 1 - r) + (v - 1) g, and give the k-th backward pass of rank r the number
    2 k + 2 (p - 1 - r), its k-th forward pass the number 2 (k - w) + 2 (p - 1 - r) - 1. If every pass has a larger
    number than what it waits for, there is no cycle. On a rank the numbers rise along the list: w forward passes, then
    pairs of forward k + w and backward k. The forward pass of what goes backward k-th is at most the (k + w)-th, since
    its place is later by (v - 1) g <= w at most. The same pass on the neighbour it waits for has a number smaller by 2.
    From the last rank to the first one's next chunk (and back) the place rises by the group's size s and the number by
    2 s - 2 (p - 1), which is positive for s >= p. A group can only be smaller than p when it is the only one. Then the
    passes of all chunks but the last go forward in the warm-up and backward after all forward passes, where forward
    waits for forward and backward for backward only.
    """
    forward = _by_groups(rank, pipeline_size, chunks, micro_batches, Op.FORWARD)
    backward = _by_groups(rank, pipeline_size, chunks, micro_batches, Op.BACKWARD)
    warm_up = min(len(forward), interleaved_warm_up(rank, pipeline_size, chunks, micro_batches))
    steady = len(forward) - warm_up
    order = forward[:warm_up]
    for pair in zip(forward[warm_up:], backward[:steady], strict=True):
        order += pair
    return order + backward[steady:]


def forward_passes(rank: int, pipeline_size: int, chunks: int, micro_batches: int) -> list[Instruction]:
    """Forward passes alone, for evaluation."""
    return _by_groups(rank, pipeline_size, chunks, micro_batches, Op.FORWARD)


def one_rank(chunks: int, micro_batches: int) -> list[Instruction]:
    """A pipeline of one rank: every micro-batch forward through all chunks, then back."""
    order = []
    for i in range(micro_batches):
        order += [Instruction(Op.FORWARD, chunk, i) for chunk in range(chunks)]
        order += [Instruction(Op.BACKWARD, chunk, i) for chunk in reversed(range(chunks))]
    return order
