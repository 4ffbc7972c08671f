"""Parallel linear layers against the plain product, with deferred weight gradients and both kinds of input."""
import numpy as np
import pytest
import torch

from megatron.layers.context import LayerContext
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.layers.parameters import ParameterFactory, normal
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

S, B, H, F = 8, 2, 12, 16


def inputs():
    g = torch.Generator().manual_seed(5)
    return tuple(torch.randn(S, B, H, generator=g, dtype=torch.float64) for _ in range(2))


def block(context):
    up = ColumnParallelLinear(context, "up", (F, H), normal(0.3), bias=True)
    down = RowParallelLinear(context, "down", (H, F), normal(0.3), bias=True)
    torch.nn.init.normal_(down.bias, generator=torch.Generator().manual_seed(1))
    return up.double(), down.double()


def run(up, down, x, target, context, defer):
    if defer:
        context.weight_gradients.begin()
    y, bias = down(torch.tanh(up(x)))
    ((y + bias) * target).sum().backward()
    if defer:
        waiting = context.weight_gradients.take()
        assert len(waiting) == 2
        assert up.weight.grad is None
        for compute in waiting:
            compute()
    return y + bias


def body(rank, sequence_parallel, overlap, defer):
    topology = join(tensor=2)
    context = LayerContext(
        topology.tensor, ParameterFactory(9, rank, 2, torch.device("cpu")), sequence_parallel, overlap
    )
    up, down = block(context)
    x, target = inputs()
    if sequence_parallel:
        x, target = x.chunk(2)[rank].clone(), target.chunk(2)[rank]
    x.requires_grad_()
    y = run(up, down, x, target, context, defer)
    gradients = [x.grad, up.weight.grad, up.bias.grad, down.weight.grad, down.bias.grad]
    return y.detach().numpy(), [g.numpy() for g in gradients]


@pytest.mark.parametrize(
    ("sequence_parallel", "overlap", "defer"),
    [(False, True, False), (False, False, True), (True, True, False), (True, False, False), (True, True, True)],
)
def test_two_ranks_equal_one(sequence_parallel, overlap, defer):
    context = LayerContext.single(seed=9)
    up, down = block(context)
    x, target = inputs()
    x.requires_grad_()
    y = run(up, down, x, target, context, defer=False)
    ranks = run_processes(2, body, sequence_parallel, overlap, defer)
    close = dict(rtol=1e-12, atol=1e-12)  # float64: only the order of sums differs
    if sequence_parallel:
        np.testing.assert_allclose(np.concatenate([r[0] for r in ranks]), y.detach().numpy(), **close)
        np.testing.assert_allclose(np.concatenate([r[1][0] for r in ranks]), x.grad.numpy(), **close)
        # Each rank has the part of its own tokens; the engine adds them up (partial_gradient).
        np.testing.assert_allclose(ranks[0][1][4] + ranks[1][1][4], down.bias.grad.numpy(), **close)
    else:
        for values, gradients in ranks:
            np.testing.assert_allclose(values, y.detach().numpy(), **close)
            np.testing.assert_allclose(gradients[0], x.grad.numpy(), **close)
            np.testing.assert_allclose(gradients[4], down.bias.grad.numpy(), **close)
    for i, axis, whole in ((1, 0, up.weight), (2, 0, up.bias), (3, 1, down.weight)):
        np.testing.assert_allclose(np.concatenate([r[1][i] for r in ranks], axis), whole.grad.numpy(), **close)


def test_deferred_gradients_accumulate_and_misuse_is_caught():
    context = LayerContext.single(seed=9)
    up, down = block(context)
    x, target = inputs()
    run(up, down, x, target, context, defer=True)
    once = up.weight.grad.clone()
    context.weight_gradients.begin()
    y, bias = down(torch.tanh(up(x)))
    ((y + bias) * target).sum().backward()
    for compute in context.weight_gradients.take():
        compute()
    torch.testing.assert_close(up.weight.grad, 2 * once)
    context.weight_gradients.begin()
    context.weight_gradients.add(lambda: None)
    with pytest.raises(AssertionError, match="never taken"):
        context.weight_gradients.begin()
