"""When a run ends before its last iteration, agreed by all ranks."""
from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config
from megatron.training.run.agreement import Agreement
from megatron.training.run.signals import Signals
from megatron.training.run.walltime import WallTime

_SIGNAL, _KILLED, _LATE, _ENDING = "signal", "kill switch", "duration", "wall time"


@dataclass(frozen=True)
class Stop:
    """Why a run ends early. `requeue`: it is the job that ends, not what the user wanted of the run."""

    reason: str
    requeue: bool = False


class StopRules:
    """--exit-interval, --exit-duration-in-mins, --exit-signal-handler, --kill-switch-file and --walltime.

    Duration, kill switch and wall time are decided on rank 0, a signal on any rank; where there are several ranks they
    act a step later (Agreement). Rules that are off cost no communication.
    """

    def __init__(
        self, config: Config, agreement: Agreement, signals: Signals, wall_time: WallTime | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        training = config.training
        self._clock, self._start = clock, clock()
        self._interval = training.exit_interval
        self._minutes = training.exit_duration_in_mins
        self._kill_switch = Path(training.kill_switch_file) if training.kill_switch_file else None
        self._wall_time = wall_time
        agreement.add(_SIGNAL, lambda: signals.received, lambda: signals.enabled)
        agreement.add_first(_KILLED, self._is_killed, lambda: self._kill_switch is not None)
        agreement.add_first(_LATE, self._is_late, lambda: self._minutes is not None)
        agreement.add_first(_ENDING, self._is_ending, lambda: wall_time is not None)

    def check(self, iteration: int, agreed: Mapping[str, int]) -> Stop | None:
        """Why to stop after `iteration`, given what the ranks agreed on; None to go on."""
        if self._interval and iteration % self._interval == 0:
            return self._ask(iteration, agreed) or Stop(f"exiting program at iteration {iteration}")
        return self._ask(iteration, agreed)

    def ask(self, iteration: int, agreed: Mapping[str, int]) -> Stop | None:
        """Like `check`, before the first step of a run: without --exit-interval, which counts finished steps. A job
        whose time is not enough for a step does not go back into the queue, where it would come and go for ever."""
        stop = self._ask(iteration, agreed)
        if stop is None or self.signalled(agreed) or not stop.requeue:
            return stop
        return Stop(f"{stop.reason}: not enough for one step, so that another job like it would not help either")

    def _ask(self, iteration: int, agreed: Mapping[str, int]) -> Stop | None:
        if self.signalled(agreed):
            return Stop(f"exiting program after receiving {signal.Signals(agreed[_SIGNAL]).name}", requeue=True)
        if agreed.get(_KILLED):
            return Stop(f"exiting program at iteration {iteration}: kill switch {self._kill_switch} exists")
        if agreed.get(_LATE):
            return Stop(f"exiting program after {(self._clock() - self._start) / 60.0:.2f} minutes")
        if agreed.get(_ENDING):
            return Stop(f"exiting program at iteration {iteration}: {self._wall_time}", requeue=True)
        return None

    def signalled(self, agreed: Mapping[str, int]) -> bool:
        """Whether a signal asks for the end."""
        return bool(agreed.get(_SIGNAL))

    def _is_killed(self) -> bool:
        return self._kill_switch is not None and self._kill_switch.exists()

    def _is_late(self) -> bool:
        return self._minutes is not None and (self._clock() - self._start) / 60.0 > self._minutes

    def _is_ending(self) -> bool:
        return self._wall_time is not None and self._wall_time.is_ending()
