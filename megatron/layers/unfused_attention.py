"""Attention as it is written: scores, softmax, weighted sum. Its memory grows with the square of the sequence."""
from __future__ import annotations

import math

import torch

from megatron.kernels.choose import Fusions
from megatron.kernels.ops.softmax import causal_softmax, masked_softmax
from megatron.layers.documents import Documents
from megatron.layers.dropout import keyed_dropout
from megatron.layers.masks import Alibi
from megatron.parallel.random import DropoutKey, Place


def unfused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alibi: Alibi | None, documents: Documents | None,
    dropout: float, seed: int | None, fusions: Fusions, place: Place | None = None,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v; q [s, b, heads, d], k and v [s, b, kv heads, d] -> [s, b, heads, d].

    Query head h reads key-value head h // (heads / kv heads). Keys and values are read where they lie: the queries of a
    group are the rows of one matrix. The weights [b, heads, s, s] are kept for the backward pass, twice with dropout;
    `place` is theirs among those of the whole job (DropoutKey.weights), None where they are the whole.
    """
    s, b, heads, d = q.shape
    groups = k.shape[2]
    queries = q.view(s, b, groups, heads // groups, d).permute(1, 2, 3, 0, 4).reshape(b * groups, -1, d)
    keys, values = (x.permute(1, 2, 0, 3).flatten(0, 1) for x in (k, v))  # [b groups, s, d]
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(b, heads, s, s)
    scale = 1.0 / math.sqrt(d)
    if alibi is not None:
        scores = scores + alibi.bias(s, s, q.dtype, scale)  # the softmax scales both
    weights = _softmax(scores, documents, scale, fusions.masked_softmax)
    weights = keyed_dropout(weights, dropout, seed, fusions.bias_dropout, place or DropoutKey(0, 0).weights(s, heads))
    out = torch.bmm(weights.view(b * groups, -1, s), values).view(b, groups, heads // groups, s, d)
    return out.permute(3, 0, 1, 2, 4).reshape(s, b, heads, d)


def _softmax(scores: torch.Tensor, documents: Documents | None, scale: float, fused: bool) -> torch.Tensor:
    """softmax(scale * scores) over the keys that a query sees, in fp32; [b, heads, s, s] in the scores' dtype."""
    if fused:
        return causal_softmax(scores, scale) if documents is None else masked_softmax(scores, documents.hidden, scale)
    s = scores.shape[-1]
    later = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu_(1)
    hidden = later if documents is None else documents.hidden
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return (wide * scale).masked_fill(hidden, float("-inf")).softmax(-1).to(scores.dtype)
