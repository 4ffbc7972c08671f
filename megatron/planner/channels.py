"""Seconds of one message and of one collective on the links that they really cross, as a clock of a step asks for them.

Bandwidths are those of cost.py: the slowest group of a kind while all groups of that kind run (links.py), and for
messages between stages the busiest link or card while all boundaries send in the same direction. To them comes latency.
A collective takes its start and, as NCCL and RCCL reckon when they choose an algorithm (src/graph/tuning.cc of both),

    ring  (ranks - 1) steps around, of which (nodes - 1) between nodes; an all-reduce goes around twice
    tree  2 (ranks of a node - 1) steps within nodes and 2 log2(nodes) between them, for an all-reduce

whichever is shorter. A message occupies its link for its bytes and arrives a latency later. Where a machine's file has
measured seconds (`compute.collectives`, `compute.messages`), they are taken instead, on straight lines between sizes.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron.model.formulas import ring_bytes
from megatron.parallel.topology import Layout
from megatron.planner.compute import ASSUMED, MEASURED, PUBLISHED, Confidence, Figure, Used, assumed_figures
from megatron.planner.cost import CostModel
from megatron.planner.links import ESTIMATED, Rate
from megatron.planner.patterns import stride_and_size
from megatron.planner.placement import choose_placement
from megatron.planner.traffic import Traffic

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.planner.cluster import Cluster
    from megatron.planner.placement import Placement

_LATENCIES = (
    "collective_start_s", "hop_within_s", "hop_between_s", "message_within_s", "message_between_s",
)  # fmt: skip


class Group(NamedTuple):
    """Ranks that run collectives: how many, on how many nodes, and ranks from one member to the next."""

    ranks: int
    nodes: int
    stride: int


class Channels:
    """What messages take on a placement; None: the cheapest one. Sizes are bytes, times seconds.

    Raises ConfigError as choose_placement does.
    """

    def __init__(self, config: Config, cluster: Cluster, placement: Placement | None = None) -> None:
        placement = choose_placement(config, cluster) if placement is None else placement
        parallel = config.parallel
        self.placement, self.layout = placement, placement.layout
        self._lanes = _lanes(cluster, placement.layout, placement.device_order, parallel.num_chunks > 1)
        self._cluster = cluster
        self._figures = {**_assumed_latencies(), **cluster.compute.figures}
        self._latency = [self._figures[name].value for name in _LATENCIES]
        self._used: dict[str, Used] = {}
        self._used_figures: dict[str, Figure] = {}

    # -- collectives ---------------------------------------------------------------------------------------------------

    def tensor_s(self, kind: str, n_bytes: float) -> float:
        """A collective of a tensor-parallel group over a tensor of n_bytes in all.

        `kind` is "all_gather", "reduce_scatter", "all_reduce" or "reduce", to one member, along a chain of all of them.
        """
        return self._collective("tensor-parallel", kind, n_bytes, self._lanes.tensor, self._lanes.tensor_rate)

    @property
    def tensor_lane(self) -> tuple[Group, Rate | None]:
        """What tensor_s depends on, beside the machine."""
        return self._lanes.tensor, self._lanes.tensor_rate

    def data_s(self, kind: str, n_bytes: float) -> float:
        """The same of a data-parallel group."""
        return self._collective("data-parallel", kind, n_bytes, self._lanes.data, self._lanes.data_rate)

    def model_s(self, n_bytes: float, kind: str = "all_reduce") -> float:
        """A small collective of all ranks of a replica: a norm, a flag."""
        lanes = self._lanes
        rates = [r for r in (lanes.tensor_rate, lanes.ends_rate) if r is not None]
        return self._collective("replica", kind, n_bytes, lanes.model, min(rates) if rates else None)

    def world_s(self, n_bytes: float, kind: str = "all_reduce") -> float:
        """A small collective of all ranks."""
        lanes = self._lanes
        rates = [r for r in (lanes.tensor_rate, lanes.data_rate, lanes.ends_rate) if r is not None]
        return self._collective("world", kind, n_bytes, lanes.world, min(rates) if rates else None)

    def tied_s(self, n_bytes: float) -> float:
        """The sum of a tied embedding's gradients over the first and the last stage, n_bytes on each."""
        return self._collective("tied embedding", "all_reduce", n_bytes, self._lanes.ends, self._lanes.ends_rate)

    def _collective(self, name: str, kind: str, n_bytes: float, group: Group, rate: Rate | None) -> float:
        if group.ranks == 1:
            return 0.0
        measured = self._figures.get(f"collectives.{kind}")
        if measured is not None:
            seconds = _measured(measured, group)
            if seconds is not None:
                self._used_figures[measured.name] = measured
                return _on_lines(seconds, n_bytes)
        assert rate is not None, "a group of several ranks has a rate"
        self._note(f"{name} bandwidth", rate)
        sent = n_bytes if kind == "reduce" else ring_bytes(n_bytes, group.ranks, kind)
        return self._start(kind, group) + sent / (rate.gb_per_s * 1e9)

    def _start(self, kind: str, group: Group) -> float:
        """Seconds of a collective without bytes."""
        start, within, between = self._latency[:3]
        for name in _LATENCIES[: 3 if group.nodes > 1 else 2]:
            self._used_figures[name] = self._figures[name]
        times, of_node = (2 if kind == "all_reduce" else 1), math.ceil(group.ranks / group.nodes)
        crossing = group.nodes - 1
        ring = times * ((group.ranks - 1 - crossing) * within + crossing * between)
        if kind != "all_reduce":
            return start + ring
        tree = 2 * ((of_node - 1) * within + math.ceil(math.log2(group.nodes)) * between)
        return start + min(ring, tree)

    # -- messages between stages ---------------------------------------------------------------------------------------

    def boundary(self, sender: int, forward: bool, n_bytes: float) -> tuple[float, float]:
        """(seconds that a message occupies its link, seconds of latency after that), of the slowest replica.

        From pipeline rank `sender` to the next one (forward) or the one before; the first and the last are neighbours
        where chunks are interleaved.
        """
        size = self.layout.pipeline
        edge = sender if forward else (sender - 1) % size
        worst = max(self._message(*ends, n_bytes) for ends in self._lanes.boundaries[edge])
        return worst[1], worst[0] - worst[1]

    def _message(self, within: bool, per_byte: float, n_bytes: float) -> tuple[float, float]:
        """(seconds from sending to arrival, those of them that the link is occupied)."""
        measured = self._figures.get("messages")
        if measured is not None:
            points = [(size, seconds) for nodes, size, seconds in measured.points if (nodes == 1) == within]
            if points:
                self._used_figures["messages"] = measured
                points.sort()
                total = _on_lines(points, n_bytes)
                return total, total - min(total, points[0][1])
        name = "message_within_s" if within else "message_between_s"
        self._used_figures[name] = figure = self._figures[name]
        if self._lanes.message_rate is not None:
            self._note("stage to stage bandwidth", self._lanes.message_rate)
        occupies = n_bytes * per_byte
        return occupies + figure.value, occupies

    # -- inputs --------------------------------------------------------------------------------------------------------

    def _note(self, name: str, rate: Rate) -> None:
        if name in self._used:
            return
        text = self._cluster.sources.get("collectives") or self._cluster.sources.get("links", "")
        if rate.basis == ESTIMATED:
            basis, text = ASSUMED, "estimated from the widths of links and cards by published ratios (links.py)"
        else:
            basis = next((b for b in (MEASURED, ASSUMED) if text.startswith(b)), PUBLISHED)
        self._used[name] = Used(name, f"{rate.gb_per_s:.4g} GB/s, {rate.limit}", basis, text)

    @property
    def confidence(self) -> Confidence:
        """What the answers so far rest on."""
        return Confidence.of(self._used_figures.values(), self._used.values())


@functools.cache
def _assumed_latencies() -> Mapping[str, Figure]:
    return assumed_figures({})


def _measured(figure: Figure, group: Group) -> list[tuple[float, float]] | None:
    """(bytes, seconds) of the points for groups like this one: as many ranks, on one node or on several.

    Where there are points for several such groups, of the one with the nearest number of nodes, then nearest stride.
    """
    like = [p for p in figure.points if p[1] == group.ranks and (p[2] > 1) == (group.nodes > 1)]
    if not like:
        return None
    nearest = min(like, key=lambda p: (abs(p[2] - group.nodes), abs(math.log(p[0] / group.stride))))
    return sorted((p[3], p[4]) for p in like if (p[0], p[2]) == (nearest[0], nearest[2]))


def _on_lines(points: Sequence[tuple[float, float]], x: float) -> float:
    """On the straight line between the points around x; before the first its value, after the last the last's slope.

    A last line that falls is noise: in proportion to the last point then, as where there is one alone.
    """
    if x <= points[0][0] or len(points) == 1:
        return points[0][1] if x <= points[0][0] else points[0][1] * x / points[0][0]
    above = next((i for i, point in enumerate(points) if point[0] >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[above - 1], points[above]
    if x > x1 and y1 <= y0:
        return y1 * x / x1
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


# -- what depends on the layout alone ------------------------------------------------------------------------------


class _Lanes(NamedTuple):
    """Groups and rates of a layout, and for each pipeline rank's boundary to the next the different ends that replicas
    have there: (whether on one node, seconds that a byte occupies the link)."""

    tensor: Group
    data: Group
    model: Group
    world: Group
    ends: Group
    tensor_rate: Rate | None
    data_rate: Rate | None
    ends_rate: Rate | None
    message_rate: Rate | None
    boundaries: list[list[tuple[bool, float]]]


_BYTES = 1 << 20


@functools.lru_cache(maxsize=8192)
def _lanes(cluster: Cluster, layout: Layout, order: tuple[int, ...], wraps: bool) -> _Lanes:
    devices = len(order)
    # Only rates are asked for: one message of a size that does not matter over each boundary.
    traffic = Traffic(
        tensor=(), data=(), message_bytes=_BYTES, boundary=1, wrap=1 if wraps else 0, stages=layout.pipeline, tied=None
    )
    model = CostModel(cluster, layout, traffic, devices)
    several = layout.pipeline > 1
    replica, world = layout.tensor * layout.pipeline, layout.world_size
    boundaries = _boundaries(model, layout, order) if several else []
    slowest = max((seconds for ends in boundaries for _, seconds in ends), default=0.0)
    stride = layout.strides[2]
    ends = Group(2, 1 if devices % (stride * layout.pipeline) == 0 else 2, stride * (layout.pipeline - 1))
    nodes_of_replica = len({rank // devices for rank in layout.model_ranks(data=0)})
    return _Lanes(
        tensor=_group(layout, "tp", devices), data=_group(layout, "dp", devices),
        model=Group(replica, nodes_of_replica, 1), world=Group(world, -(-world // devices), 1),
        ends=ends if several else Group(1, 1, 1),
        tensor_rate=model.rate("tp", order) if layout.tensor > 1 else None,
        data_rate=model.rate("dp", order) if layout.data > 1 else None,
        ends_rate=model.ends_rate(order) if several else None,
        message_rate=Rate(1e-9 / slowest, ESTIMATED, "slowest boundary") if slowest else None,
        boundaries=boundaries,
    )


def _group(layout: Layout, direction: str, devices: int) -> Group:
    stride, size = stride_and_size(layout, direction)
    return Group(size, size if stride >= devices else (size - 1) * stride // devices + 1, stride)


def _boundaries(model: CostModel, layout: Layout, order: tuple[int, ...]) -> list[list[tuple[bool, float]]]:
    """For each pipeline rank the ends of its boundary to the next rank, in all replicas."""
    devices, size = len(order), layout.pipeline
    tensor, data, stride = layout.strides
    # Positions on a node repeat after as many ranks as a node has.
    others = {
        (t * tensor + d * data) % devices
        for t in range(min(layout.tensor, devices)) for d in range(min(layout.data, devices))
    }  # fmt: skip
    seconds = {places: value / _BYTES for places, value in model.message_seconds(order).items()}
    found = []
    for rank in range(size if model.traffic.wrap else size - 1):
        step = stride if rank < size - 1 else -stride * (size - 1)
        ends = set()
        for other in others:
            here = (rank * stride + other) % devices
            inside = 0 <= here + step < devices
            ends.add((inside, seconds[(here, here + step) if inside else None]))
        found.append(sorted(ends))
    return found
