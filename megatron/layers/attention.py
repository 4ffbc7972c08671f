"""Causal self-attention with heads cut over the tensor-parallel group."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from megatron.kernels.choose import Fusions
from megatron.kernels.ops import attention as kernel
from megatron.kernels.ops.attention import causal_softmax, masked_softmax
from megatron.kernels.ops.elementwise import keyed_dropout
from megatron.kernels.work import Attention, counts_as, once_and_again
from megatron.layers.context import CallContext, Fill, LayerContext
from megatron.layers.linear import Again, ColumnParallelLinear, RowParallelLinear
from megatron.layers.positions import Alibi, Documents, RotaryEmbedding
from megatron.parallel.sharding import WHOLE, DropoutKey, Place, Site, mix, seeded

if TYPE_CHECKING:
    from megatron.config import ModelConfig


def _causal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
    """Return causal attention [n, l, heads, d].

    q [n, l, heads, d], k and v [n, l, kv heads, d], bias [1, heads, l, l] or None.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [n, heads, l, d]
    grouped = q.shape[1] != k.shape[1]
    if grouped and bias is not None:
        # On a GPU no kernel takes both a mask and groups: without this the scores [n, heads, l, l]
        # would be stored.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=bias is None, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def _one_sample(x: Tensor) -> Tensor:
    """View [s, b, heads, d], which may be part of a projection, as [1, s, b * heads, d].

    To attention the heads of another sample are other heads. With one sample, all of torch's
    kernels write, and read in the backward pass, the order [s, b, heads, d] of the layers around
    them; with several samples, some write [b, s, heads, d], and most copy output and gradient into
    it before their backward pass (aten/src/ATen/native/transformers/cuda/attention_backward.cu).
    """
    return x.flatten(1, 2).unsqueeze(0)


def torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi: Alibi | None,
    documents: Documents | None,
    dropout: float,
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v by torch's scaled_dot_product_attention.

    q [s, b, heads, d], k and v [s, b, kv heads, d] -> [s, b, heads, d].

    Documents of similar length are one batch, padded at the end, which no causal query sees, so
    that no mask of documents is needed. ALiBi's bias is as long as the longest document and used
    for all.
    """
    positions = q.shape[0]
    if documents is None:
        if alibi is None:
            return _causal(_one_sample(q), _one_sample(k), _one_sample(v), None, dropout).reshape(
                q.shape
            )
        whole = alibi.bias(positions, positions, q.dtype)
        return _causal(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), whole, dropout
        ).transpose(0, 1)
    bias = None if alibi is None else alibi.bias(documents.longest, positions, q.dtype)
    outs = []
    for q_n, k_n, v_n in zip(*(documents.batches(x) for x in (q, k, v)), strict=True):
        length = q_n.shape[1]
        corner = None if bias is None else bias[:, :, :length, :length]
        outs.append(_causal(q_n, k_n, v_n, corner, dropout).flatten(0, 1))
    return torch.cat(outs).index_select(0, documents.groups.scatter).view(q.shape)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi: Alibi | None,
    documents: Documents | None,
    dropout: float,
) -> Tensor:
    """Return the same from the flash-attn package, with the cumulative lengths of documents."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    slopes = None if alibi is None else alibi.slopes
    if documents is None:
        slopes = None if slopes is None else slopes.repeat(q.shape[1])
        one = _one_sample(q), _one_sample(k), _one_sample(v)
        out: Tensor = flash_attn_func(*one, dropout_p=dropout, causal=True, alibi_slopes=slopes)
        return out.reshape(q.shape)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [b, s, heads, d]
    flat, bounds, longest = (
        [x.flatten(0, 1) for x in (q, k, v)],
        documents.cu_seqlens,
        documents.longest,
    )
    out = flash_attn_varlen_func(
        *flat, bounds, bounds, longest, longest, dropout_p=dropout, causal=True, alibi_slopes=slopes
    )
    return out.view(q.shape).transpose(0, 1)


def unfused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi: Alibi | None,
    documents: Documents | None,
    dropout: float,
    seed: int | None,
    fusions: Fusions,
    place: Place | None = None,
) -> Tensor:
    """Return explicit softmax(q k^T / sqrt(d)) v: [s, b, heads, d].

    q [s, b, heads, d], k, v [s, b, kv heads, d].

    Query head h reads key-value head h // (heads / kv heads). Keys and values are not copied: the
    queries of a group are the rows of one matrix. The weights [b, heads, s, s] are kept for the
    backward pass, twice with dropout; `place` is their place in the whole job (DropoutKey.weights),
    None if they are the whole.
    """
    s, b, heads, d = q.shape
    groups = k.shape[2]
    queries = (
        q.view(s, b, groups, heads // groups, d).permute(1, 2, 3, 0, 4).reshape(b * groups, -1, d)
    )
    keys, values = (x.permute(1, 2, 0, 3).flatten(0, 1) for x in (k, v))  # [b groups, s, d]
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(b, heads, s, s)
    scale = 1.0 / math.sqrt(d)
    if alibi is not None:
        scores = scores + alibi.bias(s, s, q.dtype, scale)  # the softmax scales both
    weights = _softmax(scores, documents, scale, fusions.masked_softmax)
    weights = keyed_dropout(
        weights, dropout, seed, fusions.bias_dropout, place or DropoutKey(0, 0).weights(s, heads)
    )
    out = torch.bmm(weights.view(b * groups, -1, s), values).view(b, groups, heads // groups, s, d)
    return out.permute(3, 0, 1, 2, 4).reshape(s, b, heads, d)


def _softmax(scores: Tensor, documents: Documents | None, scale: float, fused: bool) -> Tensor:
    """Return softmax(scale * scores) over the visible keys, computed in fp32.

    [b, heads, s, s] in the scores' dtype.
    """
    if fused:
        return (
            causal_softmax(scores, scale)
            if documents is None
            else masked_softmax(scores, documents.hidden, scale)
        )
    s = scores.shape[-1]
    later = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu_(1)
    hidden = later if documents is None else documents.hidden
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return (wide * scale).masked_fill(hidden, float("-inf")).softmax(-1).to(scores.dtype)


class CoreAttention:
    """Causal softmax(q k^T / sqrt(d)) v of one layer, as configured: ALiBi, dropout, recomputation.

    attention  names what computes it (choose_attention)
    """

    def __init__(
        self,
        context: LayerContext,
        config: ModelConfig,
        layer: int,
        recompute: bool = False,
        attention: str = "torch",
    ) -> None:
        self.heads, self.layer, self.recompute = config.num_attention_heads, layer, recompute
        self.dropout, self.tensor = config.attention_dropout, context.tensor
        self.attention, self.fusions = attention, context.fusions
        self.alibi = (
            context.alibi(self.heads) if config.position_embedding_type == "alibi" else None
        )

    def __call__(self, call: CallContext, *tensors: Tensor) -> Tensor:
        """Map q [s, b, heads/tp, d], k and v [s, b, kv heads/tp, d] to [s, b, heads/tp, d].

        Blocked attention also takes the projection of all three.
        """
        seed, place = None, WHOLE
        if call.dropout:
            s, heads = tensors[0].shape[0], self.heads // self.tensor.size
            seed = call.dropout.at(self.layer, Site.ATTENTION)
            place = call.dropout.weights(s, heads, self.tensor.rank, self.tensor.size)
        core = partial(self._core, call.documents, seed, place)
        if self.recompute and torch.is_grad_enabled():
            out: Tensor = checkpoint(
                core,
                *tensors,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=once_and_again,
            )
            return out
        return core(*tensors)

    def _core(
        self, documents: Documents | None, seed: int | None, place: Place, *tensors: Tensor
    ) -> Tensor:
        if self.attention == "blocked":
            fused = self.fusions.attention_block
            slopes = None if self.alibi is None else self.alibi.slopes
            return blocked_attention(tensors, slopes, documents, self.dropout, seed, fused, place)
        q, k, v = tensors
        if self.attention == "unfused":
            return unfused_attention(
                q, k, v, self.alibi, documents, self.dropout, seed, self.fusions, place
            )
        core = flash_attention if self.attention == "flash" else torch_attention
        if seed is None or self.dropout == 0.0:
            return core(q, k, v, self.alibi, documents, 0.0)
        # These number the samples and heads of each call from 0, so that masks are those of one
        # micro-batch and rank.
        with seeded(q.device, mix(seed, place.start)):
            return core(q, k, v, self.alibi, documents, self.dropout)


class SelfAttention(torch.nn.Module):
    """Self-attention: [s(/tp), b, h] -> ([s(/tp), b, h], bias or None).

    recompute, attention: see CoreAttention.

    The rows of the fused weight are ordered [key-value group][queries ..., key, value][head
    dimension], so a cut along them gives every rank whole groups (the order of Megatron checkpoints
    from version 2.0 on).
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        config: ModelConfig,
        layer: int,
        fill: Fill,
        output_fill: Fill,
        rotary: RotaryEmbedding | None,
        recompute: bool,
        attention: str = "torch",
    ) -> None:
        super().__init__()
        heads, groups, d = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.kv_channels,
        )
        tp = context.tensor.size
        self.rotary, self.core = rotary, CoreAttention(context, config, layer, recompute, attention)
        self.groups, self.queries, self.head_dim = groups // tp, heads // groups, d
        bias = config.add_bias_linear
        self.query_key_value = ColumnParallelLinear(
            context,
            f"{name}.query_key_value",
            ((heads + 2 * groups) * d, config.hidden_size),
            fill,
            bias,
        )
        self.dense = RowParallelLinear(
            context, f"{name}.dense", (config.hidden_size, heads * d), output_fill, bias
        )

    def forward(
        self, x: Tensor, call: CallContext, again: Again = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention within x; `again` recomputes x."""
        mixed = self.query_key_value(x, again)  # [s, b, groups/tp * (queries + 2) * d]
        s, b = mixed.shape[:2]
        mixed = mixed.view(s, b, self.groups, self.queries + 2, self.head_dim)
        whole = self.rotary is None and self.core.attention == "blocked"
        out = self.core(call, *((mixed,) if whole else self._apart(mixed, call)))
        result: tuple[Tensor, Tensor | None] = self.dense(out.reshape(s, b, -1))
        return result

    def _apart(self, mixed: Tensor, call: CallContext) -> tuple[Tensor, ...]:
        """Return q [s, b, heads/tp, d], k and v [s, b, groups/tp, d] of the projection, rotated.

        Their positions determine the angles.
        """
        s, b = mixed.shape[:2]
        # The gradient of split is one concatenation; those of slices would each be as large as the
        # whole.
        q, k, v = mixed.split((self.queries, 1, 1), dim=3)
        k, v = k.squeeze(3), v.squeeze(3)
        if self.rotary is not None:
            angles = self.rotary.angles(s, call.position_ids, mixed.device)
            return self.rotary.rotate_groups(q, angles), self.rotary.rotate(k, angles), v
        return q.reshape(s, b, self.groups * self.queries, self.head_dim), k, v


# --- blocked attention


# Measured on a CPU, sequences of 512 to 2048, heads of 64 and 128: smaller blocks skip more above
# the diagonal, larger ones make faster products, which matters more in 16 bits.
_LEAST = {torch.float32: 64}
_LEAST_16_BIT, _MOST_TIMES, _BLOCKS = 128, 2, 8
# Scores of this many elements at once: a buffer of some MiB for any number of heads and samples.
_SCORES = 1 << 22


Settings = tuple[Tensor | None, bool, kernel.Law]
"""Slopes of ALiBi, fp32 [heads] or None; whether the kernels compute; scale and dropout, as the
kernels take them.
"""


def block_length(length: int, dtype: torch.dtype) -> int:
    """Return the positions of a block: a whole number of kernel tiles, at most twice the least."""
    least = _LEAST.get(dtype, _LEAST_16_BIT)
    wished = -(-length // (_BLOCKS * kernel.TILE)) * kernel.TILE
    return max(least, min(wished, _MOST_TIMES * least))


def _rows(x: Tensor) -> Tensor:
    """Reshape [s, b, groups, share, d] to [b groups, s share, d]: a view if share is 1."""
    return x.permute(1, 2, 0, 3, 4).reshape(x.shape[1] * x.shape[2], -1, x.shape[4])


def _heads(x: Tensor) -> Tensor:
    """Reshape [s, b, groups, d] to [b groups, s, d]: a view if their strides allow."""
    return x.permute(1, 2, 0, 3).flatten(0, 1)


def _transposed(x: Tensor) -> Tensor:
    """Transpose [n, keys, d] to [n, d, keys], as the second matrix of a product.

    In 16 bits torch's product is at full speed with a transposed matrix only where it is the whole
    of a tensor.
    """
    return (x if x.dtype == torch.float32 else x.contiguous()).transpose(1, 2)


def _parts(count: int, scores: int) -> list[slice]:
    """Divide samples and groups into parts of about _SCORES scores, enough for every thread."""
    size = min(count, max(_SCORES // scores, torch.get_num_threads()))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


class _Rows:
    """A tensor [s, b, groups, share, d] to be written as rows.

    In place if its strides allow, otherwise in a copy.
    """

    def __init__(self, place: Tensor) -> None:
        s, b, groups, share, d = place.shape
        merge = share == 1 and (1 in (b, groups) or place.stride(1) == groups * place.stride(2))
        self.place, self.apart = place, not merge
        self.rows = _rows(place) if merge else place.new_empty(b * groups, s * share, d)

    def put(self) -> None:
        """Copy the rows to their place in the tensor."""
        if self.apart:
            s, b, groups, share, d = self.place.shape
            self.place.copy_(self.rows.view(b, groups, s, share, d).permute(2, 0, 1, 3, 4))


def _add_product(total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """Compute total (+)= a b.

    In 16 bits total is fp32 and a product is rounded before it is added.
    """
    if total.dtype == a.dtype:
        torch.baddbmm(total, a, b, beta=0.0 if fresh else 1.0, out=total)
    elif fresh:
        total.copy_(torch.bmm(a, b))
    else:
        total.add_(torch.bmm(a, b))


def _split(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [.., groups, share, d], k and v [.., groups, d] of one or three tensors.

    A single tensor is the projection.
    """
    if len(tensors) == 1:
        (mixed,) = tensors
        return mixed[..., :-2, :], mixed[..., -2, :], mixed[..., -1, :]
    q, k, v = tensors
    return q.unflatten(2, (k.shape[2], -1)), k, v


class _Attention(torch.autograd.Function):
    """out [s, b, groups, share, d] of _split(tensors).

    The gradients are written in the layout of the tensors.
    """

    @staticmethod
    def forward(ctx: Any, settings: Settings, *tensors: Tensor) -> Tensor:
        q, k, v = _split(tensors)
        slopes, fused, law = settings
        s, b, groups, share, d = q.shape
        weights = kernel.attention_weights_ if fused else kernel.weights_reference
        # All blocks count as one pass of attention, whose rate is measured as such.
        with counts_as(Attention(b, groups * share, s, d)):
            out = q.new_empty(q.shape)
            queries, keys, values, result = _rows(q), _heads(k), _heads(v), _Rows(out)
            logarithms = q.new_empty(
                b * groups, s * share, dtype=torch.promote_types(q.dtype, torch.float32)
            )
            block = block_length(s, q.dtype)
            parts = _parts(b * groups, min(block, s) * share * s)
            buffer = q.new_empty(parts[0].stop * min(block, s) * share * s)
            for part in parts:
                for first in range(0, s, block):
                    last = min(first + block, s)
                    rows = slice(first * share, last * share)
                    shape = part.stop - part.start, (last - first) * share, last
                    scores = buffer[: math.prod(shape)].view(shape)
                    torch.bmm(queries[part, rows], _transposed(keys[part, :last]), out=scores)
                    weights(scores, logarithms, slopes, part.start, first, *law)
                    torch.bmm(scores, values[part, :last], out=result.rows[part, rows])
            result.put()
        ctx.save_for_backward(out, logarithms, *tensors)
        ctx.settings = settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        out, logarithms, *tensors = ctx.saved_tensors
        gradients = tuple(torch.empty_like(x) for x in tensors)
        q, k, v = _split(tuple(tensors))
        dq, dk, dv = _split(gradients)
        slopes, fused, law = ctx.settings
        s, b, groups, share, d = q.shape
        gradient = kernel.attention_gradient_ if fused else kernel.gradient_reference
        row_dots = kernel.row_dots if fused else kernel.dots_reference
        with counts_as(Attention(b, groups * share, s, d, backward=True)):
            dout = dout.contiguous()
            dots = _rows(row_dots(dout, out).unsqueeze(-1)).squeeze(-1).contiguous()
            queries, keys, values, douts = _rows(q), _heads(k), _heads(v), _rows(dout)
            to_queries, to_keys, to_values = (
                _Rows(x) for x in (dq, dk.unsqueeze(3), dv.unsqueeze(3))
            )
            block = block_length(s, q.dtype)
            parts = _parts(b * groups, min(block, s) * share * s)
            buffers = q.new_empty(2, parts[0].stop * min(block, s) * share * s)
            narrow = q.dtype in (torch.float16, torch.bfloat16)
            sums = q.new_empty(parts[0].stop, s * share, d, dtype=torch.float32) if narrow else None
            for part in parts:
                n = part.stop - part.start
                total = to_queries.rows[part] if sums is None else sums[:n]
                for first in range(0, s, block):
                    last, row = min(first + block, s), first * share
                    keys_here, rows = (part, slice(first, last)), (part, slice(row, None))
                    shape = n, s * share - row, last - first
                    scores, dscores = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
                    torch.bmm(queries[rows], _transposed(keys[keys_here]), out=scores)
                    torch.bmm(douts[rows], _transposed(values[keys_here]), out=dscores)
                    gradient(
                        scores, dscores, logarithms, dots, slopes, part.start, first, first, *law
                    )
                    torch.bmm(scores.transpose(1, 2), douts[rows], out=to_values.rows[keys_here])
                    torch.bmm(dscores.transpose(1, 2), queries[rows], out=to_keys.rows[keys_here])
                    _add_product(total[:, row:], dscores, keys[keys_here], fresh=first == 0)
                if sums is not None:
                    to_queries.rows[part] = total
            for result in (to_queries, to_keys, to_values):
                result.put()
        return None, *gradients


def blocked_attention(
    tensors: tuple[Tensor, ...],
    slopes: Tensor | None,
    documents: Documents | None,
    dropout: float,
    seed: int | None,
    fused: bool,
    place: Place | None = None,
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v, causal and inside of documents: [s, b, heads, d].

    tensors    the projection [s, b, groups, queries + 2, d] alone, in which a group's queries come
               before its key and its value; or q [s, b, heads, d], k and v [s, b, groups, d]
    slopes     of ALiBi, fp32 [heads], or None
    dropout    of the weights, with masks by `seed` (megatron.parallel.sharding); no seed: none
    fused      softmax and its gradient through the kernels, whose masks are their own
    place      of the weights among those of the whole job (DropoutKey.weights); None: they are all
               of them
    """
    q, k, _ = _split(tensors)
    positions, samples, groups, share, d = q.shape
    if dropout >= 1.0 and seed is not None:
        return (q * 0.0 + k.unsqueeze(3) * 0.0).flatten(2, 3)
    fused = fused and q.dtype != torch.float64
    place = place or DropoutKey(0, 0).weights(positions, groups * share)

    def at(rows: Tensor) -> Settings:
        """Return the settings for documents that start at these rows of [s, b]."""
        law = kernel.Law(share, 1.0 / math.sqrt(d), 0.0, 0)
        if seed is not None and dropout > 0.0:
            origins = place.start + rows % samples * place.outer + rows // samples
            law = law._replace(probability=dropout, seed=seed, origins=origins, positions=positions)
        return slopes, fused, law

    if documents is None:
        starts = torch.arange(samples, device=tensors[0].device)
        result: Tensor = _Attention.apply(at(starts), *tensors).flatten(2, 3)  # type: ignore[no-untyped-call]
        return result
    outs = []
    for starts, *batch in zip(
        documents.starts, *(documents.batches(x) for x in tensors), strict=True
    ):
        out = _Attention.apply(at(starts), *(x.transpose(0, 1) for x in batch))  # type: ignore[no-untyped-call]
        outs.append(out.transpose(0, 1).flatten(0, 1))
    rows = torch.cat(outs).index_select(0, documents.groups.scatter)
    return rows.view(positions, samples, -1, d)
