"""Tokens and choices at the entry of the experts' tensor-parallel region, and results at its end.

Experts may be divided over other ranks than attention (Layout): each over `expert_tensor` ranks
that neighbour each other. Every rank of the stage brings the tokens that it has:

- With sequence parallelism each has other tokens. Ranks that divide an expert gather theirs, and
  sum and scatter their results; an expert that is not divided needs neither.
- Without, tensor-parallel ranks have the same tokens. If an expert is divided over fewer ranks,
  each set of such ranks sends an equal share of the tokens, and has zeros for the others; results
  are summed over the tensor-parallel ranks in any case.
- If an expert is divided over more ranks than attention, tokens of several replicas meet there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.layers.context import LayerContext
from megatron.layers.expert_router import shared_by
from megatron.parallel.autograd import Context, Node
from megatron.parallel.collectives import (
    all_reduce,
    gather_first,
    reduce_from_tensor_region,
    reduce_scatter_first,
)
from megatron.parallel.topology import Group


class ExpertRegion:
    """The ranks that divide each expert, seen from a rank of a layer.

    experts   the ranks that divide each expert
    folded    whether these are other ranks than those that divide attention
    gathered  the ranks whose tokens meet in this rank
    shares    number of shares into which the tokens of the tensor-parallel ranks are cut
    """

    def __init__(self, context: LayerContext) -> None:
        shared = shared_by(context)
        self.context = context
        self.tensor = context.tensor
        self.sequence_parallel = context.sequence_parallel
        self.experts: Group = context.tensor if shared.tensor is None else shared.tensor
        self.inputs = shared.inputs
        self.folded = self.experts.size != self.tensor.size
        self.gathered = self.experts if self.sequence_parallel else self.inputs
        self.shares = max(1, self.tensor.size // self.experts.size)
        self._share = self.tensor.rank // self.experts.size if self.shares > 1 else 0

    @property
    def masks(self) -> bool:
        """Return whether this rank has tokens that another share of the ranks sends."""
        return self.shares > 1 and not self.sequence_parallel

    def sent(self, tokens: int) -> int:
        """Return how many of `tokens` tokens, as `enter` returns them, this rank sends."""
        return -(-tokens // self.shares) if self.masks else tokens

    def enter(self, x: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens [s', b, h] that this rank sends, and weights and experts [s' b, k].

        x                 this rank's tokens  # [s(/tp), b, h]
        weights, experts  choices of the tokens of all tensor-parallel ranks  # [s b, k]
        """
        if self.tensor.size > 1 or self.inputs.size > 1:
            weights = _Choices.apply(weights, self)
            experts = self._cut(gather_first(experts, self.inputs), -1)
        if self.gathered.size > 1 or (self.tensor.size > 1 and not self.sequence_parallel):
            x = _Enter.apply(x, self)
        return x, weights, experts

    def leave(self, rows: Tensor) -> Tensor:
        """Return the sums of the ranks' results [s', b, h] for this rank's tokens x of `enter`."""
        rows = reduce_from_tensor_region(rows, self.gathered, sequence_parallel=True)
        return rows if self.sequence_parallel else reduce_from_tensor_region(rows, self.tensor)

    def _span(self, tokens: int) -> slice:
        each = -(-tokens // self.shares)
        return slice(self._share * each, min(tokens, (self._share + 1) * each))

    def _cut(self, choices: Tensor, none: int) -> Tensor:
        """Return this rank's share of choices [s b, k]; masked ones become `none`."""
        if self.shares == 1:
            return choices
        span = self._span(len(choices))
        if not self.masks:
            return choices[span].contiguous()
        masked = torch.full_like(choices, none)
        masked[span] = choices[span]
        return masked

    def _uncut(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the choices that `_cut` got; it may be changed in place."""
        if self.shares == 1 or self.masks:
            return self._cut(gradient, 0).contiguous().clone()
        full = gradient.new_zeros(len(gradient) * self.shares, *gradient.shape[1:])
        full[self._span(len(full))] = gradient
        return full


class _Enter(Node):
    """Tokens as input of every rank that divides the experts; their gradients are summed."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, region: ExpertRegion) -> Tensor:
        ctx.region = region
        ctx.partial_gradient = region.sequence_parallel  # for engine/gradients.py
        return gather_first(x, region.gathered) if region.gathered.size > 1 else x.view_as(x)

    @staticmethod
    def backward(ctx: Context, dx: Tensor) -> tuple[Tensor, None]:
        region = ctx.region
        gathered = region.gathered.size > 1
        dx = reduce_scatter_first(dx, region.gathered)
        if region.sequence_parallel or region.tensor.size == 1:
            return dx, None
        return all_reduce(dx if gathered else dx.contiguous().clone(), region.tensor), None


class _Choices(Node):
    """Weights of choices, whose gradients are sums over the shards and shares of the experts."""

    @staticmethod
    def forward(ctx: Context, weights: Tensor, region: ExpertRegion) -> Tensor:
        ctx.region = region
        ctx.partial_gradient = False
        weights = region._cut(gather_first(weights, region.inputs), 0)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        region = ctx.region
        whole = reduce_scatter_first(region._uncut(gradient), region.inputs)
        return all_reduce(whole, region.tensor), None
