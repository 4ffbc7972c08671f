"""What is known about the device that trains: its peak, its memory, its name."""
from __future__ import annotations

import os
import resource

import torch

from megatron.model.formulas import peak_tflops

PLAUSIBLE_UTILISATION = 0.9  # no training run comes near; beyond it the figure is wrong, not the run fast


def peak_flops_per_s(device: torch.device, dtype_name: str) -> float | None:
    """Peak FLOP/s of the device's matrix units in this format; None for a CPU and for devices that are not listed."""
    peak = peak_tflops(torch.cuda.get_device_name(device), dtype_name) if device.type == "cuda" else None
    return None if peak is None else peak * 1e12


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has held: of the device's allocator, or on a CPU of the whole process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def share_cores(device: torch.device, local_world_size: int) -> None:
    """On a CPU, give each of the node's processes its part of the cores, unless OMP_NUM_THREADS says otherwise.

    Without this every process starts a thread per core and they take the cores from each other.
    """
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))


def describe(device: torch.device) -> str:
    """Name of the device, and of the CPU its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} thread(s) per process"
