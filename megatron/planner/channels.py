"""Time of messages and collectives on the links and network cards that they cross.

The time of a collective is its start, plus the latency of its steps, plus its bytes divided by the
bandwidth of the slowest group of its kind while all such groups run. Steps are counted as NCCL and
RCCL do when they choose an algorithm (src/graph/tuning.cc of both):

    ring  (ranks - 1) steps, of which (nodes - 1) between nodes; twice that for an all-reduce
    tree  2 (ranks of a node - 1) steps within nodes and 2 log2(nodes) between them, for an
          all-reduce

The faster algorithm counts. In an all-to-all every rank sends a part to each other rank, directly.
Its bytes are counted on the links between the devices of a node, of which equally short ways carry
equal parts, and on the cards of a node for ranks on other nodes. The most loaded one decides. Its
messages begin eight at a time, as in NCCL (NCCL_MAX_DEV_WORK_P2P_PER_BATCH), each with the latency
of a step. In a ring message every rank sends to the next member and receives from the one before:
one step of a ring. A message between stages occupies its link in proportion to its bytes,
on the busiest link or card while all boundaries send in the same direction, and arrives one latency
later. If a machine's file has measured seconds (`compute.collectives`, `compute.messages`), these
are interpolated linearly between sizes instead.

Bandwidths are GB/s (1e9 bytes) that one rank sends while all others of its kind send too, as in
AxoNN's published table. A rate is *published* if that table has exactly these groups on these
devices. Otherwise it is *estimated*: the link table times an efficiency, the ratio of published
rates to link widths. The efficiencies for Frontier are:

    link     pairs on links of 200 GB/s reach 129, on links of 50 GB/s 50. A link of 100 GB/s is
             interpolated linearly to 76.3; a saturating curve would give more
    cut      52/100 = 0.52 of the links across the narrowest cut of a group: {0, 1, 2, 3} has 52
             over two links of 50
    detour   36/50 = 0.72 of the narrowest link on a path through other devices: pairs 4 apart reach
             36
    card     40/100 = 0.40 of a node's network cards: groups over several nodes have 40, 20, 10, 5
             for 1, 2, 4, 8 a node

A collective of a group on direct links is estimated in two ways, and the larger result counts. One
ring can run around a spanning tree, there and back, because links are full duplex; it is as fast as
the narrowest link of the widest spanning tree. Several rings together carry no more than the
narrowest cut: the split of the group into two parts with the least bandwidth in between. On
published groups that were not used to fit the efficiencies, the rules give 130 against 135 (the
whole node) and 52 against 72 (every other device): at worst a quarter too low.

The rate of {0, 1, 6, 7} is not known. Its ring is 100 GB/s wide, where that of {0, 1, 2, 3} is 50.
The estimate is therefore 76 GB/s, against the published 52 for {0, 1, 2, 3} and 72 for
{0, 2, 4, 6}; the narrowest cut of all three is 100 GB/s. If RCCL gets no more out of that cut than
in {0, 1, 2, 3}, the rate is 52. Switches between nodes are not modelled.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron.config import Config
from megatron.model.formulas import ring_bytes
from megatron.parallel.layout import Layout, Line
from megatron.planner.cluster import Cluster
from megatron.planner.compute import ASSUMED, MEASURED, PUBLISHED, Figure, Used

ESTIMATED = "estimated"

# Efficiencies published for Frontier, for machines without a published table.
_LINK = 129 / 200
_CUT = 52 / 100
_DETOUR = 36 / 50
_CARD = 40 / 100

Step = tuple[int, int]
"""A link in one direction, from one device to another; or a card, as (_OUT or _IN, card)."""
_OUT, _IN = -1, -2
_AT_ONCE = 8  # messages of an all-to-all
_NOWHERE, _AWAY = -1, -2
"""Ends of a message other than a position on the same node: no message, or another node."""


class Rate(NamedTuple):
    """GB/s of one rank, whether published or estimated, and what limits it."""

    gb_per_s: float
    basis: str
    limit: str


class Group(NamedTuple):
    """Group of ranks that run collectives: its size, nodes spanned, and stride between members.

    words     how reports name it
    rate      of the slowest such group while all of them run; None for a group of one
    exchange  the same for an all-to-all: GB/s that a rank sends to all others together
    """

    ranks: int
    nodes: int
    stride: int
    words: str
    rate: Rate | None = None
    exchange: Rate | None = None


@dataclass(frozen=True)
class Placement:
    """A layout on the nodes of a machine: position i of every node is device device_order[i]."""

    cluster: Cluster
    layout: Layout
    device_order: tuple[int, ...]

    def place(self, rank: int) -> tuple[int, int]:
        """Return the node and the device of a rank."""
        node, position = divmod(rank, len(self.device_order))
        return node, self.device_order[position]


class Channels:
    """Seconds of messages on a placement, by their bytes.

    lanes       the groups of each line of ranks, by name (Layout.lines, lines_of), and of the
                stages of a tied embedding, "ends"
    boundaries  for each pipeline rank's boundary to the next: whether both ends are on one node ->
                seconds per byte on the link, in the slowest such replica
    """

    def __init__(self, config: Config, cluster: Cluster, placement: Placement) -> None:
        self.placement = placement
        self._cluster = cluster
        self._reduces = cluster.device_type == "cpu"
        self.lanes, self.boundaries, self._message_rate = _lanes(
            cluster,
            placement.layout,
            placement.device_order,
            config.parallel.num_chunks > 1,
            config.parallel.head_ranks,
        )
        self._used: dict[str, Used] = {}
        self._seconds: dict[tuple[str, str, float], float] = {}

    def seconds(self, kind: str, n_bytes: float, group: str = "tensor") -> float:
        """Time a collective (events.Message) of all groups of one direction.

        `kind` "reduce" goes to one member, along a chain of all. The engine sums gradients in this
        way on a CPU, for one owner after another.
        """
        if kind == "reduce_scatter" and self._reduces and group not in OF_PASSES:
            ranks = self.lanes[group].ranks
            return ranks * self.seconds("reduce", n_bytes / ranks, group)
        key = group, kind, n_bytes
        if key not in self._seconds:
            self._seconds[key] = self._timed(kind, n_bytes, self.lanes[group])
        return self._seconds[key]

    def tensor_s(self, kind: str, n_bytes: float) -> float:
        """Time a collective of a tensor-parallel group over a tensor of n_bytes in all."""
        return self.seconds(kind, n_bytes)

    def data_s(self, kind: str, n_bytes: float) -> float:
        """Time a collective of a data-parallel group, as tensor_s does."""
        return self.seconds(kind, n_bytes, "data")

    def tied_s(self, n_bytes: float) -> float:
        """Time the all-reduce of a tied embedding's gradients, n_bytes on first and last stage."""
        return self.seconds("all_reduce", n_bytes, "ends")

    def _timed(self, kind: str, n_bytes: float, group: Group) -> float:
        if group.ranks == 1:
            return 0.0
        measured = self._cluster.figures.get(f"collectives.{kind}")
        if measured is not None and (points := _measured(measured, group)):
            self._take(measured)
            return _interpolate(points, n_bytes)
        rate = group.exchange if kind == "all_to_all" else group.rate
        assert rate is not None, "a group of several ranks has a rate"
        self._note(f"{group.words} {'all-to-all ' * (kind == 'all_to_all')}bandwidth", rate)
        start = self._latency("collective_start_s")
        within = self._latency("hop_within_s")
        between = self._latency("hop_between_s") if group.nodes > 1 else 0.0
        if kind == "ring":
            return start + (between or within) + n_bytes / (rate.gb_per_s * 1e9)
        of_node = math.ceil(group.ranks / group.nodes)
        if kind == "all_to_all":
            near, far = of_node - 1, group.ranks - of_node
            latency = math.ceil(near / _AT_ONCE) * within + math.ceil(far / _AT_ONCE) * between
            return start + latency + ring_bytes(n_bytes, group.ranks, kind) / (rate.gb_per_s * 1e9)
        times = 2 if kind == "all_reduce" else 1
        crossing = group.nodes - 1
        latency = times * ((group.ranks - 1 - crossing) * within + crossing * between)
        if kind == "all_reduce":
            latency = min(
                latency, 2 * ((of_node - 1) * within + math.ceil(math.log2(group.nodes)) * between)
            )
        sent = n_bytes if kind == "reduce" else ring_bytes(n_bytes, group.ranks, kind)
        return start + latency + sent / (rate.gb_per_s * 1e9)

    def boundary(self, sender: int, forward: bool, n_bytes: float) -> tuple[float, float]:
        """Return the seconds that a message occupies its link, and its latency after that.

        Both are those of the slowest replica. The message goes from pipeline rank `sender` to the
        next one (forward) or the one before. With interleaved chunks, the first and the last rank
        are neighbours.
        """
        edge = sender if forward else (sender - 1) % self.placement.layout.pipeline
        worst = max(self._message(*ends, n_bytes) for ends in self.boundaries[edge].items())
        return worst[1], worst[0] - worst[1]

    def _message(self, within: bool, per_byte: float, n_bytes: float) -> tuple[float, float]:
        """Return the seconds from sending to arrival, and how many of them occupy the link."""
        measured = self._cluster.figures.get("messages")
        if measured is not None and (
            points := sorted(p[1:] for p in measured.points if (p[0] == 1) == within)
        ):
            self._take(measured)
            total = _interpolate(points, n_bytes)
            return total, total - min(total, points[0][1])
        self._note("stage to stage bandwidth", self._message_rate)
        occupies = n_bytes * per_byte
        latency = self._latency("message_within_s" if within else "message_between_s")
        return occupies + latency, occupies

    def _latency(self, name: str) -> float:
        return self._take(self._cluster.figures[name]).value

    def _take(self, figure: Figure) -> Figure:
        self._used.setdefault(figure.name, figure.used)
        return figure

    def _note(self, name: str, rate: Rate) -> None:
        if name not in self._used:
            sources = self._cluster.sources
            text = sources.get("collectives") or sources.get("links", "")
            basis = next(
                (basis for basis in (MEASURED, ASSUMED) if text.startswith(basis)), PUBLISHED
            )
            if rate.basis == ESTIMATED:
                basis = ASSUMED
                text = (
                    "estimated from the widths of links and cards by published ratios (channels.py)"
                )
            self._used[name] = Used(name, f"{rate.gb_per_s:.4g} GB/s, {rate.limit}", basis, text)

    @property
    def used(self) -> set[Used]:
        """Figures that the results so far are based on."""
        return set(self._used.values())


def _measured(figure: Figure, group: Group) -> list[tuple[float, ...]]:
    """List the measured bytes and seconds of groups like this one.

    Such a group has as many ranks and, like this one, is on one node or on several. If several were
    measured, the one with the nearest number of nodes counts, then the nearest stride.
    """
    like = [p for p in figure.points if p[1] == group.ranks and (p[2] > 1) == (group.nodes > 1)]

    def distance(point: Sequence[float]) -> tuple[float, float]:
        return abs(point[2] - group.nodes), abs(math.log(point[0] / group.stride))

    nearest = min(map(distance, like), default=None)
    return sorted(p[3:] for p in like if distance(p) == nearest)


def _interpolate(points: Sequence[tuple[float, ...]], x: float) -> float:
    """Interpolate linearly; constant before the first point, last slope after the last point.

    A negative last slope is noise: beyond it, as beyond a single point, values are proportional to
    the last point.
    """
    last, end = points[-1]
    if x <= last:
        return float(np.interp(x, [size for size, _ in points], [seconds for _, seconds in points]))
    before, start = points[-2] if len(points) > 1 and end > points[-2][1] else (0.0, 0.0)
    return end + (end - start) * (x - last) / (last - before)


# -- bandwidth of links and cards ------------------------------------------------------------------


@functools.cache
def ways(cluster: Cluster, a: int, b: int) -> tuple[tuple[Step, ...], ...]:
    """List the shortest paths from device a to b that have the widest bottleneck link.

    If there are several, it is not known which one the hardware takes.
    """
    paths: list[tuple[int, ...]] = [(a,)]
    while not (found := [tuple(itertools.pairwise(path)) for path in paths if path[-1] == b]):
        paths = [
            (*path, device)
            for path in paths
            for device in range(cluster.devices_per_node)
            if device not in path and cluster.link_gb_per_s(path[-1], device)
        ]
    widest = max(_width(cluster, way) for way in found)
    return tuple(way for way in found if _width(cluster, way) == widest)


def _width(cluster: Cluster, way: tuple[Step, ...]) -> float:
    return min(itertools.starmap(cluster.link_gb_per_s, way), default=float("inf"))


class NodeLinks:
    """Bandwidth of a node's links and cards.

    card, detour, cut: efficiencies, as explained in the module's docstring
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        count = cluster.devices_per_node
        self._rates: dict[frozenset[frozenset[int]], Mapping[frozenset[int], Rate]] = {}
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
                detours.append(
                    rate / min(_width(cluster, ways(cluster, *sorted(pair))[0]) for pair in family)
                )
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

    def widest_ring(self, group: Iterable[int], through: Iterable[int] = ()) -> float:
        """Return the GB/s of one ring, there and back on a spanning tree; 0 if not connected."""
        group = frozenset(group)
        through = frozenset(through)
        widths = sorted(set(self.cluster.links.values()), reverse=True)
        return next((width for width in widths if self.cluster.reached(group, width, through)), 0.0)

    def narrowest_cut(self, group: Iterable[int]) -> float:
        """Return the GB/s across the split of the group into two parts that has the least."""
        first, *others = sorted(group)
        return min(
            sum(
                self.cluster.link_gb_per_s(a, b)
                for a in (first, *chosen)
                for b in others
                if b not in chosen
            )
            for count in range(len(others))
            for chosen in itertools.combinations(others, count)
        )

    def collective(self, family: Iterable[Iterable[int]]) -> Mapping[frozenset[int], Rate]:
        """Return the rate of each group of a node while all of them run collectives.

        Groups are disjoint and have two members or more.
        """
        key = frozenset(map(frozenset[int], family))
        if key not in self._rates:
            known = next(
                (rate for published, rate in self._published.items() if key <= published), None
            )
            self._rates[key] = {group: self._rate(group, len(key), known) for group in key}
        return self._rates[key]

    def _rate(self, group: frozenset[int], groups: int, published: float | None) -> Rate:
        shown = ",".join(map(str, sorted(group)))
        if published is not None:
            return Rate(published, PUBLISHED, f"devices {shown}")
        width = self.widest_ring(group)
        if not width:
            width = self.widest_ring(group, through=range(self.cluster.devices_per_node))
            # It is not known which links the detours take: assume that all groups share the same.
            return Rate(self.detour * width / groups, ESTIMATED, f"detours of {shown}")
        ring = self.rate_of_link(width)
        cut = self.cut * self.narrowest_cut(group)
        return Rate(ring if len(group) == 2 else max(ring, cut), ESTIMATED, f"links of {shown}")

    def card_shares(self, crossing: Sequence[Sequence[int]]) -> list[Rate]:
        """Return the inter-node rate of each group of a node that spans nodes, all running at once.

        A group uses the cards of all its devices here; groups that use the same card share it
        evenly.
        """
        cluster = self.cluster
        sizes = set(map(len, crossing))
        cards = [{cluster.nic_of_device[device] for device in group} for group in crossing]
        users = Counter(itertools.chain(*cards))
        natural = len(sizes) == 1 and len(crossing) * min(sizes) == cluster.devices_per_node
        basis = (
            PUBLISHED
            if natural and (len(crossing), 0) in cluster.collective_gb_per_s
            else ESTIMATED
        )
        shares = (sum(cluster.nic_gb_per_s / users[card] for card in used) for used in cards)
        return [
            Rate(self.card * share, basis, f"network cards of {len(crossing)} groups")
            for share in shares
        ]

    def exchange(self, groups: Iterable[Sequence[int]], size: int) -> Rate:
        """Return the rate of all-to-alls of these groups of a node, all running at once.

        size  members of each group, of which `groups` has those on this node
        """
        loads = Counter[Step]()  # of one byte from each rank to all others
        for group in groups:
            for a, b in itertools.permutations(group, 2):
                found = ways(self.cluster, a, b)
                part = (1 / self.detour if len(found[0]) > 1 else 1.0) / len(found)
                for way in found:
                    loads.update(dict.fromkeys(way, part))
            for device in group if len(group) < size else ():
                for ends in ((device, None), (None, device)):
                    loads.update(dict.fromkeys(_path(self, *ends)[0], size - len(group)))
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


# -- groups and messages on nodes ------------------------------------------------------------------


EXCHANGES = "heads", "expert", "expert_between", "expert_within"
"""Groups that run all-to-alls."""
OF_PASSES = "tensor", "context", *EXCHANGES
"""Groups whose messages belong to the passes of layers."""


def lines_of(layout: Layout, heads: int) -> dict[str, Line]:
    """Return the lines of ranks that run collectives.

    heads  neighbouring context-parallel ranks that exchange heads; the others of their line make
           rings
    """
    others = "world", "pipeline", "data.states", "expert_data.states"
    lines = {name: line for name, line in layout.lines.items() if name not in others}
    _, stride, size = lines["context"]
    lines["context"] = Line("context-parallel ring", stride * heads, size // heads)
    lines["heads"] = Line("context-parallel heads", stride, heads)
    return lines


@functools.lru_cache(maxsize=8192)
def _lanes(
    cluster: Cluster, layout: Layout, order: tuple[int, ...], wraps: bool, heads: int
) -> tuple[dict[str, Group], list[dict[bool, float]], Rate]:
    """Return the groups of Channels.lanes, the boundaries and their slowest rate."""
    devices = len(order)
    links = node_links(cluster)
    lanes = {
        name: _group(links, layout.world_size, order, line, name in EXCHANGES)
        for name, line in lines_of(layout, heads).items()
    }
    size, stride = layout.pipeline, layout.strides[2]
    tied = "tied embedding"
    if size == 1:
        return lanes | {"ends": Group(1, 1, 1, tied)}, [], Rate(1.0, ESTIMATED, "")
    if devices % (stride * size) == 0:  # all stages of a pipeline are on one node
        firsts = (position for position in range(devices) if position // stride % size == 0)
        pairs = links.collective(
            (order[first], order[first + stride * (size - 1)]) for first in firsts
        )
        ends = Group(2, 1, stride * (size - 1), tied, min(pairs.values()))
    else:
        slowest_card = min(links.card_shares([(device,) for device in order]))
        ends = Group(2, 2, stride * (size - 1), tied, slowest_card)
    boundaries = _boundaries(links, layout, order, wraps)
    slowest = max(seconds for by_place in boundaries for seconds in by_place.values())
    return lanes | {"ends": ends}, boundaries, Rate(1e-9 / slowest, ESTIMATED, "slowest boundary")


def _group(
    links: NodeLinks, world: int, order: tuple[int, ...], line: Line, exchange: bool
) -> Group:
    """Describe the groups of a line by the slowest one; exchange: also its all-to-alls."""
    words, stride, size = line
    if size == 1:
        return Group(1, 1, stride, words)
    rates, exchanges, devices = list[Rate](), list[Rate](), len(order)
    for groups in groups_on_nodes(world, devices, stride, size):
        of_devices = [[order[position] for position in group] for group in groups]
        exchanges += [links.exchange(of_devices, size)] * exchange
        rates += links.card_shares([group for group in of_devices if len(group) < size])
        rates += links.collective([group for group in of_devices if len(group) > 1]).values()
    nodes = size if stride >= devices else (size - 1) * stride // devices + 1
    return Group(size, nodes, stride, words, min(rates), min(exchanges, default=None))


@functools.lru_cache(maxsize=1024)
def groups_on_nodes(
    world: int, devices: int, stride: int, size: int
) -> set[frozenset[tuple[int, ...]]]:
    """Find all distinct arrangements of groups on a node, as the positions of their members.

    stride  ranks from one member of a group to the next; rank r is at position r % devices of node
            r // devices
    """
    ranks = np.arange(min(world, math.lcm(stride * size, devices))).reshape(-1, devices)
    group = ranks // (stride * size) * stride + ranks % stride
    # the first position of the same group
    first = (group[:, :, None] == group[:, None, :]).argmax(axis=2)
    return {
        frozenset(tuple(place for place, of in enumerate(node) if of == head) for head in node)
        for node in set(map(tuple, first.tolist()))
    }


@functools.lru_cache(maxsize=1024)
def _messages_on_nodes(layout: Layout, devices: int, wraps: bool) -> tuple[set[Any], set[Any]]:
    """Find the distinct kinds of nodes and of messages to the next stage, over all ranks.

    nodes     for each kind of node and each position: the destination of its message and the source
              of the one it receives, each a position of the node, _AWAY or _NOWHERE
    messages  (sending pipeline rank, its position, receiving position or _AWAY)
    wraps     the last rank of a pipeline also sends to the first one
    """
    stride = layout.strides[2]
    size = layout.pipeline
    ranks = np.arange(layout.world_size)
    stage = ranks // stride % size
    node = ranks // devices

    def places(step: int, end: int) -> Any:
        """Locate the neighbours one `step` further; the `end` of the pipeline wraps around."""
        found = ranks + np.where(stage == end, -step * (size - 1), step)
        place = np.where(found // devices == node, found % devices, _AWAY)
        return np.where((stage == end) & (not wraps), _NOWHERE, place)

    targets = places(stride, size - 1)
    sources = places(-stride, 0)
    nodes = np.hstack([targets.reshape(-1, devices), sources.reshape(-1, devices)])
    messages = np.stack(
        [stage, np.where(targets == _AWAY, _AWAY, ranks % devices), targets], axis=1
    )
    return set(map(tuple, nodes.tolist())), set(map(tuple, messages[targets != _NOWHERE].tolist()))


def _boundaries(
    links: NodeLinks, layout: Layout, order: tuple[int, ...], wraps: bool
) -> list[dict[bool, float]]:
    """Find each boundary's most seconds per byte on a link or card, within and between nodes.

    All boundaries send forward at the same time.
    """
    nodes, messages = _messages_on_nodes(layout, len(order), wraps)
    most: dict[tuple[int, int], float] = {}  # positions that send and receive, or _AWAY both
    for node in nodes:
        targets = node[: len(order)]
        sources = node[len(order) :]
        ends = [(a, b) for a, b in enumerate(targets) if b != _NOWHERE]
        ends += [(_AWAY, b) for b, a in enumerate(sources) if a == _AWAY]
        paths = [
            _path(links, *(None if end == _AWAY else order[end] for end in pair)) for pair in ends
        ]
        users = Counter[Step]()
        weights = dict[Step, float]()
        for resources, weight in paths:
            users.update(resources)
            weights |= {resource: max(weight, weights.get(resource, 0.0)) for resource in resources}
        for pair, (resources, _) in zip(ends, paths, strict=True):
            seconds = max(users[r] * weights[r] / links.width_of(r) for r in resources) / 1e9
            pair = (_AWAY, _AWAY) if _AWAY in pair else pair
            most[pair] = max(seconds, most.get(pair, 0.0))
    found: list[dict[bool, float]] = [{} for _ in range(layout.pipeline - (not wraps))]
    for rank, a, b in messages:
        found[rank][b != _AWAY] = max(most[a, b], found[rank].get(b != _AWAY, 0.0))
    return found


@functools.cache
def _path(
    links: NodeLinks, source: int | None, target: int | None
) -> tuple[frozenset[Step], float]:
    """Return the links and cards that a message takes, and its slowdown against their bandwidth.

    A device of None is on another node. A message with several equal paths is counted on all of
    them.
    """
    cluster, cards = links.cluster, list[Step]()
    if source is None:
        assert target is not None, "a message has an end on the node"
        card = cluster.nic_of_device[target]
        cards = [(_IN, card)]
        source = cluster.nic_on_device[card]
    elif target is None:
        card = cluster.nic_of_device[source]
        cards = [(_OUT, card)]
        target = cluster.nic_on_device[card]
    found = ways(cluster, source, target)
    weight = 1 / links.detour if len(found[0]) > 1 and not cards else 1.0
    return frozenset(cards).union(*found), weight
