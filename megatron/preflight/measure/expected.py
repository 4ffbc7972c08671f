"""Which processes an allocation ought to have: the place of every rank, also of those that never came."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.parallel.nodelist import expand_counts, expand_hosts


class Place(NamedTuple):
    """A node, as the launcher calls it, and the number of a process there."""

    host: str
    local_rank: int


UNKNOWN = "unknown node"
"""Begins the name of a node that nobody has told."""


def slurm_places(environ: Mapping[str, str], world_size: int) -> list[list[Place]]:
    """The places of a step, node by node, from Slurm's variables; [] where they do not tell.

    Raises LaunchError for lists that cannot be read.
    """
    nodes = environ.get("SLURM_STEP_NODELIST", "").strip()
    if not nodes:
        return []
    hosts = expand_hosts(nodes)
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "").strip() or environ.get("SLURM_TASKS_PER_NODE", "").strip()
    counts = expand_counts(text) if text else []
    if len(counts) != len(hosts) or sum(counts) != world_size:
        if world_size % len(hosts):
            return []
        counts = [world_size // len(hosts)] * len(hosts)
    return [[Place(host, local) for local in range(count)] for host, count in zip(hosts, counts, strict=True)]


def _block(nodes: Sequence[Sequence[Place]]) -> list[Place]:
    return [place for node in nodes for place in node]


def _cyclic(nodes: Sequence[Sequence[Place]]) -> list[Place]:
    longest = max(map(len, nodes))
    return [node[local] for local in range(longest) for node in nodes if local < len(node)]


def places_of_ranks(
    nodes: Sequence[Sequence[Place]], present: Mapping[int, Place], world_size: int, local_world_size: int
) -> list[Place]:
    """The place of every rank.

    nodes             what slurm_places gave
    present           what the ranks that came said about themselves, which is right in any case
    local_world_size  processes on a node, for launchers that give no list of nodes

    The missing get the places that block or cyclic distribution gives them, whichever agrees with all who came. Where
    neither does, the free places are handed out in order: then nodes and local ranks are right, the ranks may not be.
    """
    if not nodes:
        return _without_list(present, world_size, local_world_size)
    for distribution in (_block, _cyclic):
        places = distribution(nodes)
        if all(places[rank] == place for rank, place in present.items()):
            return places
    taken = set(present.values())
    free = iter([place for place in _block(nodes) if place not in taken])
    nobody = Place(UNKNOWN, 0)
    return [present[rank] if rank in present else next(free, nobody) for rank in range(world_size)]


def _without_list(present: Mapping[int, Place], world_size: int, local_world_size: int) -> list[Place]:
    """Ranks of a node are numbered one after the other; a node of which nobody came has no name."""
    names: dict[int, str] = {}
    for rank, place in present.items():
        names.setdefault(rank // local_world_size, place.host)
    places = []
    for rank in range(world_size):
        node, local = divmod(rank, local_world_size)
        places.append(present.get(rank) or Place(names.get(node, f"{UNKNOWN} {node}"), local))
    return places


def by_host(places: Sequence[Place]) -> dict[str, list[int]]:
    """The ranks of each host, by local rank; hosts in the order of their lowest rank, which is the allocation's."""
    hosts: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, []).append(rank)
    for ranks in hosts.values():
        ranks.sort(key=lambda rank: places[rank].local_rank)
    return hosts
