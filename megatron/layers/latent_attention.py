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
from megatron.layers.attention import SoftmaxAttention
from megatron.layers.attention_unfused import cached_attention
from megatron.layers.context import CallContext, LayerContext, weight_fills
from megatron.layers.linear import (
    ColumnParallelLinear,
    RecomputeInput,
    ReplicatedLinear,
    RowParallelLinear,
)
from megatron.layers.norm import norm_of
from megatron.parallel.collectives import copy_to_tensor_region

_SAME = nn.Identity()


class LatentAttention(SoftmaxAttention):
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
        super().__init__(context, name, config, layer, recompute)
        model = config.model
        hidden = model.hidden_size
        heads = model.num_attention_heads
        rank = model.q_lora_rank
        fill, output_fill = weight_fills(model)
        self.context = context
        self.heads = heads // context.tensor.size
        self.latent = model.kv_lora_rank
        self.query_widths = model.qk_head_dim, model.qk_pos_emb_head_dim
        self.key_value_widths = model.qk_head_dim, model.v_head_dim
        self.layer = layer

        def norm(kind: str, width: int) -> nn.Module:
            has = model.qk_layernorm
            return norm_of(context, model, f"{name}.{kind}_layernorm", width) if has else _SAME

        self.query_down: ReplicatedLinear | None = None
        if rank is not None:
            self.query_down = ReplicatedLinear(context, f"{name}.query_down", (rank, hidden), fill)
            self.q_layernorm = norm("q", rank)
        # Without latent queries the projection gathers its input itself.
        shape = heads * sum(self.query_widths), hidden if rank is None else rank
        place = context if rank is None else context.alone()
        of_queries = f"{name}.query" if rank is None else f"{name}.query_up"
        self.query = ColumnParallelLinear(place, of_queries, shape, fill, False)
        shape = self.latent + model.qk_pos_emb_head_dim, hidden
        self.key_value_down = ReplicatedLinear(context, f"{name}.key_value_down", shape, fill)
        self.kv_layernorm = norm("kv", self.latent)
        shape = heads * sum(self.key_value_widths), self.latent
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
        queries = self.query(queries, recompute_input if self.query_down is None else None)
        plain, turned = queries.view(s, b, self.heads, -1).split(self.query_widths, dim=3)
        shared = shared.unsqueeze(2)  # [s, b, 1, rotated entries]
        if self.rotary is not None:
            angles = self.rotary.angles(s, call.position_ids, x.device)
            turned, shared = (self.rotary.rotate(x, angles) for x in (turned, shared))
        cache = call.cache if self.caches_latents else None
        stored = None
        if cache is not None:
            both = torch.cat((latent.unsqueeze(2), shared), dim=3)
            stored = cache.put(self.layer, both, both[..., :0])
            call = replace(call, cache=None)
        if cache is not None and stored is not None:
            out = self._absorbed(plain, turned, stored[0], cache.padding)
        else:
            k, v = (
                self.key_value(latent)
                .view(s, b, self.heads, -1)
                .split(self.key_value_widths, dim=3)
            )
            k = torch.cat((k, shared.expand(-1, -1, self.heads, -1)), dim=3)
            out = self.core(call, torch.cat((plain, turned), dim=3), k, v)
        result: tuple[Tensor, Tensor | None] = self.dense(out.reshape(s, b, -1))
        return result

    def _latents(self, x: Tensor, recompute_input: RecomputeInput) -> tuple[Tensor, Tensor, Tensor]:
        """Return the latents of queries (x without them), of keys and values, and the shared key.

        They are [s, b, ..], and one message gathers all three.
        """
        mixed = self.key_value_down(x, recompute_input)
        latent, shared = mixed.split((self.latent, mixed.shape[-1] - self.latent), dim=-1)
        latents = [self.kv_layernorm(latent), shared]
        if self.query_down is not None:
            latents.append(self.q_layernorm(self.query_down(x, recompute_input)))
        entered = copy_to_tensor_region(
            torch.cat(latents, dim=-1), self.context.tensor, self.context.sequence_parallel
        )
        latent, shared, *queries = entered.split([x.shape[-1] for x in latents], dim=-1)
        return queries[0] if queries else x, latent, shared

    def _absorbed(
        self, plain: Tensor, turned: Tensor, stored: Tensor, padding: Tensor | None
    ) -> Tensor:
        """Return the attention of each sample's newest token, [1, b, heads/tp, value width].

        plain, turned  parts of the queries  # [1, b, heads/tp, ..]
        stored         latents and shared keys so far  # [b, 1, n, latent + rotated entries]
        """
        weight = self.key_value.merged_weight().view(self.heads, -1, self.latent)
        to_keys, to_values = weight.split(self.key_value_widths, dim=1)
        queries = torch.cat((torch.einsum("sbnd,ndl->sbnl", plain, to_keys), turned), dim=3)
        scoring = self.core.scoring
        factor = scoring.factor(sum(self.query_widths))
        scoring = scoring._replace(scale=factor, sink=self.core.sink)
        out = cached_attention(queries, stored, stored[..., : self.latent], padding, scoring)
        return torch.einsum("sbnl,nvl->sbnv", out, to_values)
