"""Buckets of an engine, and those that the planner knows without tensors: one list."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron.engine.engine import Engine
from megatron.model.gpt import build_chunks
from megatron.parallel.sharding import Sharding, sharding_of
from megatron.planner.dryrun.rank import member
from megatron.planner.stage import buckets_of_rank
from megatron.planner.trace import trace
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


@pytest.mark.parametrize(
    ("case", "stage"),
    [
        (case, stage)
        for case, fields in CASES.items()
        for stage in (1, 2, 3)
        if stage < 3 or "pipeline_model_parallel_size" not in fields
    ],
)
def test_the_planner_has_the_buckets_of_the_engine(case: str, stage: int) -> None:
    """Compare also their kinds, and the order in which they are sent."""
    fields = dict(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=32)
    fields |= dict(vocab_size=128, world_size=8, global_batch_size=16, bf16=True)
    fields |= dict(zero_reduce_bucket_size=60_000) | CASES[case]
    config = run(**fields, zero_stage=stage)
    traced = trace(config, "cpu")
    for rank in range(config.parallel.pipeline_model_parallel_size):
        expected = [
            (plan.elements, plan.kind[1:-1], [described(one.record) for one in members])
            for plan, members in buckets_of_rank(config, traced, rank)
        ]
        first = rank * config.parallel.world_size // config.parallel.pipeline_model_parallel_size
        with member(config, first, "cpu") as topology:
            engine = Engine(config, topology, build_chunks(config, topology))
            groups = {
                bucket: (group["whole"] is not None, group["lr_scale"], group["eps_scale"])
                for bucket, group in zip(engine.buckets, engine._basic.param_groups, strict=True)
            }
            found = []
            for bucket in engine._gradients.buckets:
                records = [sharding_of(p) for p in bucket.parameters]
                whole, *scales = groups[bucket]
                kind = whole, records[0].tied, *scales, records[0].experts, records[0].fp32
                elements = sum(p.numel() for p in bucket.parameters)
                found.append((elements, kind, list(map(described, records))))
        assert found == expected and len(found) > 1
