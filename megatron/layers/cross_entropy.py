"""Cross entropy over a vocabulary cut over the tensor-parallel group (Shoeybi et al., arXiv 1909.08053, section 3).

A rank says three numbers of each token's logits: the maximum, the sum of exponentials relative to it, and the label's
logit. One message gives every rank those of all, from which the loss and the gradient of its own logits follow.
"""
from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron.errors import KernelError
from megatron.kernels.ops import cross_entropy as kernel
from megatron.parallel import collectives
from megatron.parallel.topology import Group


def local_statistics(logits: torch.Tensor, labels: torch.Tensor, first: int, real: int, fused: bool) -> torch.Tensor:
    """(maximum, sum of exponentials, label's logit) of this rank's logits [n, v], contiguous: fp32 [3, n].

    Without `fused`, by torch's operators on a few rows at a time, so that no fp32 copy of all of them exists.
    """
    if fused:
        return torch.stack(kernel.local_pass(logits, labels, first, real))
    found = [torch.stack(kernel.reference(logits[p], labels[p], first, real)) for p in kernel.pieces(logits)]
    return torch.cat(found, dim=1)


def combine(own: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(maximum, sum of exponentials relative to it, label's logit), [n] each, over the vocabulary of all ranks.

    One message; every rank adds in the order of the ranks, so that all have the same bits.
    """
    if group.size == 1:
        return own[0], own[1], own[2]
    every = collectives.gather_first(own.unsqueeze(0), group)  # [tp, 3, n]
    maxima, sums, targets = every.unbind(dim=1)
    maximum = maxima.amax(dim=0)
    # A rank without entries has a maximum of -infinity and a sum of 0.
    return maximum, (sums * (maxima - maximum).exp()).sum(dim=0), targets.sum(dim=0)


def losses_of(maximum: torch.Tensor, total: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """-log softmax at the label, from what `combine` gives."""
    return total.log() + (maximum - target)


def gradient_(
    logits: torch.Tensor, labels: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor, gradient: torch.Tensor,
    first: int, real: int, fused: bool,
) -> None:
    """Overwrite the logits [n, v], contiguous, by their gradient, given that of the losses, fp32 [n].

    The product with it is taken in fp32 before anything is rounded to 16 bit: a loss scale in it keeps small
    probabilities from underflow in fp16.
    """
    if fused:
        kernel.gradient_(logits, labels, maximum, total, gradient, first, real)
        return
    for p in kernel.pieces(logits):
        logits[p] = kernel.reference_gradient(logits[p], labels[p], maximum[p], total[p], gradient[p], first, real)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Group, first: int, real: int, fused: bool
    ) -> torch.Tensor:
        flat, wanted = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        maximum, total, target = combine(local_statistics(flat, wanted, first, real, fused), group)
        ctx.save_for_backward(logits, wanted, maximum, total)
        ctx.first, ctx.real, ctx.fused, ctx.used = first, real, fused, False
        return losses_of(maximum, total, target).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.used:
            raise KernelError(
                "cross entropy: its backward pass has run before and has overwritten the logits; compute the loss "
                "again, or use --no-cross-entropy-loss-fusion"
            )
        ctx.used = ctx.fused
        logits, labels, maximum, total = ctx.saved_tensors
        out = logits.detach() if ctx.fused else logits.clone(memory_format=torch.contiguous_format)
        flat = out.reshape(-1, logits.shape[-1])
        gradient_(flat, labels, maximum, total, gradient.reshape(-1).contiguous(), ctx.first, ctx.real, ctx.fused)
        return flat.view(logits.shape), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: Group, first: int = 0, real: int | None = None,
    fused: bool = False,
) -> torch.Tensor:
    """-log softmax(logits)[label] of every token, fp32, the same on every rank of the group.

    logits [..., vocab/tp] of this rank's entries `first`, `first` + 1, ...; only the first `real` of them exist, the
    others pad and take no part. labels [...] are global ids; an id that no rank holds is an error of the caller.
    With `fused` the backward pass overwrites the logits by their gradient: it can run once, and nobody else may use
    them. Without, the gradient is a new tensor. Nothing else of the logits' size is made, and nothing of it in fp32.
    """
    real = logits.shape[-1] if real is None else real
    losses: torch.Tensor = _CrossEntropy.apply(logits, labels, group, first, real, fused)
    return losses
