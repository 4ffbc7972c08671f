"""The plan of ZeRO: of an engine and of the planner it is one, and an engine's step is what it says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.config import Config
from megatron.engine.engine import Engine
from megatron.engine.optimizer import unique_parameters
from megatron.engine.zero_plan import BucketInstruction, BucketOp, Reductions, ZeroPlan
from megatron.model.gpt import build_chunks
from megatron.parallel.flight import FlightRecorder
from megatron.parallel.sharding import Sharding, sharding_of
from megatron.pipeline.orders import Op as PipelineOp
from megatron.pipeline.orders import passes_of_rank
from megatron.planner.dryrun.rank import member, run_rank
from megatron.planner.placement import step_messages
from megatron.planner.stage import plan_of_rank
from megatron.planner.trace import trace
from megatron.planner.zero import messages_of
from tests.planner.timing.configs import run

LLAMA = dict(
    swiglu=True, normalization="rmsnorm", add_bias_linear=False, position_embedding_type="rope"
)
EXPERTS = dict(LLAMA, num_experts=4, expert_model_parallel_size=2, moe_layer_freq=(0, 1, 0, 1))
MUP = dict(use_mup=True, mup_base_hidden_size=64, mup_base_num_layers=2)
INTERLEAVED = dict(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": dict(LLAMA, untie_embeddings_and_output_weights=True),
    "tensor parallel": dict(tensor_model_parallel_size=2, num_key_value_heads=4),
    "tied over chunks": INTERLEAVED,
    "experts": EXPERTS,
    "experts in stages": dict(EXPERTS, pipeline_model_parallel_size=2),
    "muP": MUP,
    "muP with SGD": dict(MUP, optimizer="sgd"),
    "Muon": dict(LLAMA, optimizer="muon"),
    "Muon with muP and experts": dict(EXPERTS, **MUP, optimizer="muon"),
    "QK-clip and average": dict(qk_clip=True, ema_decay=0.9, attention_backend="unfused"),
    "16-bit moments": dict(world_size=1, exp_avg_dtype="bf16"),
    "one rank": dict(world_size=1),
    "offloaded": dict(cpu_offload=True),
}


def described(record: Sharding) -> tuple[str, tuple[int, ...]]:
    """Return a record without the number of its layer, which a trace has once for all."""
    return re.sub(r"^layers\.\d+\.", "layers.", record.name), record.shape


def configured(stage: int, **more: Any) -> Config:
    fields = dict(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=32)
    fields |= dict(vocab_size=128, world_size=8, global_batch_size=16, bf16=True)
    return run(**fields | dict(zero_reduce_bucket_size=60_000) | more, zero_stage=stage)


@pytest.mark.parametrize(
    ("case", "stage"),
    [
        ("plain", 1),
        ("experts", 1),
        ("untied", 2),
        *((case, 2 if "pipeline_model_parallel_size" in CASES[case] else 3) for case in CASES),
    ],
)
def test_the_planner_has_the_plan_of_the_engine(case: str, stage: int) -> None:
    config = configured(stage, **CASES[case])
    size = config.parallel.pipeline_model_parallel_size
    for rank in range(size):
        plan, records = plan_of_rank(config, trace(config, "cpu"), rank)
        with member(config, rank * config.parallel.world_size // size, "cpu") as topology:
            engine = Engine(config, topology, build_chunks(config, topology))
            parameters = unique_parameters(engine.chunks)
        assert list(map(described, map(sharding_of, parameters))) == list(map(described, records))
        assert [vars(b) for b in engine.plan.buckets] == [vars(b) for b in plan.buckets]
        for name in ("zero", "places", "calls", "recomputed", "sweeps"):
            assert getattr(engine.plan, name) == getattr(plan, name), name
        assert len(plan.buckets) > 1
        for bucket, of_plan in zip(engine.buckets, engine.plan.buckets, strict=True):
            assert [parameters[n] for n in of_plan.members] == list(bucket.parameters)


# -- what an engine sends in a step ----------------------------------------------------------------

OVERLAP = dict(overlap_grad_reduce=False, overlap_param_gather=False)
BLOCKS = dict(recompute_granularity="full", recompute_method="block")
SENT = {
    **{f"stage {stage}": dict(stage=stage) for stage in (0, 1, 3)},
    "stage 2 of 2 of 4": dict(stage=2, inner=2, states=4),
    "stage 3 of 2 of 4": dict(stage=3, inner=2, states=4),
    "experts": dict(EXPERTS, stage=3, inner=2),
    "muP and Muon with experts": dict(EXPERTS, **MUP, stage=3, inner=4, optimizer="muon"),
    "recomputed": dict(stage=3, recompute_granularity="full", recompute_num_layers=3),
    "without overlap": dict(OVERLAP, stage=3, inner=4),
    "chunks": dict(INTERLEAVED, stage=2, inner=2),
    "offloaded": dict(stage=3, inner=2, cpu_offload=True),
}
MORE = {
    "stage 2": dict(stage=2),
    "stage 1 of 2 of 4": dict(stage=1, inner=2, states=4),
    **{f"stage {stage} of 4": dict(stage=stage, inner=4) for stage in (2, 3)},
    "experts with stage 2": dict(EXPERTS, stage=2, inner=4),
    "recomputed one by one": dict(BLOCKS, stage=3, inner=4),
    "stage 1 without overlap": dict(stage=1, overlap_grad_reduce=False),
    "split backward passes": dict(
        pipeline_model_parallel_size=2, enable_zbh1_pipeline=True, stage=2, inner=2
    ),
    "stage 1 in chunks": dict(INTERLEAVED, stage=1, inner=2),
    "QK-clip and average": dict(stage=3, qk_clip=True, ema_decay=0.9, attention_backend="unfused"),
}
CALLS = {"reduce_scatter", "all_gather", "all_reduce"}
Sent = dict[str, list[tuple[str, float]]]


def planned(config: Config, plan: ZeroPlan, rank: int) -> Iterator[BucketInstruction]:
    """Yield what a rank does in a step, in the order of its schedule's passes."""
    size, chunks = config.parallel.pipeline_model_parallel_size, config.parallel.num_chunks
    rows = passes_of_rank(config.schedule, size, chunks, config.num_micro_batches(), rank)
    passes = [(PipelineOp(op), stage) for op, stage, _ in rows.tolist()]
    left = Counter(stage for op, stage in passes if op is PipelineOp.FORWARD)
    sums, gathered = Reductions(plan), set[int]()
    for op, stage in passes:
        if op is PipelineOp.FORWARD:
            steps = plan.forward(stage)
        elif op is PipelineOp.BACKWARD_INPUT:
            continue
        else:
            left[stage] -= 1
            steps = plan.reducing(stage, not left[stage], sums)
        for step in steps:
            for one in (*step.before, *step.beside, *step.after):
                if one.op is BucketOp.FREE:
                    gathered.discard(one.bucket)
                elif one.op is not BucketOp.GATHER or one.bucket not in gathered:
                    yield one
                if one.op is BucketOp.GATHER:
                    gathered.add(one.bucket)
    yield from plan.end(sums)


def recorded(config: Config, rank: int, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Return what a rank of a dry run posts in its second step, by group."""
    found: list[tuple[str, str, float]] = []
    ends: list[int] = []
    begin, step, enter = Engine.begin, Engine.step, FlightRecorder.enter

    def begins(self: Engine, count: int) -> None:
        found.clear()
        begin(self, count)

    def steps(self: Engine, *args: Any) -> Any:
        result = step(self, *args)
        ends.append(len(found))
        return result

    def note(self: Any, call: bytes, kind: str, size_bytes: int, *args: Any, **more: int) -> int:
        if not more:
            found.append((kind, call.decode(), size_bytes))
        return enter(self, call, kind, size_bytes, *args, **more)

    monkeypatch.setattr(Engine, "begin", begins)
    monkeypatch.setattr(Engine, "step", steps)
    monkeypatch.setattr(FlightRecorder, "enter", note)
    run_rank(config, rank, "meta", config.num_micro_batches())
    sent: Sent = {}
    for kind, call, n_bytes in found[: ends[-1]]:
        is_figure = call == "all_reduce" and n_bytes <= 64  # a norm, for example
        if kind.split(".")[0] in ("data", "expert_data") and call in CALLS and not is_figure:
            sent.setdefault(kind, []).append((call, n_bytes))
    return sent


@pytest.mark.parametrize(
    "case", [*SENT, *(pytest.param(case, marks=pytest.mark.campaign("memory")) for case in MORE)]
)
def test_an_engine_sends_what_the_plan_says(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message of a step, in the order of its group: kind and bytes, padding included.

    The planner's messages of a step are these.
    """
    fields = {"inner": 0, "states": 0, **(SENT | MORE)[case]}
    sizes = dict(zero_shard_size=fields.pop("inner"), zero_state_shard_size=fields.pop("states"))
    config = configured(**fields, **sizes)
    size = config.parallel.pipeline_model_parallel_size
    most = 0.0
    for rank in range(size):
        plan = plan_of_rank(config, trace(config, "cuda"), rank).plan
        expected: Sent = {}
        for kind, n_bytes, group in messages_of(plan, planned(config, plan, rank)):
            expected.setdefault(group, []).append((kind, n_bytes))
        with monkeypatch.context() as patched:
            found = recorded(config, rank * config.parallel.world_size // size, patched)
        assert found == expected and found
        most = max(most, sum(n_bytes for some in found.values() for _, n_bytes in some))
    of_zero = (
        (message.bytes * count)
        for message, count in step_messages(config, "cuda").collectives.items()
        if message.group.split(".")[0] in ("data", "expert_data")
    )
    assert sum(of_zero) == pytest.approx(most, rel=1e-12)
