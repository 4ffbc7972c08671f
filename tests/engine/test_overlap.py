"""Gradient buckets, and weights that are awaited before use. Under the engine: test_engine.py."""

import math

import pytest
import torch

from megatron.engine import gradients as engine_gradients
from megatron.engine.buckets import BucketRule
from megatron.engine.gradients import (
    Bucket,
    WeightGather,
)
from megatron.engine.optimizer import parameter_groups, unique_parameters
from megatron.parallel.sharding import Sharding, sharding_of
from megatron.parallel.topology import Group, ShardGroups, Topology
from tests.helpers.training import BASE

# -- gathering -------------------------------------------------------------------------------------


class Late:
    """Gather whose weights are absent until it is awaited."""

    def __init__(self, bucket):
        self._bucket = bucket
        self._values = bucket.weights.clone()
        bucket.weights.fill_(float("nan"))

    def wait(self):
        self._bucket.weights.copy_(self._values)


def shared_by_two(rank):
    line = Group((0, 1), rank)
    alone = Group((rank,), 0)
    return ShardGroups(line, alone, line, alone)


def buckets_of(parameters):
    """Make one bucket for each parameter, which becomes a view of it."""
    buckets = []
    for p in parameters:
        flat = torch.cat([p.detach().view(-1), torch.zeros(p.numel() % 2)])
        p.data = flat[: p.numel()].view(p.shape)
        buckets.append(Bucket([p], torch.zeros_like(flat), flat, shared_by_two(0)))
    return buckets


@pytest.mark.parametrize(
    "fields", [{}, {"untie_embeddings_and_output_weights": True, "swiglu": True}]
)
def test_gpt_waits_for_each_weight_before_it_is_used(fields, monkeypatch):
    """Every weight is NaN until it is awaited; loss and logits must use the real weights."""
    from megatron.config import Config
    from megatron.model.gpt import build_chunks
    from tests.helpers.training import batches

    config = Config.create(**{**BASE, **fields, "num_layers": 2, "world_size": 1})
    (chunk,) = build_chunks(config, Topology.create(), None).values()
    chunk.eval()
    batch = batches(config, 0)[0]
    parameters = unique_parameters(chunk)
    with torch.no_grad():
        loss = chunk(batch, None)
        logits = chunk.logits(batch, None)
        monkeypatch.setattr(engine_gradients, "transfer", lambda bucket, op: iter([[Late(bucket)]]))
        gather = WeightGather(buckets_of(parameters), [chunk], overlap=True)
        gather.start()
        assert all(p.isnan().any() for p in parameters), "nothing is waited for before it is needed"
        chunk.word_embeddings(batch.tokens)
        assert chunk.layers[0].mlp is not None and any(
            p.isnan().any() for p in chunk.layers[0].parameters()
        )
        assert torch.equal(chunk(batch, None), loss)
        gather.start()
        assert torch.equal(chunk.logits(batch, None), logits)
        assert not any(p.isnan().any() for p in parameters)
        gather.start()
        gather.wait()
        assert not any(p.isnan().any() for p in parameters)


@pytest.mark.parametrize("of_model", [True, False])
def test_a_state_dict_waits(of_model, monkeypatch):
    """A state dict of the model, or of a module within it, waits for the gathered weights.

    It must not hold the weights of the step before.
    """
    monkeypatch.setattr(engine_gradients, "transfer", lambda bucket, op: iter([[Late(bucket)]]))
    chunks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(3, 2))])
    gather = WeightGather(buckets_of(list(chunks.parameters())), chunks, overlap=True)
    gather.start()
    assert all(p.isnan().any() for p in chunks.parameters())
    state = (chunks if of_model else chunks[0][0]).state_dict()
    assert state and not any(value.isnan().any() for value in state.values())


# -- buckets ---------------------------------------------------------------------------------------


def parameter(name, *shape, decay=True, tied=False):
    p = torch.nn.Parameter(torch.zeros(shape))
    p.sharding = Sharding(name, shape, shape, (0,) * len(shape), shape, decay=decay, tied=tied)
    return p


def members(parameters, plans):
    return [[parameters[number] for number in plan.members] for plan in plans]


def test_groups_are_cut_in_the_order_of_the_backward_pass():
    ps = [parameter("e", 100, tied=True), parameter("n", 3, decay=False)]
    ps += [parameter(f"w{i}", size) for i, size in enumerate((4, 4, 30, 4, 5))]

    def names(elements):
        plans = BucketRule(elements).plan(list(map(sharding_of, ps)))
        groups = parameter_groups(members(ps, plans), 0.1, plans)
        assert [g["weight_decay"] for g in groups] == [0.1] * (len(groups) - 1) + [0.0]
        return [[p.sharding.name for p in g["params"]] for g in groups]

    assert names(math.inf) == [["w4", "w3", "w2", "w1", "w0"], ["e"], ["n"]]
    assert names(9) == [["w4", "w3"], ["w2"], ["w1", "w0"], ["e"], ["n"]]
    assert names(1) == [["w4"], ["w3"], ["w2"], ["w1"], ["w0"], ["e"], ["n"]]
