"""Self-attention with variants of its projection, positions and softmax, in float64.

Compared with all scores and a mask. Layouts: tests/parity.
"""

import pytest
import torch

from megatron.config import Config
from megatron.layers.attention import SelfAttention
from megatron.layers.context import CallContext, LayerContext

S, B, H, HEADS, GROUPS, D = 12, 2, 24, 6, 2, 10
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


def rotated(x, base, divisor):
    """Rotate x [s, b, heads, d], whose halves are pairs; cosines and sines are tables in fp32."""
    half = x.shape[-1] // 2
    angles = torch.outer(
        torch.arange(len(x)).double(), base ** (-torch.arange(half).double() / half) / divisor
    )[:, None, None]
    cos, sin = (table.float().double() for table in (angles.cos(), angles.sin()))
    a, b = x.split(half, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def expected(model, module, x, angles, window):
    """Return attention before the output projection's bias, from all scores."""
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
    behind = torch.arange(S).unsqueeze(1) - torch.arange(S)
    hidden = (behind < 0) | (behind > (S if window is None else window))
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) * D**-0.5
    weights = scores.masked_fill(hidden, float("-inf")).exp()
    sink = float(model.softmax_type == "off-by-one")
    if model.softmax_type == "learnable":
        sink = module.softmax_offset.view(1, -1, 1, 1).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + sink)
    out = torch.einsum("bhij,jbhd->ibhd", weights, v).flatten(2)
    if model.attention_output_gate:
        out = out / (1 + (-gate).exp())
    return out @ module.dense.weight.t()


@pytest.mark.parametrize("backend", ["unfused", "blocked", "fused"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, backend):
    """Outputs and gradients are those of the reference."""
    settings, *angles = VARIANTS[name]
    more = dict(num_key_value_heads=GROUPS, kv_channels=D, attention_backend=backend)
    config = Config.create(**SIZES, **more, **settings)
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(3)).double()
    for layer in range(2):
        module = SelfAttention(LayerContext.single(), f"layers.{layer}", config, layer).double()
        for p in module.parameters():
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
        window = config.model.window(layer)
        weights = [p for name, p in module.named_parameters() if name != "dense.bias"]
        runs = []
        for compute in (
            lambda x: module(x, CallContext())[0],  # noqa: B023
            lambda x: expected(config.model, module, x, angles[layer], window),  # noqa: B023
        ):
            start = x.clone().requires_grad_()
            out = compute(start)
            runs.append([out, *torch.autograd.grad(out.sin().sum(), [start, *weights])])
        for a, b in zip(*runs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
