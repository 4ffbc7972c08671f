"""LayerNorm and RMSNorm, with and without a residual: values and gradients against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.numerics.reference import (
    EXAMPLES,
    ROWS,
    SIMULATED,
    TYPES,
    WIDTHS,
    add_layer_norm,
    add_rms_norm,
    assert_close,
    devices,
    exact,
    layer_norm,
    random,
    refused,
    rms_norm,
    types,
)

EPS = 1e-5


def relative(n):
    """Return the fp32 error of rows of n elements, relative to the terms.

    Every addition rounds by 2^-24 of a partial sum, all in one direction at worst: no chain of
    additions in a row is longer than n / 32. The sums over rows have chains of up to 33 rows and 64
    parts; the lanes' tree, rstd and a few products take the rest of the 128.
    """
    return (n / 32 + 128) * 2.0**-24


@dataclass(frozen=True)
class Case:
    """Options of a normalisation; `scale` and `shift` apply to the numbers it is given.

    `shifted`: the residual comes with the bias of the layer before.
    """

    rms: bool = False
    added: bool = False
    shifted: bool = False
    biased: bool = True
    one_plus: bool = False
    scale: float = 1.0
    shift: float = 0.0
    misaligned: bool = False


CASES = st.builds(
    Case,
    rms=st.booleans(),
    added=st.booleans(),
    shifted=st.booleans(),
    biased=st.booleans(),
    one_plus=st.booleans(),
    scale=st.sampled_from([1.0, 1.0, 1e-3, 50.0]),
    shift=st.sampled_from([0.0, 0.0, 3.0, 1000.0]),
    misaligned=st.booleans(),
)


def make(shape, dtype, device, seed, case):
    """Draw normal numbers; `misaligned` ones begin one element past the start of their storage."""
    x = random(shape, torch.float64, "cpu", seed, case.scale) + case.shift
    if case.misaligned:
        x = torch.cat([x.new_zeros(1), x.flatten()]).to(dtype).to(device)[1:].view(shape)
    return x.to(dtype).to(device)


def apply(
    x,
    residual,
    weight,
    bias,
    case,
    before=None,
):
    """Return (y, the normalised input); `before`: the bias of the layer before."""
    if residual is None:
        if case.rms:
            return rms_norm(x, weight, EPS, case.one_plus), x
        return layer_norm(x, weight, bias, EPS, case.one_plus), x
    if case.rms:
        return add_rms_norm(x, residual, weight, EPS, case.one_plus, before)
    return add_layer_norm(x, residual, weight, bias, EPS, case.one_plus, before)


def compare(rows, n, dtype, device, case, seed):
    """Compare values and gradients of one case."""
    plain = Case(misaligned=case.misaligned)
    x = make((rows, n), dtype, device, seed, case).requires_grad_()
    residual = (
        make((rows, n), dtype, device, seed + 1, Case(scale=case.scale)).requires_grad_()
        if case.added
        else None
    )
    weight = make((n,), dtype, device, seed + 2, plain).requires_grad_()
    bias = (
        make((n,), dtype, device, seed + 3, plain).requires_grad_()
        if case.biased and not case.rms
        else None
    )
    before = None
    if case.added and case.shifted:
        before = make((n,), dtype, device, seed + 6, plain).requires_grad_()
    y, total = apply(x, residual, weight, bias, case, before)
    if residual is not None:
        wide = x.float() if before is None else x.float() + before.float()
        assert torch.equal(total, (wide + residual.float()).to(dtype))
    dy = make((rows, n), dtype, device, seed + 4, plain)
    dsum = make((rows, n), dtype, device, seed + 5, plain) if case.added else torch.zeros_like(x)
    leaves = [leaf for leaf in (x, weight, bias, before, residual) if leaf is not None]
    outputs, incoming = ([y, total], [dy, dsum]) if case.added else ([y], [dy])
    found = torch.autograd.grad(outputs, leaves, incoming)
    if residual is not None:
        assert torch.equal(found[0], found[-1])

    t, w = exact(total), exact(weight)
    b = torch.zeros(n, dtype=torch.float64) if bias is None else exact(bias).detach()
    gain = w + float(case.one_plus)
    mean = t.new_zeros(rows, 1) if case.rms else t.mean(1, keepdim=True)
    rstd = ((t - mean).square().mean(1, keepdim=True) + EPS).rsqrt()
    h = (t - mean) * rstd
    want = h * gain + b
    g, d = exact(dy).detach(), exact(dsum).detach()
    dt, dw = torch.autograd.grad(want, (t, w), g)

    with torch.no_grad():
        arithmetic = relative(n)
        # The mean is stored in fp32, so that h is off by half a unit in its last place, and as much
        # by the difference's rounding; the mean's own error after the correction is `arithmetic` of
        # a deviation.
        h_error = arithmetic * (h.abs() + (0 if case.rms else 1)) + 2.0**-23 * mean.abs() * rstd
        assert_close(y, want, dtype, h_error * gain.abs() + 2.0**-23 * (want.abs() + b.abs()))
        u = (g * gain).abs()
        m2 = (g * gain * h).mean(1, keepdim=True).abs()
        sizes = (
            u
            + (0 if case.rms else u.mean(1, keepdim=True))
            + h.abs() * (u * h.abs()).mean(1, keepdim=True)
        )
        dx_error = rstd * (
            arithmetic * sizes + h_error * m2 + h.abs() * (u * h_error).mean(1, keepdim=True)
        )
        assert_close(found[0], dt + d, dtype, dx_error + 2.0**-23 * d.abs())
        assert_close(found[1], dw, dtype, (g.abs() * (h_error + arithmetic * h.abs())).sum(0))
        if bias is not None:
            assert_close(found[2], g.sum(0), dtype, arithmetic * g.abs().sum(0))
        if before is not None:
            # Rows too wide for their sums have them of the rounded gradient.
            rounded = torch.finfo(dtype).eps / 2 * (dt + d).abs()
            error = dx_error + 2.0**-23 * d.abs() + arithmetic * (dt + d).abs() + rounded
            assert_close(found[-2], (dt + d).sum(0), dtype, error.sum(0))


@pytest.mark.slow
@devices
@types
@EXAMPLES
@given(rows=ROWS, n=WIDTHS, case=CASES, seed=st.integers(0, 99))
def test_against_float64(device, dtype, rows, n, case, seed):
    compare(rows, n, dtype, device, case, seed)


# On the simulator, use one type for each number of elements in a pack that kernels are made of.
PACKED = [torch.float32, torch.bfloat16] if SIMULATED else TYPES


@pytest.mark.slow
# Cover each kernel's widest row, in packs of 16 bytes, and the next ones up to where the sums have
# a kernel of their own.
@devices
@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("rms", [False, True])
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
        3,
        packs * 16 // dtype.itemsize,
        dtype,
        device,
        Case(rms=rms, added=packs % 2 == 0, shifted=True),
        packs,
    )


@pytest.mark.slow
# Use groups of 16 lanes, of a wave and of a block, and more rows than blocks that work at a time.
@devices
@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("n", [24, 136, 520, 2048, 77])
def test_many_rows(device, dtype, rms, n):
    compare(
        70 if SIMULATED else 2100 if device == "cuda" else 300,
        n,
        dtype,
        device,
        Case(rms=rms, added=n % 5 > 0, shifted=True),
        n,
    )


@devices
@types
@pytest.mark.parametrize("n", [1, 64, 333, 4099])
def test_constant_rows(device, dtype, n):
    """Constant rows equal their mean and have no variance, except by rounding.

    With a larger eps that would not show.
    """
    x = (
        torch.tensor([[0.1], [1000.1], [-3e4]], device=device)
        .to(dtype)
        .repeat(1, n)
        .requires_grad_()
    )
    weight, bias, dy = (
        random((n,), dtype, device, 1),
        random((n,), dtype, device, 2),
        random((3, n), dtype, device, 3),
    )
    y = layer_norm(x, weight, bias, EPS)
    assert torch.equal(y, bias.expand(3, n))
    y.backward(dy)
    g = exact(dy).detach() * exact(weight).detach()
    size = g.abs() + g.abs().mean(1, keepdim=True)
    assert_close(
        x.grad, (g - g.mean(1, keepdim=True)) / EPS**0.5, dtype, relative(n) * size / EPS**0.5
    )


@devices
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("n", [5, 64, 1024])
def test_not_finite(device, rms, n):
    """A NaN spoils its row and, through its gradient, that of the weight.

    An infinity becomes a NaN in its place.
    """
    x = random((3, n), torch.float32, device, 3).requires_grad_()
    with torch.no_grad():
        x[1, 2], x[2, 3] = float("nan"), float("inf")
    weight = torch.ones(n, device=device, requires_grad=True)
    y, _ = apply(x, None, weight, None, Case(rms=rms))
    assert y[0].isfinite().all() and y[1].isnan().all() and y[2, 3].isnan()
    y.backward(torch.ones_like(y))
    assert x.grad[0].isfinite().all() and x.grad[1].isnan().all() and x.grad[2].isnan().any()
    assert weight.grad.isnan().all()
    dy = torch.ones_like(y)
    dy[0, 1] = float("nan")
    z = x.detach()[:1].requires_grad_()
    apply(z, None, weight, None, Case(rms=rms))[0].backward(dy[:1])
    assert z.grad.isnan().all()


@devices
@pytest.mark.parametrize("rms", [False, True])
def test_one_output_used(device, rms):
    """Use one output.

    The gradient of the sum alone passes unchanged; that of y alone is the norm's own.
    """
    case = Case(rms=rms, added=True)
    x, residual = (random((5, 24), torch.float32, device, seed).requires_grad_() for seed in (1, 2))
    weight, bias = (random((24,), torch.float32, device, seed).requires_grad_() for seed in (3, 4))
    dy = random((5, 24), torch.float32, device, 5)
    total = apply(x, residual, weight, bias, case)[1]
    total.backward(dy)
    assert (
        torch.equal(x.grad, dy)
        and torch.equal(residual.grad, dy)
        and weight.grad is None
        and bias.grad is None
    )

    y = apply(x, residual, weight, bias, case)[0]
    alone = total.detach().requires_grad_()
    without = apply(alone, None, weight, bias, case)[0]
    assert torch.equal(y, without)
    dx, dresidual, dweight = torch.autograd.grad(y, (x, residual, weight), dy)
    expected = torch.autograd.grad(without, (alone, weight), dy)
    assert (
        torch.equal(dx, expected[0])
        and torch.equal(dresidual, dx)
        and torch.equal(dweight, expected[1])
    )


@devices
@pytest.mark.parametrize("n", [64, 77, 4096])
def test_same_bits_every_time(device, n):
    rows = 20 if SIMULATED else 200
    x, weight, bias = (
        random(shape, torch.bfloat16, device, 6).requires_grad_()
        for shape in ((rows, n), (n,), (n,))
    )
    dy = random((rows, n), torch.bfloat16, device, 7)
    first, second = (
        torch.autograd.grad(layer_norm(x, weight, bias, EPS), (x, weight, bias), dy)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_is_refused():
    x, weight = torch.zeros(2, 3, 8), torch.ones(8)
    refused(lambda: layer_norm(x.double(), weight, None, EPS), "layer_norm", "x", "float64")
    refused(
        lambda: rms_norm(x, weight.bfloat16(), EPS), "rms_norm", "weight", "bfloat16", "float32"
    )
    refused(lambda: add_rms_norm(x, x[0], weight, EPS), "residual", [3, 8], [2, 3, 8])
    refused(lambda: rms_norm(x, torch.ones(16)[::2], EPS), "weight", "(2,)")
