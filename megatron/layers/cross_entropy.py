"""Cross entropy over a vocabulary cut over the tensor-parallel group (Shoeybi et al., arXiv 1909.08053, section 3)."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron.errors import KernelError
from megatron.kernels.ops import cross_entropy as kernel
from megatron.parallel import collectives
from megatron.parallel.topology import Group


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Group, first: int, real: int
    ) -> torch.Tensor:
        # The one array of the logits' size that is kept: fp32, turned from logits into probabilities in place.
        work = logits.to(torch.float32, copy=True)
        if real < work.shape[-1]:
            work[..., real:] = float("-inf")
        maximum = work.amax(dim=-1) if real else work.new_full(labels.shape, float("-inf"))
        collectives.all_reduce(maximum, group, dist.ReduceOp.MAX)
        work.sub_(maximum.unsqueeze(-1))
        local = labels - first
        elsewhere = (local < 0) | (local >= real)
        local = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        target = work.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0.0)
        sums = torch.stack((work.exp_().sum(dim=-1), target))
        total, target = collectives.all_reduce(sums, group)  # one message for both
        work.div_(total.unsqueeze(-1))
        ctx.save_for_backward(work, local, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        work, local, elsewhere = ctx.saved_tensors
        gradient = gradient.unsqueeze(-1)
        work.mul_(gradient)
        work.scatter_add_(-1, local, -gradient.masked_fill(elsewhere.unsqueeze(-1), 0.0))
        return work.to(ctx.dtype), None, None, None, None


class _FusedCrossEntropy(torch.autograd.Function):
    """The same with the kernels' passes: nothing of the logits' size is made, their gradient overwrites them."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Group, first: int, real: int
    ) -> torch.Tensor:
        flat, wanted = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        own_maximum, own_sum, target = kernel.local_pass(flat, wanted, first, real)
        maximum = collectives.all_reduce(own_maximum.clone(), group, dist.ReduceOp.MAX)
        # Each rank's sum is relative to its own maximum; a rank without entries has a sum of 0.
        sums = torch.stack((own_sum * (own_maximum - maximum).exp(), target))
        total, target = collectives.all_reduce(sums, group)  # one message for both
        ctx.save_for_backward(logits, wanted, maximum, total)
        ctx.first, ctx.real, ctx.used = first, real, False
        return (total.log() + (maximum - target)).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        if ctx.used:
            raise KernelError(
                "cross entropy: its backward pass has run before and has overwritten the logits; compute the loss "
                "again, or use --no-cross-entropy-loss-fusion"
            )
        ctx.used = True
        logits, labels, maximum, total = ctx.saved_tensors
        flat = logits.detach().reshape(-1, logits.shape[-1])
        kernel.gradient_(flat, labels, maximum, total, gradient.reshape(-1).contiguous(), ctx.first, ctx.real)
        return flat.view(logits.shape), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: Group, first: int = 0, real: int | None = None,
    fused: bool = False,
) -> torch.Tensor:
    """-log softmax(logits)[label] of every token, fp32, the same on every rank of the group.

    logits [..., vocab/tp] of this rank's entries `first`, `first` + 1, ...; only the first `real` of them exist, the
    others pad and take no part. labels [...] are global ids; an id that no rank holds is an error of the caller.
    The backward pass works in place: it can run once. With `fused` it overwrites the logits by their gradient, so that
    nobody else may use them.
    """
    function = _FusedCrossEntropy if fused else _VocabParallelCrossEntropy
    return function.apply(logits, labels, group, first, logits.shape[-1] if real is None else real)
