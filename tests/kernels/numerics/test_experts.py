"""Tokens to their experts' rows and back: values and gradients against float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.kernels.ops.experts import (
    permute,
    permute_reference,
    unpermute,
    unpermute_reference,
)
from tests.kernels.numerics.reference import (
    EXAMPLES,
    WIDTHS,
    assert_close,
    devices,
    exact,
    moved_on,
    random,
    refused,
    types,
)


def routed(tokens, choices, padding, seed):
    """Draw (order, places): a fifth of the choices is dropped, rows of padding are added."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(tokens, choices, generator=generator) < 0.8
    count = int(kept.sum())
    rows = torch.randperm(count + padding, generator=generator)[:count]
    places, order = torch.full((tokens, choices), -1), torch.full((count + padding,), -1)
    places[kept] = rows
    order[rows] = kept.nonzero()[:, 0]
    return order, places


@devices
@types
@EXAMPLES
@given(
    tokens=st.sampled_from([0, 1, 3, 17, 40]),
    choices=st.sampled_from([1, 2, 3, 4, 5, 8, 11]),
    padding=st.sampled_from([0, 0, 1, 5]),
    width=WIDTHS,
    moved=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients(
    device,
    dtype,
    tokens,
    choices,
    padding,
    width,
    moved,
    seed,
):
    """A sum of k products is off by k 2^-24 of the sum of their magnitudes (Higham, 2002, 3.1).

    No chain of additions in a row's dot product is longer than width / 32, beside the lanes' tree.
    """
    order, places = (each.to(device) for each in routed(tokens, choices, padding, seed))
    make = moved_on if moved else torch.clone
    x = make(random((tokens, width), dtype, device, seed)).requires_grad_()
    y = make(random((len(order), width), dtype, device, seed + 1)).requires_grad_()
    weights = random((tokens, choices), torch.float32, device, seed + 2).requires_grad_()
    rows, sums = permute(x, order, places), unpermute(y, places, weights, padded=bool(padding))
    drows, dsums = (
        make(random(tuple(each.shape), dtype, device, seed + 3)) for each in (rows, sums)
    )
    (dx,) = torch.autograd.grad(rows, x, drows)
    dy, dweights = torch.autograd.grad(sums, (y, weights), dsums)

    order, places = order.cpu(), places.cpu()
    wide_x, wide_y, wide_w = exact(x), exact(y), exact(weights)
    want_rows = permute_reference(wide_x, order, places)
    want_sums = unpermute_reference(wide_y, places, wide_w)
    (want_dx,) = torch.autograd.grad(want_rows, wide_x, exact(drows))
    want_dy, want_dw = torch.autograd.grad(want_sums, (wide_y, wide_w), exact(dsums))
    with torch.no_grad():
        each = (choices + 1) * 2.0**-24
        assert torch.equal(exact(rows), want_rows)
        sizes = unpermute_reference(exact(drows).abs(), places, None)
        assert_close(dx, want_dx, dtype, each * sizes)
        sizes = unpermute_reference(wide_y.abs(), places, wide_w.abs())
        assert_close(sums, want_sums, dtype, each * sizes)
        assert_close(dy, want_dy, dtype, 2.0**-24 * want_dy.abs())
        sizes = torch.autograd.functional.vjp(
            lambda w: unpermute_reference(wide_y.abs(), places, w), wide_w, exact(dsums).abs()
        )[1]
        assert_close(dweights, want_dw, torch.float32, (width / 32 + 32) * 2.0**-24 * sizes)


@devices
@types
def test_the_same_bits_every_time(device, dtype):
    order, places = (each.to(device) for each in routed(40, 8, 0, 0))
    found = []
    for _ in range(3):
        x = random((40, 96), dtype, device, 1).requires_grad_()
        weights = random((40, 8), torch.float32, device, 2).requires_grad_()
        sums = unpermute(permute(x, order, places), places, weights)
        found.append((sums, *torch.autograd.grad(sums, (x, weights), torch.ones_like(sums))))
    assert all(torch.equal(a, b) for other in found for a, b in zip(other, found[0], strict=True))


def test_what_is_refused():
    order, places = torch.tensor([0, 2, 0]), torch.tensor([[0, 2], [-1, -1], [1, -1]])
    x, weights = torch.zeros(3, 8), torch.ones(3, 2)
    refused(lambda: permute(x, order + 1, places), "order", 3)
    refused(lambda: permute(x, order, places + 1), "positions", 3)
    refused(lambda: permute(x[:2], order - 1, places), [2, 2])
    refused(lambda: permute(x, order.int(), places), "order", "int32")
    refused(lambda: permute(x.double(), order, places), "x", "float64")
    refused(lambda: permute(x[0], order, places), 1)
    refused(lambda: unpermute(x, places - 2, weights), "positions", -3)
    refused(lambda: unpermute(x, places, weights.half()), "weights", "float16")
    refused(lambda: unpermute(x, places, weights[:, :1]), [3, 1], [3, 2])
    refused(lambda: unpermute(torch.zeros(5, 8), places, weights), "padded", 2)


@pytest.mark.gpu
def test_rows_and_tokens_that_are_not_there_count_as_none():
    order, places = (torch.tensor(each, device="cuda") for each in ([0, 7, -9], [[2, 3], [-5, 0]]))
    x, weights = torch.ones(2, 8, device="cuda"), torch.ones(2, 2, device="cuda")
    assert permute(x, order, places)[:, 0].tolist() == [1, 0, 0]
    assert unpermute(torch.ones(3, 8, device="cuda"), places, weights)[:, 0].tolist() == [1, 1]
