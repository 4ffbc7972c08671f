"""What is measured, one figure's point at a time, and how a piece of work is timed."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.parallel.report import seconds_waited

Work = Callable[[], Any]
Make = Callable[[], Work]

TERA, GIGA = 1e12, 1e9
_ROUNDS = 3
PASSES = 3
"""Over all tasks: what disturbs a machine for seconds disturbs one of them."""


@dataclass(frozen=True)
class Task:
    """One point of a figure (planner/compute.py).

    figure, place  the figure's name, and the point's columns before its last
    make           allocates what the work needs and gives the work
    amount         operations or bytes of one call, of which `unit` are counted per second; None: the value is seconds
    calls          how many pieces one call of the work is made of
    share          processes for each core while it is measured, at least 1: seconds are those of a core of one's own
    together       all processes do it with each other, and as often
    before         makes work that each call begins with and that does not count: what a message meets in a step
    """

    figure: str
    place: tuple[float, ...]
    make: Make
    amount: float | None = None
    unit: float = GIGA
    calls: int = 1
    share: float = 1.0
    together: bool = False
    before: Make | None = None

    def value(self, seconds: float) -> float:
        """The point's last column, of the seconds of one piece."""
        seconds /= self.share
        return seconds if self.amount is None else self.amount / seconds / self.unit


def finish(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _elapsed(work: Work, calls: int, device: torch.device, together: bool) -> float:
    """Seconds of so many calls: on a GPU between events on its stream, else by the clock, without those in which this
    thread waited for a core that another program had. Where processes wait for each other, by the clock alone."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    waited, ran, begin = seconds_waited() or 0.0, time.thread_time(), time.perf_counter()
    for _ in range(calls):
        work()
    elapsed, ran = time.perf_counter() - begin, time.thread_time() - ran
    if together:
        return elapsed
    # A wait is counted when it ends, with what of it was before the beginning: never less than the time it ran.
    return max(elapsed - ((seconds_waited() or 0.0) - waited), ran)


class Partners:
    """Processes that measure at the same time; here one alone."""

    def largest(self, value: float) -> float:
        """Of the values that all give, once all have given one."""
        return value


def seconds_per_call(
    work: Work, device: torch.device, seconds: float, partners: Partners, together: bool
) -> list[float]:
    """Of one call, after one to warm up: in each of three rounds that take about so many seconds in all, or of a single
    call that takes as long."""
    work()
    finish(device)
    once = max(_elapsed(work, 1, device, together), 1e-7)
    agreed = partners.largest(once) if together else once
    if agreed >= seconds:
        return [once]
    calls = max(1, min(10_000, int(seconds / _ROUNDS / agreed)))
    return [_elapsed(work, calls, device, together) / calls for _ in range(_ROUNDS)]


def measure(
    tasks: Sequence[Task], device: torch.device, seconds: float, partners: Partners | None = None, active: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of one piece of each task, the median of its rounds, as a step of training is judged by; all tasks take
    about `seconds`, more only where every task once takes more.

    All processes give the same tasks; one that is not `active` takes part in those only that all do together, and finds
    infinity for the others.
    """
    partners = partners or Partners()
    rounds: list[list[float]] = [[] for _ in tasks]
    each, begin = seconds / (len(tasks) * PASSES) if tasks else 0.0, clock()
    for number in range(PASSES):
        for i, task in enumerate(tasks):
            works = active or task.together
            work = task.make() if works else None
            # All start together, and all know alike when it is over.
            if partners.largest(clock() - begin) > seconds and number:
                return [_median(found) for found in rounds]
            if work is not None:
                found = seconds_per_call(work, device, each, partners, task.together)
                before = seconds_per_call(task.before(), device, each / 2, partners, True) if task.before else [0.0]
                rounds[i] += [max(value - _median(before), 1e-7) / task.calls for value in found]
    return [_median(found) for found in rounds]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("inf")
