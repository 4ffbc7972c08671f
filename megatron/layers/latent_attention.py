"""Multi-head latent attention (DeepSeek-AI, arXiv 2405.04434, section 2.1).

Keys and values of all heads are projections of one latent vector for each token, and queries may be
projections of another. Each head has a part without positions; a rotated part of the queries meets
a rotated key that all heads share. Only the latent and this key are cached in generation: they take
the place of keys and values if the projections to these are applied to queries and outputs instead.

All tensor ranks compute the latents, with sequence parallelism of their own tokens, which are then
gathered; the ranks divide the heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.config import Config
from megatron.layers.attention import CoreAttention, add_sinks
from megatron.layers.attention_unfused import cached_attention
from megatron.layers.context import CallContext, LayerContext, weight_fills
from megatron.layers.linear import (
    ColumnParallelLinear,
    RecomputeInput,
    ReplicatedLinear,
    RowParallelLinear,
)
from megatron.layers.norm import Norm, norm_of
from megatron.layers.positions import RotaryEmbedding
from megatron.parallel.collectives import copy_to_tensor_region


class LatentAttention(nn.Module):
    """Multi-head latent attention: [s(/tp), b, h] -> ([s(/tp), b, h], bias or None).

    The arguments are those of SelfAttention. Rows of the projections from latents are ordered
    [head][part without positions, rotated part] for queries and [head][key, value] for the others,
    the entries of the other latent [latent, rotated key].

    caches_latents  False: cache keys and values of all heads, which takes more memory
    """

    caches_latents = True

    def __init__(
        self,
        context: LayerContext,
        name: str,
        config: Config,
        layer: int,
        recompute: bool = False,
        summed: bool = True,
    ) -> None:
        super().__init__()
        model = config.model
        hidden = model.hidden_size
        heads = model.num_attention_heads
        rank = model.q_lora_rank
        fill, output_fill = weight_fills(model)
        self.context = context
        self.heads = heads // context.tensor.size
        self.latent = model.kv_lora_rank
        self.parts = model.qk_head_dim, model.qk_pos_emb_head_dim
        self.widths = model.qk_head_dim, model.v_head_dim
        self.layer = layer
        self.rotary: RotaryEmbedding | None = None
        kind = model.layer_kind(layer)
        if kind.position_embedding_type == "rope":
            scaled = replace(model, rope_scaling=kind.rope_scaling)
            self.rotary = context.rotary(model.rotated_entries, kind.rotary_base, scaled)
        self.core = CoreAttention(context, config, layer, recompute)
        add_sinks(self, self.core, context, name, model)
        self.query_down: ReplicatedLinear | None = None
        self.q_layernorm: Norm | None = None
        self.kv_layernorm: Norm | None = None
        if rank is not None:
            self.query_down = ReplicatedLinear(context, f"{name}.query_down", (rank, hidden), fill)
        if rank is not None and model.qk_layernorm:
            self.q_layernorm = norm_of(context, model, f"{name}.q_layernorm", rank)
        # Without latent queries the projection gathers its input itself.
        shape = heads * sum(self.parts), hidden if rank is None else rank
        place = context if rank is None else context.alone()
        of_queries = f"{name}.query" if rank is None else f"{name}.query_up"
        self.query = ColumnParallelLinear(place, of_queries, shape, fill, False)
        shape = self.latent + model.qk_pos_emb_head_dim, hidden
        self.key_value_down = ReplicatedLinear(context, f"{name}.key_value_down", shape, fill)
        if model.qk_layernorm:
            self.kv_layernorm = norm_of(context, model, f"{name}.kv_layernorm", self.latent)
        shape = heads * sum(self.widths), self.latent
        self.key_value = ColumnParallelLinear(
            context.alone(), f"{name}.key_value_up", shape, fill, False
        )
        self.dense = RowParallelLinear(
            context,
            f"{name}.dense",
            (hidden, heads * model.v_head_dim),
            output_fill,
            model.attention_output_bias,
            summed,
        )

    def forward(
        self, x: Tensor, call: CallContext, recompute_input: RecomputeInput = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention over x; `recompute_input` recomputes x in the backward pass."""
        queries, latent, shared = self._latents(x, recompute_input)
        s, b = latent.shape[:2]
        if self.query_down is None:
            queries = self.query(x, recompute_input)
        else:
            queries = self.query(queries)
        plain, turned = queries.view(s, b, self.heads, -1).split(self.parts, dim=3)
        shared = shared.unsqueeze(2)  # [s, b, 1, rotated entries]
        if self.rotary is not None:
            angles = self.rotary.angles(s, call.position_ids, x.device)
            turned, shared = (self.rotary.rotate(part, angles) for part in (turned, shared))
        if call.cache is not None and self.caches_latents:
            both = torch.cat((latent.unsqueeze(2), shared), dim=3)
            if (stored := call.cache.put(self.layer, both, both[..., :0])) is not None:
                out = self._absorbed(plain, turned, stored[0], call)
                result: tuple[Tensor, Tensor | None] = self.dense(out.reshape(s, b, -1))
                return result
            call = replace(call, cache=None)
        k, v = self.key_value(latent).view(s, b, self.heads, -1).split(self.widths, dim=3)
        k = torch.cat((k, shared.expand(-1, -1, self.heads, -1)), dim=3)
        out = self.core(call, torch.cat((plain, turned), dim=3), k, v)
        result = self.dense(out.reshape(s, b, -1))
        return result

    def _latents(self, x: Tensor, recompute_input: RecomputeInput) -> tuple[Tensor, Tensor, Tensor]:
        """Return the latents of queries (x without them), of keys and values, and the shared key.

        They are [s, b, ..], and one message gathers all three.
        """
        mixed = self.key_value_down(x, recompute_input)
        latent, shared = mixed.split((self.latent, mixed.shape[-1] - self.latent), dim=-1)
        parts = [latent if self.kv_layernorm is None else self.kv_layernorm(latent), shared]
        if self.query_down is not None:
            queries = self.query_down(x, recompute_input)
            parts.append(queries if self.q_layernorm is None else self.q_layernorm(queries))
        entered = copy_to_tensor_region(
            torch.cat(parts, dim=-1), self.context.tensor, self.context.sequence_parallel
        )
        latent, shared, *others = entered.split([part.shape[-1] for part in parts], dim=-1)
        return others[0] if others else x, latent, shared

    def _absorbed(self, plain: Tensor, turned: Tensor, stored: Tensor, call: CallContext) -> Tensor:
        """Return the attention of each sample's newest token, [1, b, heads/tp, value width].

        plain, turned  parts of the queries  # [1, b, heads/tp, ..]
        stored         latents and shared keys so far  # [b, 1, n, latent + rotated entries]
        """
        assert call.cache is not None, "there are stored latents"
        weight = self.key_value.merged_weight().view(self.heads, -1, self.latent)
        to_keys, to_values = weight.split(self.widths, dim=1)
        queries = torch.cat((torch.einsum("sbnd,ndl->sbnl", plain, to_keys), turned), dim=3)
        scoring = self.core.scoring
        factor = scoring.factor(sum(self.parts))
        scoring = scoring._replace(scale=factor, sink=self.core.sink)
        values = stored[..., : self.latent]
        out = cached_attention(queries, stored, values, call.cache.padding, scoring)
        return torch.einsum("sbnl,nvl->sbnv", out, to_values)
