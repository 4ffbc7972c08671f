"""Checks of a resolved configuration.

All problems are collected; no check needs a process group or a file.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config import files_checks, model_checks, parallel_checks, training_checks
from megatron.config.check import Check
from megatron.config.settings import Settings, all_options
from megatron.config.training_checks import own_passes

# Settings of which at most one may be chosen.
EXCLUSIVE = [
    group.split()
    for group in (
        "swiglu geglu squared_relu openai_gelu",
        "exact_gelu swiglu",
        "exact_gelu squared_relu",
        "exact_gelu openai_gelu",
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
        *(f"lr_schedule lr_warmup_{unit}" for unit in ("iters", "samples", "tokens", "fraction")),
        *(f"lr_schedule lr_decay_{unit}" for unit in ("iters", "samples", "tokens")),
        *(f"lr_schedule lr_wsd_decay_{unit}" for unit in ("iters", "samples")),
    )
]
# Settings of which the first must not be greater than the second.
ASCENDING = (
    ("min_lr", "lr"),
    ("yarn_beta_slow", "yarn_beta_fast"),
    ("min_loss_scale", "initial_loss_scale"),
    ("start_weight_decay", "end_weight_decay"),
)
# A setting that must be given (None) or have this value, and the settings that need it when they
# do not have their default value.
NEEDED: tuple[tuple[str, object, str], ...] = (
    ("save_hf", None, "save_hf_ema"),
    ("save", None, "save_interval_minutes async_save keep_last requeue"),
    (
        "load",
        None,
        "finetune reset_iteration load_tag use_checkpoint_args exit_on_missing_checkpoint "
        "moe_use_upcycling",
    ),
    ("keep_last", None, "keep_every"),
    ("bf16", True, "main_grads_dtype"),
    ("recompute_granularity", "full", "recompute_method"),
    (
        "optimizer",
        "adam",
        "optimizer_implementation exp_avg_dtype exp_avg_sq_dtype adam_beta1_schedule "
        "adam_beta2_schedule",
    ),
    ("ema_decay", None, "ema_warmup ema_interval eval_ema save_hf_ema"),
    ("optimizer", "lion", "lion_beta1 lion_beta2"),
    (
        "optimizer",
        "muon",
        "muon_momentum muon_nesterov muon_split_qkv muon_scale_mode muon_extra_scale_factor "
        "muon_num_ns_steps muon_coefficient_type muon_fp32_matmul_prec",
    ),
    ("qk_clip", True, "qk_clip_alpha qk_clip_threshold"),
    ("cuda_graph_impl", "local", "cuda_graph_warmup_steps"),
    ("qk_layernorm", True, "qk_layernorm_over"),
    (
        "use_mup",
        True,
        "mup_base_hidden_size mup_base_num_layers mup_base_ffn_hidden_size "
        "mup_base_num_attention_heads mup_base_num_key_value_heads mup_base_head_dim "
        "mup_embedding_mult mup_output_mult mup_attn_scale_power",
    ),
    ("cp_comm_type", "a2a+p2p", "hierarchical_context_parallel_sizes"),
    ("position_embedding_type", "rope", "rotary_interleaved rope_scaling"),
    ("rope_scaling", None, "rope_scaling_factor rope_original_positions"),
    ("rope_scaling", "llama3", "rope_low_freq_factor rope_high_freq_factor"),
    ("rope_scaling", "yarn", "yarn_beta_fast yarn_beta_slow yarn_attention_factor"),
    ("window_size", None, "window_attn_skip_freq"),
    (
        "moe_shared_expert_intermediate_size",
        None,
        "moe_shared_expert_gate moe_shared_expert_overlap",
    ),
    ("moe_router_score_function", "softmax", "moe_router_pre_softmax"),
    ("moe_router_score_function", "sigmoid", "moe_router_enable_expert_bias"),
    ("moe_router_num_groups", None, "moe_router_group_topk"),
    ("moe_router_group_topk", None, "moe_router_num_groups"),
)


CHECKS = [
    each
    for module in (model_checks, parallel_checks, training_checks, files_checks)
    for each in vars(module).values()
    if isinstance(each, Check)
]


# Settings that have no default.
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
DATA = ("data_path", "data_file_list", "train_data_path", "valid_data_path", "test_data_path")
"""Settings that name files of data."""


def validate(settings: Settings) -> None:
    """Add every problem of `settings.values` to `settings.problems`."""
    for name in REQUIRED:
        if settings.values[name] is None and name not in settings.bad:
            settings.problems.append(
                f"{all_options()[name].flag} is missing: give it, or a --preset"
            )
    config = settings.sections()
    for each in CHECKS:
        if settings.usable(*each.needs):
            settings.problems.extend(each.problems(config))
    settings.problems.extend(own_passes(config.kernels.cuda_graph_impl, settings.pieces))
    settings.problems.extend(_problems_of_tables(settings))


def _problems_of_tables(settings: Settings) -> Iterator[str]:
    values = settings.values
    options = all_options()
    bad = settings.bad

    def written(name: str) -> str:
        return options[name].written(values[name])

    for group in EXCLUSIVE:
        chosen = [name for name in group if values[name]]
        if len(chosen) > 1 and bad.isdisjoint(chosen):
            yield f"{' and '.join(map(written, chosen))} contradict each other: choose one"
    for low, high in ASCENDING:
        if settings.usable(low, high) and values[low] > values[high]:
            yield f"{written(low)} is greater than {written(high)}"
    for needed, value, names in NEEDED:
        option = options[needed]
        found = values[needed]
        if value is None:
            words = option.metavar or "|".join(map(str, option.choices or "N"))
            is_met = found is not None
            remedy = f"{option.flag} {words}"
        else:
            is_met = found == value
            remedy = option.written(value)
            remedy += f", not {found}" if found else ""
        if is_met or needed in bad:
            continue
        for name in names.split():
            if name not in bad and values[name] not in (None, options[name].default):
                yield f"{written(name)} needs {remedy}"


def run_requirements(settings: Settings) -> None:
    """Add problems for missing settings that a training run needs, before defaults replace them."""
    known = {*settings.given, *settings.bad}
    add = settings.problems.append
    _requeued(settings)
    skips_training = settings.given.get("skip_train")
    if not known & {"train_iters", "train_samples", "train_tokens"} and not skips_training:
        add(
            "the length of the run is missing: give --train-iters, --train-samples or "
            "--train-tokens"
        )
    if "lr" not in known and not skips_training:
        add("--lr is missing: give the maximum learning rate, such as --lr 3e-4")
    if "micro_batch_size" not in known:
        add("--micro-batch-size is missing: give the samples of one forward pass")
    own = settings.pieces.datasets is not None
    if not own and known.isdisjoint(DATA) and not settings.given.get("mock_data"):
        add("no data: give --data-path PREFIX, --train-data-path PREFIX or --mock-data")
    if not known & {"tokenizer_type", "vocab_size"} and not {"vocab_file", "merge_file"} <= known:
        add("the vocabulary is unknown: give --tokenizer-type with its files, or --vocab-size")


def _requeued(settings: Settings) -> None:
    """Add a problem where a requeued job, which has the same command, would lose what it saved."""
    given = settings.given
    names = ("finetune", "reset_iteration", "load_tag", "no_load_optim")
    if not given.get("requeue") or "save" not in given:
        return
    others = [all_options()[name].written(given[name]) for name in names if given.get(name)]
    if given.get("load") != given["save"]:
        others.insert(0, f"--load {given['load']}" if "load" in given else "no --load")
    if others:
        settings.problems.append(
            f"--requeue starts the same command again, which with {', '.join(others)} does not "
            f"continue from --save {given['save']}: start once without --requeue (REQUEUE=0 in the "
            f"job scripts), then with it, with --load {given['save']} and without the others"
        )
