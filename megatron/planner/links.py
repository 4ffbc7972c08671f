"""Bandwidth of groups and messages on the links of a node and on its network cards.

All rates are GB/s (1e9 bytes) that one rank sends while all others of its kind send too, as AxoNN's published table has
them. A rate is *published* where that table has exactly these groups on these devices. Elsewhere it is *estimated* from
the link table, with efficiencies that are ratios of published rates to it. With the figures of Frontier:

    link     pairs on links of 200 GB/s gave 129, on links of 50 GB/s 50. A link of 100 GB/s is put on the straight line
             between them, 76.3: a curve that bends down, as saturation does, lies above that line
    cut      52/100 = 0.52 of the links across the narrowest cut of a group: {0, 1, 2, 3} gave 52 over two links of 50
    detour   36/50 = 0.72 of the narrowest link of a way through other devices: pairs 4 apart gave 36
    card     40/100 = 0.40 of a node's network cards: groups over several nodes gave 40, 20, 10, 5 for 1, 2, 4, 8 a node

A collective of a group on direct links is estimated twice, and the larger counts. One ring: it can go around a spanning
tree, there and back, because links carry both directions at once; so it is as wide as the narrowest link of the widest
spanning tree. Several rings at once: none can pass more than the narrowest cut, the division of the group in two with
the least bandwidth across. What the two rules are worth: for published groups that no figure above is taken from they
give 130 for 135 (the whole node) and 52 for 72 (every other device), so a quarter too low at worst.

What is *not* known: how {0, 1, 6, 7} does. Its ring is 100 GB/s wide where that of {0, 1, 2, 3} is 50, which makes it
76 GB/s against the published 52, and against the published 72 of {0, 2, 4, 6}; but the narrowest cut of all three is
100 GB/s. If RCCL gets no more out of that cut than in {0, 1, 2, 3}, it is 52 in both. No latency is counted, as none
was published, nor the switches between nodes.
"""
from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megatron.planner.cluster import Cluster

Step = tuple[int, int]
"""A link in one direction: from this device to that one."""

Family = frozenset[frozenset[int]]
"""All groups of one kind on a node; groups are disjoint."""

# Of published rates on Frontier, for machines of which none were published.
_LINK, _CUT, _DETOUR, _CARD = 129 / 200, 52 / 100, 36 / 50, 40 / 100

PUBLISHED, ESTIMATED = "published", "estimated"


class Rate(NamedTuple):
    """GB/s of one rank, whether that was published or estimated, and what limits it."""

    gb_per_s: float
    basis: str
    limit: str


@functools.cache
def ways(cluster: Cluster, a: int, b: int) -> tuple[tuple[Step, ...], ...]:
    """All ways from device a to b with the fewest links and, among those, the widest narrowest link.

    Which of several the hardware takes is not known.
    """
    paths: list[tuple[int, ...]] = [(a,)]
    while not (found := [path for path in paths if path[-1] == b]):
        paths = [
            (*path, device) for path in paths for device in range(cluster.devices_per_node)
            if device not in path and cluster.link_gb_per_s(path[-1], device)
        ]  # fmt: skip
    widths = {path: _width(cluster, tuple(itertools.pairwise(path))) for path in found}
    return tuple(tuple(itertools.pairwise(path)) for path in found if widths[path] == max(widths.values()))


def _width(cluster: Cluster, way: tuple[Step, ...]) -> float:
    return min((cluster.link_gb_per_s(*step) for step in way), default=float("inf"))


@functools.cache
def node_links(cluster: Cluster) -> NodeLinks:
    """The links of a node of this machine."""
    return NodeLinks(cluster)


class NodeLinks:
    """What a node's links carry. Efficiencies as in the module's text: cut, detour, card."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        across = [inner * rate for (inner, size), rate in cluster.collective_gb_per_s.items() if size == 0]
        self.card = min(across, default=0.0) / (len(cluster.nics) * cluster.nic_gb_per_s) or _CARD
        self._rates: dict[Family, Mapping[frozenset[int], Rate]] = {}
        self._published = {
            self._natural(inner, size): rate for (inner, size), rate in cluster.collective_gb_per_s.items() if size > 1
        }
        self._by_width: dict[float, float] = {}  # width of a link -> published rate of pairs that all have such a link
        cuts, detours = [], []
        for family, rate in self._published.items():
            widths = {cluster.link_gb_per_s(min(group), max(group)) for group in family if len(group) == 2}
            if 0.0 in widths:  # the slowest are those without a link
                pairs = (ways(cluster, min(group), max(group))[0] for group in family)
                detours.append(rate / min(_width(cluster, way) for way in pairs))
            elif len(widths) == 1:
                self._by_width[widths.pop()] = rate
            elif not widths and all(map(cluster.reached, family)):
                cuts.append(rate / min(map(self.narrowest_cut, family)))
        self.detour, self.cut = min(detours, default=_DETOUR), min(cuts, default=_CUT)

    def _natural(self, inner: int, size: int) -> Family:
        """The groups of a row of the published table, whose devices are in the order of their numbers."""
        count = self.cluster.devices_per_node
        firsts = [first for first in range(count) if first // inner % size == 0]
        groups = (frozenset(first + k * inner for k in range(size)) for first in firsts)
        return frozenset(group for group in groups if max(group) < count)

    def rate_of_link(self, width: float) -> float:
        """GB/s of one message, or of a ring, over direct links of this width.

        Between two published widths it is on the straight line, beyond them it is the same part of the width.
        """
        if not self._by_width:
            return _LINK * width
        widths, rates = zip(*sorted(self._by_width.items()), strict=True)
        nearest = min(max(width, widths[0]), widths[-1])
        return float(np.interp(nearest, widths, rates)) * width / nearest

    def widest_ring(self, group: Iterable[int], through: Iterable[int] = ()) -> float:
        """GB/s of one ring over the group, there and back on a spanning tree; 0 where it is not connected."""
        group, through = frozenset(group), frozenset(through)
        widths = sorted(set(self.cluster.links.values()), reverse=True)
        return next((width for width in widths if self.cluster.reached(group, width, through)), 0.0)

    def narrowest_cut(self, group: Iterable[int]) -> float:
        """GB/s across the division of the group in two that has the least."""
        first, *others = sorted(group)
        best = float("inf")
        for count in range(len(others)):
            for chosen in itertools.combinations(others, count):
                side = {first, *chosen}
                across = ((a, b) for a in side for b in others if b not in side)
                best = min(best, sum(itertools.starmap(self.cluster.link_gb_per_s, across)))
        return best

    def collective(self, family: Iterable[Iterable[int]]) -> Mapping[frozenset[int], Rate]:
        """The rate of each group of a node while all of them run collectives. Groups are disjoint, of two or more."""
        key = frozenset(map(frozenset[int], family))
        if key not in self._rates:
            known = next((rate for published, rate in self._published.items() if key <= published), None)
            self._rates[key] = {
                group: self._estimate(group, len(key)) if known is None
                else Rate(known, PUBLISHED, f"devices {show(group)}") for group in key
            }  # fmt: skip
        return self._rates[key]

    def _estimate(self, group: frozenset[int], groups: int) -> Rate:
        width = self.widest_ring(group)
        if not width:
            width = self.widest_ring(group, through=range(self.cluster.devices_per_node))
            # Which links the detours take is not known: all groups are counted as if they took the same.
            return Rate(self.detour * width / groups, ESTIMATED, f"detours of {show(group)}")
        ring, cut = self.rate_of_link(width), self.cut * self.narrowest_cut(group)
        return Rate(ring if len(group) == 2 else max(ring, cut), ESTIMATED, f"links of {show(group)}")

    def card_shares(self, crossing: Sequence[Iterable[int]]) -> list[Rate]:
        """The rate between nodes of each of a node's groups that has members elsewhere, all of them running at once.

        A group uses the cards of all its devices here; a card is shared evenly by the groups that use it.
        """
        cluster, sizes = self.cluster, {len(list(group)) for group in crossing}
        cards = [{cluster.nic_of_device[device] for device in group} for group in crossing]
        users = Counter(itertools.chain(*cards))
        natural = len(sizes) == 1 and len(crossing) * min(sizes) == cluster.devices_per_node
        basis = PUBLISHED if natural and (len(crossing), 0) in cluster.collective_gb_per_s else ESTIMATED
        shares = (sum(cluster.nic_gb_per_s / users[card] for card in used) for used in cards)
        return [Rate(self.card * share, basis, f"network cards of {len(crossing)} groups") for share in shares]


def show(devices: Iterable[int]) -> str:
    return ",".join(map(str, sorted(devices)))
