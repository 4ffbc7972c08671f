"""Causal self-attention with heads cut over the tensor-parallel group."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron.layers.context import CallContext, LayerContext
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.layers.masks import alibi_bias, alibi_slopes, document_mask
from megatron.layers.parameters import Fill
from megatron.layers.rotary import RotaryEmbedding
from megatron.parallel.random import Site, seeded

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.config import ModelConfig


def torch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None,
    document_ids: torch.Tensor | None, dropout: float,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v through torch's scaled_dot_product_attention.

    q [s, b, heads, d], k and v [s, b, kv heads, d] -> [s, b, heads, d].
    """
    mask = document_mask(document_ids) if document_ids is not None else None
    if slopes is not None:
        mask = alibi_bias(slopes, q.shape[0], mask, q.dtype)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, heads, s, d]
    grouped = q.shape[1] != k.shape[1]
    if grouped and mask is not None:
        # On a GPU no kernel takes both a mask and groups: without this the scores [b, heads, s, s] would be stored.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped
    )
    return out.permute(2, 0, 1, 3)


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None,
    document_ids: torch.Tensor | None, dropout: float,
) -> torch.Tensor:
    """The same through the flash-attn package; documents become sequences of their own, so no mask is stored."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [b, s, heads, d]
    if document_ids is None:
        out = flash_attn_func(q, k, v, dropout_p=dropout, causal=True, alibi_slopes=slopes)
    else:
        b, s = document_ids.shape
        starts = torch.ones_like(document_ids, dtype=torch.bool)
        starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        first = starts.flatten().nonzero().flatten().to(torch.int32)
        bounds = F.pad(first, (0, 1), value=b * s)
        flat = [x.reshape(b * s, *x.shape[2:]) for x in (q, k, v)]
        out = flash_attn_varlen_func(
            *flat, bounds, bounds, s, s, dropout_p=dropout, causal=True, alibi_slopes=slopes
        ).view(b, s, *q.shape[2:])
    return out.transpose(0, 1)


class SelfAttention(torch.nn.Module):
    """[s(/tp), b, h] -> ([s(/tp), b, h], bias or None).

    The rows of the fused weight are ordered [key-value group][queries ..., key, value][head dimension], so a cut along
    them gives every rank whole groups (the order of Megatron checkpoints from version 2.0 on).
    """

    def __init__(
        self, context: LayerContext, name: str, config: ModelConfig, layer: int, fill: Fill, output_fill: Fill,
        rotary: RotaryEmbedding | None, recompute: bool, use_flash: bool,
    ) -> None:
        super().__init__()
        heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.kv_channels
        tp = context.tensor.size
        self.layer, self.rotary, self.recompute = layer, rotary, recompute
        self.dropout, self.sharded = config.attention_dropout, tp > 1
        self.groups, self.queries, self.head_dim = groups // tp, heads // groups, d
        self.core: Callable[..., torch.Tensor] = flash_attention if use_flash else torch_attention
        bias = config.add_bias_linear
        self.query_key_value = ColumnParallelLinear(
            context, f"{name}.query_key_value", ((heads + 2 * groups) * d, config.hidden_size), fill, bias
        )
        self.dense = RowParallelLinear(context, f"{name}.dense", (config.hidden_size, heads * d), output_fill, bias)
        self.slopes: torch.Tensor | None = None
        if config.position_embedding_type == "alibi":
            self.slopes = alibi_slopes(heads).chunk(tp)[context.tensor.rank].to(context.parameters.device)

    def _core(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None, seed: int | None
    ) -> torch.Tensor:
        if seed is None or self.dropout == 0.0:
            return self.core(q, k, v, self.slopes, document_ids, 0.0)
        with seeded(q.device, seed):
            return self.core(q, k, v, self.slopes, document_ids, self.dropout)

    def forward(self, x: torch.Tensor, call: CallContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        mixed = self.query_key_value(x)  # [s, b, groups/tp * (queries + 2) * d]
        s, b = mixed.shape[:2]
        mixed = mixed.view(s, b, self.groups, self.queries + 2, self.head_dim)
        q = mixed[:, :, :, :-2].reshape(s, b, self.groups * self.queries, self.head_dim)
        k, v = mixed[:, :, :, -2], mixed[:, :, :, -1]
        if self.rotary is not None:
            angles = self.rotary.angles(s, call.position_ids, x.device)
            q, k = self.rotary.rotate(q, angles), self.rotary.rotate(k, angles)
        seed = call.dropout.at(self.layer, Site.ATTENTION, self.sharded) if call.dropout else None
        if self.recompute and torch.is_grad_enabled():
            out = checkpoint(
                self._core, q, k, v, call.document_ids, seed, use_reentrant=False, preserve_rng_state=False
            )
        else:
            out = self._core(q, k, v, call.document_ids, seed)
        return self.dense(out.reshape(s, b, -1))
