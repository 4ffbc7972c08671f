"""Transformer layer whose attention and MLP read the same norm, which no family of models has.

Other layers: tests/checkpoint/test_float64.py; layouts and dropout: tests/parity.
"""

import torch

from megatron.config import Config
from megatron.layers.context import CallContext, LayerContext
from megatron.layers.transformer import TransformerLayer

S, B, H = 8, 2, 32


def test_attention_and_mlp_side_by_side():
    """As in GPT-J."""
    fields = dict(num_layers=1, hidden_size=H, num_attention_heads=4, seq_length=S, vocab_size=8)
    config = Config.create(**fields, parallel_residual="one_norm", micro_batch_size=B)
    layer = TransformerLayer(LayerContext.single(), config, 0).eval()
    for p in layer.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(3))
    call = CallContext()
    normed = layer.input_layernorm(x)
    expected = x
    for out, bias in (layer.self_attention(normed, call), layer.mlp(normed)):
        expected = expected + out + bias
    torch.testing.assert_close(layer(x, call), expected, rtol=1e-5, atol=1e-5)
