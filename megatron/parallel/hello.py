"""What each process tells the others when they meet, and what one of them makes of it: places, ranks, refusals."""
from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.parallel.launch import Launch
from megatron.parallel.placing import Placing, device_number, near_devices, visible_devices
from megatron.parallel.report import bus_address, device_identity, device_name
from megatron.parallel.topology import compress_ranks

Hello = dict[str, Any]
Alike = Mapping[str, Mapping[str, Any]]
"""What all ranks must have alike, by kind, each by name; JSON-serialisable. A rank without a kind is not compared."""

_SHOWN = 8  # groups of ranks, and names, of which a refusal tells
_LONGEST = 200  # characters of a value in it


def make_hello(launch: Launch, device: torch.device, backend: str, placing: Placing) -> Hello:
    """This process's hello, JSON-serialisable."""
    on_device = device.type == "cuda"
    visible, index = (torch.cuda.device_count(), device.index) if on_device else (0, None)
    return {
        "node": launch.node,
        "local_rank": launch.local_rank,
        "pid": os.getpid(),
        "device": device_name(device),
        "identity": device_identity(device),
        "backend": backend,
        "number": device_number(placing, launch.local_rank, index, visible, visible_devices(os.environ)),
        "address": bus_address(device),
        "near": near_devices(placing, os.sched_getaffinity(0)) if on_device else (),
    }


def place(hello: Hello) -> str:
    """"node:device", with the device's number on the node where the process counts it otherwise."""
    number, device = hello["number"], hello["device"]
    other = number is not None and device != f"cuda:{number}"
    return f"{hello['node']}:{device}" + (f" (device {number})" if other else "")


def refusal(hellos: Sequence[Hello]) -> str:
    """Why these processes, in the order of their launcher's numbers, cannot work together, or ""."""
    first, users = hellos[0], dict[tuple[str, str], int]()
    for rank, hello in enumerate(hellos):
        if hello["backend"] != first["backend"]:
            return (
                f"rank 0 ({place(first)}) uses {first['backend']} but rank {rank} ({place(hello)}) uses "
                f"{hello['backend']}: all ranks need devices of one kind, or --distributed-backend gloo"
            )
        other = users.setdefault((hello["node"], hello["identity"] or f"rank {rank}"), rank)
        if other != rank:
            return (
                f"ranks {other} and {rank} both have device {hello['device']} of node {hello['node']}: start as "
                f"many processes as there are devices"
            )
    return ""


def difference(hellos: Sequence[Hello], text_of: Callable[[str], str | bytes]) -> str:
    """What these processes have otherwise than others that all must have alike, or "". `text_of` gives the text of a
    digest; it is asked for those of the largest groups only."""
    found: list[str] = []
    for kind in dict.fromkeys(kind for hello in hellos for kind in hello.get("alike", ())):
        groups = defaultdict[str, list[int]](list)
        for rank, hello in enumerate(hellos):
            if digest := hello.get("alike", {}).get(kind):
                groups[digest].append(rank)
        if len(groups) > 1:
            largest = sorted(groups.items(), key=lambda group: -len(group[1]))[:_SHOWN]
            found += _differing([(json.loads(text_of(digest)), ranks) for digest, ranks in largest])
    if not found:
        return ""
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return (
        f"all ranks must have the same, but {'; '.join(found[:_SHOWN] + more)}. Give every process the same command "
        f"line ($RANDOM or $(date) in it is another for each), code and files"
    )


def _differing(groups: Sequence[tuple[Mapping[str, Any], list[int]]]) -> Iterator[str]:
    """For each name of which the ranks have different values: which value which ranks have."""
    for name in dict.fromkeys(name for values, _ in groups for name in values):
        by_value = defaultdict[str, list[int]](list)
        for values, ranks in groups:
            by_value[json.dumps(values[name], sort_keys=True) if name in values else "absent"] += ranks
        if len(by_value) > 1:
            told = [f"{text[:_LONGEST]} on rank {compress_ranks(of)[:_LONGEST]}" for text, of in by_value.items()]
            yield f"{name} is {', '.join(told)}"
