"""What messages take: collectives and messages between neighbours, by size and by where the ranks are.

Groups are those of a layout: ranks a stride apart, all groups of a kind at once, as in a run. Where ranks share cores,
their copies and sums do too: seconds are given as if each had a core of its own, which is what the clock of a step
expects (`shared_cores` in planner/cluster.py).
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.parallel import collectives
from megatron.parallel.topology import Group
from megatron.planner.calibration.tasks import Make, Task, Work

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
    for ranks in (p for p in powers if 2 <= p <= world):
        for stride in (p for p in powers if p * ranks <= world):
            span = stride * ranks
            if world % span or (span > per_node and stride not in (1, per_node)):
                continue
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


def message_tasks(groups: dict[Kind, Group], device: torch.device, share: float) -> Iterator[Task]:
    """All collectives and messages of this rank.

    share  processes for each core, at least 1: by this seconds are divided

    On a CPU each follows a product, as in a step: the cores are busy when it begins, ranks do not come at the same
    moment, and what it sends is in no cache. Measured alone, messages took a third of the time.
    """
    sizes = SIZES[device.type]
    before = _product if device.type == "cpu" else None
    for kind, group in groups.items():
        for name in ("all_reduce", "all_gather", "reduce_scatter", "reduce"):
            for size in sizes:
                place = (kind.stride, kind.ranks, kind.nodes, size)
                make, calls = _collective(name, group, size, device), kind.ranks if name == "reduce" else 1
                yield Task(
                    f"collectives.{name}", place, _after(before, make), calls=calls, share=share, together=True,
                    before=before,
                )  # fmt: skip
    pairs = sorted((k for k in groups if k.ranks == 2), key=lambda k: k.stride)
    within, across = [k for k in pairs if k.nodes == 1], [k for k in pairs if k.nodes > 1]
    for number, found in ((1, within[:1]), (2, across[-1:])):
        for kind in found:
            for size in sizes:
                make = _after(before, _message(groups[kind], size, device))
                yield Task("messages", (number, size), make, calls=2, share=share, together=True, before=before)


def _product() -> Work:
    """Some milliseconds of a CPU's core."""
    a, b, out = torch.ones(3, _SIDE, _SIDE).unbind()
    return lambda: torch.mm(a, b, out=out)


def _after(first: Make | None, second: Make) -> Make:
    if first is None:
        return second

    def make() -> Work:
        one, other = first(), second()

        def run() -> None:
            one()
            other()

        return run

    return make


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
        calls: list[Callable[..., Any]] = [dist.send, dist.recv]
        first, second = calls if group.is_first else calls[::-1]

        def run() -> None:
            x = next(tensors)
            first(x, peer, group=group.handle)
            second(x, peer, group=group.handle)

        return run

    return make
