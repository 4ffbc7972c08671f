"""Gated DeltaNet: another kernel, and a long recurrence in fp32.

Chunks and cache: tests/checkpoint/test_float64.py; documents: tests/model/test_gpt.py.
"""

import sys
import types

import torch

from megatron.config import Config
from megatron.layers.cache import KeyValueCache
from megatron.layers.context import CallContext, LayerContext
from megatron.layers.gated_delta_net import GatedDeltaNet, gated_delta_rule
from tests.helpers.tiny import LINEAR

S, B, H = 11, 3, 16
SIZES = {**LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 6}


def made():
    config = Config.create(
        num_layers=2, hidden_size=H, num_attention_heads=2, seq_length=S, vocab_size=8, **SIZES
    )
    layer = GatedDeltaNet(LayerContext.single(), "layers.0.self_attention", config, 0).double()
    generator = torch.Generator().manual_seed(1)
    for p in layer.parameters():
        p.data += 0.4 * torch.randn(p.shape, generator=generator)
    return layer


def drawn(*shape, seed=2):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_kernel_gets_the_same(monkeypatch):
    """transformers' function stands in for flash-linear-attention's, whose arguments it has."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    module = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = torch_chunk_gated_delta_rule
    monkeypatch.setitem(sys.modules, module.__name__, module)
    layer = made()
    layer.fused = True
    x = drawn(S, B, H)
    lengths = [S, 4, 7]
    padding = torch.arange(S) >= torch.tensor(lengths).unsqueeze(1)
    caches = [KeyValueCache(lengths, S, x.device) for _ in range(2)]
    with torch.no_grad():
        out, _ = layer(x, CallContext(cache=caches[0], padding=padding))
        layer.fused = False
        expected, _ = layer(x, CallContext(cache=caches[1], padding=padding))
    near = dict(rtol=1e-4, atol=1e-5)  # transformers computes in fp32
    torch.testing.assert_close(out, expected, **near)
    states = [cache.states[0][0].double() for cache in caches]
    torch.testing.assert_close(*states, **near)


def test_strong_decay_and_one_key_are_finite_and_right_in_fp32():
    """Chunks neither overflow nor lose digits where all keys are equal, with or without decay."""
    k = torch.ones(1, 1, 200, 1, dtype=torch.float64)
    v, beta = drawn(1, 1, 200, 1), drawn(1, 1, 200, seed=4).sigmoid()
    for rate in (0.0, 50.0):
        g = -rate * drawn(1, 1, 200, seed=5).square()
        state, expected = 0.0, []
        for t in range(200):
            state = g[0, 0, t].exp() * state
            state = state + beta[0, 0, t] * (v[0, 0, t, 0] - state)
            expected.append(state)
        out, _ = gated_delta_rule(*(y.float() for y in (k, k, v, g, beta)))
        # The sum of the decays in a chunk is rounded.
        atol = 2.0**-22 * max(8.0, float(g[0, 0, :192].view(3, 64).sum(1).abs().max()))
        torch.testing.assert_close(out.flatten().double(), torch.stack(expected), rtol=0, atol=atol)
