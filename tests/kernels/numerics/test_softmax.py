"""Softmax of scores: values and gradients against float64."""

import torch
from hypothesis import strategies as st

from megatron.kernels.ops.attention import NO_WINDOW, causal_softmax, masked_softmax
from tests.kernels.numerics.reference import (
    ROWS,
    WIDTHS,
    assert_close,
    devices,
    drawn,
    exact,
    random,
    refused,
)

# exp is good to 2^-21 of itself, sums of up to 16,384 terms of one sign to 2^-20, the argument's
# rounding to 2^-24 of its size (below 100): together less than 2^-16 of the result.
RELATIVE = 2.0**-16


WINDOWS = st.one_of(st.just(NO_WINDOW), st.integers(0, 300))


def compare(softmax, x, hidden, scale, seed):
    """Compare values and gradients with float64.

    The gradient starts from the rounded probabilities.
    """
    y = softmax(x.requires_grad_())
    dtype = x.dtype
    want = (exact(x).detach() * scale).masked_fill(hidden, float("-inf"))
    want = want.softmax(-1).nan_to_num(0.0)
    assert_close(y, want, dtype, RELATIVE * want)
    assert not y[hidden.expand_as(y)].any()
    dy = random(y.shape, dtype, x.device, seed + 1)
    y.backward(dy)
    p = exact(y).detach()
    g = exact(dy).detach()
    dot, size = ((p * each).sum(-1, keepdim=True) for each in (g, g.abs()))
    size = scale * p * (g.abs() + size)  # of the terms that cancel
    assert_close(x.grad, scale * p * (g - dot), dtype, RELATIVE * size)


@drawn(batch=st.integers(0, 3), queries=ROWS, more=st.integers(0, 40), keys=WIDTHS, window=WINDOWS)
def test_causal(device, dtype, batch, queries, more, keys, window, seed):
    """Apply the causal mask, also with more keys than queries, as in generation."""
    keys = max(keys, queries) if more else max(queries, 1)
    scale = 0.3 + seed / 50
    x = random((batch, queries, keys), dtype, device, seed, scale=3.0)
    pairs = torch.ones(queries, keys, dtype=torch.bool)
    hidden = pairs.triu(keys - queries + 1) | pairs.tril(keys - queries - window - 1)
    compare(lambda x: causal_softmax(x, scale, window), x, hidden, scale, seed)


@drawn(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), WIDTHS),
    shared=st.booleans(),
    share=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    window=WINDOWS,
)
def test_masked(device, dtype, shape, shared, share, window, seed):
    """Apply a mask; a row that sees no key is zero and has no gradient."""
    x = random(shape, dtype, device, seed, scale=3.0)
    batch, _, queries, keys = shape
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(1 if shared else batch, 1, queries, keys, generator=generator) < share
    earlier = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries - window - 1)
    hidden = mask | earlier
    compare(lambda x: masked_softmax(x, mask.to(device), 0.7, window), x, hidden, 0.7, seed)


@devices
def test_scores_without_bound(device):
    """Large scores do not overflow, and an infinite one is NaN rather than a wrong number."""
    x = torch.tensor([[3e38, -3e38, 1.0, 2.0]] * 4, device=device)
    assert causal_softmax(x)[-1].tolist() == [1, 0, 0, 0]
    assert causal_softmax(torch.full((4, 4), float("nan"), device=device)).isnan()[3].all()
    x[3, 0] = float("inf")
    assert causal_softmax(x)[3, 0].isnan()


def test_what_is_refused():
    scores = torch.zeros(2, 3, 4, 8)
    mask = torch.zeros(2, 1, 4, 8, dtype=torch.bool)
    refused(lambda: causal_softmax(scores.double()), "scores", "float64")
    refused(lambda: masked_softmax(scores, mask[..., :7]), "mask", [2, 1, 4, 7], [2, 1, 4, 8])
    refused(lambda: masked_softmax(scores, mask.float()), "mask", "float32", "bool")
    refused(lambda: torch.ops.megatron.softmax(scores.transpose(1, 2), None, 1.0), "strides")
