"""Which ranks compute slower than others that do the same work."""
from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron.parallel import collectives
from megatron.parallel.device_calls import DeviceCalls
from megatron.parallel.topology import Layout, Topology

SLOW = 1.05  # so many times the median of its stage is slow
_SHOWN = 8  # ranks: those of a node


@dataclass(frozen=True)
class StragglerReport:
    """lines   for the log
    record  for the metrics file: times in ms, ratios to the median of the stage
    """

    lines: list[str]
    record: dict[str, Any]


class Stragglers:
    """Each rank's own computing time: in forward and backward passes, without what it waits in collectives and for
    messages there. On a GPU it is taken from events in its stream.

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
        """Leave out what is computed inside the block: an evaluation."""
        before = self._computed_s()
        yield
        self._before += self._computed_s() - before

    def report(self, steps: int) -> StragglerReport | None:
        """The slowest ranks since the last report, `steps` steps ago: on rank 0, None elsewhere. A collective call of
        the world, in which each rank gives one number."""
        before, self._before = self._before, self._computed_s()
        own = torch.tensor([(self._before - before) / max(steps, 1)], dtype=torch.float64)
        seconds = collectives.gather_first(own, self._topology.world).tolist()
        return summarise(seconds, self._topology.layout, self._places) if self._topology.rank == 0 else None


def summarise(seconds: Sequence[float], layout: Layout, places: Sequence[str] = ()) -> StragglerReport:
    """Compare the computing times [world] with those of the same pipeline stage."""
    stages = [layout.coordinates(rank)[2] for rank in range(len(seconds))]
    of_stage: list[list[float]] = [[] for _ in range(layout.pipeline)]
    for stage, own in zip(stages, seconds, strict=True):
        of_stage[stage].append(own)
    medians = [statistics.median(times) for times in of_stage]
    slow: list[dict[str, Any]] = [
        {"rank": rank, "place": places[rank] if rank < len(places) else None, "ms": 1000 * own, "ratio": own / median}
        for rank, (own, median) in enumerate(zip(seconds, (medians[stage] for stage in stages), strict=True))
        if own >= SLOW * median > 0
    ]
    slow.sort(key=lambda one: -one["ratio"])
    low, middle, high = 1000 * min(seconds), 1000 * statistics.median(seconds), 1000 * max(seconds)
    lines = [
        f" computing time of a step over ranks: min {low:.1f} ms, median {middle:.1f} ms, max {high:.1f} ms (rank "
        f"{seconds.index(max(seconds))})"
    ]
    if slow:
        shown = [f"rank {one['rank']} ({one['place']}) {one['ms']:.1f} ms, {one['ratio']:.2f}x" for one in slow]
        more = f", and {len(slow) - _SHOWN} more" if len(slow) > _SHOWN else ""
        lines.append(f"   slower than the median of their stage: {', '.join(shown[:_SHOWN])}{more}")
    record = {"min_ms": low, "median_ms": middle, "max_ms": high, "slow": slow[:64], "slow_ranks": len(slow)}
    return StragglerReport(lines, record)
