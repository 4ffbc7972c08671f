"""The types of messages, checked by spmd_types (Meta, BSD) through whole forward passes.

Over a group of ranks a tensor is I (the same on all, with its whole gradient on each), R (the same,
with gradients that are terms of a sum), V (different) or P (a term of a sum). spmd_types refuses an
operator that would have a wrong gradient, such as a product of an I and a V. It gets the types of
our autograd functions from here; tests/parity compares their values and gradients.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron.engine.gradients import Terms
from megatron.kernels.ops import experts as products
from megatron.layers import (
    attention_blocked,
    attention_fused,
    context_parallel,
    expert_region,
    expert_router,
    linear,
    norm,
    ring,
    vocabulary,
)
from megatron.model.gpt import build_chunks
from megatron.parallel import collectives
from megatron.parallel.layout import LayoutSizes
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology
from tests.helpers.training import batches, configured
from tests.parity.cases import BIASED, FAMILIES, ULYSSES, layout

spmd = pytest.importorskip("spmd_types")

LOCAL = (
    attention_blocked._Attention,
    attention_fused._Ranges,
    expert_router.Scores,
    products._GroupedProduct,
    # of the context group: every rank sends other rows to each, and gets other rows
    context_parallel._AllToAll,
    ring._Ring,
)


def entered(x, context):
    """Return the type of x within a tensor-parallel region."""
    group = context.tensor
    rules = spmd.rules
    if group.size == 1:
        return x
    if context.sequence_parallel:
        return rules.all_gather(x, group.handle, src=spmd.S(0), dst=spmd.R)
    return rules.convert(x, group.handle, src=spmd.I, dst=spmd.R)


def left(x, context):
    """Return the type of the sum of the ranks' terms x, outside of the region."""
    group = context.tensor
    rules = spmd.rules
    if group.size == 1:
        return x
    x = rules.reinterpret(x, group.handle, src=spmd.V, dst=spmd.P)
    if context.sequence_parallel:
        return rules.reduce_scatter(x, group.handle, src=spmd.P, dst=spmd.S(0))
    return rules.all_reduce(x, group.handle, src=spmd.P, dst=spmd.I)


def linear_type(*, x, column, context, bias, weights):
    x = entered(x, context) if column else x
    y = spmd.rules.einsum(f"sbi,{'_' * (weights[0].ndim - 2)}oi->sbo", x, *weights)
    if bias is not None:  # whose type is that of a factor: not a sum's term
        y = spmd.rules.einsum("sbo,o->sbo", y, bias)
    return y if column else left(y, context)


def loss_type(*, x, weight, labels, mask, count, v):
    logits = spmd.rules.einsum("sbi,vi->sbv", entered(x, v.context), weight)
    spmd.rules.ignore(*(t for t in (labels, mask, count) if t is not None))
    unsharded = SimpleNamespace(tensor=v.context.tensor, sequence_parallel=False)
    return spmd.rules.einsum("___->", left(logits, unsharded))


def with_loss_type(*, x, loss):
    """Return the type of x. Each rank adds the whole gradient of the loss, which must be I."""
    spmd.assert_type(loss, dict.fromkeys(spmd.get_local_type(loss), spmd.I))
    return spmd.rules.einsum("...->...", x)


TYPES = {
    collectives._SumOverRanks: lambda *, x, group, sequence_parallel: left(
        x, SimpleNamespace(tensor=group, sequence_parallel=sequence_parallel)
    ),
    expert_region._Enter: lambda *, x, region: entered(x, region),
    expert_region._Choices: lambda *, weights, region: spmd.rules.convert(
        weights, region.tensor.handle, src=spmd.I, dst=spmd.R
    ),
    expert_router._Gather: lambda *, scores, group: spmd.rules.all_gather(
        scores, group.handle, src=spmd.S(0), dst=spmd.I
    ),
    expert_router._WithLoss: with_loss_type,
    linear._Linear: linear_type,
    norm._NormOverRanks: lambda *, x, weight, bias: spmd.rules.einsum("sbh,h->sbh", x, weight),
    vocabulary._Loss: loss_type,
}


@pytest.fixture
def typed(monkeypatch):
    for function, rule in TYPES.items():
        monkeypatch.setattr(function, "spmd_typecheck", staticmethod(rule), raising=False)
    for function in LOCAL:
        spmd.register_local_autograd_function(function)


def cut_by(axis):
    """Return ContextParallel.cut with the type of its result, which differs between the ranks."""
    cut = context_parallel.ContextParallel.cut

    def typed_cut(self, x):
        shard = cut(self, x).clone()
        if spmd.has_local_type(shard):
            return spmd.mutate_type(shard, axis, src=spmd.R, dst=spmd.V)
        return shard

    return typed_cut


CONTEXT = dict(cp=2)
EXCHANGE = dict(cp=2, **ULYSSES)
MIXED = {**BIASED, "moe_layer_freq": (0, 1), "moe_z_loss_coeff": 0.1}


@pytest.mark.parametrize(
    "shape",
    [
        dict(FAMILIES["qwen3"]),
        dict(FAMILIES["qwen3"], sp=True, **EXCHANGE),
        dict(FAMILIES["olmo2"], sp=True),
        dict(FAMILIES["neox"], **CONTEXT),
        dict(MIXED),
        dict(MIXED, sp=True),
        dict(MIXED, **CONTEXT),
        dict(MIXED, sp=True, **EXCHANGE),
    ],
    ids=["qwen3", "qwen3-sp-a2a", "olmo2-sp", "neox-cp", "moe", "moe-sp", "moe-cp", "moe-sp-a2a"],
)
def test_gradients_are_right_by_type(shape, typed, monkeypatch):
    from spmd_types._testing import fake_pg
    from spmd_types.checker import typecheck

    _, world_size, fields = layout(tp=2, num_layers=2, **shape)
    config = configured(fields, world_size)
    with fake_pg(world_size):
        topology = Topology.create(sizes=LayoutSizes(2, context_parallel_size=world_size // 2))
        (plain,), (chunk,) = (build_chunks(config, topology).values() for _ in range(2))
        batch = batches(config, 0)[0]
        terms = Terms([plain], config.parallel.sequence_parallel)
        plain.train()(batch, None)
        chunk.train()
        tp = topology.tensor.handle
        cp = topology.context.handle
        axes = [axis for axis in (tp, cp) if axis is not None]
        monkeypatch.setattr(context_parallel.ContextParallel, "cut", cut_by(cp))
        with spmd.set_current_mesh(axes), typecheck():

            def declare(x, of_tensor):
                spmd.assert_type(x, {axis: of_tensor if axis is tp else spmd.R for axis in axes})

            for one, p in zip(plain.parameters(), chunk.parameters(), strict=True):
                divided = sharding_of(p).dim is not None
                declare(p, spmd.V if divided else spmd.R if terms.partial(one, True) else spmd.I)
            namespaces = [*map(vars, chunk.modules()), vars(batch)]
            for x in (
                x for some in namespaces for x in some.values() if isinstance(x, torch.Tensor)
            ):
                declare(x, spmd.I)
            assert spmd.get_local_type(chunk(batch, None))[spmd.MeshAxis.of(tp)] is spmd.I
