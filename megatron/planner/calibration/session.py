"""One process's part of a calibration: measure together with the others; the first one puts the figures together."""
from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.parallel import collectives
from megatron.parallel.launch import Launch
from megatron.parallel.processes import environment
from megatron.parallel.rendezvous import connect
from megatron.parallel.topology import Group
from megatron.planner.calibration.compute import compute_tasks
from megatron.planner.calibration.host import HostSeconds, host_seconds
from megatron.planner.calibration.messages import kinds_of_groups, message_tasks, open_groups
from megatron.planner.calibration.tasks import Partners, measure
from megatron.training.setup import set_up_host

_HOST_SHARE, _COMPUTE_SHARE = 0.1, 0.6
"""Shares of the time for what the host does, and of the rest for each process by itself where there are messages."""
_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Found:
    """What processes measured. points: by figure, without the sources; the rest says on what.

    threads  of each process; cores: of a node that the processes may use; memory_gib: of a device, or of a CPU node
    """

    points: dict[str, list[list[float]]]
    host: HostSeconds
    device: str
    device_type: str
    nodes: int
    per_node: int
    threads: int
    cores: int
    memory_gib: float


class _World(Partners):
    """All processes of the job."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device

    def largest(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float64, device=self._device)
        return float(collectives.all_reduce(found, self._group, op=dist.ReduceOp.MAX).item())


def run(config: Config, launch: Launch, seconds: float) -> Found | None:
    """Measure; on the first rank what was found, on the others None. All ranks call it. Raises MegatronError."""
    together = (1 - _HOST_SHARE) * seconds
    with connect(launch, _TIMEOUT, config.parallel.distributed_backend) as rendezvous:
        launch, device = rendezvous.launch, rendezvous.device
        set_up_host(config, device, launch)
        points = _points(config, launch, device, together)
    if launch.rank:
        return None
    # Once the job of all processes has ended, as a job of one.
    os.environ.update(environment({}, 0, 1, "0"))
    host = host_seconds(config, device, seconds - together)
    on_gpu = device.type == "cuda"
    memory = (torch.cuda.get_device_properties(device).total_memory if on_gpu
              else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))  # fmt: skip
    return Found(
        points, host, torch.cuda.get_device_name(device) if on_gpu else _cpu_name(), device.type,
        launch.world_size // launch.local_world_size, launch.local_world_size, torch.get_num_threads(),
        len(os.sched_getaffinity(0)), memory / 2**30,
    )  # fmt: skip


def _points(config: Config, launch: Launch, device: torch.device, seconds: float) -> dict[str, list[list[float]]]:
    world = Group(tuple(range(launch.world_size)), launch.rank, dist.group.WORLD)
    per_node, cores = launch.local_world_size, len(os.sched_getaffinity(0))
    on_cpu, alone = device.type == "cpu", world.size == 1
    partners = Partners() if alone else _World(world, device)
    tasks = compute_tasks(config, device, _tensor_sizes(config, per_node))
    # More processes than cores would wait for each other: one for each core measures.
    active = not on_cpu or launch.local_rank < cores
    own = measure(tasks, device, seconds * (1.0 if alone else _COMPUTE_SHARE), partners, active)
    groups = open_groups(kinds_of_groups(world.size, per_node), world.size, launch.rank)
    together = list(message_tasks(groups, device, max(1.0, per_node / cores) if on_cpu else 1.0))
    joint = measure(together, device, seconds * (1 - _COMPUTE_SHARE), partners)
    every = [(own, joint)] if alone else collectives.gather_objects((own, joint), world, everywhere=False)
    points: dict[str, list[list[float]]] = {}
    if every:  # on the first rank
        for task, value in zip([*tasks, *together], _over_ranks(every), strict=True):
            points.setdefault(task.figure, []).append([*task.place, float(f"{task.value(value):.5g}")])
    return points


def _over_ranks(every: Sequence[tuple[list[float], list[float]]]) -> list[float]:
    """Of what each process did by itself the mean of those that did it; of messages the slowest process."""
    alone = zip(*(own for own, _ in every), strict=True)
    own = [statistics.mean(v for v in values if v < float("inf")) for values in alone]
    return own + [max(values) for values in zip(*(joint for _, joint in every), strict=True)]


def _tensor_sizes(config: Config, per_node: int) -> tuple[int, ...]:
    """Powers of two within a node by which heads and MLP divide."""
    model = config.model
    divided = (model.num_attention_heads, model.num_key_value_heads, model.ffn_hidden_size)
    sizes = [1 << i for i in range(per_node.bit_length())]
    return tuple(t for t in sizes if all(n % t == 0 for n in divided))


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return "CPU"
