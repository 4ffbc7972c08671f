"""Process-side helpers: join the default group and build a topology."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from megatron.parallel.layout import DEFAULT_ORDER, LayoutSizes
from megatron.parallel.topology import Topology


def join(
    tensor: int = 1,
    pipeline: int = 1,
    timeout_s: float = 120,
    order: str = DEFAULT_ORDER,
    **sizes: int,
) -> Topology:
    """Build a topology over gloo, initialised once from the environment set by run_processes."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timeout)
    topology = Topology.create(
        timeout=timeout, sizes=LayoutSizes(tensor, pipeline, rank_order=order, **sizes)
    )
    dist.barrier()  # a rank that ends at once takes the store from those still connecting
    return topology
