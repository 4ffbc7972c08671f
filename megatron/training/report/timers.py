"""Where the time of a step goes (--timing-log-level)."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron.parallel import collectives
from megatron.parallel.topology import Topology

PARTS = ("data-wait", "forward-backward", "optimizer")


class Timers:
    """Adds up the time of each part of a step on this rank. Level 0 measures nothing and costs nothing.

    From level 1 on a part starts and ends with a wait for the device, so that its work is counted where it belongs;
    this slows the step by what the host would have run ahead.
    """

    def __init__(self, topology: Topology, level: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._topology, self._level, self._clock = topology, level, clock
        self._spent_s = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count the time inside the block as `part`, one of PARTS."""
        if self._level == 0:
            yield
            return
        self._wait_for_device()
        start = self._clock()
        yield
        self._wait_for_device()
        self._spent_s[part] += self._clock() - start

    def collect(self, steps: int) -> dict[str, list[float]]:
        """{part: ms per step of every rank, in rank order} since the last call. A collective call of the world from
        level 1 on; empty at level 0."""
        if self._level == 0:
            return {}
        world = self._topology.world
        table = torch.zeros(len(PARTS), world.size, dtype=torch.float64)  # of the host, and sent by it
        table[:, world.rank] = torch.tensor([1000.0 * self._spent_s[part] / steps for part in PARTS])
        self._spent_s = dict.fromkeys(PARTS, 0.0)
        return dict(zip(PARTS, collectives.all_reduce(table, world).tolist(), strict=True))

    def _wait_for_device(self) -> None:
        if self._topology.device.type == "cuda":
            torch.cuda.synchronize(self._topology.device)


class Stopwatch:
    """Time spent training: laps leave out what happens inside `paused`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._start = clock, clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside the block out of the lap."""
        start = self._clock()
        yield
        self._start += self._clock() - start

    def lap(self) -> float:
        """Seconds since the last lap, or since the beginning."""
        now = self._clock()
        elapsed, self._start = now - self._start, now
        return elapsed
