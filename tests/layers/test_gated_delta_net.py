"""Gated DeltaNet against a recurrence over tokens in float64: chunks, documents, cache."""

import sys
import types

import pytest
import torch
from torch.nn import functional as F

from megatron.config import Config
from megatron.layers import gated_delta_net
from megatron.layers.cache import KeyValueCache
from megatron.layers.context import CallContext, LayerContext
from megatron.layers.gated_delta_net import GatedDeltaNet, gated_delta_rule
from megatron.layers.positions import Documents
from tests.helpers.tiny import LINEAR

S, B, H = 11, 3, 16
KEYS, STATES, KEY, VALUE, TAPS = 2, 6, 6, 5, 3  # the last three are LINEAR's
SIZES = {**LINEAR, "linear_num_key_heads": KEYS, "linear_num_value_heads": STATES}


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


def reference(layer, x):
    """Return the layer's output for one document x [s, h], token by token."""
    p = dict(layer.named_parameters())
    mixed = (x @ p["in_proj.weight"].t()).view(len(x), KEYS, -1)
    each = STATES // KEYS
    inputs, z, b, a = mixed.split((2 * KEY + each * VALUE, each * VALUE, each, each), 2)
    taps = p["convolution"].view(KEYS, -1, TAPS)
    out = []
    states = torch.zeros(STATES, KEY, VALUE, dtype=x.dtype)
    for t in range(len(x)):
        before = [inputs[t - j] * taps[..., -1 - j] for j in range(TAPS) if t >= j]
        q, k, v = F.silu(sum(before)).split((KEY, KEY, each * VALUE), 1)
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        row = []
        for n in range(STATES):
            g = -p["log_rate"][n].exp() * F.softplus(a[t].flatten()[n] + p["bias"][n])
            state = states[n] * g.exp()
            key = k[n // each]
            change = v.reshape(STATES, VALUE)[n] - state.t() @ key
            state = state + torch.outer(key, b[t].flatten()[n].sigmoid() * change)
            states = torch.cat((states[:n], state[None], states[n + 1 :]))
            o = state.t() @ q[n // each] / KEY**0.5
            o = o / (o.square().mean() + layer.out_norm.epsilon).sqrt() * p["out_norm.weight"]
            row.append(o * F.silu(z[t].reshape(STATES, VALUE)[n]))
        out.append(torch.cat(row) @ p["dense.weight"].t())
    return torch.stack(out)


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("lengths", [None, (3, 8, 1, 2, 8, 5, 4, 2)])
@pytest.mark.parametrize("recompute", [False, True])
def test_chunks_are_the_recurrence(monkeypatch, chunk, lengths, recompute):
    monkeypatch.setattr(gated_delta_net, "CHUNK", chunk)
    layer = made()
    layer.recompute = recompute
    documents = None
    if lengths:
        bounds = torch.tensor((0, *lengths)).cumsum(0).int()
        documents = Documents(bounds, torch.tensor(lengths).numpy(), B)
    x = drawn(S, B, H).requires_grad_()
    g = drawn(S, B, H, seed=3)
    named = dict(layer.named_parameters())
    out, _ = layer(x, CallContext(documents=documents))
    actual = torch.autograd.grad(out, [x, *named.values()], g)
    rows = x.transpose(0, 1).flatten(0, 1).split(lengths or (S,) * B)
    expected_out = torch.cat([reference(layer, row) for row in rows]).view(B, S, H).transpose(0, 1)
    torch.testing.assert_close(out, expected_out, rtol=1e-9, atol=1e-10)
    expected = torch.autograd.grad(expected_out, [x, *named.values()], g)
    for name, a, b in zip(["x", *named], actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n} {m}")


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


def test_cached_tokens_equal_the_full_sequences():
    """Generate texts of several lengths, one of which ends early."""
    layer = made()
    x = drawn(S, B, H)
    lengths = [2, 6, 1]
    cache = KeyValueCache(lengths, S, x.device)
    padding = torch.arange(6) >= torch.tensor(lengths).unsqueeze(1)
    with torch.no_grad():
        full = [reference(layer, x[:, b]) for b in range(B)]
        first, _ = layer(x[:6], CallContext(cache=cache, padding=padding))
        cache.used = 6
        for b, n in enumerate(lengths):
            torch.testing.assert_close(first[:n, b], full[b][:n])
        texts = list(range(B))
        for step in range(4):
            now = torch.stack([x[lengths[b] + step, b] for b in texts]).unsqueeze(0)
            out, _ = layer(now, CallContext(cache=cache))
            expected = torch.stack([full[b][lengths[b] + step] for b in texts])
            torch.testing.assert_close(out.squeeze(0), expected)
            if step == 1:
                cache.keep([0, 2])
                texts = [0, 2]
