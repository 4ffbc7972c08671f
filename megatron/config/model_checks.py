"""Checks of the settings of model.py."""

from __future__ import annotations

from megatron.config.checks import Problems, check, multiple
from megatron.config.model import ACTIVATIONS
from megatron.config.settings import Sections

_ONE_OF = (
    " ".join(name for name in ACTIVATIONS if name != "exact_gelu"),
    *(f"exact_gelu {name}" for name in ACTIVATIONS if name not in ("exact_gelu", "geglu")),
)
CONFLICTS = """
    use_mup residual_multiplier
    lora_rank use_mup: muP has no rates for adapters
    lora_rank qk_clip: it would scale weights that are frozen
    mtp_num_layers embedding_layernorm: the last stage, which embeds tokens too, has no such norm
    mtp_num_layers position_embedding_type=learned_absolute: the last stage has no such positions
    moe_use_upcycling moe_shared_expert_intermediate_size: there is no source for a shared expert
    moe_shared_expert_intermediate_size add_bias_linear=true: shared experts have no biases
    parallel_residual norm_position: attention and MLP read the same input, which norms precede
    parallel_residual apply_residual_connection_post_layernorm: both move the residual connection
    norm_position apply_residual_connection_post_layernorm: both move the norms
    mtp_num_layers cuda_graph_impl: the output of a graph is one loss
    xielu num_experts: experts have no parameters of xIELU
""" + "\n".join(_ONE_OF)
NEEDED = """
    mtp_num_layers  mtp_loss_scaling_factor
    xielu=true  weight_decay_on_xielu_alphas
    num_experts  moe_router_bias
    lora_rank  lora_alpha lora_target
    use_mup=true  mup_base_hidden_size mup_base_num_layers mup_base_ffn_hidden_size
    use_mup=true  mup_base_num_attention_heads mup_base_num_key_value_heads mup_base_head_dim
    use_mup=true  mup_embedding_mult mup_output_mult mup_attn_scale_power
    moe_shared_expert_intermediate_size  moe_shared_expert_gate moe_shared_expert_overlap
    moe_router_score_function=sigmoid  moe_router_enable_expert_bias
    moe_router_num_groups  moe_router_group_topk moe_router_group_top_scores
    moe_router_group_topk  moe_router_num_groups
"""


@check("moe_router_topk")
def _router(config: Sections) -> Problems:
    model = config.model
    experts = model.num_experts
    topk = model.moe_router_topk
    groups = model.moe_router_num_groups
    chosen = model.moe_router_group_topk
    if experts is None:
        return
    if topk > experts:
        yield f"--moe-router-topk {topk} is more than --num-experts {experts}"
    if groups is None or chosen is None:
        return
    scores = model.moe_router_group_top_scores
    if experts % groups or chosen > groups or (scores is None and topk % chosen):
        yield (
            f"--moe-router-num-groups {groups} must divide --num-experts {experts}, and "
            f"--moe-router-group-topk {chosen} must be at most the number of groups and, without "
            f"--moe-router-group-top-scores, divide --moe-router-topk {topk}"
        )
    elif topk > experts // groups * chosen or (scores or 1) > experts // groups:
        yield (
            f"--moe-router-topk {topk} and --moe-router-group-top-scores {scores or 1} need more "
            f"experts than {chosen} of --moe-router-num-groups {groups} have with --num-experts "
            f"{experts}: lower them, or raise --moe-router-group-topk"
        )


@check("num_experts", "moe_router_load_balancing_type", "moe_aux_loss_coeff")
def _balancing(config: Sections) -> Problems:
    kinds = config.model.moe_router_load_balancing_type
    factors = config.model.moe_aux_loss_coeff
    if len(kinds) != len(factors) or len(set(kinds)) != len(kinds):
        yield (
            f"--moe-router-load-balancing-type {' '.join(kinds)} and --moe-aux-loss-coeff "
            f"{' '.join(f'{x:g}' for x in factors)}: give each type once, and a coefficient for "
            "each"
        )
    if "none" in kinds and any(factors):
        yield "--moe-router-load-balancing-type none has no loss: leave --moe-aux-loss-coeff out"


@check("num_experts", "expert_tensor_parallel_size")
def _expert_widths(config: Sections) -> Problems:
    yield from multiple(config, "moe_ffn_hidden_size", "expert_tensor_parallel_size")
    yield from multiple(config, "moe_shared_expert_intermediate_size", "tensor_model_parallel_size")


@check()
def _activations(config: Sections) -> Problems:
    model = config.model
    limits = model.activation_func_clamp_value is not None or model.glu_linear_offset
    if limits and not model.gated:
        yield (
            "--activation-func-clamp-value and --glu-linear-offset need a gated unit, such as "
            f"--swiglu or --quick-geglu: the activation is {model.activation}"
        )


@check("ffn_hidden_size")
def _upcycling(config: Sections) -> Problems:
    model = config.model
    width = model.moe_ffn_hidden_size
    experts = model.num_experts
    if not model.moe_use_upcycling or experts is None or width is None:
        return
    slices, rest = divmod(model.ffn_hidden_size, width)
    if rest or not slices or experts % slices or model.moe_router_topk % slices:
        yield (
            f"--moe-use-upcycling cuts the MLP's --ffn-hidden-size {model.ffn_hidden_size} into "
            f"parts of --moe-ffn-hidden-size {width}: their number must be "
            f"whole, and divide --num-experts {experts} and --moe-router-topk "
            f"{model.moe_router_topk}"
        )


@check("use_mup", "num_attention_heads", "kv_channels", "mup_base_hidden_size")
def _mup(config: Sections) -> Problems:
    model = config.model
    if model.use_mup and model.mup_base_num_attention_heads is None:
        head = model.mup_base_head_dim or model.kv_channels
        yield (
            f"--mup-base-num-attention-heads is missing: {model.num_attention_heads} heads of "
            f"{model.kv_channels}, in proportion to --mup-base-hidden-size "
            f"{model.mup_base_hidden_size}, are not a whole number of heads of {head}. Give this "
            "flag, or --mup-base-head-dim"
        )


@check("use_mup", "num_experts", "ffn_hidden_size", "mup_base_ffn_hidden_size")
def _mup_experts(config: Sections) -> Problems:
    model = config.model
    ffn = model.ffn_hidden_size
    base = model.mup_base_ffn_hidden_size
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        width = config.get(name)
        if model.use_mup and width is not None and width * base % ffn:
            yield (
                f"{config.written(name)}: experts of the base model are smaller in "
                f"proportion, {base} / {ffn} of it (--mup-base-ffn-hidden-size, "
                "--ffn-hidden-size), which is not a whole number"
            )


@check("mup_base_num_attention_heads", "mup_base_num_key_value_heads", "num_attention_heads")
def _mup_groups(config: Sections) -> Problems:
    model = config.model
    heads = model.num_attention_heads
    groups = model.num_key_value_heads
    base_heads = model.mup_base_num_attention_heads
    base_groups = model.mup_base_num_key_value_heads
    if base_heads % base_groups:
        yield (
            f"--mup-base-num-attention-heads {base_heads} is not a multiple of "
            f"--mup-base-num-key-value-heads {base_groups}"
        )
    elif config.optimizer.optimizer == "sgd" and heads * base_groups != groups * base_heads:
        yield (
            f"--optimizer sgd and --use-mup with {heads} heads in {groups} groups, and "
            f"{base_heads} in {base_groups} in the base model: queries would need another learning "
            "rate than keys and values of the same matrix. Use Adam, or groups of the same size in "
            "both models"
        )
