"""Sliding windows, soft caps and scales of scores: every way to compute attention, in float64."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config import Config
from megatron.kernels.choose import ALL, NONE
from megatron.kernels.work import Product
from megatron.layers import attention as module
from megatron.layers.attention import CoreAttention
from megatron.layers.attention_blocked import blocked_attention
from megatron.layers.attention_fused import flash_attention, torch_attention
from megatron.layers.attention_unfused import PLAIN, Scoring, unfused_attention
from megatron.layers.positions import Alibi, alibi_slopes
from tests.helpers.fusions import Operators, context
from tests.layers.test_attention import (
    Largest,
    dense,
    documents_of,
    inputs,
    output_and_gradients,
)

HEADS, GROUPS = 4, 2
PATHS = ("torch", "unfused", "unfused, fused", "blocked", "blocked, fused")


def attend(path, documents, alibi, scoring, dropout=0.0, seed=0):
    """Return a function of queries, keys and values."""
    scoring = scoring._replace(
        alibi=Alibi(alibi_slopes(HEADS)) if alibi else None,
        fusions=ALL if path.endswith(", fused") else NONE,
        documents=documents,
        dropout=dropout,
        seed=seed,
    )
    if path.startswith("blocked"):
        return lambda *x: blocked_attention(x, scoring)
    core = unfused_attention if path.startswith("unfused") else torch_attention
    return lambda *x: core(*x, scoring)


# Documents longer and shorter than the window; in 16 bits a block has 128 positions or more, in
# others 64.
LENGTHS = {"one": [[300], [300]], "documents": [[3, 150, 1, 146], [40, 41, 219]]}
SCORINGS = {
    "itself": Scoring(window=0),
    "short": Scoring(window=5, scale=0.5),
    "a block less one": Scoring(window=63),
    "a block": Scoring(window=64, cap=0.7),
    "longer than a block": Scoring(window=131, cap=3.0, scale=0.2),
    "all but one": Scoring(window=298),
    "all": Scoring(window=299, cap=1.5),
    "no window": Scoring(cap=0.5, scale=0.6),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_against_a_dense_mask(scoring, lengths, alibi, path):
    """Output and gradients equal those of all scores with a mask; torch has no soft cap.

    The kernels, and slopes divided by the scale, are in fp32: some units of 2^-24, relative to the
    whole. A query that sees only
    itself has a gradient of 0, in which terms of the size of its output cancel.
    """
    scores, cut = SCORINGS[scoring], LENGTHS[lengths]
    if path == "torch":
        scores = scores._replace(cap=0.0)
    narrow = path.endswith(", fused") or path == "unfused"
    dtype, bound = (torch.float32, 2.0**-19) if narrow else (torch.float64, 1e-13)
    tensors = inputs(300, 2, HEADS, GROUPS, dtype)
    documents = None if lengths == "one" else documents_of(cut)
    slopes = alibi_slopes(HEADS) if alibi else None
    found = output_and_gradients(attend(path, documents, alibi, scores), tensors)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = output_and_gradients(lambda *x: dense(*x, slopes, cut, scores), exact)
    for a, b in zip(found, expected, strict=True):
        size = b.norm() if scores.window else expected[0].norm()
        assert (a.double() - b).norm() <= bound * size


@pytest.mark.slow
@pytest.mark.parametrize("path", ["torch", "unfused, fused", "blocked, fused"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 2.0**-6), (torch.float16, 2.0**-9)], ids=str
)
def test_in_16_bits(dtype, bound, path):
    """Compare with float64: scores, weights, their gradients and the results are rounded.

    A limited score is rounded once more than others (tests/layers/test_blocked_attention.py).
    """
    scoring = Scoring(window=150) if path == "torch" else Scoring(window=150, cap=2.0)
    tensors = inputs(300, 2, HEADS, GROUPS, dtype)
    found = output_and_gradients(attend(path, None, True, scoring), tensors)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    slopes = alibi_slopes(HEADS)
    expected = output_and_gradients(lambda *x: dense(*x, slopes, [[300]] * 2, scoring), exact)
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("path", PATHS[1:])
def test_a_window_keeps_the_masks_of_dropout(path):
    """Weights are dropped at the places where they are without a window.

    With equal scores and one-hot values the output is the weights.
    """
    s, window, p = 150, 70, 0.4
    zeros = torch.zeros(s, 2, HEADS, s)
    values = torch.eye(s).view(s, 1, 1, s).expand(s, 2, HEADS, s)
    kept = []
    for scoring in (Scoring(window=window), PLAIN):
        with Operators():
            out = attend(path, None, False, scoring, p, 7)(zeros, zeros, values)
        kept.append(out.permute(1, 2, 0, 3) != 0)
    inside = torch.ones(s, s, dtype=torch.bool).tril().triu(-window)
    assert torch.equal(kept[0], kept[1] & inside)
    assert 0.5 < kept[0][..., inside].double().mean() < 0.7


@pytest.mark.parametrize("path", ["blocked", "blocked, fused"])
def test_gradients_with_a_cap_and_dropout(path):
    """Gradients equal autograd's through a dense softmax with the same mask, in float64."""
    p, s, d = 0.4, 150, 150
    scoring = Scoring(window=70, cap=0.8)
    q, k, v = (
        torch.randn(s, 1, 2, d, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    run = attend(path, None, False, scoring, p, 5)
    dropped = run(q, k, torch.eye(s).view(s, 1, 1, s).expand(s, 1, 2, s))
    mask = (dropped.permute(1, 2, 0, 3) != 0) / (1 - p)

    def reference(q, k, v):
        scores = 0.8 * (torch.einsum("ibhd,jbhd->bhij", q, k) / d**0.5 / 0.8).tanh()
        seen = torch.ones(s, s, dtype=torch.bool).tril().triu(-70)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("bhij,jbhd->ibhd", weights * mask, v)

    found = output_and_gradients(run, [x.requires_grad_() for x in (q, k, v)])
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    for a, b in zip(found, output_and_gradients(reference, exact), strict=True):
        assert (a.double() - b).norm() <= 2.0**-19 * b.norm()


class Products(TorchDispatchMode):
    """Add up the FLOPs of batched products."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("bmm", "baddbmm"):
            a, b = args[-2:]
            self.flops += Product(a.shape[1], b.shape[2], a.shape[2], a.shape[0]).flops
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("path", ["torch", "blocked", "blocked, fused"])
def test_nothing_is_of_the_size_of_the_sample_squared(path, alibi):
    """No tensor has a place for each pair of positions, and blocks outside of windows are skipped.

    A block has up to 128 positions, by torch up to 512 queries, and beside them its window and the
    rest of a tile.
    """
    s, window = 2560, 100
    tensors = inputs(s, 1, 2, 1, torch.float32)
    run = attend(path, None, alibi, Scoring(window=window))
    if alibi:
        tensors = inputs(s, 1, HEADS, 1, torch.float32)
    heads = tensors[0].shape[2]
    with Largest() as seen, Products() as counted:
        output_and_gradients(run, tensors)
    block = 128 if path.startswith("blocked") else 128 + 16
    # twice in the backward pass
    assert seen.elements <= max(2 * heads * block * (window + block + 32), tensors[0].numel())
    if path.startswith("blocked"):
        d = tensors[0].shape[3]
        assert counted.flops <= 7 * 2 * heads * s * (window + block + 32) * d


def test_flash_attention_is_told(monkeypatch):
    """flash-attn gets window, cap and scale, by the names of its version 2.6, if there are any."""
    seen = []

    def whole(q, k, v, *, dropout_p, causal, alibi_slopes, **more):
        seen.append(more)
        return q

    def varlen(q, *_, dropout_p, causal, alibi_slopes, **more):
        seen.append(more)
        return q

    stand_in = types.ModuleType("flash_attn")
    stand_in.flash_attn_varlen_func, stand_in.flash_attn_func = varlen, whole
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    tensors = inputs(23, 2, 4, 2)
    for scoring in (PLAIN, Scoring(0.3, 2.0, 7)):
        for documents in (None, documents_of([[23], [20, 3]])):
            flash_attention(*tensors, scoring._replace(documents=documents))
    told = dict(softmax_scale=0.3, softcap=2.0, window_size=(7, 0))
    assert seen == [{}, {}, told, told]


def test_each_layer_has_its_own_window():
    """A number N takes the window from every N-th layer, a list from those with a 0."""
    common = dict(num_layers=4, hidden_size=32, num_attention_heads=4, seq_length=8, vocab_size=8)
    common |= dict(window_size=(3, 0), softmax_scale=0.25, attention_logit_softcapping=7.0)
    for skip, windowed in (
        (None, [1, 1, 1, 1]),
        ((2,), [1, 0, 1, 0]),
        ((3,), [1, 1, 0, 1]),
        ((1,), [0, 0, 0, 0]),
        ((1, 0, 0, 1), [1, 0, 0, 1]),
    ):
        config = Config.create(**common, window_attn_skip_freq=skip)
        cores = [CoreAttention(context(), config.model, layer) for layer in range(4)]
        scores = cores[0].scoring._replace(scale=0.25, cap=7.0, window=3)
        none = scores._replace(window=module.NO_WINDOW)
        assert [core.scoring for core in cores] == [scores if n else none for n in windowed]
