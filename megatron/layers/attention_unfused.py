"""Attention with explicit scores: of a whole sequence, and of new tokens to cached ones."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.choose import Fusions
from megatron.kernels.ops.attention import NO_WINDOW, causal_softmax, hidden_keys, masked_softmax
from megatron.kernels.ops.elementwise import keyed_dropout, soft_cap, wider
from megatron.layers.positions import Alibi, Documents
from megatron.parallel.keyed_random import DropoutKey, Place


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
        scores = wide.to(scores.dtype)
        scale = 1.0
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
        k = k[:, :, first:]
        v = v[:, :, first:]
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
