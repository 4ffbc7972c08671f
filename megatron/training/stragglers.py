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
from megatron.parallel.flight import FlightRecorder
from megatron.parallel.topology import Layout, Topology

SLOW = 1.05  # so many times the median of its stage is slow
_SHOWN = 5


@dataclass(frozen=True)
class Slow:
    """A rank, or a node: its computing time for a step, and that over the median of the ranks of its stage."""

    name: str
    rank: int
    seconds: float
    ratio: float


@dataclass(frozen=True)
class StragglerReport:
    """lines   for the log
    record  for the metrics file: times in ms, ratios to the median of the stage
    """

    lines: list[str]
    record: dict[str, Any]


class Stragglers:
    """Each rank's own computing time: in forward and backward passes, without what it waits in collectives and for
    messages there. On a device it is taken from events in its stream.

    places  "node:device" of every rank; only rank 0 needs them
    """

    def __init__(self, topology: Topology, recorder: FlightRecorder, places: Sequence[str] = ()) -> None:
        self._topology, self._recorder, self._places = topology, recorder, places
        if topology.device.type == "cuda":
            recorder.meter = DeviceCalls.on_cuda(timed=True)
        self._before = self._computed_s()

    def _computed_s(self) -> float:
        meter = self._recorder.meter
        if not isinstance(meter, DeviceCalls):
            return self._recorder.computed_s
        meter.settle()
        return meter.computed_s

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
    per_stage = layout.tensor * layout.data
    stages = [layout.coordinates(rank)[2] for rank in range(len(seconds))]
    of_stage: list[list[float]] = [[] for _ in range(layout.pipeline)]
    for stage, own in zip(stages, seconds, strict=True):
        of_stage[stage].append(own)
    medians = [statistics.median(times) for times in of_stage]
    ranks = []
    for rank, own in enumerate(seconds):
        median = medians[stages[rank]]
        place = f" ({places[rank]})" if rank < len(places) else ""
        ranks.append(Slow(f"rank {rank}{place}", rank, own, own / median if median > 0 else 1.0))
    slow = sorted((one for one in ranks if one.ratio >= SLOW), key=lambda one: -one.ratio)
    last = max(ranks, key=lambda one: one.seconds)
    lines = [
        f" computing time of a step over ranks: min {1000 * min(seconds):.1f} ms, median "
        f"{1000 * statistics.median(seconds):.1f} ms, max {1000 * last.seconds:.1f} ms ({last.name})"
    ]
    nodes = _slow_nodes(ranks, places)
    if per_stage == 1 and layout.world_size > 1:
        lines.append("   no rank has another one of its stage to be compared with")
    elif slow:
        shown = ", ".join(f"{one.name} {1000 * one.seconds:.1f} ms, {one.ratio:.2f}x" for one in slow[:_SHOWN])
        more = f", and {len(slow) - _SHOWN} more" if len(slow) > _SHOWN else ""
        lines.append(f"   slower than the median of their stage: {shown}{more}")
        if nodes:
            shown = ", ".join(f"{one.name} {one.ratio:.2f}x" for one in nodes[:_SHOWN])
            lines.append(f"   nodes whose ranks are slow together: {shown}")
    record = {
        "min_ms": 1000 * min(seconds),
        "median_ms": 1000 * statistics.median(seconds),
        "max_ms": 1000 * last.seconds,
        "slow": [{"rank": one.rank, "place": places[one.rank] if one.rank < len(places) else None,
                  "ms": 1000 * one.seconds, "ratio": one.ratio} for one in slow[:64]],
        "slow_ranks": len(slow),
        "slow_nodes": [{"node": one.name, "ratio": one.ratio} for one in nodes[:64]],
    }  # fmt: skip
    return StragglerReport(lines, record)


def _slow_nodes(ranks: Sequence[Slow], places: Sequence[str]) -> list[Slow]:
    """Nodes of several ranks, where another node exists, of which half or more are slow."""
    of: dict[str, list[Slow]] = {}
    for one, place in zip(ranks, places, strict=False):
        of.setdefault(place.partition(":")[0], []).append(one)
    if len(of) < 2:
        return []
    found = []
    for node, members in of.items():
        ratio = statistics.median(one.ratio for one in members)
        if len(members) > 1 and ratio >= SLOW:
            found.append(Slow(f"node {node}", members[0].rank, 0.0, ratio))
    return sorted(found, key=lambda one: -one.ratio)
