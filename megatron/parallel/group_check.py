"""The first use of every group, before anything depends on it.

NCCL and RCCL connect a group at its first collective and two pipeline neighbours at their first
message, where they may hang without an error. So each rank reduces one number over every group that
training reduces over, and exchanges one with each neighbour. The world comes last: no rank
continues before all groups work.
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


def check_groups(
    topology: Topology, rendezvous: Rendezvous, seconds: float, ring: bool = False
) -> int:
    """Use each group of this rank once, all within `seconds`; return the number of collectives and
    exchanges.

    All ranks call it. `ring`: the last pipeline rank has messages for the first, too. Raises
    LaunchError on every rank where a group fails on any; Rendezvous.explain then names that group
    and its ranks on all.
    """
    uses = list(_uses(topology, ring))
    if not uses:
        return 0

    def use_all() -> None:
        if topology.device.type == "cuda":
            torch.cuda.set_device(topology.device)  # each thread has a current device of its own
        for number, call, group, wanted, use in uses:
            ranks = compress_ranks(group.ranks)
            shown = f"{ranks[:_SHOWN]}..." if len(ranks) > _SHOWN else ranks
            name = f"the first {call} the {group.kind} group of ranks {shown}"
            rendezvous.doing = (number, name)
            sys.audit("megatron.parallel.group", name)
            found = use(topology, group)
            if found != wanted:
                raise LaunchError(f"it gave {found:g} instead of {wanted:g}")

    try:
        rendezvous.unless_failed(use_all, seconds, "it did not end")
    except (RuntimeError, LaunchError) as error:
        raise LaunchError(f"{rendezvous.doing[1]}: {error}") from error
    rendezvous.doing = (0, "")
    return len(uses)


Use = tuple[int, str, Group, float, Callable[[Topology, Group], float]]


def _uses(topology: Topology, ring: bool) -> Iterator[Use]:
    """Yield (number, call, group, result, function).

    Numbers are the same on all ranks, so that groups do not wait in a circle. Training reduces over
    no pipeline group.
    """
    world, line = topology.world, topology.pipeline
    done = {None, world.handle}
    groups = topology.tensor, topology.data, topology.model, topology.embedding
    for number, group in enumerate(groups, start=1):
        if group is not None and group.handle not in done:
            done.add(group.handle)
            yield number, "all-reduce of", group, group.size, _reduce
    # First the pairs that begin with an even stage, then the others, then the ends of the ring.
    pairs = [(5 + low % 2, low, low + 1) for low in range(line.size - 1)]
    if ring and line.size > 2:
        pairs.append((7, line.size - 1, 0))
    for number, *pair in sorted(pairs):
        if line.rank in pair:
            one, other = (line.ranks[stage] for stage in pair)
            peer = other if line.rank == pair[0] else one
            call = f"messages of ranks {one} and {other} in"
            yield number, call, line, peer, partial(_exchange, peer, peer == other)
    if world.handle is not None:
        yield 8, "all-reduce of", world, world.size, _reduce


def _reduce(topology: Topology, group: Group) -> float:
    """Return the number of ranks of the group, counted by an all-reduce."""
    return all_reduce(torch.ones(1, device=topology.device), group).item()


def _exchange(peer: int, first: bool, topology: Topology, group: Group) -> float:
    """Return the number that a neighbour sends, which is its rank; `first`: whether this rank sends
    first.
    """
    own = torch.full((1,), float(topology.rank), device=topology.device)
    other = torch.empty_like(own)
    for sends in (first, not first):
        group.flight.enter_message(b"send" if sends else b"receive", group.kind, own.nbytes, peer)
        if sends:
            dist.send(own, peer, group=group.handle)
        else:
            dist.recv(other, peer, group=group.handle)
        group.flight.leave()
    return other.item()
