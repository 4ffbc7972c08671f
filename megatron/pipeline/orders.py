"""Instructions in a pipeline schedule, the orders of passes, and the placement of stages.

The orders are 1F1B, interleaved 1F1B, the zero-bubble schedule ZB-H1, and four for pipelines folded
into a V: ZB-V, V-half, V-min and DualPipeV. They are defined only here.

An order is a function of (pipeline size, chunks, micro-batches, rank) that returns the rank's
passes: instructions, or an array with one row (op, stage, micro-batch) for each. An order also
places the stages: `stage_owners` says which rank has which stage. Messages, the activations that a
rank holds (schedule.py) and the time of a step (clock.py) follow from the passes of all ranks. A
new order takes only one function, which can be passed instead of a name. To give it a name, add the
name to SCHEDULES (config/parallel.py) and the function to _ORDERS, at the same position.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
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

    `stage` is the global stage that computes, sends or receives. A message appears twice: as SEND
    under the stage that produces it, and as RECV under the stage that needs it.
    """

    op: Op
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.op.name} of stage {self.stage}, micro-batch {self.micro_batch}"


# -- orders ----------------------------------------------------------------------------------------

Rows = npt.NDArray[np.int32]  # [instructions, 3]: op, stage, micro-batch
Numbers = npt.NDArray[Any]
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


# -- orders of pipelines in the shape of a V -------------------------------------------------------
#
# Each of p ranks has two stages: rank r has stage r, in chunk 0, and stage 2 p - 1 - r, in chunk 1.
# The first rank thus has the first and the last stage, and the last rank hands its results to
# itself. A digit behind the letter of a pass is its chunk.

_Pass = tuple[Op, int]  # kind and chunk
_F0, _F1 = ((Op.FORWARD, chunk) for chunk in (0, 1))
_B0, _B1 = ((Op.BACKWARD, chunk) for chunk in (0, 1))
_I0, _I1 = ((Op.BACKWARD_INPUT, chunk) for chunk in (0, 1))
_W = (Op.BACKWARD_WEIGHT, 0)  # of the oldest I without one, in either chunk


def zero_bubble_v(pipeline_size: int, chunks: int, micro_batches: int, rank: int) -> Rows:
    """ZB-V: if passes take equally long, ranks are idle only while the pipeline fills and drains.

    Source: Qi et al., arXiv 2401.10241, section 6. A rank holds at most 2 p activations, each of
    one chunk: as many layers as under 1F1B.
    """
    return _zero_bubble_v(pipeline_size, micro_batches)[rank]


@lru_cache(maxsize=4)
def _zero_bubble_v(p: int, micro_batches: int) -> tuple[Rows, ...]:
    whole = max(micro_batches, 2 * p)

    def passes(r: int) -> list[_Pass]:
        up = p - r
        return [
            *[_F0] * (2 * up - 1),
            *[_F1, _F0] * r,
            *[_F1, _I1] * up,
            *[_F0, _I0, _F1, _I1] * (whole - 2 * p + r + 1),
            *[_I0, _F1, _I1] * (up - 1),
            *[_I0, _I1] * r,
            *[_I0] * up,
        ]

    return _with_weights([_numbered(p, r, passes(r), micro_batches) for r in range(p)], 2 * p)


def v_half(pipeline_size: int, chunks: int, micro_batches: int, rank: int) -> Rows:
    """V-half: half of the activations of 1F1B, and half of its bubble.

    Source: Qi et al., arXiv 2405.15362, section 3. From rank to rank, F0 and I1 begin two passes
    later, F1 and I0 one. A rank holds at most p + 2 activations, each of one chunk.
    """
    return _v_half(pipeline_size, micro_batches)[rank]


@lru_cache(maxsize=4)
def _v_half(p: int, micro_batches: int) -> tuple[Rows, ...]:
    gap = 0 if p % 2 else 3
    return _with_weights(_repeated(p, micro_batches, (2, 1), (gap, 1)), p + 2)


def v_min(pipeline_size: int, chunks: int, micro_batches: int, rank: int) -> Rows:
    """V-min: the least activations, a third of those of 1F1B, and two thirds of its bubble.

    Source: Qi et al., arXiv 2405.15362, section 3. From rank to rank, all passes begin one pass
    later. A rank holds at most ceil(2 p / 3) + 2 activations, each of one chunk. Unlike under
    V-half, every rank waits in each micro-batch if forward and backward passes take unequal times.
    """
    return _v_min(pipeline_size, micro_batches)[rank]


@lru_cache(maxsize=4)
def _v_min(p: int, micro_batches: int) -> tuple[Rows, ...]:
    gap = 0 if p % 3 else 2
    return _with_weights(_repeated(p, micro_batches, (1, 1), (gap, 0)), -(-2 * p // 3) + 2)


@lru_cache(maxsize=64)
def dual_pipe_v(pipeline_size: int, chunks: int, micro_batches: int, rank: int) -> Rows:
    """DualPipeV: pairs of a forward and a backward pass, for layers that overlap the two.

    Source: deepseek-ai/DualPipe, and DeepSeek-V3, arXiv 2412.19437, section 3.2.1. Here the passes
    of a pair follow each other. Backward passes are split only at the beginning and the end of a
    step. A rank holds at most 2 p + 1 activations, each of one chunk.
    """
    r = rank
    up = pipeline_size - r - 1
    whole = max(micro_batches, 2 * pipeline_size)
    # From the middle of the last pairs on, backward passes are split.
    last = [_B1, _B0] * (r + 1)
    split = 2 * ((r + 1) // 2) + (r + 1) % 2
    later = [(Op.BACKWARD_INPUT, chunk) for _, chunk in last[split:]]
    passes = [
        *[_F0] * (2 * up),
        *[_F0, _F1] * (r + 1),
        *[_I1, _W, _F1] * up,
        *[_F0, _B1, _F1, _B0] * (whole - 2 * pipeline_size + r + 1),
        *[_B1, _F1, _B0] * up,
        *last[:split],
        *later,
        *[_W, _I0] * up,
        *[_W] * len(later),
    ]
    return _numbered(pipeline_size, rank, passes, micro_batches)


def _numbered(p: int, rank: int, passes: Sequence[_Pass], micro_batches: int) -> Rows:
    """Return the passes as rows: those of a direction and a chunk compute one micro-batch each.

    Passes of further micro-batches than there are, are left out. What remains cannot deadlock if
    the whole could not, since passes wait only for others of their micro-batch.
    """
    op, chunk = np.array(passes, np.int32).T
    micro_batch = np.zeros_like(op)
    direction = np.where(op == Op.BACKWARD_WEIGHT, 2, op != Op.FORWARD)
    for way in range(2):
        for half in range(2):
            of = np.flatnonzero((direction == way) & (chunk == half))
            micro_batch[of] = np.arange(len(of))
    rows = _rows(op, np.where(chunk, 2 * p - 1 - rank, rank), micro_batch)
    if (weights := op == Op.BACKWARD_WEIGHT).any():
        rows[weights, 1:] = rows[op == Op.BACKWARD_INPUT, 1:]
    return rows[rows[:, 2] < micro_batches]


def _repeated(
    p: int, micro_batches: int, steps: tuple[int, int], gaps: tuple[int, int]
) -> list[Rows]:
    """Return every rank's F and I passes, in the order of a pattern that repeats every six passes.

    steps  how much later a pass begins on the next rank: in F0 and I1, and in F1 and I0
    gaps   how much later than possible I1 begins on the first rank, and I0 on the last

    The pattern is such that on every rank its four passes begin at different times modulo 6, so
    that two times remain for the passes W of both chunks: no rank waits. A rank holds a chunk's
    activations from F to W, thus on average as many as the time between them has multiples of six.
    """
    rank = np.arange(p)
    down, up = steps
    f0 = down * rank
    f1 = f0[-1] + 1 + up * rank[::-1]
    i1 = f1[0] + 1 + gaps[0] + down * rank
    i0 = i1[-1] + 1 + gaps[1] + up * rank[::-1]
    order = np.argsort(
        (np.stack([f0, f1, i1, i0], axis=1)[:, None] + 6 * np.arange(micro_batches)[:, None])
        .reshape(p, -1), axis=1, kind="stable",
    )  # fmt: skip
    passes = np.array([_F0, _F1, _I1, _I0])
    lists = []
    for r in range(p):
        op, chunk = passes[order[r] % 4].T
        lists.append(_rows(op, np.where(chunk, 2 * p - 1 - r, r), order[r] // 4))
    return lists


def _with_weights(lists: Sequence[Rows], limit: int) -> tuple[Rows, ...]:
    """Insert each W, the oldest first, where its rank would wait or would hold too much.

    lists  passes F and I of all ranks
    limit  number of activations, each of one chunk, above which a rank computes W before another F

    All ranks run on a clock on which each pass takes one tick. The lists that result cannot
    deadlock: on this clock they have run.
    """
    size = len(lists)
    op, stage, micro_batch = np.stack(lists).transpose(2, 0, 1)  # each [ranks, passes]
    stages = 2 * size
    count = op.shape[1] // 4  # micro-batches
    forward = op == Op.FORWARD
    made = np.where(forward, stage, stages + stage) * count + micro_batch
    # what a pass waits for: the same of the neighbouring stage; the last entry is always there
    waits = made + np.where(forward, -count, count)
    waits[forward & (stage == 0)] = -1
    turn = ~forward & (stage == stages - 1)
    waits[turn] = (stage * count + micro_batch)[turn]
    never = np.iinfo(np.int64).max
    done = np.full(2 * stages * count + 1, never)
    done[-1] = 0
    ranks = np.arange(size)
    position, weights, held, deferred = np.zeros((4, size), np.int64)
    total = op.shape[1]
    source: list[Numbers] = []  # per tick and rank: a row of its list, ~n for the n-th W, or idle
    idle = np.iinfo(np.int64).min
    tick = 0
    while ((position < total) | (deferred > 0)).any():
        at = np.minimum(position, total - 1)
        is_forward = forward[ranks, at]
        ready = (position < total) & (done[waits[ranks, at]] <= tick)
        go = ready & ~(is_forward & (held >= limit) & (deferred > 0))
        weight = ~go & (deferred > 0)
        assert (go | weight).any(), "the order of F and I deadlocks"
        tick += 1
        done[made[ranks[go], at[go]]] = tick
        source.append(np.where(go, at, np.where(weight, ~weights, idle)))
        position += go
        weights += weight
        held += (go & is_forward) * 1 - weight
        deferred += (go & ~is_forward) * 1 - weight
    result = []
    for rows, of_rank in zip(lists, np.stack(source, axis=1), strict=True):
        later = rows[rows[:, 0] == Op.BACKWARD_INPUT]
        later[:, 0] = Op.BACKWARD_WEIGHT
        both = np.concatenate([rows, later[::-1]])  # ~n counts from the end
        result.append(both[of_rank[of_rank != idle]])
    return tuple(result)


# -- named orders, and the placement of stages -----------------------------------------------------


def round_robin(pipeline_size: int, chunks: int) -> Numbers:
    """Return the rank of each stage: chunk c of rank r is stage c * pipeline size + r."""
    return np.tile(np.arange(pipeline_size), chunks)


def v_shaped(pipeline_size: int, chunks: int) -> Numbers:
    """Return the rank of each stage: ascending in the first chunk, descending in the second."""
    ranks = np.arange(pipeline_size)
    return np.concatenate([ranks, ranks[::-1]])[: chunks * pipeline_size]


class NamedOrder(NamedTuple):
    """A named order.

    passes  the order function
    chunks  least and most chunks per rank, if there are several ranks
    splits  whether it splits backward passes in two
    places  function of (pipeline size, chunks) that returns the rank of each stage
    """

    passes: Callable[..., Any]
    chunks: tuple[int, float] = (1, 1)
    splits: bool = False
    places: Callable[[int, int], Numbers] = round_robin


_V = NamedOrder(zero_bubble_v, (2, 2), splits=True, places=v_shaped)
_ORDERS = (
    NamedOrder(one_forward_one_backward),
    NamedOrder(interleaved, (2, math.inf)),
    NamedOrder(zero_bubble_h1, splits=True),
    _V,
    _V._replace(passes=v_half),
    _V._replace(passes=v_min),
    _V._replace(passes=dual_pipe_v),
)
ORDERS = dict(zip(SCHEDULES, _ORDERS, strict=True))


def name_of(schedule: AnyOrder) -> str:
    return schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "custom")


@lru_cache(maxsize=256)
def stage_owners(schedule: AnyOrder, pipeline_size: int, chunks: int) -> tuple[int, ...]:
    """Return the pipeline rank of each global stage; every rank has `chunks` of them.

    An order function may have an attribute `stage_owners`, a function that returns this; otherwise
    stages are placed round-robin. Raises ConfigError if it does not give each rank its chunks.

    >>> stage_owners("interleaved", 3, 2), stage_owners("v-half", 3, 2)
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    if pipeline_size == 1:
        return (0,) * chunks
    if isinstance(schedule, str):
        places = ORDERS[schedule].places
    else:
        places = getattr(schedule, "stage_owners", round_robin)
    what = f"order {name_of(schedule)!r}: stage_owners({pipeline_size}, {chunks})"
    remedy = (
        f"it is a function that names the rank of each stage, each of the {pipeline_size} ranks "
        f"{chunks} times"
    )
    try:
        given = list(places(pipeline_size, chunks))
        owners = tuple(map(operator.index, given))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} returns no whole numbers ({error}): {remedy}") from error
    if sorted(owners) != sorted([*range(pipeline_size)] * chunks):
        raise ConfigError(f"{what} returns {owners}: {remedy}")
    return owners


def stages_of_rank(
    schedule: AnyOrder, pipeline_size: int, chunks: int, rank: int
) -> tuple[int, ...]:
    """Return the global stages of a pipeline rank in ascending order: those of its chunks."""
    owners = stage_owners(schedule, pipeline_size, chunks)
    return tuple(stage for stage, owner in enumerate(owners) if owner == rank)


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
    stages = np.array(stages_of_rank(schedule, pipeline_size, chunks, rank))
    chunk = np.minimum(np.searchsorted(stages, stage), chunks - 1)
    wrong = (op < 0) | (op > Op.BACKWARD_WEIGHT) | (stages[chunk] != stage)
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
    least, most = ORDERS[schedule].chunks
    if not least <= chunks <= most:
        allowed = f"{least} chunks" if most == least > 1 else "1 chunk"
        if most > least:
            allowed = f"at least {least} chunks"
        fits = [n for n, each in ORDERS.items() if each.chunks[0] <= chunks <= each.chunks[1]]
        raise ConfigError(
            f"pipeline schedule {schedule!r} has {allowed} per rank, got {chunks}: use "
            f"{', '.join(map(repr, fits))}"
        )
