"""Parallel linear layers against plain autograd: messages, chunks, accumulators, deferral, recomputation.

All values are small multiples of 1/8, so that every sum is exact in any order and results are
compared bit by bit.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron.kernels import library
from megatron.layers import linear
from megatron.layers.context import LayerContext, ParameterFactory, normal
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.flight import FlightRecorder
from tests.helpers.gradient_accumulators import attach_accumulator
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

S = 8
B = 2
H = 12
FFN = 8
PASSES = 2


class Case(NamedTuple):
    sequence_parallel: bool = False
    chunks: int = 1
    overlap: bool = True
    defer: bool = False
    recompute: bool = False
    # "direct"; "autograd" as with --no-gradient-accumulation-fusion; "" for plain gradients
    accumulators: str = ""


CASES = [
    Case(),
    Case(overlap=False, defer=True, accumulators="direct"),
    Case(chunks=3, accumulators="direct"),
    Case(chunks=3, overlap=False, defer=True, accumulators="autograd"),
    Case(True),
    Case(True, overlap=False, accumulators="autograd"),
    Case(True, defer=True, recompute=True),
    Case(True, chunks=3, accumulators="direct"),
    Case(True, chunks=3, overlap=False, defer=True, accumulators="direct"),
    Case(True, chunks=2, recompute=True, accumulators="autograd"),
    Case(True, chunks=4, defer=True, recompute=True, accumulators="direct"),
]


def eighths(*shape, seed=5):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double() / 8


def inputs():
    return eighths(S, B, H), eighths(S, B, H, seed=6)


def block(context):
    up = ColumnParallelLinear(context, "up", (2, FFN, H), normal(0.3), bias=True).double()
    down = RowParallelLinear(context, "down", (H, FFN), normal(0.3), bias=True).double()
    with torch.no_grad():
        for parameter in (up.weight, down.weight):
            parameter.copy_((8 * parameter).round() / 8)
        down.bias.copy_(eighths(H, seed=7))
    return up, down


def gated(x):
    gate, value = x.chunk(2, dim=-1)
    return F.relu(gate) * value


def parameters(up, down):
    return [up.weight, up.bias, down.weight, down.bias]


def attach_accumulators(parameters, direct):
    """Attach an accumulator and a hook for autograd's gradient to each parameter, as the engine does."""

    def take(parameter):
        # The layer added it itself; autograd calls the hook nevertheless.
        if parameter.grad is None:
            return
        parameter.gradient_accumulator.add(parameter.grad)
        parameter.grad = None

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(take)
    return [attach_accumulator(parameter, direct=direct)[1] for parameter in parameters]


def run(up, down, x, target, context, case):
    queue = context.weight_gradients
    for _ in range(PASSES):
        if case.defer:
            queue.begin()
        body = lambda x: down(gated(up(x)))  # noqa: E731
        y, bias = checkpoint(body, x, use_reentrant=False) if case.recompute else body(x)
        ((y + bias) * target).sum().backward()
        if case.defer:
            waiting = queue.take()
            assert len(waiting) == 2
            for compute in waiting:
                compute()
    return y + bias


def gradients(x, up, down):
    def of(p):
        return p.gradient_accumulator.total if hasattr(p, "gradient_accumulator") else p.grad

    return [x.grad.numpy(), *(of(p).numpy() for p in parameters(up, down))]


def results(x, target, context, case):
    """Return (y, the gradients of x, up.weight, up.bias, down.weight, down.bias)."""
    up, down = block(context)
    added = (
        attach_accumulators(parameters(up, down), case.accumulators == "direct")
        if case.accumulators
        else []
    )
    x = x.clone().requires_grad_()
    y = run(up, down, x, target, context, case)
    assert all(len(contributions) == PASSES for contributions in added)
    if case.accumulators:
        assert all(p.grad is None for p in parameters(up, down))
    return y.detach().numpy(), gradients(x, up, down)


class Recorder(FlightRecorder):
    """A flight recorder that lists its calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def enter(self, *call, sequence=0):
        number = super().enter(*call, sequence=sequence)
        self.calls.append((*call, number))
        return number


def body(rank, with_nodes):
    topology = join(tensor=2)
    linear.LEAST_TOKENS = 1
    assert library.find("cpu").handle is not None
    if not with_nodes:
        library._nodes = None
    out = []
    for case in CASES:
        recorder = Recorder()
        context = LayerContext(
            dataclasses.replace(topology.tensor, flight=recorder),
            ParameterFactory(9, rank, 2, torch.device("cpu")),
            case.sequence_parallel,
            case.overlap,
            case.chunks,
        )
        x, target = inputs()
        if case.sequence_parallel:
            x = x.chunk(2)[rank]
            target = target.chunk(2)[rank]
        out.append((*results(x, target, context, case), recorder.calls))
    return out


@pytest.fixture(scope="module")
def two_ranks():
    return [run_processes(2, body, with_nodes) for with_nodes in (True, False)]


@pytest.fixture(scope="module")
def plain():
    """Compute the same by plain torch operators.

    The values are y, and the gradients of x, up.weight, up.bias, down.weight, down.bias.
    """
    up, down = block(LayerContext.single(seed=9))
    x, target = inputs()
    x.requires_grad_()
    for _ in range(PASSES):
        hidden = gated(F.linear(x, up.weight.view(2 * FFN, H), up.bias.view(-1)))
        y = F.linear(hidden, down.weight, down.bias)
        (y * target).sum().backward()
    return y.detach().numpy(), gradients(x, up, down)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=map(str, CASES))
def test_two_ranks_equal_plain_autograd(index, two_ranks, plain):
    y, expected = plain
    nodes, python = ([rank[index] for rank in ranks] for ranks in two_ranks)
    assert [rank[-1] for rank in nodes] == [rank[-1] for rank in python]
    for implementation in (nodes, python):
        outs, grads, _ = zip(*implementation, strict=True)
        check(index, outs, grads, y, expected)


def check(index, outs, grads, y, expected):
    same = np.testing.assert_array_equal
    if CASES[index].sequence_parallel:
        same(np.concatenate(outs), y)
        same(np.concatenate([g[0] for g in grads]), expected[0])
    else:
        for out, g in zip(outs, grads, strict=True):
            same(out, y)
            same(g[0], expected[0])
    for g in grads:  # the bias outside the region sees its rank's own tokens, or all
        same(
            grads[0][4] + grads[1][4] if CASES[index].sequence_parallel else g[4],
            expected[4],
        )
    for i in (1, 2, 3):
        same(np.concatenate([g[i] for g in grads], 1), expected[i])


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(accumulators="direct"),
        Case(accumulators="autograd"),
        Case(accumulators="direct", recompute=True, chunks=4),
        Case(accumulators="direct", defer=True),
        Case(accumulators="autograd", defer=True, recompute=True),
        Case(defer=True),
    ],
    ids=str,
)
def test_one_rank_equals_plain_autograd(case, plain):
    x, target = inputs()
    y, grads = results(x, target, LayerContext.single(seed=9), case)
    np.testing.assert_array_equal(y, plain[0])
    for mine, expected in zip(grads, plain[1], strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_frozen_weights_and_inputs_without_gradient():
    context = LayerContext.single(seed=9)
    up, down = block(context)
    attach_accumulators([up.weight, down.weight], direct=True)
    up.weight.requires_grad_(False)
    x, target = inputs()
    y, _ = down(gated(up(x)))
    (y * target).sum().backward()
    assert up.weight.gradient_accumulator.fresh and not down.weight.gradient_accumulator.fresh
    assert x.grad is None
