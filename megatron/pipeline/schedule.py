"""Pipeline schedules: which rank computes, sends and receives what, and in which order.

This module also simulates the timing of a schedule, and counts the activations that a rank holds.
Schedules are pure data, and the module needs no torch.

>>> for instructions in build_schedule("1f1b", pipeline_size=2, chunks=1, micro_batches=2):
...     print(" ".join(f"{i.op.letters}{i.micro_batch}" for i in instructions))
F0 SF0 F1 SF1 RB0 B0 RB1 B1
RF0 RF1 F0 B0 SB0 F1 B1 SB1

The passes of each rank come from orders.py. This module places the messages between them by one
rule. Messages carry no tags: the n-th that one rank sends to another is the n-th that the other
receives. And they must not deadlock if a send blocks its rank until the receive is posted, as on an
NCCL or RCCL communicator. Therefore all messages in a step form one sequence, and every rank posts
its sends and receives in that sequence: a cycle of ranks that wait for each other would need a
message that precedes itself.

The sequence is the order in which messages are produced in a step with nominal times. Thus no
message waits behind one that is produced later, as long as computations take about their nominal
times.

With several chunks, messages travel around a ring (or a V), and in a step without latency a rank
produces a message at the very moment when its neighbour does. On a network each rank runs a little
behind the previous one: a rank that must send before it posts its receive would post it too late.
For several chunks, the nominal messages therefore take `planned_latency`, which puts them in the
order of the real ones. With one chunk, ranks compute in turn, and the order without latency is best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config.parallel import V_SHAPED
from megatron.errors import BUILD, ConfigError, MegatronError
from megatron.pipeline.orders import (
    ORDERS,
    SENDS_IN_FLIGHT,
    AnyOrder,
    Instruction,
    Numbers,
    Op,
    Rows,
    check_sizes,
    group_sizes,
    name_of,
    passes_of_rank,
    stages_of_rank,
)

compiled: ModuleType | None
try:
    from megatron.pipeline import _schedule_clock as compiled  # type: ignore[attr-defined,no-redef,unused-ignore]
except ImportError:
    compiled = None

_OPS = tuple(Op)


@dataclass(frozen=True)
class Schedule:
    """Instructions for every rank of a pipeline in one step, in order.

    Index it with a pipeline rank.
    """

    name: str
    pipeline_size: int
    chunks: int
    micro_batches: int
    forward_only: bool
    ranks: tuple[tuple[Instruction, ...], ...] = field(repr=False)

    @property
    def num_stages(self) -> int:
        return self.pipeline_size * self.chunks

    def __getitem__(self, rank: int) -> tuple[Instruction, ...]:
        return self.ranks[rank]

    def __iter__(self) -> Iterator[tuple[Instruction, ...]]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)


@lru_cache(maxsize=2)  # a large pipeline's lists for all ranks take hundreds of megabytes
def build_schedule(
    name: AnyOrder, pipeline_size: int, chunks: int, micro_batches: int, forward_only: bool = False
) -> Schedule:
    """Return the instructions of every pipeline rank for one training step.

    With `forward_only`, return those for one iteration of an evaluation instead.

    name           '1f1b' and 'zb-h1' have one chunk of layers per rank, 'interleaved' two or more,
                   those in the shape of a V two; or an order function (orders.py). A pipeline of
                   one rank computes one micro-batch after another under any name.
    chunks         chunks (virtual stages) per rank; orders.stage_owners says which.
    micro_batches  any positive number.

    Raises ConfigError for an unknown name, an invalid size or combination, and an order that cannot
    be run; and MegatronError if the compiled clock is missing (clock_missing), unless there is one
    rank.
    """
    lists = build_lists(name, pipeline_size, chunks, micro_batches, forward_only)
    ranks = tuple(map(lists.instructions, range(pipeline_size)))
    return Schedule(name_of(name), pipeline_size, chunks, micro_batches, forward_only, ranks)


@lru_cache(maxsize=16)
def build_rank_schedule(
    name: AnyOrder,
    pipeline_size: int,
    chunks: int,
    micro_batches: int,
    rank: int,
    forward_only: bool = False,
) -> tuple[Instruction, ...]:
    """Return `build_schedule(...)[rank]` without creating instructions of the other ranks."""
    assert 0 <= rank < pipeline_size, f"pipeline rank {rank} of {pipeline_size}"
    return build_lists(name, pipeline_size, chunks, micro_batches, forward_only).instructions(rank)


def build_lists(
    name: AnyOrder, pipeline_size: int, chunks: int, micro_batches: int, forward_only: bool = False
) -> Lists:
    """Return `build_schedule(...)` as arrays."""
    sizes = name, pipeline_size, chunks, micro_batches
    check_sizes(*sizes)
    passes = [passes_of_rank(*sizes, rank) for rank in range(pipeline_size)]
    if forward_only:
        passes = [rows[rows[:, 0] == Op.FORWARD] for rows in passes]
    try:
        return with_messages(Lists.of(passes, micro_batches))
    except ValueError as error:
        raise ConfigError(
            f"order {name_of(name)!r} cannot be run by {pipeline_size} ranks: {error}"
        ) from None


@lru_cache(maxsize=256)
def splits_backward(
    schedule: AnyOrder, pipeline_size: int, chunks: int, micro_batches: int
) -> bool:
    """Return whether backward passes run in two halves, for inputs and for weights.

    For an order function, whether any backward pass of any rank does.
    """
    if isinstance(schedule, str):
        return pipeline_size > 1 and ORDERS[schedule].splits
    sizes = pipeline_size, chunks, micro_batches
    of_ranks = (passes_of_rank(schedule, *sizes, rank) for rank in range(pipeline_size))
    return any((rows[:, 0] == Op.BACKWARD_INPUT).any() for rows in of_ranks)


# -- lists -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Lists:
    """Instructions of all ranks of a pipeline as arrays, rank after rank.

    rows           instructions of all ranks  # [instructions, 3]: op, stage, micro-batch
    offsets        index of each rank's first row, and the number of rows  # [ranks + 1]
    owner          the rank of each stage  # [stages]
    micro_batches  number of micro-batches in the step
    """

    rows: Rows
    offsets: npt.NDArray[np.int64]
    owner: npt.NDArray[np.int32]
    micro_batches: int

    @staticmethod
    def of(ranks: Sequence[Rows], micro_batches: int) -> Lists:
        rows = np.ascontiguousarray(np.concatenate(ranks), np.int32)
        offsets = np.cumsum([0, *map(len, ranks)])
        owner = np.full(rows[:, 1].max() + 1, -1, np.int32)
        owner[rows[:, 1]] = np.repeat(np.arange(len(ranks)), np.diff(offsets))
        return Lists(rows, offsets, owner, micro_batches)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rank: int) -> Rows:
        return self.rows[self.offsets[rank] : self.offsets[rank + 1]]

    @cached_property
    def first_forward(self) -> Numbers:
        """Row of each stage's first forward pass."""
        return _first_rows(self.rows, Op.FORWARD)

    @cached_property
    def last_backward(self) -> Numbers:
        """Row of each stage's last pass that computes gradients of weights."""
        return len(self.rows) - 1 - _first_rows(self.rows[::-1], Op.BACKWARD, Op.BACKWARD_WEIGHT)

    def instructions(self, rank: int) -> tuple[Instruction, ...]:
        return tuple(
            Instruction(_OPS[op], stage, micro_batch)
            for op, stage, micro_batch in self[rank].tolist()
        )


def _first_rows(rows: Rows, *ops: Op) -> Numbers:
    indices = np.flatnonzero(np.isin(rows[:, 0], ops))
    return indices[np.unique(rows[indices, 1], return_index=True)[1]]


# -- a run on a clock ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScheduleCosts:
    """Times of passes and messages.

    Whole numbers of ticks; floating point if ranks share cores.

    passes    FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, and the additional time of the
              first FORWARD  # [5, stages]
    messages  by the sending stage: time of a forward message on the link, and its latency; the same
              for backward messages  # [4, stages]
    """

    passes: Numbers
    messages: Numbers


@dataclass(frozen=True)
class Times:
    """Times of a run of `Lists`.

    starts, ends  start and end of each instruction, by row
    done          when each rank was done
    message_wait  how long each rank waited for results that had already been computed
    """

    starts: Numbers
    ends: Numbers
    done: Numbers
    message_wait: Numbers


def check_clock() -> None:
    """Raise MegatronError if `run` cannot run, for callers that need it only at the end."""
    if missing := clock_missing():
        raise MegatronError(missing)


def clock_missing() -> str:
    """Return why `run` cannot run, and what to do; "" if it can."""
    if getattr(compiled, "interface", None) == 3:
        return ""
    return (
        "megatron.pipeline._schedule_clock, which simulates schedules, is not built or is from "
        f"other sources: {BUILD}"
    )


def run(
    lists: Lists,
    costs: ScheduleCosts,
    *,
    posted: bool = True,
    duplex: bool = True,
    at_once: float = math.inf,
) -> Times:
    """Simulate the timing of the lists when the executor runs them.

    The simulation is in csrc/schedule_clock.cpp. Times are in ticks, or in floating point if
    `costs` are.

    posted   whether the lists contain messages; otherwise results travel by themselves as soon as
             they are computed
    duplex   whether the two directions between a pair of ranks are separate links
    at_once  number of ranks that can compute at full speed at a time; more of them share the speed
             equally

    Raises ValueError for a deadlock or an invalid list, and MegatronError without the extension.
    """
    check_clock()
    assert compiled is not None and at_once > 0
    step = compiled.run if costs.passes.dtype == np.int64 else compiled.run_shared
    return Times(
        *step(
            lists.rows,
            lists.offsets,
            lists.owner,
            lists.micro_batches,
            costs.passes,
            costs.messages,
            posted,
            duplex,
            SENDS_IN_FLIGHT,
            at_once,
        )
    )


# -- messages --------------------------------------------------------------------------------------


# A backward pass has twice as many matrix products as a forward pass: half of them for the gradient
# of the input, half for the gradients of the weights.
NOMINAL_DURATIONS: Mapping[Op, float] = {
    Op.FORWARD: 1.0,
    Op.BACKWARD: 2.0,
    Op.BACKWARD_INPUT: 1.0,
    Op.BACKWARD_WEIGHT: 1.0,
}


def planned_latency(chunks: int) -> float:
    """Return the latency of messages in the nominal step, in forward passes of one chunk.

    Measured on simulated links with latencies from 0.05 to 0.5 and passes of unequal length: 8
    ranks with 4 chunks wait 0.1 % of the step for messages that were posted too late, instead of 3
    to 7 %. A latency of 1/16 works equally well.
    """
    return 0.25 if chunks > 1 else 0.0


def with_messages(passes: Lists) -> Lists:
    """Add messages to the passes of each rank.

    Sends directly follow the pass whose result they send; receives are posted ahead of need. Each
    rank's passes and messages are sorted by the (time, rank) at which the nominal step computes
    the tensors that they produce or carry. A receive is thus posted before the pass that its rank
    computes while the message is produced, and the message travels during that pass; it is posted
    later only if a send of this rank precedes it in the sequence. It is never posted earlier.
    Buffers are thus needed only for messages that have been produced but not yet used, or are being
    produced: 2 per rank with one chunk; with more chunks at most 3 plus the largest group of
    micro-batches (orders.py), usually a third of that.
    """
    size = len(passes)
    stages = len(passes.owner)
    if size == 1:
        return passes
    unit = 4  # ticks of a forward pass
    nominal = np.array([NOMINAL_DURATIONS[op] for op in _OPS[:4]] + [0.0])
    latency = round(unit * planned_latency(stages // size))
    costs = ScheduleCosts(
        np.repeat((unit * nominal).astype(np.int64), stages).reshape(5, stages),
        np.repeat(np.array([0, latency] * 2, np.int64), stages).reshape(4, stages),
    )
    ends = run(passes, costs, posted=False).ends
    op, stage, _ = np.ascontiguousarray(passes.rows.T)
    rank = np.repeat(np.arange(size), np.diff(passes.offsets))
    back = op != Op.FORWARD
    # -1 before the first stage and after the last
    to = np.append(passes.owner, -1)[np.minimum(stage + 1 - 2 * back, stages)]
    leaves = (to >= 0) & (to != rank) & (op != Op.BACKWARD_WEIGHT)
    # Order at equal times: a pass, its send, messages of later ranks; a pass that sends nothing
    # comes after all messages.
    time = (2 * size + 1) * ends
    key = time + np.where(leaves, 2 * rank, 2 * size)
    forward_sends, backward_sends = (np.flatnonzero(leaves & of) for of in (~back, back))
    sends = np.flatnonzero(leaves)
    # consecutive parts that are each almost sorted
    source = np.concatenate([np.arange(len(op)), sends, forward_sends, backward_sends])
    at = np.cumsum([0, len(op), len(sends), len(forward_sends), len(backward_sends)])
    key = key[source]
    ranks = rank[source]
    key[at[1] : at[2]] += 1
    ranks[at[2] :] = to[source[at[2] :]]
    order = np.argsort(ranks * (1 + key.max()) + key, kind="stable")
    rows = passes.rows[source[order]]
    placed = np.empty(len(order), np.intp)
    placed[order] = np.arange(len(order))
    for span, (forward, backward), steps in (
        (slice(at[1], at[2]), (Op.SEND_FORWARD, Op.SEND_BACKWARD), (0, 0)),
        (slice(at[2], at[4]), (Op.RECV_FORWARD, Op.RECV_BACKWARD), (1, -1)),
    ):
        behind = back[source[span]]
        rows[placed[span], 0] = np.where(behind, backward, forward)
        rows[placed[span], 1] += np.where(behind, *steps[::-1]).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(ranks, minlength=size))])
    return Lists(rows, offsets, passes.owner, passes.micro_batches)


# -- activations of a rank -------------------------------------------------------------------------


class Moments(NamedTuple):
    """Passes of a step in order, one row each.

    op         kind of the pass
    chunk      chunk of this rank, from 0
    in_flight  number of micro-batches of each chunk between their forward and their backward pass
               (or its first half, if it is split), not counting the pass's own  # [moments, chunks]
    waiting    number of micro-batches of each chunk whose weight gradients are deferred, not
               counting the pass's own  # [moments, chunks]
    messages   number of sent messages that are kept, of messages for which a receive has been
               posted, and of results that wait for a stage of the same rank, not counting the one
               that the pass uses
    """

    op: Numbers
    chunk: Numbers
    in_flight: Numbers
    waiting: Numbers
    messages: Numbers


_GROUPS = 3
"""Number of equal groups of micro-batches after which a rank's memory use repeats, for any order in
ORDERS: the warm-up is shorter than two groups, and from then on each group holds as much as the
previous one."""


def _enough_for_a_v(schedule: str, size: int, micro_batches: int) -> int:
    """Return a number of micro-batches, at most this one, with the same memory use.

    The warm-up of an order in the shape of a V has at most 2 size + 1 micro-batches. From then on
    all repeats after each micro-batch; but where the passes W of V-min have no fixed place among
    the others, only after (2 size - 1) / 3.
    """
    most = 4 * size
    period = (2 * size - 1) // 3 if schedule == "v-min" and size % 3 == 2 else 1
    return micro_batches - max(0, -(-(micro_batches - most) // period)) * period


_lists = lru_cache(maxsize=16)(build_lists)


@lru_cache(maxsize=1 << 11)
def moments_of_rank(
    schedule: AnyOrder, pipeline_size: int, chunks: int, micro_batches: int, rank: int
) -> Moments:
    """Return the passes of `rank` in a step of `micro_batches`, or of fewer with the same peak."""
    if isinstance(schedule, str) and schedule in V_SHAPED:
        micro_batches = _enough_for_a_v(schedule, pipeline_size, micro_batches)
    elif isinstance(schedule, str):
        sizes = group_sizes(pipeline_size, micro_batches)
        larger = sizes.count(sizes[0])
        # The same groups result from this smaller number of micro-batches.
        micro_batches = sum(sizes[:larger][:_GROUPS] + sizes[larger:][:_GROUPS])
    lists = _lists(schedule, pipeline_size, chunks, micro_batches)
    op, stage, _ = lists[rank].T
    chunk = np.searchsorted(stages_of_rank(schedule, pipeline_size, chunks, rank), stage)
    begins = (op == Op.BACKWARD) | (op == Op.BACKWARD_INPUT)
    of_chunk = chunk[:, None] == np.arange(chunks)
    forward = of_chunk & (op == Op.FORWARD)[:, None]
    in_flight = np.cumsum(forward, axis=0) - forward - np.cumsum(of_chunk & begins[:, None], axis=0)
    later = (op == Op.BACKWARD_WEIGHT)[:, None]
    split = (op == Op.BACKWARD_INPUT)[:, None]
    waiting = np.cumsum(of_chunk & split, axis=0) - (of_chunk & split)
    waiting -= np.cumsum(of_chunk & later, axis=0)
    sends = np.cumsum((op == Op.SEND_FORWARD) | (op == Op.SEND_BACKWARD))
    posted = np.cumsum((op == Op.RECV_FORWARD) | (op == Op.RECV_BACKWARD))
    before, behind = np.stack([stage - 1, stage + 1]) % len(lists.owner)
    first = stage == 0
    last = stage == len(lists.owner) - 1
    used = np.cumsum(((op == Op.FORWARD) & ~first) | (begins & ~last))
    # results for a stage of this rank, from the end of the pass on
    kept = (op == Op.FORWARD) & ~last & (lists.owner[behind] == rank)
    kept |= begins & ~first & (lists.owner[before] == rank)
    messages = np.minimum(sends, SENDS_IN_FLIGHT) + posted - used + np.cumsum(kept) - kept
    rows = np.flatnonzero(op <= Op.BACKWARD_WEIGHT)
    return Moments(*(x[rows] for x in (op, chunk, in_flight, waiting, messages)))
