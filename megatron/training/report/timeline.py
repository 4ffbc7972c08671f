"""Timeline of a recorded step: the activities of each rank, and the time of each phase.

A `Recording` keeps the device events of a rank's step. At the next log line `Timeline` gathers the
times of these events on the first rank, converts them to that rank's clock, and writes
timeline.json next to the metrics file. Perfetto, chrome://tracing and
`tools/show_schedule.py --timeline` can read this file.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.kernels.cost import Scope, followed
from megatron.parallel.collectives import gather_objects
from megatron.parallel.flight import MOST_MARKS, CallRecord, DeviceCalls, PendingCall
from megatron.parallel.topology import Group, Topology
from megatron.pipeline.clock import Pipeline, StageTimes, run_pipeline
from megatron.pipeline.executor import Executor
from megatron.pipeline.orders import Instruction, Op
from megatron.pipeline.schedule import clock_missing
from megatron.training.report.events import TimelineRecorded

PHASES = (
    "data",
    "forward",
    "backward",
    "recompute",
    "tensor-parallel",
    "context-parallel",
    "pipeline-wait",
    "data-parallel",
    "optimizer",
    "save",
)
_OF_KIND = {
    "tensor": "tensor-parallel",
    "context": "context-parallel",
    "pipeline": "pipeline-wait",
    "data": "data-parallel",
    "expert_data": "data-parallel",
    "expert_tensor": "tensor-parallel",
    "expert_inputs": "tensor-parallel",
}
_ALL_RANKS = 64  # the largest job whose timeline has all ranks
_MOST_EVENTS = 60_000  # in the file, about 9 MB
_ROUND_TRIPS = 5
_EVERY_S = 60.0  # between two writes of the file, each of which may take half a second


class Activity(NamedTuple):
    """A pass (without the wait for its message), a call or another part of a step; in seconds."""

    what: Any  # an Instruction, a PendingCall, or the name of another part
    start: float
    end: float

    @property
    def phase(self) -> str | None:
        """Return the phase that the time counts toward; None: that of the enclosing activity."""
        if isinstance(self.what, Instruction):
            return "forward" if self.what.op is Op.FORWARD else "backward"
        if isinstance(self.what, PendingCall):
            return _OF_KIND.get(self.what.kind.partition(".")[0])  # ZeRO's are of the data group
        return self.what if self.what in PHASES else None


def _in_order(activity: Activity) -> tuple[float, float]:
    return activity.start, -activity.end


class Recording:
    """The recording of a step on this rank, up to the call of `end`."""

    def __init__(self, topology: Topology, iteration: int) -> None:
        self.iteration = iteration
        self._flight = topology.flight
        self._before = topology.flight.meter
        self._meter = self._flight.meter = self._before or DeviceCalls.of(topology.device)
        self._marks = self._meter.marks = []
        self._first = self._meter.mark()
        self._begun = [self._first]
        self._follows = followed(self)
        self._follows.__enter__()

    def enter(self, scope: Scope) -> None:
        """Begin a scope; only scopes that recompute a value are recorded."""
        self._begun.append(self._meter.mark())

    def leave(self, scope: Scope) -> None:
        begun = self._begun.pop()
        if scope.work is None:
            self._meter.add("recompute", begun)

    def end(self) -> None:
        self._follows.__exit__(None, None, None)
        self._meter.add("step", self._first)
        self._meter.marks = None
        self._flight.meter = self._before

    def activities(self, clock: Callable[[], float]) -> list[Activity]:
        """Return this rank's activities in order of start, timed by `clock`. Waits for the device.

        The list is empty if the step had more calls than can be recorded.
        """
        self._meter.marks = []  # so that the mark is an event with timing
        now = self._meter.mark()
        self._meter.marks = None
        now.synchronize()
        zero = clock() - self._first.elapsed_time(now) / 1000
        if len(self._marks) == MOST_MARKS:
            return []
        ordered = sorted(
            (
                Activity(_named(what), *(zero + self._first.elapsed_time(e) / 1000 for e in events))
                # an enclosing activity was added later, but comes first if the times are equal
                for what, *events in reversed(self._marks)
            ),
            key=_in_order,
        )
        current: int | None = None
        for number, one in enumerate(ordered):
            if isinstance(one.what, Instruction):
                current = number
            elif current is not None and one.phase == "pipeline-wait":
                start, end = ordered[current][1:]
                if one.start < end:
                    ordered[current] = ordered[current]._replace(start=max(start, one.end))
        return sorted(ordered, key=_in_order)


def _named(what: object) -> Instruction | PendingCall | str:
    if isinstance(what, CallRecord):
        return PendingCall.of(what)
    if isinstance(what, tuple):
        return Instruction(Op[what[0].decode()], *what[1:])
    return str(what)


def phases_s(activities: Sequence[Activity]) -> dict[str, float]:
    """Return the seconds spent in each phase, given activities sorted by start.

    Time counts toward the innermost activity that has a phase, so phases do not overlap.
    """
    spent = dict.fromkeys(PHASES, 0.0)
    around: list[tuple[float, str | None]] = [(math.inf, None)]  # end and phase
    for activity in activities:
        while around[-1][0] <= activity.start:
            around.pop()
        limit, outer = around[-1]
        phase = activity.phase or outer
        end = min(activity.end, limit)
        for of, sign in ((phase, 1), (outer, -1)):
            if of is not None:
                spent[of] += sign * (end - activity.start)
        around.append((end, phase))
    return spent


def bubbles(lanes: Sequence[Sequence[Activity]], executor: Executor) -> tuple[float, float | None]:
    """Return the fraction of time that ranks spend outside passes, measured and predicted.

    The prediction is the schedule clock's, in which passes of a kind take their mean measured time
    on all stages, and messages no time. It is None if the clock's extension
    (csrc/schedule_clock.cpp) is not built.

    `lanes` has the passes of each rank of one pipeline, in order.
    """
    lengths = [(one.what.op, one.end - one.start) for lane in lanes for one in lane]
    span_s = max(lane[-1].end for lane in lanes) - min(lane[0].start for lane in lanes)
    stages = len(lanes) * executor.num_chunks
    backward = (
        Op.BACKWARD_INPUT if any(op is Op.BACKWARD_INPUT for op, _ in lengths) else Op.BACKWARD
    )
    times = (
        (fmean([length for op, length in lengths if op is kind] or [0.0]),) * stages
        for kind in (Op.FORWARD, backward, Op.BACKWARD_WEIGHT)
    )
    planned = Pipeline(
        executor.schedule,
        len(lanes),
        executor.num_chunks,
        len({one.what.micro_batch for one in lanes[0]}),
        StageTimes(*times),
    )
    busy = sum(length for _, length in lengths)
    predicted = None if clock_missing() else run_pipeline(planned).bubble_fraction
    return 1 - busy / (span_s * len(lanes)), predicted


def clock_ahead(group: Group, peer: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Return (largest error, how far rank `peer`'s clock is ahead of the first rank's) in seconds.

    `peer` is a rank of `group`. Both ranks call this; only the first gets the result. The shortest
    of several round trips counts; the peer's clock is assumed to be read halfway through it (RFC
    5905, section 8).
    """
    word = torch.zeros(1, dtype=torch.float64)
    best = (math.inf, 0.0)
    other = group.ranks[0 if group.rank else peer]
    group.flight.enter(b"receive", group.kind, word.nbytes, True, peer=other)
    for _ in range(_ROUND_TRIPS):
        if group.rank:
            dist.recv(word, other, group=group.handle)
            dist.send(word.fill_(clock()), other, group=group.handle)
        else:
            sent = clock()
            dist.send(word, other, group=group.handle)
            dist.recv(word, other, group=group.handle)
            got = clock()
            best = min(best, ((got - sent) / 2, float(word) - (sent + got) / 2))
    group.flight.leave()
    return best


@dataclass(eq=False)
class Timeline:
    """Gathers recorded steps on the first rank, which writes them.

    It covers all ranks of a job with up to 64 ranks, and the first pipeline (data- and
    tensor-parallel rank 0) of a larger job. All ranks create a Timeline.

    executor   has the schedule for which the bubble is predicted
    path       file for the trace; None to write none
    say        prints a line
    locations  "node:device" of every rank; needed on rank 0 only
    clock      returns seconds, by a clock that all ranks of a node share
    host       identifies ranks with the same clock; by default the boot id of the node's kernel
    """

    topology: Topology
    executor: Executor
    path: Path | None
    say: Callable[[str], object]
    locations: Sequence[str] = ()
    clock: Callable[[], float] = time.monotonic
    host: str = ""

    def __post_init__(self) -> None:
        topology = self.topology
        if topology.rank == 0 and (missing := clock_missing()):
            self.say(f" timeline: the bubble is measured, but not predicted: {missing}")
        small = topology.world.size <= _ALL_RANKS
        self._group = topology.world if small else topology.pipeline
        self._participates = small or topology.layout.coordinates(topology.rank)[:2] == (0, 0)
        host = self.host
        if not host:
            with suppress(OSError):
                host = Path("/proc/sys/kernel/random/boot_id").read_text()
        self._hosts: list[str] = gather_objects(host, self._group) if self._participates else []
        self._step: tuple[Mapping[int, list[Activity]], int] | None = None
        self._written = -math.inf

    def report(
        self, recording: Recording, save_s: float
    ) -> tuple[dict[str, list[float]], TimelineRecorded | None]:
        """Return the milliseconds of each phase on each rank, and the event of the step.

        Only the first rank gets them; other ranks get {} and None, and so does the first if a rank
        had more calls in the step than can be recorded. `save_s` is this rank's time per step in
        the phase "save", which is spent between steps.
        """
        activities = recording.activities(self.clock)
        spent = {**phases_s(activities), "save": save_s} if activities else None
        of_ranks = gather_objects(spent, self.topology.world, everywhere=False)
        gathered = self._gather(activities) if self._participates else {}
        if not of_ranks or None in of_ranks:
            return {}, None
        lanes = [
            [one for one in gathered[rank] if isinstance(one.what, Instruction)]
            for rank in self.topology.pipeline.ranks
        ]
        measured, predicted = bubbles(lanes, self.executor)
        self._step = gathered, recording.iteration
        if self.clock() - self._written >= _EVERY_S:
            self.write()
        times_ms = {phase: [1000 * of[phase] for of in of_ranks if of] for phase in PHASES}
        return times_ms, TimelineRecorded(
            iteration=recording.iteration,
            bubble=measured,
            predicted_bubble=predicted,
            file=None if self.path is None else self.path.name,
        )

    def _gather(self, activities: list[Activity]) -> dict[int, list[Activity]]:
        """Return the activities of each rank, by the first rank's clock; {} on other ranks."""
        group = self._group
        ahead = dict[str, float]()
        for peer, host in enumerate(self._hosts):
            if host not in ahead:
                other = peer and group.rank in (0, peer)
                ahead[host] = clock_ahead(group, peer, self.clock)[1] if other else 0.0
        # omit shorter activities, so that the file does not grow with the model
        least_s = 0.0
        if activities:
            least_s = (activities[-1].end - activities[0].start) * group.size / _MOST_EVENTS
        sent = [
            one
            for one in activities
            if isinstance(one.what, Instruction) or one.end - one.start >= least_s
        ]
        return {
            rank: [Activity(what, a - ahead[host], b - ahead[host]) for what, a, b in lane]
            for rank, host, lane in zip(
                group.ranks,
                self._hosts,
                gather_objects(sent, group, everywhere=False),
                strict=False,
            )
        }

    def _events(self) -> list[dict[str, object]]:
        """Return the step in the trace event format: replicas as processes, ranks as threads."""
        assert self._step is not None
        gathered, iteration = self._step
        events = list[dict[str, object]]()
        zero = min(lane[0].start for lane in gathered.values())
        for rank, lane in gathered.items():
            tensor, replica, stage = self.topology.layout.coordinates(rank)
            row = {"pid": replica, "tid": rank}
            args: dict[str, object] = {
                "name": f"rank {rank} {''.join(self.locations[rank : rank + 1])}",
                "pipeline": stage,
                "tensor": tensor,
                "iteration": iteration,
            }
            events.append({"ph": "M", "name": "thread_name", "args": args, **row})
            for what, start, end in lane:
                name = what if isinstance(what, str) else what[0]
                if isinstance(what, Instruction):
                    name = f"{what.op.letters}{what.micro_batch} stage {what.stage}"
                events.append(
                    {
                        "ph": "X",
                        "name": name,
                        "cat": Activity(what, start, end).phase or "other",
                        "ts": round(1e6 * (start - zero), 1),
                        "dur": round(1e6 * (end - start), 1),
                        "args": {} if isinstance(what, str) else what._asdict(),
                        **row,
                    }
                )
        return events

    def write(self) -> None:
        """Write the newest step unless it has been written. A full disk does not end the run."""
        if self.path is None or self._step is None:
            return
        new = self.path.with_suffix(".new")
        self._written = self.clock()
        try:
            new.write_text(json.dumps({"traceEvents": self._events()}))
            os.replace(new, self.path)
        except OSError as error:
            self.say(f" warning: {self.path}: {error.strerror}: the timeline is not written")
            self.path = None
            with suppress(OSError):
                new.unlink()
        self._step = None
