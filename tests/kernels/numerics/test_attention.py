"""Weights of a block of attention scores, and the scores' gradients, against float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.kernels.ops.attention import (
    NO_WINDOW,
    TILE,
    AttentionBlock,
    AttentionParameters,
    GradientBlock,
    attention_gradient_,
    attention_weights_,
    first_key,
    row_dots,
)
from tests.kernels.numerics.reference import (
    EXAMPLES,
    SIMULATED,
    WIDTHS,
    assert_close,
    devices,
    exact,
    moved_on,
    random,
    refused,
    types,
)
from tests.kernels.numerics.test_dropout import words

# The logarithm of a sum is good to 2^-20 and below 128 in size, so that its rounding is 2^-18; exp
# is good to 2^-21, its argument to 2^-24 of a size below 128, and sums to 2^-20: together less than
# 2^-16 of a weight.
RELATIVE = 2.0**-16
# A weight below e^-87.3 is 0: an absolute error of 2^-125, times its factors, all below 2^5.
LOST = 2.0**-120
SCALE = 0.37
POSITIONS = 80


class Case:
    """Scores of all queries and keys of a small case, from which the kernel gets blocks."""

    def __init__(
        self,
        device,
        dtype,
        samples,
        groups,
        share,
        length,
        alibi,
        seed,
        window=NO_WINDOW,
        cap=0.0,
    ):
        self.window, self.cap = window, cap
        self.device, self.dtype, self.share, self.length = device, dtype, share, length
        self.samples = samples * groups
        # Each belongs to another sample and starts somewhere inside it; this rank's heads are not
        # the first.
        self.origins = torch.tensor(
            [1000 * POSITIONS * (i + 1) + 7 * i for i in range(samples)], device=device
        )
        rows = length * share
        self.scores = random((self.samples, rows, length), dtype, device, seed, scale=3.0)
        self.gradients = random((self.samples, rows, length), dtype, device, seed + 1)
        self.slopes = (
            torch.rand(groups * share, generator=torch.Generator().manual_seed(seed))
            if alibi
            else None
        )
        position = torch.arange(rows) // share
        distance = torch.arange(length) - position.unsqueeze(1)
        logits = exact(self.scores).detach() * SCALE
        self.slope = torch.ones_like(logits)  # of the cap
        if cap:
            bent = (logits / cap).tanh()
            logits, self.slope = cap * bent, 1 - bent**2
        if self.slopes is not None:
            # [samples groups, rows]
            head = self.slopes.double().view(groups, share).repeat(samples, length)
            logits = logits + head.unsqueeze(-1) * distance
        self.hidden = ((distance > 0) | (distance < -window)).expand_as(logits)
        logits = logits.masked_fill(self.hidden, float("-inf"))
        self.weights, self.logarithms = logits.softmax(-1), logits.logsumexp(-1)
        self.dots = random((self.samples, rows), torch.float32, device, seed + 2)
        if self.slopes is not None:
            self.slopes = self.slopes.to(device)

    def params(self, p, seed):
        return AttentionParameters(
            self.share, SCALE, p, seed, self.origins, POSITIONS, self.cap, self.window
        )

    def keys(self, queries):
        """Return the keys that a block of queries needs."""
        return slice(first_key(queries.start, self.window), queries.stop)

    def cut(self, x, part, queries, keys, moved=False):
        x = x[part, queries.start * self.share : queries.stop * self.share, keys]
        return moved_on(x) if moved else x.clone(memory_format=torch.contiguous_format)

    def weigh(self, part, queries, p=0.0, seed=0, moved=False):
        """Return (weights of the block from the kernel, all logarithms, NaN outside the block)."""
        scores = self.cut(self.scores, part, queries, self.keys(queries), moved)
        logarithms = torch.full(
            (self.samples, self.length * self.share), float("nan"), device=self.device
        )
        place = (self.slopes, part.start, queries.start)
        attention_weights_(AttentionBlock(scores, logarithms, *place, None, self.params(p, seed)))
        return scores, logarithms

    def differentiate(
        self,
        part,
        queries,
        keys,
        p=0.0,
        seed=0,
        moved=False,
    ):
        """Return (weights, gradients of the scores) of a block."""
        scores = self.cut(self.scores, part, queries, keys, moved)
        gradients = self.cut(self.gradients, part, queries, keys, moved)
        logarithms = self.logarithms.float().to(self.device)
        place = (part.start, queries.start, keys.start)
        block = (scores, logarithms, self.slopes, *place, self.params(p, seed))
        attention_gradient_(GradientBlock(*block, gradients, self.dots))
        return scores, gradients


LENGTHS = WIDTHS.filter(lambda n: n <= (257 if SIMULATED else 520))


@devices
@types
@EXAMPLES
@given(
    samples=st.integers(1, 2),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    length=LENGTHS,
    alibi=st.booleans(),
    cut=st.integers(0, 9),
    moved=st.booleans(),
    seed=st.integers(0, 99),
    window=st.one_of(st.just(NO_WINDOW), st.integers(0, 300)),
    cap=st.sampled_from([0.0, 0.0, 0.9, 30.0]),
)
def test_blocks(
    device,
    dtype,
    samples,
    groups,
    share,
    length,
    alibi,
    cut,
    moved,
    seed,
    window,
    cap,
):
    """Compute a block of queries with all its keys, then a block of keys with queries from anywhere.

    Some of the queries see none of the keys.
    """
    case = Case(device, dtype, samples, groups, share, length, alibi, seed, window, cap)
    tiles = -(-length // TILE)
    queries = slice(cut % tiles * TILE, min(cut % tiles * TILE + (cut % 3 + 1) * TILE, length))
    part = slice(cut % case.samples, case.samples)
    everything = case.keys(queries)
    y, logarithms = case.weigh(part, queries, moved=moved)
    want = case.cut(case.weights, part, queries, everything)
    assert_close(y, want, dtype, RELATIVE * want + LOST)
    assert not y.cpu()[case.cut(case.hidden, part, queries, everything)].any()
    rows = slice(queries.start * share, queries.stop * share)
    expected = case.logarithms[part, rows]
    assert_close(logarithms[part, rows], expected, torch.float32, 2.0**-19 * (1 + expected.abs()))
    outside = torch.ones_like(logarithms, dtype=torch.bool)
    outside[part, rows] = False
    assert logarithms[outside].isnan().all()

    keys = slice(cut * 7 % tiles * TILE, length)
    keys = slice(keys.start, min(keys.start + (cut % 2 + 1) * TILE, length))
    weights, gradients = case.differentiate(part, queries, keys, moved=moved)
    want = case.cut(case.weights, part, queries, keys)
    assert_close(weights, want, dtype, RELATIVE * want + LOST)
    g = case.cut(exact(case.gradients).detach(), part, queries, keys)
    dots = exact(case.dots).detach()[part, rows].unsqueeze(-1)
    size = SCALE * want * (g.abs() + dots.abs())  # of the terms that cancel
    want = SCALE * want * (g - dots) * case.cut(case.slope, part, queries, keys)
    assert_close(gradients, want, dtype, RELATIVE * size + LOST)


@devices
def test_what_is_not_seen_may_be_anything(device):
    """Unseen scores may be anything.

    Buffers are reused: old contents remain beyond the diagonal.
    """
    case = Case(device, torch.float32, 1, 1, 1, 40, False, 1)
    whole = slice(0, 40)
    clean = [*case.weigh(slice(0, 1), whole), *case.differentiate(slice(0, 1), whole, whole)]
    for dirt in (float("nan"), float("inf")):
        case.scores.masked_fill_(case.hidden.to(device), dirt)
        case.gradients.masked_fill_(case.hidden.to(device), dirt)
        dirty = [*case.weigh(slice(0, 1), whole), *case.differentiate(slice(0, 1), whole, whole)]
        assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


@devices
@pytest.mark.parametrize(("length", "window"), [(37, NO_WINDOW), (64, NO_WINDOW), (70, 20)])
def test_dropout_is_the_same_however_it_is_cut(device, length, window):
    """The dropout mask does not depend on the blocks.

    Each head has a row of whole tiles for each position of a sample, counted from the sample's
    origin; the gradient has the same mask.
    """
    p, seed, share = 0.4, 2**40 + 5, 2
    case = Case(device, torch.float32, 2, 2, share, length, False, 3, window)
    width, bound = -(-POSITIONS // TILE) * TILE, np.uint64(int((1 - p) * 2**32))
    rows = [
        int(case.origins[sample // 2]) + (sample % 2 * share + head) * POSITIONS + position
        for sample in range(4)
        for position in range(length)
        for head in range(share)
    ]
    kept = np.stack([words(seed, row * width, length) < bound for row in rows])
    mask = torch.from_numpy(kept).view(4, length * share, length) / (1 - p)
    for part in (slice(0, 4), slice(1, 3)):
        for queries in (slice(0, length), slice(TILE, length)):
            y, _ = case.weigh(part, queries, p, seed)
            cut = (part, queries, case.keys(queries))
            want = case.cut(case.weights * mask, *cut)
            assert_close(y, want, torch.float32, RELATIVE * want)
            for keys in (slice(0, TILE), slice(TILE, length)):
                cut = (part, queries, keys)
                weights, gradients = case.differentiate(*cut, p, seed)
                w, m = case.cut(case.weights, *cut), case.cut(mask, *cut)
                assert_close(weights, w * m, torch.float32, RELATIVE * w * m)
                rows = slice(queries.start * share, length * share)
                g, dots = (
                    case.cut(case.gradients, *cut).double().cpu(),
                    case.dots[part, rows].double().cpu(),
                )
                want = SCALE * w * (m * g - dots.unsqueeze(-1))
                assert_close(
                    gradients,
                    want,
                    torch.float32,
                    RELATIVE * w * (2 * g.abs() + dots.unsqueeze(-1).abs()),
                )


@devices
def test_scores_without_bound(device):
    """Large scores do not overflow.

    A row of -infinity is zero; an infinite or undefined score shows as NaN.
    """
    scores = torch.tensor(
        [[[3e38, 0, 0, 0], [-3e38, 3e38, 0, 0], [-math.inf] * 4, [1, 2, math.inf, 0]]],
        device=device,
    )
    undefined = torch.full((1, 4, 4), math.nan, device=device)
    logarithms = torch.empty(1, 4, device=device)
    params = AttentionParameters(1, 1.0)
    again, gradients, dots = (
        scores.clone(),
        torch.ones(1, 4, 4, device=device),
        torch.zeros(1, 4, device=device),
    )
    attention_weights_(AttentionBlock(scores, logarithms, None, 0, 0, None, params))
    assert (
        scores[0, :3].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0] * 4]
        and scores[0, 3].isnan().any()
    )
    assert logarithms[0, 2] == math.inf
    attention_gradient_(GradientBlock(again, logarithms, None, 0, 0, 0, params, gradients, dots))
    assert torch.equal(again[0, :3], scores[0, :3]) and torch.equal(
        gradients[0, 2], torch.zeros(4, device=device)
    )
    attention_weights_(AttentionBlock(undefined, logarithms, None, 0, 0, None, params))
    assert undefined.isnan()[0].diagonal().all()


@devices
@types
@EXAMPLES
@given(rows=st.integers(0, 70), n=LENGTHS, moved=st.booleans(), seed=st.integers(0, 99))
def test_row_dots(device, dtype, rows, n, moved, seed):
    a, b = (random((rows, n), dtype, device, seed + i) for i in range(2))
    found = row_dots(moved_on(a), moved_on(b)) if moved else row_dots(a, b)
    x, y = exact(a).detach(), exact(b).detach()
    assert_close(found, (x * y).sum(-1), torch.float32, 2.0**-20 * (x * y).abs().sum(-1))


@devices
def test_dropout_far_into_a_large_whole(device):
    """Dropout masks are right past element 2^34, where the counter needs its upper word.

    The tensor has 2^15 samples of 8,192 by 8,192 scores.
    """
    sample, total, n, p, seed = 1 << 15, 8192, 40, 0.4, 2**40 + 5
    weights, logarithms = torch.zeros(1, n, n, device=device), torch.empty(1, n, device=device)
    origins = torch.tensor([sample * total], device=device)
    params = AttentionParameters(1, SCALE, p, seed, origins, total)
    attention_weights_(AttentionBlock(weights, logarithms, None, 0, 0, None, params))
    below = np.uint64(int((1 - p) * 2**32))
    mask = np.stack([words(seed, (sample * total + i) * total, n) < below for i in range(n)])
    want = torch.from_numpy(mask).double().tril() / torch.arange(1, n + 1).unsqueeze(1) / (1 - p)
    assert_close(weights[0], want, torch.float32, RELATIVE * want)


@devices
def test_long_rows(device):
    """Process rows with more exponentials than the host keeps."""
    n, queries = 4608, 32
    scores = random((1, queries, n), torch.float32, device, 4)
    logits = (
        exact(scores)
        .detach()
        .masked_fill(torch.ones(queries, n).triu(n - queries + 1).bool(), float("-inf"))
    )
    rows = torch.empty(1, n, device=device)
    attention_weights_(
        AttentionBlock(scores, rows, None, 0, n - queries, None, AttentionParameters(1, 1.0))
    )
    assert_close(scores, logits.softmax(-1), torch.float32, RELATIVE * logits.softmax(-1))


def test_what_is_refused():
    scores, rows = torch.zeros(2, 6, 35), torch.zeros(2, 70)

    def weights(
        scores=scores,
        rows=rows,
        slopes=None,
        sample=0,
        first=32,
        share=2,
        p=0.0,
        seed=1,
        origins=None,
        cap=0.0,
        window=NO_WINDOW,
    ):
        params = AttentionParameters(share, 1.0, p, seed, origins, 70, cap, window)
        attention_weights_(AttentionBlock(scores, rows, slopes, sample, first, None, params))

    weights()
    for figures, values in (
        (("float64",), dict(scores=scores.double())),
        (("scores", "strides"), dict(scores=torch.zeros(2, 35, 6).transpose(1, 2))),
        ((35, 3), dict(first=0)),
        # where masks of dropout would begin within a tile
        (
            ("first", 33, TILE),
            dict(first=33, p=0.5, origins=torch.zeros(2, dtype=torch.int64)),
        ),
        (("logarithms", "float16"), dict(rows=rows.half())),
        (("logarithms", 2, 1), dict(sample=1)),
        (("slopes", [3]), dict(slopes=torch.zeros(3))),
        (("probability", 1.0), dict(p=1.0)),
        (("probability", 0.5, "origins"), dict(p=0.5)),
        (("origins", [3]), dict(origins=torch.zeros(3, dtype=torch.int64))),
        (("seed", -1), dict(seed=-1)),
        (("cap", -1.0), dict(cap=-1.0)),
        (("window", -1), dict(window=-1)),
        ((32, 35), dict(scores=torch.zeros(2, 6, 32), window=40)),
    ):
        refused(lambda values=values: weights(**values), *figures)
    short = torch.zeros(2, 6, 34)
    block = GradientBlock(scores, rows, None, 0, 32, 0, AttentionParameters(2, 1.0), short, rows)
    refused(lambda: attention_gradient_(block), "gradients", [2, 6, 34])
    refused(lambda: row_dots(torch.zeros(2), torch.zeros(3)), [3], [2])
