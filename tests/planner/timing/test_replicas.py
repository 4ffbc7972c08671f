"""What replicas exchange: the engine's own buckets, and what passes hide of them."""
from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.engine.bucket_size import bucket_elements
from megatron.engine.optimizer import parameter_groups, unique_parameters
from megatron.model.gpt import build_chunks
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Layout, Topology
from megatron.pipeline.clock import StageTimes, run_pipeline
from megatron.planner.cluster import load_cluster
from megatron.planner.stage import stages_of, tied_elements
from megatron.planner.timing.replicas import (
    buckets_of_rank,
    exchange,
    owned_partial_elements,
    weights_of_rank,
)
from megatron.planner.trace import trace
from tests.planner.timing.configs import run

FRONTIER = load_cluster("frontier")
LAYOUTS = [
    dict(), dict(untie_embeddings_and_output_weights=True, add_bias_linear=False, normalization="rmsnorm"),
    dict(pipeline_model_parallel_size=2, pipeline_layout="5,3", swiglu=True, num_key_value_heads=4),
    dict(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2, tensor_model_parallel_size=2,
         sequence_parallel=True),
    dict(pipeline_model_parallel_size=4, untie_embeddings_and_output_weights=True, position_embedding_type="rope"),
]  # fmt: skip


def built(config, rank):
    """The real modules of a pipeline rank, on the first tensor rank."""
    parallel = config.parallel
    layout = Layout(tensor=parallel.tensor_model_parallel_size, pipeline=parallel.pipeline_model_parallel_size)
    where = rank * parallel.tensor_model_parallel_size
    return build_chunks(config, Topology.from_layout(layout, where, device=torch.device("cpu")))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_buckets_are_those_of_the_engine(layout):
    config = run(**layout)
    size, stages, traced = config.parallel.pipeline_model_parallel_size, stages_of(config), of(config)
    for rank in range(size):
        parameters, own = unique_parameters(built(config, rank)), stages[rank::size]
        weights = weights_of_rank(traced, own)
        assert [(w.elements, w.decays, w.tied) for w in weights] == [
            (p.numel(), sharding_of(p).decay, sharding_of(p).tied) for p in parameters
        ]
        place = {p: i for i, p in enumerate(parameters)}
        for limit in (bucket_elements(0, 4), 300_000, 10_000):
            groups = [group["params"] for group in parameter_groups(parameters, 0.1, limit)]
            # As Engine._connect orders them.
            groups.sort(key=lambda group: -min(place[p] for p in group))
            found = buckets_of_rank(traced, own, limit)
            assert [bucket.elements for bucket in found] == [sum(p.numel() for p in group) for group in groups]


def of(config):
    return trace(config, "cuda")


class Links:
    """Channels on which a message takes as many seconds as it has bytes, times a rate."""

    def __init__(self, per_byte: float) -> None:
        self.per_byte = per_byte

    def data_s(self, kind: str, n_bytes: float) -> float:
        return n_bytes * self.per_byte * (2 if kind == "all_reduce" else 1)


def passes(config, forward=1.0):
    size = config.parallel.pipeline_model_parallel_size
    return run_pipeline(
        config.parallel.schedule, size, config.parallel.num_chunks, config.num_micro_batches(),
        StageTimes((forward,) * config.parallel.num_stages, (2 * forward,) * config.parallel.num_stages),
    )  # fmt: skip


@given(st.floats(0.01, 100.0))
def test_one_bucket_for_each_layer_in_closed_form(seconds):
    """Four layers alike, whose gradients are there after each quarter of the last pass of two seconds. Links that are
    slower than that are busy from the end of the first quarter on; fast ones leave the last message to the end."""
    config = run(
        world_size=2, global_batch_size=4, zero_reduce_bucket_size=256 * 1024, add_bias_linear=False, num_layers=4,
        vocab_size=1, make_vocab_size_divisible_by=1, position_embedding_type="none", normalization="rmsnorm",
        num_key_value_heads=8,
    )  # fmt: skip
    elements = [bucket.elements for bucket in buckets_of_rank(of(config), stages_of(config), 256 * 1024)]
    total = sum(elements)
    links, clock = Links(seconds / (4 * total)), passes(config)
    found = exchange(config, of(config), links, clock, (1.0,), hides=True)
    assert found.sent == pytest.approx(1.5 * seconds)
    # The last message to leave begins when the last gradient is there or when the one before has gone.
    last = elements[-1] / total * seconds
    assert last - 1e-9 <= found.reduced <= seconds
    if seconds > 10:  # the links are always busy from the first bucket on, which is complete after a layer
        assert found.reduced == pytest.approx(seconds - 2.0 * (1 - 1 / 4), rel=1e-6)
    off = dataclasses.replace(config, engine=dataclasses.replace(config.engine, overlap_grad_reduce=False))
    assert exchange(off, of(off), links, clock, (1.0,), hides=True).reduced == pytest.approx(seconds)
    assert exchange(config, of(config), links, clock, (1.0,), hides=False).reduced == pytest.approx(seconds)


def test_new_weights_are_waited_for_by_the_layers_that_need_them():
    """The last stage begins p - 1 passes later, and so much of its gather is hidden anyway."""
    config = run(
        world_size=8, pipeline_model_parallel_size=4, global_batch_size=16, overlap_param_gather=False,
        untie_embeddings_and_output_weights=True, zero_reduce_bucket_size=100_000,
    )  # fmt: skip
    stages = stages_of(config)
    elements = [sum(b.elements for b in buckets_of_rank(of(config), (stage,), 4_000_000)) for stage in stages]
    links, clock = Links(1e-6), passes(config)
    found = exchange(config, of(config), links, clock, (1.0,) * 4, hides=True)
    assert found.gathered == pytest.approx(max(2e-6 * n - i for i, n in enumerate(elements)))
    late = dataclasses.replace(config, engine=dataclasses.replace(config.engine, overlap_param_gather=True))
    overlapped = exchange(late, of(late), links, clock, (1.0,) * 4, hides=True)
    assert 0 < overlapped.gathered < found.gathered


def test_stage_0_sums_everywhere_and_gathers_nothing():
    config = run(world_size=4, global_batch_size=8)
    zero = run(world_size=4, global_batch_size=8, zero_stage=0)
    links = Links(1e-9)
    one, all_of_it = (exchange(c, of(c), links, passes(c), (1.0,), hides=False) for c in (config, zero))
    assert all_of_it.reduced == pytest.approx(2 * one.reduced) and all_of_it.gathered == 0
    assert one.gathered == pytest.approx(0.5 * one.reduced)
    alone = run(global_batch_size=8)
    assert exchange(alone, of(alone), links, passes(alone), (1.0,), hides=True).sent == 0


def test_sums_over_ends_and_tensor_ranks():
    tied = run(pipeline_model_parallel_size=2, tensor_model_parallel_size=2, world_size=8, global_batch_size=8)
    assert tied_elements(tied, of(tied)) == 256 * tied.model.padded_vocab_size(2) / 2 / 2
    assert tied_elements(run(), of(run())) == 0 == owned_partial_elements(tied, of(tied))
    sequence = run(tensor_model_parallel_size=2, sequence_parallel=True)
    partial = [p for p in built(sequence, 0).parameters() if sharding_of(p).dim is None]
    assert owned_partial_elements(sequence, of(sequence)) == sum(p.numel() for p in partial)
