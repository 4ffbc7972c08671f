"""LayerNorm and RMSNorm, including norms of rows that are sharded over the tensor ranks."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.kernels.ops.elementwise import wider
from megatron.kernels.ops.norm import add_norm, norm
from megatron.layers.context import LayerContext, constant
from megatron.layers.linear import one_token
from megatron.parallel.autograd import Context, Node
from megatron.parallel.collectives import all_reduce
from megatron.parallel.gradient_accumulator import wide
from megatron.parallel.sharding import Rows
from megatron.parallel.topology import Group


class Norm(nn.Module):
    """LayerNorm or RMSNorm: [.., h] -> [.., h].

    Ba et al., arXiv 1607.06450; Zhang and Sennrich, arXiv 1910.07467. The result has the dtype of
    the weight; statistics are in fp32. With `one_plus` the stored weight is the gain minus one.
    With a `shard`, which is this rank's range of h, the statistics still cover the full rows.

    kind  "layernorm" or "rmsnorm"
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        hidden: int,
        kind: str,
        epsilon: float,
        one_plus: bool = False,
        shard: Rows | None = None,
    ) -> None:
        super().__init__()
        make = context.parameters.create
        dim = None if shard is None else 0
        self.group = context.tensor if shard is not None and context.tensor.size > 1 else None
        self.epsilon = epsilon
        self.one_plus = one_plus
        self.rms = kind == "rmsnorm"
        self.fused = context.fusions.rms_norm if self.rms else context.fusions.layer_norm
        self.apex: Any = None
        if context.fusions.apex_norm:
            self.apex = importlib.import_module("apex.normalization.fused_layer_norm")
        start = constant(0.0 if one_plus else 1.0)
        self.weight = make(f"{name}.weight", (hidden,), dim, start, rows=shard, decay=False)
        self.bias: nn.Parameter | None = None
        if not self.rms:
            zero = constant(0.0)
            self.bias = make(f"{name}.bias", (hidden,), dim, zero, rows=shard, decay=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.group is not None:
            weight = wide(self.weight)
            bias = None if self.bias is None else wide(self.bias)
            return _NormOverRanks.apply(
                x, weight, bias, self.epsilon, float(self.one_plus), self.group
            ).to(self.weight.dtype)
        weight = self.weight
        if self.fused and x.dtype == weight.dtype:
            bias = self.bias
            bias = None if bias is None else wide(bias)
            return norm(x, wide(weight), bias, self.epsilon, self.one_plus, self.rms)
        if self.apex is not None and x.dtype == weight.dtype:
            return self._by_apex(x)
        return self._by_torch(x)

    def fuses(self, x: Tensor, residual: Tensor) -> bool:
        """Return whether the kernel supports `add` for x and the residual."""
        return self.fused and x.dtype == residual.dtype == self.weight.dtype

    def add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + bias + residual), x + bias + residual) in one pass.

        `bias`: the bias of the layer that computed x.
        """
        shift, of_norm = (None if each is None else wide(each) for each in (bias, self.bias))
        rest = self.epsilon, self.one_plus, self.rms
        return add_norm(x, shift, residual, wide(self.weight), of_norm, *rest)

    def _by_torch(self, x: Tensor) -> Tensor:
        dtype = self.weight.dtype
        gain: Tensor = self.weight
        bias: Tensor | None = self.bias
        if not one_token(x) or x.dtype != dtype or self.one_plus:
            gain = wide(gain)
            # If the residual stream is fp32 and the weights are bf16, normalize in fp32 and return
            # bf16.
            x = x.to(torch.promote_types(x.dtype, gain.dtype))
            gain = gain.to(x.dtype) + 1.0 if self.one_plus else gain.to(x.dtype)
            bias = None if bias is None else wide(bias).to(x.dtype)
        if bias is None:
            return F.rms_norm(x, gain.shape, gain, self.epsilon).to(dtype)
        return F.layer_norm(x, gain.shape, gain, bias, self.epsilon).to(dtype)

    def _by_apex(self, x: Tensor) -> Tensor:
        gain = self.weight + 1.0 if self.one_plus else self.weight
        normed: Tensor
        if self.bias is None:
            normed = self.apex.fused_rms_norm_affine(x, gain, gain.shape, eps=self.epsilon)
        else:
            normed = self.apex.fused_layer_norm_affine(
                x, gain, self.bias, gain.shape, eps=self.epsilon
            )
        return normed


class L2Norm(nn.Module):
    """Norm without weights, x / sqrt(mean(x^2) + epsilon): [.., d] -> [.., d], in x's dtype.

    Statistics are in fp32. Megatron-LM's --qk-l2-norm.
    """

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(wider(x), x.shape[-1:], eps=self.epsilon).to(x.dtype)


def norm_of(
    context: LayerContext, model: ModelConfig, name: str, width: int, shard: Rows | None = None
) -> Norm:
    """Make a norm of the model's kind over `width` entries; `shard`: see Norm."""
    kind = model.normalization
    epsilon = model.layernorm_epsilon
    return Norm(context, name, width, kind, epsilon, model.apply_layernorm_1p, shard)


class _NormOverRanks(Node):
    """Norm of x [.., h/tp], a shard of each row, in x's dtype; without bias an RMS norm."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        plus: float,
        group: Group,
    ) -> Tensor:
        width = x.shape[-1] * group.size
        centred = wider(x)
        mean = None
        if bias is not None:
            mean = all_reduce(centred.sum(-1, keepdim=True), group) / width
            centred = centred - mean
        squares = all_reduce(centred.square().sum(-1, keepdim=True), group)
        rstd = (squares / width + epsilon).rsqrt()
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.plus = plus
        ctx.group = group
        y = centred * rstd * (wider(weight) + plus)
        return (y if bias is None else y + wider(bias)).to(x.dtype)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dy = wider(dy)
        normed = (wider(x) if mean is None else wider(x) - mean) * rstd
        dweight = (dy * normed).sum_to_size(weight.shape).to(weight.dtype)
        dbias = None if mean is None else dy.sum_to_size(weight.shape).to(weight.dtype)
        g = dy * (wider(weight) + ctx.plus)
        sums = torch.stack(((g * normed).sum(-1), g.sum(-1))[: 1 if mean is None else 2])
        sums = all_reduce(sums, ctx.group).unsqueeze(-1) / (x.shape[-1] * ctx.group.size)
        g = g - normed * sums[0]
        if mean is not None:
            g = g - sums[1]
        return (rstd * g).to(x.dtype), dweight, dbias, None, None, None
