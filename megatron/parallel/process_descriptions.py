"""Descriptions that processes exchange at the rendezvous, and their comparison."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.collectives import all_reduce, gather_objects
from megatron.parallel.launch import Launch
from megatron.parallel.rank_mapping import (
    VISIBLE,
    LaunchedProcess,
    RankMapping,
    device_number,
    near_devices,
    visible_devices,
)
from megatron.parallel.topology import Group, compress_ranks

Alike = Mapping[str, Mapping[str, Any]]
"""Values that must be equal on all ranks, by kind and name; JSON-serializable. A rank that lacks a
kind is left out of the comparison of that kind.
"""

_SHOWN = 8  # at most this many groups of ranks, and names, are described
_LONGEST = 200  # maximum length of a value, or of a list of ranks, in characters


def bus_address(device: torch.device) -> tuple[int, ...]:
    """Return a device's PCI domain, bus and device number; () on a CPU or if unknown to torch."""
    if device.type == "cpu":
        return ()
    properties = torch.cuda.get_device_properties(device)
    address = [
        getattr(properties, f"pci_{field}_id", None) for field in ("domain", "bus", "device")
    ]
    return tuple(int(field or 0) for field in address) if address[1] is not None else ()


def device_identity(device: torch.device) -> str:
    """Return an identifier of this device on its node; "" on a CPU or if unknown to torch."""
    if device.type == "cpu":
        return ""
    if not torch.version.hip:
        # Partitions of one card share its bus address but not its UUID.
        return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    # Each die of an MI250X has a separate bus address. The partitions of an MI300 share one; their
    # numbers on the node distinguish them, or, if masked by uuid, the masks and the index.
    address = bus_address(device)
    masks = [os.environ.get(name, "") for name in VISIBLE]
    shown = visible_devices(os.environ) if any(masks) else range(torch.cuda.device_count())
    if shown is not None and device.index < len(shown):
        number = str(shown[device.index])
    else:
        number = f"{device.index} of {masks}"
    return f"{address}:{number}" if address else ""


def describe_process(
    launch: Launch, device: torch.device, backend: str, mapping: RankMapping
) -> LaunchedProcess:
    """Return this process's description for the others, except the values that must be equal."""
    on_device = device.type == "cuda"
    shown = visible_devices(os.environ)
    visible, index = (torch.cuda.device_count(), device.index) if on_device else (0, None)
    return LaunchedProcess(
        node=launch.node,
        number=device_number(mapping, launch.local_rank, index, visible, shown),
        address=bus_address(device),
        near=near_devices(mapping, os.sched_getaffinity(0)) if on_device else (),
        pid=os.getpid(),
        backend=backend,
        device=str(device),
        identity=device_identity(device),
    )


def conflict(tasks: Sequence[LaunchedProcess]) -> str:
    """Return why these processes, in the launcher's order, cannot work together, or ""."""
    first = tasks[0]
    users = dict[tuple[str, str], int]()
    for rank, process in enumerate(tasks):
        if process.backend != first.backend:
            return (
                f"rank 0 ({first.location}) uses {first.backend} but rank {rank} "
                f"({process.location}) uses {process.backend}: all ranks need devices of one kind, or "
                "--distributed-backend gloo"
            )
        other = users.setdefault((process.node, process.identity or f"rank {rank}"), rank)
        if other != rank:
            return (
                f"ranks {other} and {rank} both have device {process.device} of node "
                f"{process.node}: start one process for each device"
            )
    return ""


def digests(alike: Alike) -> dict[str, tuple[str, str]]:
    """Return the digest and the JSON text of each kind of values that must be equal."""
    texts = {kind: json.dumps(values, sort_keys=True) for kind, values in alike.items()}
    return {k: (hashlib.sha256(text.encode()).hexdigest()[:32], text) for k, text in texts.items()}


def compare(alike: Alike, world: Group) -> str:
    """Return a description of the values that differ between ranks but must not, or "".

    All ranks call this after the rendezvous, for values that were unknown then, and get the same
    result.
    """
    here = digests(alike)
    number = int.from_bytes(hashlib.sha256(json.dumps(here).encode()).digest()[:7])
    ends = all_reduce(torch.tensor([number, -number]), world, dist.ReduceOp.MAX).tolist()
    if ends[0] == -ends[1]:
        return ""
    everywhere = gather_objects(here, world)
    texts = dict(pair for pairs in everywhere for pair in pairs.values())
    of_ranks = [{kind: pair[0] for kind, pair in pairs.items()} for pairs in everywhere]
    return difference(of_ranks, texts.__getitem__)


def difference(of_ranks: Sequence[Mapping[str, str]], text_of: Callable[[str], str | bytes]) -> str:
    """Return a description of the values that differ between ranks but must not, or "".

    of_ranks  digests of each rank, by kind
    text_of   returns the text for a digest; called only for the digests of the largest groups
    """
    differences: list[str] = []
    for kind in dict.fromkeys(kind for rank_digests in of_ranks for kind in rank_digests):
        groups = defaultdict[str, list[int]](list)
        for rank, rank_digests in enumerate(of_ranks):
            if digest := rank_digests.get(kind):
                groups[digest].append(rank)
        if len(groups) > 1:
            largest = sorted(groups.items(), key=lambda group: -len(group[1]))[:_SHOWN]
            differences += _differing(
                [(json.loads(text_of(digest)), ranks) for digest, ranks in largest]
            )
    if not differences:
        return ""
    more = [f"and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else []
    return (
        f"all ranks must agree, but {'; '.join(differences[:_SHOWN] + more)}. Give every "
        "process the same command line ($RANDOM or $(date) in it differs between processes), code "
        "and files"
    )


def _differing(groups: Sequence[tuple[Mapping[str, Any], list[int]]]) -> Iterator[str]:
    """Yield, for each name whose value differs, which ranks have which value."""
    for name in dict.fromkeys(name for values, _ in groups for name in values):
        by_value = defaultdict[str, list[int]](list)
        for values, ranks in groups:
            by_value[json.dumps(values[name], sort_keys=True) if name in values else "absent"] += (
                ranks
            )
        if len(by_value) > 1:
            variants = [
                f"{text[:_LONGEST]} on rank {compress_ranks(of)[:_LONGEST]}"
                for text, of in by_value.items()
            ]
            yield f"{name} is {' vs. '.join(variants)}"
