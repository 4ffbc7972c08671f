"""Rehearsals of jobs with experts and of jobs that divide sequences."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import Config
from megatron.planner.cluster import load_cluster
from megatron.planner.dryrun.rehearsal import rehearse
from megatron.planner.memory import CATEGORIES, memory_of_ranks

pytestmark = pytest.mark.slow

BASE: dict[str, Any] = dict(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=64,
    vocab_size=500,
    micro_batch_size=2,
    global_batch_size=16,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    bf16=True,
    world_size=8,
)
EXPERTS: dict[str, Any] = dict(
    num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=32, moe_layer_freq=(0, 1)
)


@pytest.mark.parametrize(
    "fields",
    [
        dict(**EXPERTS, expert_model_parallel_size=4),
        dict(**EXPERTS, expert_model_parallel_size=4, expert_ranks_per_node=2),
        dict(
            **EXPERTS,
            expert_model_parallel_size=2,
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            sequence_parallel=True,
            enable_zbh1_pipeline=True,
        ),
        dict(context_parallel_size=4),
        dict(context_parallel_size=2, pipeline_model_parallel_size=2, zero_stage=0),
    ],
    ids=["experts", "experts over nodes", "experts, TP, PP", "ring", "ring, PP"],
)
def test_it_runs_and_needs_what_the_planner_says(fields: dict[str, Any]) -> None:
    config = Config.create(**{**BASE, **fields})
    found = rehearse(config, load_cluster("frontier"))
    assert not found.findings, found.findings
    predicted = memory_of_ranks(config)
    for run in found.ranks:
        ours = predicted[run.pipeline_rank]
        assert run.peak.total == pytest.approx(ours.total, rel=0.06)
        for name in CATEGORIES:
            here, there = getattr(run.peak, name), getattr(ours, name)
            assert abs(here - there) <= 0.06 * run.peak.total, (name, here, there)
