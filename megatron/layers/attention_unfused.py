"""Attention with explicit scores: over a full sequence, and from new tokens to cached ones."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.choose import NONE, Fusions
from megatron.kernels.ops.attention import (
    NO_WINDOW,
    AttentionParameters,
    causal_softmax,
    hidden_keys,
    masked_softmax,
)
from megatron.kernels.ops.elementwise import keyed_dropout, soft_cap, wider
from megatron.layers.positions import Alibi, Documents
from megatron.parallel.keyed_random import DropoutKey, RowLayout


class Scoring(NamedTuple):
    """Attention parameters of a layer and a call: how products q k^T become weights.

    scale       factor of the products; None: 1 / sqrt(d)
    cap         scores x become cap tanh(x / cap); 0: no cap
    window      number of keys before its own position that a query sees
    alibi       the bias of the scores; None: no bias
    sink        logits of a key with the value 0 that every query sees, [heads]; None: no such key
    fusions     operators that use kernels; kernels draw other dropout masks than torch
    documents   documents within which tokens see each other; None: within a sample
    dropout     dropout probability of the weights; `seed` determines the masks
                (megatron.parallel.keyed_random)
    row_layout  position of the weights among all weights of the job (DropoutKey.weights); None:
                the job has no others
    """

    scale: float | None = None
    cap: float = 0.0
    window: int = NO_WINDOW
    alibi: Alibi | None = None
    sink: Tensor | None = None
    fusions: Fusions = NONE
    documents: Documents | None = None
    dropout: float = 0.0
    seed: int = 0
    row_layout: RowLayout | None = None

    def factor(self, head_dim: int) -> float:
        """Return the factor of the products for heads of this size."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale

    def at(self, positions: int, heads: int) -> RowLayout:
        """Return the row layout of the weights for all positions and this many heads."""
        return self.row_layout or DropoutKey(0, 0).weights(positions, heads)

    def params(self, q: Tensor, starts: Tensor, positions: int) -> AttentionParameters:
        """Return the kernels' parameters for blocks of queries q [.., b, groups, share, d].

        starts     the rows of [s, b] at which samples or documents start
        positions  length of a sequence
        """
        samples, groups, share, d = q.shape[1:]
        params = AttentionParameters(share, self.factor(d), cap=self.cap, window=self.window)
        if not self.dropout:
            return params
        row_layout = self.at(positions, groups * share)
        origins = row_layout.after(starts % samples * row_layout.outer + starts // samples)
        return params._replace(
            probability=self.dropout, seed=self.seed, origins=origins, positions=positions
        )


PLAIN = Scoring()


def unfused_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
    """Return causal attention [s, b, heads, d] with stored scores, as `scoring` specifies.

    q [s, b, heads, d], k and v [s, b, kv heads, d]; v, and then the result, may have another d.

    Query head h reads key-value head h // (heads / kv heads). Keys and values are not copied: the
    queries of a group are the rows of one matrix. The weights [b, heads, s, s] are kept for the
    backward pass, twice with dropout.
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
        scores = soft_cap(wider(scores) * scale, scoring.cap).to(scores.dtype)
        scale = 1.0
    if (alibi := scoring.alibi) is not None:
        scores = scores + alibi.bias(s, s, q.dtype, scale)  # the softmax scales both
    weights = keyed_dropout(
        _softmax(scores, scale, scoring),
        scoring.dropout,
        scoring.seed,
        scoring.fusions.bias_dropout,
        scoring.at(s, heads),
    )
    out = torch.bmm(weights.view(b * groups, -1, s), values).view(b, groups, heads // groups, s, -1)
    return out.permute(3, 0, 1, 2, 4).reshape(s, b, heads, -1)


def _softmax(scores: Tensor, scale: float, scoring: Scoring) -> Tensor:
    """Return softmax(scale * scores) over the visible keys, computed in fp32.

    The result is [b, heads, s, s] in the scores' dtype.
    """
    documents = scoring.documents
    hidden = None if documents is None else documents.hidden
    window = scoring.window
    if not scoring.fusions.masked_softmax or scoring.sink is not None:
        hidden = hidden_keys(hidden, scores, window)
        wide = (wider(scores) * scale).masked_fill(hidden, float("-inf"))
        return _with_sink(wide, scoring.sink).to(scores.dtype)
    if hidden is None:
        return causal_softmax(scores, scale, window)
    return masked_softmax(scores, hidden, scale, window)


def _with_sink(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Return the softmax of scores [b, heads, queries, keys], without the weight of the sink."""
    if sink is None:
        return scores.softmax(-1)
    column = sink.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None,
    scoring: Scoring = PLAIN,
) -> Tensor:
    """Return the attention of each sample's newest token to its tokens so far: [1, b, heads, d].

    q         [1, b, heads, d]
    k, v      [b, kv heads, n, d], the newest token last (KeyValueCache); v may have another d
    padding   fp32 [b, n], -infinity where a sample has no token, otherwise 0; None: all have tokens

    With a window, only keys in the window count.
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
    if (alibi := scoring.alibi) is not None:
        behind = torch.arange(1 - n, 1, device=q.device, dtype=scores.dtype)
        scores = scores + torch.outer(alibi.slopes, behind).view(groups, -1, n)
    if padding is not None:
        scores = scores + padding[:, None, None, :]
    weights = _with_sink(scores.view(b, -1, 1, n), scoring.sink).to(v.dtype)
    return torch.bmm(weights.view(b * groups, -1, n), v.flatten(0, 1)).view(1, b, -1, v.shape[-1])
