"""Attention by kernels of torch and of the flash-attn package, which store no scores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.layers.attention_unfused import PLAIN, Scoring
from megatron.layers.positions import Documents
from megatron.parallel.autograd import Context, Node

_aten = torch.ops.aten


def _causal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scoring: Scoring) -> Tensor:
    """Return attention [n, l, heads, d], causal if there is no bias.

    q [n, l, heads, d], k and v [n, keys, kv heads, d]. `bias` is added to the scores,
    [1, heads, l, keys], or is a bool mask of visible keys, [l, keys].
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [n, heads, l, d]
    grouped = q.shape[1] != k.shape[1]
    if grouped and bias is not None:
        # On a GPU no kernel supports both a mask and groups: without this, the scores
        # [n, heads, l, l] would be stored.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=bias,
        dropout_p=scoring.dropout,
        is_causal=bias is None,
        scale=scoring.scale,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)


# Queries in a block of torch's attention in a window: larger blocks have more keys that are hidden
# from some queries, smaller blocks have smaller and thus slower matrix products.
_LEAST_QUERIES = 128
_MOST_QUERIES = 512


class _Ranges(Node):
    """Ranges of x [n, l, ...] along l as views, which may overlap; their gradients are added."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, ranges: list[slice]) -> tuple[Tensor, ...]:
        ctx.ranges = ranges
        ctx.shape = x.shape
        return tuple(x[:, span] for span in ranges)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].new_zeros(ctx.shape)
        for span, gradient in zip(ctx.ranges, gradients, strict=True):
            total[:, span] += gradient
        return total, None


def _in_window(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scoring: Scoring) -> Tensor:
    """Return causal attention in a window shorter than l; see _causal.

    The first window + 1 queries see all keys before them; `bias` applies to these queries. The
    other queries are processed in blocks, each with the keys that its queries see: the first
    `window` of these keys precede the block. All blocks share one mask.
    """
    length = q.shape[1]
    window = scoring.window
    least = min(max(_LEAST_QUERIES, window), _MOST_QUERIES)
    width = -(-(window + least) // 16) * 16  # a kernel loads many entries of a mask's row at once
    block = width - window
    start = window + 1
    queries = [slice(at, min(at + block, length)) for at in range(start, length, block)]
    keys = [slice(block.start - window, block.stop) for block in queries]
    positions = torch.arange(width, device=q.device)
    distance = positions - window - positions[:block].unsqueeze(1)  # [block, width]
    mask = (distance <= 0) & (distance >= -window)
    if (alibi := scoring.alibi) is not None:
        behind = distance.to(q.dtype).masked_fill_(~mask, float("-inf"))
        mask = (alibi.slopes.to(q.dtype).view(-1, 1, 1) * behind).unsqueeze(0)
    blocks = zip(
        q.split([start, *(block.stop - block.start for block in queries)], dim=1),
        *(_Ranges.apply(x, [slice(start), *keys]) for x in (k, v)),
        [bias, *(mask[..., : b.stop - b.start, : window + b.stop - b.start] for b in queries)],
        strict=True,
    )
    return torch.cat([_causal(q, k, v, seen, scoring) for q, k, v, seen in blocks], dim=1)


def _one_sample(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View each [s, b, heads, d], which may be part of a projection, as [1, s, b * heads, d].

    To attention, the heads of another sample are just more heads. With one sample, all of torch's
    kernels store outputs and gradients as [s, b, heads, d], like the surrounding layers. With
    several samples, some store [b, s, heads, d], and most copy output and gradient to that order
    before their backward pass
    (aten/src/ATen/native/transformers/cuda/attention_backward.cu).
    """
    q, k, v = (
        x.transpose(0, 1) if x.shape[1] == 1 else x.flatten(1, 2).unsqueeze(0) for x in (q, k, v)
    )
    return q, k, v


def _by_bounds(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, documents: Documents
) -> Tensor:
    """Return attention within documents: [s, b, heads, d].

    attend  returns the rows of the output for the rows [b * s, heads, d] of q, k and v, the bounds
            of documents in queries and in keys, and the length of the longest document in each
    """
    rows = [x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)]
    bounds = documents.cu_seqlens
    longest = documents.longest
    out = attend(*rows, bounds, bounds, longest, longest)
    return out.view(q.transpose(0, 1).shape).transpose(0, 1)


def _takes_bounds(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    """Return whether torch's flash attention can compute all documents in one call.

    Not on ROCm: its log-sum-exps are [documents, heads, longest], some versions of torch ignore
    windows, and others, if there is a window, return dk as dq, dv as dk and dq as dv
    (aten/src/ATen/native/transformers/hip/flash_attn/aot/mha_all_aot.hip).
    """
    if q.device.type != "cuda" or torch.version.hip is not None or q.shape[-1] % 8:
        return False
    query, key, value = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    case = torch.backends.cuda.SDPAParams(query, key, value, None, dropout, True, True)
    return torch.backends.cuda.can_use_flash_attention(case)


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    """Let scaled_dot_product_attention choose any backend but cuDNN."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
    """Return causal attention [s, b, heads, d] by torch's kernels, as `scoring` specifies.

    q [s, b, heads, d], k and v [s, b, kv heads, d].

    If the GPU supports it and there is no ALiBi, one call of torch's flash attention computes all
    documents. Otherwise scaled_dot_product_attention is called for each batch of documents of
    similar length. They are padded at the end, where no causal query sees the padding: no document
    mask is needed. All batches use corners of one ALiBi bias. Soft caps are not supported.
    """
    assert not scoring.cap, "torch has no soft cap: see choose_attention"
    alibi = scoring.alibi
    documents = scoring.documents
    if documents is not None and alibi is None and _takes_bounds(q, k, v, scoring.dropout):

        def by_bounds(*tensors: object) -> Tensor:
            # torch.nn.attention.varlen calls the same operator, but lacks dropout and, before
            # torch 2.11, windows.
            out: Tensor = _aten._flash_attention_forward(
                *tensors,
                scoring.dropout,
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
        one = _one_sample(q, k, v)
        return _causal(*one, None, scoring).reshape(q.shape)
    bias = None
    if alibi is not None:
        longest = positions if documents is None else documents.longest
        bias = alibi.bias(min(longest, scoring.window + 1), positions, q.dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[1]
        corner = None if bias is None else bias[:, :, :length, :length]
        inner = _in_window if length > scoring.window + 1 else _causal
        return inner(q, k, v, corner, scoring)

    # cuDNN spends 0.1 s or more planning for each new shape. Documents, prompts and evaluation
    # examples have new shapes all the time.
    fixed = documents is None and torch.is_grad_enabled()
    with contextlib.nullcontext() if fixed else _without_cudnn():
        if documents is not None:
            batches = zip(*(documents.batches(x) for x in (q, k, v)), strict=True)
            outs = [attend(*batch).flatten(0, 1) for batch in batches]
            return torch.cat(outs).index_select(0, documents.groups.scatter).view(q.shape)
        if alibi is None:
            return attend(*_one_sample(q, k, v)).reshape(q.shape)
        return attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)).transpose(0, 1)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
    """Return causal attention [s, b, heads, d] by flash-attn, as `scoring` specifies."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    # Older versions lack some arguments: pass only those in use.
    more: dict[str, object] = {"dropout_p": scoring.dropout, "causal": True}
    if scoring.scale is not None:
        more["softmax_scale"] = scoring.scale
    if scoring.cap:
        more["softcap"] = scoring.cap
    if torch.are_deterministic_algorithms_enabled():
        more["deterministic"] = True
    if scoring.window < q.shape[0]:
        more["window_size"] = (scoring.window, 0)
    if scoring.alibi is not None:
        rows = 1 if scoring.documents is not None else q.shape[1]
        more["alibi_slopes"] = scoring.alibi.slopes.repeat(rows)
    if scoring.documents is not None:
        return _by_bounds(partial(flash_attn_varlen_func, **more), q, k, v, scoring.documents)
    out: Tensor = flash_attn_func(*_one_sample(q, k, v), **more)
    return out.reshape(q.shape)
