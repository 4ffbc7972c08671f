"""When each pass of a training step runs, from seconds per stage and per boundary: the executor's lists on a clock.

Each rank goes through its own list of a schedule (orders.py), with receives posted ahead, sends in flight and messages
that follow each other on their links, as the executor runs it (messages.py, exchange.py, links.py). Nothing is a
formula for a bubble. In C++ where the extension was built (csrc/schedule_clock.cpp), otherwise by links.replay, with
the same result to the tick: times are counted in whole ticks, a power of two of the caller's unit, so that sums are
exact in any order and equal distances are known to be equal.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from megatron.config.pieces import Order
from megatron.pipeline import links, shared_cores
from megatron.pipeline.instructions import COMPUTE, SENDS_IN_FLIGHT, Instruction, Op, Schedule
from megatron.pipeline.messages import planned_latency
from megatron.pipeline.orders import group_sizes
from megatron.pipeline.schedule import build_schedule, check_sizes
from megatron.pipeline.simulate import Latency, Span, Timeline
from megatron.pipeline.step_times import Boundaries, Boundary, Pipeline, PipelineRun, StageTimes

__all__ = ["Boundaries", "Boundary", "Pipeline", "PipelineRun", "StageTimes", "compiled", "run_pipeline", "timeline"]

compiled: ModuleType | None
try:
    from megatron.pipeline import _schedule_clock as compiled  # type: ignore[attr-defined,no-redef,unused-ignore]
except ImportError:  # a checkout that was not built: slower, and no different
    compiled = None
if getattr(compiled, "interface", None) != 1:  # built from an older csrc/schedule_clock.cpp
    compiled = None

OPS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)  # as schedule_clock.hpp numbers them

# Groups of micro-batches that are run of many equal ones before the rest is taken to follow alike, if they do.
_BLOCKS = (8, 16)
Repeat = tuple[int, int, int, int]  # forward passes of a rank until there; passes and micro-batches of a block; times


def run_pipeline(
    schedule: str | Order,
    pipeline_size: int,
    chunks: int,
    micro_batches: int,
    times: StageTimes,
    boundaries: Boundaries | None = None,
    *,
    cores: float | None = None,
    demand: float = 1.0,
) -> PipelineRun:
    """Run one training step of a pipeline on a clock.

    schedule, pipeline_size, chunks, micro_batches   as build_schedule takes them
    times        by global stage: pipeline_size * chunks values each
    boundaries   by pipeline rank; None for messages that cost nothing
    cores        the ranks share so many cores: while more are wanted, all compute more slowly, alike. None: nothing is
                 shared.
    demand       cores that a rank keeps busy while it computes

    Any unit of time will do. Of many micro-batches only some are run where the rest repeats what these do: when, over
    two groups of micro-batches on all ranks, every pass ends and every message arrives one and the same time later than
    in the group before, all that follows does so too, since each time is a maximum of earlier ones plus a constant.

    Raises ConfigError as build_schedule does.
    """
    check_sizes(schedule, pipeline_size, chunks, micro_batches)
    pipeline = Pipeline(schedule, pipeline_size, chunks, micro_batches, times, boundaries, cores, demand)
    if pipeline_size == 1:
        return _run_alone(pipeline)
    if cores is not None or compiled is None or callable(schedule):
        return _replayed(pipeline)[0]
    scale = _scale(pipeline)
    arguments = _ticks(pipeline, scale)
    for groups, repeats in _shortened(schedule, pipeline_size, chunks, micro_batches):
        done = _plan(schedule, pipeline_size, chunks, groups, _duplex(pipeline)).run(*arguments, repeats, False)
        if done is not None:
            return _of_ticks(pipeline, arguments, done, scale)
    raise AssertionError("a step that is run whole repeats nothing")


def timeline(run: PipelineRun) -> Timeline:
    """For each rank of a run its passes with start and end, in order. Takes memory for large pipelines."""
    pipeline = run.pipeline
    if pipeline.cores is not None or compiled is None or pipeline.size == 1 or callable(pipeline.schedule):
        return _replayed(pipeline)[1]
    scale = _scale(pipeline)
    groups = _groups(pipeline.size, pipeline.chunks, pipeline.micro_batches)
    plan = _plan(pipeline.schedule, pipeline.size, pipeline.chunks, groups, _duplex(pipeline))
    starts, ends = plan.run(*_ticks(pipeline, scale), [], True)[-1]
    ranks = []
    for rank, times in enumerate(zip(starts, ends, strict=True)):
        passes = zip(plan.computations(rank), *times, strict=True)
        ranks.append(tuple(
            Span(Instruction(OPS[op], stage, micro_batch), start / scale, end / scale)
            for (op, stage, micro_batch), start, end in passes
        ))  # fmt: skip
    return Timeline(tuple(ranks))


def _duplex(pipeline: Pipeline) -> bool:
    return pipeline.boundaries is None or pipeline.boundaries.duplex


def _whole_backward(pipeline: Pipeline) -> tuple[float, ...]:
    """A pipeline of one rank splits no backward pass, and an order of one's own some."""
    times, own = pipeline.times, callable(pipeline.schedule)
    if not times.weight or (not own and (pipeline.schedule != "zb-h1" or pipeline.size > 1)):
        return times.backward
    return tuple(a + b for a, b in zip(times.backward, times.weight, strict=True))


def _run_alone(pipeline: Pipeline) -> PipelineRun:
    """A pipeline of one rank: each micro-batch forward through all chunks, then back."""
    times, m = pipeline.times, pipeline.micro_batches
    slower = 1.0 if pipeline.cores is None else max(1.0, pipeline.demand / pipeline.cores)
    forward, backward = ([t * slower for t in of] for of in (times.forward, _whole_backward(pipeline)))
    first = [t * slower for t in times.first] or [0.0] * len(forward)
    end = m * (sum(forward) + sum(backward)) + sum(first)
    last_end = [end - sum(backward[:stage]) for stage in range(len(forward))]
    return PipelineRun(
        pipeline, makespan=end, busy=(end,), waited=(0.0,), message_wait=(0.0,), ends=(end,),
        first_forward_start=tuple(sum(forward[:g]) + sum(first[:g]) for g in range(len(forward))),
        last_backward_start=tuple(e - b for e, b in zip(last_end, backward, strict=True)),
        last_backward_end=tuple(last_end),
    )  # fmt: skip


def _scale(pipeline: Pipeline) -> float:
    """Ticks per unit of time: as many as let the longest conceivable step stay below 2**61."""
    times, boundaries = pipeline.times, pipeline.boundaries
    longest = max(times.forward) + max(times.backward) + max(times.weight, default=0.0) + max(times.first, default=0.0)
    if boundaries is not None:
        longest += 2 * max(a + b for a, b in (*boundaries.forward, *boundaries.backward))
    total = longest * pipeline.size * pipeline.chunks * pipeline.micro_batches
    return 2.0 ** math.floor(61 - math.log2(total)) if total > 0 else 1.0


_Ticks = tuple[list[list[int]], list[int], list[list[int]]]


def _ticks(pipeline: Pipeline, scale: float) -> _Ticks:
    """(durations [op][stage], extra [stage] of first forward passes, costs of messages [4][rank]): forward time on the
    link and behind it, then backward."""
    times, boundaries, stages = pipeline.times, pipeline.boundaries, pipeline.size * pipeline.chunks

    def ticks(seconds: Sequence[float]) -> list[int]:
        return [round(time * scale) for time in seconds]

    assert len(times.forward) == len(times.backward) == stages, f"expected the times of {stages} stages"
    backward = ticks(times.backward)
    durations = [ticks(times.forward), ticks(_whole_backward(pipeline)), backward, ticks(times.weight) or [0] * stages]
    first = ticks(times.first) or [0] * stages
    if boundaries is None:
        return durations, first, [[0] * pipeline.size] * 4
    there, back = boundaries.forward, boundaries.backward
    assert len(there) == len(back) == pipeline.size, f"expected the boundaries of {pipeline.size} ranks"
    return durations, first, [ticks([pair[part] for pair in of]) for of in (there, back) for part in (0, 1)]


def _plan(schedule: str, size: int, chunks: int, groups: tuple[int, ...], duplex: bool) -> Any:
    """The lists of all ranks with their messages: 50 bytes for each pass, so that few large ones are kept."""
    kept = _small_plan if size * chunks * sum(groups) <= _SMALL_PLAN else _large_plan
    return kept(schedule, size, chunks, groups, duplex)


_SMALL_PLAN = 100_000  # forward passes of all ranks


def _new_plan(schedule: str, size: int, chunks: int, groups: tuple[int, ...], duplex: bool) -> Any:
    assert compiled is not None
    # The nominal step's unit is a quarter of a forward pass there.
    latency = round(4 * planned_latency(chunks))
    return compiled.plan_schedule(schedule, size, chunks, groups, latency, duplex, SENDS_IN_FLIGHT)


_small_plan = lru_cache(maxsize=32)(_new_plan)
_large_plan = lru_cache(maxsize=1)(_new_plan)


def _groups(size: int, chunks: int, micro_batches: int) -> tuple[int, ...]:
    return tuple(group_sizes(size, micro_batches)) if chunks > 1 else (micro_batches,)


def _shortened(schedule: str, size: int, chunks: int, m: int) -> Iterator[tuple[tuple[int, ...], list[Repeat]]]:
    """Steps of fewer micro-batches with what would have to repeat in them, and at last the step as it is."""
    for blocks in _BLOCKS:
        groups, repeats, so_far = [], [], 0
        if chunks == 1:
            kinds = [(size, m // size)]
        else:
            sizes = group_sizes(size, m)
            kinds = [(group, sizes.count(group)) for group in dict.fromkeys(sizes)]
        for group, number in kinds:
            kept = min(number, blocks) if number > blocks + 2 else number
            so_far += kept * group
            groups += [group] * kept
            if kept < number:
                passes = (3 if schedule == "zb-h1" else 2) * chunks * group
                repeats.append((chunks * (so_far + (m % size if chunks == 1 else 0)), passes, group, number - kept))
        if repeats:
            yield (tuple(groups) if chunks > 1 else (so_far + m % size,)), repeats
    yield _groups(size, chunks, m), []


def _of_ticks(pipeline: Pipeline, given: _Ticks, done: tuple[Any, ...], scale: float) -> PipelineRun:
    clocks, message_wait, first_forward, last_start, last_end, _ = done
    durations, first, _ = given
    split = pipeline.schedule == "zb-h1"
    each = [f + (b + w if split else b) for f, b, w in zip(durations[0], durations[2], durations[3], strict=True)]
    size, m = pipeline.size, pipeline.micro_batches
    busy = [m * sum(each[rank::size]) + sum(first[rank::size]) for rank in range(size)]

    def seconds(ticks: Sequence[int]) -> tuple[float, ...]:
        return tuple(tick / scale for tick in ticks)

    return PipelineRun(
        pipeline, makespan=max(clocks) / scale, busy=seconds(busy),
        waited=seconds([clock - b for clock, b in zip(clocks, busy, strict=True)]), message_wait=seconds(message_wait),
        ends=seconds(clocks), first_forward_start=seconds(first_forward), last_backward_start=seconds(last_start),
        last_backward_end=seconds(last_end),
    )  # fmt: skip


def _replayed(pipeline: Pipeline) -> tuple[PipelineRun, Timeline]:
    """The step by links.replay: every message a name, every action an object."""
    lists = build_schedule(pipeline.schedule, pipeline.size, pipeline.chunks, pipeline.micro_batches)
    shared = pipeline.cores is not None
    scale = 1.0 if shared else _scale(pipeline)
    times, first, costs = _ticks(pipeline, scale) if not shared else _unscaled(pipeline)
    by_op = dict(zip(OPS, times, strict=True))

    def duration(instruction: Instruction) -> float:
        extra = first[instruction.stage] if instruction.op is Op.FORWARD and instruction.micro_batch == 0 else 0
        return by_op[instruction.op][instruction.stage] + extra

    def cost(part: int) -> Latency:
        there, back = costs[part], costs[2 + part]
        return lambda send: (there if send.op is Op.SEND_FORWARD else back)[send.stage % pipeline.size]

    actions = links.actions_of(
        lists, duration, cost(0), cost(1), sends_in_flight=SENDS_IN_FLIGHT, duplex=_duplex(pipeline)
    )
    if pipeline.cores is None:
        return _described(pipeline, lists, links.replay(actions), scale)
    return _described(pipeline, lists, shared_cores.replay(actions, pipeline.cores, pipeline.demand), scale)


def _unscaled(pipeline: Pipeline) -> tuple[Any, Any, Any]:
    """As _ticks, in the caller's unit: shares of cores are no whole numbers."""
    precise = 2.0**40
    durations, first, costs = _ticks(pipeline, precise)
    return ([[t / precise for t in of] for of in durations], [t / precise for t in first],
            [[t / precise for t in of] for of in costs])  # fmt: skip


def _described(pipeline: Pipeline, lists: Schedule, done: links.Replay, scale: float) -> tuple[PipelineRun, Timeline]:
    passes = [[i for i in rank if i.op in COMPUTE] for rank in lists]
    spans = tuple(
        tuple(Span(i, lane.start, lane.end) for i, lane in zip(of_rank, lanes, strict=True))
        for of_rank, lanes in zip(passes, done.computed, strict=True)
    )
    made: dict[str, float] = {}  # when what a message carries had been computed
    first: dict[int, float] = {}
    last: dict[int, Span] = {}
    for span in (span for of_rank in spans for span in of_rank):
        op, stage, micro_batch = span.instruction
        if op is Op.FORWARD:
            first.setdefault(stage, span.start)
        else:
            last[stage] = span
        if op is not Op.BACKWARD_WEIGHT:
            send = Op.SEND_FORWARD if op is Op.FORWARD else Op.SEND_BACKWARD
            made[str(Instruction(send, stage, micro_batch))] = span.end
    stages = range(pipeline.size * pipeline.chunks)
    busy = [sum(span.end - span.start for span in of_rank) for of_rank in spans]
    run = PipelineRun(
        pipeline,
        makespan=done.makespan / scale,
        busy=tuple(time / scale for time in busy),
        waited=tuple((end - time) / scale for end, time in zip(done.ends, busy, strict=True)),
        message_wait=tuple(
            sum(lane.end - max(lane.start, made[lane.label]) for lane in lanes) / scale for lanes in done.waited
        ),
        ends=tuple(end / scale for end in done.ends),
        first_forward_start=tuple(first[stage] / scale for stage in stages),
        last_backward_start=tuple(last[stage].start / scale for stage in stages),
        last_backward_end=tuple(last[stage].end / scale for stage in stages),
    )
    return run, Timeline(tuple(
        tuple(Span(span.instruction, span.start / scale, span.end / scale) for span in of_rank) for of_rank in spans
    ))  # fmt: skip
