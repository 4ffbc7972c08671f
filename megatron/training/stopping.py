"""When a run ends before its last iteration, agreed by all ranks."""
from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.parallel import collectives
from megatron.parallel.topology import Topology

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRules:
    """--exit-interval, --exit-duration-in-mins, --exit-signal-handler and --kill-switch-file.

    Duration and kill switch are decided on rank 0, a signal on any rank; one small reduction a step makes every rank
    take the same decision. Rules that are off cost no communication.
    """

    def __init__(self, config: Config, topology: Topology, clock: Callable[[], float] = time.monotonic) -> None:
        training = config.training
        self._topology, self._clock, self._start = topology, clock, clock()
        self._interval = training.exit_interval
        self._minutes = training.exit_duration_in_mins
        self._kill_switch = Path(training.kill_switch_file) if training.kill_switch_file else None
        self._handles_signals = training.exit_signal_handler
        self._received: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRules:
        """Catch SIGTERM and SIGUSR1 when --exit-signal-handler is given."""
        if self._handles_signals:
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def check(self, iteration: int) -> str | None:
        """Why to stop after `iteration`, or None. A collective call when any of the agreed rules is on."""
        agreed = self._agree(self._own_flags()) if self._needs_agreement else [0, 0, 0]
        number, late, killed = agreed
        if number:
            return f"exiting program after receiving {signal.Signals(number).name}"
        if killed:
            return f"exiting program at iteration {iteration}: kill switch {self._kill_switch} exists"
        if late:
            return f"exiting program after {(self._clock() - self._start) / 60.0:.2f} minutes"
        if self._interval and iteration % self._interval == 0:
            return f"exiting program at iteration {iteration}"
        return None

    @property
    def _needs_agreement(self) -> bool:
        return self._handles_signals or self._minutes is not None or self._kill_switch is not None

    def _own_flags(self) -> list[int]:
        first = self._topology.rank == 0
        late = first and self._minutes is not None and (self._clock() - self._start) / 60.0 > self._minutes
        killed = first and self._kill_switch is not None and self._kill_switch.exists()
        return [self._received or 0, int(late), int(killed)]

    def _agree(self, flags: list[int]) -> list[int]:
        if self._topology.world.size == 1:
            return flags
        together = torch.tensor(flags, dtype=torch.int32, device=self._topology.device)
        return collectives.all_reduce(together, self._topology.world, dist.ReduceOp.MAX).tolist()
