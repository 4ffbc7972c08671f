"""The planner's memory beside the dry run, in five layouts.

The campaign "memory" compares others.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import memory_model
from benchmarks.memory_layouts import LLAMA, SMALL, Shape


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        dict(num_layers_per_virtual_pipeline_stage=1, world_size=2),
        dict(
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            enable_zbh1_pipeline=True,
            world_size=4,
        ),
        dict(
            LLAMA,
            num_layers=8,
            enable_zbh1_pipeline=True,
            recompute_granularity="selective",
            recompute_modules=("mlp_act", "layernorm"),
            world_size=2,
        ),
        dict(
            pipeline_model_parallel_size=1,
            zero_stage=2,
            untie_embeddings_and_output_weights=True,
            world_size=2,
        ),
        dict(
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=1,
            sequence_parallel=True,
            zero_stage=3,
            untie_embeddings_and_output_weights=True,
            world_size=4,
        ),
    ],
    ids=[
        "2 chunks",
        "TP 2, SP, zb-h1",
        "zb-h1, activation and norms again",
        "DP 2, ZeRO 2, untied",
        "TP 2, SP, DP 2, ZeRO 3, untied",
    ],
)
def test_the_planners_memory_is_what_the_code_allocates(layout: dict[str, Any]) -> None:
    fields = {**SMALL, "num_layers": 4, "pipeline_model_parallel_size": 2, **layout}
    for row in memory_model.compare_formula(Shape("", "gpu", fields)):
        assert row.model == pytest.approx(row.found, rel=memory_model.TOTAL_LIMIT), row
        assert abs(row.worst_error) <= memory_model.CATEGORY_LIMIT, row
