"""Checks of a resolved configuration.

All problems are collected; no check needs a process group or a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from megatron.config.duration import duration_s
from megatron.config.files import hugging_face_folder, named_corpus
from megatron.config.parallel import SIZES, TILE, layout_counts
from megatron.config.phases import PHASED, norm_limits, parse_batch_sizes, parse_phases
from megatron.config.pieces import Pieces
from megatron.config.settings import Settings, all_options

Values = dict[str, Any]
Problems = Callable[[Values], Iterator[str]]

# Settings of which at most one may be chosen.
EXCLUSIVE = (
    ("swiglu", "geglu", "squared_relu", "openai_gelu"),
    ("exact_gelu", "swiglu"),
    ("exact_gelu", "squared_relu"),
    ("exact_gelu", "openai_gelu"),
    ("fp16", "bf16"),
    ("train_iters", "train_samples"),
    ("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens"),
    ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens", "lr_warmup_fraction"),
    ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    ("data_path", "data_file_list", "mock_data", "train_data_path"),
    ("data_path", "data_file_list", "mock_data", "valid_data_path"),
    ("data_path", "data_file_list", "mock_data", "test_data_path"),
    ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
    ("rampup_batch_size", "step_batch_size_schedule"),
    *(("lr_schedule", f"lr_warmup_{unit}") for unit in ("iters", "samples", "tokens", "fraction")),
    *(("lr_schedule", f"lr_decay_{unit}") for unit in ("iters", "samples", "tokens")),
    *(("lr_schedule", f"lr_wsd_decay_{unit}") for unit in ("iters", "samples")),
)
# Settings of which the first must not be greater than the second.
ASCENDING = (
    ("min_lr", "lr"),
    ("yarn_beta_slow", "yarn_beta_fast"),
    ("min_loss_scale", "initial_loss_scale"),
    ("start_weight_decay", "end_weight_decay"),
)
_MUON = (
    "muon_momentum",
    "muon_nesterov",
    "muon_split_qkv",
    "muon_scale_mode",
    "muon_extra_scale_factor",
    "muon_num_ns_steps",
    "muon_coefficient_type",
    "muon_fp32_matmul_prec",
)
# A setting that must be given (None) or have this value, and the settings that need it when they
# do not have their default value.
NEEDED: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("save_hf", None, ("save_hf_ema",)),
    ("save", None, ("save_interval_minutes", "async_save", "keep_last", "requeue")),
    ("load", None, ("finetune", "reset_iteration", "load_tag")),
    ("load", None, ("use_checkpoint_args", "exit_on_missing_checkpoint")),
    ("keep_last", None, ("keep_every",)),
    ("bf16", True, ("main_grads_dtype",)),
    ("recompute_granularity", "full", ("recompute_method",)),
    ("optimizer", "adam", ("optimizer_implementation", "exp_avg_dtype", "exp_avg_sq_dtype")),
    ("optimizer", "adam", ("adam_beta1_schedule", "adam_beta2_schedule")),
    ("ema_decay", None, ("ema_warmup", "ema_interval", "eval_ema", "save_hf_ema")),
    ("optimizer", "lion", ("lion_beta1", "lion_beta2")),
    ("optimizer", "muon", _MUON),
    ("qk_clip", True, ("qk_clip_alpha", "qk_clip_threshold")),
    ("cuda_graph_impl", "local", ("cuda_graph_warmup_steps",)),
    ("qk_layernorm", True, ("qk_layernorm_over",)),
    ("use_mup", True, ("mup_base_hidden_size", "mup_base_num_layers", "mup_base_ffn_hidden_size")),
    ("use_mup", True, ("mup_base_num_attention_heads", "mup_base_num_key_value_heads")),
    ("use_mup", True, ("mup_base_head_dim",)),
    ("use_mup", True, ("mup_embedding_mult", "mup_output_mult", "mup_attn_scale_power")),
    ("cp_comm_type", "a2a+p2p", ("hierarchical_context_parallel_sizes",)),
    ("position_embedding_type", "rope", ("rotary_interleaved", "rope_scaling")),
    ("rope_scaling", None, ("rope_scaling_factor", "rope_original_positions")),
    ("rope_scaling", "llama3", ("rope_low_freq_factor", "rope_high_freq_factor")),
    ("rope_scaling", "yarn", ("yarn_beta_fast", "yarn_beta_slow", "yarn_attention_factor")),
)


class Check(NamedTuple):
    """A check that runs if all settings of `needs` have valid values, and yields problems."""

    needs: tuple[str, ...]
    problems: Problems


def check(*needs: str) -> Callable[[Problems], Check]:
    """Make a check of a function; CHECKS at the end of this module collects them."""
    return partial(Check, needs)


def validate(settings: Settings) -> None:
    """Add every problem of `settings.values` to `settings.problems`."""
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if settings.values[name] is None and name not in settings.bad:
            settings.problems.append(
                f"{all_options()[name].flag} is missing: give it, or a --preset"
            )
    for needs, problems in CHECKS:
        if settings.usable(*needs):
            settings.problems.extend(problems(settings.values))
    settings.problems.extend(own_passes(settings.values["cuda_graph_impl"], settings.pieces))
    settings.problems.extend(_problems_of_tables(settings))


def _problems_of_tables(settings: Settings) -> Iterator[str]:
    values, options, bad = settings.values, all_options(), settings.bad

    def written(name: str) -> str:
        option = options[name]
        return option.flag if option.many else option.written(values[name])

    for group in EXCLUSIVE:
        chosen = [name for name in group if values[name]]
        if len(chosen) > 1 and bad.isdisjoint(chosen):
            yield f"{' and '.join(map(written, chosen))} contradict each other: choose one"
    for low, high in ASCENDING:
        if settings.usable(low, high) and values[low] > values[high]:
            yield f"{written(low)} is greater than {written(high)}"
    for needed, value, names in NEEDED:
        option, found = options[needed], values[needed]
        if value is None:
            words = option.metavar or "|".join(map(str, option.choices or "N"))
            is_met, remedy = found is not None, f"{option.flag} {words}"
        else:
            is_met, remedy = found == value, option.written(value)
            remedy += f", not {found}" if found else ""
        if is_met or needed in bad:
            continue
        for name in names:
            if name not in bad and values[name] not in (None, options[name].default):
                yield f"{written(name)} needs {remedy}"


def run_requirements(settings: Settings) -> None:
    """Add problems for missing settings that a training run needs, before defaults replace them."""
    known, add = {*settings.given, *settings.bad}, settings.problems.append
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
    paths = {"data_path", "train_data_path", "valid_data_path", "test_data_path", "data_file_list"}
    own = settings.pieces.datasets is not None
    if not own and not known & paths and not settings.given.get("mock_data"):
        add("no data: give --data-path PREFIX, --train-data-path PREFIX or --mock-data")
    if not known & {"tokenizer_type", "vocab_size"} and not {"vocab_file", "merge_file"} <= known:
        add("the vocabulary is unknown: give --tokenizer-type with its files, or --vocab-size")


def _requeued(settings: Settings) -> None:
    """Add a problem where a requeued job, which has the same command, would lose what it saved."""
    given, names = settings.given, ("finetune", "reset_iteration", "load_tag", "no_load_optim")
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


def nearest_multiples(value: int, step: int) -> str:
    """Return the multiples of `step` nearest to a value, as '640 or 768'."""
    below = value // step * step
    return f"{below} or {below + step}" if below else f"{step}"


# ---- model


def _multiple(v: Values, name: str, of: str, remedy: str = "") -> Iterator[str]:
    size, divisor = v[name], v[of]
    if size % divisor:
        flags = all_options()
        yield (
            f"{flags[name].flag} {size} is not a multiple of {flags[of].flag} {divisor}: use "
            f"{nearest_multiples(size, divisor)}{remedy}"
        )


@check("hidden_size", "num_attention_heads")
def _head_width(v: Values) -> Iterator[str]:
    if v["kv_channels"] is None:
        remedy = ", or give the width of a head with --kv-channels"
        yield from _multiple(v, "hidden_size", "num_attention_heads", remedy)


@check("num_attention_heads", "num_key_value_heads")
def _grouped_queries(v: Values) -> Iterator[str]:
    yield from _multiple(v, "num_attention_heads", "num_key_value_heads")


@check("seq_length", "max_position_embeddings", "position_embedding_type")
def _positions(v: Values) -> Iterator[str]:
    if (
        v["position_embedding_type"] == "learned_absolute"
        and v["seq_length"] > v["max_position_embeddings"]
    ):
        yield (
            f"--seq-length {v['seq_length']} is longer than --max-position-embeddings "
            f"{v['max_position_embeddings']}: learned positions must cover the sequence; raise the "
            "latter or use --position-embedding-type rope"
        )


@check("position_embedding_type", "kv_channels", "rotary_percent")
def _rotary_width(v: Values) -> Iterator[str]:
    if v["position_embedding_type"] == "rope":
        width = int(v["kv_channels"] * v["rotary_percent"])
        if width < 2 or width % 2:
            yield (
                f"RoPE rotates pairs, but --rotary-percent {v['rotary_percent']:g} of a head of "
                f"{v['kv_channels']} is {width}: it must be even and at least 2"
            )


@check("rope_low_freq_factor", "rope_high_freq_factor")
def _rope_ramp(v: Values) -> Iterator[str]:
    low, high = v["rope_low_freq_factor"], v["rope_high_freq_factor"]
    if v["rope_scaling"] == "llama3" and low >= high:
        yield (
            f"--rope-low-freq-factor {low:g} must be less than --rope-high-freq-factor {high:g}: "
            "frequencies between them are partly scaled"
        )


@check("rope_scaling", "rope_original_positions")
def _rope_original(v: Values) -> Iterator[str]:
    kind, positions = v["rope_scaling"], v["rope_original_positions"]
    if kind == "linear" and positions != all_options()["rope_original_positions"].default:
        yield (
            f"--rope-original-positions {positions} needs --rope-scaling llama3 or yarn: linear "
            "scaling divides all angles by --rope-scaling-factor"
        )


@check("norm_position")
def _norms(v: Values) -> Iterator[str]:
    position, parallel = v["norm_position"], v["parallel_residual"]
    after = v["apply_residual_connection_post_layernorm"]
    if parallel and position != "pre":
        yield (
            f"--parallel-residual {parallel} and --norm-position {position} contradict each other: "
            "attention and MLP of one input have their norms before them"
        )
    for name, value in (("parallel_residual", parallel), ("norm_position", position)):
        if after and value not in (None, "pre"):
            yield (
                f"--apply-residual-connection-post-layernorm and --{name.replace('_', '-')} "
                f"{value} contradict each other: choose one"
            )


@check("window_size")
def _window(v: Values) -> Iterator[str]:
    size = v["window_size"]
    if size[1:] not in ((), (0,)) or not size:
        yield (
            f"--window-size {','.join(map(str, size))} is not LEFT or LEFT,0: attention is causal, "
            "so a token sees none after itself"
        )


@check("window_attn_skip_freq", "num_layers")
def _layers_without_window(v: Values) -> Iterator[str]:
    skip, layers = v["window_attn_skip_freq"], v["num_layers"]
    written = f"--window-attn-skip-freq {','.join(map(str, skip))}"
    if v["window_size"] is None:
        yield f"{written} needs --window-size LEFT"
    if len(skip) <= 1 and not any(skip):
        yield f"{written}: every N-th layer has no window, with N of at least 1"
    elif len(skip) > 1 and (len(skip) != layers or not set(skip) <= {0, 1}):
        yield f"{written} is not one number, nor a list of {layers} entries 0 or 1: one for a layer"


@check("num_experts", "num_layers", "moe_layer_freq")
def _expert_layers(v: Values) -> Iterator[str]:
    freq, layers = v["moe_layer_freq"], v["num_layers"]
    if freq == (0,) or (len(freq) > 1 and (len(freq) != layers or not set(freq) <= {0, 1})):
        yield (
            f"--moe-layer-freq {','.join(map(str, freq))} is neither a number of at least 1 nor a "
            f"list of {layers} entries 0 or 1: one for a layer"
        )


@check("num_experts", "moe_router_topk")
def _router(v: Values) -> Iterator[str]:
    experts, topk = v["num_experts"], v["moe_router_topk"]
    groups, chosen = v["moe_router_num_groups"], v["moe_router_group_topk"]
    softmax = v["moe_router_score_function"] == "softmax"
    if topk > experts:
        yield f"--moe-router-topk {topk} is more than --num-experts {experts}"
    if softmax and topk == 1 and not v["moe_router_pre_softmax"]:
        yield (
            "--moe-router-topk 1 with a softmax over the chosen expert alone gives it the weight 1, "
            "and the router no gradient: add --moe-router-pre-softmax"
        )
    if not softmax and v["moe_router_pre_softmax"]:
        yield "--moe-router-pre-softmax needs --moe-router-score-function softmax"
    if softmax and v["moe_router_enable_expert_bias"]:
        yield "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid"
    if (groups is None) != (chosen is None):
        yield "--moe-router-num-groups and --moe-router-group-topk need each other: give both"
    elif groups is not None and (experts % groups or chosen > groups or topk % chosen):
        yield (
            f"--moe-router-num-groups {groups} must divide --num-experts {experts}, and "
            f"--moe-router-group-topk {chosen} must be at most that and divide --moe-router-topk "
            f"{topk}"
        )
    elif groups is not None and topk // chosen > experts // groups:
        yield (
            f"--moe-router-topk {topk} needs more experts than {chosen} groups of "
            f"{experts // groups} have"
        )


@check("num_experts", "moe_router_load_balancing_type", "moe_aux_loss_coeff")
def _balancing(v: Values) -> Iterator[str]:
    kinds, factors = v["moe_router_load_balancing_type"], v["moe_aux_loss_coeff"]
    if len(kinds) != len(factors) or len(set(kinds)) != len(kinds):
        yield (
            f"--moe-router-load-balancing-type {' '.join(kinds)} and --moe-aux-loss-coeff "
            f"{' '.join(f'{x:g}' for x in factors)}: give each type once, and a coefficient of each"
        )
    if "none" in kinds and any(factors):
        yield "--moe-router-load-balancing-type none has no loss: leave --moe-aux-loss-coeff out"


@check("num_experts")
def _experts_alone(v: Values) -> Iterator[str]:
    """Name what experts do not go together with."""
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        if v[name] is not None and v["tensor_model_parallel_size"] is not None:
            yield from _multiple(v, name, "tensor_model_parallel_size")
    shared = v["moe_shared_expert_intermediate_size"] is not None
    for name in ("moe_shared_expert_gate", "moe_shared_expert_overlap"):
        if v[name] and not shared:
            yield f"{all_options()[name].flag} needs --moe-shared-expert-intermediate-size"
    if shared and v["add_bias_linear"]:
        yield "shared experts have no biases: add --disable-bias-linear"


@check("moe_use_upcycling", "num_experts", "ffn_hidden_size", "moe_ffn_hidden_size")
def _upcycling(v: Values) -> Iterator[str]:
    if not v["moe_use_upcycling"]:
        return
    parts, rest = divmod(v["ffn_hidden_size"], v["moe_ffn_hidden_size"])
    if rest or not parts or v["num_experts"] % parts or v["moe_router_topk"] % parts:
        yield (
            f"--moe-use-upcycling cuts the MLP's --ffn-hidden-size {v['ffn_hidden_size']} into "
            f"parts of --moe-ffn-hidden-size {v['moe_ffn_hidden_size']}: their number must be "
            f"whole, and divide --num-experts {v['num_experts']} and --moe-router-topk "
            f"{v['moe_router_topk']}"
        )
    if v["moe_shared_expert_intermediate_size"] is not None:
        yield (
            "--moe-use-upcycling has nothing of which to make a shared expert: leave "
            "--moe-shared-expert-intermediate-size out"
        )
    if v["load"] is None:
        yield "--moe-use-upcycling needs --load with the dense checkpoint"


@check("use_mup", "num_attention_heads", "kv_channels", "mup_base_hidden_size")
def _mup(v: Values) -> Iterator[str]:
    if v["use_mup"] and v["mup_base_num_attention_heads"] is None:
        head = v["mup_base_head_dim"] or v["kv_channels"]
        yield (
            f"--mup-base-num-attention-heads is missing: {v['num_attention_heads']} heads of "
            f"{v['kv_channels']}, in proportion to --mup-base-hidden-size "
            f"{v['mup_base_hidden_size']}, are not a whole number of heads of {head}. Give it, or "
            "--mup-base-head-dim"
        )


@check("use_mup", "num_experts", "ffn_hidden_size", "mup_base_ffn_hidden_size")
def _mup_experts(v: Values) -> Iterator[str]:
    ffn, base = v["ffn_hidden_size"], v["mup_base_ffn_hidden_size"]
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        if v["use_mup"] and v[name] is not None and v[name] * base % ffn:
            yield (
                f"{all_options()[name].flag} {v[name]}: experts of the base model are smaller in "
                f"proportion, {base} / {ffn} of it (--mup-base-ffn-hidden-size, "
                "--ffn-hidden-size), which is no whole number"
            )


@check("mup_base_num_attention_heads", "mup_base_num_key_value_heads", "num_attention_heads")
def _mup_groups(v: Values) -> Iterator[str]:
    heads, groups = v["num_attention_heads"], v["num_key_value_heads"]
    base_heads, base_groups = v["mup_base_num_attention_heads"], v["mup_base_num_key_value_heads"]
    if base_heads % base_groups:
        yield (
            f"--mup-base-num-attention-heads {base_heads} is not a multiple of "
            f"--mup-base-num-key-value-heads {base_groups}"
        )
    elif v["optimizer"] == "sgd" and heads * base_groups != groups * base_heads:
        yield (
            f"--optimizer sgd and --use-mup with {heads} heads in {groups} groups, and {base_heads} "
            f"in {base_groups} in the base model: queries would need another learning rate than "
            "keys and values of the same matrix. Use Adam, or as many heads in each group"
        )


# ---- parallelism


@check("tensor_model_parallel_size")
def _tensor_parallel(v: Values) -> Iterator[str]:
    names = ["num_attention_heads", "ffn_hidden_size"]
    groups, size = v["num_key_value_heads"], v["tensor_model_parallel_size"]
    # of fewer heads than ranks, each is on several ranks
    if groups and groups != v["num_attention_heads"] and size % groups:
        names.append("num_key_value_heads")
    if v["sequence_parallel"]:
        names.append("seq_length")
    for name in names:
        if v[name] is not None:
            remedy = ", or another tensor-parallel size"
            if name == "seq_length":
                remedy = ", another tensor-parallel size, or no --sequence-parallel"
            yield from _multiple(v, name, "tensor_model_parallel_size", remedy)


@check("num_layers", "pipeline_model_parallel_size")
def _pipeline(v: Values) -> Iterator[str]:
    layers, pp = v["num_layers"], v["pipeline_model_parallel_size"]
    per_chunk, chunks = (
        v["num_layers_per_virtual_pipeline_stage"],
        v["virtual_pipeline_model_parallel_size"],
    )
    if v["pipeline_layout"] is not None:
        yield from _layout(v["pipeline_layout"], layers, pp, per_chunk)
    elif per_chunk is not None:
        yield from _interleaving(layers, pp, per_chunk)
    elif layers < pp:
        yield (
            f"--num-layers {layers} is less than the {pp} stages of --pipeline-model-parallel-size "
            f"{pp}: each stage needs a layer, so use at most {layers} stages"
        )
    if chunks > 1 and pp == 1:
        yield (
            "interleaved chunks need --pipeline-model-parallel-size of at least 2: drop the "
            "interleaving"
        )
    if chunks > 1 and v["enable_zbh1_pipeline"]:
        yield "--enable-zbh1-pipeline has no interleaved form: drop it or the interleaved chunks"


def _layout(layout: str, layers: int, pp: int, per_chunk: int | None) -> Iterator[str]:
    counts = layout_counts(layout)
    if counts is None:
        yield (
            f"--pipeline-layout '{layout}' is not a list of layer counts of at least 1, such as "
            "3,4,4,3"
        )
        return
    if len(counts) % pp:
        yield (
            f"--pipeline-layout '{layout}' has {len(counts)} stages, not a multiple of "
            f"--pipeline-model-parallel-size {pp}"
        )
    if sum(counts) != layers:
        yield (
            f"--pipeline-layout '{layout}' has {sum(counts)} layers in all, but --num-layers is "
            f"{layers}"
        )
    if per_chunk is not None and any(count != per_chunk for count in counts):
        yield (
            f"--pipeline-layout '{layout}' contradicts --num-layers-per-virtual-pipeline-stage "
            f"{per_chunk}: the layout alone is enough"
        )


def _interleaving(layers: int, pp: int, per_chunk: int) -> Iterator[str]:
    if layers % (pp * per_chunk) == 0 and layers // (pp * per_chunk) >= 2:
        return
    valid = [n for n in range(1, layers // (2 * pp) + 1) if layers % (pp * n) == 0]
    text = (
        f"--num-layers-per-virtual-pipeline-stage {per_chunk} does not divide {layers} layers into "
        f"two or more equal chunks on each of {pp} pipeline ranks"
    )
    if valid:
        near = sorted(sorted(valid, key=lambda n: abs(n - per_chunk))[:2])
        yield f"{text}: use {' or '.join(map(str, near))}"
    else:
        multiple = nearest_multiples(layers, 2 * pp)
        yield (
            f"{text}: no number of layers per chunk does; use {multiple} layers, or "
            f"--pipeline-layout with {2 * pp} counts"
        )


@check("world_size", *SIZES)
def _world(v: Values) -> Iterator[str]:
    world, (tp, pp, cp, ep) = v["world_size"], (v[name] for name in SIZES)
    model = (
        f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp}"
        f"{f' x --context-parallel-size {cp}' if cp > 1 else ''}"
    )
    if world % (tp * pp * cp):
        yield (
            f"{world} processes are not a multiple of {model} = {tp * pp * cp}: start "
            f"{nearest_multiples(world, tp * pp * cp)} processes, or change the sizes"
        )
    elif world % (tp * pp * ep):
        line = math.lcm(cp, ep)
        yield (
            f"--expert-model-parallel-size {ep} does not divide the {world // (tp * pp)} ranks "
            f"that share each part of the model ({world} processes, tensor {tp} x pipeline {pp}): "
            f"start {nearest_multiples(world, tp * pp * line)} processes, or change the size"
        )


@check("expert_model_parallel_size")
def _expert_parallel(v: Values) -> Iterator[str]:
    size, experts = v["expert_model_parallel_size"], v["num_experts"]
    if size % (each := v["expert_ranks_per_node"] or 1):
        yield f"--expert-ranks-per-node {each} does not divide --expert-model-parallel-size {size}"
    if size > 1 and experts is None:
        yield "--expert-model-parallel-size needs experts: give --num-experts, or use 1"
    elif size > 1 and experts % size:
        yield (
            f"--num-experts {experts} is not a multiple of --expert-model-parallel-size {size}: "
            f"use {nearest_multiples(experts, size)}"
        )
    tensor, own = v["tensor_model_parallel_size"], v["expert_tensor_parallel_size"]
    if own is not None and tensor is not None and own != tensor:
        yield (
            f"--expert-tensor-parallel-size {own}: experts are divided over all tensor-parallel "
            f"ranks; use {tensor}, or leave it out"
        )


@check("zero_stage", "data_parallel_size", "context_parallel_size")
def _zero(v: Values) -> Iterator[str]:
    stage, line = v["zero_stage"], v["data_parallel_size"] * v["context_parallel_size"]
    if stage == 3 and (pp := v["pipeline_model_parallel_size"] or 1) > 1:
        yield (
            f"--zero-stage 3 gathers weights for one stage, but --pipeline-model-parallel-size is "
            f"{pp}: use --zero-stage 2, or 1 pipeline stage"
        )
    if not stage and (v["zero_shard_size"] or v["zero_state_shard_size"]):
        yield (
            "--zero-shard-size and --zero-state-shard-size divide nothing with --zero-stage 0: "
            "leave them out, or use stage 1, 2 or 3"
        )
        return
    of, each = "data-parallel ranks, context-parallel ones included", line
    for name in ("zero_state_shard_size", "zero_shard_size"):
        if (size := v[name]) > 0 and each % size:
            sizes = ", ".join(str(n) for n in range(1, each + 1) if each % n == 0)
            yield f"{all_options()[name].flag} {size} does not divide {of}: use one of {sizes}"
        elif size > 0:
            of, each = f"--zero-state-shard-size {size}", size
    size, experts = max(0, v["zero_shard_size"]) or line, v["expert_model_parallel_size"] or 1
    if size % experts and experts % size:
        yield (
            f"--zero-shard-size {size} is neither a multiple nor a divisor of "
            f"--expert-model-parallel-size {experts}: change one of them"
        )


@check("context_parallel_size", "cp_comm_type")
def _context_parallel(v: Values) -> Iterator[str]:
    size, kind = v["context_parallel_size"], v["cp_comm_type"]
    levels = v["hierarchical_context_parallel_sizes"]
    if kind == "a2a+p2p" and (len(levels) != 2 or math.prod(levels) != size):
        yield (
            f"--cp-comm-type a2a+p2p with --context-parallel-size {size} needs "
            "--hierarchical-context-parallel-sizes A P: ranks that exchange heads, and places of "
            f"the ring, with A x P = {size}, not {' '.join(map(str, levels)) or 'none'}"
        )
        return
    if size == 1:
        return
    heads = {"p2p": 1, "a2a": size}.get(kind) or levels[0]
    tensor = v["tensor_model_parallel_size"] or 1
    rows = math.lcm(2 * size, size * (tensor if v["sequence_parallel"] else 1))
    if v["seq_length"] is not None and v["seq_length"] % rows:
        yield (
            f"--seq-length {v['seq_length']} is not a multiple of {rows}, which "
            f"--context-parallel-size {size} needs: use {nearest_multiples(v['seq_length'], rows)}"
        )
    if v["num_attention_heads"] is not None and v["num_attention_heads"] % (tensor * heads):
        yield (
            f"--num-attention-heads {v['num_attention_heads']} is not a multiple of "
            f"tensor-parallel size {tensor} x {heads} ranks that exchange heads: use "
            "--cp-comm-type p2p, or other sizes"
        )
    if heads < size:
        for limit, remedy in ring_limits(v, size // heads):
            yield f"{limit}: use --cp-comm-type a2a{remedy and ', or '}{remedy}"


def ring_limits(v: Values, places: int) -> Iterator[tuple[str, str]]:
    """Yield what ring attention cannot do and --cp-comm-type a2a can, and another remedy."""
    length, dropout = v["seq_length"], v["attention_dropout"]
    if v["attention_backend"] in ("unfused", "local"):
        yield f"--attention-backend {v['attention_backend']} stores all scores", "auto"
    if v["qk_clip"]:
        yield "--qk-clip does not work on a ring", ""
    if not dropout:
        return
    default = all_options()["attention_dropout"].default
    flag = f"--attention-dropout {dropout}{' (the default)' if dropout == default else ''}"
    if v["reset_attention_mask"]:
        yield f"{flag} with --reset-attention-mask does not work on a ring", "--attention-dropout 0"
    step = 2 * places * TILE
    if length is not None and length % step:
        yield (
            f"{flag} on a ring of {places} ranks needs a --seq-length that is a multiple of {step}, "
            f"not {length}",
            f"--attention-dropout 0, or --seq-length {nearest_multiples(length, step)}",
        )


@check("device_order")
def _device_order(v: Values) -> Iterator[str]:
    order = v["device_order"]
    if sorted(order) != list(range(len(order))):
        yield (
            f"--device-order {','.join(map(str, order))} does not name each device of a node once: "
            f"{len(order)} devices are numbered 0 to {len(order) - 1}"
        )


# ---- batch


@check("micro_batch_size", "global_batch_size", "data_parallel_size")
def _batch(v: Values) -> Iterator[str]:
    mbs, gbs, dp = v["micro_batch_size"], v["global_batch_size"], v["data_parallel_size"]
    step = mbs * dp
    if gbs < step:
        yield (
            f"more processes than needed: {dp} replicas with --micro-batch-size {mbs} take {step} "
            f"samples in a step, but --global-batch-size is {gbs}: raise it to {step}, or start "
            "fewer processes"
        )
    elif gbs % step:
        yield (
            f"--global-batch-size {gbs} is not a multiple of --micro-batch-size {mbs} x "
            f"data-parallel size {dp} = {step}: use {nearest_multiples(gbs, step)}"
        )


@check("rampup_batch_size", "global_batch_size")
def _rampup(v: Values) -> Iterator[str]:
    ramp, gbs = v["rampup_batch_size"], v["global_batch_size"]
    if len(ramp) != 3:
        yield f"--rampup-batch-size takes START INCREMENT SAMPLES, got {len(ramp)} values"
        return
    start, increment, _ = ramp
    if start >= gbs:
        yield (
            f"--rampup-batch-size starts at {start}, which is not less than --global-batch-size "
            f"{gbs}"
        )
    elif (gbs - start) % increment:
        yield (
            f"--rampup-batch-size {start} {increment}: steps of {increment} from {start} do not "
            f"reach --global-batch-size {gbs}; use {nearest_multiples(gbs - start, increment)} as "
            "their difference"
        )
    if v["micro_batch_size"] is None or v["data_parallel_size"] is None:
        return
    sizes = (("start", start), ("increment", increment))
    yield from _not_whole(v, "--rampup-batch-size", sizes)


def _not_whole(v: Values, flag: str, sizes: Iterable[tuple[str, int]]) -> Iterator[str]:
    step = v["micro_batch_size"] * v["data_parallel_size"]
    for what, value in sizes:
        if value % step:
            yield (
                f"{flag}: its {what} {value} is not a multiple of --micro-batch-size x "
                f"data-parallel size = {step}: use {nearest_multiples(value, step)}"
            )


@check("step_batch_size_schedule", "global_batch_size", "micro_batch_size", "data_parallel_size")
def _batch_steps(v: Values) -> Iterator[str]:
    try:
        sizes = parse_batch_sizes(v["step_batch_size_schedule"])
    except ValueError as error:
        yield f"--step-batch-size-schedule: {error}"
        return
    if sizes[-1][1] != v["global_batch_size"]:
        yield (
            f"--global-batch-size {v['global_batch_size']} is not the last size of "
            f"--step-batch-size-schedule, {sizes[-1][1]}: leave it out"
        )
    yield from _not_whole(v, "--step-batch-size-schedule", (("size", size) for _, size in sizes))


# ---- optimizer and learning rate


def _units(v: Values, prefix: str) -> list[str]:
    return [unit for unit in ("iters", "samples") if v[f"{prefix}_{unit}"]]


@check()
def _rate_units(v: Values) -> Iterator[str]:
    if len(run := _units(v, "train")) == 1:
        for what in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
            for unit in _units(v, what):
                if unit != run[0]:
                    flag = f"--{what.replace('_', '-')}"
                    yield f"{flag}-{unit} does not go with --train-{run[0]}: use {flag}-{run[0]}"


@check("lr_decay_style")
def _rate_lengths(v: Values) -> Iterator[str]:
    for unit in ("iters", "samples", "tokens"):
        warmup, decay = v[f"lr_warmup_{unit}"], v[f"lr_decay_{unit}"]
        # constant and inverse-square-root never end, so a warm-up may be as long as the run
        ends = v["lr_decay_style"] in ("linear", "cosine", "WSD")
        if ends and warmup and decay and warmup >= decay:
            yield (
                f"--lr-warmup-{unit} {warmup} must be less than --lr-decay-{unit} {decay} (which "
                f"is --train-{unit} unless given)"
            )
    if v["lr_decay_style"] != "WSD":
        return
    wsd = _units(v, "lr_wsd_decay")
    if not wsd:
        unit = [*_units(v, "lr_decay"), "iters"][0]
        yield f"--lr-decay-style WSD needs the length of its last phase: give --lr-wsd-decay-{unit}"
    for unit in wsd:
        length, decay = v[f"lr_wsd_decay_{unit}"], v[f"lr_decay_{unit}"]
        if decay and length + (v[f"lr_warmup_{unit}"] or 0) > decay:
            yield (
                f"--lr-wsd-decay-{unit} {length} and the warm-up are longer than --lr-decay-{unit} "
                f"{decay}"
            )


@check("weight_decay", "start_weight_decay", "end_weight_decay")
def _weight_decay(v: Values) -> Iterator[str]:
    start, end, style = v["start_weight_decay"], v["end_weight_decay"], v["weight_decay_incr_style"]
    if style == "constant" and not start == end == v["weight_decay"]:
        yield (
            f"--start-weight-decay {start:g} and --end-weight-decay {end:g} need "
            "--weight-decay-incr-style linear or cosine; with constant only --weight-decay counts"
        )
    if style != "constant" and v["weight_decay_schedule"] is not None:
        yield (
            f"--weight-decay-incr-style {style} and --weight-decay-schedule contradict each other: "
            "choose one"
        )


@check()
def _phases(v: Values) -> Iterator[str]:
    for name in PHASED:
        flag = f"--{name.replace('_', '-')}"
        try:
            phases = [] if v[name] is None else parse_phases(v[name])
        except ValueError as error:
            yield f"{flag}: {error}"
            continue
        for phase in phases if name != "lr_schedule" else ():
            ends = [value for which, value in phase.numbers.items() if which in ("from", "to")]
            if phase.shape == "power":
                yield f"{flag}: the shape power is for --lr-schedule"
            elif phase.shape not in ("constant", "warmup") and "to" not in phase.numbers:
                yield f"{flag}: '{phase.shape}' needs the value at its end: add 'to VALUE'"
            if name.startswith("adam_beta") and any(value >= 1 for value in ends):
                yield f"{flag}: {max(ends):g} must be less than 1"


@check("clip_grad_by_kind")
def _norm_limits(v: Values) -> Iterator[str]:
    try:
        norm_limits(v["clip_grad_by_kind"])
    except ValueError as error:
        yield f"--clip-grad-by-kind: {error}"


@check("muon_coefficient_type", "muon_num_ns_steps")
def _newton_schulz(v: Values) -> Iterator[str]:
    kind, steps = v["muon_coefficient_type"], v["muon_num_ns_steps"]
    if v["optimizer"] != "muon":
        return
    if kind == "quintic" and steps % 5:
        yield (
            f"--muon-num-ns-steps {steps} is not a multiple of the 5 steps of "
            f"--muon-coefficient-type quintic: use {nearest_multiples(steps, 5)}, or simple"
        )
    if kind == "polar_express" and steps < 8:
        yield (
            f"--muon-num-ns-steps {steps} is less than the 8 steps of --muon-coefficient-type "
            "polar_express, which does not converge in fewer: use 8, or quintic"
        )


@check("qk_clip", "qk_layernorm")
def _qk_clip(v: Values) -> Iterator[str]:
    if v["qk_clip"] and v["qk_layernorm"]:
        yield (
            "--qk-clip scales the weights of queries and keys, which --qk-layernorm makes without "
            "effect: use one of them"
        )


# ---- recomputation, data, checkpoints, tokenizer


@check("recompute_modules")
def _recompute_modules(v: Values) -> Iterator[str]:
    modules = v["recompute_modules"]
    if v["recompute_granularity"] != "selective" and modules != ("core_attn",):
        yield f"--recompute-modules {' '.join(modules)} needs --recompute-granularity selective"
    of_experts = [name for name in modules if name.startswith("moe")]
    if of_experts and v["num_experts"] is None:
        yield f"--recompute-modules {' '.join(of_experts)} needs --num-experts"
    if len(of_experts) > 1:
        yield "--recompute-modules moe recomputes moe_act, too: leave moe_act out"


@check("recompute_num_layers", "num_layers", "pipeline_model_parallel_size")
def _recompute_layers(v: Values) -> Iterator[str]:
    number, layers = v["recompute_num_layers"], v["num_layers"]
    if v["recompute_granularity"] != "full":
        return
    if number > layers:
        yield f"--recompute-num-layers {number} is more than --num-layers {layers}"
    elif v["recompute_method"] == "block" and v["pipeline_layout"] is None:
        stages = v["pipeline_model_parallel_size"] * v["virtual_pipeline_model_parallel_size"]
        most = -(-layers // stages)
        if number > most:
            yield (
                f"--recompute-num-layers {number} is more than the {most} layers of a stage: use "
                f"{most}, or --recompute-method uniform"
            )


@check("split")
def _split(v: Values) -> Iterator[str]:
    text = v["split"]
    try:
        parts = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or any(not 0 <= p < float("inf") for p in parts) or sum(parts) <= 0:
        yield (
            f"--split '{text}' is not one to three parts of at least 0 and not all 0, such as "
            "969,30,1"
        )


@check()
def _data(v: Values) -> Iterator[str]:
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words = v[name] or ()
        written = all_options()[name].written(words)
        if name == "valid_data_path" and any(map(named_corpus, words)):
            yield from _corpora(written, words)
        elif len(words) > 1:
            yield from _blend(written, words)


def _corpora(written: str, words: tuple[str, ...]) -> Iterator[str]:
    found = [named_corpus(word) or ("", word) for word in words]
    names = [name for name, _ in found]
    for word, (name, prefix) in zip(words, found, strict=True):
        if not (prefix and re.fullmatch(r"[\w.-]+", name)):
            yield (
                f"{written}: {word!r} is not NAME=PREFIX, with a NAME of letters, digits and ._-: "
                "name all corpora, or none"
            )
        elif names.count(name) > 1:
            yield f"{written}: {name!r} is the name of {names.count(name)} corpora: choose others"


def _blend(written: str, words: tuple[str, ...]) -> Iterator[str]:
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        weights = []
    if len(words) % 2 or not weights:
        yield f"{written}: give one PREFIX, or pairs WEIGHT PREFIX WEIGHT PREFIX ..."
    elif not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        yield f"{written}: weights must be at least 0 and not all 0"


@check("data_packing")
def _packing(v: Values) -> Iterator[str]:
    if v["data_packing"] != "best-fit" or v["mock_data"]:
        return
    for name in ("reset_position_ids", "reset_attention_mask"):
        if not v[name]:
            off = all_options()[name].written(False)
            yield (
                f"{off} and --data-packing best-fit contradict each other: packed documents are "
                "separated"
            )
    if v["train_data_exact_num_epochs"] is not None:
        yield (
            "--train-data-exact-num-epochs needs --data-packing concat: best-fit reads as many "
            "epochs as the run needs"
        )


@check("loss_mask")
def _loss_mask(v: Values) -> Iterator[str]:
    if v["loss_mask"] in ("required", "optional") and not v["calculate_per_token_loss"]:
        off = all_options()["calculate_per_token_loss"].written(False)
        yield (
            f"{off} and --loss-mask {v['loss_mask']} contradict each other: micro-batches have "
            "different numbers of unmasked tokens, and each token has to count equally"
        )


@check()
def _checkpoints(v: Values) -> Iterator[str]:
    if v["loss_spike_factor"] is not None and not (v["save"] and v["save"] == v["load"]):
        yield (
            "--loss-spike-factor rolls back to checkpoints of this run: give --save and --load the "
            "same FOLDER"
        )
    for name in ("finetune", "reset_iteration"):
        if v[name] and v["load"] is not None and v["load"] == v["save"]:
            yield (
                f"{all_options()[name].flag} would start at iteration 0 after each restart, from "
                f"the run's own checkpoints: give --save another FOLDER than --load {v['load']}, "
                "and resume from that one without the flag"
            )

    if hugging_face_folder(v["load"]) is not None and v["load_tag"] is not None:
        yield f"--load-tag {v['load_tag']} names a checkpoint, but --load {v['load']} has none"


@check("walltime")
def _walltime(v: Values) -> Iterator[str]:
    given = v["walltime"]
    if given not in (None, "none") and not duration_s(given):
        yield f"--walltime {given}: give D-HH:MM:SS, HH:MM:SS, MM:SS, minutes or none"


@check()
def _kernels(v: Values) -> Iterator[str]:
    if v["norm_implementation"] == "fused" and not v["persist_layer_norm"]:
        yield (
            "--norm-implementation fused and --no-persist-layer-norm contradict each other: choose "
            "one"
        )


def own_passes(cuda_graph_impl: str | None, pieces: Pieces) -> Iterator[str]:
    """Yield what is wrong with the user's own pieces for captured passes."""
    for name, piece in {"layer": pieces.layer, "model": pieces.model}.items():
        if cuda_graph_impl is not None and piece is not None:
            yield (
                f"a {name} of your own ({pieces.describe()[name]}) does not work with "
                f"--cuda-graph-impl {cuda_graph_impl}: what its Python code does in each pass would "
                "be left out of replays. Use --cuda-graph-impl none"
            )


@check("cuda_graph_impl", "zero_stage")
def _captured_passes(v: Values) -> Iterator[str]:
    if v["cuda_graph_impl"] is None:
        return
    options = all_options()
    masks = "a replay would repeat the masks, which come from torch's generator"
    documents = "how documents are divided decides which kernels run"
    rows = "the host reads how many tokens each expert gets"
    limits = []
    unfused = v["attention_backend"] in ("unfused", "local")
    if v["attention_dropout"] and not unfused and v["attention_backend"] != "blocked":
        without = f"{options['attention_dropout'].written(0.0)}, --attention-backend blocked"
        limits.append(("attention_dropout", masks, without))
    drops = v["hidden_dropout"] or (v["attention_dropout"] and unfused)
    if drops and not v["bias_dropout_fusion"]:
        with_kernel = options["bias_dropout_fusion"].written(True)
        limits.append(("bias_dropout_fusion", masks, with_kernel))
    if v["hidden_dropout"] and v["fp32_residual_connection"] and (v["bf16"] or v["fp16"]):
        without = options["hidden_dropout"].written(0.0)
        limits.append(("fp32_residual_connection", f"with dropout {masks}", without))
    if v["data_packing"] == "best-fit":
        limits.append(("data_packing", documents, options["data_packing"].written("concat")))
    elif v["reset_attention_mask"]:
        without = options["reset_attention_mask"].written(False)
        limits.append(("reset_attention_mask", documents, without))
    if v["num_experts"] is not None:
        limits.append(("num_experts", rows, ""))
    if v["zero_stage"] > 1:
        limits.append(
            (
                "zero_stage",
                "the memory of gradients or weights moves",
                options["zero_stage"].written(1),
            )
        )
    if v["context_parallel_size"] > 1 and v["cp_comm_type"] != "a2a":
        limits.append(
            ("cp_comm_type", "the messages of a ring are no collectives", "--cp-comm-type a2a")
        )
    for name, reason, instead in limits:
        yield (
            f"{options[name].written(v[name])} does not work with --cuda-graph-impl "
            f"{v['cuda_graph_impl']}: {reason}. Use {instead and instead + ', or '}"
            "--cuda-graph-impl none"
        )


@check("profile_step_start", "profile_step_end")
def _profile(v: Values) -> Iterator[str]:
    if v["profile"] and v["profile_step_end"] <= v["profile_step_start"]:
        yield (
            f"--profile-step-end {v['profile_step_end']} is not after --profile-step-start "
            f"{v['profile_step_start']}"
        )


_TOKENIZER_NEEDS = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "HFTokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
}


@check("tokenizer_type")
def _tokenizer(v: Values) -> Iterator[str]:
    kind = v["tokenizer_type"]
    for name in _TOKENIZER_NEEDS.get(kind, ()):
        if v[name] is None:
            yield f"--tokenizer-type {kind} needs {all_options()[name].flag}"


CHECKS = tuple(value for value in globals().values() if isinstance(value, Check))
