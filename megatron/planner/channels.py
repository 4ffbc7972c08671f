"""Time of messages and collectives on the links and network cards that they cross.

The time of a collective is its start-up time, plus the latency of its steps, plus the bytes that a
rank sends divided by the bandwidth of the slowest group of its kind while all such groups run.
Groups over many nodes keep only a share of it (bandwidth_by_nodes): they share the network's links.
Steps are counted as NCCL and RCCL count them to choose an algorithm (src/graph/tuning.cc in both):

    ring  (ranks - 1) steps, of which (nodes - 1) are between nodes; twice that for an all-reduce
    tree  2 (ranks of a node - 1) steps within nodes and 2 log2(nodes) between them, for an
          all-reduce

The algorithm with the lower latency is assumed. In an all-to-all every rank sends one slice
directly to every other rank. Bytes for ranks on the same node are counted on the links between its
devices, split evenly over equally short paths, and bytes for other nodes on the node's network
cards and the links to them. The most loaded link or card determines the time. Messages start eight
at a time, as in NCCL (NCCL_MAX_DEV_WORK_P2P_PER_BATCH), and each batch has the latency of one step.
A message of kind "ring" is one step of a ring: every rank sends to the next member and receives
from the previous one. A message between stages occupies its link for a time proportional to its
bytes, and arrives one latency later. Its bandwidth is that of the busiest link or card while all
boundaries send in the same direction. If a machine's file has measured seconds for messages
(`compute.messages`), or for a collective of as many ranks (`compute.collectives`), these are
interpolated linearly between sizes instead.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config import Config
from megatron.model.formulas import ring_bytes
from megatron.model.stages import stage_owners
from megatron.parallel.layout import Layout, RankGroup
from megatron.planner.cluster import Cluster
from megatron.planner.compute import ASSUMED, MEASURED, PUBLISHED, Figure, FigureReader, Used
from megatron.planner.node_links import ESTIMATED, NodeLinks, Rate, Step, node_links, path_of

_AT_ONCE = 8  # messages of an all-to-all that start together
_NOWHERE = -1
_AWAY = -2
"""In place of an end's position on the node: there is no message, or the end is on another node."""


class GroupLink(NamedTuple):
    """Group of ranks that run collectives: its size, nodes spanned, and stride between members.

    words     name of this kind of group in reports
    rate      GB/s of the slowest such group while all of them run; None for a group of one
    exchange  GB/s that a rank of the slowest group sends to all others together in an all-to-all;
              None for groups without all-to-alls
    """

    ranks: int
    nodes: int
    stride: int
    words: str
    rate: Rate | None = None
    exchange: Rate | None = None


@dataclass(frozen=True)
class Placement:
    """Layout on the nodes of a machine: rank i of every node is on device device_order[i]."""

    cluster: Cluster
    layout: Layout
    device_order: tuple[int, ...]

    @property
    def chosen_devices(self) -> tuple[int, ...]:
        """Device order; empty for a job on part of a node, which has no choice of devices."""
        full_node = len(self.device_order) == self.cluster.devices_per_node
        return self.device_order if full_node else ()

    def location(self, rank: int) -> tuple[int, int]:
        """Return the node and the device of a rank."""
        node, position = divmod(rank, len(self.device_order))
        return node, self.device_order[position]


class Channels(FigureReader):
    """Seconds of messages on a placement, as a function of their bytes.

    lanes       groups along each mesh dimension, by name (Layout.lines, lines_of), and "ends": the
                first and the last stage, which share a tied embedding
    boundaries  for the boundary from each pipeline rank to the next: whether both ends are on one
                node -> seconds per byte on the link, in the slowest such replica
    """

    def __init__(self, config: Config, cluster: Cluster, placement: Placement) -> None:
        super().__init__(cluster.figures)
        self.placement = placement
        self._sources = cluster.sources
        self._reduces = cluster.device_type == "cpu"
        self.lanes, self.boundaries, self._message_rate = _lanes(
            cluster,
            placement.layout,
            placement.device_order,
            wraps(config),
            config.parallel.head_ranks,
        )
        self._seconds: dict[tuple[str, str, float], float] = {}

    def seconds(self, kind: str, n_bytes: float, group: str = "tensor") -> float:
        """Return the seconds of a collective that all groups of a dimension run at once.

        The arguments are the fields of events.GroupMessage. A collective of kind "reduce" runs
        along a chain of all members to one of them. On a CPU the engine sums gradients by a
        "reduce" to each owner, and the seconds of these are added up.
        """
        if kind == "reduce_scatter" and self._reduces and group not in OF_PASSES:
            ranks = self.lanes[group].ranks
            return ranks * self.seconds("reduce", n_bytes / ranks, group)
        key = group, kind, n_bytes
        if key not in self._seconds:
            self._seconds[key] = self._timed(kind, n_bytes, self.lanes[group])
        return self._seconds[key]

    def _timed(self, kind: str, n_bytes: float, group: GroupLink) -> float:
        if group.ranks == 1:
            return 0.0
        measured = self.figures.get(f"collectives.{kind}")
        if measured is not None and (points := _measured(measured, group)):
            self.take(measured.name)
            return _interpolate(points, n_bytes)
        rate = group.exchange if kind == "all_to_all" else group.rate
        assert rate is not None, "a group of several ranks has a rate"
        self._note(f"{group.words} {'all-to-all ' * (kind == 'all_to_all')}bandwidth", rate)
        start = self.take("collective_start_s").value
        within = self.take("hop_within_s").value
        between = self.take("hop_between_s").value if group.nodes > 1 else 0.0
        of_node = math.ceil(group.ranks / group.nodes)
        ring = "ring_hop_between_s"
        ring_between = self.take(ring).value if between and ring in self.figures else between
        chain = (group.ranks - group.nodes) * within + (group.nodes - 1) * ring_between
        if kind == "ring":
            latency = ring_between or within
        elif kind == "all_to_all":
            near = math.ceil((of_node - 1) / _AT_ONCE)
            latency = near * within + math.ceil((group.ranks - of_node) / _AT_ONCE) * between
        elif kind == "all_reduce":
            tree = (of_node - 1) * within + math.ceil(math.log2(group.nodes)) * between
            latency = 2 * min(chain, tree)
        else:
            latency = chain
        sent = n_bytes
        if kind not in ("ring", "reduce"):
            sent = ring_bytes(n_bytes, group.ranks, kind)
        curve = "exchange_by_nodes" if kind == "all_to_all" else "bandwidth_by_nodes"
        share = self._share_kept(curve, group.nodes)
        return start + latency + sent / (share * rate.gb_per_s * 1e9)

    def _share_kept(self, curve: str, nodes: int) -> float:
        """Return the share of their bandwidth that collectives over this many nodes keep."""
        if nodes == 1 or curve not in self.figures:
            return 1.0
        known, shares = zip(*sorted(self.take(curve).points), strict=True)
        # The range of a figure may reach beyond the whole bandwidth.
        return min(1.0, float(np.interp(math.log(nodes), np.log(known), shares)))

    def boundary(self, rank: int, other: int, n_bytes: float) -> tuple[float, float]:
        """Return the seconds for which a message occupies its link, and its latency after that.

        Both are for the slowest replica. The message goes between the pipeline ranks of two
        neighbouring stages, in either direction; from `rank` to `other` if it goes forward. If the
        ranks are no neighbours, it takes as long as between the slowest neighbours from one to the
        other. Within a rank it takes no time.
        """
        size = self.placement.layout.pipeline
        edges: Sequence[int] = range(min(rank, other), max(rank, other))
        if (rank + 1) % size == other and rank < len(self.boundaries):
            edges = (rank,)
        total, occupied = max(
            (
                self._message(*ends, n_bytes)
                for edge in edges
                for ends in self.boundaries[edge].items()
            ),
            default=(0.0, 0.0),
        )
        return occupied, total - occupied

    def _message(self, within: bool, per_byte: float, n_bytes: float) -> tuple[float, float]:
        """Return the seconds from sending to arrival, and those for which the link is occupied."""
        measured = self.figures.get("messages")
        if measured is not None and (
            points := sorted(p[1:] for p in measured.points if (p[0] == 1) == within)
        ):
            self.take("messages")
            total = _interpolate(points, n_bytes)
            return total, total - min(total, points[0][1])
        self._note("stage to stage bandwidth", self._message_rate)
        occupies = n_bytes * per_byte
        latency = self.take("message_within_s" if within else "message_between_s").value
        return occupies + latency, occupies

    def _note(self, name: str, rate: Rate) -> None:
        if name not in self._used:
            text = self._sources.get("collectives") or self._sources.get("links", "")
            basis = next(
                (basis for basis in (MEASURED, ASSUMED) if text.startswith(basis)), PUBLISHED
            )
            if rate.basis == ESTIMATED:
                basis = ASSUMED
                text = (
                    "estimated from the widths of links and cards by published ratios "
                    "(node_links.py)"
                )
            self._used[name] = Used(name, f"{rate.gb_per_s:.4g} GB/s, {rate.limit}", basis, text)


def _measured(figure: Figure, group: GroupLink) -> list[tuple[float, ...]]:
    """List the measured bytes and seconds for groups like this one.

    Such groups have as many ranks, and lie within one node if and only if this group does. If
    several kinds were measured, the one nearest in number of nodes, then in stride, is used. Return
    [] if none was.
    """
    like = [p for p in figure.points if p[1] == group.ranks and (p[2] > 1) == (group.nodes > 1)]

    def distance(point: Sequence[float]) -> tuple[float, float]:
        return abs(point[2] - group.nodes), abs(math.log(point[0] / group.stride))

    nearest = min(map(distance, like), default=None)
    return sorted(p[3:] for p in like if distance(p) == nearest)


def _interpolate(points: Sequence[tuple[float, ...]], x: float) -> float:
    """Interpolate linearly, with the first value before and the last slope after the points.

    A last slope that is not positive is noise: beyond it, as beyond a single point, values grow in
    proportion to the size.
    """
    last, end = points[-1]
    if x <= last:
        return float(np.interp(x, [size for size, _ in points], [seconds for _, seconds in points]))
    before, start = points[-2] if len(points) > 1 and end > points[-2][1] else (0.0, 0.0)
    return end + (end - start) * (x - last) / (last - before)


# -- groups and messages on nodes ------------------------------------------------------------------


EXCHANGES = "heads", "expert", "expert_between", "expert_within"
"""Groups in which all-to-alls run."""
OF_PASSES = "tensor", "context", "expert_tensor", "expert_inputs", *EXCHANGES
"""Groups whose messages belong to the passes of layers."""


def lines_of(layout: Layout, heads: int) -> dict[str, RankGroup]:
    """Return the mesh dimensions in which collectives run.

    heads  number of neighbouring context-parallel ranks that exchange heads; a ring has one rank of
           each set of such neighbours
    """
    excluded = "world", "pipeline", "data.states", "expert_data.states", "expert_span"
    dimensions = {
        name: dimension for name, dimension in layout.lines.items() if name not in excluded
    }
    context = dimensions["context"]
    stride = context.stride
    size = context.size
    dimensions["context"] = RankGroup("context-parallel ring", stride * heads, size // heads)
    dimensions["heads"] = RankGroup("context-parallel heads", stride, heads)
    return dimensions


def wraps(config: Config) -> bool:
    """Return whether the last rank of a pipeline also sends to the first one."""
    last = config.parallel.pipeline_model_parallel_size - 1
    return (last, 0) in itertools.pairwise(stage_owners(config))


@functools.lru_cache(maxsize=8192)
def _lanes(
    cluster: Cluster, layout: Layout, order: tuple[int, ...], wraps: bool, heads: int
) -> tuple[dict[str, GroupLink], list[dict[bool, float]], Rate]:
    """Return Channels.lanes, Channels.boundaries and the rate of the slowest boundary."""
    devices = len(order)
    links = node_links(cluster)
    lanes = {
        name: _group(links, layout.world_size, order, dimension, name in EXCHANGES)
        for name, dimension in lines_of(layout, heads).items()
    }
    size = layout.pipeline
    stride = layout.strides[2]
    tied = "tied embedding"
    if size == 1:
        return lanes | {"ends": GroupLink(1, 1, 1, tied)}, [], Rate(1.0, ESTIMATED, "")
    if devices % (stride * size) == 0:  # all stages of a pipeline are on one node
        firsts = (position for position in range(devices) if position // stride % size == 0)
        pairs = links.collective(
            (order[first], order[first + stride * (size - 1)]) for first in firsts
        )
        ends = GroupLink(2, 1, stride * (size - 1), tied, min(pairs.values()))
    else:
        slowest_card = min(links.card_shares([(device,) for device in order]))
        ends = GroupLink(2, 2, stride * (size - 1), tied, slowest_card)
    # largest seconds per byte of each boundary on any link or card, within and between nodes, while
    # all boundaries send forward at once
    nodes, messages = _messages_on_nodes(layout, devices, wraps)
    most: dict[tuple[int, int], float] = {}  # by both ends' positions; between nodes, _AWAY twice
    for node in nodes:
        neighbours = [(a, b) for a, b in enumerate(node[:devices]) if b != _NOWHERE]
        neighbours += [(_AWAY, b) for b, a in enumerate(node[devices:]) if a == _AWAY]
        paths = [
            path_of(links, *(None if end == _AWAY else order[end] for end in pair))
            for pair in neighbours
        ]
        users = Counter[Step]()
        weights = dict[Step, float]()
        for resources, weight in paths:
            users.update(resources)
            weights |= {resource: max(weight, weights.get(resource, 0.0)) for resource in resources}
        for pair, (resources, _) in zip(neighbours, paths, strict=True):
            seconds = max(users[r] * weights[r] / links.width_of(r) for r in resources) / 1e9
            pair = (_AWAY, _AWAY) if _AWAY in pair else pair
            most[pair] = max(seconds, most.get(pair, 0.0))
    boundaries: list[dict[bool, float]] = [{} for _ in range(size - (not wraps))]
    for rank, a, b in messages:
        boundary = boundaries[rank]
        boundary[b != _AWAY] = max(most[a, b], boundary.get(b != _AWAY, 0.0))
    slowest = max(seconds for by_location in boundaries for seconds in by_location.values())
    return lanes | {"ends": ends}, boundaries, Rate(1e-9 / slowest, ESTIMATED, "slowest boundary")


def _group(
    links: NodeLinks, world: int, order: tuple[int, ...], dimension: RankGroup, exchange: bool
) -> GroupLink:
    """Describe a mesh dimension's groups by the slowest; exchange: whether they run all-to-alls."""
    words, stride = dimension[:2]
    size = dimension.size
    if size == 1:
        return GroupLink(1, 1, stride, words)
    rates = list[Rate]()
    exchanges = list[Rate]()
    devices = len(order)
    for groups in groups_on_nodes(world, devices, dimension):
        of_devices = [[order[position] for position in group] for group in groups]
        exchanges += [links.exchange(of_devices, size)] * exchange
        rates += links.card_shares([group for group in of_devices if len(group) < size])
        rates += links.collective([group for group in of_devices if len(group) > 1]).values()
    nodes = len({rank // devices for rank in dimension.ranks_of(0)})
    return GroupLink(size, nodes, stride, words, min(rates), min(exchanges, default=None))


@functools.lru_cache(maxsize=1024)
def groups_on_nodes(
    world: int, devices: int, dimension: RankGroup
) -> set[frozenset[tuple[int, ...]]]:
    """Find all distinct arrangements of groups on a node, as the positions of their members.

    devices  number of ranks on each node: rank r is at position r % devices of node r // devices
    """
    _, stride, length, row_stride, rows = dimension
    period = math.lcm(stride * length, row_stride * rows, devices)
    ranks = np.arange(min(world, period)).reshape(-1, devices)
    # the first rank of each rank's group
    group = ranks - ranks // stride % length * stride
    group -= ranks // row_stride % rows * row_stride
    # for each position, the first position on the node that is in the same group
    first = (group[:, :, None] == group[:, None, :]).argmax(axis=2)
    return {
        frozenset(
            tuple(position for position, of in enumerate(node) if of == head) for head in node
        )
        for node in set(map(tuple, first.tolist()))
    }


@functools.lru_cache(maxsize=1024)
def _messages_on_nodes(
    layout: Layout, devices: int, wraps: bool
) -> tuple[set[tuple[int, ...]], set[tuple[int, int, int]]]:
    """Find the distinct kinds of nodes and of messages to the next stage, over all ranks.

    nodes     for each kind of node: the destinations of the messages that its positions send, then
              the sources of the messages that they receive, each a position on the node, _AWAY or
              _NOWHERE
    messages  (sending pipeline rank, its position, receiving position); between nodes both
              positions are _AWAY
    wraps     whether the last rank of a pipeline also sends to the first one
    """
    stride = layout.strides[2]
    size = layout.pipeline
    ranks = np.arange(layout.world_size)
    stage = ranks // stride % size
    node = ranks // devices

    def locate(step: int, end: int) -> npt.NDArray[np.int64]:
        """Locate each rank's neighbour, `step` ranks further; stage `end` wraps around."""
        neighbours = ranks + np.where(stage == end, -step * (size - 1), step)
        positions = np.where(neighbours // devices == node, neighbours % devices, _AWAY)
        return np.where((stage == end) & (not wraps), _NOWHERE, positions)

    targets = locate(stride, size - 1)
    sources = locate(-stride, 0)
    nodes = np.hstack([targets.reshape(-1, devices), sources.reshape(-1, devices)])
    messages = np.stack(
        [stage, np.where(targets == _AWAY, _AWAY, ranks % devices), targets], axis=1
    )
    return set(map(tuple, nodes.tolist())), set(map(tuple, messages[targets != _NOWHERE].tolist()))
