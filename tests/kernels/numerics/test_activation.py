"""Activations with bias: values and gradients against float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.kernels.ops.elementwise import bias_activation
from tests.kernels.numerics.reference import (
    EXAMPLES,
    ROWS,
    WIDTHS,
    assert_close,
    devices,
    exact,
    moved_on,
    random,
    refused,
    types,
)

KINDS = ["gelu", "swiglu", "squared_relu", "exact_gelu", "geglu", "exact_geglu"]
LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = LINEAR * 0.044715

# Below this, sigmoid(z) has underflowed in fp32; the omitted part is less than this times any
# factor that occurs.
FLOOR = 1e-30


class Slope(NamedTuple):
    """Activation at some points in float64: y, its derivatives, and their fp32 errors."""

    y: torch.Tensor
    derivatives: list[torch.Tensor]  # one for each input
    y_error: torch.Tensor
    errors: list[torch.Tensor]


def sigmoid_error(z):
    """Return the relative error of sigmoid(z).

    z is off by up to 2^-21 of itself (seven roundings, two of them of constants), weighted by the
    slope of the sigmoid; exp by 2^-21 of itself; sum and quotient by 2^-22.
    """
    return 2.0**-21 * z.abs() * torch.sigmoid(-z) + 2.0**-20


def normal_slope(a):
    """Return a Phi(a).

    exp(-a^2 / 2) is off by up to 2^-21 of its argument, and the polynomial of the tail by 2^-19.
    """
    below, tail = (torch.erfc(x / math.sqrt(2)) / 2 for x in (-a, a.abs()))
    density = (-a.square() / 2).exp() / math.sqrt(2 * math.pi)
    relative = 2.0**-22 * a.square() + 2.0**-19
    error = relative * tail + 2.0**-22 * below
    terms = error + relative * (a * density).abs()
    return Slope(a * below, [below + a * density], a.abs() * error + FLOOR, [terms + FLOOR])


def gate_slope(a, kind):
    """Return a times a sigmoid, or a Phi(a)."""
    if kind.startswith("exact"):
        return normal_slope(a)
    z = a if kind == "swiglu" else LINEAR * a + CUBIC * a**3
    dz = 1.0 if kind == "swiglu" else LINEAR + 3 * CUBIC * a**2
    s, rest = torch.sigmoid(z), torch.sigmoid(-z)
    relative = sigmoid_error(z)
    da = s * (1 + a * rest * dz)
    # The two terms of the derivative cancel near its zero; each has its own error.
    da_error = s * (relative + (a * rest * dz).abs() * (relative + sigmoid_error(-z) + 2.0**-20))
    return Slope(a * s, [da], (a * s).abs() * relative + FLOOR, [da_error + FLOOR])


def slope(inputs, kind):
    """Return the reference for inputs in float64, bias included."""
    a = inputs[0]
    if kind == "squared_relu":
        y, slope = a.clamp(min=0).square(), 2 * a.clamp(min=0)
        return Slope(y, [slope], 2.0**-21 * y, [2.0**-21 * slope])
    gate = gate_slope(a, kind)
    if not gated(kind):
        return gate
    b = inputs[1]
    errors = [b.abs() * gate.errors[0] + FLOOR, gate.y_error]
    error = gate.y_error * b.abs() + 2.0**-23 * (gate.y * b).abs() + FLOOR
    return Slope(gate.y * b, [b * gate.derivatives[0], gate.y], error, errors)


def gated(kind):
    return kind.endswith("glu")


def compare(x, bias, kind, seed):
    """Compare values, dx and dbias."""
    dtype, inputs = x.dtype, 2 if gated(kind) else 1
    x.requires_grad_()
    y = bias_activation(x, bias, kind)
    dy = random(tuple(y.shape), dtype, str(x.device), seed + 1)
    y.backward(dy)

    wide = exact(x).detach()
    if bias is not None:
        wide = wide + exact(bias).detach()
    want = slope(list(wide.chunk(inputs, -1)), kind)
    assert_close(y, want.y, dtype, want.y_error)
    g = exact(dy).detach()
    dx = torch.cat([g * d for d in want.derivatives], -1)
    # dy times the derivative, and b before that, are two more roundings.
    error = torch.cat([g.abs() * e for e in want.errors], -1) + 2.0**-23 * dx.abs()
    assert_close(x.grad, dx, dtype, error)
    if bias is not None:
        # One term after another in fp32: each addition rounds the sum so far.
        additions = x.shape[0] * 2.0**-24 * dx.abs().sum(0)
        assert_close(bias.grad, dx.sum(0), dtype, error.sum(0) + additions)


@devices
@types
@EXAMPLES
@given(
    rows=ROWS,
    columns=WIDTHS,
    kind=st.sampled_from(KINDS),
    biased=st.booleans(),
    moved=st.booleans(),
    seed=st.integers(0, 99),
)
def test_against_float64(
    device,
    dtype,
    rows,
    columns,
    kind,
    biased,
    moved,
    seed,
):
    width = 2 * columns if gated(kind) else columns
    x = random((rows, width), dtype, device, seed, scale=2.0)
    bias = random((width,), dtype, device, seed + 2).requires_grad_() if biased else None
    compare(moved_on(x) if moved else x, bias, kind, seed)


@devices
@pytest.mark.parametrize(
    ("rows", "columns", "kind"), [(1000, 13, "gelu"), (1000, 26, "swiglu"), (4100, 8, "gelu")]
)
def test_bias_gradient_of_many_rows(device, rows, columns, kind):
    """Sum the bias gradient in several parts, the last not full.

    The first split gives parts of unequal length too.
    """
    x = random((rows, columns), torch.float32, device, 0)
    compare(x, random((columns,), torch.float32, device, 1).requires_grad_(), kind, 2)


@devices
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "squared_relu"])
def test_small_and_far_negative(device, kind):
    """Results are relatively accurate where 1 + tanh loses all accuracy.

    The bound of `slope` is relative in both.
    """
    small = torch.logspace(-30, 0, 301)
    furthest = {"swiglu": -80.0, "exact_gelu": -12.0, "exact_geglu": -12.0}.get(kind, -5.0)
    far = torch.linspace(furthest, -0.5, 300)
    a = torch.cat([small, -small, far]).to(device)
    x = torch.cat([a, torch.ones_like(a)]) if gated(kind) else a
    compare(x.unsqueeze(0), None, kind, 3)
    y = bias_activation(x.detach(), None, kind)
    assert (y[-300:] < 0).all()


@devices
@types
@pytest.mark.parametrize("kind", KINDS)
def test_large_inputs(device, dtype, kind):
    """The largest inputs of the type give the limits; finite inputs give no NaN."""
    top = torch.finfo(dtype).max
    a = torch.tensor(
        [1e4, -1e4, top, -top, top / 2, -top / 2, 0.0, -0.0], dtype=dtype, device=device
    )
    x = (torch.cat([a, torch.ones_like(a)]) if gated(kind) else a).requires_grad_()
    y = bias_activation(x, None, kind)
    y.sum().backward()
    positive, slopes = a.clamp(min=0), x.grad[: len(a)]
    if kind == "squared_relu":
        assert torch.equal(y, (positive.float() * positive.float()).to(dtype))
        assert torch.equal(slopes, (2 * positive.float()).to(dtype))
    else:
        assert torch.equal(y, positive)
        assert torch.equal(
            slopes, torch.tensor([1, 0, 1, 0, 1, 0, 0.5, 0.5], dtype=dtype, device=device)
        )


@devices
@types
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_shows(device, dtype, kind):
    """Non-finite inputs show.

    A NaN gives NaN in its own place and in the sum of its column; infinity gives no finite number
    but its limit.
    """
    n = 32
    for value in (float("nan"), float("inf")):
        x = torch.ones(3, 2 * n if gated(kind) else n, dtype=dtype, device=device)
        x[1, 5] = value
        bias = torch.zeros(x.shape[1], dtype=dtype, device=device, requires_grad=True)
        x.requires_grad_()
        y = bias_activation(x, bias, kind)
        y.sum().backward()
        bad = ~y.isfinite()
        assert bad[1, 5] and int(bad.sum()) == 1
        if math.isnan(value):
            assert y[1, 5].isnan() and x.grad[1, 5].isnan() and bias.grad[5].isnan()
        assert x.grad[[0, 2]].isfinite().all()
        assert bias.grad[:5].isfinite().all()


@devices
def test_shapes(device):
    """Inputs may have any number of dimensions, strides, no rows, or no columns."""
    x, bias = random((3, 5, 16), torch.float32, device, 0), random((16,), torch.float32, device, 1)
    y = bias_activation(x, bias, "gelu")
    assert torch.equal(bias_activation(x.transpose(0, 1), bias, "openai_gelu"), y.transpose(0, 1))
    assert torch.equal(bias_activation(x[2, 3], bias, "gelu"), y[2, 3])
    for shape in ((0, 16), (4, 0), (2, 0, 16)):
        empty = torch.zeros(shape, device=device, requires_grad=True)
        no_bias = torch.zeros(shape[-1], device=device, requires_grad=True)
        result = bias_activation(empty, no_bias, "swiglu")
        assert result.shape == (*shape[:-1], shape[-1] // 2)
        result.sum().backward()
        assert empty.grad.shape == shape and torch.equal(no_bias.grad, torch.zeros_like(no_bias))


def test_what_is_refused():
    x, bias = torch.zeros(3, 8), torch.zeros(8)
    refused(lambda: bias_activation(x, bias, "relu"), "relu", *KINDS)
    refused(lambda: bias_activation(x.double(), None, "gelu"), "float64")
    refused(lambda: bias_activation(x, bias[:4], "gelu"), "bias", [4], [8])
    refused(lambda: bias_activation(x[:, :7], None, "swiglu"), "swiglu", 7)
    refused(lambda: bias_activation(torch.tensor(1.0), None, "gelu"), "x")
