"""What is known about the device that trains: its peak, its memory, its name."""
from __future__ import annotations

import os
import resource
import socket
from collections import Counter
from collections.abc import Collection, Sequence
from fractions import Fraction

import torch
import torch.distributed as dist

from megatron.model.formulas import peak_tflops

PLAUSIBLE_UTILISATION = 0.9  # no training run comes near; beyond it the figure is wrong, not the run fast


def peak_flops_per_s(device: torch.device, dtype_name: str) -> float | None:
    """Peak FLOP/s of the device's matrix units in this format; None for a CPU and for devices that are not listed."""
    peak = peak_tflops(torch.cuda.get_device_name(device), dtype_name) if device.type == "cuda" else None
    return None if peak is None else peak * 1e12


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has held since it began: of the device's allocator, or on a CPU of the whole process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _peak_resident_bytes()


def reserved_memory_bytes(device: torch.device) -> int | None:
    """Most memory that the device's allocator has taken from the device, in use or not; None on a CPU."""
    return int(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else None


def _peak_resident_bytes() -> int:
    """VmHWM; ru_maxrss, which begins with the pages of the process that started this one, only where there is none."""
    try:
        with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def share_cores(device: torch.device, local_world_size: int) -> str:
    """On a CPU, give each of the node's processes its part of the cores; returns the line about it for the log.

    Without this every process starts a thread per core and they take the cores from each other. Called by all
    processes, after they are connected. OMP_NUM_THREADS wins, unless it is only torchrun that set it: to 1, whatever
    the node has. No process is bound to cores: srun and mpirun do that, and two runs that share a node and each
    bind theirs to its first cores would leave the others idle. How long waiting threads spin is left to the OpenMP
    library, which spins only where there are no more threads than cores.
    """
    if device.type != "cpu":
        return f"threads: {torch.get_num_threads()} per process, for what the CPU does beside the device"
    mine = os.sched_getaffinity(0)
    # Asked for whatever this process will do with it: the others may have another environment.
    masks = masks_on_this_node(mine) if dist.is_initialized() and dist.get_world_size() > 1 else [mine]
    if os.environ.get("OMP_NUM_THREADS") and not torchrun_chose_threads():
        return f"threads: {torch.get_num_threads()} per process, as OMP_NUM_THREADS says"
    threads = part_of_cores(mine, masks, local_world_size)
    torch.set_num_threads(threads)
    return f"threads: {threads} per process ({len(mine)} core(s) allowed, {local_world_size} process(es) on the node)"


def masks_on_this_node(mine: set[int]) -> list[set[int]]:
    """The cores that each process of this node may use; every process of the world has to call this."""
    everywhere: list[tuple[str, set[int]]] = [("", set())] * dist.get_world_size()
    dist.all_gather_object(everywhere, (socket.gethostname(), mine))
    return [mask for host, mask in everywhere if host == socket.gethostname()]


def part_of_cores(mine: Collection[int], masks: Sequence[Collection[int]], local_world_size: int) -> int:
    """Threads for a process: each core that it may use counts for one by the number of processes that may use it.

    So processes that srun bound to cores of their own use all of these, and those that are not bound share the node.
    `masks` are those of the processes that were asked, this one's among them; one mask stands for all of them.
    """
    if len(masks) == 1:
        return max(1, len(mine) // local_world_size)
    users = Counter(core for mask in masks for core in mask)
    return max(1, int(sum((Fraction(1, users[core]) for core in mine), Fraction())))


def torchrun_chose_threads() -> bool:
    """Whether OMP_NUM_THREADS comes from torchrun itself, which sets it to 1 where nobody has.

    What its own environment was when it started is in /proc.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("OMP_NUM_THREADS") != "1":
        return False
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            return not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in file.read().split(b"\0"))
    except OSError:
        return False


def device_name(device: torch.device) -> str:
    """Name of the device, and of the CPU its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} thread(s) per process"
