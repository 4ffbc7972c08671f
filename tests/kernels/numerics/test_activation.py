"""Activations with bias: values and gradients against float64."""

import math

import pytest
import torch
from hypothesis import strategies as st

from megatron.kernels.ops.elementwise import bias_activation
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
)

KINDS = ["gelu", "swiglu", "squared_relu", "exact_gelu", "geglu", "exact_geglu"]
kinds = pytest.mark.parametrize("kind", KINDS)

# Below this, sigmoid(z) has underflowed in fp32; the omitted part is less than this times any
# factor that occurs.
FLOOR = 1e-30


def gated(kind):
    return kind.endswith("glu")


def factor(a, kind):
    """Return what a is multiplied by, its error, and the relative error of its slope."""
    if kind == "squared_relu":
        return a.relu(), 2.0**-21 * a.relu(), 2.0**-21
    if kind.startswith("exact"):
        # exp(-a^2 / 2) is off by up to 2^-21 of its argument, the polynomial of the tail by 2^-19.
        relative = 2.0**-22 * a.square() + 2.0**-19
        below, tail = (torch.erfc(x / math.sqrt(2)) / 2 for x in (-a, a.abs()))
        return below, relative * tail + 2.0**-22 * below, relative
    # z is off by up to 2^-21 of itself (seven roundings, two of them of constants), weighted by
    # the slope of the sigmoid; exp by 2^-21 of itself; sum and quotient by 2^-22. The slope is a
    # product of the sigmoids of z and -z, with one more such error.
    z = a if kind == "swiglu" else math.sqrt(8 / math.pi) * (a + 0.044715 * a**3)
    share = torch.sigmoid(z)
    error = share * (2.0**-21 * z.abs() * torch.sigmoid(-z) + 2.0**-20)
    return share, error, 2.0**-21 * z.abs() + 3 * 2.0**-20


def compare(x, bias, kind, seed):
    """Compare values, dx and dbias."""
    dtype = x.dtype

    def split(x, bias):
        a, *value = (x if bias is None else x + bias).chunk(1 + gated(kind), -1)
        return a, *(value or [torch.ones_like(a)])

    def reference(x, bias):
        a, value = split(x, bias)
        return a * factor(a, kind)[0] * value

    dy = random((len(x), x.shape[1] // (1 + gated(kind))), dtype, x.device, seed + 1)
    (y, *gradients), (want, want_dx, want_dbias), wide, (g,) = compared(
        lambda x, bias: bias_activation(x, bias, kind), reference, [x, bias], dy
    )
    a, value = split(*wide)
    share, share_error, slope_error = factor(a, kind)
    (slope,) = torch.autograd.grad(share.sum(), a, retain_graph=True)
    error = a.abs() * share_error + FLOOR
    assert_close(y, want, dtype, error * value.abs() + gated(kind) * 2.0**-23 * want.abs() + FLOOR)
    # The two terms of the derivative cancel near its zero; each has its own error. dy times the
    # derivative, and the value before that, are two more roundings.
    of_a = value.abs() * (share_error + (a * slope).abs() * slope_error) + FLOOR
    errors = torch.cat([of_a, error] if gated(kind) else [of_a], -1)
    dx_error = g.abs().repeat(1, 1 + gated(kind)) * errors + 2.0**-23 * want_dx.abs()
    assert_close(gradients[0], want_dx, dtype, dx_error)
    # One term after another in fp32: each addition rounds the sum so far.
    additions = len(x) * 2.0**-24 * want_dx.abs()
    assert_close(gradients[1], want_dbias, dtype, (dx_error + additions).sum(0))


@drawn(
    rows=ROWS,
    columns=WIDTHS,
    kind=st.sampled_from(KINDS),
    biased=st.booleans(),
    moved=st.booleans(),
)
def test_against_float64(device, dtype, rows, columns, kind, biased, moved, seed):
    width = 2 * columns if gated(kind) else columns
    x = random((rows, width), dtype, device, seed, scale=2.0)
    bias = random((width,), dtype, device, seed + 2) if biased else None
    compare(moved_on(x) if moved else x, bias, kind, seed)


@devices
@pytest.mark.parametrize(
    ("rows", "columns", "kind"), [(1000, 13, "gelu"), (1000, 26, "swiglu"), (4100, 8, "gelu")]
)
def test_bias_gradient_of_many_rows(device, rows, columns, kind):
    """Sum the bias gradient in several parts, the last not full.

    The first split gives parts of unequal length too.
    """
    shapes = (rows, columns), (columns,)
    compare(*(random(shape, torch.float32, device, len(shape)) for shape in shapes), kind, 2)


@devices
@kinds
def test_small_and_far_negative(device, kind):
    """Results are relatively accurate where 1 + tanh loses all accuracy.

    The bound of `factor` is relative in both.
    """
    small = torch.logspace(-30, 0, 301)
    furthest = -80.0 if kind == "swiglu" else -12.0 if kind.startswith("exact") else -5.0
    a = torch.cat([small, -small, torch.linspace(furthest, -0.5, 300)]).to(device)
    x = torch.cat([a, torch.ones_like(a)]) if gated(kind) else a
    compare(x.unsqueeze(0), None, kind, 3)
    assert kind == "squared_relu" or (bias_activation(x, None, kind)[-300:] < 0).all()


@devices
@types
@kinds
def test_large_inputs(device, dtype, kind):
    """The largest inputs of the type give the limits; finite inputs give no NaN."""
    top = torch.finfo(dtype).max
    a = torch.tensor([1e4, -1e4, top, -top, top / 2, -top / 2, 0.0, -0.0]).to(device, dtype)
    x = (torch.cat([a, torch.ones_like(a)]) if gated(kind) else a).requires_grad_()
    y = bias_activation(x, None, kind)
    y.sum().backward()
    positive = a.clamp(min=0).float()
    limits = positive, torch.tensor([1, 0, 1, 0, 1, 0, 0.5, 0.5], device=device)
    if kind == "squared_relu":
        limits = positive.square(), 2 * positive
    assert torch.equal(y, limits[0].to(dtype)) and torch.equal(x.grad[:8], limits[1].to(dtype))


@devices
@types
@kinds
def test_what_is_not_finite_shows(device, dtype, kind):
    """Non-finite inputs show.

    A NaN gives NaN in its own place and in the sum of its column; infinity gives no finite number
    but its limit.
    """
    for value in (float("nan"), float("inf")):
        x = torch.ones(3, 64 if gated(kind) else 32, dtype=dtype, device=device)
        x[1, 5] = value
        bias = torch.zeros(x.shape[1], dtype=dtype, device=device, requires_grad=True)
        y = bias_activation(x.requires_grad_(), bias, kind)
        y.sum().backward()
        assert (~y.isfinite()).nonzero().tolist() == [[1, 5]]
        if math.isnan(value):
            assert y[1, 5].isnan() and x.grad[1, 5].isnan() and bias.grad[5].isnan()
        assert x.grad[[0, 2]].isfinite().all() and bias.grad[:5].isfinite().all()


@devices
def test_shapes(device):
    """Inputs may have any number of dimensions, strides, no rows, or no columns."""
    x, bias = (random(shape, torch.float32, device, 0) for shape in ((3, 5, 16), (16,)))
    y = bias_activation(x, bias, "gelu")
    assert torch.equal(bias_activation(x.transpose(0, 1), bias, "openai_gelu"), y.transpose(0, 1))
    assert torch.equal(bias_activation(x[2, 3], bias, "gelu"), y[2, 3])
    for shape in ((0, 16), (4, 0), (2, 0, 16)):
        empty = torch.zeros(shape, device=device, requires_grad=True)
        no_bias = torch.zeros(shape[-1], device=device, requires_grad=True)
        result = bias_activation(empty, no_bias, "swiglu")
        assert result.shape == (*shape[:-1], shape[-1] // 2)
        result.sum().backward()
        assert empty.grad.shape == shape and not no_bias.grad.any()


def test_what_is_refused():
    x = torch.zeros(3, 8)
    bias = torch.zeros(8)
    refused(lambda: bias_activation(x, bias, "relu"), "relu", *KINDS)
    refused(lambda: bias_activation(x.double(), None, "gelu"), "float64")
    refused(lambda: bias_activation(x, bias[:4], "gelu"), "bias", [4], [8])
    refused(lambda: bias_activation(x[:, :7], None, "swiglu"), "swiglu", 7)
    refused(lambda: bias_activation(torch.tensor(1.0), None, "gelu"), "x")
