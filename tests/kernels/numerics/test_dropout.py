"""Bias, dropout and residual against float64, and masks against Philox computed here."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from megatron.kernels.ops.elementwise import bias_dropout_add
from megatron.parallel.keyed_random import DropoutKey, RowLayout
from tests.kernels.numerics.reference import (
    ROWS,
    WIDTHS,
    assert_close,
    compared,
    devices,
    drawn,
    moved_on,
    random,
    refused,
    types,
    without_simulator,
)

SEEDS = st.one_of(st.integers(0, 9), st.integers(0, 2**63 - 1), st.just(2**63 - 1))
PROBABILITIES = st.sampled_from([0.1, 0.5, 0.9, 2.0**-20])

LOW = 0xFFFFFFFF


def philox(counter, key):
    """Compute Philox4x32-10 on arrays of uint64 that hold 32 bits each (SC 2011, section 3.3)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a = c0 * 0xD2511F53
        b = c2 * 0xCD9E8D57
        c0 = (b >> 32) ^ c1 ^ k0
        c1 = b & LOW
        c2 = (a >> 32) ^ c3 ^ k1
        c3 = a & LOW
        k0 = (k0 + 0x9E3779B9) & LOW
        k1 = (k1 + 0xBB67AE85) & LOW
    return [c0, c1, c2, c3]


def mask(seed, first, count, probability):
    """Return which of the elements first ... first + count - 1 stay."""
    block = np.arange(first // 4, (first + count + 3) // 4, dtype=np.uint64)
    zero = np.zeros_like(block)
    words = philox([block & LOW, block >> 32, zero, zero], [seed & LOW, seed >> 32])
    words = np.stack(words, axis=1).reshape(-1)[first % 4 :][:count]
    return torch.from_numpy(words < int((1 - probability) * 2**32))


@without_simulator
def test_known_words():
    """Check the Philox of this file by words published with it (Random123, tests/kat_vectors)."""
    counter = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    counter = [np.array([c], dtype=np.uint64) for c in counter]
    words = [int(word[0]) for word in philox(counter, [0xA4093822, 0x299F31D0])]
    assert words == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@drawn(
    rows=ROWS,
    columns=WIDTHS,
    probability=st.one_of(st.just(0.0), PROBABILITIES),
    moved=st.booleans(),
    biased=st.booleans(),
    added=st.booleans(),
    seed=SEEDS,
)
def test_against_float64(device, dtype, rows, columns, probability, moved, biased, added, seed):
    shape = rows, columns
    x, residual, dy = (random(shape, dtype, device, seed % 1000 + i) for i in range(3))
    bias = random((columns,), dtype, device, seed % 1000 + 3) if biased else None
    factor = mask(seed, 0, rows * columns, probability).view(shape) / (1 - probability)
    factor = factor.double()

    def reference(x, bias, residual):
        wide = (x if bias is None else x + bias) * factor
        return wide if residual is None else wide + residual

    actual, (want, *gradients), wide, _ = compared(
        lambda *leaves: bias_dropout_add(*leaves, probability, seed),
        reference,
        [moved_on(x) if moved else x, bias, residual if added else None],
        dy,
    )
    # Sum, factor, product and second sum each round once, to half a unit of their own results.
    dropped = reference(*wide[:2], None)
    assert_close(actual[0], want, dtype, 3 * 2.0**-24 * dropped.abs() + 2.0**-24 * want.abs())
    dx = gradients[0].abs()
    assert_close(actual[1], gradients[0], dtype, 2.0**-23 * dx)
    # One term after another in fp32: each addition rounds the sum so far.
    assert_close(actual[2], gradients[1], dtype, (rows + 2) * 2.0**-24 * dx.sum(0))
    assert not added or torch.equal(actual[3], dy)


@devices
@pytest.mark.parametrize("columns", [8, 13])
def test_bias_gradient_of_many_rows(device, columns):
    """Sum the bias gradient in many parts, the last of which is not full."""
    x = torch.zeros(4100, columns, device=device, requires_grad=True)
    bias = torch.zeros(columns, device=device, requires_grad=True)
    bias_dropout_add(x, bias, None, 0.5, 3).backward(torch.ones_like(x))
    assert torch.equal(
        bias.grad.cpu(), 2.0 * mask(3, 0, 4100 * columns, 0.5).view(4100, columns).sum(0)
    )


@devices
def test_shapes(device):
    """Inputs may have any number of dimensions and strides; the mask depends on places alone."""
    strided = random((10, 6, 4), torch.float32, device, 0).transpose(0, 2)
    x = strided.contiguous()
    y = bias_dropout_add(x, None, x, 0.5, 7)
    assert torch.equal(bias_dropout_add(strided, None, strided, 0.5, 7), y)
    flat = x.view(-1)
    assert torch.equal(bias_dropout_add(flat, None, flat, 0.5, 7).view(x.shape), y)


@devices
@types
@pytest.mark.parametrize("columns", [24, 13])
def test_a_part_has_its_part_of_the_mask(device, dtype, columns):
    """A part gets its part of the mask, forward and backward, also past 2^63 elements.

    Parts are tokens [positions, samples] of a part of the sequence, and attention weights [samples,
    heads, positions] of some of the heads.
    """
    p = 0.4
    seed = 2**40 + 5
    for sample in (0, 2**59 // columns):  # of three samples, four heads and five positions
        bits = mask(seed, sample * 20 * columns, 60 * columns, p).view(3, 4, 5, columns)
        # six of twenty tokens of two samples
        tokens = bits.view(3, 20, columns)[1:, 5:11].transpose(0, 1)
        heads = bits[1:, 2:]
        in_memory = torch.tensor([sample], device=device)
        for key in (DropoutKey(0, sample + 1), DropoutKey(0, 1, in_memory)):
            of_tokens = RowLayout(key.sample * 20 + 5, 2, 1, 20, 20, 20, key.samples)
            for shard, layout in ((tokens, of_tokens), (heads, key.weights(5, 2, 1, 2))):
                x = torch.ones(shard.shape, dtype=dtype, device=device, requires_grad=True)
                y = bias_dropout_add(x, None, None, p, seed, layout)
                y.backward(torch.ones_like(y))
                assert torch.equal(y.cpu() != 0, shard) and torch.equal(x.grad.cpu() != 0, shard)


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_a_bias_in_fp32_is_not_rounded(device, dtype):
    """The fp32 gradient of a bias beside x in 16 bits is not rounded and does not overflow."""
    x = torch.zeros(4000, 8, dtype=dtype, device=device)
    bias = torch.zeros(8, device=device, requires_grad=True)
    bias_dropout_add(x, bias, x, 0.0, 1).backward(torch.full_like(x, 257 * 2.0**7))
    assert bias.grad.tolist() == [4000 * (257 if dtype == torch.float16 else 256) * 2.0**7] * 8


@devices
def test_what_is_not_finite_shows(device):
    """Non-finite values show even where they are dropped.

    In a run that has gone wrong, their detection must not depend on chance.
    """
    for value in (float("nan"), float("inf")):
        x = torch.ones(4, 32, device=device)
        x[1] = value
        y = bias_dropout_add(x, None, torch.ones_like(x), 0.5, 1)
        assert not y[1].isfinite().any() and y[[0, 2, 3]].isfinite().all()


def test_what_is_refused():
    x = torch.zeros(3, 8)
    for probability in (1.0, -0.1, float("nan")):
        refused(
            lambda p=probability: bias_dropout_add(x, None, None, p, 0), "probability", probability
        )
    refused(lambda: bias_dropout_add(x, None, None, 0.1, -1), "seed", -1)
    refused(lambda: bias_dropout_add(x.double(), None, None, 0.1, 0), "x", "float64")
    refused(
        lambda: bias_dropout_add(x, None, x.bfloat16(), 0.1, 0), "residual", "bfloat16", "float32"
    )
    refused(
        lambda: bias_dropout_add(x, None, torch.zeros(8, 3), 0.1, 0), "residual", [8, 3], [3, 8]
    )
    refused(lambda: bias_dropout_add(torch.tensor(1.0), None, None, 0.1, 0), "x")
    for samples, words in ((torch.ones(1), "float32"), (torch.ones(2, dtype=torch.int64), [2])):
        layout = RowLayout(samples=samples)
        refused(lambda p=layout: bias_dropout_add(x, None, None, 0.1, 0, p), "samples", words)


@devices
@pytest.mark.parametrize(("dtype", "unit"), [(torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)])
def test_ties_go_to_even(device, dtype, unit):
    """A sum halfway between two numbers of the type is rounded to the one whose last bit is 0."""
    x = torch.tensor([1.0, 1.0 + unit, -1.0, -1.0 - unit] * 2, dtype=dtype, device=device)
    half = torch.full_like(x, unit / 2) * x.sign()
    assert (
        bias_dropout_add(x, None, half, 0.0, 0).tolist()
        == [1.0, 1.0 + 2 * unit, -1.0, -1.0 - 2 * unit] * 2
    )
