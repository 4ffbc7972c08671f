"""Weights of a block of attention scores, and the scores' gradients, against float64."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
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
    SIMULATED,
    WIDTHS,
    assert_close,
    devices,
    drawn,
    exact,
    moved_on,
    random,
    refused,
)
from tests.kernels.numerics.test_dropout import mask

# The logarithm of a sum is good to 2^-20 and below 128 in size, so that its rounding is 2^-18; exp
# is good to 2^-21, its argument to 2^-24 of a size below 128, and sums to 2^-20: together less than
# 2^-16 of a weight.
RELATIVE = 2.0**-16
# A weight below e^-87.3 is 0: an absolute error of 2^-125, times its factors, all below 2^5.
LOST = 2.0**-120
SCALE = 0.37
POSITIONS = 80
SEED = 2**40 + 5
LENGTHS = WIDTHS.filter(lambda n: n <= (257 if SIMULATED else 520))


class Case:
    """Scores of all queries and keys of a small case, from which the kernel gets blocks."""

    def __init__(
        self,
        device,
        dtype,
        seed,
        samples=1,
        groups=1,
        share=1,
        length=40,
        alibi=False,
        window=NO_WINDOW,
        cap=0.0,
        moved=False,
        probability=0.0,
    ):
        self.share = share
        self.length = length
        self.window = window
        self.moved = moved
        self.samples = samples * groups
        rows = length * share
        shape = self.samples, rows, length
        self.scores = random(shape, dtype, device, seed, scale=3.0)
        self.gradients = random(shape, dtype, device, seed + 1)
        self.dots = random(shape[:2], torch.float32, device, seed + 2)
        # Each belongs to another sample and starts somewhere inside it, far beyond element 2^34,
        # where the counter of random words needs its upper half; this rank's heads are not the
        # first.
        origins = [2**31 * (i + 1) + 7 * i for i in range(samples)]
        dropout = probability, SEED, torch.tensor(origins, device=device), POSITIONS
        self.params = AttentionParameters(share, SCALE, *dropout, cap, window)

        distance = torch.arange(length) - torch.arange(rows).unsqueeze(1) // share
        logits = exact(self.scores).detach() * SCALE
        self.slope = torch.full_like(logits, SCALE)  # of the cap
        if cap:
            bent = (logits / cap).tanh()
            logits = cap * bent
            self.slope = SCALE * (1 - bent**2)
        self.slopes = None
        if alibi:
            slopes = torch.rand(groups * share, generator=torch.Generator().manual_seed(seed))
            self.slopes = slopes.to(device)
            of_rows = slopes.double().view(groups, share).repeat(samples, length)
            logits = logits + of_rows.unsqueeze(-1) * distance
        self.hidden = ((distance > 0) | (distance < -window)).expand_as(logits)
        logits = logits.masked_fill(self.hidden, float("-inf"))
        self.weights = logits.softmax(-1)
        self.logarithms = logits.logsumexp(-1)
        self.factors = torch.ones_like(logits)
        if probability:
            width = -(-POSITIONS // TILE) * TILE
            places = itertools.product(origins, range(groups), range(length), range(share))
            stay = [
                mask(SEED, (origin + (g * share + i) * POSITIONS + q) * width, length, probability)
                for origin, g, q, i in places
            ]
            self.factors = torch.stack(stay).view(shape) / (1 - probability)

    def cut(self, samples, queries, keys, *tensors):
        """Return the block of each of the tensors [samples, rows, keys]."""
        index = samples, slice(queries.start * self.share, queries.stop * self.share), keys
        blocks = (x[index].clone(memory_format=torch.contiguous_format) for x in tensors)
        return [moved_on(x) if self.moved else x for x in blocks]

    def keys(self, queries):
        """Return the keys that a block of queries needs."""
        return slice(first_key(queries.start, self.window), queries.stop)

    def weigh(self, samples, queries):
        """Return (weights of the block from the kernel, all logarithms, NaN outside the block)."""
        (scores,) = self.cut(samples, queries, self.keys(queries), self.scores)
        logarithms = torch.full_like(self.dots, float("nan"))
        offsets = self.slopes, samples.start, queries.start, None
        attention_weights_(AttentionBlock(scores, logarithms, *offsets, self.params))
        return scores, logarithms

    def differentiate(self, samples, queries, keys):
        """Return (weights, gradients of the scores) of a block."""
        scores, gradients = self.cut(samples, queries, keys, self.scores, self.gradients)
        logarithms = self.logarithms.float().to(self.dots.device)
        block = (
            scores,
            logarithms,
            self.slopes,
            samples.start,
            queries.start,
            keys.start,
            self.params,
        )
        attention_gradient_(GradientBlock(*block, gradients, self.dots))
        return scores, gradients

    def check_weights(self, samples, queries):
        y, logarithms = self.weigh(samples, queries)
        tensors = self.weights * self.factors, self.hidden
        want, hidden = self.cut(samples, queries, self.keys(queries), *tensors)
        assert_close(y, want, y.dtype, RELATIVE * want + LOST)
        assert not y.cpu()[hidden].any()
        rows = samples, slice(queries.start * self.share, queries.stop * self.share)
        expected = self.logarithms[rows]
        error = 2.0**-19 * (1 + expected.abs())
        assert_close(logarithms[rows], expected, torch.float32, error)
        logarithms[rows] = float("nan")
        assert logarithms.isnan().all()

    def check_gradients(self, samples, queries, keys):
        weights, gradients = self.differentiate(samples, queries, keys)
        g = exact(self.gradients).detach() * self.factors
        dots = exact(self.dots).detach().unsqueeze(-1)
        size = SCALE * self.weights * (g.abs() + dots.abs())  # of the terms that cancel
        expected = self.slope * self.weights * (g - dots)
        tensors = self.weights * self.factors, expected, size
        want, expected, size = self.cut(samples, queries, keys, *tensors)
        assert_close(weights, want, weights.dtype, RELATIVE * want + LOST)
        assert_close(gradients, expected, weights.dtype, RELATIVE * size + LOST)


@drawn(
    case=st.fixed_dictionaries(
        {
            "samples": st.integers(1, 2),
            "groups": st.integers(1, 3),
            "share": st.integers(1, 3),
            "length": LENGTHS,
            "alibi": st.booleans(),
            "moved": st.booleans(),
            "window": st.one_of(st.just(NO_WINDOW), st.integers(0, 300)),
            "cap": st.sampled_from([0.0, 0.0, 0.9, 30.0]),
        }
    ),
    cut=st.integers(0, 9),
)
def test_blocks(device, dtype, case, cut, seed):
    """Compute a block of queries with all its keys, then a block of keys with queries from anywhere.

    Some of the queries see none of the keys.
    """
    case = Case(device, dtype, seed, **case)
    tiles = -(-case.length // TILE)

    def some(first, count):
        start = first % tiles * TILE
        return slice(start, min(start + count * TILE, case.length))

    queries = some(cut, cut % 3 + 1)
    samples = slice(cut % case.samples, case.samples)
    case.check_weights(samples, queries)
    case.check_gradients(samples, queries, some(cut * 7, cut % 2 + 1))


@devices
def test_what_is_not_seen_may_be_anything(device):
    """Unseen scores may be anything.

    Buffers are reused: old contents remain beyond the diagonal.
    """
    case = Case(device, torch.float32, 1)
    samples, block = slice(0, 1), slice(0, 40)

    def results():
        return *case.weigh(samples, block), *case.differentiate(samples, block, block)

    clean = results()
    for dirt in (float("nan"), float("inf")):
        for x in (case.scores, case.gradients):
            x.masked_fill_(case.hidden.to(device), dirt)
        assert all(map(torch.equal, clean, results()))


@devices
@pytest.mark.parametrize(("length", "window"), [(37, NO_WINDOW), (64, NO_WINDOW), (70, 20)])
def test_dropout_is_the_same_however_it_is_cut(device, length, window):
    """The dropout mask does not depend on the blocks.

    Each head has a row of whole tiles for each position of a sample, counted from the sample's
    origin; the gradient has the same mask.
    """
    sizes = {"samples": 2, "groups": 2, "share": 2, "length": length, "window": window}
    case = Case(device, torch.float32, 3, **sizes, probability=0.4)
    for samples in (slice(0, 4), slice(1, 3)):
        for queries in (slice(0, length), slice(TILE, length)):
            case.check_weights(samples, queries)
            for keys in (slice(0, TILE), slice(TILE, length)):
                case.check_gradients(samples, queries, keys)


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
    scores_copy = scores.clone()
    gradients = torch.ones(1, 4, 4, device=device)
    dots = torch.zeros(1, 4, device=device)
    attention_weights_(AttentionBlock(scores, logarithms, None, 0, 0, None, params))
    assert (
        scores[0, :3].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0] * 4]
        and scores[0, 3].isnan().any()
    )
    assert logarithms[0, 2] == math.inf
    attention_gradient_(
        GradientBlock(scores_copy, logarithms, None, 0, 0, 0, params, gradients, dots)
    )
    assert torch.equal(scores_copy[0, :3], scores[0, :3]) and torch.equal(
        gradients[0, 2], torch.zeros(4, device=device)
    )
    attention_weights_(AttentionBlock(undefined, logarithms, None, 0, 0, None, params))
    assert undefined.isnan()[0].diagonal().all()


@drawn(rows=st.integers(0, 70), n=LENGTHS, moved=st.booleans())
def test_row_dots(device, dtype, rows, n, moved, seed):
    a, b = (random((rows, n), dtype, device, seed + i) for i in range(2))
    dots = row_dots(moved_on(a), moved_on(b)) if moved else row_dots(a, b)
    terms = exact(a).detach() * exact(b).detach()
    assert_close(dots, terms.sum(-1), torch.float32, 2.0**-20 * terms.abs().sum(-1))


def test_what_is_refused():
    scores = torch.zeros(2, 6, 35)
    rows = torch.zeros(2, 70)
    origins = torch.zeros(3).long()
    params = AttentionParameters(2, 1.0, positions=70)
    block = AttentionBlock(scores, rows, None, 0, 32, None, params)
    attention_weights_(block)
    dropped = params._replace(probability=0.5, origins=origins[:2])
    for change, *figures in (
        ({"scores": scores.double()}, "float64"),
        ({"scores": torch.zeros(2, 35, 6).transpose(1, 2)}, "scores", "strides"),
        ({"first": 0}, 35, 3),
        # where masks of dropout would begin within a tile
        ({"first": 33, "params": dropped}, "first", 33, TILE),
        ({"logarithms": rows.half()}, "logarithms", "float16"),
        ({"sample": 1}, "logarithms", 2, 1),
        ({"slopes": torch.zeros(3)}, "slopes", [3]),
        ({"scores": torch.zeros(2, 6, 32), "params": params._replace(window=40)}, 32, 35),
    ):
        refused(lambda change=change: attention_weights_(replace(block, **change)), *figures)
    for change, *figures in (
        ({"probability": 1.0}, "probability", 1.0),
        ({"probability": 0.5}, "probability", 0.5, "origins"),
        ({"origins": origins}, "origins", [3]),
        ({"seed": -1}, "seed", -1),
        ({"cap": -1.0}, "cap", -1.0),
        ({"window": -1}, "window", -1),
    ):
        wrong = replace(block, params=params._replace(**change))
        refused(lambda wrong=wrong: attention_weights_(wrong), *figures)
    short = torch.zeros(2, 6, 34)
    wrong = GradientBlock(scores, rows, None, 0, 32, 0, params, short, rows)
    refused(lambda: attention_gradient_(wrong), "gradients", [2, 6, 34])
    refused(lambda: row_dots(torch.zeros(2), torch.zeros(3)), [3], [2])
