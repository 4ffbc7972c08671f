"""Seconds of one message and of one collective on the links that they really cross, as a clock of a step asks for them.

Bandwidths: the slowest group of a kind while all groups of that kind run (links.py), and for messages between stages
the busiest link or card while all boundaries send in the same direction. To them comes latency.
A collective takes its start and, as NCCL and RCCL reckon when they choose an algorithm (src/graph/tuning.cc of both),

    ring  (ranks - 1) steps around, of which (nodes - 1) between nodes; an all-reduce goes around twice
    tree  2 (ranks of a node - 1) steps within nodes and 2 log2(nodes) between them, for an all-reduce

whichever is shorter. A message occupies its link for its bytes and arrives a latency later. Where a machine's file has
measured seconds (`compute.collectives`, `compute.messages`), they are taken instead, on straight lines between sizes.
"""
from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron.config import Config
from megatron.model.formulas import ring_bytes
from megatron.parallel.topology import Layout
from megatron.planner.cluster import Cluster
from megatron.planner.compute import ASSUMED, MEASURED, PUBLISHED, Confidence, Figure, Used
from megatron.planner.links import ESTIMATED, NodeLinks, Rate, Step, node_links, ways


@dataclass(frozen=True)
class Placement:
    """A layout on the nodes of a machine: position i of every node is device device_order[i]."""

    cluster: Cluster
    layout: Layout
    device_order: tuple[int, ...]

    def place(self, rank: int) -> tuple[int, int]:
        """(node, device) of a rank."""
        node, position = divmod(rank, len(self.device_order))
        return node, self.device_order[position]


class Group(NamedTuple):
    """Ranks that run collectives: how many, on how many nodes, and ranks from one member to the next. rate: GB/s of
    each while all such groups run; None for a group of one."""

    ranks: int
    nodes: int
    stride: int
    rate: Rate | None = None


class Channels:
    """What messages take on a placement. Sizes are bytes, times seconds."""

    def __init__(self, config: Config, cluster: Cluster, placement: Placement) -> None:
        self.placement, self.layout = placement, placement.layout
        self.lanes = _lanes(cluster, placement.layout, placement.device_order, config.parallel.num_chunks > 1)
        self._cluster = cluster
        self._figures = cluster.figures
        self._used: dict[str, Used] = {}
        self._used_figures: dict[str, Figure] = {}

    # -- collectives ---------------------------------------------------------------------------------------------------

    def tensor_s(self, kind: str, n_bytes: float) -> float:
        """A collective of a tensor-parallel group over a tensor of n_bytes in all.

        `kind` is "all_gather", "reduce_scatter", "all_reduce" or "reduce", to one member, along a chain of all of them.
        """
        return self._collective("tensor-parallel", kind, n_bytes, self.lanes.tensor)

    @property
    def tensor_lane(self) -> Group:
        """What tensor_s depends on, beside the machine."""
        return self.lanes.tensor

    def data_s(self, kind: str, n_bytes: float) -> float:
        """The same of a data-parallel group."""
        return self._collective("data-parallel", kind, n_bytes, self.lanes.data)

    def model_s(self, n_bytes: float) -> float:
        """An all-reduce of all ranks of a replica: a norm, a flag."""
        return self._collective("replica", "all_reduce", n_bytes, self.lanes.model)

    def world_s(self, n_bytes: float) -> float:
        """An all-reduce of all ranks."""
        return self._collective("world", "all_reduce", n_bytes, self.lanes.world)

    def tied_s(self, n_bytes: float) -> float:
        """The sum of a tied embedding's gradients over the first and the last stage, n_bytes on each."""
        return self._collective("tied embedding", "all_reduce", n_bytes, self.lanes.ends)

    def _collective(self, name: str, kind: str, n_bytes: float, group: Group) -> float:
        if group.ranks == 1:
            return 0.0
        measured = self._figures.get(f"collectives.{kind}")
        if measured is not None and (seconds := _measured(measured, group)):
            self._used_figures[measured.name] = measured
            return _on_lines(seconds, n_bytes)
        assert group.rate is not None, "a group of several ranks has a rate"
        self._note(f"{name} bandwidth", group.rate)
        sent = n_bytes if kind == "reduce" else ring_bytes(n_bytes, group.ranks, kind)
        return self._start(kind, group) + sent / (group.rate.gb_per_s * 1e9)

    def _latency(self, name: str) -> float:
        return self._used_figures.setdefault(name, self._figures[name]).value

    def _start(self, kind: str, group: Group) -> float:
        """Seconds of a collective without bytes."""
        start, within = self._latency("collective_start_s"), self._latency("hop_within_s")
        between = self._latency("hop_between_s") if group.nodes > 1 else 0.0
        times, crossing = (2 if kind == "all_reduce" else 1), group.nodes - 1
        ring = times * ((group.ranks - 1 - crossing) * within + crossing * between)
        if kind != "all_reduce":
            return start + ring
        of_node = math.ceil(group.ranks / group.nodes)
        return start + min(ring, 2 * ((of_node - 1) * within + math.ceil(math.log2(group.nodes)) * between))

    # -- messages between stages ---------------------------------------------------------------------------------------

    def boundary(self, sender: int, forward: bool, n_bytes: float) -> tuple[float, float]:
        """(seconds that a message occupies its link, seconds of latency after that), of the slowest replica.

        From pipeline rank `sender` to the next one (forward) or the one before; the first and the last are neighbours
        where chunks are interleaved.
        """
        size = self.layout.pipeline
        edge = sender if forward else (sender - 1) % size
        worst = max(self._message(*ends, n_bytes) for ends in self.lanes.boundaries[edge].items())
        return worst[1], worst[0] - worst[1]

    def _message(self, within: bool, per_byte: float, n_bytes: float) -> tuple[float, float]:
        """(seconds from sending to arrival, those of them that the link is occupied)."""
        measured = self._figures.get("messages")
        points = [] if measured is None else [(p[1], p[2]) for p in measured.points if (p[0] == 1) == within]
        if measured is not None and points:
            self._used_figures["messages"] = measured
            points.sort()
            total = _on_lines(points, n_bytes)
            return total, total - min(total, points[0][1])
        self._note("stage to stage bandwidth", self.lanes.message_rate)
        occupies = n_bytes * per_byte
        return occupies + self._latency("message_within_s" if within else "message_between_s"), occupies

    # -- inputs --------------------------------------------------------------------------------------------------------

    def _note(self, name: str, rate: Rate) -> None:
        if name not in self._used:
            sources = self._cluster.sources
            text = sources.get("collectives") or sources.get("links", "")
            basis = next((basis for basis in (MEASURED, ASSUMED) if text.startswith(basis)), PUBLISHED)
            if rate.basis == ESTIMATED:
                basis, text = ASSUMED, "estimated from the widths of links and cards by published ratios (links.py)"
            self._used[name] = Used(name, f"{rate.gb_per_s:.4g} GB/s, {rate.limit}", basis, text)

    @property
    def confidence(self) -> Confidence:
        """What the answers so far rest on."""
        return Confidence.of(self._used_figures.values(), self._used.values())


def _measured(figure: Figure, group: Group) -> list[tuple[float, float]]:
    """(bytes, seconds) of the points for groups like this one: as many ranks, on one node or on several.

    Where there are points for several such groups, of the one with the nearest number of nodes, then nearest stride.
    """
    like = [p for p in figure.points if p[1] == group.ranks and (p[2] > 1) == (group.nodes > 1)]

    def distance(point: Sequence[float]) -> tuple[float, float]:
        return abs(point[2] - group.nodes), abs(math.log(point[0] / group.stride))

    nearest = min(map(distance, like), default=None)
    return sorted((p[3], p[4]) for p in like if distance(p) == nearest)


def _on_lines(points: Sequence[tuple[float, float]], x: float) -> float:
    """On the straight line between the points around x; before the first its value, after the last the last's slope.

    A last line that falls is noise: in proportion to the last point then, as where there is one alone.
    """
    last, end = points[-1]
    if x <= last:
        return float(np.interp(x, [size for size, _ in points], [seconds for _, seconds in points]))
    before, start = points[-2] if len(points) > 1 else (0.0, 0.0)
    if end <= start:
        before = start = 0.0
    return end + (end - start) * (x - last) / (last - before)


# -- how groups and messages lie on nodes ------------------------------------------------------------------------------


class Lanes(NamedTuple):
    """Groups of a layout, and for each pipeline rank's boundary to the next: whether both ends are on one node ->
    seconds that a byte occupies the link, in the slowest of the replicas that have it so."""

    tensor: Group
    data: Group
    model: Group
    world: Group
    ends: Group
    message_rate: Rate
    boundaries: list[dict[bool, float]]


@functools.lru_cache(maxsize=8192)
def _lanes(cluster: Cluster, layout: Layout, order: tuple[int, ...], wraps: bool) -> Lanes:
    devices, links = len(order), node_links(cluster)
    tensor, data = (_group(links, layout, order, direction) for direction in ("tp", "dp"))
    stride, size, world = layout.strides[2], layout.pipeline, layout.world_size
    boundaries, ends = list[dict[bool, float]](), Group(1, 1, 1)
    if size > 1:
        boundaries = _boundaries(links, layout, order, wraps)
        if devices % (stride * size) == 0:  # all of a pipeline's stages are on one node
            firsts = (position for position in range(devices) if position // stride % size == 0)
            pairs = links.collective((order[first], order[first + stride * (size - 1)]) for first in firsts)
            ends = Group(2, 1, stride * (size - 1), min(pairs.values()))
        else:
            ends = Group(2, 2, stride * (size - 1), min(links.card_shares([(device,) for device in order])))
    slowest = max((seconds for by_place in boundaries for seconds in by_place.values()), default=1e-9)
    of_replica, of_all = (
        min((group.rate for group in groups if group.rate), default=None)
        for groups in ((tensor, ends), (tensor, data, ends))
    )
    nodes = len({rank // devices for rank in layout.model_ranks(data=0)})
    return Lanes(
        tensor, data, Group(layout.tensor * size, nodes, 1, of_replica), Group(world, -(-world // devices), 1, of_all),
        ends, Rate(1e-9 / slowest, ESTIMATED, "slowest boundary"), boundaries,
    )  # fmt: skip


def _group(links: NodeLinks, layout: Layout, order: tuple[int, ...], direction: str) -> Group:
    """The groups of "tp" or "dp", with the rate of the slowest; members of a ring between nodes count on each."""
    at, devices = ("tp", "dp").index(direction), len(order)
    stride, size = layout.strides[at], (layout.tensor, layout.data)[at]
    if size == 1:
        return Group(1, 1, stride)
    rates = list[Rate]()
    for groups in groups_on_nodes(layout.world_size, devices, stride, size):
        of_devices = [[order[position] for position in group] for group in groups]
        rates += links.card_shares([group for group in of_devices if len(group) < size])
        rates += links.collective([group for group in of_devices if len(group) > 1]).values()
    nodes = size if stride >= devices else (size - 1) * stride // devices + 1
    return Group(size, nodes, stride, min(rates))


@functools.lru_cache(maxsize=1024)
def groups_on_nodes(world: int, devices: int, stride: int, size: int) -> set[frozenset[tuple[int, ...]]]:
    """All different ways in which groups lie on a node: the positions there of each group's members.

    stride  ranks from one member of a group to the next; rank r is at position r % devices of node r // devices
    """
    ranks = np.arange(min(world, math.lcm(stride * size, devices))).reshape(-1, devices)
    group = ranks // (stride * size) * stride + ranks % stride
    first = (group[:, :, None] == group[:, None, :]).argmax(axis=2)  # the first position of the same group
    return {
        frozenset(tuple(place for place, of in enumerate(node) if of == head) for head in node)
        for node in set(map(tuple, first.tolist()))
    }


_NOWHERE, _AWAY = -1, -2  # places of a message's other end beside positions of the same node


@functools.lru_cache(maxsize=1024)
def messages_on_nodes(layout: Layout, devices: int, wraps: bool) -> tuple[set[Any], set[Any]]:
    """Kinds of nodes and of messages to next stages, over all ranks. `wraps`: also from the last rank of a pipeline to
    its first.

    nodes     for each kind where the message of each position goes, and where that to it comes from: a position of the
              node, _AWAY or _NOWHERE
    messages  (pipeline rank that sends, its position, position that receives or _AWAY)
    """
    stride, size = layout.strides[2], layout.pipeline
    ranks = np.arange(layout.world_size)
    stage, node = ranks // stride % size, ranks // devices

    def places(step: int, end: int) -> Any:
        """Where the neighbours are, one `step` on and from the `end` of the pipeline all the way around."""
        found = ranks + np.where(stage == end, -step * (size - 1), step)
        place = np.where(found // devices == node, found % devices, _AWAY)
        return np.where((stage == end) & (not wraps), _NOWHERE, place)

    targets, sources = places(stride, size - 1), places(-stride, 0)
    nodes = np.hstack([targets.reshape(-1, devices), sources.reshape(-1, devices)])
    messages = np.stack([stage, np.where(targets == _AWAY, _AWAY, ranks % devices), targets], axis=1)
    return set(map(tuple, nodes.tolist())), set(map(tuple, messages[targets != _NOWHERE].tolist()))


def _boundaries(links: NodeLinks, layout: Layout, order: tuple[int, ...], wraps: bool) -> list[dict[bool, float]]:
    """For each boundary: whether its ends are on one node -> the most seconds that a byte occupies a link or a card,
    while all boundaries send forward."""
    nodes, messages = messages_on_nodes(layout, len(order), wraps)
    most: dict[tuple[int, int], float] = {}  # positions that send and receive, or _AWAY both
    for node in nodes:
        targets, sources = node[: len(order)], node[len(order) :]
        ends = [(a, b) for a, b in enumerate(targets) if b != _NOWHERE]
        ends += [(_AWAY, b) for b, a in enumerate(sources) if a == _AWAY]
        paths = [_path(links, *(None if end == _AWAY else order[end] for end in pair)) for pair in ends]
        users, weights = Counter[Step](), dict[Step, float]()
        for resources, weight in paths:
            users.update(resources)
            weights |= {resource: max(weight, weights.get(resource, 0.0)) for resource in resources}
        for pair, (resources, _) in zip(ends, paths, strict=True):
            seconds = max(users[r] * weights[r] / _rate(links, r) for r in resources) / 1e9
            pair = (_AWAY, _AWAY) if _AWAY in pair else pair
            most[pair] = max(seconds, most.get(pair, 0.0))
    found: list[dict[bool, float]] = [{} for _ in range(layout.pipeline - (not wraps))]
    for rank, a, b in messages:
        found[rank][b != _AWAY] = max(most[a, b], found[rank].get(b != _AWAY, 0.0))
    return found


_OUT, _IN = -1, -2


def _rate(links: NodeLinks, resource: Step) -> float:
    """GB/s of a link, or of a card as (_OUT or _IN, card)."""
    if resource[0] in (_OUT, _IN):
        return links.card * links.cluster.nic_gb_per_s
    return links.rate_of_link(links.cluster.link_gb_per_s(*resource))


@functools.cache
def _path(links: NodeLinks, source: int | None, target: int | None) -> tuple[frozenset[Step], float]:
    """The links and cards that a message between two devices takes (None: on another node), and the factor by which it
    takes longer than they say. Of several equal ways it is counted on all."""
    cluster, cards = links.cluster, list[Step]()
    if source is None:
        assert target is not None, "a message has an end on the node"
        cards, source = [(_IN, cluster.nic_of_device[target])], cluster.nic_on_device[cluster.nic_of_device[target]]
    elif target is None:
        cards, target = [(_OUT, cluster.nic_of_device[source])], cluster.nic_on_device[cluster.nic_of_device[source]]
    found = ways(cluster, source, target)
    weight = 1 / links.detour if len(found[0]) > 1 and not cards else 1.0
    return frozenset(cards).union(*found), weight
