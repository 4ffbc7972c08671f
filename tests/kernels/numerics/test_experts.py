"""Tokens to their experts' rows and back: values and gradients against float64."""

import pytest
import torch
from hypothesis import strategies as st

from megatron.kernels.ops.experts import (
    permute,
    permute_reference,
    unpermute,
    unpermute_reference,
)
from tests.kernels.numerics.reference import (
    WIDTHS,
    assert_close,
    compared,
    differentiated,
    drawn,
    moved_on,
    random,
    refused,
)


def routed(tokens, choices, padding, seed):
    """Draw (order, places): a fifth of the choices is dropped, rows of padding are added."""
    generator = torch.Generator().manual_seed(seed)
    there = torch.rand(tokens, choices, generator=generator) < 0.8
    count = int(there.sum())
    rows = torch.randperm(count + padding, generator=generator)[:count]
    places = torch.full((tokens, choices), -1)
    order = torch.full((count + padding,), -1)
    places[there] = rows
    order[rows] = there.nonzero()[:, 0]
    return order, places


@drawn(
    tokens=st.sampled_from([0, 1, 3, 17, 40]),
    choices=st.sampled_from([1, 2, 3, 4, 5, 8, 11]),
    padding=st.sampled_from([0, 0, 1, 5]),
    width=WIDTHS,
    moved=st.booleans(),
)
def test_values_and_gradients(device, dtype, tokens, choices, padding, width, moved, seed):
    """A sum of k products is off by k 2^-24 of the sum of their magnitudes (Higham, 2002, 3.1).

    No chain of additions in a row's dot product is longer than width / 32, beside the lanes' tree.
    """
    order, places = routed(tokens, choices, padding, seed)
    maps = [each.to(device) for each in (order, places)]
    x, y, drows, dsums = (
        (moved_on if moved else torch.clone)(random((count, width), dtype, device, seed + i))
        for i, count in enumerate((tokens, len(order), len(order), tokens))
    )
    weights = random((tokens, choices), torch.float32, device, seed + 4)
    each = (choices + 1) * 2.0**-24

    (rows, dx), (want_rows, want_dx), _, (g,) = compared(
        lambda x: permute(x, *maps), lambda x: permute_reference(x, order, places), [x], drows
    )
    assert torch.equal(rows.cpu().double(), want_rows)
    assert_close(dx, want_dx, dtype, each * unpermute_reference(g.abs(), places, None))

    def reference(y, weights):
        return unpermute_reference(y, places, weights)

    (sums, dy, dweights), (want, want_dy, want_dweights), wide, (g,) = compared(
        lambda y, weights: unpermute(y, maps[1], weights, padded=bool(padding)),
        reference,
        [y, weights],
        dsums,
    )
    sizes, _, of_weights = differentiated(
        reference, [leaf.detach().abs().requires_grad_() for leaf in wide], g.abs()
    )
    assert_close(sums, want, dtype, each * sizes)
    assert_close(dy, want_dy, dtype, 2.0**-24 * want_dy.abs())
    error = (width / 32 + 32) * 2.0**-24 * of_weights
    assert_close(dweights, want_dweights, torch.float32, error)


def test_what_is_refused():
    order = torch.tensor([0, 2, 0])
    places = torch.tensor([[0, 2], [-1, -1], [1, -1]])
    x = torch.zeros(3, 8)
    weights = torch.ones(3, 2)
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
    x = torch.ones(2, 8, device="cuda")
    weights = torch.ones(2, 2, device="cuda")
    assert permute(x, order, places)[:, 0].tolist() == [1, 0, 0]
    assert unpermute(torch.ones(3, 8, device="cuda"), places, weights)[:, 0].tolist() == [1, 1]
