"""Layers with and without the fused kernels: equal to rounding; kernels run exactly where chosen.

Both ways compute in fp32 inside. In fp32 they differ by the order of a few operations: some units
in the last place of the largest number, 2^-23 each, so 1e-5 relative to it leaves room for sums of
64 and more. In bf16 a kernel rounds once where torch rounds after each operation: two or three
half-units of 2^-8 each, 2e-2 relative to the largest number.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from megatron.config import Config
from megatron.kernels.choose import ALL, Fusions
from megatron.kernels.ops import elementwise
from megatron.kernels.ops.elementwise import keyed_dropout
from megatron.layers.context import CallContext, normal
from megatron.layers.positions import RotaryEmbedding
from megatron.layers.transformer import MLP, Norm, TransformerLayer, bias_dropout_add
from megatron.parallel.gradient_accumulator import GradientAccumulator
from megatron.parallel.keyed_random import DropoutKey
from tests.helpers.fusions import Operators, context

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16]
NONE = Fusions()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def settle(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Set weights that are neither 0 nor 1, in the dtype and equal for equal modules."""
    for i, p in enumerate(module.parameters()):
        p.data = (p.data + 0.3 * randn(*p.shape, seed=i)).to(dtype)


def results(function, tensors) -> tuple[list[torch.Tensor], Operators]:
    """Return outputs, gradients of leaf tensors, and the operators of ours that ran."""
    with Operators() as seen:
        outs = function(*tensors)
        outs = outs if isinstance(outs, tuple) else (outs,)
        total = sum((out.float() * randn(*out.shape, seed=9)).sum() for out in outs)
        gradients = torch.autograd.grad(total, tensors)
    return [*(out.detach() for out in outs), *gradients], seen


def check_close(found, expected, dtype) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        largest = b.float().abs().max().item()
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=TOLERANCE[dtype] * largest)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_residual_stream_in_fp32_stays_with_torch(kind):
    norm = Norm(context(), "n", 64, kind, 1e-5)
    settle(norm, torch.bfloat16)
    with Operators() as seen:
        assert norm(randn(5, 64)).dtype == torch.bfloat16
        assert not norm.fuses(randn(5, 64).bfloat16(), randn(5, 64))
    assert not seen.calls


@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm_through_apex(monkeypatch, kind, one_plus):
    """Norms may use apex.

    Stand-ins have apex's names and arguments; for mixed types torch computes.
    """
    calls = []

    def layer(x, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
        calls.append("layernorm")
        return F.layer_norm(x, normalized_shape, weight, bias, eps)

    def rms(x, weight, normalized_shape, eps=1e-6, memory_efficient=False):
        calls.append("rmsnorm")
        return F.rms_norm(x, normalized_shape, weight, eps)

    module = types.ModuleType("apex.normalization.fused_layer_norm")
    module.fused_layer_norm_affine, module.fused_rms_norm_affine = layer, rms
    for name in ("apex", "apex.normalization"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    x, out = randn(5, 64), []
    for fusions in (Fusions(apex_norm=True), NONE):
        norm = Norm(context(fusions), "n", 64, kind, 1e-3, one_plus)
        settle(norm, torch.float32)
        out.append(norm(x))
    assert calls == [kind] and torch.equal(*out)
    mixed = Norm(context(Fusions(apex_norm=True)), "n", 64, kind, 1e-3, one_plus).bfloat16()
    mixed(x)
    assert calls == [kind]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "bias"),
    [
        ("gelu", True),
        ("openai_gelu", True),
        ("swiglu", False),
        ("swiglu", True),
        ("squared_relu", False),
    ],
)
def test_mlp(activation, bias, dtype):
    flags = {} if activation == "gelu" else {activation: True}
    config = Config.create(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        seq_length=8,
        ffn_hidden_size=56,
        add_bias_linear=bias,
        **flags,
    )
    assert config.model.activation == activation
    out = []
    for fusions in (ALL, NONE):
        mlp = MLP(context(fusions), "m", config.model, normal(0.3), normal(0.3))
        settle(mlp, dtype)
        x = randn(8, 2, 32).to(dtype).requires_grad_()
        used = [p for name, p in mlp.named_parameters() if name != "dense_4h_to_h.bias"]
        found, seen = results(lambda x, *_, mlp=mlp: mlp(x)[0], [x, *used])
        assert bool(seen.calls) == fusions.bias_activation
        out.append(found)
    check_close(*out, dtype)


def kept(shape, p, seed) -> torch.Tensor:
    """Return 1 where the kernel's mask keeps."""
    return (elementwise.bias_dropout_add(torch.ones(shape), None, None, p, seed) != 0).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("bias", [True, False])
def test_bias_dropout_add(bias, p, dtype):
    shape = (6, 2, 48)
    tensors = [randn(*shape, seed=1), randn(*shape, seed=2), *([randn(48, seed=3)] if bias else [])]
    tensors = [t.to(dtype).requires_grad_() for t in tensors]

    def fused(x, residual, bias=None):
        return bias_dropout_add(x, bias, residual, p, 11, fused=True)

    def formula(x, residual, bias=None):
        return (residual.float() + (x.float() + (0 if bias is None else bias.float())) * scaled).to(
            dtype
        )

    scaled = kept(shape, p, 11) / (1 - p)
    found, seen = results(fused, tensors)
    check_close(found, results(formula, tensors)[0], dtype)
    # A plain sum needs no kernel.
    assert bool(seen.calls) == (bias or p > 0)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", "bias"])
def test_sums_over_tokens_do_not_overflow_in_fp16(kind, fused):
    """Sums over tokens do not overflow in fp16.

    Each value is finite in fp16, and so is the sum over any part of a sequence on a rank, in fp32.
    """
    x, bias, norm = randn(6000, 16, seed=1).half(), torch.nn.Parameter(torch.zeros(16)), None
    if kind == "bias":
        layer = torch.nn.ParameterList([bias])
    else:
        layer = norm = Norm(context(ALL if fused else NONE), "n", 16, kind, 1e-5)
    layer.half()
    for p in layer.parameters():
        p.gradient_accumulator = GradientAccumulator(p, torch.full(p.shape, torch.nan))
    if norm is None:
        out = bias_dropout_add(x, bias, torch.zeros_like(x), 0.25, 11, fused)
        expected = [(out != 0).double().sum(0) * 100 / 0.75]
    else:
        out = norm(x)
        wide = x.double()
        centred = wide if kind == "rmsnorm" else wide - wide.mean(1, keepdim=True)
        expected = [
            (
                100
                * centred
                * (centred.square().mean(1, keepdim=True) + 1e-5).rsqrt()
                * wide.sign()
            ).sum(0)
        ]
        expected += [(100 * wide.sign()).sum(0)] if norm.bias is not None else []
    gradient = torch.full_like(out, 100.0) * (x.sign() if norm is not None else 1.0)
    out.backward(gradient)
    assert out.dtype == torch.float16
    for p, total in zip(layer.parameters(), expected, strict=True):
        assert p.grad is None and p.gradient_accumulator.total.double() == pytest.approx(
            total, rel=1e-4, abs=0.5
        )
    assert expected[0].abs().max() > 65504


def test_dropout_without_residual():
    x = randn(6, 2, 48)
    with Operators() as seen:
        found = keyed_dropout(x, 0.25, 3, fused=True)
    assert dict(seen.calls) == {"bias_dropout_add": 1}
    torch.testing.assert_close(found, x * kept(x.shape, 0.25, 3) / 0.75)
    with Operators() as seen:
        assert (
            keyed_dropout(x, 0.25, None, fused=True) is x
            and keyed_dropout(x, 0.0, 3, fused=True) is x
        )
        assert not keyed_dropout(x, 1.0, 3, fused=True).any()
        torch.testing.assert_close(bias_dropout_add(x, None, x, 1.0, 3, fused=True), x)
        # Half-precision output beside a residual stream in fp32.
        assert bias_dropout_add(x.bfloat16(), None, x, 0.25, 3, fused=True).dtype == torch.float32
    assert not seen.calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", ["plain", "restarted"])
@pytest.mark.parametrize(("dimension", "queries"), [(16, 1), (6, 3)])
def test_rotary(dimension, queries, positions, dtype):
    s, b, groups, d = 7, 2, 4, 16
    ids = (
        None
        if positions == "plain"
        else torch.stack((torch.arange(s), torch.tensor([0, 1, 2, 0, 1, 0, 1])))
    )
    out = []
    for fused in (True, False):
        rotary = RotaryEmbedding(dimension, 100.0, fused)
        angles = rotary.angles(s, ids, torch.device("cpu"))
        mixed = randn(s, b, groups, queries + 2, d).to(dtype).requires_grad_()

        def turn(mixed, rotary=rotary, angles=angles):
            q, k, v = mixed.split((queries, 1, 1), dim=3)
            return rotary.rotate_groups(q, angles), rotary.rotate(k.squeeze(3), angles), v

        found, seen = results(turn, [mixed])
        assert found[0].shape == (s, b, groups * queries, d) and bool(seen.calls) == fused
        out.append(found)
    check_close(*out, dtype)


LAYER = dict(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    seq_length=12,
    micro_batch_size=2,
    global_batch_size=2,
    position_embedding_type="rope",
    attention_backend="unfused",
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


def layer_results(fusions, dtype, key=None, rounded=None, **fields):
    """Return the results of one layer in `dtype`.

    `rounded`: weights and input have passed through this dtype.
    """
    config = Config.create(**{**LAYER, **fields})
    layer = TransformerLayer(context(fusions), config, 0)
    settle(layer, rounded or dtype)
    layer.to(dtype)
    x = randn(12, 2, 32).to(rounded or dtype).to(dtype).requires_grad_()
    return results(lambda x, *_: layer(x, CallContext(dropout=key)), [x, *layer.parameters()])


SHAPES = pytest.mark.parametrize(
    "fields",
    [
        dict(normalization="layernorm"),
        dict(normalization="rmsnorm", swiglu=True, add_bias_linear=False),
        dict(add_bias_linear=False, apply_residual_connection_post_layernorm=True),
        dict(add_bias_linear=False, apply_layernorm_1p=True),
    ],
    ids=["gpt", "llama", "post-norm", "1p"],
)


@pytest.mark.slow
@SHAPES
def test_whole_layer(fields):
    (found, seen), (expected, unseen) = (
        layer_results(f, torch.float32, **fields) for f in (ALL, NONE)
    )
    check_close(found, expected, torch.float32)
    assert seen.calls["softmax"] == 1 and not unseen.calls
    norm = "rms_norm" if fields.get("normalization") == "rmsnorm" else "layer_norm"
    for name in ("masked_softmax", "bias_activation", norm, "rotary"):  # each of them counts
        fewer = layer_results(Fusions(**{name: True}), torch.float32, **fields)[1].calls
        assert fewer and fewer.total() < seen.calls.total()


@pytest.mark.slow
@SHAPES
def test_kernels_round_no_more_than_torch(fields):
    """Kernels round no more than torch.

    bf16 is compared with the same layer in fp32: a kernel has one rounding where torch has several,
    so torch's error is the bound.

    Both errors are sums of some dozen roundings with independent signs, so that the smaller one may
    by chance come out larger in one tensor. Half as much again is enough for tensors of 32 numbers
    and more.
    """
    exact, found, torchs = (
        layer_results(fusions, dtype, rounded=torch.bfloat16, **fields)[0]
        for fusions, dtype in ((NONE, torch.float32), (ALL, torch.bfloat16), (NONE, torch.bfloat16))
    )
    for a, b, c in zip(found, torchs, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.float() - c).norm() < 1.5 * (b.float() - c).norm() + 2**-9 * c.norm()


def test_every_site_of_a_layer_has_a_mask_of_its_own(monkeypatch):
    seeds, run = [], elementwise.bias_dropout_add
    monkeypatch.setattr(
        elementwise, "bias_dropout_add", lambda *given: (seeds.append(given[4]), run(*given))[1]
    )
    layer_results(ALL, torch.float32, DropoutKey(1, 2), hidden_dropout=0.2, attention_dropout=0.1)
    assert len(seeds) == len(set(seeds)) == 3
