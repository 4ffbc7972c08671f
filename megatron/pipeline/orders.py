"""Instructions in a pipeline schedule, and the orders of passes.

The orders are 1F1B, interleaved 1F1B and zero-bubble ZB-H1. They are defined only here.

An order is a function of (pipeline size, chunks, micro-batches, rank) that returns the rank's
passes: instructions, or an array with one row (op, stage, micro-batch) for each, where stage =
chunk * pipeline size + rank. Messages, the activations that a rank holds (schedule.py) and the time
of a step (clock.py) follow from the passes of all ranks. A new order takes only one function, which
can be passed instead of a name. To give it a name, add the name to SCHEDULES (config/parallel.py)
and the function to _ORDERS, at the same position.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config.parallel import SCHEDULES
from megatron.errors import ConfigError


class Op(IntEnum):
    """Kind of an instruction.

    BACKWARD is the full backward pass; zero-bubble schedules split it in two.
    csrc/schedule_clock.cpp uses the same numbers.
    """

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    SEND_FORWARD = 4
    RECV_FORWARD = 5
    SEND_BACKWARD = 6
    RECV_BACKWARD = 7

    @property
    def letters(self) -> str:
        """A short name: F, B, I, W, SF, RF, SB, RB."""
        return ("F", "B", "I", "W", "SF", "RF", "SB", "RB")[self]


COMPUTE = frozenset((Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
SENDS = frozenset((Op.SEND_FORWARD, Op.SEND_BACKWARD))
RECEIVES = frozenset((Op.RECV_FORWARD, Op.RECV_BACKWARD))

SENDS_IN_FLIGHT = 4
"""Maximum number of sends that a rank has in flight. Their tensors are kept until they have been
sent. Some backends (gloo) report this only in a wait, so a rank waits for the oldest send. Waiting
cannot deadlock: the schedules run even if every send blocks."""


class Instruction(NamedTuple):
    """One step of one rank.

    `stage` is the global stage that computes, sends or receives: chunk * pipeline size + pipeline
    rank. A message appears twice: as SEND under the stage that produces it, and as RECV under the
    stage that needs it.
    """

    op: Op
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.op.name} of stage {self.stage}, micro-batch {self.micro_batch}"


# -- orders ----------------------------------------------------------------------------------------

Rows = npt.NDArray[np.int32]  # [instructions, 3]: op, stage, micro-batch
AnyOrder = str | Callable[..., Any]  # a name in ORDERS, or a megatron.protocols.Order


def one_forward_one_backward(
    pipeline_size: int, chunks: int, micro_batches: int, rank: int
) -> Rows:
    """1F1B: at most pipeline_size - rank micro-batches in flight.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2.1.
    """
    each = np.arange(micro_batches)
    return _alternate(
        _rows(Op.FORWARD, rank, each), _rows(Op.BACKWARD, rank, each), pipeline_size - rank - 1
    )


def zero_bubble_h1(pipeline_size: int, chunks: int, micro_batches: int, rank: int) -> Rows:
    """ZB-H1: 1F1B with weight gradients deferred to idle time.

    Source: Qi et al., arXiv 2401.10241, section 2.3. Rank r defers up to r of them at a time: the
    micro-batches in flight and the deferred weight gradients of a rank are at most pipeline_size
    together, as many as the first rank has micro-batches in flight under 1F1B.
    """
    order = one_forward_one_backward(pipeline_size, chunks, micro_batches, rank)
    backward = np.flatnonzero(order[:, 0] == Op.BACKWARD)
    order[backward, 0] = Op.BACKWARD_INPUT
    weights = _rows(Op.BACKWARD_WEIGHT, rank, np.arange(micro_batches))
    behind = backward[rank:] + 1
    return np.concatenate(
        [np.insert(order, behind, weights[: len(behind)], axis=0), weights[len(behind) :]]
    )


def group_sizes(pipeline_size: int, micro_batches: int) -> list[int]:
    """Return the sizes of the groups of micro-batches, larger ones first.

    A group passes through one chunk before the next chunk starts. Groups have pipeline_size
    micro-batches if that divides the number of micro-batches. Otherwise the remainder is spread
    over the groups. Each then has fewer than twice pipeline_size. None has fewer than pipeline_size
    (a rank would wait for its own output to come around) unless it is the only group.

    >>> group_sizes(4, 8), group_sizes(4, 11), group_sizes(4, 3)
    ([4, 4], [6, 5], [3])
    """
    groups = max(1, micro_batches // pipeline_size)
    each, rest = divmod(micro_batches, groups)
    return [each + 1] * rest + [each] * (groups - rest)


def interleaved(pipeline_size: int, chunks: int, micro_batches: int, rank: int) -> Rows:
    """Interleaved 1F1B for any number of micro-batches.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2.2. With p ranks, v chunks, m
    micro-batches and g of them in the largest group, rank r holds at most
    min(v m, 2 (p - r - 1) + (v - 1) g + 1) activations, each of one micro-batch in one chunk.

    It cannot deadlock. Let w = 2 (p - 1 - r) + (v - 1) g, and give the k-th backward pass of rank r
    the number 2 k + 2 (p - 1 - r) and its k-th forward pass 2 (k - w) + 2 (p - 1 - r) - 1. If
    every pass has a larger number than the passes it waits for, there is no cycle. On a rank the
    numbers rise along the list: w forward passes, then pairs of forward k + w and backward k. The
    forward pass that corresponds to the k-th backward pass is at most the (k + w)-th, since its
    place is later by (v - 1) g <= w at most. The same pass on the neighbour it waits for has a
    number smaller by 2. From the last rank to the first one's next chunk (and back) the place rises
    by the group's size s and the number by 2 s - 2 (p - 1), which is positive for s >= p. A group
    can only be smaller than p when it is the only one. Then the passes of all chunks but the last
    run forward in the warm-up and backward after all forward passes, where forward waits for
    forward and backward for backward only.
    """
    sizes = np.array(group_sizes(pipeline_size, micro_batches))
    chunk = np.repeat(np.tile(np.arange(chunks), len(sizes)), np.repeat(sizes, chunks))
    first = np.cumsum(sizes) - sizes
    micro_batch = np.concatenate(
        [np.tile(np.arange(f, f + s), chunks) for f, s in zip(first, sizes, strict=True)]
    )
    forward = _rows(Op.FORWARD, chunk * pipeline_size + rank, micro_batch)
    backward = _rows(Op.BACKWARD, (chunks - 1 - chunk) * pipeline_size + rank, micro_batch)
    return _alternate(
        forward, backward, 2 * (pipeline_size - rank - 1) + (chunks - 1) * int(sizes[0])
    )


def one_rank(pipeline_size: int, chunks: int, micro_batches: int, rank: int) -> Rows:
    """Order for a pipeline of one rank: every micro-batch forward through all chunks, then back."""
    op = np.repeat([Op.FORWARD, Op.BACKWARD], chunks)
    chunk = np.r_[:chunks, chunks - 1 : -1 : -1]
    return _rows(
        np.tile(op, micro_batches),
        np.tile(chunk, micro_batches),
        np.arange(micro_batches).repeat(2 * chunks),
    )


def _rows(op: npt.ArrayLike, stage: npt.ArrayLike, micro_batch: npt.ArrayLike) -> Rows:
    return np.stack(np.broadcast_arrays(op, stage, micro_batch), axis=1).astype(np.int32)


def _alternate(forward: Rows, backward: Rows, warm_up: int) -> Rows:
    """Return `warm_up` forward passes, alternating passes, and the remaining backward passes."""
    warm_up = min(warm_up, len(forward))
    steady = len(forward) - warm_up
    pairs = np.stack([forward[warm_up:], backward[:steady]], axis=1).reshape(-1, 3)
    return np.concatenate([forward[:warm_up], pairs, backward[steady:]])


class NamedOrder(NamedTuple):
    """A named order.

    passes       the order function
    interleaves  whether it needs several chunks per rank instead of one, if there are several ranks
    splits       whether it splits backward passes in two
    """

    passes: Callable[..., Any]
    interleaves: bool = False
    splits: bool = False


_ORDERS = (
    NamedOrder(one_forward_one_backward),
    NamedOrder(interleaved, interleaves=True),
    NamedOrder(zero_bubble_h1, splits=True),
)
ORDERS = dict(zip(SCHEDULES, _ORDERS, strict=True))


def name_of(schedule: AnyOrder) -> str:
    return schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "custom")


def passes_of_rank(
    schedule: AnyOrder, pipeline_size: int, chunks: int, micro_batches: int, rank: int
) -> Rows:
    """Return the passes of one rank in order.

    A pipeline of one rank computes one micro-batch after another under any name. Raises ConfigError
    for an order function unless each pass of the rank occurs once, and forward before backward.
    """
    if isinstance(schedule, str):
        order = one_rank if pipeline_size == 1 else ORDERS[schedule].passes
        return np.asarray(order(pipeline_size, chunks, micro_batches, rank))
    what = f"order {name_of(schedule)!r}, rank {rank} of {pipeline_size}"
    rows = np.asarray(schedule(pipeline_size, chunks, micro_batches, rank), np.int32).reshape(-1, 3)
    op, stage, micro_batch = rows.T
    chunk = (stage - rank) // pipeline_size
    wrong = (
        (op < 0)
        | (op > Op.BACKWARD_WEIGHT)
        | (stage % pipeline_size != rank)
        | (chunk < 0)
        | (chunk >= chunks)
    )
    wrong |= (micro_batch < 0) | (micro_batch >= micro_batches)
    if wrong.any():
        raise ConfigError(
            f"{what}: {tuple(rows[wrong][0].tolist())} is not an (op, stage, micro-batch) of this "
            "rank"
        )
    positions = np.full((4, chunks, micro_batches), -1)
    positions[op, chunk, micro_batch] = np.arange(len(rows))
    forward, backward, inputs, weights = positions
    split = inputs >= 0
    right = (forward >= 0) & (np.maximum(backward, inputs) > forward) & ((backward >= 0) != split)
    right &= np.where(split, weights > inputs, weights < 0)
    if not right.all() or (positions >= 0).sum() < len(rows):
        raise ConfigError(
            f"{what}: each micro-batch needs one FORWARD pass in each chunk, and after it one "
            "BACKWARD pass, or BACKWARD_INPUT and after that BACKWARD_WEIGHT"
        )
    return rows


def check_sizes(schedule: AnyOrder, pipeline_size: int, chunks: int, micro_batches: int) -> None:
    """Raise ConfigError for an unknown name, or an invalid size or combination."""
    if isinstance(schedule, str) and schedule not in ORDERS:
        raise ConfigError(
            f"pipeline schedule {schedule!r} does not exist: choose one of {', '.join(SCHEDULES)}"
        )
    for what, value in (
        ("pipeline size", pipeline_size),
        ("chunks", chunks),
        ("micro-batches", micro_batches),
    ):
        if value < 1:
            raise ConfigError(
                f"pipeline schedule {name_of(schedule)!r}: {what} must be at least 1, got {value}"
            )
    if pipeline_size == 1 or not isinstance(schedule, str):
        return
    interleaves = ORDERS[schedule].interleaves
    if interleaves and chunks < 2:
        raise ConfigError(
            f"pipeline schedule {schedule!r} needs at least 2 chunks per rank, got 1: use '1f1b'"
        )
    if not interleaves and chunks > 1:
        raise ConfigError(
            f"pipeline schedule {schedule!r} has 1 chunk per rank, got {chunks}: use 'interleaved'"
        )
