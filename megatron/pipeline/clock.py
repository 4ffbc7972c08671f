"""Times of a training step's passes, computed from the time per stage and per boundary.

The executor's instruction lists run on a simulated clock. Each rank executes its list as the
executor does: receives are posted ahead, sends are asynchronous, and messages queue on their links
(schedule.py, executor.py). No formula for the bubble is used. Unless ranks share cores, times are
counted in whole ticks, the caller's unit divided by a power of two, so that sums are exact in any
order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron.pipeline.orders import ORDERS, AnyOrder, Instruction, Numbers, Op, name_of
from megatron.pipeline.schedule import (
    Lists,
    Schedule,
    ScheduleCosts,
    Times,
    build_lists,
    run,
)


class Span(NamedTuple):
    """A computation and the time it takes."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleTimeline:
    """Computations of each rank, in order."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Time from the first computation's start to the last one's end, over all ranks."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Share of the ranks' time in which they do not compute, between 0 and 1."""
        busy = sum(span.end - span.start for spans in self.ranks for span in spans)
        total = self.makespan * len(self.ranks)
        return 1 - busy / total if total else 0.0


# (time that a message occupies its link, time from leaving the link to arrival)
Boundary = tuple[float, float]


@dataclass(frozen=True)
class StageTimes:
    """Times per micro-batch of each global stage.

    forward   a forward pass
    backward  a full backward pass; for orders that split it, and order functions, the first half,
              the gradient of the input (and recomputation)
    weight    for these orders the second half, the gradients of the weights: a full backward pass
              takes both; '1f1b' and 'interleaved' ignore it
    first     extra time of the stage's first forward pass, for instance to wait for gathered
              weights
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...] = ()
    first: tuple[float, ...] = ()


@dataclass(frozen=True)
class Boundaries:
    """Cost of messages, by sending stage: (time on the link, latency).

    A result for a stage on the same rank is no message, and its cost has no effect.

    forward   to the next stage
    backward  to the previous stage
    duplex    whether the two directions of a pair of ranks are independent. Otherwise a pair's
              messages follow each other in the order in which they are posted, as on the single
              communicator that NCCL and RCCL have for a pair.
    """

    forward: tuple[Boundary, ...]
    backward: tuple[Boundary, ...]
    duplex: bool = True


@dataclass(frozen=True)
class Pipeline:
    """A pipeline's training step, with times in any unit.

    schedule, size, chunks, micro_batches   see build_schedule
    times        by global stage: size * chunks values each
    boundaries   by global stage; None for messages that cost nothing
    cores        number of cores that the ranks share: while more are needed, all ranks slow down
                 equally. None: they share nothing.
    demand       cores that a rank keeps busy while it computes
    """

    schedule: AnyOrder
    size: int
    chunks: int
    micro_batches: int
    times: StageTimes
    boundaries: Boundaries | None = None
    cores: float | None = None
    demand: float = 1.0

    @property
    def name(self) -> str:
        return name_of(self.schedule)


@dataclass(frozen=True)
class PipelineRun:
    """Result of a step on the clock; times are from its start, in the unit of the pipeline.

    By pipeline rank:

    busy           time spent computing
    waited         time spent waiting before the rank is done
    message_wait   the part of `waited` after the awaited result had been computed: the cost of
                   messages, and of receives that are posted late if stages take different times
    ends           when the rank is done with its last pass and all its sends

    By global stage, for work that overlaps with passes (gathering weights, reducing gradients):

    first_forward_start   start of its first forward pass
    last_backward_start   start of the last pass that computes weight gradients (the second half of
                          a backward pass that is split)
    last_backward_end     end of that pass
    """

    pipeline: Pipeline
    makespan: float
    busy: tuple[float, ...]
    waited: tuple[float, ...]
    message_wait: tuple[float, ...]
    ends: tuple[float, ...]
    first_forward_start: tuple[float, ...]
    last_backward_start: tuple[float, ...]
    last_backward_end: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """Share of the ranks' time in which they do not compute, between 0 and 1."""
        total = self.makespan * len(self.busy)
        return 1 - sum(self.busy) / total if total else 0.0


def run_pipeline(pipeline: Pipeline) -> PipelineRun:
    """Run a pipeline's training step on a simulated clock.

    Raises the errors of build_schedule and `schedule.run`.
    """
    lists, done, scale = _run(pipeline)
    busy = np.add.reduceat(done.ends - done.starts, lists.offsets[:-1])
    last = lists.last_backward

    def seconds(ticks: Numbers) -> tuple[float, ...]:
        return tuple((ticks / scale).tolist())

    return PipelineRun(
        pipeline,
        makespan=max(done.done.tolist()) / scale,
        busy=seconds(busy),
        waited=seconds(done.done - busy),
        message_wait=seconds(done.message_wait),
        ends=seconds(done.done),
        first_forward_start=seconds(done.starts[lists.first_forward]),
        last_backward_start=seconds(done.starts[last]),
        last_backward_end=seconds(done.ends[last]),
    )


@lru_cache(maxsize=1)  # a plot and a trace are made from the same run
def timeline(run: PipelineRun) -> ScheduleTimeline:
    """Return each rank's passes in a run, in order, with their start and end times.

    This takes a lot of memory for large pipelines.
    """
    lists, done, scale = _run(run.pipeline)
    return _timeline(lists, done.starts / scale, done.ends / scale)


def simulate(
    schedule: Schedule, durations: Mapping[Op, float], latency: float = 0.0
) -> ScheduleTimeline:
    """Run the computations of all ranks; results arrive `latency` later, without messages.

    durations  time of a pass of each kind
    """
    passes = [
        np.array([i for i in instructions if i.op <= Op.BACKWARD_WEIGHT], np.int32)
        for instructions in schedule
    ]
    lists = Lists.of(passes, schedule.micro_batches)
    stages = schedule.num_stages
    costs = ScheduleCosts(
        np.outer([*(durations[op] for op in tuple(Op)[:4]), 0.0], np.ones(stages)),
        np.outer([0.0, latency] * 2, np.ones(stages)),
    )
    done = run(lists, costs, posted=False)
    return _timeline(lists, done.starts, done.ends)


def _timeline(lists: Lists, starts: Numbers, ends: Numbers) -> ScheduleTimeline:
    ops = tuple(Op)
    ranks = []
    for first, end in itertools.pairwise(lists.offsets.tolist()):
        rows = first + np.flatnonzero(lists.rows[first:end, 0] <= Op.BACKWARD_WEIGHT)
        passes = zip(
            lists.rows[rows].tolist(), starts[rows].tolist(), ends[rows].tolist(), strict=True
        )
        ranks.append(
            tuple(Span(Instruction(ops[op], *at), start, end) for (op, *at), start, end in passes)
        )
    return ScheduleTimeline(tuple(ranks))


def _run(pipeline: Pipeline) -> tuple[Lists, Times, float]:
    """Return the step's lists, its times in ticks, and ticks per unit of time."""
    p = pipeline.size
    v = pipeline.chunks
    m = pipeline.micro_batches
    times = pipeline.times
    stages = p * v
    # Of large lists only the most recent are cached: they take 12 bytes per instruction.
    lists = (_small_lists if stages * m <= _SMALL else _large_lists)(pipeline.schedule, p, v, m)
    assert len(times.forward) == len(times.backward) == stages, (
        f"expected the times of {stages} stages"
    )
    none = (0.0,) * stages
    passes = np.array(
        [times.forward, times.backward, times.backward, times.weight or none, times.first or none]
    )
    if not isinstance(pipeline.schedule, str) or ORDERS[pipeline.schedule].splits:
        # full passes, for a pipeline of one rank or an order that splits only some passes
        passes[Op.BACKWARD] += passes[Op.BACKWARD_WEIGHT]
    messages = np.zeros((4, stages))
    boundaries = pipeline.boundaries
    if boundaries is not None:
        assert len(boundaries.forward) == len(boundaries.backward) == stages, (
            f"expected the boundaries of {stages} stages"
        )
        messages = np.concatenate([np.array(boundaries.forward).T, np.array(boundaries.backward).T])
    costs = ScheduleCosts(passes, messages)
    scale = 1.0
    at_once = math.inf
    if pipeline.cores is None:
        # The most ticks per unit that keep the longest conceivable step below 2**61.
        each = passes[[0, 2, 3, 4]].max(axis=1).sum()
        longest = stages * m * (each + 2 * messages.reshape(2, 2, -1).sum(axis=1).max())
        if longest > 0:
            scale = 2.0 ** math.floor(61 - math.log2(longest))
        costs = ScheduleCosts(*(np.rint(of * scale).astype(np.int64) for of in (passes, messages)))
    else:
        at_once = pipeline.cores / pipeline.demand
    duplex = boundaries is None or boundaries.duplex
    return lists, run(lists, costs, duplex=duplex, at_once=at_once), scale


_SMALL = 100_000  # maximum number of forward passes, of all ranks, in small lists
_small_lists = lru_cache(maxsize=32)(build_lists)
_large_lists = lru_cache(maxsize=1)(build_lists)
