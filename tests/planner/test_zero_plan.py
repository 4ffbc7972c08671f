"""The plan of ZeRO: of an engine and of the planner it is one, and an engine's step is what it says."""

import re
from collections import Counter

import pytest

from megatron.engine.engine import Engine
from megatron.engine.optimizer import unique_parameters
from megatron.engine.zero_plan import BucketOp, Reductions
from megatron.model.gpt import build_chunks
from megatron.parallel.flight import FlightRecorder
from megatron.parallel.sharding import sharding_of
from megatron.pipeline.orders import Op as PipelineOp
from megatron.pipeline.orders import passes_of_rank
from megatron.planner.dryrun.rank import member, run_rank
from megatron.planner.placement import step_messages
from megatron.planner.stage import plan_of_rank
from megatron.planner.trace import trace
from megatron.planner.zero import messages_of
from tests.planner.layouts import planned, table

RUN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 "
    "--world-size 8 --global-batch-size 16 --bf16 --zero-reduce-bucket-size 60000"
)
LLAMA = "--swiglu --normalization rmsnorm --disable-bias-linear --position-embedding-type rope"
EXPERTS = f"{LLAMA} --num-experts 4 --expert-model-parallel-size 2 --moe-layer-freq ([0]+[1])*2"
FOLDED = f"{EXPERTS} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
MUP = "--use-mup --mup-base-hidden-size 64 --mup-base-num-layers 2"
PP2 = "--pipeline-model-parallel-size 2"
CHUNKS = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
CLIPPED = "--qk-clip --ema-decay 0.9 --attention-backend unfused"
CASES = table(f"""
plain | --zero-stage 3
plain with stage 1 | --zero-stage 1
untied | {LLAMA} --untie-embeddings-and-output-weights --zero-stage 3
untied with stage 2 | {LLAMA} --untie-embeddings-and-output-weights --zero-stage 2
tensor parallel | --tensor-model-parallel-size 2 --num-key-value-heads 4 --zero-stage 3
tied over chunks | {CHUNKS} --zero-stage 2
experts | {EXPERTS} --zero-stage 3
experts with stage 1 | {EXPERTS} --zero-stage 1
experts in stages | {EXPERTS} {PP2} --zero-stage 2
experts over tensor ranks | {FOLDED} --zero-stage 3 --optimizer muon
experts over more ranks than attention | {EXPERTS} --expert-tensor-parallel-size 2 --zero-stage 2
muP | {MUP} --zero-stage 3
muP with SGD | {MUP} --optimizer sgd --zero-stage 3
Muon | {LLAMA} --optimizer muon --zero-stage 3
Muon with muP and experts | {EXPERTS} {MUP} --optimizer muon --zero-stage 3
QK-clip and average | {CLIPPED} --zero-stage 3
16-bit moments | --world-size 1 --exp-avg-dtype bf16 --zero-stage 3
one rank | --world-size 1 --zero-stage 3
frozen | {PP2} --zero-stage 2 --freeze embedding layers.0 layers.2.mlp *layernorm*
adapters | --zero-stage 3 --optimizer muon --lora-rank 2 --lora-target layers.[12].mlp query_*
offloaded | --cpu-offload --zero-stage 3
""")


def described(record):
    """Return a record without the number of its layer, which a trace has once for all."""
    return re.sub(r"^layers\.\d+\.", "layers.", record.name), record.shape


@pytest.mark.parametrize("case", CASES)
def test_the_planner_has_the_plan_of_the_engine(case):
    config = planned(RUN, CASES[case])
    size = config.parallel.pipeline_model_parallel_size
    for rank in range(size):
        plan, records = plan_of_rank(config, trace(config, "cpu"), rank)
        with member(config, rank * config.parallel.world_size // size, "cpu") as topology:
            engine = Engine(config, topology, build_chunks(config, topology))
            parameters = unique_parameters(engine.chunks)
        assert list(map(described, map(sharding_of, parameters))) == list(map(described, records))
        assert [vars(b) for b in engine.plan.buckets] == [vars(b) for b in plan.buckets]
        for name in ("zero", "first_uses", "calls", "recomputed", "sweeps"):
            assert getattr(engine.plan, name) == getattr(plan, name), name
        assert len(plan.buckets) > 1
        for bucket, of_plan in zip(engine.buckets, engine.plan.buckets, strict=True):
            assert [parameters[n] for n in of_plan.members] == list(bucket.parameters)


# -- what an engine sends in a step ----------------------------------------------------------------

INNER = "--zero-shard-size 2"
SENT = table(f"""
stage 0 | --zero-stage 0
stage 1 | --zero-stage 1
stage 3 | --zero-stage 3
stage 2 of 2 of 4 | --zero-stage 2 {INNER} --zero-state-shard-size 4
stage 3 of 2 of 4 | --zero-stage 3 {INNER} --zero-state-shard-size 4
experts | {EXPERTS} --zero-stage 3 {INNER}
experts over tensor ranks | {FOLDED} --zero-stage 3 {INNER}
muP and Muon with experts | {EXPERTS} {MUP} --zero-stage 3 --zero-shard-size 4 --optimizer muon
recomputed | --zero-stage 3 --recompute-granularity full --recompute-num-layers 3
without overlap | --zero-stage 3 --zero-shard-size 4 --no-overlap-grad-reduce --no-overlap-param-gather
chunks | {CHUNKS} --zero-stage 2 {INNER}
offloaded | --zero-stage 3 {INNER} --cpu-offload
frozen | --zero-stage 3 {INNER} --freeze embedding layers.0 *layernorm*
""")
MORE = table(f"""
stage 2 | --zero-stage 2
stage 1 of 2 of 4 | --zero-stage 1 {INNER} --zero-state-shard-size 4
stage 2 of 4 | --zero-stage 2 --zero-shard-size 4
stage 3 of 4 | --zero-stage 3 --zero-shard-size 4
experts with stage 2 | {EXPERTS} --zero-stage 2 --zero-shard-size 4
experts over tensor and data ranks | {FOLDED} --expert-model-parallel-size 4 --zero-stage 2 {INNER}
experts over tensor ranks, stage 0 | {FOLDED} --zero-stage 0
experts over more ranks than attention | {EXPERTS} --expert-tensor-parallel-size 2 --zero-stage 1
recomputed one by one | --zero-stage 3 --zero-shard-size 4 --recompute-granularity full --recompute-method block
stage 1 without overlap | --zero-stage 1 --no-overlap-grad-reduce
split backward passes | {PP2} --enable-zbh1-pipeline --zero-stage 2 {INNER}
stage 1 in chunks | {CHUNKS} --zero-stage 1 {INNER}
QK-clip and average | {CLIPPED} --zero-stage 3
""")
CALLS = {"reduce_scatter", "all_gather", "all_reduce"}


def instructions(config, plan, rank):
    """Yield what a rank does in a step, in the order of its schedule's passes."""
    size = config.parallel.pipeline_model_parallel_size
    chunks = config.parallel.num_chunks
    rows = passes_of_rank(config.schedule, size, chunks, config.num_micro_batches(), rank)
    passes = [(PipelineOp(op), stage) for op, stage, _ in rows.tolist()]
    left = Counter(stage for op, stage in passes if op is PipelineOp.FORWARD)
    sums = Reductions(plan)
    gathered = set()
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


def recorded(config, rank, monkeypatch):
    """Return what a rank of a dry run posts in its second step, by group."""
    posted = []
    of_steps = []
    step = Engine.step
    enter = FlightRecorder.enter

    def steps(self, *args):
        result = step(self, *args)
        of_steps.append([*posted])
        posted.clear()
        return result

    def note(self, call, kind, size_bytes, *args, **more):
        if not more:
            posted.append((kind, call.decode(), size_bytes))
        return enter(self, call, kind, size_bytes, *args, **more)

    monkeypatch.setattr(Engine, "step", steps)
    monkeypatch.setattr(FlightRecorder, "enter", note)
    run_rank(config, rank, "meta", config.num_micro_batches())
    sent = {}
    for kind, call, n_bytes in of_steps[-1]:
        is_figure = call == "all_reduce" and n_bytes <= 64  # a norm, for example
        if kind.split(".")[0] in ("data", "expert_data") and call in CALLS and not is_figure:
            sent.setdefault(kind, []).append((call, n_bytes))
    return sent


@pytest.mark.parametrize(
    "case", [*SENT, *(pytest.param(case, marks=pytest.mark.campaign("memory")) for case in MORE)]
)
def test_an_engine_sends_what_the_plan_says(case, monkeypatch):
    """Each message of a step, in the order of its group: kind and bytes, padding included.

    The planner's messages of a step are these.
    """
    config = planned(RUN, (SENT | MORE)[case])
    size = config.parallel.pipeline_model_parallel_size
    most = 0.0
    for rank in range(size):
        plan = plan_of_rank(config, trace(config, "cuda"), rank).plan
        expected = {}
        for kind, n_bytes, group in messages_of(plan, instructions(config, plan, rank)):
            expected.setdefault(group, []).append((kind, n_bytes))
        with monkeypatch.context() as patched:
            actual = recorded(config, rank * config.parallel.world_size // size, patched)
        assert actual == expected and actual
        most = max(most, sum(n_bytes for some in actual.values() for _, n_bytes in some))
    of_zero = (
        (message.bytes * count)
        for message, count in step_messages(config, "cuda").collectives.items()
        if message.group.split(".")[0] in ("data", "expert_data")
    )
    assert sum(of_zero) == pytest.approx(most, rel=1e-12)
