"""Layer normalisation (Ba et al., arXiv 1607.06450) and RMS normalisation (Zhang and Sennrich, arXiv 1910.07467)."""
from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.layers.context import LayerContext
from megatron.layers.parameters import constant


class Norm(torch.nn.Module):
    """[.., h] -> [.., h], in the dtype of the weight; statistics in fp32.

    With `one_plus` the stored weight is the gain minus one, so that weight decay pulls the gain to one.
    """

    def __init__(
        self, context: LayerContext, name: str, hidden: int, kind: str, epsilon: float, one_plus: bool = False
    ) -> None:
        super().__init__()
        partial = context.sequence_parallel
        make = context.parameters.create
        self.epsilon, self.one_plus, self.rms = epsilon, one_plus, kind == "rmsnorm"
        start = constant(0.0 if one_plus else 1.0)
        self.weight = make(f"{name}.weight", (hidden,), None, start, decay=False, partial_gradient=partial)
        self.bias = (
            None
            if self.rms
            else make(f"{name}.bias", (hidden,), None, constant(0.0), decay=False, partial_gradient=partial)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.weight.dtype
        # A residual stream in fp32 beside bf16 weights: normalise in the wider type, hand on the narrower one.
        gain = self.weight.to(x.dtype) + 1.0 if self.one_plus else self.weight.to(x.dtype)
        if self.rms:
            return F.rms_norm(x, gain.shape, gain, self.epsilon).to(dtype)
        assert self.bias is not None
        return F.layer_norm(x, gain.shape, gain, self.bias.to(x.dtype), self.epsilon).to(dtype)
