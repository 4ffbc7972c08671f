"""Operators of experts against products with matrices of ones and zeros, and torch's gradcheck."""

import pytest
import torch
from torch.autograd import gradcheck

from megatron.kernels.ops.experts import (
    RowCounts,
    grouped_product,
    permute,
    permute_reference,
    unpermute,
    unpermute_reference,
)
from megatron.parallel.deferred_gradients import WeightGradients
from megatron.parallel.gradient_accumulator import GradientAccumulator

# 5 tokens of 3 choices; expert rows 0..8 in which row 4 is padding; token 2 has no row at all
PLACES = torch.tensor([[0, 5, -1], [8, -1, 1], [-1, -1, -1], [2, 6, 3], [-1, 7, -1]])
ORDER = torch.tensor([0, 1, 3, 3, -1, 0, 3, 4, 1])
SIZES = [2, 0, 3, 4]  # of the rows, by expert
COUNTS = RowCounts(torch.tensor(SIZES).cumsum(0).int(), lambda: SIZES)
NONE = RowCounts(torch.zeros(4, dtype=torch.int32), lambda: [0] * 4)


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def test_rows_and_tokens_are_those_of_a_product_with_ones_and_zeros():
    x = numbers(5, 7)
    y = numbers(9, 7, seed=1)
    weights = numbers(5, 3, seed=2)
    rows = torch.zeros(9, 5, dtype=torch.float64)
    combine = torch.zeros(5, 9, dtype=torch.float64)
    for token, choices in enumerate(PLACES.tolist()):
        for choice, row in enumerate(choices):
            if row >= 0:
                rows[row, token] = 1
                combine[token, row] = weights[token, choice].item()
    torch.testing.assert_close(permute_reference(x, ORDER, PLACES), rows @ x)
    torch.testing.assert_close(unpermute_reference(y, PLACES, weights), combine @ y)


def test_gradients_are_those_of_the_values():
    assert gradcheck(lambda x: permute_reference(x, ORDER, PLACES), numbers(5, 7))
    assert gradcheck(lambda y, w: unpermute_reference(y, PLACES, w), (numbers(9, 7), numbers(5, 3)))
    for shape in ((4, 6, 7), (4, 2, 3, 7)):
        assert gradcheck(
            lambda x, w: grouped_product(x, w, COUNTS), (numbers(9, 7), numbers(*shape))
        )


def test_no_rows_and_no_tokens():
    x = torch.zeros(0, 7, requires_grad=True)
    rows = permute(x, ORDER[:0], PLACES[:0])
    tokens = unpermute(rows, torch.full((5, 3), -1), weights := torch.ones(5, 3).requires_grad_())
    tokens.sum().backward()
    assert tokens.shape == (5, 7) and not tokens.any() and not weights.grad.any()
    assert rows.shape == x.grad.shape == (0, 7)
    weight = numbers(4, 6, 7)
    grouped_product(numbers(0, 7), weight, NONE).sum().backward()
    assert not weight.grad.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_host_does_not_wait_for_products(dtype):
    """Whatever torch has for them. Integers are exact, so that the products are those of a CPU."""
    generator = torch.Generator().manual_seed(3)
    x, weight, dy = (
        torch.randint(-3, 4, shape, generator=generator).to(dtype)
        for shape in ((9, 16), (4, 32, 16), (9, 32))
    )

    def results(device):
        a, w = (y.to(device).requires_grad_() for y in (x, weight))
        gradient = dy.to(device)
        counts = COUNTS._replace(ends=COUNTS.ends.to(device))
        try:
            for _ in range(2):  # torch is tried in the first one
                y = grouped_product(a, w, counts)
                y.backward(gradient)
                torch.cuda.set_sync_debug_mode("error")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return y, a.grad, w.grad

    for actual, expected in zip(results("cuda"), results("cpu"), strict=True):
        assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_reach_their_sink(dtype, direct, defers):
    """Integers are exact, so the sum of two passes is that of float64; an expert gets no token."""
    generator = torch.Generator().manual_seed(3)

    def some(*shape):
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    weight = torch.nn.Parameter(some(4, 6, 7))
    added = []
    queue = WeightGradients()
    total = torch.full(weight.shape, torch.nan)
    weight.gradient_accumulator = GradientAccumulator(weight, total, added.append, direct)
    expected = torch.zeros(weight.shape, dtype=torch.float64)
    for passes in (1, 2):
        x = some(9, 7).requires_grad_()
        dy = some(9, 6)
        if defers:
            queue.begin()
        y = grouped_product(x, weight, COUNTS, queue)
        y.backward(dy)
        if defers:
            assert len(added) == passes - 1 and weight.grad is None
            for compute in queue.take():
                compute()
        elif not direct:
            weight.gradient_accumulator.add(weight.grad)
            weight.grad = None
        assert len(added) == passes and weight.grad is None
        experts = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
        assert torch.equal(y, torch.einsum("ni,noi->no", x, weight[experts]))
        assert torch.equal(x.grad, torch.einsum("no,noi->ni", dy, weight.detach()[experts]))
        for e, a, b in zip(experts, dy.double(), x.detach().double(), strict=True):
            expected[e] += torch.outer(a, b)
    assert torch.equal(total.double(), expected)
