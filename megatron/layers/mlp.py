"""The MLP of a transformer layer: two linear layers around an activation function."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.kernels.choose import fuses_activation
from megatron.kernels.ops.elementwise import Activation
from megatron.layers.context import Fill, LayerContext, constant
from megatron.layers.linear import (
    ColumnParallelLinear,
    RecomputeInput,
    RowParallelLinear,
    one_token,
)
from megatron.parallel.gradient_accumulator import wide


def activation_of(config: ModelConfig) -> Activation:
    """Return the model's activation function."""
    return Activation(
        config.activation, config.activation_func_clamp_value, config.glu_linear_offset
    )


class MLP(torch.nn.Module):
    """MLP, h -> ffn -> h: [s(/tp), b, h] -> ([s(/tp), b, h], bias or None).

    fill, output_fill     draw the first and the second weight (weight_fills)
    recompute_activation  recompute the output of the activation function in the backward pass
    summed                see RowParallelLinear
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        config: ModelConfig,
        fill: Fill,
        output_fill: Fill,
        recompute_activation: bool = False,
        summed: bool = True,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        ffn = config.ffn_hidden_size
        self.activation = activation_of(config)
        self.fused = context.fusions.bias_activation and fuses_activation(config)
        alphas = []
        for sign, start in (("p", 0.8), ("n", 0.3)) if config.xielu else ():
            initial = constant(math.log(math.expm1(start)))
            alpha = f"{name}.activation.alpha_{sign}"
            decays = config.weight_decay_on_xielu_alphas
            alphas.append(context.parameters.create(alpha, (1,), None, initial, decay=decays))
        self.alphas = nn.ParameterList(alphas)
        self.recompute_activation = recompute_activation
        up = (2, ffn, hidden) if config.gated else (ffn, hidden)
        bias = config.add_bias_linear
        self.dense_h_to_4h = ColumnParallelLinear(context, f"{name}.dense_h_to_4h", up, fill, bias)
        self.dense_4h_to_h = RowParallelLinear(
            context, f"{name}.dense_4h_to_h", (hidden, ffn), output_fill, bias, summed
        )

    def forward(
        self, x: Tensor, recompute_input: RecomputeInput = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the MLP of x; `recompute_input` recomputes x in the backward pass."""
        fused = self.fused and not one_token(x)
        up, bias = (
            self.dense_h_to_4h.apart(x, recompute_input)
            if fused
            else (self.dense_h_to_4h(x, recompute_input), None)
        )
        alphas = tuple(map(wide, self.alphas))
        activated = self.activation(up, bias, fused, *alphas)
        # Keeping `up` takes no additional memory: the activation function's backward pass needs it
        # anyway.
        recompute = None
        if self.recompute_activation:
            recompute = partial(self.activation, up.detach(), bias, fused, *alphas)
        result: tuple[Tensor, Tensor | None] = self.dense_4h_to_h(activated, recompute)
        return result
