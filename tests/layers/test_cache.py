"""Attention of the newest token to cached keys, against its formula, one head at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron.layers.attention_unfused import Scoring, cached_attention
from megatron.layers.cache import KeyValueCache
from megatron.layers.positions import Alibi

LENGTHS, HEADS, GROUPS, D = (5, 2, 7), 6, 3, 4


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, slope: float, scale: float, window: int, cap: float
) -> Tensor:
    """Return attention of one head: q [d], k and v [n, d], in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    n = len(k)
    weights = []
    for j in range(max(0, n - 1 - window), n):
        score = scale * float(q @ k[j])
        score = cap * math.tanh(score / cap) if cap else score
        weights.append(math.exp(score - slope * (n - 1 - j)))
    seen = torch.tensor(weights, dtype=torch.float64)
    return (seen / seen.sum()) @ v[-len(weights) :]


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(),
        Scoring(0.3, 0.5),
        Scoring(window=3),
        Scoring(cap=2.0, window=3),
        Scoring(window=0),
    ],
)
def test_each_sample_and_head(scoring: Scoring, alibi: bool) -> None:
    """Three samples of different lengths: their first pass, two further tokens, one sample less."""
    longest = max(LENGTHS)
    cache = KeyValueCache(LENGTHS, longest + 3, torch.device("cpu"))
    keys, values = draw(longest + 2, 3, GROUPS, D), draw(longest + 2, 3, GROUPS, D) + 1
    rows = [list(range(n)) for n in LENGTHS]  # of keys and values, for each sample
    assert cache.put(0, keys[:longest], values[:longest]) is None
    cache.used = longest
    slopes = torch.tensor([0.5**i for i in range(HEADS)]) if alibi else None
    kept = [0, 1, 2]
    for step in range(2):
        if step:
            kept = [1, 2]  # the longest of those that stay has padding no more
            cache.keep(kept)
        new = longest + step
        q = draw(1, len(kept), HEADS, D)
        assert cache.position_ids.flatten().tolist() == [LENGTHS[i] + step for i in kept]
        stored = cache.put(0, keys[new : new + 1, kept], values[new : new + 1, kept])
        assert stored is not None
        found = cached_attention(
            q,
            *stored,
            cache.padding,
            scoring._replace(alibi=None if slopes is None else Alibi(slopes)),
        )
        cache.used += 1
        assert found.shape == q.shape
        for at, sample in enumerate(kept):
            rows[sample].append(new)
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                expected = by_formula(
                    q[0, at, head],
                    keys[rows[sample], sample, group],
                    values[rows[sample], sample, group],
                    0.0 if slopes is None else float(slopes[head]),
                    scoring.scale or 1 / math.sqrt(D),
                    scoring.window,
                    scoring.cap,
                )
                torch.testing.assert_close(
                    found[0, at, head].double(), expected, rtol=1e-5, atol=1e-6
                )
