"""Cases compared with one process: layouts, models, precisions.

`make test` runs the cases of TOGETHER, the campaign `parity` those of CAMPAIGN.

Some fields of a case are only for train():

    packed=True           packed samples in place of joined ones
    fused=True            all kernels, regardless of flags and machine
    steps=5               number of steps, instead of STEPS
    poison=(step, rank)   a gradient of this rank is not finite in this step, which all ranks skip
"""

import contextlib

import pytest

from megatron.config.parallel import SCHEDULES, V_SHAPED
from tests.helpers import frozen, late_weights, own_loss
from tests.helpers.fusions import force
from tests.helpers.tiny import LINEAR
from tests.helpers.training import STEPS, routes, train_in_process

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
FULL2 = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
BLOCK = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective")
CHEAP = dict(recompute_granularity="selective", recompute_modules=("mlp_act", "layernorm"))
NONE = {}
FROZEN = dict(pieces=frozen.__file__)
OWN_LOSS = dict(pieces=own_loss.__file__)
FREEZE = dict(freeze=("embedding", "layers.0", "layers.[12].mlp.*4h_to_h", "*.bias"))
LORA = dict(lora_rank=3, lora_alpha=4.0, lora_target=("self_attention", "dense_*"), clip_grad=0.05)


def layout(
    tp=1,
    pp=1,
    dp=1,
    schedule="1f1b",
    sp=False,
    zero=1,
    recompute=NONE,
    cp=1,
    **more,
):
    """Return (name, world size, fields) of one case.

    There are only as many layers and micro-batches as every stage, chunk and phase of the schedule
    needs: most of a case's time goes into messages between more processes than cores.
    """
    stages = pp * (1 if schedule in ("1f1b", "zb-h1") else 2)
    layers = more.get("num_layers", max(4, stages))
    fields = dict(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=sp,
        zero_stage=zero,
        context_parallel_size=cp,
        num_layers=layers,
        global_batch_size=4 * dp * more.get("micro_batch_size", 1) if pp <= 2 else 8,
        **recompute,
    )
    fields.update(more)
    if schedule == "interleaved":
        fields["num_layers_per_virtual_pipeline_stage"] = layers // (2 * pp)
    elif schedule != "1f1b":
        fields["pipeline_schedule"] = schedule
    shape = dict(tp=tp, pp=pp, dp=dp, cp=cp, sp=sp, schedule=schedule, zero=zero)
    name = "-".join(f"{k}={v}" for k, v in {**shape, **recompute, **more}.items())
    return name, tp * pp * dp * cp, fields


def train(rank, runs, steps=STEPS):
    """Run one rank of several runs, one after another; call through run_processes."""
    from megatron.layers import linear

    out = []
    for fields in runs:
        options = dict(fields)
        packed, fused, poison = (options.pop(name, None) for name in ("packed", "fused", "poison"))
        number = options.pop("steps", steps)
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
            patch.setattr(linear, "LEAST_TOKENS", 1)
            if fused:
                force(patch)
            recorded = stack.enter_context(routes()) if "num_experts" in options else {}
            done = train_in_process(rank, options, number, poison, bool(packed))
            out.append(done | {"routes": recorded})
    return out


# Every shape with each of its schedules; sequence parallelism, ZeRO stages and kinds of
# recomputation take turns.
SHAPES = [
    *[(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (2, 2, 1), (2, 1, 2)],
    *[(1, 2, 2), (1, 4, 1), (2, 2, 2), (4, 2, 1), (4, 1, 2), (2, 4, 1), (1, 4, 2)],
]
RECOMPUTED = [FULL, FULL2, BLOCK, SELECTIVE, CHEAP]
GRID = [
    layout(tp, pp, dp, schedule, tp > 1 and (number + variant) % 2 == 0, number // 2 % 2, recompute)
    for number, ((tp, pp, dp), schedule) in enumerate(
        (shape, schedule)
        for shape in SHAPES
        for schedule in (SCHEDULES if shape[1] > 1 else ("1f1b",))
    )
    for variant, recompute in enumerate((NONE, RECOMPUTED[number % len(RECOMPUTED)]))
]
GRID += [
    layout(tp=2, pp=2, sp=True, clip_grad_by_kind=("embedding=0.05", "vector=0.02")),
    layout(tp=2, dp=2, zero=3, **FROZEN),
    layout(dp=4, zero=2, recompute=SELECTIVE, bf16=True, **FROZEN),
    layout(tp=2, dp=2, sp=True, zero=3, recompute=FULL, **FREEZE),
    layout(tp=2, pp=2, schedule="zb-h1", **FREEZE),
    layout(tp=2, dp=2, zero=3, **LORA),
]

LLAMA = dict(
    num_key_value_heads=2,
    ffn_hidden_size=48,
    position_embedding_type="rope",
    normalization="rmsnorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
# Settings of the model families after which they are named.
FAMILIES = {
    "bloom": dict(position_embedding_type="alibi", embedding_layernorm=True),
    "neox": dict(
        position_embedding_type="rope",
        rotary_percent=0.5,
        parallel_residual="two_norms",
        exact_gelu=True,
        untie_embeddings_and_output_weights=True,
    ),
    "gptj": dict(
        position_embedding_type="rope", rotary_interleaved=True, parallel_residual="one_norm"
    ),
    "llama31": dict(LLAMA, rope_scaling="llama3", rope_original_positions=32, add_qkv_bias=True),
    "qwen3": dict(LLAMA, qk_layernorm=True, kv_channels=16, logit_z_loss=0.01),
    "layers": dict(
        LLAMA,
        qk_l2_norm=True,
        attention_output_gate=True,
        softmax_type="learnable",
        no_rope_freq=(4,),
        window_size=(5, 0),
        window_attn_skip_freq=(2,),
        rotary_local_base=100.0,
        rope_scaling="linear",
    ),
    "apertus": dict(LLAMA, swiglu=False, xielu=True, qk_layernorm=True),
    "dynamic": dict(
        LLAMA,
        rope_scaling="dynamic",
        rope_original_positions=5,
        attention_bias="all",
        clip_qkv=0.3,
        residual_multiplier=0.3,
        logits_scaling=0.2,
    ),
    "deepseek": {
        **LLAMA,
        "num_key_value_heads": 4,
        "multi_latent_attention": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 5,
        "qk_layernorm": True,
        "rotary_interleaved": True,
        "rope_scaling": "yarn",
        "rope_original_positions": 16,
        "yarn_mscale_all_dim": 0.7,
    },
    # larger embeddings: norms after small outputs have large gradients
    "linear": dict(LLAMA, **LINEAR, attention_output_gate=True, embedding_scale=8.0),
    "olmo2": dict(LLAMA, norm_position="post", qk_layernorm=True, qk_layernorm_over="all"),
    "gemma2": {
        **LLAMA,
        "untie_embeddings_and_output_weights": False,
        "swiglu": False,
        "geglu": True,
        "norm_position": "both",
        "apply_layernorm_1p": True,
        "embedding_scale": 32**0.5,
        "final_logit_softcapping": 2.0,
    },
}
MIXTURES = {
    **FAMILIES,
    "llama": LLAMA,
    "documents": dict(reset_attention_mask=True, reset_position_ids=True),
    "documents-rope": dict(LLAMA, reset_attention_mask=True, reset_position_ids=True),
    "documents-alibi": dict(position_embedding_type="alibi", reset_attention_mask=True),
    "post-norm-residual-xavier": dict(
        apply_residual_connection_post_layernorm=True, init_method_xavier_uniform=True
    ),
}

DOCUMENTS = dict(reset_attention_mask=True, reset_position_ids=True)
UNFUSED = dict(attention_backend="unfused")
BLOCKED = dict(attention_backend="blocked")
DROPOUT = dict(hidden_dropout=0.2, attention_dropout=0.1)
BF16 = dict(bf16=True)
FP16 = dict(fp16=True, initial_loss_scale=2.0**14, loss_scale_window=1000, hysteresis=1)
CHUNKS = dict(tp_comm_overlap=True, tp_comm_overlap_chunks=3)
WINDOW = dict(window_size=(5, 0), window_attn_skip_freq=(2,), softmax_scale=0.5)
CAP = dict(attention_logit_softcapping=0.5)
MULTI_QUERY = dict(num_key_value_heads=1)
ULYSSES = dict(cp_comm_type="a2a")
BOTH = dict(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 2))
LONGER = dict(seq_length=128, max_position_embeddings=128)
MUP = dict(
    use_mup=True,
    mup_base_hidden_size=8,
    mup_base_num_layers=2,
    mup_base_ffn_hidden_size=24,
    mup_base_head_dim=4,
    mup_embedding_mult=3.0,
    mup_output_mult=2.0,
)

# Newton-Schulz steps in fp32, compared with the reference's in float64; updates of Adam's size.
MUON = dict(
    optimizer="muon",
    muon_coefficient_type="simple",
    muon_fp32_matmul_prec="high",
    muon_extra_scale_factor=0.2,
)
NESTEROV = {**MUON, "muon_nesterov": True}
QK_CLIP = dict(qk_clip=True, qk_clip_threshold=0.1, qk_clip_alpha=0.3)
# Without biases: softmax does not depend on that of the keys, whose gradient is pure rounding.
# all of its warm-ups and constants within three steps
ADEMAMIX = dict(
    optimizer="ademamix",
    ademamix_alpha=5.0,
    ademamix_beta3=0.99,
    ademamix_alpha_warmup=2,
    ademamix_beta3_warmup=2,
)
LION = {**LLAMA, "optimizer": "lion", "lr": 1e-3}

EXPERTS = dict(
    LLAMA,
    num_experts=4,
    moe_ffn_hidden_size=24,
    moe_router_topk=2,
    moe_aux_loss_coeff=(0.1,),
    moe_z_loss_coeff=0.01,
)
BY_SEQUENCE = {**EXPERTS, "moe_router_load_balancing_type": ("seq_aux_loss",)}
BY_GLOBAL_BATCH = {**EXPERTS, "moe_router_load_balancing_type": ("global_aux_loss",)}
DROPS = {**EXPERTS, "moe_expert_capacity_factor": 1.0}
LATE_DROPS = {**DROPS, "moe_token_drop_policy": "position", "moe_input_jitter_eps": 0.1}
SHARED = dict(
    moe_shared_expert_intermediate_size=16,
    moe_shared_expert_gate=True,
    moe_shared_expert_overlap=True,
)
# Like DeepSeek-V3, with a dense first layer.
BIASED = dict(
    LLAMA,
    **SHARED,
    num_experts=8,
    moe_layer_freq=(0, 1, 1, 1),
    moe_ffn_hidden_size=16,
    moe_router_topk=4,
    moe_router_score_function="sigmoid",
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.5,
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.05,
    moe_router_load_balancing_type=("seq_aux_loss", "aux_loss"),
    moe_aux_loss_coeff=(0.05, 0.05),
)
BIASED_DROPS = {**BIASED, "moe_expert_capacity_factor": 1.0}
GPT_OSS = {
    **EXPERTS,
    "swiglu": False,
    "quick_geglu": True,
    "activation_func_clamp_value": 0.5,
    "glu_linear_offset": 1.0,
    "add_bias_linear": True,
    "moe_router_bias": True,
}
DRAWN = {**BIASED_DROPS, "moe_router_force_load_balancing": True}
TWO_NODES = dict(expert_ranks_per_node=2)
# As in Megatron-DeepSpeed: GPT-2's MLP with biases, one expert for each token.
SWITCH = dict(
    num_experts=4,
    moe_router_topk=1,
    moe_router_pre_softmax=True,
    moe_layer_freq=(0, 1, 0, 1),
    moe_aux_loss_coeff=(0.1,),
)
SHARED_LORA = {**LORA, "lora_target": ("self_attention", "shared_experts"), "freeze": ("layers.0",)}
MOE = dict(recompute_granularity="selective", recompute_modules=("core_attn", "moe"))
MOE_ACT = dict(recompute_granularity="selective", recompute_modules=("layernorm", "moe_act"))


def experts(ep, **more):
    """Return a case with experts divided over `ep` ranks."""
    return layout(expert_model_parallel_size=ep, **more)


EXPERT_SHAPES = [
    (1, dict(tp=2, sp=True)),
    (1, dict(pp=2, schedule="interleaved")),
    (2, dict(dp=2, zero=0)),
    (2, dict(tp=2, dp=2, sp=True, recompute=FULL)),
    (2, dict(pp=2, dp=2, schedule="zb-h1", recompute=MOE)),
    (2, dict(pp=2, dp=2, schedule="v-half", recompute=MOE_ACT)),
    (4, dict(tp=2, dp=4, rank_order="dp-pp-tp", recompute=MOE_ACT, **TWO_NODES)),
    (4, dict(cp=2, dp=2)),
    (2, dict(tp=2, cp=2, sp=True, packed=True, **DOCUMENTS)),
]


def folded(ep, etp=1, **more):
    """Return a case with experts over tensor, context and data ranks, each over `etp` of them."""
    return experts(ep, expert_tensor_parallel_size=etp, **more)


FOLDED_SHAPES = [
    # EP over TP; TP and DP; TP and CP; part of TP
    (2, 1, dict(tp=2, sp=True)),
    (2, 1, dict(tp=2, dp=2, zero=0)),
    (4, 1, dict(tp=2, dp=2, sp=True, zero=2, rank_order="tp-pp-dp")),
    (4, 1, dict(tp=2, cp=2, sp=True, packed=True, zero=3, **DOCUMENTS)),
    (2, 1, dict(tp=4, sp=True, recompute=MOE)),
    (4, 1, dict(tp=4, dp=2, sp=True, zero=3, zero_shard_size=1)),
    (4, 1, dict(tp=2, dp=4, sp=True, rank_order="pp-tp-dp", recompute=MOE_ACT, **TWO_NODES)),
    (1, 1, dict(tp=2, pp=2, sp=True, schedule="zb-h1")),
    (4, 1, dict(tp=4, pp=2, schedule="interleaved")),
    (1, 2, dict(tp=4, dp=2, sp=True, zero=0)),
    # experts over fewer ranks than attention, or more
    (2, 2, dict(tp=4, sp=True, zero=2)),
    (2, 2, dict(tp=4, recompute=MOE)),
    (2, 2, dict(dp=4, zero=3, packed=True, **DOCUMENTS)),
    (1, 2, dict(cp=2, recompute=MOE_ACT)),
    (2, 2, dict(pp=2, dp=4, schedule="zb-h1", zero=2)),
    (2, 4, dict(tp=2, dp=4, sp=True)),
    (1, 4, dict(tp=2, cp=2, zero=0)),
]

# Cases of every kind of parallelism, schedule, recomputation, precision, batch and kernel, with as
# few processes as possible: cases of the same world size share them.
TOGETHER = [
    layout(recompute=BLOCK, micro_batch_size=2),
    layout(tp=2, recompute=FULL2, gradient_accumulation_fusion=False, **CHUNKS, **DROPOUT),
    layout(tp=2, sp=True, recompute=FULL, micro_batch_size=2, reset_attention_mask=True, **DROPOUT),
    layout(pp=2, schedule="zb-h1", recompute=FULL, micro_batch_size=2, reset_attention_mask=True),
    layout(dp=2, **BF16, decoupled_lr=3e-3),
    layout(
        tp=2,
        sp=True,
        recompute=SELECTIVE,
        fused=True,
        packed=True,
        **BLOCKED,
        **WINDOW,
        **DOCUMENTS,
        **{**LLAMA, **MULTI_QUERY},
    ),
    layout(
        tp=2,
        pp=2,
        sp=True,
        schedule="interleaved",
        recompute=SELECTIVE,
        packed=True,
        **LLAMA,
        **DOCUMENTS,
    ),
    layout(tp=2, pp=2, schedule="zb-v", **FP16, poison=(1, 3)),
    layout(tp=2, sp=True, recompute=CHEAP, fused=True, **FAMILIES["olmo2"]),
    layout(dp=2, recompute=FULL, fused=True, **FAMILIES["gemma2"]),
    layout(tp=2, pp=2, sp=True, recompute=CHEAP, **FAMILIES["deepseek"]),
    layout(tp=2, zero=3, **{**FAMILIES["deepseek"], "q_lora_rank": None}),
    layout(
        tp=2,
        pp=2,
        sp=True,
        schedule="zb-h1",
        recompute=SELECTIVE,
        packed=True,
        **DOCUMENTS,
        **FAMILIES["linear"],
    ),
    layout(dp=2, zero=3, recompute=FULL, **FAMILIES["linear"]),
    layout(dp=2, zero=3, recompute=FULL2, gradient_accumulation_fusion=False, **ADEMAMIX),
    layout(tp=2, sp=True, **FAMILIES["linear"], **MUON),
    folded(2, tp=2, recompute=MOE, **EXPERTS, **MUON),
    folded(1, 2, dp=2, packed=True, **EXPERTS, **DOCUMENTS),
    layout(pp=2, dp=2, zero=2, schedule="zb-h1", overlap_grad_reduce=False),
    experts(4, dp=4, recompute=MOE_ACT, **TWO_NODES, **BIASED),
    folded(2, etp=2, tp=4, sp=True, recompute=MOE_ACT, **GPT_OSS),
    experts(2, cp=2, recompute=MOE, micro_batch_size=2, **DRAWN),
    layout(
        tp=2,
        dp=2,
        sp=True,
        recompute=FULL,
        attention_output_gate=True,
        **MUON,
        **QK_CLIP,
        **{**LLAMA, **MULTI_QUERY},
    ),
    layout(pp=4, schedule="zb-h1", num_layers=6, pipeline_layout="2,1,2,1", global_batch_size=3),
    layout(pp=2, dp=2, zero=2, schedule="v-half", pipeline_layout="1,2,1,1", num_layers=5, **LLAMA),
    layout(pp=2, dp=2, zero=2, schedule="interleaved", pieces=late_weights.__file__),
    layout(tp=2, pp=2, sp=True, **FREEZE),
    layout(tp=2, pp=2, sp=True, recompute=SELECTIVE, steps=3, **LORA, **{**LLAMA, **MULTI_QUERY}),
    layout(cp=2, recompute=SELECTIVE, packed=True, micro_batch_size=2, **DOCUMENTS, **LLAMA),
    layout(cp=4, **BOTH, **FAMILIES["qwen3"], reset_attention_mask=True, softmax_type="learnable"),
    # The components of gpt-1t-frontier, with a different rank order.
    layout(
        tp=2, pp=2, dp=2, sp=True, schedule="interleaved", recompute=CHEAP, rank_order="dp-pp-tp"
    ),
]
# Two steps are enough to use the moments once; a loss scale falls in the third.
TOGETHER = [
    (name, size, {"steps": 3 if "poison" in fields else 2, **fields})
    for name, size, fields in TOGETHER
]
MTP = dict(LLAMA, mtp_num_layers=2, mtp_loss_scaling_factor=0.3)
LOSSES = [
    layout(**{**loss, **shape})
    for loss in (OWN_LOSS, MTP, {**MTP, "untie_embeddings_and_output_weights": False})
    for shape in (
        dict(tp=2, sp=True, recompute=FULL, micro_batch_size=2),
        dict(tp=2, pp=2, schedule="zb-h1"),
        dict(pp=2, dp=2, schedule="interleaved", zero=2),
        dict(tp=2, pp=2, sp=True, schedule="v-half"),
        dict(tp=4, cp=2, sp=True, zero=3, vocab_size=17),  # the last rank has no column
        dict(cp=2, dp=2, zero=0, **BF16),
    )
]
LOSSES += [
    experts(2, pp=2, dp=2, steps=2, schedule="zb-h1", **{**BIASED, **MTP}),
    layout(tp=2, dp=2, sp=True, zero=3, packed=True, hidden_dropout=0.2, **MTP, **DOCUMENTS),
]
CONTEXT = [
    layout(cp=4, recompute=FULL, **LLAMA),
    layout(cp=3, seq_length=24, max_position_embeddings=24, micro_batch_size=2),
    layout(cp=2, dp=2, zero=0),
    layout(cp=2, dp=2, rank_order="dp-pp-tp", **FAMILIES["gemma2"]),
    layout(tp=2, cp=2, **FAMILIES["neox"]),
    layout(tp=2, cp=2, recompute=SELECTIVE, packed=True, **DOCUMENTS, **FAMILIES["layers"]),
    layout(cp=4, **BOTH, **FAMILIES["layers"]),
    layout(tp=2, cp=2, sp=True, packed=True, **DOCUMENTS, **FAMILIES["deepseek"]),
    layout(cp=4, **BOTH, **FAMILIES["deepseek"]),
    layout(cp=2, dp=2, **FAMILIES["dynamic"]),
    layout(tp=2, cp=4, sp=True, packed=True, **WINDOW, **DOCUMENTS, **{**LLAMA, **MULTI_QUERY}),
    layout(pp=2, cp=2, schedule="interleaved", recompute=BLOCK, **FAMILIES["bloom"]),
    layout(pp=4, cp=2, schedule="zb-h1", packed=True, **DOCUMENTS, **LLAMA),
    layout(tp=2, pp=2, cp=2, sp=True, schedule="zb-h1", recompute=CHEAP, **FAMILIES["olmo2"]),
    layout(cp=4, fused=True, **BLOCKED, **WINDOW, **CAP, **MULTI_QUERY),
    layout(cp=2, packed=True, position_embedding_type="alibi", **DOCUMENTS),
    # dropout masks, also of rows that come from both of a rank's chunks of the sequence
    layout(cp=2, recompute=SELECTIVE, **LONGER, **DROPOUT),
    layout(tp=2, cp=2, fused=True, **BLOCKED, **LONGER, **DROPOUT, **LLAMA),
    layout(
        tp=3,
        cp=2,
        sp=True,
        hidden_size=48,
        num_attention_heads=6,
        seq_length=36,
        max_position_embeddings=36,
        hidden_dropout=0.2,
    ),
    # exchange of heads
    layout(cp=2, fused=True, micro_batch_size=2, **ULYSSES, **BLOCKED, **DROPOUT),
    layout(cp=4, packed=True, **ULYSSES, **DOCUMENTS, **LLAMA),
    layout(tp=2, cp=2, sp=True, recompute=SELECTIVE, **ULYSSES, **{**LLAMA, **MULTI_QUERY}),
    layout(cp=2, dp=2, **ULYSSES, **MUON, **QK_CLIP, **LLAMA),
    layout(cp=4, **BOTH, **FAMILIES["bloom"]),
    layout(tp=2, cp=4, sp=True, **BOTH, **WINDOW, **LLAMA, num_attention_heads=8),
    # 16 bits
    *[
        layout(**shape, **precision)
        for precision in (BF16, FP16)
        for shape in (
            dict(cp=2),
            dict(tp=2, cp=2, sp=True, **ULYSSES),
            dict(pp=2, cp=2, schedule="zb-h1", recompute=FULL, **LLAMA),
        )
    ],
    layout(cp=2, dp=2, poison=(1, 2)),
]
SHARDED = [
    *[
        layout(
            dp=4, zero=stage, zero_shard_size=inner, zero_state_shard_size=states, steps=5, **LLAMA
        )
        for stage in (1, 2, 3)
        for inner, states in ((1, 1), (1, 2), (2, 2), (2, 4), (4, 4))
    ],
    *[
        layout(dp=2, zero=3, recompute=mode, steps=5, **precision)
        for mode in (NONE, FULL, BLOCK, SELECTIVE)
        for precision in ({}, BF16, FP16)
    ],
    *[
        layout(pp=2, dp=2, zero=2, schedule=schedule, **precision)
        for schedule in SCHEDULES
        for precision in ({}, BF16, FP16)
    ],
    layout(zero=3),
    layout(zero=2, **BF16),
    layout(tp=2, zero=3, sp=True, packed=True, **DOCUMENTS, **LLAMA),
    layout(tp=2, dp=2, zero=3, steps=5, **DROPOUT),
    layout(tp=2, dp=2, zero=2, sp=True, fused=True, **FP16, poison=(1, 2)),
    layout(dp=4, zero=3, zero_shard_size=2, **FP16, poison=(1, 2)),
    layout(dp=2, zero=3, overlap_grad_reduce=False, overlap_param_gather=False),
    layout(cp=2, dp=2, zero=3, **LLAMA),
    layout(dp=4, zero=3, zero_shard_size=2, **MUON, **QK_CLIP, **{**LLAMA, **MULTI_QUERY}),
    layout(tp=2, dp=2, zero=2, **MUON, **MUP, **FAMILIES["qwen3"]),
    layout(dp=2, zero=3, clip_grad_by_kind=("embedding=0.05", "vector=0.02")),
    *[
        layout(**shape, cpu_offload=True, **settings)
        for shape in (
            dict(tp=2, dp=2, zero=3, sp=True),
            dict(pp=2, dp=2, schedule="interleaved"),
            dict(dp=4, zero=2, zero_shard_size=2),
        )
        for settings in (BF16, {**FP16, "poison": (1, 2)}, {**MUON, **QK_CLIP, **LLAMA})
    ],
    experts(2, dp=2, cpu_offload=True, **MUON, **EXPERTS),
    experts(2, dp=2, zero=3, steps=5, **DROPS),
    experts(4, dp=4, zero=3, zero_shard_size=2, **EXPERTS),
    experts(2, tp=2, dp=2, sp=True, zero=3, steps=5, **BIASED),
    experts(2, pp=2, dp=2, schedule="interleaved", zero=2, **BY_GLOBAL_BATCH),
    experts(2, dp=2, zero=3, **FP16, **EXPERTS, poison=(1, 1)),
    experts(2, dp=4, zero=3, zero_shard_size=2, **MUON, **EXPERTS),
    experts(4, dp=4, zero=2, zero_shard_size=2, zero_state_shard_size=2, **MUON, **EXPERTS),
]
CAMPAIGN = [
    *GRID,
    *LOSSES,
    layout(tp=2, pp=2, sp=True, schedule="zb-h1", recompute=FULL, **FROZEN),
    layout(pp=4, cpu_offload=True, **FREEZE, **MUON),
    layout(tp=2, pp=2, dp=2, sp=True, schedule="interleaved", **{**LION, **LORA}),
    layout(tp=4, sp=True, recompute=CHEAP, **LORA, **{**LLAMA, **MULTI_QUERY}),
    layout(tp=2, pp=2, sp=True, schedule="zb-h1", recompute=FULL, **LORA),
    layout(tp=2, dp=2, zero=2, fused=True, **LORA, **FAMILIES["gptj"], **BF16),
    layout(tp=2, sp=True, fused=True, **CHUNKS, **LORA, **FAMILIES["neox"]),
    layout(cp=2, dp=2, zero=0, **LORA, **LLAMA),
    layout(tp=2, sp=True, **LORA, **FAMILIES["deepseek"]),
    layout(tp=2, pp=2, recompute=SELECTIVE, **LORA, **FAMILIES["deepseek"]),
    layout(tp=2, dp=2, zero=3, sp=True, **LORA, **FAMILIES["linear"]),
    folded(2, tp=2, sp=True, **SHARED_LORA, **BIASED),
    folded(1, 2, tp=4, dp=2, zero=2, **SHARED_LORA, **BIASED),
    experts(2, pp=2, dp=2, **FREEZE, **BIASED),
    layout(pp=2, num_layers=7),
    layout(tp=2, pp=2, schedule="zb-h1", recompute=FULL, **UNFUSED, **WINDOW, **CAP, **MULTI_QUERY),
    layout(tp=4, sp=True, fused=True, **BLOCKED, **CAP, **DROPOUT, num_key_value_heads=2),
    layout(
        tp=2,
        dp=2,
        zero=0,
        fused=True,
        **UNFUSED,
        position_embedding_type="alibi",
        squared_relu=True,
    ),
    layout(pp=2, dp=2, schedule="interleaved", recompute=FULL, fused=True, **UNFUSED, **DROPOUT),
    layout(tp=2, dp=2, sp=True, zero=3, fused=True, recompute=CHEAP, **FAMILIES["gemma2"]),
    experts(2, dp=4, zero=3, zero_shard_size=2, recompute=MOE, **BIASED),
    layout(tp=2, cp=2, sp=True, recompute=CHEAP, fused=True, **WINDOW, **CAP, **LLAMA),
    layout(cp=2, pp=2, schedule="zb-h1", recompute=FULL, hidden_dropout=0.2, **BF16),
    layout(tp=2, pp=2, cp=2, sp=True, schedule="interleaved", **ULYSSES, **DROPOUT),
    layout(pp=2, cp=2, schedule="v-half", recompute=FULL, packed=True, **DOCUMENTS, **LLAMA),
    layout(tp=2, pp=2, cp=2, sp=True, schedule="v-min", **ULYSSES, **DROPOUT),
    layout(pp=2, cp=2, dp=2, schedule="zb-v", recompute=SELECTIVE, hidden_dropout=0.2, **BF16),
    layout(tp=2, pp=2, sp=True, schedule="dualpipev", **CHUNKS, rank_order="pp-dp-tp"),
    layout(pp=2, dp=2, schedule="v-half", **MUON, **QK_CLIP, **LLAMA),
    layout(pp=4, schedule="v-half", **FP16, poison=(1, 2)),
    *SHARDED,
    *CONTEXT,
    *[
        layout(tp=2, pp=2, sp=True, schedule="interleaved", **mixture)
        for mixture in MIXTURES.values()
    ],
    *[
        layout(**shape, **mixture)
        for mixture in FAMILIES.values()
        for shape in (
            dict(tp=2, sp=True, recompute=CHEAP, fused=True),
            dict(tp=2, pp=2, schedule="zb-h1", recompute=FULL),
            dict(pp=2, recompute=SELECTIVE),
            # with norms after layers, a third step in bf16 is 4.5 % off, even on one process
            dict(dp=2, fused=True, **BF16, fp32_residual_connection=True, steps=2),
            # norms after small outputs have large gradients, which need a lower loss scale
            dict(tp=2, pp=2, sp=True, **{**FP16, "initial_loss_scale": 2.0**12}),
        )
    ],
    *[layout(tp=2, sp=True, **DROPOUT, **FAMILIES[name]) for name in ("bloom", "gptj", "gemma2")],
    *[
        layout(**shape, **MUP, **FAMILIES[name])
        for name in ("bloom", "gptj", "qwen3", "olmo2")
        for shape in (
            dict(tp=2, pp=2, dp=2, zero=0),
            dict(tp=2, pp=2, schedule="zb-h1", recompute=FULL),
            dict(dp=2, fused=True, **BF16),
            dict(tp=2, sp=True, **{**FP16, "initial_loss_scale": 2.0**12}),
        )
    ],
    layout(tp=4, sp=True, **MUP, **{**LLAMA, **MULTI_QUERY}),
    layout(tp=2, dp=2, **MUP, **{**LLAMA, **MULTI_QUERY}),
    layout(tp=2, pp=2, dp=2, sp=True, **MUP, **MUON, **FAMILIES["qwen3"]),
    # experts
    *[
        experts(ep, steps=5, **shape, **kind)
        for kind in (EXPERTS, BY_SEQUENCE, BY_GLOBAL_BATCH, DROPS, LATE_DROPS, SWITCH, BIASED)
        for ep, shape in EXPERT_SHAPES
    ],
    *[
        experts(ep, steps=5, **shape, **kind)
        for ep, shape, kind in (
            (2, dict(dp=2, recompute=MOE), {**EXPERTS, **MUON}),
            (1, dict(cp=4, **BOTH), DROPS),
            (2, dict(tp=2, pp=2, dp=2, sp=True, schedule="zb-h1"), BIASED),
            (2, dict(dp=2, fused=True, micro_batch_size=2, **DROPOUT), BY_SEQUENCE),
            (2, dict(tp=2, cp=2, sp=True, recompute=MOE, rank_order="dp-pp-tp"), BIASED),
            (4, dict(pp=2, dp=4, schedule="zb-h1", **TWO_NODES), BIASED_DROPS),
            (2, dict(tp=2, cp=2, dp=2, sp=True, recompute=MOE, micro_batch_size=2), DRAWN),
            # a silent error of Megatron Core (docs/decisions.md)
            (1, dict(tp=2), {**BIASED, "qk_layernorm": True}),
            # optimizers, and muP
            (2, dict(cp=2, zero=0), {**SWITCH, **MUON}),
            (2, dict(tp=2, dp=2, sp=True), {**BIASED, **NESTEROV}),
            (2, dict(pp=2, dp=2, schedule="zb-h1"), {**SWITCH, **MUP}),
            (2, dict(tp=2, cp=2), {**BIASED, **MUP, **MUON}),
        )
    ],
    *[
        folded(ep, etp, steps=5, **shape, **kind)
        for kind in (EXPERTS, LATE_DROPS, SWITCH, BIASED_DROPS, {**BIASED, **MUON})
        for ep, etp, shape in FOLDED_SHAPES
    ],
    *[
        folded(3, etp, **shape, **{**EXPERTS, "num_experts": 6})
        for etp, shape in (
            (1, dict(tp=2, dp=3, sp=True)),
            (1, dict(tp=2, dp=3, zero=0)),
            (1, dict(tp=4, dp=3, sp=True)),
        )
    ],
    folded(2, tp=2, sp=True, **FAMILIES["gptj"], num_experts=4, moe_router_topk=2),
    # With four of eight experts for each token, bf16 soon chooses different experts than fp32, even
    # on one process: the gradient norm of the second step is 3 % off.
    *[
        experts(2, **shape, **kind, **precision)
        for kind, precision in (
            (EXPERTS, BF16),
            (EXPERTS, FP16),
            (BIASED, {**BF16, "steps": 1}),
            (BIASED, FP16),
        )
        for shape in (dict(dp=2), dict(tp=2, pp=2, dp=2, sp=True))
    ],
    experts(4, dp=4, **TWO_NODES, **BIASED, **BF16, steps=1),
    experts(4, dp=4, **TWO_NODES, **BIASED, **FP16),
    experts(2, dp=2, poison=(1, 1), **FP16, **BIASED),
    experts(2, tp=2, dp=2, zero=0, poison=(1, 2), **EXPERTS),
    experts(2, dp=2, clip_grad_by_kind=("output=0.02", "hidden=0.1"), zero=0, **EXPERTS),
    # numbers of micro-batches that are not multiples of the number of stages
    layout(pp=2, schedule="interleaved", global_batch_size=5),
    layout(pp=4, schedule="interleaved", global_batch_size=3),  # fewer micro-batches than stages
    layout(pp=4, schedule="zb-h1", global_batch_size=3),
    *[
        layout(pp=4, schedule=schedule, global_batch_size=count, **more)
        for schedule in V_SHAPED
        for count, more in ((1, {}), (3, DROPOUT), (9, dict(num_layers=9)))
    ],
    layout(tp=2, pp=2, dp=2, sp=True, micro_batch_size=2),
    # the order of the ranks
    layout(tp=2, pp=2, dp=2, sp=True, schedule="zb-h1", rank_order="pp-dp-tp"),
    layout(tp=2, pp=2, dp=2, zero=0, rank_order="pp-tp-dp"),
    # dropout
    layout(recompute=SELECTIVE, **DROPOUT),
    layout(tp=2, pp=2, sp=True, schedule="zb-h1", **DROPOUT),
    layout(tp=2, pp=2, sp=True, packed=True, **DROPOUT, **LLAMA, **DOCUMENTS),
    layout(tp=2, fused=True, **UNFUSED, **DROPOUT),
    layout(pp=4, dp=2, schedule="zb-h1", **DROPOUT),
    # Kernels: they change only the order of fp32 sums.
    layout(tp=2, pp=2, sp=True, recompute=FULL, fused=True, **UNFUSED),
    layout(tp=2, pp=2, sp=True, schedule="interleaved", fused=True, **LLAMA),
    layout(
        pp=2,
        fused=True,
        **UNFUSED,
        position_embedding_type="rope",
        apply_layernorm_1p=True,
        add_bias_linear=False,
    ),
    layout(tp=2, pp=2, sp=True, schedule="zb-h1", recompute=SELECTIVE, fused=True, **BLOCKED),
    layout(
        tp=2,
        pp=2,
        sp=True,
        recompute=SELECTIVE,
        fused=True,
        packed=True,
        **UNFUSED,
        **LLAMA,
        **DOCUMENTS,
    ),
    # products in chunks
    layout(tp=2, pp=2, sp=True, schedule="zb-h1", **CHUNKS),
    # windows and caps, key and value heads that ranks share
    layout(
        tp=2, pp=2, sp=True, schedule="interleaved", packed=True, **WINDOW, **LLAMA, **DOCUMENTS
    ),
    layout(tp=2, position_embedding_type="alibi", **WINDOW),
    layout(tp=2, dp=2, sp=True, fused=True, **BLOCKED, **WINDOW, **CAP, **LLAMA),
    layout(pp=2, schedule="interleaved", fused=True, **UNFUSED, **WINDOW, **CAP, **DROPOUT),
    layout(tp=4, pp=2, sp=True, schedule="interleaved", **{**LLAMA, **MULTI_QUERY}),
    layout(tp=4, dp=2, **LLAMA),
    layout(tp=2, dp=2, zero=0, **MULTI_QUERY, **CHUNKS),
    layout(tp=2, pp=2, sp=True, schedule="zb-h1", **MULTI_QUERY, **BF16),
    layout(tp=4, sp=True, gradient_accumulation_fusion=False, **LLAMA, **FP16),
    # optimizers
    *[
        layout(**shape, **optimizer)
        for optimizer in (
            MUON,
            {**NESTEROV, **LLAMA},
            {**LION, **QK_CLIP},
            {**LLAMA, **ADEMAMIX, "decoupled_lr": 3e-3},
        )
        for shape in (
            dict(tp=2, pp=2, dp=2),
            dict(tp=2, pp=2, dp=2, sp=True, schedule="interleaved"),
            dict(tp=4),
            dict(tp=4, sp=True),
            dict(dp=4),
            dict(tp=2, dp=2, zero=0),
        )
    ],
    layout(tp=2, dp=2, sp=True, **MUON, **QK_CLIP, **LLAMA, **BF16),
    layout(tp=2, pp=2, schedule="zb-h1", recompute=FULL, **QK_CLIP, **UNFUSED, **DOCUMENTS),
    layout(tp=2, fused=True, packed=True, **QK_CLIP, **BLOCKED, **WINDOW, **DOCUMENTS, **LLAMA),
    layout(pp=2, dp=2, poison=(1, 2), **MUON, **QK_CLIP),
    # 16 bits
    *[
        layout(**shape, **precision)
        for precision in (BF16, FP16)
        for shape in (
            dict(),
            dict(tp=2, pp=2, sp=True),
            dict(tp=2, pp=2, schedule="zb-h1", recompute=FULL),
            dict(pp=2, dp=2, schedule="interleaved"),
            dict(dp=2, zero=0),
        )
    ],
    layout(tp=2, pp=2, sp=True, schedule="interleaved", **BF16, main_grads_dtype="bf16"),
    # gradients that are not finite
    *[
        layout(**shape, **FP16, poison=(1, rank))
        for rank in (0, 3)
        for shape in (dict(tp=2, pp=2), dict(pp=2, dp=2, schedule="zb-h1"))
    ],
    layout(pp=2, dp=2, poison=(1, 2)),
]
