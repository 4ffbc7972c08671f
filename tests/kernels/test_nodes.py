"""Nodes of csrc/nodes have the bits of the general way, and its errors.

The general way is tested in numerics/ and in tests/layers; both run through nodes where they are
built.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.config import Config
from megatron.errors import KernelError
from megatron.kernels import choose, library
from megatron.kernels.ops.elementwise import bias_activation
from megatron.layers.context import CallContext, LayerContext
from megatron.layers.transformer import TransformerLayer
from megatron.parallel.sharding import DropoutKey, GradientSink
from tests.layers.test_fusions import settle

LLAMA: dict[str, Any] = dict(
    normalization="rmsnorm", swiglu=True, add_bias_linear=False, num_key_value_heads=2
)
ROPE: dict[str, Any] = dict(position_embedding_type="rope", rotary_percent=0.5)
LAYERS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt with dropout": dict(hidden_dropout=0.2),
    "llama": {**LLAMA, **ROPE},
    "query norms": dict(qk_layernorm=True, **ROPE),
    "blocked": dict(attention_backend="blocked"),
    "experts": dict(num_experts=4, moe_router_topk=2, **LLAMA),
}


@pytest.fixture
def built() -> None:
    reason = library.find("cpu").no_nodes
    if library.nodes_for(torch.ones(1)) is None:
        pytest.skip(f"nodes are not built: {reason}")


def passes(fields: dict[str, Any], dtype: torch.dtype, sums: torch.dtype | None) -> list[Any]:
    """Return output, input gradient and parameter gradients of two passes through a layer.

    sums  the format of the parameters' gradient sums; None: autograd keeps the gradients
    """
    config = Config.create(
        num_layers=1, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=64, **fields
    )
    context = dataclasses.replace(LayerContext.single(), fusions=choose.ALL)
    layer = TransformerLayer(context, config, 0)
    settle(layer, dtype)
    layer.train()
    sinks = list[GradientSink]()
    for p in layer.parameters():
        if sums is not None:
            sinks.append(GradientSink(p, torch.full(p.shape, torch.nan, dtype=sums)))
            p.gradient_sink = sinks[-1]  # type: ignore[attr-defined]
    results = list[Any]()
    for seed in (1, 2):
        x = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
        x.requires_grad_()
        y = layer(x, CallContext(dropout=DropoutKey(3, seed)))
        y.backward(torch.cos(y.detach()))
        results += [y.detach(), x.grad]
    gradients = [p.grad for p in layer.parameters()] if sums is None else []
    return [*results, *gradients, *(sink.complete() for sink in sinks)]


@pytest.mark.parametrize("sums", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_bits_of_the_general_way(
    name: str,
    dtype: torch.dtype,
    sums: torch.dtype | None,
    built: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_nodes = passes(LAYERS[name], dtype, sums)
    monkeypatch.setattr(library, "_nodes", None)
    without = passes(LAYERS[name], dtype, sums)
    for a, b in zip(with_nodes, without, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


def test_errors_are_those_of_the_general_way(built: None) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    y = bias_activation(x, None, "gelu")
    with pytest.raises(KernelError, match="second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        z = bias_activation(x, None, "gelu").sum()
        z.backward()
        z.backward()
    for wrong in (x.double(), torch.ones(4, 9)):
        with pytest.raises(KernelError):
            bias_activation(wrong, None, "swiglu")
