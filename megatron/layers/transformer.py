"""One transformer layer: attention and feed-forward part, each with norm before, dropout and residual after."""
from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron.layers.attention import SelfAttention
from megatron.layers.context import CallContext, LayerContext
from megatron.layers.dropout import bias_dropout_add
from megatron.layers.linear import Again
from megatron.layers.mlp import MLP
from megatron.layers.norm import Norm
from megatron.layers.parameters import Fill, normal, xavier_uniform
from megatron.layers.rotary import RotaryEmbedding
from megatron.parallel.random import Site

if TYPE_CHECKING:
    from megatron.config import ModelConfig


def weight_fills(config: ModelConfig) -> tuple[Fill, Fill]:
    """How weights start, and how those do that write into the residual stream.

    N(0, std^2), and N(0, std^2 / 2L) for the second kind (Radford et al., GPT-2, section 2.3), or Xavier's for all.
    """
    if config.init_method_xavier_uniform:
        return xavier_uniform(), xavier_uniform()
    std = config.init_method_std
    return normal(std), normal(std / math.sqrt(2.0 * config.num_layers))


class TransformerLayer(torch.nn.Module):
    """[s(/tp), b, h] -> [s(/tp), b, h]. `index` counts from 0 over the whole model.

    recompute  which of core_attn, mlp_act and layernorm are made again in the backward pass instead of being kept
    """

    def __init__(
        self, context: LayerContext, config: ModelConfig, index: int, rotary: RotaryEmbedding | None = None, *,
        recompute: Collection[str] = (), attention: str = "torch",
    ) -> None:
        super().__init__()
        name = f"layers.{index}"
        fill, output_fill = weight_fills(config)

        def norm(part: str) -> Norm:
            return Norm(
                context, f"{name}.{part}", config.hidden_size, config.normalization, config.layernorm_epsilon,
                config.apply_layernorm_1p,
            )

        self.index, self.dropout = index, config.hidden_dropout
        self.fused_dropout, self.context = context.fusions.bias_dropout, context
        self.residual_after_norm = config.apply_residual_connection_post_layernorm
        # The residual stream would keep the norm's output anyway.
        self.norms_again = "layernorm" in recompute and not self.residual_after_norm
        self.input_layernorm = norm("input_layernorm")
        self.self_attention = SelfAttention(
            context, f"{name}.self_attention", config, index, fill, output_fill, rotary, "core_attn" in recompute,
            attention,
        )
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.mlp = MLP(context, f"{name}.mlp", config, fill, output_fill, "mlp_act" in recompute)

    def forward(self, x: torch.Tensor, call: CallContext) -> torch.Tensor:
        normed = self.input_layernorm(x)
        residual = normed if self.residual_after_norm else x
        out, bias = self.self_attention(normed, call, self._again(self.input_layernorm, x))
        drops = call.dropout is not None and self.dropout > 0.0
        if bias is None and not drops and not self.residual_after_norm:
            normed, x = self.post_attention_layernorm.add(out, residual)  # one kernel, where there is one
        else:
            x = self._add(out, bias, residual, call, Site.ATTENTION_OUTPUT)
            normed = self.post_attention_layernorm(x)
        residual = normed if self.residual_after_norm else x
        out, bias = self.mlp(normed, self._again(self.post_attention_layernorm, x))
        return self._add(out, bias, residual, call, Site.MLP_OUTPUT)

    def _again(self, norm: Norm, x: torch.Tensor) -> Again:
        """How to make norm(x) again, where that is wanted; the norm's gradient keeps x anyway."""
        return partial(norm, x.detach()) if self.norms_again else None

    def _add(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, call: CallContext, site: Site
    ) -> torch.Tensor:
        """residual + dropout(x + bias)."""
        seed, place = call.hidden_mask(x, self.index, site, self.context)
        return bias_dropout_add(x, bias, residual, self.dropout, seed, self.fused_dropout, place)
