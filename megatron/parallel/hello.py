"""What each process tells the others when they meet, and what one of them makes of it: places, ranks, refusals."""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron.parallel.launch import Launch
from megatron.parallel.nodelist import compress_ranks
from megatron.parallel.placing import Assignment, Placing, Task, assign, device_number, near_devices, visible_devices
from megatron.parallel.report import bus_address, device_identity, device_name

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


def digests(alike: Alike) -> dict[str, tuple[str, str]]:
    """Of each kind its digest, and the JSON text of which it is made."""
    texts = {kind: json.dumps(values, sort_keys=True) for kind, values in alike.items()}
    return {kind: (hashlib.sha256(text.encode()).hexdigest()[:32], text) for kind, text in texts.items()}


def difference(hellos: Sequence[Hello], text_of: Callable[[str], str | bytes]) -> str:
    """What these processes have otherwise than others that all must have alike, or "". `text_of` gives the text of a
    digest; it is asked for those of the largest groups only."""
    found = []
    for kind in dict.fromkeys(kind for hello in hellos for kind in hello.get("alike", ())):
        groups: dict[str, list[int]] = {}
        for rank, hello in enumerate(hellos):
            if digest := hello.get("alike", {}).get(kind):
                groups.setdefault(digest, []).append(rank)
        if len(groups) > 1:
            largest = sorted(groups.items(), key=lambda group: -len(group[1]))[:_SHOWN]
            found += _differing([(json.loads(text_of(digest)), ranks) for digest, ranks in largest])
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    if not found:
        return ""
    return (
        f"all ranks must have the same, but {'; '.join(found[:_SHOWN] + more)}. Give every process the same command "
        f"line ($RANDOM or $(date) in it is another for each), code and files"
    )


def _differing(groups: Sequence[tuple[Mapping[str, Any], list[int]]]) -> list[str]:
    """For each name of which the ranks have different values: which value which ranks have."""
    lines = []
    for name in dict.fromkeys(name for values, _ in groups for name in values):
        by_value: dict[str, list[int]] = {}
        for values, ranks in groups:
            text = json.dumps(values[name], sort_keys=True) if name in values else "absent"
            by_value.setdefault(text, []).extend(ranks)
        if len(by_value) > 1:
            told = (f"{_short(text)} on rank {_short(compress_ranks(ranks))}" for text, ranks in by_value.items())
            lines.append(f"{name} is {', '.join(told)}")
    return lines


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def assignment_of(hellos: Sequence[Hello], placing: Placing) -> Assignment:
    """Ranks for all processes, and the numbers of their devices, which each knew only for itself."""
    tasks = [Task(hello["node"], hello["number"], tuple(hello["address"]), tuple(hello["near"])) for hello in hellos]
    return assign(tasks, placing.device_order)
