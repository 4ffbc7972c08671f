"""Transformer layer on two tensor-parallel ranks, against the same layer in one process."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron.config import Config
from megatron.layers.context import CallContext, LayerContext, ParameterFactory
from megatron.layers.transformer import TransformerLayer
from megatron.parallel.sharding import DropoutKey
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

S, B, H = 8, 2, 32
CASES = [
    (sequence_parallel, dropout) for sequence_parallel in (False, True) for dropout in (0.0, 0.3)
]


def run(context, dropout):
    """Return (output, gradient of the input) of this rank."""
    config = Config.create(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=4,
        seq_length=S,
        vocab_size=8,
        micro_batch_size=B,
        global_batch_size=B,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        attention_backend="blocked",
    )
    layer = TransformerLayer(context, config, 0)
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(3))
    if context.sequence_parallel:
        x = x.chunk(context.tensor.size)[context.tensor.rank].clone()
    x.requires_grad_()
    out = layer(x, CallContext(dropout=DropoutKey(1, 2)))
    (gradient,) = torch.autograd.grad(out, x, out.detach().cos())
    return out.detach().numpy(), gradient.numpy()


def body(rank):
    group = join(tensor=2).tensor
    context = LayerContext(group, ParameterFactory(1234, rank, 2, torch.device("cpu")))
    return [run(dataclasses.replace(context, sequence_parallel=s), dropout) for s, dropout in CASES]


@pytest.mark.slow
def test_two_ranks_equal_one():
    """Two ranks equal one, with the same dropout.

    Copies of the residual stream drop the same entries; parts of it, and of the heads, drop those
    of one process.
    """
    ranks = run_processes(2, body)
    for (sequence_parallel, dropout), *found in zip(CASES, *ranks, strict=True):
        if not sequence_parallel:
            assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
        expected = run(LayerContext.single(), dropout)
        whole = (
            [np.concatenate(parts) for parts in zip(*found, strict=True)]
            if sequence_parallel
            else found[0]
        )
        for a, b in zip(whole, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
