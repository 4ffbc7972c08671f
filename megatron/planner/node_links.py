"""Bandwidth of the links and network cards of a node, for the groups of ranks that use them.

A bandwidth is the GB/s (1e9 bytes/s) that one rank sends while all similar groups communicate, as
in AxoNN's published table. A rate is *published* if that table has these groups on these devices.
Otherwise it is *estimated*: the link width times an efficiency, the ratio of published rates to
link widths. The efficiencies for Frontier are:

    link     pairs on links of 200 GB/s reach 129, and on links of 50 GB/s 50. Linear interpolation
             gives 76.3 for a link of 100 GB/s; a saturating curve would give more
    cut      52/100 = 0.52 of the links across the narrowest cut of a group: {0, 1, 2, 3} has 52
             over two links of 50
    detour   36/50 = 0.72 of the narrowest link on a path through other devices: pairs 4 apart reach
             36
    card     40/100 = 0.40 of a node's network cards: groups over several nodes have 40, 20, 10, 5
             for 1, 2, 4, 8 groups per node

A collective of three or more devices on direct links is estimated in two ways, and the larger
result counts. One ring can run along a spanning tree and back, because links are full duplex; it is
as fast as the narrowest link of the widest spanning tree. Several rings together carry no more than
the narrowest cut: the split of the group into two parts with the least bandwidth between them. For
published groups that were not used to fit the efficiencies, the rules give 130 where 135 was
published (the whole node) and 52 where 72 was (every other device): at worst 28 % too low.

The rate of {0, 1, 6, 7} is unknown. Its ring is 100 GB/s wide, the ring of {0, 1, 2, 3} only 50.
The estimate is therefore 76 GB/s, compared with the published 52 for {0, 1, 2, 3} and 72 for {0, 2,
4, 6}; the narrowest cut of each of the three is 100 GB/s. If RCCL gets no more out of this cut than
in {0, 1, 2, 3}, the rate is 52. Switches between nodes are not modelled.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megatron.planner.cluster import Cluster
from megatron.planner.compute import PUBLISHED

ESTIMATED = "estimated"

# Efficiencies published for Frontier, for machines without a published table.
_LINK = 129 / 200
_CUT = 52 / 100
_DETOUR = 36 / 50
_CARD = 40 / 100

Step = tuple[int, int]
"""A link in one direction, from one device to another; or a card, as (_OUT or _IN, card)."""
_OUT = -1
_IN = -2


class Rate(NamedTuple):
    """GB/s of one rank, whether this is published or estimated, and the bottleneck."""

    gb_per_s: float
    basis: str
    limit: str


@functools.cache
def shortest_routes(cluster: Cluster, a: int, b: int) -> tuple[tuple[Step, ...], ...]:
    """List the shortest paths from device a to b with the widest bottleneck link.

    If there are several, it is unknown which one the hardware takes.
    """
    paths: list[tuple[int, ...]] = [(a,)]
    while not (shortest := [tuple(itertools.pairwise(path)) for path in paths if path[-1] == b]):
        paths = [
            (*path, device)
            for path in paths
            for device in range(cluster.devices_per_node)
            if device not in path and cluster.link_gb_per_s(path[-1], device)
        ]
    widest = max(_width(cluster, route) for route in shortest)
    return tuple(route for route in shortest if _width(cluster, route) == widest)


def _width(cluster: Cluster, route: tuple[Step, ...]) -> float:
    return min(itertools.starmap(cluster.link_gb_per_s, route), default=float("inf"))


class NodeLinks:
    """Bandwidth of a node's links and cards.

    card, detour, cut: efficiencies, as explained in the module's docstring
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        count = cluster.devices_per_node
        self._published: dict[frozenset[frozenset[int]], float] = {}
        # width of a link -> published rate of pairs that all have such a link
        self._by_width: dict[float, float] = {}
        across = list[float]()
        cuts = list[float]()
        detours = list[float]()
        for (inner, size), rate in cluster.collective_gb_per_s.items():
            if size == 0:
                across.append(inner * rate)
            if size <= 1:
                continue
            firsts = (first for first in range(count) if first // inner % size == 0)
            groups = (frozenset(first + k * inner for k in range(size)) for first in firsts)
            family = frozenset(group for group in groups if max(group) < count)
            self._published[family] = rate
            widths = {cluster.link_gb_per_s(*group) for group in family if size == 2}
            if 0.0 in widths:  # the slowest pairs are those without a link
                pairs = (shortest_routes(cluster, *sorted(pair))[0] for pair in family)
                detours.append(rate / min(_width(cluster, route) for route in pairs))
            elif len(widths) == 1:
                self._by_width[widths.pop()] = rate
            elif not widths and all(map(cluster.reached, family)):
                cuts.append(rate / min(map(self.narrowest_cut, family)))
        self.card = min(across, default=0.0) / (len(cluster.nics) * cluster.nic_gb_per_s) or _CARD
        self.detour = min(detours, default=_DETOUR)
        self.cut = min(cuts, default=_CUT)

    def rate_of_link(self, width: float) -> float:
        """Return the GB/s of one message, or of a ring, over direct links of this width.

        The rate is interpolated between published widths; beyond them it is proportional to the
        width.
        """
        if not self._by_width:
            return _LINK * width
        widths = sorted(self._by_width)
        rates = [self._by_width[known] for known in widths]
        nearest = min(max(width, widths[0]), widths[-1])
        return float(np.interp(nearest, widths, rates)) * width / nearest

    def widest_ring(self, group: Collection[int], through: Collection[int] = ()) -> float:
        """Return the link GB/s of a ring along a spanning tree and back; 0 if there is no tree."""
        widths = sorted(set(self.cluster.links.values()), reverse=True)
        return next((width for width in widths if self.cluster.reached(group, width, through)), 0.0)

    def narrowest_cut(self, group: Iterable[int]) -> float:
        """Return the GB/s across the group's narrowest split into two parts.

        Stoer and Wagner, Journal of the ACM 44 (1997) 585. Time is cubic in the group's size.
        """
        members = sorted(group)
        of_pair = self.cluster.link_gb_per_s
        widths = np.array([[of_pair(a, b) for b in members] for a in members])
        narrowest = float("inf")
        while len(widths) > 1:
            # add the member with the widest links to those added so far; the last one is cut off
            added = [0]
            rest = list(range(1, len(widths)))
            while rest:
                to_added = widths[added].sum(axis=0)
                added.append(max(rest, key=to_added.__getitem__))
                rest.remove(added[-1])
            *_, joined, last = added
            narrowest = min(narrowest, float(widths[last].sum()))
            widths[joined] += widths[last]
            widths[:, joined] = widths[joined]
            widths[joined, joined] = 0.0
            widths = np.delete(np.delete(widths, last, 0), last, 1)
        return narrowest

    def collective(self, family: Iterable[Iterable[int]]) -> Mapping[frozenset[int], Rate]:
        """Return the rate of each group of a node while all of them run collectives.

        Groups are disjoint and have two members or more.
        """
        return _rates(self, frozenset(map(frozenset[int], family)))

    def rate(self, group: frozenset[int], family: frozenset[frozenset[int]]) -> Rate:
        """Return the rate of a group while the other groups in its family run too."""
        published = next((r for known, r in self._published.items() if family <= known), None)
        shown = ",".join(map(str, sorted(group)))
        if published is not None:
            return Rate(published, PUBLISHED, f"devices {shown}")
        width = self.widest_ring(group)
        if not width:
            width = self.widest_ring(group, through=range(self.cluster.devices_per_node))
            # It is unknown which links the detours take: assume that all groups share them.
            return Rate(self.detour * width / len(family), ESTIMATED, f"detours of {shown}")
        ring = self.rate_of_link(width)
        cut = self.cut * self.narrowest_cut(group)
        return Rate(ring if len(group) == 2 else max(ring, cut), ESTIMATED, f"links of {shown}")

    def card_shares(self, crossing: Sequence[Sequence[int]]) -> list[Rate]:
        """Return the rate between nodes of each group of a node, while all of them communicate.

        crossing  devices of each group on the node; all groups span several nodes

        A group uses the cards of all its devices on the node; groups that use the same card share
        it evenly.
        """
        cluster = self.cluster
        count = len(crossing)
        cards = [{cluster.nic_of_device[device] for device in group} for group in crossing]
        users = Counter(itertools.chain(*cards))
        natural = all(count * len(group) == cluster.devices_per_node for group in crossing)
        published = natural and (count, 0) in cluster.collective_gb_per_s
        basis = PUBLISHED if published else ESTIMATED
        shares = (sum(cluster.nic_gb_per_s / users[card] for card in used) for used in cards)
        return [
            Rate(self.card * share, basis, f"network cards of {count} groups") for share in shares
        ]

    def exchange(self, groups: Iterable[Sequence[int]], size: int) -> Rate:
        """Return the rate of all-to-alls of these groups of a node while all of them run.

        groups  devices of each group's members on this node
        size    number of members of each group on all nodes
        """
        loads = Counter[Step]()  # bytes, if each rank sends one byte to every other rank
        for group in groups:
            for a, b in itertools.permutations(group, 2):
                routes = shortest_routes(self.cluster, a, b)
                share = (1 / self.detour if len(routes[0]) > 1 else 1.0) / len(routes)
                for route in routes:
                    loads.update(dict.fromkeys(route, share))
            for device in group if len(group) < size else ():
                for ends in ((device, None), (None, device)):
                    loads.update(dict.fromkeys(path_of(self, *ends)[0], size - len(group)))
        seconds = {step: load / (size - 1) / self.width_of(step) for step, load in loads.items()}
        worst = max(seconds, key=seconds.__getitem__)
        limit = "network cards" if worst[0] < 0 else f"link {worst[0]}-{worst[1]}"
        return Rate(1 / seconds[worst], ESTIMATED, limit)

    def width_of(self, step: Step) -> float:
        """Return the GB/s of a link, or of a card."""
        if step[0] < 0:
            return self.card * self.cluster.nic_gb_per_s
        return self.rate_of_link(self.cluster.link_gb_per_s(*step))


node_links = functools.cache(NodeLinks)


@functools.cache
def _rates(links: NodeLinks, family: frozenset[frozenset[int]]) -> Mapping[frozenset[int], Rate]:
    return {group: links.rate(group, family) for group in family}


@functools.cache
def path_of(
    links: NodeLinks, source: int | None, target: int | None
) -> tuple[frozenset[Step], float]:
    """Return the links and cards that a message takes, and its slowdown on a detour (1.0: none).

    None stands for a device on another node. A message with several equal paths is counted on all
    of them.
    """
    cluster = links.cluster
    cards = list[Step]()
    if source is None:
        assert target is not None, "a message has an end on the node"
        card = cluster.nic_of_device[target]
        cards = [(_IN, card)]
        source = cluster.nic_on_device[card]
    elif target is None:
        card = cluster.nic_of_device[source]
        cards = [(_OUT, card)]
        target = cluster.nic_on_device[card]
    routes = shortest_routes(cluster, source, target)
    weight = 1 / links.detour if len(routes[0]) > 1 and not cards else 1.0
    return frozenset(cards).union(*routes), weight
