"""Causal self-attention with heads sharded over the tensor-parallel group.

Its implementations are in attention_fused.py, attention_blocked.py and attention_unfused.py, and
for context-parallel ranks in ring.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.kernels.choose import AttentionFeatures, choose_attention
from megatron.kernels.library import nodes_for, recompute_later
from megatron.kernels.ops.attention import NO_WINDOW
from megatron.layers.attention_blocked import blocked_attention, update_largest
from megatron.layers.attention_fused import flash_attention, torch_attention
from megatron.layers.attention_unfused import Scoring, cached_attention, unfused_attention
from megatron.layers.context import (
    CallContext,
    LayerContext,
    change_initial,
    normal,
    weight_fills,
)
from megatron.layers.linear import ColumnParallelLinear, RecomputeInput, RowParallelLinear
from megatron.layers.norm import L2Norm, Norm, norm_of
from megatron.layers.positions import RotaryEmbedding
from megatron.parallel.gradient_accumulator import wide
from megatron.parallel.hashing import mix
from megatron.parallel.keyed_random import Site, seeded
from megatron.parallel.sharding import Rows


def padded(x: Tensor, width: int) -> Tensor:
    """Pad the last dimension of x with zeros to `width` entries."""
    more = width - x.shape[-1]
    return F.pad(x, (0, more)) if more else x


class CoreAttention:
    """Causal attention of one layer, with the scoring and dropout that `config` sets.

    layer      index of the layer in the model
    recompute  whether to recompute attention in the backward pass

    attention  name of the implementation (choose_attention)
    sink       logits of this tensor rank's attention sinks (--softmax-type), [heads/tp], or None
    largest    the largest scaled product q k^T of each head in the training passes of this step, at
               least 0, for QK-clip: fp32 [heads/tp]; None: not recorded
    """

    def __init__(
        self,
        context: LayerContext,
        config: Config,
        layer: int,
        recompute: bool = False,
    ) -> None:
        if not isinstance(config, Config):
            raise ConfigError(
                "CoreAttention takes the full settings, from which it chooses its kernels: pass "
                f"config, not config.model (it has a {type(config).__name__})"
            )
        model = config.model
        self.heads = model.num_attention_heads
        self.layer = layer
        self.recompute = recompute
        self.dropout = model.attention_dropout
        self.context_parallel = context.context_parallel
        self.heads_shard = context.heads_shard
        self.attention = choose_attention(
            config.kernels,
            context.parameters.device,
            config.precision.dtype_name,
            model.seq_length,
            AttentionFeatures.of_layer(config, layer),
        )
        window = model.window(layer)
        keys = model.seq_length if window is None else min(window + 1, model.seq_length)
        widths = model.kv_channels + model.value_channels
        context.core_flops[layer] += 2 * keys * self.heads * widths  # scores, and sums of values
        self.scoring = Scoring(
            model.softmax_scale,
            model.attention_logit_softcapping or 0.0,
            NO_WINDOW if window is None else window,
            context.alibi(self.heads) if model.position_embedding_type == "alibi" else None,
            fusions=context.fusions,
        )
        self.largest: Tensor | None = None
        self.sink: Tensor | None = None
        if model.softmax_type == "off-by-one":
            heads = self.heads // context.tensor.size
            self.sink = torch.zeros(heads, device=context.parameters.device)

    def __call__(self, call: CallContext, *tensors: Tensor) -> Tensor:
        """Map q [s, b, heads/tp, d], k and v [s, b, kv heads/tp, d] to [s, b, heads/tp, d].

        v, and then the result, may have a smaller d.

        With fewer kv heads than tensor ranks, each rank has one. Without a cache or context
        parallelism, blocked attention also accepts the fused projection of all three,
        [s, b, groups/tp, queries + 2, d].
        """
        if call.cache is not None:
            q, k, v = tensors
            if (stored := call.cache.put(self.layer, k, v)) is not None:
                scoring = self.scoring._replace(sink=self.sink)
                return cached_attention(q, *stored, call.cache.padding, scoring)
        if self.context_parallel is not None:
            assert self.context_parallel.attend is not None, "the model sets it"
            return self.context_parallel.attend(self.context_parallel, self, call, *tensors)
        return self.within(call, None, *tensors)

    def scoring_of(self, call: CallContext, positions: int) -> Scoring:
        """Return the scoring of a call with weights [b, this rank's heads, positions, keys]."""
        sink = self.sink
        if sink is not None:
            exchange = self.context_parallel
            sink = sink if exchange is None else sink.chunk(exchange.heads)[exchange.head_rank]
            sink = wide(sink)
        scoring = self.scoring._replace(documents=call.documents, sink=sink)
        if call.dropout is None:
            return scoring
        row_layout = call.dropout.weights(
            positions, self.heads // self.heads_shard[1], *self.heads_shard
        )
        seed = call.dropout.at(self.layer, Site.ATTENTION)
        return scoring._replace(dropout=self.dropout, seed=seed, row_layout=row_layout)

    def within(self, call: CallContext, heads: slice | None, *tensors: Tensor) -> Tensor:
        """Return attention within full sequences; `tensors` as in __call__, for all positions.

        heads  which of the tensor rank's heads the tensors contain; None: all of them
        """
        scoring = self.scoring_of(call, tensors[0].shape[0])
        if self.largest is not None and torch.is_grad_enabled():
            largest = self.largest if heads is None else self.largest[heads]
            update_largest(largest, tensors, scoring, call.padding)
        return self.recomputed(partial(self._core, scoring), *tensors)

    def recomputed(self, core: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        """Return core(*tensors), which is recomputed in the backward pass if configured."""
        if self.recompute and torch.is_grad_enabled():
            return recompute_later(core, *tensors)
        return core(*tensors)

    def _core(self, scoring: Scoring, *tensors: Tensor) -> Tensor:
        if self.attention == "blocked":
            return blocked_attention(tensors, scoring)
        q, k, v = tensors
        if self.attention == "unfused":
            return unfused_attention(q, k, v, scoring)
        width = v.shape[-1]
        v = padded(v, k.shape[-1])  # kernels that store no scores have one size of heads
        core = flash_attention if self.attention == "flash" else torch_attention
        if not scoring.dropout:
            return core(q, k, v, scoring)[..., :width]
        # These kernels number samples and heads from 0 in each call, so the seed has to distinguish
        # micro-batches and ranks.
        assert scoring.row_layout is not None, "dropout has a row layout"
        with seeded(q.device, mix(scoring.seed, scoring.row_layout.first())):
            return core(q, k, v, scoring)[..., :width]


class SoftmaxAttention(torch.nn.Module):
    """Attention layer with a CoreAttention, RoPE if the layer has it, and attention sinks."""

    def __init__(
        self, context: LayerContext, name: str, config: Config, layer: int, recompute: bool
    ) -> None:
        super().__init__()
        model = config.model
        kind = model.layer_kind(layer)
        self.rotary: RotaryEmbedding | None = None
        if kind.position_embedding_type == "rope":
            scaled = replace(model, rope_scaling=kind.rope_scaling)
            self.rotary = context.rotary(model.rotated_entries, kind.rotary_base, scaled)
        self.core = CoreAttention(context, config, layer, recompute)
        if model.softmax_type == "learnable":
            shape = (model.num_attention_heads,)
            fill = normal(model.init_method_std)
            make = context.parameters.create
            self.softmax_offset = make(f"{name}.softmax_offset", shape, 0, fill, decay=False)
            self.core.sink = self.softmax_offset


class SelfAttention(SoftmaxAttention):
    """Self-attention: [s(/tp), b, h] -> ([s(/tp), b, h], bias or None).

    layer, recompute: see CoreAttention. summed: see RowParallelLinear.

    The rows of the fused weight are ordered [key-value group][queries ..., key, value][head
    dimension], so that splitting them gives every rank whole groups (the order in Megatron's
    checkpoints since checkpoint version 2.0). With --attention-output-gate each query is followed
    by its gate, so that neighbouring rows belong to one head. With fewer groups than ranks, neighbouring ranks
    divide the queries of a group among themselves, and each holds the group's key and value.
    """

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
        heads = model.num_attention_heads
        groups = model.num_key_value_heads
        d = model.kv_channels
        tp = context.tensor.size
        rank = context.tensor.rank
        fill, output_fill = weight_fills(model)
        self.groups = max(1, groups // tp)
        self.queries = heads // max(groups, tp)
        self.gated = model.attention_output_gate
        self.query_rows = model.query_heads // max(groups, tp)  # heads of queries and gates
        self.head_dim = d
        rows = None
        share = max(1, tp // groups)
        if tp > groups:
            of_group = model.query_heads // groups * d
            width = self.query_rows * d
            start = rank // share * (of_group + 2 * d)
            query_rows = Rows(start + rank % share * width, width)
            rows = query_rows, Rows(start + of_group, 2 * d, share)
        self.query_key_value = ColumnParallelLinear(
            context,
            f"{name}.query_key_value",
            ((model.query_heads + 2 * groups) * d, model.hidden_size),
            fill,
            model.qkv_bias,
            rows,
        )
        if model.key_value_scale != 1.0:
            shared = self.query_key_value.weight_shared
            queries = self.query_rows if shared is None else 0  # in each group of the parameter

            def scale(values: Tensor) -> None:
                by_head = values.view(self.groups, -1, d, model.hidden_size)
                by_head[:, queries:].mul_(model.key_value_scale)

            change_initial(self.query_key_value.weight if shared is None else shared, scale)
        self.clip = model.clip_qkv
        self.q_layernorm: Norm | L2Norm | None = None
        self.k_layernorm: Norm | L2Norm | None = None
        if model.qk_l2_norm:
            self.q_layernorm = self.k_layernorm = L2Norm(model.layernorm_epsilon)
        self.as_projected = not (
            self.gated or model.qk_layernorm or model.qk_l2_norm or model.clip_qkv is not None
        )
        self.norms_heads = model.qk_layernorm_over == "head"
        if model.qk_layernorm:
            of_q = of_k = None
            each = heads, groups  # heads that the norms of q and k cover, over all ranks
            if self.norms_heads:
                each = 1, 1
            else:
                width = heads // tp * d
                of_q = Rows(rank * width, width)
                width = self.groups * d
                of_k = Rows(rank // share * width, width, share)
            make = partial(norm_of, context, model)
            self.q_layernorm = make(f"{name}.q_layernorm", each[0] * d, of_q)
            self.k_layernorm = make(f"{name}.k_layernorm", each[1] * d, of_k)
        self.dense = RowParallelLinear(
            context,
            f"{name}.dense",
            (model.hidden_size, heads * d),
            output_fill,
            model.attention_output_bias,
            summed,
        )

    def forward(
        self, x: Tensor, call: CallContext, recompute_input: RecomputeInput = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention over x; `recompute_input` recomputes x in the backward pass."""
        mixed = self.query_key_value(x, recompute_input)  # [s, b, groups/tp * (queries + 2) * d]
        s, b = mixed.shape[:2]
        gate: Tensor | None = None
        plain = self.as_projected and self.rotary is None and call.cache is None
        if plain and self.core.attention == "blocked" and self.core.context_parallel is None:
            projection = mixed.view(s, b, self.groups, self.queries + 2, self.head_dim)
            out = self.core(call, projection)
        else:
            *tensors, gate = self._apart(mixed, call)
            out = self.core(call, *tensors)
        out = out.reshape(s, b, -1)
        if gate is not None:
            out = out * gate.reshape(s, b, -1).sigmoid()
        result: tuple[Tensor, Tensor | None] = self.dense(out)
        return result

    def _apart(self, mixed: Tensor, call: CallContext) -> tuple[Any, ...]:
        """Split the projection into q [s, b, heads/tp, d], k and v [s, b, groups/tp, d], and gate.

        The gate is [s, b, groups/tp, queries, d], or None.

        If configured, queries and keys are normalized, all are clipped, and queries and keys are
        rotated by angles that depend on their positions.
        """
        s, b = mixed.shape[:2]
        angles = None
        if self.rotary is not None:
            angles = self.rotary.angles(s, call.position_ids, mixed.device)
        nodes = nodes_for(mixed)
        fused = self.rotary is None or self.rotary.fused
        if nodes is not None and fused and self.as_projected:
            # One node, whose backward pass writes directly into the projection's gradient.
            sizes = self.groups, self.queries, self.head_dim
            heads: tuple[Tensor, ...] = nodes.split_heads(mixed, *sizes, *(angles or (None, None)))
            if heads is not NotImplemented:
                return *heads, None
        mixed = mixed.view(s, b, self.groups, self.query_rows + 2, self.head_dim)
        # The gradient of split is one concatenation; slicing would make, for each slice, a gradient
        # as large as the full tensor.
        q, k, v = mixed.split((self.query_rows, 1, 1), dim=3)
        gate: Tensor | None = None
        if self.gated:
            q, gate = q.unflatten(3, (-1, 2)).unbind(4)
        k = k.squeeze(3)
        v = v.squeeze(3)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q = self._normed(self.q_layernorm, q)
            k = self._normed(self.k_layernorm, k)
        if self.clip is not None:
            q, k, v = (x.clamp(-self.clip, self.clip) for x in (q, k, v))
        if self.rotary is not None and angles is not None:
            return self.rotary.rotate_groups(q, angles), self.rotary.rotate(k, angles), v, gate
        return q.reshape(s, b, self.groups * self.queries, self.head_dim), k, v, gate

    def _normed(self, norm: Norm | L2Norm, x: Tensor) -> Tensor:
        """Normalize x [s, b, .., d], each head separately or all together."""
        normed: Tensor = norm(x if self.norms_heads else x.flatten(2)).view(x.shape)
        return normed
