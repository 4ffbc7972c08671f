"""Layers beside the fused kernels: where torch computes, and sums that do not overflow.

Kernels against float64: tests/kernels/numerics; models with and without them: tests/model.
"""

import pytest
import torch

from megatron.config import Config
from megatron.kernels.choose import ALL, Fusions
from megatron.kernels.ops import elementwise
from megatron.layers.context import CallContext
from megatron.layers.transformer import Norm, TransformerLayer
from megatron.parallel.keyed_random import DropoutKey
from tests.helpers.fusions import Operators, context
from tests.helpers.gradient_accumulators import attach_accumulator

NONE = Fusions()


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def settle(module, dtype):
    """Set weights that are neither 0 nor 1, in the dtype and equal for equal modules."""
    for i, p in enumerate(module.parameters()):
        p.data = (p.data + 0.3 * randn(*p.shape, seed=i)).to(dtype)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_residual_stream_in_fp32_stays_with_torch(kind):
    norm = Norm(context(), "n", 64, kind, 1e-5)
    settle(norm, torch.bfloat16)
    with Operators() as seen:
        assert norm(randn(5, 64)).dtype == torch.bfloat16
        assert not norm.fuses(randn(5, 64).bfloat16(), randn(5, 64))
    assert not seen.calls


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_sums_over_tokens_do_not_overflow_in_fp16(kind, fused):
    """Sums over tokens do not overflow in fp16.

    Each value is finite in fp16, and so is the sum over any part of a sequence on a rank, in fp32.
    """
    x = randn(6000, 16, seed=1).half()
    norm = Norm(context(ALL if fused else NONE), "n", 16, kind, 1e-5).half()
    sums = [attach_accumulator(p)[0] for p in norm.parameters()]
    wide = x.double()
    centred = wide if kind == "rmsnorm" else wide - wide.mean(1, keepdim=True)
    normed = centred * (centred.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    expected = [(100 * factor * wide.sign()).sum(0) for factor in (normed, 1.0)]
    out = norm(x)
    out.backward(torch.full_like(out, 100.0) * x.sign())
    assert out.dtype == torch.float16 and len(sums) == 1 + (kind == "layernorm")
    for p, accumulator, total in zip(norm.parameters(), sums, expected, strict=False):
        assert p.grad is None and accumulator.total.double() == pytest.approx(
            total, rel=1e-4, abs=0.5
        )
    assert expected[0].abs().max() > 65504


def test_every_site_of_a_layer_has_a_mask_of_its_own(monkeypatch):
    seeds = []
    run = elementwise.bias_dropout_add
    monkeypatch.setattr(
        elementwise,
        "bias_dropout_add",
        lambda *arguments: (seeds.append(arguments[4]), run(*arguments))[1],
    )
    config = Config.create(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        seq_length=12,
        micro_batch_size=2,
        attention_backend="unfused",
        hidden_dropout=0.2,
        attention_dropout=0.1,
    )
    layer = TransformerLayer(context(), config, 0)
    layer(randn(12, 2, 32), CallContext(dropout=DropoutKey(1, 2)))
    assert len(seeds) == len(set(seeds)) == 3
