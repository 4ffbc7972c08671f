"""The feed-forward part of a layer: h -> ffn -> h."""
from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from megatron.kernels.ops.activation import bias_activation
from megatron.layers.context import LayerContext
from megatron.layers.linear import Again, ColumnParallelLinear, RowParallelLinear
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
    """[s(/tp), b, h] -> ([s(/tp), b, h], bias or None).

    activation_again  the output of the activation function is made again in the backward pass instead of being kept
    """

    def __init__(
        self, context: LayerContext, name: str, config: ModelConfig, fill: Fill, output_fill: Fill,
        activation_again: bool = False,
    ) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        self.activation, self.fused = config.activation, context.fusions.bias_activation
        self.activation_again = activation_again
        up = (2, ffn, hidden) if self.activation == "swiglu" else (ffn, hidden)
        bias = config.add_bias_linear
        self.dense_h_to_4h = ColumnParallelLinear(context, f"{name}.dense_h_to_4h", up, fill, bias)
        self.dense_4h_to_h = RowParallelLinear(context, f"{name}.dense_4h_to_h", (hidden, ffn), output_fill, bias)

    def forward(self, x: torch.Tensor, again: Again = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`again` makes x."""
        up, bias = self.dense_h_to_4h.apart(x, again) if self.fused else (self.dense_h_to_4h(x, again), None)
        activated = self._activate(up, bias)
        if not self.activation_again:
            return self.dense_4h_to_h(activated)
        # The gradient of the activation function keeps `up` anyway.
        return self.dense_4h_to_h(activated, partial(self._activate, up.detach(), bias))

    def _activate(self, up: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return bias_activation(up, bias, self.activation) if self.fused else activate(up, self.activation)
