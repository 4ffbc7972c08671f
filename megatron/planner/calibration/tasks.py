"""What is measured, one point of a figure at a time, and how a piece of work is timed."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from megatron.parallel.processes import seconds_waited

Work = Callable[[], Any]
Make = Callable[[], Work]
Largest = Callable[[float], float]
"""The largest of the values that all processes which measure together give, once all have given one."""

PASSES, _ROUNDS = 3, 3
"""Passes over all tasks, each with so many rounds: what disturbs a machine for seconds disturbs one pass of a task."""


class Task(NamedTuple):
    """One point of a figure (planner/compute.py).

    figure, place  the figure's name, and the point's columns before its last
    make           allocates what the work needs and gives the work
    amount         of one call, of which a number per second is the value; None: the value is seconds
    calls          how many pieces one call of the work is made of
    before         makes work that is done before each call and does not count: what a message meets in a step
    """

    figure: str
    place: tuple[float, ...]
    make: Make
    amount: float | None = None
    calls: int = 1
    before: Make | None = None

    def value(self, seconds: float) -> float:
        """The point's last column, given the seconds of one piece."""
        return seconds if self.amount is None else self.amount / seconds


def finish(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _elapsed(work: Work, calls: int, device: torch.device, together: bool) -> float:
    """Seconds of so many calls: on a GPU between events on its stream, on a CPU by the clock. The latter without those
    in which this thread waited for a core that another program had, unless processes wait for each other."""
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


def seconds_per_call(work: Work, device: torch.device, seconds: float, largest: Largest | None = None) -> list[float]:
    """Seconds of one call, after one to warm up: in each of three rounds that take about `seconds` in all, or of a
    single call that takes as long. largest: of the processes that do it together, as often."""
    work()
    finish(device)
    once = max(_elapsed(work, 1, device, largest is not None), 1e-7)
    agreed = once if largest is None else largest(once)
    if agreed >= seconds:
        return [once]
    calls = max(1, min(10_000, int(seconds / _ROUNDS / agreed)))
    return [_elapsed(work, calls, device, largest is not None) / calls for _ in range(_ROUNDS)]


def measure(
    tasks: Sequence[Task], device: torch.device, seconds: float, largest: Largest | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of one piece of each task, the median of its rounds, as a step of training is judged by.

    All tasks take about `seconds`, more only where one pass takes more. largest: of the processes that measure the same
    tasks together.
    """
    rounds: list[list[float]] = [[] for _ in tasks]
    each, begin = seconds / (max(1, len(tasks)) * PASSES), clock()
    for number in range(PASSES):
        for task, found in zip(tasks, rounds, strict=True):
            works, took = [task.make()], clock() - begin
            # All know alike when it is over.
            if number and (took if largest is None else largest(took)) > seconds:
                return [statistics.median(found) for found in rounds]
            alone = 0.0
            if task.before is not None:
                works.insert(0, task.before())
                alone = statistics.median(seconds_per_call(works[0], device, each / 2, largest))
            found += [max(value - alone, 1e-7) / task.calls
                      for value in seconds_per_call(_one_after_another(works), device, each, largest)]  # fmt: skip
    return [statistics.median(found) for found in rounds]


def _one_after_another(works: Sequence[Work]) -> Work:
    def run() -> list[Any]:
        return [work() for work in works]

    return works[0] if len(works) == 1 else run
