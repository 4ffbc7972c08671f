"""Topology in a test process, which joins the default process group."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.parallel.layout import DEFAULT_ORDER, LayoutSizes
from megatron.parallel.topology import Topology


def join(
    tensor: int = 1,
    pipeline: int = 1,
    timeout_s: float = 120,
    order: str = DEFAULT_ORDER,
    owners: Sequence[int] = (),
    **sizes: int,
) -> Topology:
    """Build a topology over gloo, which is set up once, by the environment from run_processes."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timeout)
    topology = Topology.create(
        timeout=timeout,
        sizes=LayoutSizes(tensor, pipeline, rank_order=order, **sizes),
        owners=owners,
    )
    dist.barrier()  # a rank that ends before would take the store from those still connecting
    return topology
