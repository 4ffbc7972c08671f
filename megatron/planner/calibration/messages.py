"""What messages take: collectives and messages between neighbours, by size and by where the ranks are.

Groups are those of a layout: ranks a stride apart, all groups of a kind at once, as in a run.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.parallel import collectives
from megatron.parallel.topology import Group
from megatron.planner.calibration.tasks import Make, Task, Work
from megatron.planner.compute import KINDS

SIZES = {
    "cpu": (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24),
    "cuda": (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28),
}
"""Bytes of the whole tensor."""
_SIDE = 512
_BYTES, _MOST = 1 << 26, 64  # of the tensors that are taken in turn, and how many


class Kind(NamedTuple):
    """Groups of `ranks` members, `stride` ranks apart, each on so many nodes."""

    stride: int
    ranks: int
    nodes: int


def kinds_of_groups(world: int, per_node: int) -> list[Kind]:
    """Within a node every size and stride that is a power of two and fits; across nodes rings of neighbouring ranks and
    of ranks that have the same place on each node."""
    found = []
    powers = [1 << i for i in range(world.bit_length())]
    for ranks, stride in itertools.product(powers[1:], powers):
        span = stride * ranks
        if span <= world and world % span == 0 and (span <= per_node or stride in (1, per_node)):
            nodes = 1 if span <= per_node else (ranks if stride >= per_node else -(-span // per_node))
            found.append(Kind(stride, ranks, nodes))
    return found


def members(kind: Kind, rank: int) -> list[int]:
    """The group of this kind that a rank is in."""
    span = kind.stride * kind.ranks
    first = rank // span * span + rank % kind.stride
    return list(range(first, first + span, kind.stride))


def open_groups(kinds: list[Kind], world: int, rank: int) -> dict[Kind, Group]:
    """This rank's group of each kind. A collective call of the world."""
    found = {}
    for kind in kinds:
        for group in sorted({tuple(members(kind, r)) for r in range(world)}):
            handle = dist.new_group(list(group))
            if rank in group:
                found[kind] = Group(group, group.index(rank), handle)
    return found


def message_tasks(groups: dict[Kind, Group], device: torch.device) -> Iterator[Task]:
    """All collectives and messages of this rank.

    On a CPU each follows a product, as in a step: the cores are busy when it begins, ranks do not come at the same
    moment, and what it sends is in no cache. Measured alone, messages took a third of the time.
    """
    before = _product if device.type == "cpu" else None
    pairs = sorted((k for k in groups if k.ranks == 2), key=lambda k: k.stride)
    # Between the nearest ranks of a node, and between the farthest that are on two.
    neighbours = [k for k in pairs if k.nodes == 1][:1] + [k for k in pairs if k.nodes > 1][-1:]
    sizes = SIZES[device.type]
    for (kind, group), name, size in itertools.product(groups.items(), KINDS, sizes):
        calls = kind.ranks if name == "reduce" else 1
        yield Task(f"collectives.{name}", (*kind, size), _collective(name, group, size, device), None, calls, before)
    for kind, size in itertools.product(neighbours, sizes):
        yield Task("messages", (kind.nodes, size), _message(groups[kind], size, device), None, 2, before)


def _product() -> Work:
    """Some milliseconds of a CPU's core."""
    a, b, out = torch.ones(3, _SIDE, _SIDE).unbind()
    return lambda: torch.mm(a, b, out=out)


def _in_turn(device: torch.device, size: int) -> Iterator[torch.Tensor]:
    """Tensors of so many bytes, of which a CPU's caches hold few."""
    many = max(1, min(_MOST, _BYTES // size)) if device.type == "cpu" else 1
    return itertools.cycle([torch.ones(max(1, size // 4), device=device) for _ in range(many)])


def _collective(name: str, group: Group, size: int, device: torch.device) -> Make:
    def make() -> Work:
        wholes = _in_turn(device, max(1, size // 4 // group.size) * group.size * 4)
        if name == "all_reduce":
            return lambda: collectives.all_reduce(next(wholes), group)
        if name == "all_gather":
            return lambda: collectives.gather_first(next(wholes).chunk(group.size)[0], group)
        if name == "reduce_scatter":
            return lambda: collectives.reduce_scatter_first(next(wholes), group)
        return lambda: _reduce_to_all(next(wholes), group)

    return make


def _reduce_to_all(x: torch.Tensor, group: Group) -> None:
    """A reduction to each member, all at once, as the engine sends its buckets on a CPU."""
    for work in [dist.reduce(x, dst=rank, group=group.handle, async_op=True) for rank in group.ranks]:
        work.wait()


def _message(group: Group, size: int, device: torch.device) -> Make:
    """To and fro."""

    def make() -> Work:
        tensors, peer = _in_turn(device, size), group.ranks[1 - group.rank]
        calls = (dist.send, dist.recv) if group.is_first else (dist.recv, dist.send)

        def run() -> None:
            x = next(tensors)
            for call in calls:
                call(x, peer, group=group.handle)

        return run

    return make
