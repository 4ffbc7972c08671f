"""The feed-forward part of a layer: h -> ffn -> h."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from megatron.kernels.ops.activation import bias_activation
from megatron.layers.context import LayerContext
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.layers.parameters import Fill

if TYPE_CHECKING:
    from megatron.config import ModelConfig


def activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    """[.., ffn] -> [.., ffn]; for 'swiglu' [.., 2 ffn], gate before value, -> [.., ffn].

    'gelu' is the tanh form (Hendrycks and Gimpel, arXiv 1606.08415, section 2), which GPT-2 and Megatron's fused kernel
    use; 'openai_gelu' names the same function. 'swiglu': Shazeer, arXiv 2002.05202. 'squared_relu': So et al., arXiv
    2109.08668.
    """
    if kind == "swiglu":
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value
    if kind == "squared_relu":
        return F.relu(x).square()
    assert kind in ("gelu", "openai_gelu"), f"unknown activation {kind}"
    return F.gelu(x, approximate="tanh")


class MLP(torch.nn.Module):
    """[s(/tp), b, h] -> ([s(/tp), b, h], bias or None)."""

    def __init__(self, context: LayerContext, name: str, config: ModelConfig, fill: Fill, output_fill: Fill) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        self.activation, self.fused = config.activation, context.fusions.bias_activation
        up = (2, ffn, hidden) if self.activation == "swiglu" else (ffn, hidden)
        bias = config.add_bias_linear
        self.dense_h_to_4h = ColumnParallelLinear(context, f"{name}.dense_h_to_4h", up, fill, bias)
        self.dense_4h_to_h = RowParallelLinear(context, f"{name}.dense_4h_to_h", (hidden, ffn), output_fill, bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.fused:
            up, bias = self.dense_h_to_4h.apart(x)
            return self.dense_4h_to_h(bias_activation(up, bias, self.activation))
        return self.dense_4h_to_h(activate(self.dense_h_to_4h(x), self.activation))
