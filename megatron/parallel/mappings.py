"""Collectives with gradients, the seams between replicated, tensor-sharded and sequence-sharded regions.

Each pair of forward and backward is the one of Shoeybi et al. (arXiv 1909.08053, section 3, f and g) and of
Korthikanti et al. (arXiv 2205.05198, section 4.2.2, g and its conjugate).
"""
from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron.parallel import collectives
from megatron.parallel.topology import Group


class _ReduceForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.partial_gradient = True  # for engine/gradients.py: what each rank put in were values of its own
        return collectives.all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _ReduceScatterForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.partial_gradient = group, True
        return collectives.reduce_scatter_first(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return collectives.gather_first(gradient, ctx.group), None


def reduce_from_tensor_region(x: torch.Tensor, group: Group, sequence_parallel: bool = False) -> torch.Tensor:
    """Sum the partial results [s, b, h] of the tensor ranks.

    Returns [s, b, h] on every rank, or with sequence parallelism this rank's [s/tp, b, h].
    """
    if group.size == 1:
        return x
    return _ReduceScatterForward.apply(x, group) if sequence_parallel else _ReduceForward.apply(x, group)
