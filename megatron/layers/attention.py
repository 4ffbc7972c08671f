"""Causal self-attention with heads cut over the tensor-parallel group."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from megatron.config.parallel import TILE
from megatron.kernels import choose
from megatron.kernels.choose import Fusions
from megatron.kernels.library import nodes_for, once_and_again
from megatron.kernels.ops import attention as kernel
from megatron.kernels.ops.attention import NO_WINDOW, causal_softmax, hidden_keys, masked_softmax
from megatron.kernels.ops.elementwise import keyed_dropout, soft_cap, wider
from megatron.kernels.work import Attention, counts_as
from megatron.layers.context import CallContext, Fill, LayerContext
from megatron.layers.linear import Again, ColumnParallelLinear, RowParallelLinear
from megatron.layers.positions import Alibi, Documents, RotaryEmbedding
from megatron.parallel.keyed_random import WHOLE, DropoutKey, Place, Site, mix, seeded
from megatron.parallel.sharding import Rows

if TYPE_CHECKING:
    from megatron.config import ModelConfig

_aten = torch.ops.aten


class Scoring(NamedTuple):
    """Steps from products q k^T to the arguments of the softmax.

    scale   factor of the products; None: 1 / sqrt(d)
    cap     scores x become cap tanh(x / cap); 0: they do not
    window  keys before its own that a query sees
    """

    scale: float | None = None
    cap: float = 0.0
    window: int = NO_WINDOW

    def factor(self, head_dim: int) -> float:
        """Return the factor of the products for heads of this size."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale


PLAIN = Scoring()


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Return attention [n, l, heads, d], causal if there is no bias.

    q [n, l, heads, d], k and v [n, keys, kv heads, d]. Bias, or mask of visible keys: [1, heads, l,
    keys], [l, keys] or None.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [n, heads, l, d]
    grouped = q.shape[1] != k.shape[1]
    if grouped and bias is not None:
        # On a GPU no kernel takes both a mask and groups: without this the scores [n, heads, l, l]
        # would be stored.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=bias,
        dropout_p=dropout,
        is_causal=bias is None,
        scale=scale,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)


# Queries of a block of attention in a window, by torch: more of them see more keys that are hidden
# from some, fewer make smaller products.
_LEAST_QUERIES, _MOST_QUERIES = 128, 512


class _Ranges(torch.autograd.Function):
    """Ranges of x [n, l, ...] along l, which may overlap: views, whose gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: list[slice]) -> tuple[Tensor, ...]:
        ctx.ranges, ctx.shape = ranges, x.shape
        return tuple(x[:, part] for part in ranges)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].new_zeros(ctx.shape)
        for part, gradient in zip(ctx.ranges, gradients, strict=True):
            total[:, part] += gradient
        return total, None


def _in_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi: Alibi | None,
    bias: Tensor | None,
    dropout: float,
    scoring: Scoring,
) -> Tensor:
    """Return causal attention in a window shorter than l; see _causal.

    The first window + 1 queries see all keys before them; `bias` is theirs. The others are computed
    in blocks, each with the keys that its queries see: its first `window` keys are those before the
    block. One mask serves all blocks.
    """
    length, window = q.shape[1], scoring.window
    least = min(max(_LEAST_QUERIES, window), _MOST_QUERIES)
    width = -(-(window + least) // 16) * 16  # a kernel loads many entries of a mask's row at once
    block, start = width - window, window + 1
    queries = [slice(at, min(at + block, length)) for at in range(start, length, block)]
    keys = [slice(block.start - window, block.stop) for block in queries]
    place = torch.arange(width, device=q.device)
    distance = place - window - place[:block].unsqueeze(1)  # [block, width]
    mask = (distance <= 0) & (distance >= -window)
    if alibi is not None:
        behind = distance.to(q.dtype).masked_fill_(~mask, float("-inf"))
        mask = (alibi.slopes.to(q.dtype).view(-1, 1, 1) * behind).unsqueeze(0)
    parts = zip(
        q.split([start, *(block.stop - block.start for block in queries)], dim=1),
        *(_Ranges.apply(x, [slice(start), *keys]) for x in (k, v)),  # type: ignore[no-untyped-call]
        [bias, *(mask[..., : b.stop - b.start, : window + b.stop - b.start] for b in queries)],
        strict=True,
    )
    outs = [_causal(q_n, k_n, v_n, own, dropout, scoring.scale) for q_n, k_n, v_n, own in parts]
    return torch.cat(outs, dim=1)


def _one_sample(x: Tensor) -> Tensor:
    """View [s, b, heads, d], which may be part of a projection, as [1, s, b * heads, d].

    To attention the heads of another sample are other heads. With one sample, all of torch's
    kernels write, and read in the backward pass, the order [s, b, heads, d] of the layers around
    them; with several samples, some write [b, s, heads, d], and most copy output and gradient into
    it before their backward pass (aten/src/ATen/native/transformers/cuda/attention_backward.cu).
    """
    return x.transpose(0, 1) if x.shape[1] == 1 else x.flatten(1, 2).unsqueeze(0)


def _by_bounds(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, documents: Documents
) -> Tensor:
    """Return attention inside documents: [s, b, heads, d].

    attend maps rows [b * s, heads, d] of q, k, v, the bounds of documents in queries and keys,
    and the lengths of the longest ones to rows.
    """
    rows = [x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)]
    bounds, longest = documents.cu_seqlens, documents.longest
    out = attend(*rows, bounds, bounds, longest, longest)
    return out.view(q.transpose(0, 1).shape).transpose(0, 1)


def _takes_bounds(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    """Return whether torch's flash attention computes such documents in one call.

    Not on ROCm: logarithms of sums are [documents, heads, longest] there, and windows are ignored,
    or their gradients exchanged, in some versions
    (aten/src/ATen/native/transformers/hip/flash_attn/aot/mha_all_aot.hip).
    """
    if q.device.type != "cuda" or torch.version.hip is not None or q.shape[-1] % 8:
        return False
    case: list[Any] = [*(x.permute(1, 2, 0, 3) for x in (q, k, v)), None, dropout, True, True]
    return torch.backends.cuda.can_use_flash_attention(torch.backends.cuda.SDPAParams(*case))


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    """Let scaled_dot_product_attention choose anything but cuDNN."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi: Alibi | None,
    documents: Documents | None,
    dropout: float,
    scoring: Scoring = PLAIN,
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v by torch's kernels: [s, b, heads, d].

    q [s, b, heads, d], k and v [s, b, kv heads, d].

    On a GPU that can, all documents are one call of torch's flash attention, otherwise calls of
    scaled_dot_product_attention: documents of similar length are one batch, padded at the end,
    which no causal query sees, so that no mask of documents is needed. ALiBi's bias is as long as
    the longest document and used for all. There is no soft cap.
    """
    assert not scoring.cap, "torch has no soft cap: see choose_attention"
    if documents is not None and alibi is None and _takes_bounds(q, k, v, dropout):

        def by_bounds(*tensors: Any) -> Tensor:
            # torch.nn.attention.varlen calls the same operator, but lacks dropout, and windows
            # before torch 2.11.
            out: Tensor = _aten._flash_attention_forward(
                *tensors,
                dropout,
                True,
                False,
                scale=scoring.scale,
                window_size_left=scoring.window if scoring.window < documents.longest else -1,
                window_size_right=0,
            )[0]
            return out

        return _by_bounds(by_bounds, q, k, v, documents)
    positions = q.shape[0]
    plain = documents is None and alibi is None and positions <= scoring.window + 1
    if plain and torch.is_grad_enabled():
        one = _one_sample(q), _one_sample(k), _one_sample(v)
        return _causal(*one, None, dropout, scoring.scale).reshape(q.shape)
    bias = None
    if alibi is not None:
        longest = positions if documents is None else documents.longest
        bias = alibi.bias(min(longest, scoring.window + 1), positions, q.dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[1]
        corner = None if bias is None else bias[:, :, :length, :length]
        if length > scoring.window + 1:
            return _in_window(q, k, v, alibi, corner, dropout, scoring)
        return _causal(q, k, v, corner, dropout, scoring.scale)

    # cuDNN plans for about a second for each new shape. Documents, prompts and the examples of an
    # evaluation have new ones all the time.
    fixed = documents is None and torch.is_grad_enabled()
    with contextlib.nullcontext() if fixed else _without_cudnn():
        if documents is not None:
            batches = zip(*(documents.batches(x) for x in (q, k, v)), strict=True)
            outs = [attend(*batch).flatten(0, 1) for batch in batches]
            return torch.cat(outs).index_select(0, documents.groups.scatter).view(q.shape)
        if alibi is None:
            return attend(_one_sample(q), _one_sample(k), _one_sample(v)).reshape(q.shape)
        return attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)).transpose(0, 1)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi: Alibi | None,
    documents: Documents | None,
    dropout: float,
    scoring: Scoring = PLAIN,
) -> Tensor:
    """Return the same from the flash-attn package, with the cumulative lengths of documents."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    slopes = None if alibi is None else alibi.slopes
    more: dict[str, Any] = {}  # older versions lack some of these
    if scoring.scale is not None:
        more["softmax_scale"] = scoring.scale
    if scoring.cap:
        more["softcap"] = scoring.cap
    if torch.are_deterministic_algorithms_enabled():
        more["deterministic"] = True
    if scoring.window < q.shape[0]:
        more["window_size"] = (scoring.window, 0)
    if documents is None:
        slopes = None if slopes is None else slopes.repeat(q.shape[1])
        one = _one_sample(q), _one_sample(k), _one_sample(v)
        out: Tensor = flash_attn_func(
            *one, dropout_p=dropout, causal=True, alibi_slopes=slopes, **more
        )
        return out.reshape(q.shape)
    attend = partial(
        flash_attn_varlen_func, dropout_p=dropout, causal=True, alibi_slopes=slopes, **more
    )
    return _by_bounds(attend, q, k, v, documents)


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
    scoring: Scoring = PLAIN,
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
    scale = scoring.factor(d)
    if scoring.cap:
        wide = soft_cap(wider(scores) * scale, scoring.cap)
        scores, scale = wide.to(scores.dtype), 1.0
    if alibi is not None:
        scores = scores + alibi.bias(s, s, q.dtype, scale)  # the softmax scales both
    weights = _softmax(scores, documents, scale, fusions.masked_softmax, scoring.window)
    weights = keyed_dropout(
        weights, dropout, seed, fusions.bias_dropout, place or DropoutKey(0, 0).weights(s, heads)
    )
    out = torch.bmm(weights.view(b * groups, -1, s), values).view(b, groups, heads // groups, s, d)
    return out.permute(3, 0, 1, 2, 4).reshape(s, b, heads, d)


def _softmax(
    scores: Tensor, documents: Documents | None, scale: float, fused: bool, window: int
) -> Tensor:
    """Return softmax(scale * scores) over the visible keys, computed in fp32.

    [b, heads, s, s] in the scores' dtype.
    """
    if fused:
        return (
            causal_softmax(scores, scale, window)
            if documents is None
            else masked_softmax(scores, documents.hidden, scale, window)
        )
    hidden = hidden_keys(None if documents is None else documents.hidden, scores, window)
    wide = wider(scores)
    return (wide * scale).masked_fill(hidden, float("-inf")).softmax(-1).to(scores.dtype)


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None,
    alibi: Alibi | None,
    scoring: Scoring = PLAIN,
) -> Tensor:
    """Return attention of the newest token of each sample to all its tokens: [1, b, heads, d].

    q         [1, b, heads, d]
    k, v      [b, kv heads, n, d], the newest token last (KeyValueCache)
    padding   fp32 [b, n], -infinity where a sample has no token, otherwise 0; None: all have n
    """
    first = max(k.shape[2] - 1 - scoring.window, 0)
    if first:
        k, v = k[:, :, first:], v[:, :, first:]
        padding = None if padding is None else padding[:, first:]
    b, groups, n, d = k.shape
    # The queries of a group are the rows of one matrix: keys and values are not copied.
    queries = q.reshape(b * groups, -1, d) * scoring.factor(d)
    scores = torch.bmm(queries, k.flatten(0, 1).transpose(1, 2)).view(b, groups, -1, n)
    scores = wider(scores)
    if scoring.cap:
        scores = soft_cap(scores, scoring.cap)
    if alibi is not None:
        behind = torch.arange(1 - n, 1, device=q.device, dtype=scores.dtype)
        scores = scores + torch.outer(alibi.slopes, behind).view(groups, -1, n)
    if padding is not None:
        scores = scores + padding[:, None, None, :]
    weights = scores.softmax(-1).to(v.dtype).view(b * groups, -1, n)
    return torch.bmm(weights, v.flatten(0, 1)).view(1, b, -1, d)


class CoreAttention:
    """Causal attention of one layer, as configured: Scoring, ALiBi, dropout, recomputation.

    attention  names what computes it (choose_attention)

    largest    the largest products q k^T of each head, scaled, of training passes so far, for
               QK-clip: fp32 [heads/tp]; None: not wanted
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
        self.dropout, self.parts = config.attention_dropout, context.parts
        self.part = context.heads_part
        self.attention, self.fusions = attention, context.fusions
        window = config.window(layer)
        self.scoring = Scoring(
            config.softmax_scale,
            config.attention_logit_softcapping or 0.0,
            NO_WINDOW if window is None else window,
        )
        self.alibi = (
            context.alibi(self.heads) if config.position_embedding_type == "alibi" else None
        )
        self.largest: Tensor | None = None

    def __call__(self, call: CallContext, *tensors: Tensor) -> Tensor:
        """Map q [s, b, heads/tp, d], k and v [s, b, kv heads/tp, d] to [s, b, heads/tp, d].

        Blocked attention also takes the projection of all three, but not for a cache.
        """
        if call.cache is not None:
            q, k, v = tensors
            if (stored := call.cache.put(self.layer, k, v)) is not None:
                return cached_attention(q, *stored, call.cache.padding, self.alibi, self.scoring)
        if self.parts is not None:
            assert self.parts.attend is not None, "the model sets it"
            return self.parts.attend(self.parts, self, call, *tensors)
        return self.within(call, None, *tensors)

    def masks(self, call: CallContext, positions: int) -> tuple[int | None, Place]:
        """Return seed and place of the masks of the weights [b, this rank's heads, positions, keys].

        No seed if dropout is off.
        """
        if call.dropout is None:
            return None, WHOLE
        place = call.dropout.weights(positions, self.heads // self.part[1], *self.part)
        return call.dropout.at(self.layer, Site.ATTENTION), place

    def within(self, call: CallContext, heads: slice | None, *tensors: Tensor) -> Tensor:
        """Return attention within the rows of the tensors, which are whole sequences.

        heads  theirs of the tensor rank's; None: all of them
        """
        if self.largest is not None and torch.is_grad_enabled():
            largest = self.largest if heads is None else self.largest[heads]
            update_largest(largest, tensors, call.documents, self.scoring, call.padding)
        core = partial(self._core, call.documents, *self.masks(call, tensors[0].shape[0]))
        return self.again(core, *tensors)

    def again(self, core: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return core(*tensors), which is recomputed in the backward pass if configured."""
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
            return blocked_attention(
                tensors, slopes, documents, self.dropout, seed, fused, place, self.scoring
            )
        q, k, v = tensors
        if self.attention == "unfused":
            return unfused_attention(
                q,
                k,
                v,
                self.alibi,
                documents,
                self.dropout,
                seed,
                self.fusions,
                place,
                self.scoring,
            )
        core = flash_attention if self.attention == "flash" else torch_attention
        if seed is None or self.dropout == 0.0:
            return core(q, k, v, self.alibi, documents, 0.0, self.scoring)
        # These number the samples and heads of each call from 0, so that masks are those of one
        # micro-batch and rank.
        with seeded(q.device, mix(seed, place.first())):
            return core(q, k, v, self.alibi, documents, self.dropout, self.scoring)


MakeNorm = Callable[[str, int, Rows | None], torch.nn.Module]
"""Makes a norm by name, width, and this rank's part of it, if it is not the whole."""


class SelfAttention(torch.nn.Module):
    """Self-attention: [s(/tp), b, h] -> ([s(/tp), b, h], bias or None).

    recompute, attention: see CoreAttention. make_norm: of queries and keys; None: they have none.
    summed: see RowParallelLinear.

    The rows of the fused weight are ordered [key-value group][queries ..., key, value][head
    dimension], so a cut along them gives every rank whole groups (the order of Megatron checkpoints
    from version 2.0 on). With fewer groups than ranks, neighbouring ranks divide the queries of a
    group, and each has its key and value.
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
        make_norm: MakeNorm | None = None,
        summed: bool = True,
    ) -> None:
        super().__init__()
        heads, groups, d = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.kv_channels,
        )
        tp, rank = context.tensor.size, context.tensor.rank
        self.rotary, self.core = rotary, CoreAttention(context, config, layer, recompute, attention)
        self.groups, self.queries, self.head_dim = max(1, groups // tp), heads // max(groups, tp), d
        rows, share = None, max(1, tp // groups)
        if tp > groups:
            of_group = heads // groups * d
            start = rank // share * (of_group + 2 * d)
            own = Rows(start + rank % share * self.queries * d, self.queries * d)
            rows = own, Rows(start + of_group, 2 * d, share)
        self.query_key_value = ColumnParallelLinear(
            context,
            f"{name}.query_key_value",
            ((heads + 2 * groups) * d, config.hidden_size),
            fill,
            config.qkv_bias,
            rows,
        )
        if config.key_value_scale != 1.0:
            weight, shared = self.query_key_value.weight, self.query_key_value.weight_shared
            by_head = weight.detach().view(self.groups, -1, d, config.hidden_size)
            keys = by_head[:, self.queries :] if shared is None else shared.detach()
            keys.mul_(config.key_value_scale)
        self.q_layernorm: torch.nn.Module | None = None
        self.k_layernorm: torch.nn.Module | None = None
        self.norms_heads = config.qk_layernorm_over == "head"
        names = f"{name}.q_layernorm", f"{name}.k_layernorm"
        if make_norm is not None and self.norms_heads:
            self.q_layernorm, self.k_layernorm = (make_norm(x, d, None) for x in names)
        elif make_norm is not None:
            of_q, of_k = heads // tp * d, self.groups * d
            self.q_layernorm = make_norm(names[0], heads * d, Rows(rank * of_q, of_q))
            of_keys = Rows(rank // share * of_k, of_k, share)
            self.k_layernorm = make_norm(names[1], groups * d, of_keys)
        self.dense = RowParallelLinear(
            context,
            f"{name}.dense",
            (config.hidden_size, heads * d),
            output_fill,
            config.add_bias_linear,
            summed,
        )

    def forward(
        self, x: Tensor, call: CallContext, again: Again = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention within x; `again` recomputes x."""
        mixed = self.query_key_value(x, again)  # [s, b, groups/tp * (queries + 2) * d]
        s, b = mixed.shape[:2]
        plain = self.rotary is None and self.q_layernorm is None and call.cache is None
        if plain and self.core.attention == "blocked" and self.core.parts is None:
            whole = mixed.view(s, b, self.groups, self.queries + 2, self.head_dim)
            out = self.core(call, whole)
        else:
            out = self.core(call, *self._apart(mixed, call))
        result: tuple[Tensor, Tensor | None] = self.dense(out.reshape(s, b, -1))
        return result

    def _apart(self, mixed: Tensor, call: CallContext) -> tuple[Tensor, ...]:
        """Return q [s, b, heads/tp, d], k and v [s, b, groups/tp, d] of the projection.

        Queries and keys are normalized and rotated; their positions determine the angles.
        """
        s, b = mixed.shape[:2]
        angles = None
        if self.rotary is not None:
            angles = self.rotary.angles(s, call.position_ids, mixed.device, self.core.parts)
        nodes, fused = nodes_for(mixed), self.rotary is None or self.rotary.fused
        if nodes is not None and fused and self.q_layernorm is None:
            # One node, whose gradient is written where it belongs in that of the projection.
            sizes = self.groups, self.queries, self.head_dim
            heads: tuple[Tensor, ...] = nodes.split_heads(mixed, *sizes, *(angles or (None, None)))
            if heads is not NotImplemented:
                return heads
        mixed = mixed.view(s, b, self.groups, self.queries + 2, self.head_dim)
        # The gradient of split is one concatenation; those of slices would each be as large as the
        # whole.
        q, k, v = mixed.split((self.queries, 1, 1), dim=3)
        k, v = k.squeeze(3), v.squeeze(3)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self._normed(self.q_layernorm, q), self._normed(self.k_layernorm, k)
        if self.rotary is not None and angles is not None:
            return self.rotary.rotate_groups(q, angles), self.rotary.rotate(k, angles), v
        return q.reshape(s, b, self.groups * self.queries, self.head_dim), k, v

    def _normed(self, norm: torch.nn.Module, x: Tensor) -> Tensor:
        """Normalize x [s, b, .., d], each head or all of them."""
        normed: Tensor = norm(x if self.norms_heads else x.flatten(2)).view(x.shape)
        return normed


# --- blocked attention


# Scores of this many elements at once: a buffer of some MiB for any number of heads and samples.
_SCORES = 1 << 22


Settings = tuple[Tensor | None, bool, kernel.Law]
"""Slopes of ALiBi, fp32 [heads] or None; whether the kernels compute; scale and dropout, as the
kernels take them.
"""


def block_length(length: int, dtype: torch.dtype) -> int:
    """Return the positions of a block: a whole number of kernel tiles."""
    return choose.block_length(str(dtype).removeprefix("torch."), length)


def _rows(x: Tensor) -> Tensor:
    """Reshape [s, b, groups, share, d] to [b groups, s share, d]: a view if share is 1."""
    return x.permute(1, 2, 0, 3, 4).reshape(x.shape[1] * x.shape[2], -1, x.shape[4])


def _heads(x: Tensor) -> Tensor:
    """Reshape [s, b, groups, d] to [b groups, s, d]: a view if their strides allow."""
    return x.permute(1, 2, 0, 3).flatten(0, 1)


def _transposed(x: Tensor) -> Tensor:
    """Transpose [n, keys, d] to [n, d, keys], as the second matrix of a product.

    It is copied first where products of copies are faster on this CPU.
    """
    copied = choose.copies_keys(str(x.dtype).removeprefix("torch."))
    return (x.contiguous() if copied else x).transpose(1, 2)


def _sizes(length: int, share: int, window: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the positions of a block, and the most scores of a block in a sample and group."""
    block = block_length(length, dtype)
    return block, min(block, length) * share * min(length, block + window + TILE)


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


def _put_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute out = a b.

    In fp32 MKL's batched product needs contiguous results: into others torch multiplies matrix by
    matrix, at two thirds of the speed, which is more than a copy costs.
    """
    if out.is_contiguous() or out.dtype != torch.float32 or out.device.type != "cpu":
        torch.bmm(a, b, out=out)
    else:
        out.copy_(torch.bmm(a, b))


def _add_product(total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """Compute total (+)= a b.

    In 16 bits total is fp32 and a product is rounded before it is added.
    """
    if total.dtype == a.dtype and total.device.type != "cpu":
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
        keys_seen = min(s, law.window + 1)
        with counts_as(Attention(b, groups * share, s, d, keys=keys_seen)):
            out = q.new_empty(q.shape)
            queries, keys, values, result = _rows(q), _heads(k), _heads(v), _Rows(out)
            logarithms = q.new_empty(
                b * groups, s * share, dtype=torch.promote_types(q.dtype, torch.float32)
            )
            block, most = _sizes(s, share, law.window, q.dtype)
            parts = _parts(b * groups, most)
            buffer = q.new_empty(parts[0].stop * most)
            for part in parts:
                for first in range(0, s, block):
                    last, key = min(first + block, s), kernel.first_key(first, law.window)
                    rows = slice(first * share, last * share)
                    shape = part.stop - part.start, (last - first) * share, last - key
                    scores = buffer[: math.prod(shape)].view(shape)
                    torch.bmm(queries[part, rows], _transposed(keys[part, key:last]), out=scores)
                    weights(scores, logarithms, slopes, part.start, first, *law)
                    _put_product(result.rows[part, rows], scores, values[part, key:last])
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
        keys_seen = min(s, law.window + 1)
        with counts_as(Attention(b, groups * share, s, d, True, keys_seen)):
            dout = dout.contiguous()
            dots = _rows(row_dots(dout, out).unsqueeze(-1)).squeeze(-1).contiguous()
            queries, keys, values, douts = _rows(q), _heads(k), _heads(v), _rows(dout)
            to_queries, to_keys, to_values = (
                _Rows(x) for x in (dq, dk.unsqueeze(3), dv.unsqueeze(3))
            )
            block, most = _sizes(s, share, law.window, q.dtype)
            parts = _parts(b * groups, most)
            buffers = q.new_empty(2, parts[0].stop * most)
            narrow = q.dtype in (torch.float16, torch.bfloat16)
            sums = q.new_empty(parts[0].stop, s * share, d, dtype=torch.float32) if narrow else None
            # Each block is in two products, and oneDNN's copies what is not contiguous for each.
            packs = narrow and q.device.type == "cpu"
            for part in parts:
                n = part.stop - part.start
                total = to_queries.rows[part] if sums is None else sums[:n]
                written = 0  # rows of `total`
                for first in range(0, s, block):
                    last, row = min(first + block, s), first * share
                    end = min(last + law.window, s) * share
                    keys_here, rows = (part, slice(first, last)), (part, slice(row, end))
                    shape = n, end - row, last - first
                    scores, dscores = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
                    block_of = queries[rows], douts[rows], keys[keys_here]
                    some_queries, some_douts, some_keys = (
                        x.contiguous() if packs else x for x in block_of
                    )
                    torch.bmm(some_queries, _transposed(some_keys), out=scores)
                    torch.bmm(some_douts, _transposed(values[keys_here]), out=dscores)
                    gradient(
                        scores, dscores, logarithms, dots, slopes, part.start, first, first, *law
                    )
                    _put_product(to_values.rows[keys_here], scores.transpose(1, 2), some_douts)
                    _put_product(to_keys.rows[keys_here], dscores.transpose(1, 2), some_queries)
                    for at, stop, fresh in ((row, written, False), (max(row, written), end, True)):
                        if at < stop:
                            some = dscores[:, at - row : stop - row]
                            _add_product(total[:, at:stop], some, some_keys, fresh)
                    written = end
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
    scoring: Scoring = PLAIN,
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v, causal and inside of documents: [s, b, heads, d].

    tensors    the projection [s, b, groups, queries + 2, d] alone, in which a group's queries come
               before its key and its value; or q [s, b, heads, d], k and v [s, b, groups, d]
    slopes     of ALiBi, fp32 [heads], or None
    dropout    of the weights, with masks by `seed` (megatron.parallel.keyed_random); no seed: none
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
        law = kernel.Law(share, scoring.factor(d), 0.0, 0, cap=scoring.cap, window=scoring.window)
        if seed is not None and dropout > 0.0:
            origins = place.after(rows % samples * place.outer + rows // samples)
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


# --- QK-clip

_FEWER_KERNELS = 512
"""Queries of a block on a GPU, where smaller products take no less time than a kernel's start."""


@torch.no_grad()
def update_largest(
    largest: Tensor,
    tensors: tuple[Tensor, ...],
    documents: Documents | None,
    scoring: Scoring,
    padding: Tensor | None = None,
) -> None:
    """Raise `largest` [heads] to the largest scaled product of a query and a key that it sees.

    tensors  as in blocked_attention
    padding  queries that do not count  # [b, s]

    Before soft cap and ALiBi. It works on blocks, so that no scores [s, s] are stored, beside any
    implementation of attention. Its product is half of the work of a forward pass.
    """
    q, k, _ = _split(tensors)
    s, b, groups, share, _ = q.shape
    queries, keys, window = _rows(q), _heads(k), scoring.window
    place = torch.arange(s, device=q.device)
    document = None
    if documents is not None:
        rows = torch.arange(s * b, device=q.device)
        document = torch.searchsorted(documents.cu_seqlens, rows, right=True).view(b, s)
        document = document.repeat_interleave(groups, dim=0)
    if padding is not None:
        padding = padding.repeat_interleave(groups, dim=0)
    block = block_length(s, q.dtype) if q.device.type == "cpu" else _FEWER_KERNELS
    scores = min(block, s) * share * min(s, block + window + TILE)
    found = largest.new_empty(b * groups, share).fill_(float("-inf"))
    for part in _parts(b * groups, scores):
        for first in range(0, s, block):
            last, key = min(first + block, s), kernel.first_key(first, window)
            products = torch.bmm(
                queries[part, first * share : last * share], _transposed(keys[part, key:last])
            ).unflatten(1, (last - first, share))
            # Keys before the block are all seen, unless there are a window or documents.
            start = first if document is None and window >= s else key
            behind = place[first:last].unsqueeze(1) - place[start:last]
            hidden = ((behind < 0) | (behind > window)).unsqueeze(0)
            if document is not None:
                queried, seen = document[part, first:last], document[part, start:last]
                hidden = hidden | (queried.unsqueeze(2) != seen.unsqueeze(1))
            products[..., start - key :].masked_fill_(hidden.unsqueeze(2), float("-inf"))
            if padding is not None:
                rows = padding[part, first:last, None, None]
                products.masked_fill_(rows, float("-inf"))
            torch.maximum(found[part], products.amax(dim=(1, 3)).float(), out=found[part])
    of_heads = found.view(b, groups * share).amax(0) * scoring.factor(q.shape[-1])
    torch.maximum(largest, of_heads, out=largest)
