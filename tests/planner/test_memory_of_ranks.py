"""Memory of a step, against closed forms and schedules' bounds."""

import dataclasses

import pytest

from megatron.pipeline.orders import one_forward_one_backward, zero_bubble_h1
from megatron.pipeline.schedule import build_schedule, moments_of_rank
from megatron.planner.dryrun.rank import run_rank
from megatron.planner.memory import (
    CATEGORIES,
    chunk_memory,
    memory_of_ranks,
    parameters_of_rank,
)
from megatron.planner.stage import stages_of
from megatron.planner.trace import trace
from tests.planner.layouts import planned
from tools.show_schedule import peak_activations


def small(pp=1, dp=1, flags=""):
    return planned(
        "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --seq-length 32",
        "--vocab-size 1000 --bf16 --make-vocab-size-divisible-by 8",
        f"--pipeline-model-parallel-size {pp} --world-size {pp * dp}",
        f"--global-batch-size {dp * 8} {flags}",
    )


@pytest.mark.parametrize("m", [1, 3, 10, 40])
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 3),
        ("zb-h1", 1),
        ("v-half", 2),
        ("v-min", 2),
    ],
)
def test_as_many_micro_batches_as_the_schedule_holds(schedule, chunks, m):
    """The number of micro-batches held equals the schedule's own count.

    That counts pairs (micro-batch, chunk) until their weight gradients are computed.
    """
    counted = peak_activations(build_schedule(schedule, 4, chunks, m))
    for rank in range(4):
        moments = moments_of_rank(schedule, 4, chunks, m, rank)
        assert ((moments.in_flight + moments.waiting).sum(axis=1)).max() + 1 == counted[rank]


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("split", [(0,), (1, 2, 3)])
def test_an_order_that_splits_the_backward_passes_of_some_ranks(split, zero):
    """A rank needs the memory of the named order that it follows, except for messages."""

    def order(size, chunks, micro_batches, rank):
        follows = zero_bubble_h1 if rank in split else one_forward_one_backward
        return follows(size, chunks, micro_batches, rank)

    plain = small(pp=4, dp=2, flags=f"--zero-stage {zero}")
    own = dataclasses.replace(plain, pieces=dataclasses.replace(plain.pieces, schedule=order))
    mixed = memory_of_ranks(own)
    halves = memory_of_ranks(plain.replace(pipeline_schedule="zb-h1"))
    for rank, whole in enumerate(memory_of_ranks(plain)):
        expected = halves[rank] if rank in split else whole
        assert mixed[rank] == dataclasses.replace(expected, buffers=mixed[rank].buffers)


@pytest.mark.parametrize(
    "flags",
    [
        "--freeze embedding layers.[0-9] *layernorm*",
        "--lora-rank 4 --zero-stage 2",
        "--lora-rank 4 --lora-target layers.[2-9].mlp --freeze layers.3 --cpu-offload",
        "--freeze mlp layers.[89] --mtp-num-layers 2 --position-embedding-type rope",
    ],
)
def test_what_is_frozen_needs_only_weights(flags):
    """A dry run of the real code needs as much, up to two hidden states and padding."""
    config = small(pp=2, dp=2, flags=flags)
    for rank, memory in enumerate(memory_of_ranks(config)):
        peak = run_rank(config, 2 * rank, "meta", config.num_micro_batches()).peak
        for name in CATEGORIES:
            assert abs(getattr(memory, name) - getattr(peak, name)) < 3e4, name


def chunk(stage, flags=""):
    """Return the memory of a chunk of four layers."""
    config = small(pp=4, flags=f"--seq-length 512 {flags}")
    return chunk_memory(trace(config, "cuda"), stages_of(config)[stage], 512)


def test_recomputation_keeps_inputs():
    def kept_bytes(flags=""):
        return float(chunk(1, flags).retained.sum())

    inputs = 512 * 64 * 2  # [s, b, h] in bf16
    plain = kept_bytes()
    full = "--recompute-granularity full"
    for flags, expected in (
        ("", 4 * inputs),
        ("--recompute-num-layers 4", inputs),
        ("--recompute-num-layers 3", 2 * inputs),
        ("--recompute-method block --recompute-num-layers 3", 3 * inputs + plain / 4),
    ):
        assert kept_bytes(f"{full} {flags}") == expected


def test_states_are_18_bytes_for_a_parameter_and_zero_divides_12_of_them():
    for dp, flags, weights, states in (
        (1, "", 2, 12),
        (4, "", 2, 3),
        (4, "--zero-stage 0", 2, 12),
        (1, "--no-bf16 --optimizer sgd", 4, 4),
        (4, "--ema-decay 0.9", 2, 4),
    ):
        config = small(dp=dp, flags=flags)
        (rank,) = memory_of_ranks(config)
        actual = rank.weights, rank.gradients, rank.master + rank.moments
        n = parameters_of_rank(config, 0)
        assert actual == (weights * n, 4 * n, states * n), flags
