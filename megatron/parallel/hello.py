"""What each process tells the others when they meet, and what one of them makes of it: places, ranks, refusals."""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron.parallel.placing import Assignment, Placing, Task, assign, device_number, near_devices, visible_devices
from megatron.parallel.report import bus_address, device_identity, device_name

if TYPE_CHECKING:
    from megatron.parallel.launch import Launch

Hello = dict[str, Any]


def make_hello(launch: Launch, device: torch.device, backend: str, placing: Placing | None) -> Hello:
    """This process's hello, JSON-serialisable."""
    number, near = None, tuple[int, ...]()
    if placing is not None:
        on_device = device.type == "cuda"
        visible = torch.cuda.device_count() if on_device else 0
        index = device.index if on_device else None
        number = device_number(placing, launch.local_rank, index, visible, visible_devices(os.environ))
        near = near_devices(placing, os.sched_getaffinity(0)) if on_device else ()
    return {
        "node": launch.node,
        "local_rank": launch.local_rank,
        "pid": os.getpid(),
        "device": device_name(device),
        "identity": device_identity(device),
        "backend": backend,
        "number": number,
        "address": bus_address(device) if placing is not None else (),
        "near": near,
        "agreed": placing.agreed if placing is not None else "ranks as launched",
        "notices": launch.notices,
    }


def place(hello: Hello) -> str:
    """"node:device", with the device's number on the node where the process counts it otherwise."""
    number, device = hello.get("number"), hello["device"]
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
        if hello.get("agreed") != first.get("agreed"):
            return (
                f"rank 0 ({place(first)}) has {first.get('agreed')}, but rank {rank} ({place(hello)}) has "
                f"{hello.get('agreed')}: MEGATRON_CLUSTER and the files and flags of the placement must be the same on "
                f"all nodes"
            )
        other = users.setdefault((hello["node"], hello["identity"] or f"rank {rank}"), rank)
        if other != rank:
            return (
                f"ranks {other} and {rank} both have device {hello['device']} of node {hello['node']}: start as "
                f"many processes as there are devices"
            )
    return ""


def assignment_of(hellos: Sequence[Hello], placing: Placing | None) -> Assignment:
    """Ranks for all processes, and the numbers of their devices, which each knew only for itself."""
    if placing is None:
        return Assignment(list(range(len(hellos))), [None] * len(hellos), [])
    tasks = [Task(hello["node"], hello["number"], tuple(hello["address"]), tuple(hello["near"])) for hello in hellos]
    return assign(tasks, placing.device_order)


def collected_notices(hellos: Sequence[Hello]) -> list[str]:
    """What processes want the log to say: each text once, with the first process that says it and how many do."""
    said: dict[str, list[int]] = {}
    for rank, hello in enumerate(hellos):
        for text in hello.get("notices", ()):
            said.setdefault(text, []).append(rank)
    lines = []
    for text, by in list(said.items())[:8]:
        who = f"task {by[0]} ({place(hellos[by[0]])})" + (f" and {len(by) - 1} more" if len(by) > 1 else "")
        lines.append(text if len(by) == len(hellos) else f"{text}: {who}")
    return lines + ([f"{len(said) - 8} more notes of this kind"] if len(said) > 8 else [])
