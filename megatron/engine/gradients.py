"""Gradients between the backward passes and the optimizer's step: fp32 sums, and their reduction over ranks.

Where DeepSpeed keeps the sum depends on the precision: `p.grad` in fp32, `p.grad_accum` in fp16, a view of one flat
buffer in bf16. Everything else asks `Gradients.of(p)`.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megatron.engine.fragments import is_copy
from megatron.parallel.collectives import all_reduce
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Group, Topology


class Gradients:
    """The fp32 gradient sums of this rank's parameters.

    parameters  in the order of the optimizer's groups
    optimizer   DeepSpeed's optimizer around ours
    dtype       format in which backward passes leave `p.grad`
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], optimizer: Any, dtype: torch.dtype) -> None:
        self.parameters = list(parameters)
        self._optimizer = optimizer
        self._dtype = dtype
        self._views: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.flat: list[torch.Tensor] = []
        if dtype == torch.bfloat16:
            self.flat = list(optimizer.fp32_groups_gradients_flat)
            for group, views in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
                self._views.update((p, view.view(p.shape)) for p, view in zip(group, views, strict=True))

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add what the last backward pass left in `p.grad` to the fp32 sums; nothing to do in fp32."""
        if self._dtype == torch.float32:
            return
        for p in self.parameters:
            if p.grad is None:
                continue
            if p in self._views:
                self._views[p].add_(p.grad)
            elif p.grad_accum is None:  # type: ignore[attr-defined]
                p.grad_accum = p.grad.float()  # type: ignore[attr-defined]
            else:
                p.grad_accum.add_(p.grad)  # type: ignore[attr-defined]
            p.grad = None

    def of(self, p: torch.nn.Parameter) -> torch.Tensor:
        """The gradient sum of `p`, fp32, in the shape of `p`; zeros are made for a parameter that got none."""
        if p in self._views:
            return self._views[p]
        name = "grad" if self._dtype == torch.float32 else "grad_accum"
        found = getattr(p, name)
        if found is None:
            found = torch.zeros_like(p, dtype=torch.float32)
            setattr(p, name, found)
        return found

    def all(self) -> list[torch.Tensor]:
        return [self.of(p) for p in self.parameters]

    @torch.no_grad()
    def reduce_model_parallel(self, topology: Topology) -> None:
        """Complete the gradients that several model-parallel ranks hold terms of.

        Sums over the tensor group what was computed on sequence shards, and over the first and last stage the two
        terms of a tied embedding.
        """
        if topology.tensor.size > 1:
            partial = [self.of(p) for p in self.parameters if sharding_of(p).partial_gradient]
            sum_over(partial, topology.tensor)
        if topology.embedding is not None:
            sum_over([self.of(p) for p in self.parameters if sharding_of(p).tied], topology.embedding)

    @torch.no_grad()
    def average(self, group: Group, bucket_elements: int) -> None:
        """Replace the gradients by their mean over `group`."""
        tensors = self.flat or self.all()
        sum_over(tensors, group, bucket_elements)
        if group.size > 1:
            torch._foreach_mul_(tensors, 1.0 / group.size)

    @torch.no_grad()
    def spread_invalid(self, topology: Topology) -> None:
        """Let a NaN or infinity reach the gradient norm also where DeepSpeed does not look.

        DeepSpeed counts replicated parameters on tensor rank 0 only. A bad value in another rank's copy would pass, and
        the copies would part for good; so it is carried into an element that is counted.
        """
        counted = next((p for p in self.parameters if not is_copy(p, topology)), None)
        copies = [self.of(p) for p in self.parameters if is_copy(p, topology)]
        if counted is None or not copies:
            return
        # 0 times the sum is 0, or NaN where anything in the sum is NaN or infinite.
        poison = torch.stack([g.sum() for g in copies]).sum().mul_(0.0)
        self.of(counted).view(-1)[:1].add_(poison)


def sum_over(tensors: Iterable[torch.Tensor], group: Group, bucket_elements: int = 1 << 26) -> None:
    """Sum tensors over a group in place; small ones travel together in flat buckets of `bucket_elements`."""
    if group.size == 1:
        return
    waiting: list[torch.Tensor] = []
    count = 0

    def send() -> None:
        if len(waiting) == 1 and waiting[0].is_contiguous():
            all_reduce(waiting[0], group)
        elif waiting:
            flat = torch.cat([t.reshape(-1) for t in waiting])
            all_reduce(flat, group)
            parts = flat.split([t.numel() for t in waiting])
            torch._foreach_copy_(waiting, [part.view(t.shape) for part, t in zip(parts, waiting, strict=True)])
        waiting.clear()

    for t in tensors:
        if t.is_contiguous() and t.numel() >= bucket_elements:
            for part in t.view(-1).split(bucket_elements):  # large ones go in place, in pieces
                all_reduce(part, group)
            continue
        if count + t.numel() > bucket_elements:
            send()
            count = 0
        waiting.append(t)
        count += t.numel()
    send()
