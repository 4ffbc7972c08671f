"""The first use of every group, before anything depends on it.

NCCL and RCCL connect a group at its first collective and two pipeline neighbours at their first message, where they may
hang without an error. So each rank reduces one number over every group that training reduces over, and exchanges one
with each neighbour. The world comes last: no rank goes on before all groups work.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from megatron.errors import LaunchError
from megatron.parallel.collectives import all_reduce
from megatron.parallel.rendezvous import Rendezvous
from megatron.parallel.topology import Group, Topology, compress_ranks

_SHOWN = 200  # characters of a list of ranks
Use = tuple[int, str, int, Callable[[], float], float]


def check_groups(topology: Topology, rendezvous: Rendezvous, seconds: float, ring: bool = False) -> int:
    """Use each group of this rank once, all within so many seconds; how many collectives and exchanges these were.

    All ranks call it. `ring`: the last pipeline rank has messages for the first, too. Raises LaunchError on every rank
    where a group fails on any; Rendezvous.explain then names that group and its ranks on all.
    """
    uses = list(_uses(topology, ring))
    if not uses:
        return 0

    def use_all() -> None:
        if topology.device.type == "cuda":
            torch.cuda.set_device(topology.device)  # each thread has a current device of its own
        for number, name, size, use, wanted in uses:
            rendezvous.doing = (number, name)
            sys.audit("megatron.parallel.group", name)
            rendezvous.gather(name, size)
            found = use()
            if found != wanted:
                raise LaunchError(f"it gave {found:g} instead of {wanted:g}")

    try:
        rendezvous.unless_failed(use_all, seconds, "it did not end")
    except (RuntimeError, LaunchError) as error:
        raise LaunchError(f"{rendezvous.doing[1]}: {error}") from error
    rendezvous.doing = (0, "")
    return len(uses)


def _uses(topology: Topology, ring: bool) -> Iterator[Use]:
    """(number, name, count of ranks, function, its result). Numbers are alike on all ranks, so that groups do not wait
    in a circle."""
    world, done = topology.world, {None, topology.world.handle}
    for number, group in enumerate((topology.tensor, topology.data, topology.model, topology.embedding), start=1):
        if group is not None and group.handle not in done:
            done.add(group.handle)
            yield number, _name("all-reduce of", group), group.size, partial(_reduce, topology, group), group.size
    stage, size = topology.pipeline.rank, topology.pipeline.size
    pairs = [(5 + low % 2, low, low + 1) for low in range(size - 1)]
    pairs += [(7, size - 1, 0)] if ring and size > 2 else []
    for number, *pair in sorted(pairs):
        if stage in pair:
            peer = topology.pipeline.ranks[pair[stage == pair[0]]]
            name = _name(f"messages of ranks {topology.pipeline.ranks[pair[0]]} and "
                         f"{topology.pipeline.ranks[pair[1]]} in", topology.pipeline)  # fmt: skip
            yield number, name, 2, partial(_exchange, topology, peer, stage == pair[0]), peer
    if world.handle is not None:
        yield 8, _name("all-reduce of", world), world.size, partial(_reduce, topology, world), world.size


def _name(call: str, group: Group) -> str:
    ranks = compress_ranks(group.ranks)
    shown = f"{ranks[:_SHOWN]}..." if len(ranks) > _SHOWN else ranks
    return f"the first {call} the {group.kind} group of ranks {shown}"


def _reduce(topology: Topology, group: Group) -> float:
    """The number of ranks of the group, counted by itself."""
    return all_reduce(torch.ones(1, device=topology.device), group).item()


def _exchange(topology: Topology, peer: int, first: bool) -> float:
    """The number that a neighbour sends, which is its rank; `first`: whether this one speaks first."""
    own = torch.full((1,), float(topology.rank), device=topology.device)
    other, group, flight = torch.empty_like(own), topology.pipeline, topology.flight
    for sends in (first, not first):
        flight.enter_message(b"send" if sends else b"receive", group.kind, own.nbytes, peer)
        if sends:
            dist.send(own, peer, group=group.handle)
        else:
            dist.recv(other, peer, group=group.handle)
        flight.leave()
    return other.item()
