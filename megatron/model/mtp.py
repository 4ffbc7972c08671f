"""Multi-token prediction: layers after the last one, each of which predicts a later token.

DeepSeek-V3, arXiv 2412.19437, section 2.2. Depth k = 1, 2, ... makes from the normed output
h' of depth k - 1 (at first the model's) at position i, and the embedding e of token i + k,

    h = norm(layer(projection [norm(e), norm(h')])),

from which the shared output layer predicts token i + k + 1. As in the released weights and in
Megatron-LM, the embedding comes first in the projection's input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import Config
from megatron.kernels.ops.elementwise import keyed_dropout
from megatron.layers.context import CallContext, LayerContext, weight_fills
from megatron.layers.norm import norm_of
from megatron.layers.transformer import TransformerLayer
from megatron.parallel.autograd import Context, Node
from megatron.parallel.keyed_random import Site
from megatron.protocols import Layer


class PredictionDepth(nn.Module):
    """One depth: (e, h'), both [s(/tp), b, h] -> h. `index` continues the layers' numbers.

    Every tensor-parallel rank has the whole projection, which costs a sixth of a dense layer.
    """

    def __init__(self, context: LayerContext, config: Config, index: int) -> None:
        super().__init__()
        model = config.model
        name = f"layers.{index}"
        width = model.hidden_size
        self.context = context
        self.index = index
        self.dropout = model.hidden_dropout
        self.wide = model.fp32_residual_connection
        self.enorm, self.hnorm, self.final_layernorm = (
            norm_of(context, model, f"{name}.{norm}", width)
            for norm in ("enorm", "hnorm", "final_layernorm")
        )
        fill, _ = weight_fills(model)
        shape = width, 2 * width
        self.projection = context.parameters.create(f"{name}.eh_proj.weight", shape, None, fill)
        make: Layer = config.pieces.layer or TransformerLayer
        self.layer = make(context, config, index)

    def forward(self, embedded: Tensor, hidden: Tensor, call: CallContext) -> Tensor:
        seed, row_layout = call.hidden_mask(embedded, self.index, Site.EMBEDDING, self.context)
        fused = self.context.fusions.bias_dropout
        embedded = keyed_dropout(embedded, self.dropout, seed, fused, row_layout)
        x = F.linear(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1), self.projection)
        x = self.layer(x.float() if self.wide else x, call)
        normed: Tensor = self.final_layernorm(x)
        return normed


def ahead(x: Tensor, k: int) -> Tensor:
    """Return x [b, s] moved by k positions, x[:, i + k] at i; zeros at the end."""
    return F.pad(x[:, k:], (0, min(k, x.shape[1])))


def mask_ahead(mask: Tensor, k: int, bounds: Tensor | None) -> Tensor:
    """Return the mask [b, s] of labels k positions ahead, within documents with these bounds."""
    moved = ahead(mask, k)
    if bounds is None:
        return moved
    positions = torch.arange(mask.numel(), device=mask.device, dtype=bounds.dtype)
    document = torch.searchsorted(bounds, positions, right=True).view_as(mask)
    return moved * (document == ahead(document, k))


class AddLosses(Node):
    """Return `values` [n], which the losses fill; its first entry has the gradient of their sum.

    factors  factor of each loss in the sum
    """

    @staticmethod
    def forward(ctx: Context, values: Tensor, factors: list[float], *losses: Tensor) -> Tensor:
        ctx.factors = factors
        return values.detach()  # shares the memory, which backward passes may fill later

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient[0] * factor for factor in ctx.factors)
