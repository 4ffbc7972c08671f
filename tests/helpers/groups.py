"""Process-side helpers: join the default group and build a topology."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from megatron.parallel.topology import DEFAULT_ORDER, Topology


def join(
    tensor: int = 1, pipeline: int = 1, timeout_s: float = 120, order: str = DEFAULT_ORDER
) -> Topology:
    """A topology over gloo, which is initialised once, from the environment that run_processes
    set.
    """
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timeout)
    topology = Topology.create(tensor, pipeline, timeout=timeout, order=order)
    dist.barrier()  # who ends at once takes the store from those that still connect
    return topology
