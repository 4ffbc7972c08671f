"""Custom layer: parallel attention and MLP after one norm, with normalised queries and keys.

Both features are those of ViT-22B (Dehghani et al., arXiv 2302.05442, section 2). The parallel
linear layers shard the weights over tensor-parallel ranks.
"""

from __future__ import annotations

import torch

from megatron.config import Config
from megatron.layers.attention import CoreAttention
from megatron.layers.context import CallContext, LayerContext
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.layers.transformer import MLP, Norm, bias_dropout_add, weight_fills
from megatron.parallel.keyed_random import Site


class ParallelLayer(torch.nn.Module):
    def __init__(self, context: LayerContext, config: Config, index: int) -> None:
        super().__init__()
        model = config.model
        name = f"layers.{index}"
        h = model.hidden_size
        d = model.kv_channels
        fill, output_fill = weight_fills(model)
        inner = model.num_attention_heads * d
        self.context = context
        self.index = index
        self.dropout = model.hidden_dropout
        self.head_dim = d
        self.norm = Norm(context, f"{name}.norm", h, model.normalization, model.layernorm_epsilon)
        self.q, self.k, self.v = (
            ColumnParallelLinear(context, f"{name}.{x}", (inner, h), fill, bias=False)
            for x in "qkv"
        )
        self.q_norm, self.k_norm = (
            Norm(context, f"{name}.{x}_norm", d, "rmsnorm", model.layernorm_epsilon) for x in "qk"
        )
        self.rotary = context.rotary(d, model.rotary_base)
        self.attention = CoreAttention(context, config, index)
        self.dense = RowParallelLinear(
            context, f"{name}.dense", (h, inner), output_fill, bias=False
        )
        self.mlp = MLP(context, f"{name}.mlp", model, fill, output_fill)

    def forward(self, x: torch.Tensor, call: CallContext) -> torch.Tensor:
        normed = self.norm(x)  # [s(/tp), b, h]
        q, k, v = (
            projection(normed).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q, self.k, self.v)
        )
        # q, k, v [s, b, heads/tp, d]
        angles = self.rotary.angles(q.shape[0], call.position_ids, q.device)
        q = self.rotary.rotate(self.q_norm(q), angles)
        k = self.rotary.rotate(self.k_norm(k), angles)
        attended, _ = self.dense(self.attention(call, q, k, v).flatten(2))  # [s(/tp), b, h]
        out, bias = self.mlp(normed)
        seed, row_layout = call.hidden_mask(x, self.index, Site.MLP_OUTPUT, self.context)
        return bias_dropout_add(
            attended + out,
            bias,
            x,
            self.dropout,
            seed,
            self.context.fusions.bias_dropout,
            row_layout,
        )


PIECES = {"layer": ParallelLayer}
