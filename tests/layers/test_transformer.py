"""Transformer layer: its residual streams, and two tensor-parallel ranks against one.

Numbers of families of models: tests/checkpoint/test_huggingface.py.
"""

import dataclasses

import numpy as np
import pytest
import torch

from megatron.config import Config
from megatron.layers.context import CallContext, LayerContext, ParameterFactory
from megatron.layers.transformer import TransformerLayer
from megatron.parallel.keyed_random import DropoutKey
from megatron.parallel.sharding import sharding_of
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

S = 8
B = 2
H = 32
GROUPED = dict(num_key_value_heads=2, qk_layernorm=True)
MODELS = {
    "gpt": {},
    "one norm": dict(GROUPED, parallel_residual="one_norm", exact_gelu=True),
    "two norms": dict(
        parallel_residual="two_norms", normalization="rmsnorm", add_bias_linear=False
    ),
    "post": dict(GROUPED, norm_position="post", qk_layernorm_over="all"),
    "xielu": dict(xielu=True, add_bias_linear=False, weight_decay_on_xielu_alphas=True),
    # whose key and value are on both ranks
    "multi-query": dict(num_key_value_heads=1, qk_layernorm=True, qk_layernorm_over="all"),
    "both": dict(
        GROUPED,
        norm_position="both",
        qk_layernorm_over="all",
        normalization="rmsnorm",
        add_bias_linear=False,
        add_qkv_bias=True,
        geglu=True,
        exact_gelu=True,
        apply_layernorm_1p=True,
    ),
}
# Dropped are attention weights, and the hidden states at each place where they are added.
CASES = [
    (model, sequence_parallel, dropout)
    for model in MODELS
    for sequence_parallel in (False, True)
    for dropout in (0.0, 0.3)
    if model in ("gpt", "one norm") or not dropout
]


def make(context, model, dropout=0.0):
    """Return a layer with weights that are neither 0 nor 1, the same on any layout."""
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
        **MODELS[model],
    )
    layer = TransformerLayer(context, config, 0)
    for p in layer.parameters():
        sharding = sharding_of(p)
        full = 0.1 * torch.randn(
            sharding.global_shape, generator=torch.Generator().manual_seed(len(sharding.name))
        )
        box = tuple(slice(o, o + n) for o, n in zip(sharding.offset, sharding.extent, strict=True))
        p.data += full[box]
    return layer


@pytest.mark.parametrize("model", ["one norm", "two norms"])
def test_attention_and_mlp_side_by_side(model):
    """As in GPT-J, where both read the same norm, and in GPT-NeoX."""
    layer = make(LayerContext.single(), model)
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(3))
    call = CallContext()
    normed = layer.input_layernorm(x)
    second = normed if model == "one norm" else layer.post_attention_layernorm(x)
    expected = x
    for out, bias in (layer.self_attention(normed, call), layer.mlp(second)):
        expected = expected + out + (0 if bias is None else bias)
    torch.testing.assert_close(layer(x, call), expected, rtol=1e-5, atol=1e-5)


def run(context, model, dropout):
    """Return (output, gradient of the input) of this rank."""
    layer = make(context, model, dropout)
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(3))
    if context.sequence_parallel:
        x = x.chunk(context.tensor.size)[context.tensor.rank].clone()
    x.requires_grad_()
    out = layer(x, CallContext(dropout=DropoutKey(1, 2)))
    cut = [p for p in layer.parameters() if sharding_of(p).dim is not None]
    gradient, *rest = torch.autograd.grad(out, [x, *cut], out.detach().cos())
    shards = [
        (sharding_of(p).name, sharding_of(p).offset, g.numpy())
        for p, g in zip(cut, rest, strict=True)
    ]
    return out.detach().numpy(), gradient.numpy(), shards


def body(rank):
    group = join(tensor=2).tensor
    context = LayerContext(group, ParameterFactory(1234, rank, 2, torch.device("cpu")))
    return [
        run(dataclasses.replace(context, sequence_parallel=s), model, dropout)
        for model, s, dropout in CASES
    ]


@pytest.mark.slow
def test_two_ranks_equal_one():
    """Two ranks equal one, with the same dropout.

    Copies of the residual stream drop the same entries; parts of it, and of the heads, drop those
    of one process.
    """
    ranks = run_processes(2, body)
    for (model, sequence_parallel, dropout), *by_rank in zip(CASES, *ranks, strict=True):
        if not sequence_parallel:
            assert all(np.array_equal(a, b) for a, b in zip(*(f[:2] for f in by_rank), strict=True))
        expected = run(LayerContext.single(), model, dropout)
        joined = (
            [np.concatenate(shards) for shards in zip(*(f[:2] for f in by_rank), strict=True)]
            if sequence_parallel
            else by_rank[0][:2]
        )
        for a, b in zip(joined, expected[:2], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        for name, _, b in expected[2]:
            a = np.zeros_like(b)
            for _, offset, shard in (p for f in by_rank for p in f[2] if p[0] == name):
                # Gradients of rows that both ranks hold are terms of a sum.
                a[tuple(slice(o, o + n) for o, n in zip(offset, shard.shape, strict=True))] += shard
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4, err_msg=f"{model} {name}")
