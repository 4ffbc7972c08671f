"""Whether a running trial makes progress, by what it adds to its metrics file: rank 0 writes a record for each step."""
from __future__ import annotations

import contextlib
from pathlib import Path

from megatron.config.duration import show_duration
from megatron.errors import DataError
from megatron.planning.experiments.endings import HANG, TIME_OUT, Ending
from megatron.planning.experiments.folder import is_complete
from megatron.planning.metrics_file import read_records

_LEAST_STALL_S = 60.0
_SLOWER = 10.0  # than any step before, or than predicted, before a step counts as hanging
_EXIT_S = 30.0  # from the last record to the end of the processes
_LONGEST_GAP_S = 5.0  # that one pause between two looks counts at most: a whole job may have been suspended meanwhile


class Watch:
    """Looks at one trial, now and then. Times are seconds of one clock, whichever.

    limit_s  from `started` on; stall_s: longest time between two steps, None: as long as ten steps, at least a minute.
    Before the first step it has the whole limit: modules are imported, kernels compiled, communicators built, and how
    long that takes depends on the machine and on how many there are.
    """

    def __init__(
        self, metrics: Path, steps: int, started: float, limit_s: float, stall_s: float | None, step_s: float | None
    ) -> None:
        self._metrics, self._steps, self._limit_s = metrics, steps, limit_s
        self._stall_s, self._step_s = stall_s, step_s
        self._looked, self._ran_s = started, 0.0
        self._size, self._changed = 0, 0.0
        self._done = 0
        self._longest_s = 0.0
        self.complete = False

    def look(self, now: float) -> Ending | None:
        """Why it is to be stopped; None while it is well. `complete`: all its steps are recorded."""
        self._ran_s += min(now - self._looked, _LONGEST_GAP_S)
        self._looked = now
        size = 0
        with contextlib.suppress(OSError):
            size = self._metrics.stat().st_size
        if size != self._size:
            self._read()
            self._size = size
        if self.complete:
            return None if self._ran_s < self._changed + _EXIT_S else Ending(HANG, "did not end after its last step")
        if self._ran_s > self._limit_s:
            return Ending(TIME_OUT, f"stopped after its limit of {show_duration(self._limit_s)}, {self._where()}")
        if self._done and self._ran_s > self._changed + self._patience_s():
            quiet = show_duration(self._ran_s - self._changed)
            return Ending(HANG, f"no step in {quiet}, {self._where()}")
        return None

    def _read(self) -> None:
        records = []
        with contextlib.suppress(DataError):
            records = read_records(self._metrics)
        steps = [record for record in records if record["event"] == "iteration"]
        self._changed, self._done = self._ran_s, len(steps)
        times = [t for record in steps if isinstance(t := record.get("step_time_s"), int | float)]
        self._longest_s = max(times, default=0.0)
        self.complete = is_complete(records, self._steps)

    def _patience_s(self) -> float:
        if self._stall_s is not None:
            return self._stall_s
        return max(_LEAST_STALL_S, _SLOWER * max(self._longest_s, self._step_s or 0.0))

    def _where(self) -> str:
        return f"after step {self._done} of {self._steps}" if self._done else "before its first step"
