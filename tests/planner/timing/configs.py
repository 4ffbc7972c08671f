"""Random configurations for the tests of the time model, and machines for them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from megatron.config import Config

SIZES = dict(num_layers=8, hidden_size=256, num_attention_heads=8, seq_length=512, vocab_size=3000)

_KINDS = st.sampled_from(
    [
        {},
        dict(swiglu=True),
        dict(add_bias_linear=False, hidden_dropout=0.0),
        dict(num_key_value_heads=4),
        dict(num_key_value_heads=1),
        dict(window_size=(99, 0)),
        dict(position_embedding_type="rope", normalization="rmsnorm"),
        dict(untie_embeddings_and_output_weights=True),
        dict(attention_backend="unfused"),
        dict(attention_backend="blocked"),
        dict(fp32_residual_connection=True),
        dict(apply_residual_connection_post_layernorm=True),
        dict(position_embedding_type="alibi"),
        dict(
            bias_dropout_fusion=False,
            persist_layer_norm=False,
            bias_gelu_fusion=False,
            cross_entropy_loss_fusion=False,
        ),
        dict(cross_entropy_chunk_tokens=100),
        dict(gradient_accumulation_fusion=False),
        dict(zero_stage=0),
        dict(overlap_grad_reduce=False, overlap_param_gather=False),
        dict(async_tensor_model_parallel_allreduce=False),
    ]
)
RECOMPUTE: tuple[dict[str, Any], ...] = (
    {},
    dict(recompute_granularity="selective"),
    dict(recompute_granularity="full"),
    dict(recompute_granularity="full", recompute_num_layers=3),
    dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
    dict(recompute_granularity="selective", recompute_modules=("mlp_act", "layernorm")),
)


@st.composite
def configs(draw: Any) -> Config:
    """Draw a run on up to 64 devices."""
    t, p = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    d, b = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    m = draw(st.integers(1, 9))
    schedules: list[dict[str, Any]] = [{}]
    if p > 1:
        schedules += [
            dict(num_layers_per_virtual_pipeline_stage=8 // (2 * p)),
            dict(enable_zbh1_pipeline=True),
            dict(pipeline_layout={2: "5,3", 4: "1,3,3,1"}[p]),
        ]
    schedule = draw(st.sampled_from(schedules))
    tensor: dict[str, Any] = {}
    if t > 1:
        tensor = dict(sequence_parallel=draw(st.booleans()), tp_comm_overlap=draw(st.booleans()))
    sizes = dict(
        tensor_model_parallel_size=t,
        pipeline_model_parallel_size=p,
        world_size=t * p * d,
        micro_batch_size=b,
        global_batch_size=b * d * m,
    )
    precision = {draw(st.sampled_from(["fp16", "bf16"])): True}
    kind = draw(_KINDS) | draw(st.sampled_from(RECOMPUTE))
    return Config.create(**SIZES | kind | schedule | tensor | precision | sizes)


def run(**more: Any) -> Config:
    """Return a small run in bf16 on as many devices as its layout needs."""
    t, p = more.get("tensor_model_parallel_size", 1), more.get("pipeline_model_parallel_size", 1)
    return Config.create(**{**SIZES, "bf16": True, "world_size": t * p, **more})
