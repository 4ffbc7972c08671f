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

from megatron.planner.cluster import Cluster

Step = tuple[int, int]
"""A link in one direction: from this device to that one."""

Devices = tuple[int, ...]

# Of published rates on Frontier, for machines of which none were published.
_LINK, _CUT, _DETOUR, _CARD = 129 / 200, 52 / 100, 36 / 50, 40 / 100

PUBLISHED, ESTIMATED = "published", "estimated"


class Rate(NamedTuple):
    """GB/s of one rank, whether that was published or estimated, and what limits it."""

    gb_per_s: float
    basis: str
    limit: str


@functools.cache
def node_links(cluster: Cluster) -> NodeLinks:
    """The links of a node of this machine."""
    return NodeLinks(cluster)


class NodeLinks:
    """What a node's links carry. Efficiencies as in the module's text: cut, detour, card."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._ways: dict[Step, tuple[tuple[Step, ...], ...]] = {}
        self._rates: dict[frozenset[frozenset[int]], Mapping[frozenset[int], Rate]] = {}
        self._published = {
            self._natural(inner, size): rate for (inner, size), rate in cluster.collective_gb_per_s.items() if size > 1
        }
        self._by_width = self._pairs_by_width()
        self.detour = self._detour_efficiency()
        self.cut = self._cut_efficiency()
        across = [inner * rate for (inner, size), rate in cluster.collective_gb_per_s.items() if size == 0]
        self.card = min(across, default=0.0) / (len(cluster.nics) * cluster.nic_gb_per_s) or _CARD

    # -- efficiencies --------------------------------------------------------------------------------------------------

    def _natural(self, inner: int, size: int) -> frozenset[frozenset[int]]:
        """The groups of a row of the published table, whose devices are in the order of their numbers."""
        count = self.cluster.devices_per_node
        firsts = [first for first in range(count) if first // inner % size == 0]
        groups = (frozenset(first + k * inner for k in range(size)) for first in firsts)
        return frozenset(group for group in groups if max(group) < count)

    def _pairs_by_width(self) -> dict[float, float]:
        """Width of a link -> published rate of pairs that all have such a link."""
        found = {}
        for family, rate in self._published.items():
            widths = {self.cluster.link_gb_per_s(min(g), max(g)) for g in family if len(g) == 2}
            if len(widths) == 1 and 0.0 not in widths:
                found[widths.pop()] = rate
        return found

    def _detour_efficiency(self) -> float:
        found = []
        for family, rate in self._published.items():
            pairs = [(min(g), max(g)) for g in family if len(g) == 2]
            if any(not self.cluster.link_gb_per_s(a, b) for a, b in pairs):  # the slowest are those without a link
                found.append(rate / min(self.width(step) for a, b in pairs for step in self.ways(a, b)[0]))
        return min(found, default=_DETOUR)

    def _cut_efficiency(self) -> float:
        """The lowest of all published groups of three and more on direct links."""
        ratios = [
            rate / min(self.narrowest_cut(g)[0] for g in family)
            for family, rate in self._published.items()
            if all(len(g) > 2 and self.spans(g) for g in family)
        ]
        return min(ratios, default=_CUT)

    # -- ways and widths -----------------------------------------------------------------------------------------------

    def width(self, step: Step) -> float:
        return self.cluster.link_gb_per_s(*step)

    def ways(self, a: int, b: int) -> tuple[tuple[Step, ...], ...]:
        """All ways from a to b of as few links as possible and, among those, as wide as possible.

        Which of several the hardware takes is not known. Back it is the same ways.
        """
        if a > b:
            return tuple(tuple((y, x) for x, y in reversed(way)) for way in self.ways(b, a))
        if (a, b) not in self._ways:
            self._ways[a, b] = self._search(a, b)
        return self._ways[a, b]

    def _search(self, a: int, b: int) -> tuple[tuple[Step, ...], ...]:
        paths: list[tuple[int, ...]] = [(a,)]
        while all(path[-1] != b for path in paths):
            paths = [(*path, n) for path in paths for n in self._neighbours(path[-1]) if n not in path]
        ways = [tuple(itertools.pairwise(path)) for path in paths if path[-1] == b]
        widths = [min(map(self.width, way), default=float("inf")) for way in ways]
        return tuple(way for way, width in zip(ways, widths, strict=True) if width == max(widths))

    def _neighbours(self, device: int) -> list[int]:
        return [d for d in range(self.cluster.devices_per_node) if self.width((device, d))]

    def rate_of_link(self, width: float) -> float:
        """Of one message, or of a ring, over direct links of this width.

        Between two published widths it is on the straight line, beyond them it is the same part of the width.
        """
        points = self._by_width
        below = max((w for w in points if w <= width), default=None)
        above = min((w for w in points if w >= width), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            return width * (_LINK if nearest is None else points[nearest] / nearest)
        if below == above:
            return points[below]
        return points[below] + (points[above] - points[below]) * (width - below) / (above - below)

    def spans(self, group: Iterable[int], least: float = 0.0, through: Iterable[int] | None = None) -> bool:
        """Whether the group hangs together by links among itself (and `through`) that are at least so wide."""
        group = set(group)
        allowed = group if through is None else group | set(through)
        reached, waiting = set(), [min(group)]
        while waiting:
            device = waiting.pop()
            reached.add(device)
            waiting += [
                d for d in self._neighbours(device) if d in allowed - reached and self.width((device, d)) >= least
            ]
        return reached >= group

    def widest_ring(self, group: Iterable[int], through: Iterable[int] | None = None) -> float:
        """Of one ring over the group, there and back on a spanning tree where there is no cycle; 0: not connected."""
        group = set(group)
        widths = sorted(set(self.cluster.links.values()), reverse=True)
        return next((w for w in widths if self.spans(group, w, through)), 0.0)

    def narrowest_cut(self, group: Iterable[int]) -> tuple[float, tuple[Step, ...]]:
        """(GB/s, links) across the division of the group in two that has the least."""
        first, *others = sorted(group)
        best: tuple[float, tuple[Step, ...]] = (float("inf"), ())
        for count in range(len(others)):
            for chosen in itertools.combinations(others, count):
                side = {first, *chosen}
                rest = [d for d in others if d not in side]
                across = tuple((min(a, b), max(a, b)) for a in side for b in rest if self.width((a, b)))
                total = sum(map(self.width, across))
                if total < best[0]:
                    best = (total, across)
        return best

    # -- groups within a node ------------------------------------------------------------------------------------------

    def collective(self, family: Iterable[Iterable[int]]) -> Mapping[frozenset[int], Rate]:
        """The rate of each group of a node while all of them run collectives. Groups are disjoint, of two or more."""
        key = frozenset(frozenset(group) for group in family)
        if key not in self._rates:
            self._rates[key] = self._collective(key)
        return self._rates[key]

    def _collective(self, family: frozenset[frozenset[int]]) -> Mapping[frozenset[int], Rate]:
        for known, rate in self._published.items():
            if family <= known:
                return {group: Rate(rate, PUBLISHED, f"devices {show(group)}") for group in family}
        return {group: self._estimate(group, len(family)) for group in family}

    def _estimate(self, group: frozenset[int], groups: int) -> Rate:
        if not self.spans(group):
            every = range(self.cluster.devices_per_node)
            width = self.widest_ring(group, through=every)
            # Which links the detours take is not known: all groups are counted as if they took the same.
            return Rate(self.detour * width / groups, ESTIMATED, f"detours of {show(group)}")
        width = self.widest_ring(group)
        ring, (total, across) = self.rate_of_link(width), self.narrowest_cut(group)
        if len(group) == 2 or ring >= self.cut * total:
            slowest = [step for step in self.cluster.links if group.issuperset(step) and self.width(step) == width]
            return Rate(ring, ESTIMATED, f"link {_links(slowest)}")
        return Rate(self.cut * total, ESTIMATED, f"links {_links(across)}")

    # -- groups and messages between nodes -----------------------------------------------------------------------------

    def card_shares(self, crossing: Sequence[Iterable[int]]) -> list[Rate]:
        """The rate between nodes of each of a node's groups that has members elsewhere, all of them running at once.

        A group uses the cards of all its devices here; a card is shared evenly by the groups that use it.
        """
        cards = [{self.cluster.nic_of_device[d] for d in group} for group in crossing]
        users = Counter(card for used in cards for card in used)
        shares = [sum(self.cluster.nic_gb_per_s / users[card] for card in used) for used in cards]
        basis = PUBLISHED if self._was_published(crossing) else ESTIMATED
        return [
            Rate(self.card * share, basis, self._cards(used, max(users[card] for card in used)))
            for share, used in zip(shares, cards, strict=True)
        ]

    def _was_published(self, crossing: Sequence[Iterable[int]]) -> bool:
        sizes = {len(list(group)) for group in crossing}
        whole = len(sizes) == 1 and len(crossing) * min(sizes) == self.cluster.devices_per_node
        return whole and (len(crossing), 0) in self.cluster.collective_gb_per_s

    def _cards(self, used: Iterable[int], users: int) -> str:
        names = [self.cluster.nics[card] for card in sorted(used)]
        text = f"all {len(names)} cards" if 1 < len(names) == len(self.cluster.nics) else ",".join(names)
        return f"{text} shared by {users}" if users > 1 else text

    def to_card(self, device: int) -> tuple[tuple[Step, ...], ...]:
        """The ways of links between a device and its network card."""
        return self.ways(device, self.cluster.nic_on_device[self.cluster.nic_of_device[device]])


def show(devices: Iterable[int]) -> str:
    return ",".join(map(str, sorted(devices)))


def _links(steps: Iterable[Step]) -> str:
    return ", ".join(f"{a}-{b}" for a, b in sorted(steps))
