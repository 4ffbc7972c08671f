"""Interruptions of a run: restarts within the job, new starts, repeated steps, effective time.

All functions take the records of a metrics file in their order. A restart within the job writes a
local_checkpoint_loaded record if it continues from memory, then a start record, then its own.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PROGRESS = ("iteration", "validation", "checkpoint", "local_checkpoint", "loss_spike", "end")
"""Events whose iteration the run has reached."""


@dataclass(frozen=True)
class RecordedRestart:
    """A restart within the job.

    number  index of its record
    start   index of the start record that belongs to it; None if that line is missing
    source  from where it continued: "memory", "disk", or "the beginning"
    """

    number: int
    start: int | None
    source: str


@dataclass(frozen=True)
class Interruptions:
    """Number of interruptions of a run, and what they cost.

    restarts        restarts within the job
    job_starts      starts of the job
    repeated_steps  steps that a return to an earlier iteration has undone, as far as it is recorded
                    that they were taken
    ettr            effective training time ratio: time of the steps that count over the time from
                    the first record to the last; None if unknown
    """

    restarts: int
    job_starts: int
    repeated_steps: int
    ettr: float | None

    def __bool__(self) -> bool:
        """Return whether the run was interrupted."""
        return self.restarts > 0 or self.job_starts > 1 or self.repeated_steps > 0


@dataclass(frozen=True)
class _Stretch:
    """Steps after iteration `first` up to `last`.

    step_s  mean time of a step; None if it was not recorded
    most_s  time in which all of them were taken, and perhaps more was done; None if unknown
    """

    first: int
    last: int
    step_s: float | None
    most_s: float | None

    def seconds(self, step_s: float) -> float:
        """Return the time of its steps, with `step_s` for each if it was not recorded."""
        seconds = (self.last - self.first) * (step_s if self.step_s is None else self.step_s)
        return seconds if self.most_s is None else min(seconds, self.most_s)


def restarts(records: Sequence[Mapping[str, Any]]) -> Iterator[RecordedRestart]:
    """Yield the restarts within the job."""
    start = loaded = None
    source = ""
    for number, record in enumerate(records):
        event, iteration = record["event"], record.get("iteration")
        if event == "start" or (event == "restart" and start is None):
            source = "disk" if iteration else "the beginning"
            if loaded is not None and loaded == iteration:
                source = "memory"
            loaded = None
        if event == "local_checkpoint_loaded":
            loaded = iteration
        elif event == "start":
            start = number
        elif event == "restart":
            yield RecordedRestart(number, start, source)
            start = None
        elif event == "iteration":
            start = loaded = None


def returns_to(record: Mapping[str, Any]) -> int | None:
    """Return the iteration from which a start, a restart or a roll-back continues; else None."""
    name = "iteration" if record["event"] in ("start", "restart") else "back_to_iteration"
    return record.get(name)


def interruptions(records: Sequence[Mapping[str, Any]]) -> Interruptions:
    """Return what interrupted a run.

    Steps that count and whose time was not recorded, such as those between a log line and the
    checkpoint from which a restart continued, count with the median step.
    """
    progress = _Progress()
    for record in records:
        progress.add(record)
    within = list(restarts(records))
    starts = sum(record["event"] == "start" for record in records)
    job_starts = starts - sum(restart.start is not None for restart in within)
    times = [record["time"] for record in records if record.get("time") is not None]
    wall_s = times[-1] - times[0] if times else 0.0
    steps_s = [one.step_s for one in progress.stretches if one.step_s is not None]
    ettr = None
    if steps_s and wall_s > 0:
        median_s = statistics.median(steps_s)
        effective_s = sum(one.seconds(median_s) for one in progress.stretches)
        ettr = min(1.0, effective_s / wall_s)
    return Interruptions(len(within), job_starts, progress.repeated, ettr)


class _Progress:
    """The steps that count so far, and the number of those that were undone.

    at       iteration up to which steps are in `stretches`; None before the first record
    reached  last iteration that the run is known to have reached since the last return
    since    time of the last step or return; None if unknown
    """

    def __init__(self) -> None:
        self.stretches: list[_Stretch] = []
        self.repeated = 0
        self.at: int | None = None
        self.reached = 0
        self.since: float | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        event, time = record["event"], record.get("time")
        if event == "iteration":
            self._step(record["iteration"], record.get("step_time_s"), time)
        if event in _PROGRESS:
            self.reached = max(self.reached, record.get("iteration") or 0)
        back = returns_to(record)
        if back is not None:
            self._return_to(back, time)
        if event == "iteration" or back is not None:
            self.since = time

    def _step(self, iteration: int, step_s: float | None, time: float | None) -> None:
        if self.at is None or iteration <= self.at:  # the record of a start is missing
            self._return_to(iteration - 1, time)
        assert self.at is not None, "the run is somewhere"
        self.stretches.append(_Stretch(self.at, iteration, step_s, self._since(time)))
        self.at = iteration

    def _return_to(self, back: int, time: float | None) -> None:
        if self.at is not None:
            self.repeated += max(0, self.reached - back)
            if back > self.at:
                self.stretches.append(_Stretch(self.at, back, None, self._since(time)))
        while self.stretches and self.stretches[-1].last > back:
            cut = self.stretches.pop()
            if cut.first < back:
                self.stretches.append(dataclasses.replace(cut, last=back))
        self.at = self.reached = back

    def _since(self, time: float | None) -> float | None:
        """Return the time since the last step or return; None if unknown."""
        if time is None or self.since is None or time < self.since:
            return None
        return time - self.since
