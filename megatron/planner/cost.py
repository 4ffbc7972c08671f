"""Seconds that a step's messages take on a placement, if nothing hides them: an upper bound, to compare placements by.

All groups of a direction run their collectives at once. Of a pipeline's messages a rank waits for those that it sends,
and with them for all others of the step that pass the same link or card. Directions are added up, as if none overlapped
with another or with computation. Latency is not counted (links.py).
"""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.parallel.topology import Layout
from megatron.planner.cluster import Cluster
from megatron.planner.links import ESTIMATED, NodeLinks, Rate, Step, node_links
from megatron.planner.patterns import Edge, Groups, edges_on_nodes, groups_on_nodes, stride_and_size
from megatron.planner.traffic import Flow, Traffic


class CostPart(NamedTuple):
    """One kind of message: direction, name, bytes that the busiest rank sends per step, GB/s, seconds, what limits."""

    direction: str
    name: str
    bytes: float
    gb_per_s: float
    seconds: float
    limit: str
    basis: str


@dataclass(frozen=True)
class PlacementCost:
    """All of a step's messages. `links_crossed`: links that the messages between stages take on the busiest node."""

    parts: tuple[CostPart, ...]
    links_crossed: int = 0

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    def of(self, direction: str) -> tuple[CostPart, ...]:
        return tuple(part for part in self.parts if part.direction == direction)

    def seconds_of(self, direction: str) -> float:
        return sum(part.seconds for part in self.of(direction))

    def cheaper_than(self, other: PlacementCost) -> bool:
        """Less time in tensor-parallel collectives, which every layer waits for, while the other messages travel behind
        computations; among equals less time in all; then fewer links."""
        mine, theirs = (
            (cost.seconds_of("tp"), cost.seconds, float(cost.links_crossed)) for cost in (self, other)
        )
        for a, b in zip(mine, theirs, strict=True):
            if abs(a - b) > 1e-9 * max(a, b):
                return a < b
        return False


class CostModel:
    """The cost of a layout on a machine under any order of a node's devices. `devices` of each node take part."""

    def __init__(self, cluster: Cluster, layout: Layout, traffic: Traffic, devices: int) -> None:
        self.layout, self.traffic = layout, traffic
        self._links = node_links(cluster)
        self._cluster = cluster
        self._devices = devices
        self._known: dict[str, frozenset[Groups]] = {}

    def _groups(self, direction: str) -> frozenset[Groups]:
        if direction not in self._known:
            self._known[direction] = groups_on_nodes(self.layout, self._devices, direction)
        return self._known[direction]

    @functools.cached_property
    def _edges(self) -> frozenset[frozenset[Edge]]:
        return edges_on_nodes(self.layout, self._devices, wraps=self.traffic.wrap > 0)

    def rate(self, direction: str, device_order: tuple[int, ...]) -> Rate:
        """Of the slowest group of "tp" or "dp" while all of them run collectives; the direction has several ranks."""
        found = (self._slowest(groups, device_order) for groups in self._groups(direction))
        return min(found, key=lambda rate: rate.gb_per_s)

    def ends_rate(self, order: tuple[int, ...]) -> Rate:
        """Of the pairs of first and last rank of each pipeline: on a node, or over cards that all its ranks share."""
        stride, size = stride_and_size(self.layout, "pp")
        if self._devices % (stride * size) == 0:
            firsts = [r for r in range(self._devices) if r // stride % size == 0]
            pairs = [(order[r], order[r + stride * (size - 1)]) for r in firsts]
            return min(self._links.collective(pairs).values())
        return min(self._links.card_shares([(device,) for device in order]))

    def message_seconds(self, order: tuple[int, ...]) -> dict[tuple[int, int] | None, float]:
        """Positions of the ranks at a boundary of stages, None on two nodes -> seconds of one message over it, the
        slowest of all such, while all boundaries send in the same direction. Links being alike in both, so is this."""
        return _slowest_messages(_Node(self._links, edges, order, self.traffic) for edges in self._edges)

    def tensor_seconds(self, device_order: tuple[int, ...]) -> float:
        """Of the tensor-parallel collectives alone, which decide first."""
        return sum(part.seconds for part in self._collectives("tp", self.traffic.tensor, device_order))

    def cost(self, device_order: tuple[int, ...]) -> PlacementCost:
        """With device device_order[i] at position i of every node."""
        tensor = self._collectives("tp", self.traffic.tensor, device_order)
        pipeline, crossed = self._pipeline(device_order)
        data = self._collectives("dp", self.traffic.data, device_order)
        return PlacementCost((*tensor, *pipeline, *data), crossed)

    # -- collectives ---------------------------------------------------------------------------------------------------

    def _collectives(self, direction: str, flows: tuple[Flow, ...], order: tuple[int, ...]) -> list[CostPart]:
        if not flows:
            return []
        rate = self.rate(direction, order)
        return [_part(direction, flow, rate) for flow in flows]

    def _slowest(self, groups: Groups, order: tuple[int, ...]) -> Rate:
        """Of the groups of a node, the members of each ring between nodes included."""
        crossing = [tuple(order[i] for i in group) for group in groups.crossing]
        inside = [group for group in crossing if len(group) > 1]
        family = [tuple(order[i] for i in group) for group in groups.within] + inside
        rates = [*self._links.card_shares(crossing)]
        if family:
            rates += self._links.collective(family).values()
        # Equal ones must be told apart in one way only, whatever order the sets are in.
        return min(rates)

    # -- pipeline ------------------------------------------------------------------------------------------------------

    def _pipeline(self, order: tuple[int, ...]) -> tuple[list[CostPart], int]:
        traffic = self.traffic
        if not traffic.boundary:
            return [], 0
        nodes = [_Node(self._links, edges, order, traffic) for edges in self._edges]
        parts = [max((node.busiest() for node in nodes), key=lambda part: (part.seconds, part))]
        parts.append(self._way_through(nodes))
        if traffic.tied is not None:
            parts.append(_part("pp", traffic.tied, self.ends_rate(order)))
        return parts, max(node.links_crossed for node in nodes)

    def _way_through(self, nodes: Sequence[_Node]) -> CostPart:
        """One micro-batch through all stages and back, in the slowest of the pipelines that pass the first node."""
        seconds = _slowest_messages(nodes)
        layout, devices = self.layout, self._devices
        stride, size = stride_and_size(layout, "pp")
        chunks = self.traffic.stages // size
        slowest = 0.0
        for rank in range(min(devices, layout.world_size)):
            ranks = [rank + (stage - rank // stride % size) * stride for stage in range(size)]
            total = 0.0
            for a, b, times in zip(ranks, ranks[1:] + ranks[:1], [chunks] * (size - 1) + [chunks - 1], strict=True):
                if times:
                    total += times * seconds[(a % devices, b % devices) if a // devices == b // devices else None]
            slowest = max(slowest, total)
        boundaries = self.traffic.stages - 1
        sent = 2.0 * boundaries * self.traffic.message_bytes
        name, limit = "first in, last out", f"{boundaries} boundaries in turn"
        return CostPart("pp", name, sent, sent / (2 * slowest) / 1e9, 2 * slowest, limit, ESTIMATED)


def _part(direction: str, flow: Flow, rate: Rate) -> CostPart:
    seconds = flow.bytes / rate.gb_per_s / 1e9
    return CostPart(direction, flow.name, flow.bytes, rate.gb_per_s, seconds, rate.limit, rate.basis)


class _Message(NamedTuple):
    """What goes over a boundary in one direction, as far as it is on this node. `position` sends it, None elsewhere.

    resources  links in their direction, and cards as (_OUT or _IN, card)
    weight     how much longer it takes than its resources say
    """

    edge: Edge
    forward: bool
    position: int | None
    resources: frozenset[Step]
    weight: float


_OUT, _IN = -1, -2


class _Node:
    """The messages between stages that begin or end on a node, and how busy they keep its links and cards.

    Where there are several equal ways between devices, a message is counted on all of them.
    """

    def __init__(self, links: NodeLinks, edges: Iterable[Edge], order: tuple[int, ...], traffic: Traffic) -> None:
        self._links, self._traffic = links, traffic
        self.links_crossed = 0
        self._messages: list[_Message] = []
        self._alone: dict[Step, float] = {}
        for edge in edges:
            self._add(edge, order)

    def _add(self, edge: Edge, order: tuple[int, ...]) -> None:
        source = None if edge.source is None else order[edge.source]
        target = None if edge.target is None else order[edge.target]
        there, back, weight, links = _path(self._links, source, target)
        self.links_crossed += links
        self._messages.append(_Message(edge, True, edge.source, there, weight))
        self._messages.append(_Message(edge, False, edge.target, back, weight))

    def _seconds(self, resource: Step) -> float:
        """Of one message alone."""
        if resource not in self._alone:
            if resource[0] in (_OUT, _IN):
                rate = self._links.card * self._links.cluster.nic_gb_per_s
            else:
                rate = self._links.rate_of_link(self._links.width(resource))
            self._alone[resource] = self._traffic.message_bytes / rate / 1e9
        return self._alone[resource]

    def busiest(self) -> CostPart:
        """The rank that waits longest for the links that it sends over, all messages of a step there counted."""
        busy, users = dict[Step, float](), Counter[Step]()
        for message in self._messages:
            for resource in message.resources:
                seconds = self._count(message) * message.weight * self._seconds(resource)
                busy[resource] = busy.get(resource, 0.0) + seconds
                users[resource] += 1
        found = []
        for position in {m.position for m in self._messages} - {None}:
            own = [m for m in self._messages if m.position == position]
            slowest = {max(m.resources, key=lambda r: (busy[r], r)) for m in own}
            seconds = sum(busy[resource] for resource in slowest)
            sent = float(sum(map(self._count, own)) * self._traffic.message_bytes)
            limit = max(slowest, key=lambda r: (busy[r], r))
            found.append((seconds, sent, limit))
        seconds, sent, limit = max(found)
        text = self._describe(limit, users[limit])
        return CostPart(
            "pp", "stage to stage", sent, sent / seconds / 1e9, seconds, text, ESTIMATED
        )

    def alone(self) -> Iterator[tuple[tuple[int, int] | None, float]]:
        """(positions, None between nodes; seconds) of one forward message of each boundary, all sent at once."""
        forward = [m for m in self._messages if m.forward]
        busy = Counter[Step]()
        weights = dict[Step, float]()
        for message in forward:
            for resource in message.resources:
                busy[resource] += 1
                weights[resource] = max(weights.get(resource, 1.0), message.weight)
        for message in forward:
            source, target = message.edge.source, message.edge.target
            places = (source, target) if source is not None and target is not None else None
            yield places, max(busy[r] * weights[r] * self._seconds(r) for r in message.resources)

    def _count(self, message: _Message) -> int:
        return self._traffic.wrap if message.edge.wraps else self._traffic.boundary

    def _describe(self, resource: Step, users: int) -> str:
        kind, card = resource
        cluster = self._links.cluster
        if kind in (_OUT, _IN):
            return f"{cluster.nics[card]}, {users} message{'s' * (users > 1)}"
        a, b = sorted(resource)
        return f"link {a}-{b}, {users} message{'s' * (users > 1)}"


def _slowest_messages(nodes: Iterable[_Node]) -> dict[tuple[int, int] | None, float]:
    seconds: dict[tuple[int, int] | None, float] = {}
    for node in nodes:
        for places, value in node.alone():
            seconds[places] = max(seconds.get(places, 0.0), value)
    return seconds


@functools.cache
def _path(
    links: NodeLinks, source: int | None, target: int | None
) -> tuple[frozenset[Step], frozenset[Step], float, int]:
    """What a message between two devices (None: on another node) takes there and back, its weight, its links."""
    cluster, weight = links.cluster, 1.0
    there, back = set[Step](), set[Step]()
    if source is not None and target is not None:
        ways = links.ways(source, target)
        weight = 1.0 if len(ways[0]) == 1 else 1 / links.detour
    elif source is not None:
        ways = links.to_card(source)
        there, back = {(_OUT, cluster.nic_of_device[source])}, {(_IN, cluster.nic_of_device[source])}
    else:
        assert target is not None, "a message has an end on the node"
        ways = tuple(_back(way) for way in links.to_card(target))
        there, back = {(_IN, cluster.nic_of_device[target])}, {(_OUT, cluster.nic_of_device[target])}
    there |= {step for way in ways for step in way}
    back |= {step for way in ways for step in _back(way)}
    return frozenset(there), frozenset(back), weight, len(ways[0])


def _back(way: tuple[Step, ...]) -> tuple[Step, ...]:
    return tuple((b, a) for a, b in reversed(way))
