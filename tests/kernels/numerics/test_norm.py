"""LayerNorm and RMSNorm, with and without a residual: values and gradients against float64."""

import pytest
import torch
from hypothesis import strategies as st

from megatron.kernels.ops.norm import add_norm, norm
from tests.kernels.numerics.reference import (
    ROWS,
    SIMULATED,
    TYPES,
    WIDTHS,
    assert_close,
    compared,
    devices,
    drawn,
    exact,
    moved_on,
    random,
    refused,
    types,
)

EPS = 1e-5
OPTIONS = ["rms", "added", "shifted", "biased", "one_plus", "misaligned"]
"""`added`: a residual; `shifted`: it comes with the bias of the layer before."""

rms_or_not = pytest.mark.parametrize("rms", [False, True])


def relative(n):
    """Return the fp32 error of rows of n elements, relative to the terms.

    Every addition rounds by 2^-24 of a partial sum, all in one direction at worst: no chain of
    additions in a row is longer than n / 32. The sums over rows have chains of up to 33 rows and 64
    parts; the lanes' tree, rstd and a few products take the rest of the 128.
    """
    return (n / 32 + 128) * 2.0**-24


def compare(device, dtype, rows, n, options, seed, scale, shift):
    """Compare values and gradients of a norm with these options."""
    rms = "rms" in options
    added = "added" in options
    plus = float("one_plus" in options)

    def make(shape, seed, scale=1.0, shift=0.0):
        x = (random(shape, torch.float64, "cpu", seed, scale) + shift).to(dtype).to(device)
        return moved_on(x) if "misaligned" in options else x

    def operator(x, residual, weight, bias, before):
        if added:
            return add_norm(x, before, residual, weight, bias, EPS, bool(plus), rms)
        return norm(x, weight, bias, EPS, bool(plus), rms)

    def rounded_sum(x, residual, before):
        total = x.float() + (0.0 if before is None else before.float())
        return (total + residual.float()).to(dtype)

    def normalized(t):
        """Return the normalised numbers, mean and 1 / deviation of each row."""
        mean = t.new_zeros(rows, 1) if rms else t.mean(1, keepdim=True)
        rstd = ((t - mean).square().mean(1, keepdim=True) + EPS).rsqrt()
        return (t - mean) * rstd, mean, rstd

    def reference(x, residual, weight, bias, before):
        total = x
        if added:  # the gradient passes the rounding
            total = x + residual + (0.0 if before is None else before)
            total = total + (rounded_sum(x, residual, before).double() - total).detach()
        y = normalized(total)[0] * (weight + plus)
        y = y if bias is None else y + bias
        return (y, total) if added else y

    x, weight = make((rows, n), seed, scale, shift), make((n,), seed + 2)
    residual = make((rows, n), seed + 1, scale) if added else None
    bias = make((n,), seed + 3) if "biased" in options and not rms else None
    before = make((n,), seed + 6) if added and "shifted" in options else None
    incoming = [make((rows, n), seed + 4 + i) for i in range(1 + added)]
    leaves = [x, residual, weight, bias, before]
    actual, expected, wide, (g, *rest) = compared(operator, reference, leaves, *incoming)
    t = wide[0].detach()
    if added:
        assert torch.equal(actual[1], rounded_sum(x, residual, before))
        assert torch.equal(actual[2], actual[3])
        t = expected[1].detach()

    h, mean, rstd = normalized(t)
    gain = wide[2].detach() + plus
    want, (dx, _, dweight, dbias, dbefore) = expected[0].detach(), expected[-5:]
    arithmetic = relative(n)
    # The mean is stored in fp32, so that h is off by half a unit in its last place, and as much
    # by the difference's rounding; the mean's own error after the correction is `arithmetic` of
    # a deviation.
    h_error = arithmetic * (h.abs() + (0 if rms else 1)) + 2.0**-23 * mean.abs() * rstd
    size = want.abs() + (0 if bias is None else wide[3].detach().abs())
    assert_close(actual[0], want, dtype, h_error * gain.abs() + 2.0**-23 * size)

    def average(x):
        return x.mean(1, keepdim=True)

    u = (g * gain).abs()
    sizes = u + (0 if rms else average(u)) + h.abs() * average(u * h.abs())
    errors = h_error * average(g * gain * h).abs() + h.abs() * average(u * h_error)
    dx_error = rstd * (arithmetic * sizes + errors)
    dx_error += 2.0**-23 * sum(other.abs() for other in rest)
    of_weight = (g.abs() * (h_error + arithmetic * h.abs())).sum(0)
    assert_close(actual[-5], dx, dtype, dx_error)
    assert_close(actual[-3], dweight, dtype, of_weight)
    assert_close(actual[-2], dbias, dtype, arithmetic * g.abs().sum(0))
    # Rows too wide for their sums have them of the rounded gradient.
    error = dx_error + (arithmetic + torch.finfo(dtype).eps / 2) * dx.abs()
    assert_close(actual[-1], dbefore, dtype, error.sum(0))


test_against_float64 = pytest.mark.slow(
    drawn(
        rows=ROWS,
        n=WIDTHS,
        options=st.sets(st.sampled_from(OPTIONS)),
        scale=st.sampled_from([1.0, 1.0, 1e-3, 50.0]),
        shift=st.sampled_from([0.0, 0.0, 3.0, 1000.0]),
    )(compare)
)


# On the simulator, use one type for each number of elements in a pack that kernels are made of.
packed = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if SIMULATED else TYPES)


def usual(rms, added):
    """Return the usual options, of an RMSNorm or not, with a residual or without."""
    return {"biased"} | ({"rms"} if rms else set()) | ({"added", "shifted"} if added else set())


@pytest.mark.slow
# Cover each kernel's widest row, in packs of 16 bytes, and the next ones up to where the sums have
# a kernel of their own.
@devices
@packed
@rms_or_not
@pytest.mark.parametrize(
    "packs",
    [
        1025,
        8193,
        *(
            p if SIMULATED else pytest.param(p, marks=pytest.mark.campaign("large"))
            for p in (1024, 2048, 2049, 4096, 4097, 8192)
        ),
    ],
)
def test_wide_rows(device, dtype, rms, packs):
    compare(
        device, dtype, 3, packs * 16 // dtype.itemsize, usual(rms, packs % 2 == 0), packs, 1.0, 0.0
    )


@pytest.mark.slow
# Use groups of 16 lanes, of a wave and of a block, and more rows than blocks that work at a time.
@devices
@packed
@rms_or_not
@pytest.mark.parametrize("n", [24, 136, 520, 2048, 77])
def test_many_rows(device, dtype, rms, n):
    rows = 70 if SIMULATED else 2100 if device == "cuda" else 300
    compare(device, dtype, rows, n, usual(rms, n % 5 > 0), n, 1.0, 0.0)


@devices
@types
@pytest.mark.parametrize("n", [1, 64, 333, 4099])
def test_constant_rows(device, dtype, n):
    """Constant rows equal their mean and have no variance, except by rounding.

    With a larger eps that would not show.
    """
    x = torch.tensor([[0.1], [1000.1], [-3e4]], device=device).to(dtype).repeat(1, n)
    weight, bias, dy = (
        random(shape, dtype, device, seed) for seed, shape in enumerate(((n,), (n,), (3, n)))
    )
    y = norm(x.requires_grad_(), weight, bias, EPS)
    assert torch.equal(y, bias.expand(3, n))
    y.backward(dy)
    g = exact(dy).detach() * exact(weight).detach()
    mean = g.mean(1, keepdim=True)
    size = (g.abs() + g.abs().mean(1, keepdim=True)) / EPS**0.5
    assert_close(x.grad, (g - mean) / EPS**0.5, dtype, relative(n) * size)


@devices
@rms_or_not
@pytest.mark.parametrize("n", [5, 64, 1024])
def test_not_finite(device, rms, n):
    """A NaN spoils its row and, through its gradient, that of the weight.

    An infinity becomes a NaN in its place.
    """
    x = random((3, n), torch.float32, device, 3)
    x[1, 2], x[2, 3] = float("nan"), float("inf")
    weight = torch.ones(n, device=device, requires_grad=True)
    y = norm(x.requires_grad_(), weight, None, EPS, rms=rms)
    assert y[0].isfinite().all() and y[1].isnan().all() and y[2, 3].isnan()
    dy = torch.ones_like(y)
    y.backward(dy)
    assert x.grad[0].isfinite().all() and x.grad[1].isnan().all() and x.grad[2].isnan().any()
    assert weight.grad.isnan().all()
    dy[0, 1] = float("nan")
    z = x.detach()[:1].requires_grad_()
    norm(z, weight, None, EPS, rms=rms).backward(dy[:1])
    assert z.grad.isnan().all()


@devices
@rms_or_not
def test_one_output_used(device, rms):
    """Use one output.

    The gradient of the sum alone passes unchanged; that of y alone is the norm's own.
    """
    x, residual, dy = (random((5, 24), torch.float32, device, seed) for seed in (1, 2, 5))
    weight = random((24,), torch.float32, device, 3).requires_grad_()
    leaves = x.requires_grad_(), residual.requires_grad_(), weight
    y, total = add_norm(x, None, residual, weight, None, EPS, rms=rms)
    passed = torch.autograd.grad(total, leaves, dy, retain_graph=True, allow_unused=True)
    assert torch.equal(passed[0], dy) and torch.equal(passed[1], dy) and passed[2] is None

    alone = total.detach().requires_grad_()
    expected = norm(alone, weight, None, EPS, rms=rms)
    dx, dresidual, dweight = torch.autograd.grad(y, leaves, dy)
    results = y, dx, dresidual, dweight
    dx, dweight = torch.autograd.grad(expected, (alone, weight), dy)
    assert all(map(torch.equal, results, (expected, dx, dx, dweight)))


def test_what_is_refused():
    x = torch.zeros(2, 3, 8)
    weight = torch.ones(8)
    refused(lambda: norm(x.double(), weight, None, EPS), "layer_norm", "x", "float64")
    for wrong, *words in (
        (weight.bfloat16(), "bfloat16", "float32"),
        (torch.ones(16)[::2], "(2,)"),
    ):
        refused(lambda w=wrong: norm(x, w, None, EPS, rms=True), "rms_norm", "weight", *words)
    refused(lambda: add_norm(x, None, x[0], weight, None, EPS), "residual", [3, 8], [2, 3, 8])
