"""Nodes of csrc/nodes have the bits of the general way, and its errors.

The general way is tested in numerics/ and in tests/layers; both run through nodes where they are
built.
"""

import contextlib
import ctypes
import dataclasses
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megatron.config import Config
from megatron.data.sampler import make_micro_batch
from megatron.errors import KernelError
from megatron.kernels import choose, library
from megatron.kernels.ops.elementwise import bias_activation, bias_dropout_add
from megatron.kernels.ops.norm import norm
from megatron.layers.context import CallContext, LayerContext
from megatron.layers.linear import linear
from megatron.layers.transformer import TransformerLayer
from megatron.model.gpt import build_chunks, layer_context
from megatron.parallel.gradient_accumulator import GradientAccumulator
from megatron.parallel.keyed_random import DropoutKey
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Topology
from tests.helpers.processes import run_processes
from tests.layers.test_fusions import settle

SIZES = dict(hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=64)
LLAMA = dict(normalization="rmsnorm", swiglu=True, add_bias_linear=False, num_key_value_heads=2)
ROPE = dict(position_embedding_type="rope", rotary_percent=0.5)
LAYERS = {
    "gpt": {},
    "gpt with dropout": dict(hidden_dropout=0.2),
    "llama": {**LLAMA, **ROPE},
    "query norms": dict(qk_layernorm=True, **ROPE),
    "blocked": dict(attention_backend="blocked"),
    "experts": dict(num_experts=4, moe_router_topk=2, **LLAMA),
}


@pytest.fixture
def built():
    reason = library.find("cpu").no_nodes
    if library.nodes_for(torch.ones(1)) is None:
        pytest.skip(f"nodes are not built: {reason}")


def passes(fields, dtype, sums):
    """Return output, input gradient and parameter gradients of two passes through a layer.

    sums  the format of the parameters' gradient sums; None: autograd keeps the gradients
    """
    config = Config.create(num_layers=1, **SIZES, **fields)
    context = dataclasses.replace(LayerContext.single(), fusions=choose.ALL)
    layer = TransformerLayer(context, config, 0)
    settle(layer, dtype)
    layer.train()
    accumulators = []
    for p in layer.parameters():
        if sums is not None:
            accumulators.append(GradientAccumulator(p, torch.full(p.shape, torch.nan, dtype=sums)))
            p.gradient_accumulator = accumulators[-1]
    results = []
    for seed in (1, 2):
        x = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
        x.requires_grad_()
        y = layer(x, CallContext(dropout=DropoutKey(3, seed)))
        y.backward(torch.cos(y.detach()))
        results += [y.detach(), x.grad]
    gradients = [p.grad for p in layer.parameters()] if sums is None else []
    return [*results, *gradients, *(accumulator.complete() for accumulator in accumulators)]


@pytest.mark.parametrize("sums", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_bits_of_the_general_way(
    name,
    dtype,
    sums,
    built,
    monkeypatch,
):
    with_nodes = passes(LAYERS[name], dtype, sums)
    monkeypatch.setattr(library, "_nodes", None)
    without = passes(LAYERS[name], dtype, sums)
    for a, b in zip(with_nodes, without, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.fixture(params=["nodes", "general way"])
def implementation(request, monkeypatch):
    if request.param == "nodes":
        request.getfixturevalue("built")
    else:
        library.find("cpu")  # or its nodes, loaded within a test, would be undone after it
        monkeypatch.setattr(library, "_nodes", None)


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as of distributed and quantized tensors."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inside = tree_map_only(Wrapped, lambda x: x.inner, (args, kwargs or {}))
        return func(*inside[0], **inside[1])


CALLS = {
    "norm": lambda x, vector, matrix: norm(x, vector, vector, 1e-5),
    "bias_activation": lambda x, vector, matrix: bias_activation(x, vector, "gelu"),
    "bias_dropout_add": lambda x, vector, matrix: bias_dropout_add(x, vector, x, 0.0, 0),
    "linear": lambda x, vector, matrix: linear(
        x, True, LayerContext.single(), None, (matrix,), vector
    ),
}
PARAMETERS = torch.randn(8), torch.randn(8, 8)


@pytest.mark.parametrize("name", CALLS)
def test_parameters_without_memory_of_their_own_are_used(name, implementation):
    x = torch.randn(4, 2, 8)
    results = []
    for parameters in (PARAMETERS, map(Wrapped, PARAMETERS)):
        z = x.clone().requires_grad_()
        y = CALLS[name](z, *parameters)
        results += [y, *torch.autograd.grad(y, z, x)]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


@pytest.mark.parametrize("name", CALLS)
def test_a_derivative_in_forward_mode_is_an_error_not_left_out(name, implementation):
    x = torch.randn(4, 2, 8)
    with forward_ad.dual_level(), pytest.raises((KernelError, NotImplementedError)):
        CALLS[name](forward_ad.make_dual(x.requires_grad_(), torch.ones_like(x)), *PARAMETERS)
    with pytest.raises((KernelError, RuntimeError)):
        torch.func.jvp(lambda z: CALLS[name](z, *PARAMETERS), (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("name", ["norm", "bias_activation", "linear"])
def test_a_parameter_changed_before_the_backward_pass_is_an_error(name, implementation):
    parameters = [torch.nn.Parameter(x.clone()) for x in PARAMETERS]
    y = CALLS[name](torch.randn(4, 2, 8, requires_grad=True), *parameters)
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(2.0)
    with pytest.raises((KernelError, RuntimeError)):
        y.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_a_parameter_frozen_before_the_backward_pass_gets_nothing(name, implementation):
    parameters = [torch.nn.Parameter(x.clone()) for x in PARAMETERS]
    accumulators = [GradientAccumulator(p, torch.zeros(p.shape)) for p in parameters]
    for p, accumulator in zip(parameters, accumulators, strict=True):
        p.gradient_accumulator = accumulator
    y = CALLS[name](torch.randn(4, 2, 8, requires_grad=True), *parameters)
    for p in parameters:
        p.requires_grad_(False)
    y.square().sum().backward()
    assert all(accumulator.fresh for accumulator in accumulators) and all(
        p.grad is None for p in parameters
    )


@pytest.mark.parametrize("name", ["norm", "bias_activation", "linear"])
def test_hooks_on_saved_tensors_are_used_as_by_autograd(name, implementation):
    """Nothing that they hold stays once the graph is freed."""

    class Packed:
        def __init__(self, x):
            self.array = x.numpy().copy()

    def passes(hooks):
        alive = weakref.WeakSet[Any]()

        def pack(x):
            alive.add(packed := Packed(x))
            return packed

        def unpack(packed, pack=pack):
            return torch.from_numpy(packed.array)

        alive.update((pack, unpack))
        parameters = [torch.nn.Parameter(x.clone()) for x in PARAMETERS]
        x = torch.linspace(-1, 1, 64).view(4, 2, 8).requires_grad_()
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, unpack)
            if hooks
            else contextlib.nullcontext()
        ):
            y = CALLS[name](x * 2, *parameters).sum()
        del pack, unpack
        y.backward(retain_graph=True)
        y.backward()
        assert not alive
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()
        return [p.grad for p in (x, *parameters) if p.grad is not None]

    for plain, hooked in zip(passes(False), passes(True), strict=True):
        assert torch.equal(plain, hooked)


def test_tensors_without_data_are_not_for_the_kernels_of_a_gpu(built):
    nodes = library.nodes_for(torch.ones(1))
    handle = library.find("cpu").handle
    addresses = {
        name: ctypes.cast(getattr(handle, name), ctypes.c_void_p).value
        for name in library._CALLED_BY_NODES
    }
    x = torch.empty(4, 8, device="meta", requires_grad=True)
    nodes.bind("cuda", addresses)
    try:
        assert bias_activation(x, None, "gelu").shape == x.shape
    finally:
        nodes.bind("cuda", {})


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("seen", ["forward", "backward", "both"])
@pytest.mark.parametrize("position", ["pre", "post"])
def test_a_recomputed_layer_repeats_what_gradients_need(seen, position):
    """A mode that sees operators runs in one pass only, or in both.

    Per layer 4 products forward and 8 backward; recomputed are those before the last that a
    gradient needs: 3, or all where a norm follows.
    """
    config = Config.create(
        num_layers=2,
        **SIZES,
        norm_position=position,
        attention_backend="fused",
        attention_dropout=0.0,
        recompute_granularity="full",
    )
    topology = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
    context = dataclasses.replace(layer_context(config, topology), fusions=choose.ALL)
    chunk = build_chunks(config, topology, context)["0"].train()
    batch = make_micro_batch(np.arange(66).reshape(2, 33) % 64, first_sample=0)

    def passes(forward, backward):
        chunk.zero_grad()
        with forward or contextlib.nullcontext():
            loss = chunk(batch, None)
        with backward or contextlib.nullcontext():
            loss.backward()
        return [p.grad for p in chunk.parameters()]

    first = _Products()
    second = _Products()
    gradients = passes(first if seen != "backward" else None, second if seen != "forward" else None)
    for one, other in zip(gradients, passes(None, None), strict=True):
        assert torch.equal(one, other)
    of_loss = 3  # its logits again, and their two gradients
    if seen != "forward":
        assert second.count == 2 * (8 + (3 if position == "pre" else 4)) + of_loss


def leave_messages(rank):
    """End a group of gloo whose threads have yet to free tensors of Python."""
    torch.distributed.init_process_group("gloo")
    library.find("cpu")
    nodes = library.nodes_for(torch.ones(1))
    group = torch.distributed.group.WORLD.group_name
    region = nodes.region(group, 2, None, None, False, False, None)
    for _ in range(64):
        torch.distributed.all_reduce(torch.ones(1 << 16), async_op=True)
    torch.distributed.destroy_process_group()
    del region


def test_the_last_reference_to_a_group_with_messages_may_be_a_node_s(built):
    run_processes(2, leave_messages)
