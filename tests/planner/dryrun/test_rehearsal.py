"""Rehearsals of small jobs: against real steps, against each other, and with faults in the code."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron.config.command_line import parse_plan
from megatron.config.parallel import V_SHAPED
from megatron.data.sampler import MicroBatch
from megatron.engine.engine import build_executor
from megatron.model.gpt import global_shapes
from megatron.model.stages import end_ranks
from megatron.planner.cluster import load_cluster
from megatron.planner.dryrun.rank import run_rank
from megatron.planner.dryrun.rehearsal import (
    enough_micro_batches,
    members_of,
    rehearse,
    render,
)
from megatron.planner.events import Alloc, Free
from megatron.planner.memory import CPU_BLOCK, GPU_BLOCK, HEADROOM, changes, find_peak
from megatron.planner.tensors import OperatorRecorder
from tests.helpers.processes import run_processes
from tests.helpers.training import TrainingJob

pytestmark = pytest.mark.slow

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 250 "
    "--micro-batch-size 2 --hidden-dropout 0 --attention-dropout 0"
)
CUT = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 6 --bf16"
PP4 = "--pipeline-model-parallel-size 4 --num-layers 4 --bf16"
MESSAGE_BYTES = 64 * 2 * 64 * 2  # [s, b, h] in bf16


def make(flags):
    return parse_plan(f"{BASE} {flags}".split())


# -- against real steps ----------------------------------------------------------------------------


class _Follow(OperatorRecorder):
    """Count memory in the same way, on tensors with data."""

    def __init__(self):
        super().__init__()
        self.steps: list[Alloc | Free] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def follows(self, tensor):
        return tensor.is_cpu

    def allocated(self, step, tensor):
        self.steps.append(step)

    def freed(self, step):
        self.steps.append(step)


def real_peak(rank, flags):
    """Return the peak bytes in two real steps of a rank."""
    config = make(flags)
    follower = _Follow()
    b = config.batch.micro_batch_size
    s = config.model.seq_length
    count = config.num_micro_batches()
    with follower:
        job = TrainingJob(config, perform_initialization=False)
        tokens, labels, positions = (torch.zeros(count, b, s, dtype=torch.int64) for _ in range(3))
        mask = torch.ones(count, b, s)
        batches = [
            MicroBatch(tokens[i], labels[i], mask[i], positions[i], None, i) for i in range(count)
        ]
        before = len(follower.steps)
        for _ in range(2):
            job.executor.train(batches, loss_scale=job.engine.loss_scale)
            job.step()
        job.engine.wait_for_weights()
    made = {}
    allocated = changes(follower.steps[:before], CPU_BLOCK, made).sum()
    return float(allocated + find_peak(changes(follower.steps[before:], CPU_BLOCK, made))[0].sum())


MORE = pytest.mark.campaign("memory")


@pytest.mark.parametrize(
    "flags",
    [
        "--global-batch-size 4 --bf16 --recompute-granularity full --recompute-method block",
        pytest.param(f"--global-batch-size 4 {CUT} --bf16 --main-grads-dtype bf16", marks=MORE),
        pytest.param("--global-batch-size 6", marks=MORE),
        pytest.param(f"{PP2} --global-batch-size 12", marks=MORE),
        pytest.param("--world-size 2 --global-batch-size 12 --bf16", marks=MORE),
    ],
)
def test_a_rank_allocates_what_a_real_one_does(flags):
    """A rehearsed rank allocates as much as a real one, except for a number or two on one process.

    Between several, a message may copy its argument, unseen, and free it. A rehearsed one holds it
    until it is awaited.
    """
    config = make(flags)
    real = run_processes(config.parallel.world_size, real_peak, flags)
    for rank, peak in enumerate(real):
        rehearsed = run_rank(config, rank, "cpu", config.num_micro_batches()).peak.total
        allowed = 2 * CPU_BLOCK if len(real) == 1 else max(MESSAGE_BYTES, 0.01 * peak)
        assert abs(rehearsed - peak) <= allowed, f"rank {rank}: {rehearsed} instead of {peak}"


def test_the_copy_of_a_save_in_the_background_is_counted():
    """A background save copies fp32 weights and two moments of each parameter, without padding.

    Each copy begins on 64 bytes.
    """
    plain = make("--global-batch-size 2 --bf16")
    config = plain.replace(save="/nowhere", async_save=True)
    report = rehearse(config, device="gpu")
    sizes = [4 * math.prod(shape) for shape in global_shapes(config).values()]
    (run,) = report.ranks
    assert run.copy_bytes == 3 * sum(-(-size // 64) * 64 for size in sizes) > 0
    assert "async-save" in render(report)
    assert run_rank(plain, 0, "meta", 1).copy_bytes == 0


# -- kinds of ranks and micro-batches --------------------------------------------------------------

CHUNKS = "--num-layers-per-virtual-pipeline-stage 1"
ZERO_BUBBLE = "--enable-zbh1-pipeline"


@pytest.mark.parametrize(
    "flags",
    [
        f"{PP2} --global-batch-size 20",
        pytest.param(f"{PP4} --global-batch-size 22", marks=MORE),
        f"{PP2} --num-layers 4 --pipeline-schedule v-half --global-batch-size 24",
        *(
            pytest.param(
                f"{PP4} --num-layers 8 --pipeline-schedule {name} --global-batch-size 48",
                marks=MORE,
            )
            for name in V_SHAPED
        ),
        pytest.param(f"{PP2} {CHUNKS} --num-layers 4 --global-batch-size 16", marks=MORE),
        f"{PP4} --global-batch-size 48 {ZERO_BUBBLE}",
        pytest.param(f"{PP4} {CHUNKS} --global-batch-size 48 --num-layers 8", marks=MORE),
        pytest.param(
            f"{PP4} --global-batch-size 48 --num-layers 7 --pipeline-layout 1,2,2,2", marks=MORE
        ),
        # 24 over 5 ranks pass in groups of 6. 19, with the same remainder, would begin with a group
        # of 7.
        pytest.param(
            f"{PP4} {CHUNKS} --pipeline-model-parallel-size 5 --num-layers 10 --global-batch-size 48",
            marks=MORE,
        ),
    ],
)
def test_the_ranks_and_micro_batches_that_are_looked_at_stand_for_all(flags):
    """The tested ranks and micro-batches represent all.

    No rank needs more than its representative. All micro-batches add nothing except, on the last
    stage, their losses: a number each, in a block of the allocator.
    """
    config = make(flags)
    enough = enough_micro_batches(config)
    count = config.num_micro_batches()
    size = config.parallel.pipeline_model_parallel_size
    assert count > enough  # else the test shows nothing
    members = [member for member in members_of(config) if member.stands_for]
    assert sorted(p for member in members for p in member.stands_for) == [*range(size)]
    for kind in members:
        first, *rest = (run_rank(config, p, "meta", enough).peak.total for p in kind.stands_for)
        assert max(rest, default=0) <= first
        # ZB-V holds the most before there are losses
        of_loss = end_ranks(config)[1] == kind.pipeline_rank and config.schedule != "zb-v"
        losses = (count - enough) * GPU_BLOCK if of_loss else 0
        assert run_rank(config, kind.pipeline_rank, "meta", count).peak.total == first + losses


# -- findings --------------------------------------------------------------------------------------


def broken(config):
    report = rehearse(config, load_cluster("frontier"))
    assert report.findings
    return report


def test_a_rank_whose_code_fails_is_named_with_its_line(monkeypatch):
    def build(config, topology, *rest):
        executor = build_executor(config, topology, *rest)
        if topology.pipeline.rank == 1:
            vars(executor).update(message=((64, 2, 63), torch.bfloat16))
        return executor

    monkeypatch.setattr("megatron.planner.dryrun.rank.build_executor", build)
    report = broken(make(PP2))
    (finding,) = report.findings
    assert (finding.kind, finding.rank) == ("error", 1)
    assert "63" in finding.text and "megatron/layers/" in finding.text
    assert "RuntimeError" in render(report)
    # the others are shown all the same
    assert [rank.pipeline_rank for rank in report.ranks] == [0]


def test_collectives_that_differ_between_tensor_ranks(monkeypatch):
    from megatron.parallel import collectives

    gather = collectives.gather_first_async

    def twice(x, group):
        if group.kind == "tensor" and group.is_last:
            gather(x, group)
        return gather(x, group)

    monkeypatch.setattr(collectives, "gather_first_async", twice)
    (finding,) = broken(make(f"--global-batch-size 4 {CUT} --bf16")).findings
    assert finding.kind == "messages" and "ranks 0, 1" in finding.text


WIDE = "--vocab-size 100000 --cross-entropy-chunk-tokens 0 --num-layers 1 --micro-batch-size 16"


@pytest.mark.parametrize(
    ("flags", "gib", "advice"),
    [
        (PP2, 0.001, "--pipeline-model-parallel-size"),
        (WIDE, 0.01, "--cross-entropy-chunk-tokens"),
        ("--attention-backend unfused --seq-length 2048", 0.01, "--attention-backend auto"),
    ],
    ids=["model", "logits", "scores"],
)
def test_what_does_not_fit_is_named_with_what_to_do(flags, gib, advice):
    cluster = dataclasses.replace(load_cluster("frontier"), memory_gib=gib / (1 - HEADROOM))
    report = rehearse(make(f"--bf16 {flags}"), cluster)
    finding = report.findings[0]
    assert finding.kind == "memory" and finding.rank == 0 and advice in finding.text


@pytest.mark.parametrize(
    ("device", "flags"),
    [
        (
            "gpu",
            "--bf16 --recompute-granularity selective --recompute-modules core_attn mlp_act "
            "--num-key-value-heads 1 --tensor-model-parallel-size 2 --world-size 4",
        ),
        (
            "gpu",
            "--fp16 --hidden-dropout 0.1 --attention-dropout 0.1 --position-embedding-type alibi "
            "--untie-embeddings-and-output-weights --optimizer sgd",
        ),
        ("gpu", "--bf16 --attention-backend unfused --fp32-residual-connection --zero-stage 0"),
        ("gpu", "--bf16 --window-size 20 0 --window-attn-skip-freq 2 --recompute-granularity full"),
        (
            "gpu",
            "--bf16 --multi-latent-attention --q-lora-rank 16 --qk-layernorm --normalization rmsnorm "
            "--softmax-type learnable --position-embedding-type rope --tensor-model-parallel-size 2 "
            "--world-size 4 --sequence-parallel",
        ),
        (
            "gpu",
            "--bf16 --experimental-attention-variant gated_delta_net --linear-num-value-heads 16 "
            "--linear-attention-freq 2 --xielu",
        ),
        (
            "cpu",
            "--attention-backend blocked --num-key-value-heads 2 --swiglu --normalization rmsnorm "
            "--no-gradient-accumulation-fusion --position-embedding-type rope",
        ),
    ],
)
def test_every_kind_of_model_runs(device, flags):
    size = "--pipeline-model-parallel-size 2 --global-batch-size 4"
    assert rehearse(make(f"{size} {flags}"), None, device).findings == ()
