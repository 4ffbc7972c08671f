"""Where the time of a step goes: by part (--timing-log-level), by rank (--straggler-report), in a
trace (--profile).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.parallel import collectives
from megatron.parallel.device_calls import DeviceCalls
from megatron.parallel.topology import Layout, Topology

PARTS = ("data-wait", "forward-backward", "optimizer")
SLOW = 1.05  # times the median of its stage: a rank from here on is slow
_SHOWN = 8  # slow ranks in the log: those of one node


class Timers:
    """Accumulates the time of each part of a step on this rank. Level 0 measures nothing and costs
    nothing.

    From level 1 on each part begins and ends with a wait for the device, so that its work is
    counted in the right part; this slows the step by what the host would have run ahead.
    """

    def __init__(
        self, topology: Topology, level: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._topology, self._level, self._clock = topology, level, clock
        self._spent_s = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count the time inside the context as `part`, one of PARTS."""
        if self._level == 0:
            yield
            return
        self._wait_for_device()
        start = self._clock()
        yield
        self._wait_for_device()
        self._spent_s[part] += self._clock() - start

    def collect(self, steps: int) -> dict[str, list[float]]:
        """Return {part: ms per step of every rank, in rank order} since the last call; empty at
        level 0. A collective call of the world from level 1 on."""
        if self._level == 0:
            return {}
        world = self._topology.world
        # in host memory, and reduced there
        table = torch.zeros(len(PARTS), world.size, dtype=torch.float64)
        table[:, world.rank] = torch.tensor(
            [1000.0 * self._spent_s[part] / steps for part in PARTS]
        )
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
        """Leave the time inside the context out of the lap."""
        start = self._clock()
        yield
        self._start += self._clock() - start

    def lap(self) -> float:
        """Return the seconds since the last lap, or since the beginning."""
        now = self._clock()
        elapsed, self._start = now - self._start, now
        return elapsed


class Profiler:
    """Records iterations --profile-step-start up to --profile-step-end on --profile-ranks; off
    without --profile.

    Writes one Chrome trace per rank into --trace-dir, or beside TensorBoard's files, or into the
    current folder, and reports it through `say`. Raises ConfigError when that folder cannot be
    created.
    """

    def __init__(self, config: Config, rank: int, say: Callable[[str], object]) -> None:
        logging = config.logging
        self._on, self._say = bool(logging.profile) and rank in logging.profile_ranks, say
        self._start, self._end = logging.profile_step_start, logging.profile_step_end
        self._details = logging.profile == "pt-full"
        folder = Path(logging.trace_dir or logging.tensorboard_dir or ".")
        self._path = folder / f"trace_rank{rank}.json"
        self._profile: Any = None
        if self._on:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--trace-dir {folder}: {error.strerror}: choose another"
                ) from error

    def step(self, iteration: int) -> None:
        """Start or stop recording. Call this before each step, with its number."""
        if self._on and self._profile is None and self._start <= iteration < self._end:
            self._profile = torch.profiler.profile(
                record_shapes=self._details, with_stack=self._details, profile_memory=self._details
            )
            self._profile.start()
        elif iteration >= self._end:
            self.finish()

    def finish(self) -> None:
        """Write what was recorded, if anything."""
        if self._profile is None:
            return
        profile, self._profile, self._on = self._profile, None, False
        profile.stop()
        try:
            profile.export_chrome_trace(str(self._path))
            self._say(
                f" profile of iterations {self._start} to {self._end} written to {self._path}"
            )
        except (OSError, RuntimeError) as error:  # a full disk must not end the run
            self._say(f" warning: the profile cannot be written to {self._path}: {error}")


@dataclass(frozen=True)
class StragglerReport:
    """The slowest ranks: lines for the log, and the record for the metrics file, with times in ms
    and ratios to the median of the stage."""

    lines: list[str]
    record: dict[str, Any]


class Stragglers:
    """Each rank's own computing time: forward and backward passes without the waits for collectives
    and messages in them. On a GPU it comes from events in its stream.

    places  "node:device" of every rank; only rank 0 needs them
    """

    def __init__(self, topology: Topology, places: Sequence[str] = ()) -> None:
        self._topology, self._places = topology, places
        self._meter = topology.flight.meter = DeviceCalls.of(topology.device, timed=True)
        self._before = 0.0

    def _computed_s(self) -> float:
        self._meter.settle()
        return self._meter.computed_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is computed inside the context: an evaluation."""
        before = self._computed_s()
        yield
        self._before += self._computed_s() - before

    def report(self, steps: int) -> StragglerReport | None:
        """Return the slowest ranks in the last `steps` steps on rank 0, None elsewhere. A
        collective call of the world, which sends one number per rank."""
        before, self._before = self._before, self._computed_s()
        own = torch.tensor([(self._before - before) / max(steps, 1)], dtype=torch.float64)
        seconds = collectives.gather_first(own, self._topology.world).tolist()
        return (
            summarise(seconds, self._topology.layout, self._places)
            if self._topology.rank == 0
            else None
        )


def summarise(
    seconds: Sequence[float], layout: Layout, places: Sequence[str] = ()
) -> StragglerReport:
    """Compare the computing times [world] with those of the same pipeline stage."""
    stages = [layout.coordinates(rank)[2] for rank in range(len(seconds))]
    of_stage: dict[int, list[float]] = {}
    for stage, own in zip(stages, seconds, strict=True):
        of_stage.setdefault(stage, []).append(own)
    medians = {stage: statistics.median(times) for stage, times in of_stage.items()}
    slow: list[dict[str, Any]] = [
        {
            "rank": rank,
            "place": places[rank] if rank < len(places) else None,
            "ms": 1000 * own,
            "ratio": own / median,
        }
        for rank, own in enumerate(seconds)
        if own >= SLOW * (median := medians[stages[rank]]) > 0
    ]
    slow.sort(key=lambda one: -one["ratio"])
    low, middle, high = 1000 * min(seconds), 1000 * statistics.median(seconds), 1000 * max(seconds)
    lines = [
        f" computing time of a step over ranks: min {low:.1f} ms, median {middle:.1f} ms, max "
        f"{high:.1f} ms (rank "
        f"{seconds.index(max(seconds))})"
    ]
    if slow:
        shown = [
            f"rank {one['rank']} ({one['place']}) {one['ms']:.1f} ms, {one['ratio']:.2f}x"
            for one in slow
        ]
        more = f", and {len(slow) - _SHOWN} more" if len(slow) > _SHOWN else ""
        lines.append(f"   slower than the median of their stage: {', '.join(shown[:_SHOWN])}{more}")
    record = {
        "min_ms": low,
        "median_ms": middle,
        "max_ms": high,
        "slow": slow[:64],
        "slow_ranks": len(slow),
    }
    return StragglerReport(lines, record)
