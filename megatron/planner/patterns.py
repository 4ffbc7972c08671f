"""Who communicates with whom on a node, for any layout, without looking at all ranks.

Rank r is at position r % devices of node r // devices. How the groups of a direction lie on a node depends only on
where the node begins within the direction's period, so that a few nodes at the ends of groups show all cases.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.parallel.topology import Layout

DIRECTIONS = ("tp", "dp", "pp")

_ALL_NODES = 64  # so few are looked at one by one


class Groups(NamedTuple):
    """The groups of one direction on a node: positions of members that are alone in it, and with members elsewhere."""

    within: frozenset[tuple[int, ...]]
    crossing: frozenset[tuple[int, ...]]


class Edge(NamedTuple):
    """A message to the next stage between two positions of a node; None: the other end is on another node.

    wraps  from the last rank of a pipeline back to its first, between chunks
    """

    source: int | None
    target: int | None
    wraps: bool


def stride_and_size(layout: Layout, direction: str) -> tuple[int, int]:
    """Distance in ranks of neighbours in a direction, and how many ranks a group has."""
    sizes = (layout.tensor, layout.data, layout.pipeline)
    place = DIRECTIONS.index(direction)
    return layout.strides[place], sizes[place]


def groups_on_nodes(layout: Layout, devices: int, direction: str) -> frozenset[Groups]:
    """All different ways in which the groups of a direction lie on a node of so many devices."""
    stride, size = stride_and_size(layout, direction)
    if size == 1:
        return frozenset()
    nodes = _nodes(layout, devices, direction)
    return frozenset(_groups(node, layout.world_size, devices, stride, size) for node in nodes)


def edges_on_nodes(layout: Layout, devices: int, wraps: bool) -> frozenset[frozenset[Edge]]:
    """All different sets of messages to next stages that begin or end on a node."""
    stride, size = stride_and_size(layout, "pp")
    if size == 1:
        return frozenset()
    nodes = _nodes(layout, devices, "pp")
    return frozenset(frozenset(_edges(node, layout.world_size, devices, stride, size, wraps)) for node in nodes)


def _nodes(layout: Layout, devices: int, direction: str) -> Iterator[int]:
    """Nodes that show every case: all of them, or those where groups begin and end, in every alignment to nodes."""
    stride, size = stride_and_size(layout, direction)
    nodes = -(-layout.world_size // devices)
    if nodes <= _ALL_NODES:
        yield from range(nodes)
        return
    blocks = sorted({*range(min(size, devices + 1)), *range(max(0, size - devices - 1), size)})
    found = {
        (period * stride * size + block * stride) // devices + shift
        for period in range(devices)
        for block in blocks
        for shift in (-1, 0, 1)
    }
    yield from (node for node in found if 0 <= node < nodes)


def _positions(node: int, world: int, devices: int) -> range:
    return range(node * devices, min((node + 1) * devices, world))


def _groups(node: int, world: int, devices: int, stride: int, size: int) -> Groups:
    members: dict[int, list[int]] = {}
    for rank in _positions(node, world, devices):
        first = rank // (stride * size) * stride * size + rank % stride
        members.setdefault(first, []).append(rank % devices)
    whole = [tuple(m) for m in members.values() if len(m) == size]
    return Groups(frozenset(whole), frozenset(tuple(m) for m in members.values() if len(m) < size))


def _edges(node: int, world: int, devices: int, stride: int, size: int, wraps: bool) -> Iterator[Edge]:
    around = stride * (size - 1)
    for rank in _positions(node, world, devices):
        stage, here = rank // stride % size, rank % devices
        for forward in (True, False):
            last = stage == (size - 1 if forward else 0)
            if last and not wraps:
                continue
            step = -around if last else stride
            other = rank + step if forward else rank - step
            there = other % devices if other // devices == node else None
            if forward:
                yield Edge(here, there, last)
            elif there is None:
                yield Edge(None, here, last)
