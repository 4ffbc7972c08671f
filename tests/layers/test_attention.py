"""Attention by every backend, against a softmax with an explicit mask in float64.

What the kernels of a backend are called with: test_attention_calls.py.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

from megatron.kernels.choose import ALL, NONE
from megatron.kernels.cost import Product
from megatron.layers import attention_blocked
from megatron.layers.attention_blocked import block_length, blocked_attention
from megatron.layers.attention_fused import torch_attention
from megatron.layers.attention_unfused import PLAIN, Scoring, unfused_attention
from megatron.layers.positions import Alibi, Documents, alibi_slopes
from megatron.parallel.keyed_random import seeded
from tests.helpers.fusions import Operators
from tests.helpers.operators import OperatorWatch

D = 8
PATHS = ("torch", "unfused", "unfused, fused", "blocked", "blocked, fused")
BLOCKED = pytest.mark.parametrize("path", PATHS[3:])
TWO_SAMPLES = [[7, 1, 12, 3], [23]]  # lengths of the documents of each sample


class Case(NamedTuple):
    """Lengths of documents of samples of equal length, and what is attended by."""

    lengths: list[list[int]]
    heads: int = 4
    groups: int = 2
    alibi: bool = False
    scoring: Scoring = PLAIN
    d: int = D


# In 16 bits a block has 128 positions or more, in others 64. Documents are longer and shorter than
# windows.
WHOLE = [[300], [300]]
DOCUMENTS = [[3, 150, 1, 146], [40, 41, 219]]
CASES = {
    # one block; blocks that end within a tile; several, the last of them short; longer blocks
    "one token": Case([[1]], 1, 1, d=4),
    "a part of a tile": Case([[5], [5]], 6, 3, True, d=3),
    "two blocks": Case([[70], [70]], 6, 2, d=16),
    "three blocks": Case([[131], [131]], 3, 3, True),
    "many blocks": Case([[520]], 2, 2),
    "tiny documents": Case([[1] * 20 + [2, 1, 2, 3], [1, 2] * 9 + [1]], 4, 1, True),
    "documents of equal lengths": Case([[5, 5, 5, 5], [10, 10], [5, 5, 10]], 6, 2),
    "a query sees itself": Case(WHOLE, scoring=Scoring(window=0)),
    "short": Case(DOCUMENTS, alibi=True, scoring=Scoring(window=5, scale=0.5)),
    "a block less one": Case(WHOLE, alibi=True, scoring=Scoring(window=63)),
    "a block": Case(DOCUMENTS, scoring=Scoring(window=64, cap=0.7)),
    "longer than a block": Case(DOCUMENTS, alibi=True, scoring=Scoring(window=131, cap=3.0)),
    "all": Case(DOCUMENTS, scoring=Scoring(window=299, cap=1.5)),
    "no window": Case(WHOLE, alibi=True, scoring=Scoring(cap=0.5, scale=0.6)),
}


def documents_of(lengths):
    joined = np.concatenate(lengths)
    bounds = torch.from_numpy(np.append(0, joined.cumsum()).astype(np.int32))
    return Documents(bounds, joined, len(lengths))


def inputs(s, b, heads, groups, dtype=torch.float64, d=D):
    """Return queries, and keys and values that are slices of a projection."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda n, d: torch.randn(s, b, n, d, generator=generator, dtype=torch.float64)  # noqa: E731
    q = draw(heads, d).to(dtype)
    both = draw(groups, 2 * d).to(dtype)
    return [x.detach().requires_grad_() for x in (q, both[..., :d], both[..., d:])]


def dense(q, k, v, slopes, lengths, scoring=PLAIN):
    """Return the reference: all scores, with unseen ones masked.

    Head h reads group h // (heads / groups).
    """
    s, _, heads, d = q.shape
    group = [h // (heads // k.shape[2]) for h in range(heads)]
    k = k[:, :, group]
    v = v[:, :, group]
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) * (scoring.scale or 1 / math.sqrt(d))
    if scoring.cap:
        scores = scoring.cap * torch.tanh(scores / scoring.cap)
    if slopes is not None:
        i = torch.arange(s).view(s, 1)
        j = torch.arange(s).view(1, s)
        scores = scores - slopes.double().view(heads, 1, 1) * (i - j)
    weights = scores.masked_fill(~seen_of(lengths, scoring.window), -torch.inf).softmax(-1)
    return torch.einsum("bhij,jbhd->ibhd", weights, v)


def seen_of(lengths, window=PLAIN.window):
    """Return which keys queries see: [b, 1, s, s]."""
    ids = torch.stack(
        [torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in lengths]
    )
    i = torch.arange(ids.shape[1]).unsqueeze(1)
    j = torch.arange(ids.shape[1])
    near = (j <= i) & (j >= i - window)
    return (near & (ids.unsqueeze(2) == ids.unsqueeze(1))).unsqueeze(1)


def attend(path, scoring, alibi=None, documents=None, mixed=False):
    """Return a function of queries, keys and values; `mixed`: which are parts of one tensor."""
    scoring = scoring._replace(
        alibi=None if alibi is None else Alibi(alibi),
        fusions=ALL if path.endswith(", fused") else NONE,
        documents=documents,
    )
    if not path.startswith("blocked"):
        core = unfused_attention if path.startswith("unfused") else torch_attention
        return lambda *x: core(*x, scoring)

    def blocked(q, k, v):
        if mixed:
            groups = q.unflatten(2, (k.shape[2], -1))
            return blocked_attention(
                (torch.cat((groups, k.unsqueeze(3), v.unsqueeze(3)), 3),), scoring
            )
        return blocked_attention((q, k, v), scoring)

    return blocked


def output_and_gradients(attend, tensors):
    out = attend(*tensors)
    weights = torch.arange(out.numel(), dtype=torch.float64).cos().view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights.to(out.dtype))]


def compare(path, case, dtype, bound, mixed):
    """Compare output and gradients with float64; `bound` is relative to the whole of each.

    A query that sees only itself has a gradient of 0, in which terms of the size of its output
    cancel.
    """
    lengths, heads, groups, alibi, scoring, d = case
    if path == "torch":
        scoring = scoring._replace(cap=0.0)
    slopes = alibi_slopes(heads) if alibi else None
    tensors = inputs(sum(lengths[0]), len(lengths), heads, groups, dtype, d)
    documents = documents_of(lengths) if any(len(n) > 1 for n in lengths) else None
    actual = output_and_gradients(attend(path, scoring, slopes, documents, mixed), tensors)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = output_and_gradients(lambda *x: dense(*x, slopes, lengths, scoring), exact)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= bound * (b.norm() or expected[0].norm())


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_against_a_dense_mask(name, path):
    """The kernels, and slopes divided by the scale, are in fp32: some units of 2^-24.

    Queries, keys and values are apart after a rotation; torch has no soft cap.
    """
    narrow = path.endswith(", fused") or path == "unfused"
    dtype, bound = (torch.float32, 2.0**-19) if narrow else (torch.float64, 1e-13)
    compare(path, CASES[name], dtype, bound, CASES[name].scoring.window == PLAIN.window)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)])
def test_in_16_bits(dtype, unit, path):
    """Scores, weights, their gradients and the results are rounded to 2^-9 (2^-12) of themselves.

    A score of size 3 is an exponent, so that its rounding, with a root mean square of 2^-9 /
    3^(1/2), comes up to 3 times into its weight: together less than 2^-7 (2^-10). A limited score
    is rounded once more than others.
    """
    with Operators() as seen:
        compare(path, CASES["three blocks"], dtype, 4 * unit, False)
    assert bool(seen.calls) == path.endswith(", fused")
    if path not in ("unfused", "blocked"):
        compare(
            path,
            Case(WHOLE, alibi=True, scoring=Scoring(window=150, cap=2.0)),
            dtype,
            8 * unit,
            False,
        )


# -- dropout ---------------------------------------------------------------------------------------


def weights_of(path, s, b, heads, scoring, seed=3, documents=None):
    """Return weights [b, heads, s, s]: the output for equal scores and one-hot values."""
    zeros = torch.zeros(s, b, heads, s)
    values = torch.eye(s).view(s, 1, 1, s).expand(s, b, heads, s)
    run = attend(path, scoring._replace(seed=seed), None, documents)
    with seeded(torch.device("cpu"), seed):
        return run(zeros, zeros, values).permute(1, 2, 0, 3)


@pytest.mark.parametrize("path", PATHS)
def test_dropout_acts_inside_documents_and_repeats(path):
    """Weights are 1 / (keys seen), dropped or scaled up, and repeat for a seed.

    Documents, of one length or of several, samples and heads have masks of their own.
    """
    p = 0.25
    heads = 4
    lengths = [[31, 1, 20, 12]] * 6
    scoring = Scoring(dropout=p)
    documents = documents_of(lengths)
    first, repeated, other = (
        weights_of(path, 64, 6, heads, scoring, seed, documents) for seed in (3, 3, 4)
    )
    assert torch.equal(first, repeated) and not torch.equal(first, other)
    seen = seen_of(lengths).expand_as(first)
    full = (seen / seen.sum(-1, keepdim=True) / (1 - p)).float()
    assert ((first == 0) | torch.isclose(first, full, rtol=1e-5, atol=0)).all()
    undropped = (first != 0)[seen].double()
    assert abs(undropped.mean().item() - (1 - p)) < 5 * (p * (1 - p) / len(undropped)) ** 0.5
    # the first 20 queries and keys of two documents of each sample and head
    squares = [
        x[..., i : i + 20, i : i + 20].flatten(2) != 0 for x in (first, other) for i in (0, 32)
    ]
    masks = [tuple(row) for square in squares for row in square.flatten(0, 1).tolist()]
    assert len(set(masks)) == len(masks) == 2 * 2 * 6 * heads


@pytest.mark.parametrize("scoring", [PLAIN, Scoring(window=70, cap=0.8)], ids=["plain", "capped"])
@BLOCKED
def test_gradients_with_dropout(path, scoring):
    """Gradients equal autograd's through a dense softmax with the same mask, in float64.

    The mask is read from outputs for one-hot values.
    """
    p = 0.4
    s = 150
    q, k, v = inputs(s, 1, 2, 2, torch.float32, s)
    run = attend(path, scoring._replace(dropout=p, seed=5))
    with torch.no_grad():
        dropped = run(q, k, torch.eye(s).view(s, 1, 1, s).expand(s, 1, 2, s))
    mask = (dropped.permute(1, 2, 0, 3) != 0) / (1 - p)

    def reference(q, k, v):
        scores = torch.einsum("ibhd,jbhd->bhij", q, k) / s**0.5
        if scoring.cap:
            scores = scoring.cap * (scores / scoring.cap).tanh()
        weights = scores.masked_fill(~seen_of([[s]], scoring.window), -math.inf).softmax(-1)
        return torch.einsum("bhij,jbhd->ibhd", weights * mask, v)

    actual = output_and_gradients(run, [q, k, v])
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    for a, b in zip(actual, output_and_gradients(reference, exact), strict=True):
        assert (a.double() - b).norm() <= 2.0**-19 * b.norm()


# -- blocks ----------------------------------------------------------------------------------------


@BLOCKED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_queries_adds_up_in_fp32(monkeypatch, dtype, path):
    """The gradient of queries is summed in fp32.

    There are eight blocks of 32 keys; each but the first adds a quarter of the format's unit, which
    alone would be lost.

    All scores are 0, so that the last query has weights of exactly 2^-8. Values, and the weights'
    gradients, alternate between 1 and -1 with mean 0, and with keys of the same sign each product
    is positive.
    """
    monkeypatch.setattr(attention_blocked, "block_length", lambda *_: 32)
    s = 256
    unit = torch.finfo(dtype).eps / 4
    sign = torch.ones(s).index_fill_(0, torch.arange(1, s, 2), -1.0)
    q, k, v = (torch.zeros(s, 1, 1, 4, dtype=dtype) for _ in range(3))
    k[:, 0, 0, 0] = sign * torch.full((s,), unit).index_fill_(0, torch.arange(32), 1.0)
    v[:, 0, 0, 0] = sign
    attend(path, PLAIN)(q.requires_grad_(), k, v)[..., 0].sum().backward()
    exact = torch.tensor(32 * 2.0**-8 / 2 * (1 + 7 * unit))  # 2: the root of the head dimension
    assert q.grad[-1, 0, 0, 0] == exact.to(dtype) > torch.tensor(32 * 2.0**-8 / 2)


# Products of one head may be summed in another order than those of four: in fp32 some units of
# 2^-24. In bf16 a sum may then be rounded to its neighbour: 2^-8 of it, after which scores of size
# 3 move weights by 3 times that at most.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 2.0**-20), (torch.bfloat16, 2.0**-6)], ids=str
)
@BLOCKED
@pytest.mark.parametrize("lengths", [TWO_SAMPLES, [[70], [70]]], ids=["documents", "whole"])
def test_parts_of_the_heads_change_nothing(monkeypatch, path, lengths, dtype, bound):
    """Splitting the heads into parts changes nothing.

    They are split where their scores would be many; ALiBi and dropout use the global head number.
    """
    documents = documents_of(lengths) if len(lengths[0]) > 1 else None
    tensors = inputs(sum(lengths[0]), 2, 4, 2, dtype)
    monkeypatch.setattr(attention_blocked.torch, "get_num_threads", lambda: 1)
    run = attend(path, Scoring(dropout=0.3, seed=11), alibi_slopes(4), documents, True)
    expected = output_and_gradients(run, tensors)
    each = 70 * 2 * (64 if dtype == torch.float32 else 70)
    for scores in (1, 3 * each):  # one head at a time, and several
        monkeypatch.setattr(attention_blocked, "_SCORES", scores)
        for a, b in zip(expected, output_and_gradients(run, tensors), strict=True):
            assert (a - b).double().norm() <= bound * a.double().norm()


# -- memory ----------------------------------------------------------------------------------------


def watched(run, tensors):
    """Return the largest size of a tensor that an operator returns, and FLOPs of batched products."""
    elements = [0]
    flops = [0.0]

    def look(name, args, returned):
        elements.extend(x.numel() for x in returned)
        if name in ("bmm", "baddbmm"):
            a, b = args[-2:]
            flops.append(Product(a.shape[1], b.shape[2], a.shape[2], a.shape[0]).flops)

    with OperatorWatch(look):
        output_and_gradients(run, tensors)
    return max(elements), sum(flops)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["torch", *PATHS[3:]])
def test_blocks_and_windows_take_no_memory_of_the_sample_squared(path):
    """No tensor has a place for each pair of positions, and blocks outside of windows are skipped.

    A block has up to 128 positions, by torch up to 512 queries, and beside them its window and the
    rest of a tile.
    """
    s = 1280
    window = 100
    heads = 4
    blocks = path.startswith("blocked")
    for alibi in (None, alibi_slopes(heads)):
        tensors = inputs(s, 1, heads, 1, torch.float32)
        largest, flops = watched(attend(path, Scoring(window=window), alibi), tensors)
        block = 128 if blocks else 128 + 16
        # twice in the backward pass
        assert largest <= max(2 * heads * block * (window + block + 32), tensors[0].numel())
        assert not blocks or flops <= 7 * 2 * heads * s * (window + block + 32) * D
    if blocks:
        tensors = inputs(s, 1, 2, 2, torch.float32, 4)
        run = attend(path, Scoring(dropout=0.1, seed=3), mixed=True)
        largest, _ = watched(run, tensors)
        # The scores of a block, twice in the backward pass, for both heads.
        assert largest <= 2 * 2 * block_length(s, torch.float32) * s < s * s
