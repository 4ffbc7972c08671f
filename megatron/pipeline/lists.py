"""The instructions of all ranks as arrays: passes (orders.py), the messages between them, and their
run on a clock.

Messages carry no tags: the n-th message that one rank sends to another is the n-th that the other
receives. Nor may they deadlock where a send holds up everything behind it until its receive is
posted, as on a NCCL or RCCL communicator. Both follow from one rule: all messages of a step stand
in one sequence, and every rank posts its sends and receives in that sequence. A cycle of ranks that
wait for each other would need a message that stands before itself.

The sequence is that of the messages' production in a step with nominal times. So a message never
waits behind another one that is made later, as long as computations take about their nominal times.

With several chunks messages go round in a ring, and in a step without latency a rank makes one at
the very moment at which its neighbour does. On a network each rank runs a little behind the one
before it, so a rank that must send before it posts its receive posts it too late. There the nominal
messages take `planned_latency`, which puts them in the order of the real ones. With one chunk ranks
compute in turn, and the order without latency is the best one.

A step runs in C++ (csrc/schedule_clock.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.errors import MegatronError
from megatron.pipeline.instructions import SENDS_IN_FLIGHT, Instruction, Op
from megatron.pipeline.orders import AnyOrder, Rows, group_sizes, passes_of_rank

compiled: ModuleType | None
try:
    from megatron.pipeline import _schedule_clock as compiled  # type: ignore[attr-defined,no-redef,unused-ignore]
except ImportError:
    compiled = None

Numbers = npt.NDArray[Any]  # whole numbers of ticks; floating point where ranks share cores
_OPS = tuple(Op)

# A backward pass multiplies twice as many matrices as a forward pass: half for its input, half for
# its weights.
NOMINAL_DURATIONS: Mapping[Op, float] = {
    Op.FORWARD: 1.0,
    Op.BACKWARD: 2.0,
    Op.BACKWARD_INPUT: 1.0,
    Op.BACKWARD_WEIGHT: 1.0,
}


@dataclass(frozen=True, eq=False)
class Lists:
    """Instructions of the ranks of a pipeline, in order, one rank behind the other.

    rows     of all ranks  # [instructions, 3]: op, stage, micro-batch
    offsets  of each rank's first row, and the number of rows  # [ranks + 1]
    owner    the rank of each stage  # [stages]
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
        """The row of each stage's first forward pass."""
        return _first_rows(self.rows, Op.FORWARD)

    @cached_property
    def last_backward(self) -> Numbers:
        """The row of each stage's last pass that makes gradients of weights."""
        return len(self.rows) - 1 - _first_rows(self.rows[::-1], Op.BACKWARD, Op.BACKWARD_WEIGHT)

    def instructions(self, rank: int) -> tuple[Instruction, ...]:
        return tuple(
            Instruction(_OPS[op], stage, micro_batch)
            for op, stage, micro_batch in self[rank].tolist()
        )


def _first_rows(rows: Rows, *ops: Op) -> Numbers:
    found = np.flatnonzero(np.isin(rows[:, 0], ops))
    return found[np.unique(rows[found, 1], return_index=True)[1]]


@dataclass(frozen=True)
class Costs:
    """Times of passes and messages.

    passes    of FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, and what the first FORWARD
              takes longer # [5, stages]
    messages  forward: on the link, behind it; backward: likewise; by the stage that sends  # [4,
              stages]
    """

    passes: Numbers
    messages: Numbers


@dataclass(frozen=True)
class Times:
    """Times at which the instructions of `Lists` start and end, by row; when ranks are done, and
    what they waited for messages after the result waited for had been computed, by rank."""

    starts: Numbers
    ends: Numbers
    done: Numbers
    message_wait: Numbers


def run(
    lists: Lists,
    costs: Costs,
    *,
    posted: bool = True,
    duplex: bool = True,
    cores: float | None = None,
    demand: float = 1.0,
) -> Times:
    """Run the lists on a clock, as the executor does: in ticks, or in floating point as `costs`.

    posted         messages are posted by the lists; without, results travel by themselves as soon as
                   they are computed
    duplex         the two directions of a pair of ranks are links of their own
    cores, demand  cores that all ranks share, and that one of them keeps busy while it computes;
                   None: nothing is shared

    Raises ValueError for a deadlock and MegatronError without the extension.
    """
    if getattr(compiled, "interface", None) != 3:
        raise MegatronError(
            "megatron.pipeline._schedule_clock is missing or was built from other sources: run "
            "`python setup.py build_ext --inplace` (with a C++ compiler) or `pip install .`"
        )
    assert compiled is not None and (cores is None or min(cores, demand) > 0)
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
            math.inf if cores is None else cores / demand,
        )
    )


def planned_latency(chunks: int) -> float:
    """Time that messages take in the step from which their sequence is read, in forward passes of
    one chunk.

    Measured on simulated links for latencies from 0.05 to 0.5 with passes of unequal
    length: 8 ranks with 4 chunks wait 0.1 % of the step for messages that were posted too late
    instead of 3 to 7 %; sixteenths do as well.
    """
    return 0.25 if chunks > 1 else 0.0


def with_messages(passes: Lists) -> Lists:
    """The passes of each rank with sends directly behind what they send, and receives posted ahead
    of need.

    Each rank's passes and messages stand in the order of (time, rank) at which the nominal step
    computes what they
    make or carry. So a receive is posted before the computation that its rank runs while the message is made, and the
    message travels behind it; later only where a send of this rank stands before it in the
    sequence. It is never posted earlier than that, which bounds the buffers to messages that are
    made and not yet used and those in the making: 2 per rank with one chunk; with more at most 3
    and the largest group of micro-batches (orders.py), usually a third of that.
    """
    size, stages = len(passes), len(passes.owner)
    if size == 1:
        return passes
    unit = 4  # ticks of a forward pass
    nominal = np.array([NOMINAL_DURATIONS[op] for op in _OPS[:4]] + [0.0])
    latency = round(unit * planned_latency(stages // size))
    costs = Costs(
        np.repeat((unit * nominal).astype(np.int64), stages).reshape(5, stages),
        np.repeat(np.array([0, latency] * 2, np.int64), stages).reshape(4, stages),
    )
    ends = run(passes, costs, posted=False).ends
    op, stage, _ = np.ascontiguousarray(passes.rows.T)
    rank = np.repeat(np.arange(size), np.diff(passes.offsets))
    back = op != Op.FORWARD
    # stage -1 is that behind the last one
    to = np.append(passes.owner, -1)[np.minimum(stage + 1 - 2 * back, stages)]
    leaves = (to >= 0) & (to != rank) & (op != Op.BACKWARD_WEIGHT)
    # At one time: a pass, its send, messages of later ranks; a pass that sends nothing is behind
    # all messages.
    time = (2 * size + 1) * ends
    key = time + np.where(leaves, 2 * rank, 2 * size)
    there, again = (np.flatnonzero(leaves & of) for of in (~back, back))
    sends = np.flatnonzero(leaves)
    # runs that are almost in order
    source = np.concatenate([np.arange(len(op)), sends, there, again])
    at = np.cumsum([0, len(op), len(sends), len(there), len(again)])
    key, ranks = key[source], rank[source]
    key[at[1] : at[2]] += 1
    ranks[at[2] :] = to[source[at[2] :]]
    order = np.argsort(ranks * (1 + key.max()) + key, kind="stable")
    rows = passes.rows[source[order]]
    placed = np.empty(len(order), np.intp)
    placed[order] = np.arange(len(order))
    for part, (forward, backward), steps in (
        (slice(at[1], at[2]), (Op.SEND_FORWARD, Op.SEND_BACKWARD), (0, 0)),
        (slice(at[2], at[4]), (Op.RECV_FORWARD, Op.RECV_BACKWARD), (1, -1)),
    ):
        behind = back[source[part]]
        rows[placed[part], 0] = np.where(behind, backward, forward)
        rows[placed[part], 1] += np.where(behind, *steps[::-1]).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(ranks, minlength=size))])
    return Lists(rows, offsets, passes.owner, passes.micro_batches)


class Moments(NamedTuple):
    """Passes of a step, one row each, among them the one during which most is held.

    forward  1 for a forward pass, 0 for a backward pass (where it is split, its first half)
    chunk    of this rank, from 0
    held     micro-batches of each chunk whose forward pass is over and whose backward pass has not
             begun, without the
             pass's own  # [moments, chunks]
    waiting  micro-batches whose weight gradients wait, of all chunks
    """

    forward: Numbers
    chunk: Numbers
    held: Numbers
    waiting: Numbers


_GROUPS = 3
"""Groups of micro-batches of one size after which what a rank holds in any order of ORDERS repeats:
the warm-up is shorter than two, and each pass of a group then has the same ones before it as that
of the group before."""


@lru_cache(maxsize=1 << 13)
def moments_of_rank(
    schedule: AnyOrder, pipeline_size: int, chunks: int, micro_batches: int, rank: int
) -> Moments:
    """Return the passes of `rank` in a step of `micro_batches`, without repetitions."""
    if isinstance(schedule, str):
        sizes = group_sizes(pipeline_size, micro_batches)
        larger = sizes.count(sizes[0])
        # That many micro-batches have these groups: together they are less than a group longer than
        # the pipeline each.
        micro_batches = sum(sizes[:larger][:_GROUPS] + sizes[larger:][:_GROUPS])
    op, stage, _ = passes_of_rank(schedule, pipeline_size, chunks, micro_batches, rank).T
    chunk = stage // pipeline_size
    begins = (op == Op.BACKWARD) | (op == Op.BACKWARD_INPUT)
    own = chunk[:, None] == np.arange(chunks)
    forward, backward = own & (op == Op.FORWARD)[:, None], own & begins[:, None]
    held = np.cumsum(forward, axis=0) - forward - np.cumsum(backward, axis=0)
    waiting = (
        np.cumsum(op == Op.BACKWARD_INPUT)
        - (op == Op.BACKWARD_INPUT)
        - np.cumsum(op == Op.BACKWARD_WEIGHT)
    )
    rows = np.flatnonzero(op != Op.BACKWARD_WEIGHT)
    if chunks == 1:  # else what a rank holds differs from pass to pass
        seen = (2 * held[rows, 0] + (op[rows] == Op.FORWARD)) * micro_batches + waiting[rows]
        rows = rows[np.unique(seen, return_index=True)[1]]
    return Moments(
        (op[rows] == Op.FORWARD).astype(np.int64), chunk[rows], held[rows], waiting[rows]
    )
