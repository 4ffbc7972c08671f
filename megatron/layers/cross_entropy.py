"""Cross entropy over a vocabulary cut over the tensor-parallel group (Shoeybi et al., arXiv 1909.08053, section 3)."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

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


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: Group, first: int = 0, real: int | None = None
) -> torch.Tensor:
    """-log softmax(logits)[label] of every token, fp32, the same on every rank of the group.

    logits [..., vocab/tp] of this rank's entries `first`, `first` + 1, ...; only the first `real` of them exist, the
    others pad and take no part. labels [...] are global ids; an id that no rank holds is an error of the caller.
    The backward pass works in place: it can run once.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, group, first, logits.shape[-1] if real is None else real)
