"""Layer normalisation (Ba et al., arXiv 1607.06450) and RMS normalisation (Zhang and Sennrich, arXiv 1910.07467)."""
from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F

from megatron.kernels.ops import norm as kernel
from megatron.layers.context import LayerContext
from megatron.layers.parameters import constant
from megatron.parallel.sink import wide


class Norm(torch.nn.Module):
    """[.., h] -> [.., h], in the dtype of the weight; statistics in fp32.

    With `one_plus` the stored weight is the gain minus one, so that weight decay pulls the gain to one.
    """

    def __init__(
        self, context: LayerContext, name: str, hidden: int, kind: str, epsilon: float, one_plus: bool = False
    ) -> None:
        super().__init__()
        make = context.parameters.create
        self.epsilon, self.one_plus, self.rms = epsilon, one_plus, kind == "rmsnorm"
        self.fused = context.fusions.rms_norm if self.rms else context.fusions.layer_norm
        self.apex: Any = None
        if context.fusions.apex_norm:
            self.apex = importlib.import_module("apex.normalization.fused_layer_norm")
        start = constant(0.0 if one_plus else 1.0)
        self.weight = make(f"{name}.weight", (hidden,), None, start, decay=False)
        self.bias = None if self.rms else make(f"{name}.bias", (hidden,), None, constant(0.0), decay=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused and x.dtype == self.weight.dtype:
            if self.bias is None:
                return kernel.rms_norm(x, wide(self.weight), self.epsilon, self.one_plus)
            return kernel.layer_norm(x, wide(self.weight), wide(self.bias), self.epsilon, self.one_plus)
        if self.apex is not None and x.dtype == self.weight.dtype:
            return self._by_apex(x)
        return self._by_torch(x)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); one pass where the kernel runs."""
        if self.fused and x.dtype == residual.dtype == self.weight.dtype:
            if self.bias is None:
                return kernel.add_rms_norm(x, residual, wide(self.weight), self.epsilon, self.one_plus)
            weights = wide(self.weight), wide(self.bias)
            return kernel.add_layer_norm(x, residual, *weights, self.epsilon, self.one_plus)
        total = residual + x
        return self(total), total

    def _by_torch(self, x: torch.Tensor) -> torch.Tensor:
        dtype, gain = self.weight.dtype, wide(self.weight)
        # A residual stream in fp32 beside bf16 weights: normalise in the wider type, hand on the narrower one.
        x = x.to(torch.promote_types(x.dtype, gain.dtype))
        gain = gain.to(x.dtype) + 1.0 if self.one_plus else gain.to(x.dtype)
        if self.bias is None:
            return F.rms_norm(x, gain.shape, gain, self.epsilon).to(dtype)
        return F.layer_norm(x, gain.shape, gain, wide(self.bias).to(x.dtype), self.epsilon).to(dtype)

    def _by_apex(self, x: torch.Tensor) -> torch.Tensor:
        gain = self.weight + 1.0 if self.one_plus else self.weight
        if self.bias is None:
            return self.apex.fused_rms_norm_affine(x, gain, gain.shape, eps=self.epsilon)
        return self.apex.fused_layer_norm_affine(x, gain, self.bias, gain.shape, eps=self.epsilon)
