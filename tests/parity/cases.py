"""The layouts of the parity grid: name -> configuration fields. The world size follows from the fields."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
FULL2 = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
BLOCK = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective")
CHEAP = dict(recompute_granularity="selective", recompute_modules=("mlp_act", "layernorm"))
NONE: dict[str, Any] = {}


def layout(
    tp: int = 1, pp: int = 1, dp: int = 1, schedule: str = "1f1b", sp: bool = False, zero: int = 1,
    recompute: dict[str, Any] = NONE, **more: Any,
) -> tuple[str, int, dict[str, Any]]:
    """(name, world size, fields) of one case.

    As few layers and micro-batches as let each stage, chunk and phase of the schedule have its turn: what a case costs
    is messages between more processes than cores.
    """
    layers = more.get("num_layers", 8 if pp == 4 and schedule == "interleaved" else 4)
    fields = dict(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, sequence_parallel=sp, zero_stage=zero,
        num_layers=layers, global_batch_size=4 * dp * more.get("micro_batch_size", 1) if pp <= 2 else 8, **recompute,
    )
    fields.update(more)
    if schedule == "interleaved":
        fields["num_layers_per_virtual_pipeline_stage"] = layers // (2 * pp)
    elif schedule == "zb-h1":
        fields["enable_zbh1_pipeline"] = True
    modules = "_".join(recompute.get("recompute_modules", ()))
    kind = modules or recompute.get("recompute_method") or recompute.get("recompute_granularity") or "none"
    extra = "".join(f"-{k}={v}" for k, v in more.items())
    name = f"tp{tp}{'sp' if sp else ''}-pp{pp}-dp{dp}-{schedule}-zero{zero}-recompute_{kind}{extra}"
    return name, tp * pp * dp, fields


def params(cases: Iterable[tuple[str, int, dict[str, Any]]], quick: Iterable[int] = ()) -> list[Any]:
    """The cases for pytest.mark.parametrize; those at the indices `quick` are part of the quick tests."""
    return [
        pytest.param(world_size, fields, id=name, marks=() if i in quick else pytest.mark.slow)
        for i, (name, world_size, fields) in enumerate(cases)
    ]


GRID = [
    # one process
    layout(zero=0),
    layout(zero=1),
    layout(recompute=FULL),
    layout(recompute=FULL2),
    layout(recompute=BLOCK),
    layout(recompute=SELECTIVE),
    layout(recompute=CHEAP),
    # two
    layout(tp=2),
    layout(tp=2, sp=True),
    layout(tp=2, sp=True, recompute=FULL),
    layout(tp=2, recompute=SELECTIVE, zero=0),
    layout(pp=2),
    layout(pp=2, schedule="interleaved"),
    layout(pp=2, schedule="zb-h1"),
    layout(pp=2, schedule="zb-h1", recompute=FULL),
    layout(pp=2, schedule="interleaved", recompute=BLOCK, zero=0),
    layout(dp=2, zero=0),
    layout(dp=2, zero=1),
    # four
    layout(tp=4),
    layout(tp=2, pp=2, sp=True, schedule="zb-h1", recompute=CHEAP),
    layout(tp=4, sp=True, recompute=SELECTIVE),
    layout(tp=2, pp=2),
    layout(tp=2, pp=2, schedule="interleaved"),
    layout(tp=2, pp=2, schedule="zb-h1"),
    layout(tp=2, pp=2, sp=True),
    layout(tp=2, pp=2, sp=True, schedule="interleaved", recompute=FULL),
    layout(tp=2, pp=2, sp=True, schedule="zb-h1"),
    layout(tp=2, dp=2, zero=0),
    layout(tp=2, dp=2, sp=True, zero=1),
    layout(pp=2, dp=2, zero=0),
    layout(pp=2, dp=2, schedule="interleaved", zero=1),
    layout(pp=2, dp=2, schedule="zb-h1", zero=1, recompute=SELECTIVE),
    layout(pp=4),
    layout(pp=4, schedule="interleaved"),
    layout(pp=4, schedule="zb-h1"),
    # eight
    layout(tp=2, pp=2, dp=2),
    layout(tp=2, pp=2, dp=2, sp=True, schedule="interleaved", recompute=FULL),
    layout(tp=2, pp=2, dp=2, sp=True, schedule="zb-h1"),
    layout(tp=2, pp=2, dp=2, sp=True, schedule="interleaved", zero=0),
    layout(tp=4, pp=2, sp=True, schedule="interleaved"),
    layout(tp=4, pp=2, schedule="zb-h1", recompute=FULL),
    layout(tp=4, dp=2, sp=True),
    layout(tp=2, pp=4, sp=True, schedule="interleaved", recompute=SELECTIVE),
    layout(tp=2, pp=4, schedule="zb-h1"),
    layout(pp=4, dp=2, schedule="interleaved"),
    layout(pp=4, dp=2, schedule="zb-h1", zero=0),
    layout(tp=2, pp=2, dp=2, sp=True, schedule="interleaved", recompute=CHEAP),  # what gpt-1t-frontier is made of
]

LLAMA = dict(
    num_key_value_heads=2, ffn_hidden_size=48, position_embedding_type="rope", normalization="rmsnorm", swiglu=True,
    add_bias_linear=False, untie_embeddings_and_output_weights=True,
)
MIXTURES = {
    "llama": LLAMA,
    "llama-tied-layernorm": {**LLAMA, "untie_embeddings_and_output_weights": False, "normalization": "layernorm"},
    "alibi-squared-relu": dict(position_embedding_type="alibi", squared_relu=True),
    "partial-rope-1p": dict(position_embedding_type="rope", rotary_percent=0.5, apply_layernorm_1p=True),
    "documents": dict(reset_attention_mask=True, reset_position_ids=True),
    "documents-rope": dict(LLAMA, reset_attention_mask=True, reset_position_ids=True),
    "documents-alibi": dict(position_embedding_type="alibi", reset_attention_mask=True),
    "post-norm-residual-xavier": dict(apply_residual_connection_post_layernorm=True, init_method_xavier_uniform=True),
}
