"""Memory and work of a step, against closed forms, schedules' bounds and real parameters."""

from __future__ import annotations

import pytest

from megatron.config import Config
from megatron.pipeline.schedule import build_schedule, moments_of_rank
from megatron.planner.events import Alloc, Pass
from megatron.planner.memory import (
    ChunkMemory,
    chunk_memory,
    memory_of_ranks,
    parameters_of_rank,
    state_bytes,
)
from megatron.planner.stage import elements_of_rank, stages_of
from megatron.planner.trace import trace
from tools.show_schedule import peak_activations

SMALL = dict(
    num_layers=16,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=32,
    vocab_size=1000,
    bf16=True,
    make_vocab_size_divisible_by=8,
)


def small(tp: int = 1, pp: int = 1, dp: int = 1, m: int = 8, **more: object) -> Config:
    sizes = dict(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, world_size=tp * pp * dp
    )
    return Config.create(**{**SMALL, **sizes, "global_batch_size": dp * m, **more})


@pytest.mark.parametrize("m", [1, 3, 10, 40])
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1)]
)
def test_as_many_micro_batches_as_the_schedule_holds(schedule, chunks, m):
    """The number of micro-batches held equals the schedule's own count.

    That counts pairs (micro-batch, chunk) until their weight gradients are computed.
    """
    counted = peak_activations(build_schedule(schedule, 4, chunks, m))
    for rank in range(4):
        moments = moments_of_rank(schedule, 4, chunks, m, rank)
        assert (moments.held.sum(axis=1) + moments.waiting).max() + 1 == counted[rank]


@pytest.mark.parametrize(("p", "v", "m"), [(4, 1, 8), (4, 4, 16), (8, 2, 16)])
def test_the_first_rank_in_closed_form(p, v, m):
    """The first rank has a closed form: 1F1B holds p micro-batches.

    Interleaved holds 2 (p - 1) + (v - 1) p + 1 chunks (Narayanan et al. 2021, section 2.2.2).
    """
    in_flight = p if v == 1 else 2 * (p - 1) + (v - 1) * p + 1
    moments = moments_of_rank("1f1b" if v == 1 else "interleaved", p, v, m, 0)
    assert moments.held.sum(axis=1).max() + 1 == in_flight


def chunk(stage: int, **options: object) -> ChunkMemory:
    """Return the memory of a chunk of four layers."""
    config = small(pp=4, **{"seq_length": 512, "max_position_embeddings": 512, **options})
    return chunk_memory(trace(config, "cuda"), stages_of(config)[stage], 512)


def test_recomputation_keeps_inputs():
    def kept_bytes(**options: object) -> float:
        return float(chunk(1, **options).kept.sum())

    inputs = 512 * 64 * 2  # [s, b, h] in bf16
    plain, full = kept_bytes(), dict(recompute_granularity="full")
    assert kept_bytes(**full) == 4 * inputs
    assert kept_bytes(**full, recompute_num_layers=4) == inputs
    assert kept_bytes(**full, recompute_num_layers=3) == 2 * inputs
    assert (
        kept_bytes(**full, recompute_method="block", recompute_num_layers=3)
        == 3 * inputs + plain / 4
    )


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("halves", [("backward",), ("inputs", "weights")])
def test_a_chunk_is_as_full_as_its_passes_one_by_one(stage, halves):
    """Memory of a chunk equals that of its passes, tensor by tensor.

    Each is held from its creation until nothing refers to it.
    """
    options = dict(enable_zbh1_pipeline=len(halves) == 2)
    traced = trace(small(pp=4, seq_length=512, max_position_embeddings=512, **options), "cuda")
    parts = [*[traced.embedding] * (stage == 0), *[traced.layer] * 4, *[traced.head] * (stage == 3)]
    alive: dict[tuple[int, int], int] = {}

    def fullest(passes: list[tuple[int, Pass]]) -> int:
        most = 0
        for place, of in passes:
            for step in of.steps:
                if isinstance(step, Alloc):
                    alive[place, step.id] = -(-step.bytes // 512) * 512
                elif hasattr(step, "id"):
                    alive.pop((place, step.id), None)
                most = max(most, sum(alive.values()))
        return most

    found = chunk(stage, **options)
    places = list(enumerate(parts))
    assert fullest([(i, part.forward) for i, part in places]) == found.forward.sum()
    assert sum(alive.values()) == found.kept.sum()
    for half, most in zip(halves, (found.backward, found.weights), strict=False):
        assert half != "weights" or sum(alive.values()) == found.waiting.sum()
        assert fullest([(i, getattr(part, half)) for i, part in places[::-1]]) == most.sum()
    assert not alive


def test_zero_3_holds_parts_and_two_layers():
    """Bytes of a parameter: 18 over the ranks, but for vectors' weights.

    Beyond them are, at the output layer, its weights and those of the layer before, and gradients of
    buckets that are filled or under way.
    """
    fields = dict(dp=4, zero_stage=3, num_layers=8, hidden_size=128, zero_reduce_bucket_size=1)
    config = small(**fields, untie_embeddings_and_output_weights=True)
    (rank,) = memory_of_ranks(config)
    n, h, layers = parameters_of_rank(config, 0), 128, 8
    vectors, largest, table = layers * 13 * h + 2 * h, 4 * h * h, 1000 * h
    assert rank.master + rank.moments == 3 * n
    weights = rank.weights - (2 * (n - vectors) / 4 + 2 * vectors)
    gradients = rank.gradients - n
    assert weights == 2 * (table + 12 * h * h)
    assert 0 < gradients <= 4 * (2 * table + largest + vectors)


def test_states_are_18_bytes_for_a_parameter_and_zero_divides_12_of_them():
    for dp, zero, moments in ((1, 1, 12), (4, 1, 3), (4, 0, 12)):
        config = small(dp=dp, zero_stage=zero)
        (rank,) = memory_of_ranks(config)
        n = parameters_of_rank(config, 0)
        assert (rank.weights, rank.gradients, rank.master + rank.moments) == (
            2 * n,
            4 * n,
            moments * n,
        )
    (rank,) = memory_of_ranks(small(bf16=None, optimizer="sgd"))
    assert (rank.weights, rank.gradients, rank.master + rank.moments) == (4 * n, 4 * n, 4 * n)
    (rank,) = memory_of_ranks(small(dp=4, ema_decay=0.9))
    assert rank.master + rank.moments == 4 * n


@pytest.mark.slow
def test_parameters_are_those_of_the_built_model():
    import torch

    from megatron.model.gpt import build_chunks
    from megatron.parallel.layout import Layout
    from megatron.parallel.topology import Topology

    config, device = small(pp=4, num_layers_per_virtual_pipeline_stage=2), torch.device("cpu")
    for rank in range(4):
        topology = Topology.from_layout(Layout(pipeline=4), rank, device=device)
        chunks = build_chunks(config, topology)
        assert sum(p.numel() for p in chunks.parameters()) == parameters_of_rank(config, rank)


# -- against the tensors of a run ------------------------------------------------------------------

RUN = dict(
    num_layers=2,
    hidden_size=128,
    vocab_size=512,
    bf16=True,
    global_batch_size=8,
    zero_reduce_bucket_size=0,
)
MORE = [dict(pipeline_model_parallel_size=2, zero_stage=stage) for stage in (0, 1, 2)]


def held_after_a_step(rank: int, fields: dict[str, object]) -> int:
    """Return the bytes of all tensors alive on a rank after an optimizer step.

    Shared memory counts once.
    """
    import gc

    import torch

    from tests.helpers.training import Job, configured, dist_world_size

    job = Job(configured(fields, dist_world_size()))
    job.train(0)
    job.step()
    gc.collect()
    storages = (x.untyped_storage() for x in gc.get_objects() if isinstance(x, torch.Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        dict(zero_stage=1, ema_decay=0.9),
        dict(zero_stage=2),
        dict(zero_stage=3),
        *(pytest.param(fields, marks=pytest.mark.campaign("memory")) for fields in MORE),
    ],
)
def test_states_are_what_a_rank_holds_after_a_step(more):
    """States are those on a rank after a step: weights, gradients, masters, moments, average.

    Other live tensors (masks, partial sums) are a percent of them.
    """
    from tests.helpers.processes import run_processes
    from tests.helpers.training import BASE

    size = 2 * more.get("pipeline_model_parallel_size", 1)
    config = Config.create(**{**BASE, **RUN, **more, "world_size": size})
    for rank, held in enumerate(run_processes(size, held_after_a_step, {**RUN, **more})):
        # the data-parallel rank varies fastest
        elements = elements_of_rank(config, trace(config, "cpu"), rank // 2)
        assert held == pytest.approx(sum(state_bytes(config, elements).values()), rel=0.02)
