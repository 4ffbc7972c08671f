"""Checks of the settings of model.py."""

from __future__ import annotations

from megatron.config.settings import Problems, Sections, all_options, check, multiple


@check("hidden_size", "num_attention_heads", "num_key_value_heads")
def _heads(config: Sections) -> Problems:
    if config.model.kv_channels is None:
        remedy = ", or give the width of a head with --kv-channels"
        yield from multiple(config, "hidden_size", "num_attention_heads", remedy)
    yield from multiple(config, "num_attention_heads", "num_key_value_heads")


@check("seq_length", "max_position_embeddings", "position_embedding_type")
def _positions(config: Sections) -> Problems:
    model = config.model
    if (
        model.position_embedding_type == "learned_absolute"
        and model.seq_length > model.max_position_embeddings
    ):
        yield (
            f"--seq-length {model.seq_length} is longer than --max-position-embeddings "
            f"{model.max_position_embeddings}: learned positions must cover the sequence; raise "
            "the latter or use --position-embedding-type rope"
        )


@check("position_embedding_type", "mtp_num_layers")
def _later_tokens(config: Sections) -> Problems:
    model = config.model
    if model.mtp_num_layers and model.position_embedding_type == "learned_absolute":
        yield (
            f"--mtp-num-layers {model.mtp_num_layers} embeds tokens on the last stage, which does "
            "not have the positions of --position-embedding-type learned_absolute: use rope"
        )
    factor = all_options()["mtp_loss_scaling_factor"]
    if not model.mtp_num_layers and model.mtp_loss_scaling_factor != factor.default:
        yield f"{factor.written(model.mtp_loss_scaling_factor)} needs --mtp-num-layers N"


@check("position_embedding_type", "kv_channels", "rotary_percent")
def _rotary_width(config: Sections) -> Problems:
    model = config.model
    if model.position_embedding_type == "rope":
        name = "--kv-channels (by default --hidden-size / --num-attention-heads)"
        head = model.kv_channels
        if model.multi_latent_attention:
            name, head = "--qk-pos-emb-head-dim", model.qk_pos_emb_head_dim
        width = int(head * model.rotary_percent)
        least = 4 if model.rope_scaling == "dynamic" else 2
        if width < least or width % 2:
            yield (
                f"RoPE rotates pairs, but --rotary-percent {model.rotary_percent:g} of {name} {head} "
                f"is {width}: it must be even and at least {least}"
            )


@check("num_attention_heads", "num_key_value_heads")
def _latent_attention(config: Sections) -> Problems:
    model = config.model
    if not model.multi_latent_attention:
        return
    heads = model.num_attention_heads
    for name, value, why in (
        ("num_key_value_heads", heads, f"each of --num-attention-heads {heads} has one"),
        ("qk_layernorm_over", "head", "its norms are those of the latents"),
    ):
        if config.get(name) != value:
            written = all_options()[name].written(config.get(name))
            yield f"--multi-latent-attention and {written} contradict each other: {why}"
    width = model.qk_head_dim + model.qk_pos_emb_head_dim
    if model.v_head_dim > width:
        yield (
            f"--v-head-dim {model.v_head_dim} is more than --qk-head-dim {model.qk_head_dim} and "
            f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim} together: use at most {width}"
        )


@check("rope_original_positions", "rope_low_freq_factor", "rope_high_freq_factor")
def _rope_scaling(config: Sections) -> Problems:
    model = config.model
    low = model.rope_low_freq_factor
    positions = model.rope_original_positions
    if model.rope_scaling == "llama3" and low >= model.rope_high_freq_factor:
        yield (
            f"--rope-low-freq-factor {low:g} must be less than --rope-high-freq-factor "
            f"{model.rope_high_freq_factor:g}: frequencies between them are partly scaled"
        )
    if (
        model.rope_scaling == "linear"
        and positions != all_options()["rope_original_positions"].default
    ):
        yield (
            f"--rope-original-positions {positions} needs --rope-scaling dynamic, llama3 or yarn: linear "
            "scaling divides all angles by --rope-scaling-factor"
        )


@check("norm_position")
def _norms(config: Sections) -> Problems:
    model = config.model
    position = model.norm_position
    parallel = model.parallel_residual
    after = model.apply_residual_connection_post_layernorm
    if parallel and position != "pre":
        yield (
            f"--parallel-residual {parallel} and --norm-position {position} contradict each other: "
            "parallel attention and MLP read the same input, so their norms must precede them"
        )
    for name, value in (("parallel_residual", parallel), ("norm_position", position)):
        if after and value not in (None, "pre"):
            yield (
                f"--apply-residual-connection-post-layernorm and --{name.replace('_', '-')} "
                f"{value} contradict each other: choose one"
            )


@check()
def _window(config: Sections) -> Problems:
    size = config.model.window_size
    if size is not None and (size[1:] not in ((), (0,)) or not size):
        yield (
            f"--window-size {','.join(map(str, size))} is not LEFT or LEFT,0: attention is causal, "
            "so a token sees no later ones"
        )


@check("num_layers", "moe_layer_freq")
def _frequencies(config: Sections) -> Problems:
    layers = config.model.num_layers
    for name, feature, left_out in (
        ("window_attn_skip_freq", "window_size", {(1,), (0,) * layers}),
        ("moe_layer_freq", "num_experts", {(0,) * layers}),
        ("linear_attention_freq", "experimental_attention_variant", {(1,), (0,) * layers}),
        ("no_rope_freq", "position_embedding_type", {(1,), (1,) * layers}),
    ):
        freq = config.get(name)
        if freq is None:
            continue
        flag = all_options()[name].flag
        written = f"{flag} {','.join(map(str, freq))}"
        if not any(freq) if len(freq) <= 1 else len(freq) != layers or not set(freq) <= {0, 1}:
            yield (
                f"{written} is neither a number of at least 1 nor a list of {layers} entries 0 or "
                "1, one for each layer: give one of them"
            )
        elif config.get(feature) is not None and freq in left_out:
            other = all_options()[feature].flag
            yield (
                f"{written} leaves no layer for {other}: leave {flag} out for all layers, or both "
                "out for none"
            )


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
    model = config.model
    if model.moe_shared_expert_intermediate_size is not None and model.add_bias_linear:
        yield "shared experts have no biases: add --disable-bias-linear"


@check("context_parallel_size")
def _linear_attention(config: Sections) -> Problems:
    variant = config.model.experimental_attention_variant
    if variant is None:
        return
    yield from multiple(config, "linear_num_value_heads", "linear_num_key_heads")
    yield from multiple(config, "linear_num_key_heads", "tensor_model_parallel_size")
    if (size := config.get("context_parallel_size")) != 1:
        yield (
            f"--experimental-attention-variant {variant} and --context-parallel-size {size} cannot "
            "be combined: leave one of them out"
        )


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
    if model.moe_shared_expert_intermediate_size is not None:
        yield (
            "--moe-use-upcycling has no source for a shared expert: leave "
            "--moe-shared-expert-intermediate-size out"
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
                f"{all_options()[name].flag} {width}: experts of the base model are smaller in "
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
