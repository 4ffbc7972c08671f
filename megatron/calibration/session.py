"""One process's part of a calibration: measure together with the others; the first one puts the figures together."""
from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.calibration.compute import compute_tasks
from megatron.calibration.messages import Kind, kinds_of_groups, message_tasks, open_groups
from megatron.calibration.tasks import Partners, Task, measure
from megatron.config import Config
from megatron.parallel import collectives
from megatron.parallel.launch import Launch, connect
from megatron.parallel.topology import Group
from megatron.training.setup import set_up_host

_COMPUTE_SHARE = 0.6
"""Of the time, for what each process does by itself, where there are messages to measure too."""


@dataclass(frozen=True)
class Found:
    """What processes measured. points: by figure, without the sources; the rest says on what.

    threads  of each process; cores: of a node that the processes may use; memory_gib: of a device, or of a CPU node
    """

    points: dict[str, list[list[float]]]
    device: str
    device_type: str
    nodes: int
    per_node: int
    threads: int
    cores: int
    memory_gib: float
    versions: dict[str, str]
    overheads: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _World(Partners):
    """All processes of the job."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device

    def largest(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float64, device=self._device)
        return float(collectives.all_reduce(found, self._group, op=dist.ReduceOp.MAX).item())


def run(config: Config, launch: Launch, seconds: float, timeout_minutes: float = 5.0) -> Found | None:
    """Measure; on the first rank what was found, on the others None. All ranks call it."""
    rendezvous = connect(launch, timedelta(minutes=timeout_minutes), config.parallel.distributed_backend)
    try:
        launch, device = rendezvous.launch, rendezvous.device
        set_up_host(config, device, launch)
        return _measure(config, launch, device, seconds)
    finally:
        rendezvous.close()


def _measure(config: Config, launch: Launch, device: torch.device, seconds: float) -> Found | None:
    world = Group(tuple(range(launch.world_size)), launch.rank, dist.group.WORLD)
    cores = len(os.sched_getaffinity(0))
    on_cpu, per_node = device.type == "cpu", launch.local_world_size
    share = max(1.0, per_node / cores) if on_cpu else 1.0
    partners = _World(world, device) if world.size > 1 else Partners()
    tasks = compute_tasks(config, device, _tensor_sizes(config, per_node))
    # More processes than cores would wait for each other: one for each core measures.
    active = not on_cpu or launch.local_rank < cores
    alone = _COMPUTE_SHARE if world.size > 1 else 1.0
    own = measure(tasks, device, seconds * alone, partners, active)
    kinds = kinds_of_groups(world.size, per_node)
    together = list(message_tasks(_groups(kinds, launch), device, share))
    joint = measure(together, device, seconds * (1 - alone), partners)
    every = collectives.gather_objects((own, joint), world, everywhere=False) if world.size > 1 else [(own, joint)]
    if launch.rank:
        return None
    return Found(
        points=_points([*tasks, *together], _over_ranks(every)), device=_device_name(device), device_type=device.type,
        nodes=launch.world_size // per_node, per_node=per_node, threads=torch.get_num_threads(), cores=cores,
        memory_gib=_memory_gib(device), versions={"torch": torch.__version__},
    )


def _groups(kinds: Sequence[Kind], launch: Launch) -> dict[Kind, Group]:
    return open_groups(list(kinds), launch.world_size, launch.rank)


def _over_ranks(every: Sequence[tuple[list[float], list[float]]]) -> list[float]:
    """Of what each process did by itself the mean of those that did it; of messages the slowest process."""
    alone = zip(*(own for own, _ in every), strict=True)
    own = [statistics.mean(v for v in values if v < float("inf")) for values in alone]
    return own + [max(values) for values in zip(*(joint for _, joint in every), strict=True)]


def _points(tasks: Sequence[Task], seconds: Sequence[float]) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    for task, value in zip(tasks, seconds, strict=True):
        found.setdefault(task.figure, []).append([*task.place, float(f"{task.value(value):.5g}")])
    return found


def _tensor_sizes(config: Config, per_node: int) -> tuple[int, ...]:
    """Powers of two within a node by which heads and MLP divide."""
    model = config.model
    divided = (model.num_attention_heads, model.num_key_value_heads, model.ffn_hidden_size)
    sizes = [t for t in (1 << i for i in range(per_node.bit_length())) if t <= per_node]
    return tuple(t for t in sizes if all(n % t == 0 for n in divided))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else 'CPU'}"


def _memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory) / 2**30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
