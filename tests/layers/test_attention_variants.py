"""Self-attention with variants of its projection, positions and softmax, in float64.

Compared with all scores and a mask. Layouts: tests/parity.
"""

import math

import pytest
import torch

from megatron.config import Config
from megatron.layers.attention import SelfAttention
from megatron.layers.cache import KeyValueCache
from megatron.layers.context import CallContext, LayerContext
from megatron.layers.latent_attention import LatentAttention

S, B, H, HEADS, GROUPS, D = 12, 2, 24, 6, 2, 10
LATENT = 10
SIZES = dict(
    num_layers=2,
    hidden_size=H,
    num_attention_heads=HEADS,
    seq_length=S,
    vocab_size=8,
    micro_batch_size=B,
    global_batch_size=B,
    attention_dropout=0.0,
)
BACKENDS = ("unfused", "blocked", "fused")
ROPE = dict(position_embedding_type="rope", normalization="rmsnorm", rotary_base=77.0)
WINDOWS = dict(window_size=(3, 0), window_attn_skip_freq=(2,))
LINEAR = dict(rope_scaling="linear", rope_scaling_factor=3.0)
# Settings, and for layers 0 and 1 the base and divisor of their angles, None without RoPE.
VARIANTS = {
    "every second layer without RoPE": (dict(ROPE, no_rope_freq=(2,)), (77, 1), None),
    "the first layer without RoPE": (dict(ROPE, no_rope_freq=(1, 0), **LINEAR), None, (77, 3)),
    "local base": (dict(ROPE, rotary_local_base=9.0, **WINDOWS, **LINEAR), (9, 1), (77, 3)),
    "gate": (dict(ROPE, attention_output_gate=True), (77, 1), (77, 1)),
    "gate without positions": (
        dict(position_embedding_type="none", attention_output_gate=True),
        None,
        None,
    ),
    "learned sinks": (dict(ROPE, softmax_type="learnable", **WINDOWS), (77, 1), (77, 1)),
    "sinks": (dict(ROPE, softmax_type="off-by-one"), (77, 1), (77, 1)),
    "norms without weights": (dict(ROPE, qk_l2_norm=True), (77, 1), (77, 1)),
}


def rotated(x, base, divisor, factor=1.0):
    """Rotate x [s, b, heads, d], whose halves are pairs; cosines and sines are tables in fp32."""
    half = x.shape[-1] // 2
    angles = torch.outer(
        torch.arange(len(x)).double(), base ** (-torch.arange(half).double() / half) / divisor
    )[:, None, None]
    cos, sin = ((factor * table).float().double() for table in (angles.cos(), angles.sin()))
    a, b = x.split(half, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def expected(config, module, x, angles, window):
    """Return attention before the output projection's bias, from all scores."""
    model = config.model
    mixed = module.query_key_value(x).view(S, B, GROUPS, -1, D)
    q, k, v = mixed.split((mixed.shape[3] - 2, 1, 1), dim=3)
    gate = q[:, :, :, 1::2].reshape(S, B, -1)
    q = q[:, :, :, ::2] if model.attention_output_gate else q
    k, v = (t.expand(-1, -1, -1, HEADS // GROUPS, -1).flatten(2, 3) for t in (k, v))
    q = q.flatten(2, 3)
    if model.qk_l2_norm:
        q, k = (
            t / (t.square().mean(-1, keepdim=True) + model.layernorm_epsilon).sqrt() for t in (q, k)
        )
    if angles is not None:
        q, k = (rotated(t, *angles) for t in (q, k))
    out = attended(q, k, v, D**-0.5, window, sink_of(model, module))
    if model.attention_output_gate:
        out = out / (1 + (-gate).exp())
    return out @ module.dense.weight.t()


def sink_of(model, module):
    """Return what sinks add to the denominators of heads."""
    if model.softmax_type == "learnable":
        return module.softmax_offset.view(1, -1, 1, 1).exp()
    return float(model.softmax_type == "off-by-one")


def attended(q, k, v, scale, window, sink):
    """Return the outputs of all heads, [s, b, heads d]."""
    behind = torch.arange(S).unsqueeze(1) - torch.arange(S)
    hidden = (behind < 0) | (behind > (S if window is None else window))
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) * scale
    weights = scores.masked_fill(hidden, float("-inf")).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + sink)
    return torch.einsum("bhij,jbhd->ibhd", weights, v).flatten(2)


def expected_latent(config, module, x, angles, window):
    """Return latent attention, with keys and values of each head."""
    model = config.model
    epsilon = model.layernorm_epsilon
    rms = lambda t, norm: (  # noqa: E731
        t / (t.square().mean(-1, keepdim=True) + epsilon).sqrt() * norm.weight
    )
    latent, shared = (x @ module.key_value_down.weight.t()).split((LATENT, 4), dim=-1)
    queries = x
    if model.q_lora_rank is not None:
        queries = rms(x @ module.query_down.weight.t(), module.q_layernorm)
    q = (queries @ module.query.weight.t()).view(S, B, HEADS, -1)
    k, v = (
        (rms(latent, module.kv_layernorm) @ module.key_value.weight.t())
        .view(S, B, HEADS, -1)
        .split((6, 7), dim=-1)
    )
    # YaRN: the factor of cosines and sines here, the square of that of all entries in the softmax
    factor = (0.1 * 2.0 * math.log(3.0) + 1) / (0.1 * 0.5 * math.log(3.0) + 1)
    turned, shared = (rotated(t, *angles, factor) for t in (q[..., 6:], shared.unsqueeze(2)))
    q = torch.cat((q[..., :6], turned), -1)
    k = torch.cat((k, shared.expand(-1, -1, HEADS, -1)), -1)
    scale = (0.1 * 0.5 * math.log(3.0) + 1) ** 2 / 10**0.5
    return attended(q, k, v, scale, window, sink_of(model, module)) @ module.dense.weight.t()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, backend):
    settings, *angles = VARIANTS[name]
    config = Config.create(
        **SIZES,
        num_key_value_heads=GROUPS,
        kv_channels=D,
        attention_backend=backend,
        **settings,
    )
    for layer in range(2):
        equal(made(SelfAttention, config, layer), config, expected, angles[layer], layer)


def equal(module, config, reference, angles, layer):
    """Compare outputs and gradients with those of the reference; return input and output."""
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(3)).double()
    window = config.model.window(layer)
    runs = []
    for compute in (
        lambda x: module(x, CallContext())[0],
        lambda x: reference(config, module, x, angles, window),
    ):
        start = x.clone().requires_grad_()
        out = compute(start)
        runs.append([out, *torch.autograd.grad(out.sin().sum(), [start, *weights(module)])])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return x, runs[0][0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("settings", [dict(q_lora_rank=9), dict(softmax_type="learnable")])
def test_latent_attention(settings, backend):
    """Beside keys and values of all heads; so are its caches of latents and of all heads."""
    config = Config.create(
        **SIZES,
        **ROPE,
        attention_backend=backend,
        multi_latent_attention=True,
        kv_lora_rank=LATENT,
        qk_head_dim=6,
        qk_pos_emb_head_dim=4,
        v_head_dim=7,
        qk_layernorm=True,
        add_bias_linear=False,
        rope_scaling="yarn",
        rope_scaling_factor=3.0,
        yarn_beta_fast=1e-5,  # all frequencies are scaled
        yarn_beta_slow=1e-6,
        yarn_mscale=2.0,
        yarn_mscale_all_dim=0.5,
        **settings,
    )
    module = made(LatentAttention, config, 0)
    x, full = equal(module, config, expected_latent, (77, 3), 0)
    for module.caches_latents in (True, False):
        generated_is(full, module, x)


def generated_is(full, module, x):
    """Compare tokens that are added one by one with those of a full pass."""
    lengths = [2, 4]  # of prompts
    cache = KeyValueCache(lengths, S, x.device)
    with torch.inference_mode():
        first = module(x[:4], CallContext(cache=cache))[0]
        torch.testing.assert_close(first[3, 1], full[3, 1], rtol=1e-9, atol=1e-9)
        cache.used = 4
        for step in range(S - 4):
            new = torch.stack([x[n + step, i] for i, n in enumerate(lengths)]).unsqueeze(0)
            call = CallContext(position_ids=cache.position_ids, cache=cache)
            out = module(new, call)[0][0]
            right = torch.stack([full[n + step, i] for i, n in enumerate(lengths)])
            torch.testing.assert_close(out, right, rtol=1e-9, atol=1e-9)
            cache.used += 1


def made(kind, config, layer):
    module = kind(LayerContext.single(), f"layers.{layer}", config, layer).double()
    for p in module.parameters():
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
    return module


def weights(module):
    return [p for name, p in module.named_parameters() if name != "dense.bias"]
