"""Checks of a resolved configuration.

All problems are collected; no check needs a process group or a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config import io_checks, model_checks, parallel_checks, training_checks
from megatron.config.io import is_same_folder
from megatron.config.model import ACTIVATIONS
from megatron.config.option import pairs
from megatron.config.settings import Check, Settings, all_options
from megatron.config.training_checks import piece_problems

# Groups of settings of which at most one may be chosen.
EXCLUSIVE = [
    group.split()
    for group in (
        " ".join(name for name in ACTIVATIONS if name != "exact_gelu"),
        *(f"exact_gelu {name}" for name in ACTIVATIONS if name not in ("exact_gelu", "geglu")),
        "add_qkv_bias attention_bias",
        "qk_layernorm qk_l2_norm",
        "use_mup residual_multiplier",
        "fp16 bf16",
        "train_iters train_samples",
        "lr_decay_iters lr_decay_samples lr_decay_tokens",
        "lr_warmup_iters lr_warmup_samples lr_warmup_tokens lr_warmup_fraction",
        "lr_wsd_decay_iters lr_wsd_decay_samples",
        "data_path data_file_list mock_data train_data_path",
        "data_path data_file_list mock_data valid_data_path",
        "data_path data_file_list mock_data test_data_path",
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
        "rampup_batch_size step_batch_size_schedule",
        *(
            f"lr_schedule lr_warmup_{unit}"
            for unit in ("iters", "samples", "tokens", "fraction", "init")
        ),
        *(f"lr_schedule lr_decay_{unit}" for unit in ("iters", "samples", "tokens")),
        *(f"lr_schedule lr_wsd_decay_{unit}" for unit in ("iters", "samples")),
    )
]
# Settings that cannot be combined, and why.
CONFLICTS = """
    lora_rank use_mup: muP has no rates for adapters
    lora_rank qk_clip: it would scale weights that are frozen
    qk_clip qk_layernorm: it scales weights, which has no effect before the norm
    qk_clip qk_l2_norm: it scales weights, which has no effect before the norm
    multi_latent_attention attention_output_gate: it has no gate
    multi_latent_attention qk_l2_norm: its latents have the norms of --qk-layernorm
    multi_latent_attention add_qkv_bias: its projections have no biases
    multi_latent_attention attention_bias: its projections have no biases
    multi_latent_attention clip_qkv: its queries, keys and values are not clipped
    multi_latent_attention qk_clip: a key of all heads cannot be scaled for one
    multi_latent_attention use_mup: muP has no rules for its latents
    experimental_attention_variant use_mup: muP has no rules for linear attention
    experimental_attention_variant qk_clip: linear attention has no logits
    mtp_num_layers embedding_layernorm: the last stage, which embeds tokens too, has no such norm
    mtp_num_layers cuda_graph_impl: the output of a graph is one loss
    fim_rate mock_data: these have no text
    xielu num_experts: experts have no parameters of xIELU
"""
# Pairs of settings of which the first must not be greater than the second.
ASCENDING = pairs(
    "min_lr=lr lr_warmup_init=lr decoupled_min_lr=decoupled_lr yarn_beta_slow=yarn_beta_fast "
    "min_loss_scale=initial_loss_scale start_weight_decay=end_weight_decay"
)
# Each line has a setting that must be set or have a given value, and settings that need it unless
# they have their defaults.
NEEDED = """
    save_hf  save_hf_ema
    save  save_interval_minutes async_save keep_last requeue
    load  finetune reset_iteration load_tag use_checkpoint_args exit_on_missing_checkpoint
    load  moe_use_upcycling load_missing
    keep_last  keep_every
    bf16=true  main_grads_dtype
    recompute_granularity=full  recompute_method
    optimizer=adam  optimizer_implementation exp_avg_dtype exp_avg_sq_dtype
    optimizer=adam  adam_beta1_schedule adam_beta2_schedule
    experimental_attention_variant  linear_attention_freq linear_conv_kernel_dim
    experimental_attention_variant  linear_key_head_dim linear_value_head_dim
    experimental_attention_variant  linear_num_key_heads linear_num_value_heads
    xielu=true  weight_decay_on_xielu_alphas
    num_experts  moe_router_bias
    ema_decay  ema_warmup ema_interval eval_ema save_hf_ema
    optimizer=lion  lion_beta1 lion_beta2
    optimizer=ademamix  ademamix_alpha ademamix_beta3 ademamix_alpha_warmup ademamix_beta3_warmup
    goldfish_loss=true  goldfish_k goldfish_h
    optimizer=muon  muon_momentum muon_nesterov muon_split_qkv muon_scale_mode
    optimizer=muon  muon_extra_scale_factor muon_num_ns_steps muon_coefficient_type
    optimizer=muon  muon_fp32_matmul_prec
    qk_clip=true  qk_clip_alpha qk_clip_threshold
    cuda_graph_impl=local  cuda_graph_warmup_steps
    qk_layernorm=true  qk_layernorm_over
    multi_latent_attention=true  q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    lora_rank  lora_alpha lora_target
    use_mup=true  mup_base_hidden_size mup_base_num_layers mup_base_ffn_hidden_size
    use_mup=true  mup_base_num_attention_heads mup_base_num_key_value_heads mup_base_head_dim
    use_mup=true  mup_embedding_mult mup_output_mult mup_attn_scale_power
    cp_comm_type=a2a+p2p  hierarchical_context_parallel_sizes
    position_embedding_type=rope  rotary_interleaved rope_scaling no_rope_freq rotary_local_base
    rope_scaling  rope_scaling_factor rope_original_positions
    rope_scaling=llama3  rope_low_freq_factor rope_high_freq_factor
    rope_scaling=yarn  yarn_beta_fast yarn_beta_slow yarn_attention_factor
    rope_scaling=yarn  yarn_mscale yarn_mscale_all_dim yarn_truncate
    window_size  window_attn_skip_freq rotary_local_base
    moe_shared_expert_intermediate_size  moe_shared_expert_gate moe_shared_expert_overlap
    moe_router_score_function=sigmoid  moe_router_enable_expert_bias
    moe_router_num_groups  moe_router_group_topk moe_router_group_top_scores
    moe_router_group_topk  moe_router_num_groups
"""


def _needed() -> Iterator[tuple[str, Any, list[str]]]:
    """Yield a setting, the value it must have (None: any), and the settings that need it."""
    for line in NEEDED.strip().splitlines():
        rule, *names = line.split()
        needed, _, word = rule.partition("=")
        yield needed, all_options()[needed].parse([word]) if word else None, names


def unneeded(values: Mapping[str, Any]) -> set[str]:
    """Return the settings among `values` that have no effect, since what they need is not set."""
    useless: set[str] = set()
    for needed, value, names in _needed():
        actual = values.get(needed, all_options()[needed].default)
        met = needed not in useless and actual is not None and value in (None, actual)
        useless.update(() if met else names)
    return useless & values.keys()


CHECKS = [
    each
    for module in (model_checks, parallel_checks, training_checks, io_checks)
    for each in vars(module).values()
    if isinstance(each, Check)
]


# Settings that every configuration must give, itself or through a preset or a checkpoint.
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
DATA = ("data_path", "data_file_list", "train_data_path", "valid_data_path", "test_data_path")
"""Settings that name data files."""


def validate(settings: Settings) -> None:
    """Add every problem of `settings.values` to `settings.problems`."""
    add = settings.problems.append
    options = all_options()
    values = settings.values
    bad = settings.bad

    def written(name: str) -> str:
        return options[name].written(values[name])

    for name in REQUIRED:
        if values[name] is None and name not in bad:
            add(f"{options[name].flag} is missing: give it, or a --preset")
    config = settings.sections()
    for each in CHECKS:
        if settings.usable(*each.needs):
            settings.problems.extend(each.problems(config))
    settings.problems.extend(
        piece_problems(config.kernels.cuda_graph_impl, settings.pieces, settings.explicit)
    )
    for group in EXCLUSIVE:
        chosen = [name for name in group if values[name]]
        if len(chosen) > 1 and bad.isdisjoint(chosen):
            add(f"{' and '.join(map(written, chosen))} contradict each other: choose one")
    for line in CONFLICTS.strip().splitlines():
        pair, _, why = line.partition(": ")
        chosen = [name for name in pair.split() if values[name]]
        if len(chosen) > 1 and bad.isdisjoint(chosen):
            both = " and ".join(map(written, chosen))
            add(f"{both} contradict each other: {why}; leave one of them out")
    for low, high in ASCENDING.items():
        derived = settings.explicit.keys().isdisjoint((low, high))  # their sources are compared
        if settings.usable(low, high) and values[low] > values[high] and not derived:
            add(f"{written(low)} is greater than {written(high)}")
    for needed, value, names in _needed():
        option = options[needed]
        actual = values[needed]
        if needed in bad or (actual is not None and value in (None, actual)):
            continue
        words = option.metavar or "|".join(map(str, option.choices or "N"))
        remedy = f"{option.flag} {words}" if value is None else option.written(value)
        remedy += f", not {actual}" if actual else ""
        for name in names:
            if name not in bad and values[name] not in (None, options[name].default):
                add(f"{written(name)} needs {remedy}")


def run_requirements(settings: Settings) -> None:
    """Add problems for missing settings that a training run needs, before defaults replace them.

    Also add one if --requeue would start a command that does not continue the run.
    """
    explicit = settings.explicit
    known = {*explicit, *settings.bad}
    add = settings.problems.append
    skips_training = explicit.get("skip_train")
    if not known & {"train_iters", "train_samples", "train_tokens"} and not skips_training:
        add(
            "the length of the run is missing: give --train-iters, --train-samples or "
            "--train-tokens"
        )
    if "lr" not in known and not skips_training:
        add("--lr is missing: give the maximum learning rate, such as --lr 3e-4")
    if "micro_batch_size" not in known:
        add("--micro-batch-size is missing: give the number of samples in one forward pass")
    user_data = settings.pieces.datasets is not None
    if not user_data and known.isdisjoint(DATA) and not explicit.get("mock_data"):
        add("no data: give --data-path PREFIX, --train-data-path PREFIX or --mock-data")
    if not known & {"tokenizer_type", "vocab_size"} and not {"vocab_file", "merge_file"} <= known:
        add("the vocabulary is unknown: give --tokenizer-type with its files, or --vocab-size")
    # A requeued job runs the same command and must not lose its checkpoints.
    if explicit.get("requeue") and "save" in explicit:
        names = ("finetune", "reset_iteration", "load_tag", "no_load_optim")
        conflicts = [
            all_options()[name].written(explicit[name]) for name in names if explicit.get(name)
        ]
        if not is_same_folder(explicit.get("load"), explicit["save"]):
            conflicts.insert(0, f"--load {explicit['load']}" if "load" in explicit else "no --load")
        if conflicts:
            add(
                f"--requeue starts the same command again, which with {', '.join(conflicts)} does "
                f"not continue from --save {explicit['save']}: start once without --requeue "
                f"(REQUEUE=0 in the job scripts), then with it, with --load {explicit['save']} and "
                "without the others"
            )
