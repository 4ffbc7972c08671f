"""Checks of a resolved configuration. All problems are collected; no check needs a process group or
a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megatron.config.duration import duration_s
from megatron.config.parallel import layout_counts
from megatron.config.settings import Settings, all_options

Values = dict[str, Any]


class Check(NamedTuple):
    """A check of some settings: `problems` yields what is wrong with their values."""

    needs: tuple[str, ...]
    problems: Callable[[Values], Iterator[str]]


def check(*needs: str) -> Callable[[Callable[[Values], Iterator[str]]], Check]:
    """Make a check that runs when all of these settings have valid values, and yields problems."""
    return lambda problems: Check(needs, problems)


def validate(settings: Settings) -> None:
    """Add every problem of `settings.values` to `settings.problems`."""
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if settings.values[name] is None and name not in settings.bad:
            settings.problems.append(
                f"{all_options()[name].flag} is missing: give it, or a --preset"
            )
    for one in CHECKS:
        if settings.usable(*one.needs):
            settings.problems.extend(one.problems(settings.values))


def run_requirements(settings: Settings) -> None:
    """Add problems for missing settings that a training run needs, before defaults replace them."""
    known, add = {*settings.given, *settings.bad}, settings.problems.append
    skips_training = settings.given.get("skip_train")
    if not known & {"train_iters", "train_samples", "train_tokens"} and not skips_training:
        add(
            "the length of the run is missing: give --train-iters, --train-samples or "
            "--train-tokens"
        )
    if "lr" not in known and not skips_training:
        add("--lr is missing: give the highest learning rate, such as --lr 3e-4")
    if "micro_batch_size" not in known:
        add("--micro-batch-size is missing: give the samples of one forward pass")
    paths = {"data_path", "train_data_path", "valid_data_path", "test_data_path", "data_file_list"}
    own = settings.pieces.datasets is not None
    if not own and not known & paths and not settings.given.get("mock_data"):
        add("no data: give --data-path PREFIX, --train-data-path PREFIX or --mock-data")
    if not known & {"tokenizer_type", "vocab_size"} and not {"vocab_file", "merge_file"} <= known:
        add("the vocabulary is unknown: give --tokenizer-type with its files, or --vocab-size")


def nearest_multiples(value: int, step: int) -> str:
    """Return the multiples of `step` nearest to a value, as '640 or 768'."""
    below = value // step * step
    return f"{below} or {below + step}" if below else f"{step}"


# ---- model


@check("hidden_size", "num_attention_heads")
def _head_width(v: Values) -> Iterator[str]:
    if v["kv_channels"] is None:
        hidden, heads = v["hidden_size"], v["num_attention_heads"]
        yield (
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: use "
            f"{nearest_multiples(hidden, heads)}, or give the width of a head with --kv-channels"
        )


@check("num_attention_heads", "num_key_value_heads")
def _grouped_queries(v: Values) -> Iterator[str]:
    heads, kv = v["num_attention_heads"], v["num_key_value_heads"]
    if heads % kv:
        yield f"--num-attention-heads {heads} is not a multiple of --num-key-value-heads {kv}"


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
                f"RoPE turns pairs, but --rotary-percent {v['rotary_percent']:g} of a head of "
                f"{v['kv_channels']} is {width}: it must be even and at least 2"
            )


@check()
def _activations(v: Values) -> Iterator[str]:
    chosen = [n for n in ("swiglu", "squared_relu", "openai_gelu") if v[n]]
    if len(chosen) > 1:
        yield (
            f"{' and '.join(all_options()[n].flag for n in chosen)} contradict each other: choose "
            "one activation"
        )


# ---- parallelism


@check("tensor_model_parallel_size")
def _tensor_parallel(v: Values) -> Iterator[str]:
    tp = v["tensor_model_parallel_size"]
    names = ["num_attention_heads", "num_key_value_heads", "ffn_hidden_size"]
    if v["sequence_parallel"]:
        names.append("seq_length")
    for name in names:
        size = v[name]
        if (
            size is not None
            and size % tp
            and not (name == "num_key_value_heads" and size == v["num_attention_heads"])
        ):
            why = " with --sequence-parallel" if name == "seq_length" else ""
            yield (
                f"{all_options()[name].flag} {size} is not a multiple of "
                f"--tensor-model-parallel-size {tp}{why}: use {nearest_multiples(size, tp)}, or "
                "another tensor-parallel size"
            )


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
        f"--num-layers-per-virtual-pipeline-stage {per_chunk} does not cut {layers} layers into "
        f"two or more equal chunks on each of {pp} pipeline ranks"
    )
    if valid:
        near = sorted(sorted(valid, key=lambda n: abs(n - per_chunk))[:2])
        yield f"{text}: use {' or '.join(map(str, near))}"
    else:
        multiple = nearest_multiples(layers, 2 * pp)
        yield (
            f"{text}: no number does; use {multiple} layers, or --pipeline-layout with {2 * pp} "
            "counts"
        )


@check("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
def _world(v: Values) -> Iterator[str]:
    world, tp, pp = (
        v["world_size"],
        v["tensor_model_parallel_size"],
        v["pipeline_model_parallel_size"],
    )
    if world % (tp * pp):
        yield (
            f"{world} processes are not a multiple of --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp} = {tp * pp}: start "
            f"{nearest_multiples(world, tp * pp)} processes, or change the sizes"
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
    step = v["micro_batch_size"] * v["data_parallel_size"]
    for what, value in (("start", start), ("increment", increment)):
        if value % step:
            yield (
                f"--rampup-batch-size: its {what} {value} is not a multiple of --micro-batch-size "
                f"x data-parallel size = {step}: use {nearest_multiples(value, step)}"
            )


@check()
def _lengths(v: Values) -> Iterator[str]:
    if v["train_iters"] is not None and v["train_samples"] is not None:
        yield (
            f"--train-iters {v['train_iters']} and --train-samples {v['train_samples']} both give "
            "the length of the run: choose one"
        )


# ---- optimizer and learning rate


def _units(v: dict[str, Any], prefix: str) -> list[str]:
    return [unit for unit in ("iters", "samples", "tokens") if v[f"{prefix}_{unit}"]]


@check()
def _rate_units(v: Values) -> Iterator[str]:
    decay, warmup = _units(v, "lr_decay"), _units(v, "lr_warmup")
    for what, units in (("lr-decay", decay), ("lr-warmup", warmup)):
        if len(units) > 1:
            yield (
                f"{' and '.join(f'--{what}-{u}' for u in units)} contradict each other: choose one "
                "unit"
            )
    if v["lr_warmup_fraction"] and warmup:
        yield f"--lr-warmup-fraction and --lr-warmup-{warmup[0]} contradict each other: choose one"
    run = "iters" if v["train_iters"] else "samples" if v["train_samples"] else None
    other = {"iters": "samples", "samples": "iters"}
    if run is not None and not (v["train_iters"] and v["train_samples"]):
        for what, units in (
            ("lr-decay", decay),
            ("lr-warmup", warmup),
            ("lr-wsd-decay", _wsd_units(v)),
        ):
            if other[run] in units:
                yield f"--{what}-{other[run]} does not go with --train-{run}: use --{what}-{run}"


def _wsd_units(v: dict[str, Any]) -> list[str]:
    return [unit for unit in ("iters", "samples") if v[f"lr_wsd_decay_{unit}"]]


@check("lr_decay_style")
def _rate_lengths(v: Values) -> Iterator[str]:
    for unit in ("iters", "samples", "tokens"):
        warmup, decay = v[f"lr_warmup_{unit}"], v[f"lr_decay_{unit}"]
        # constant and inverse-square-root never end, so that a warm-up may be as long as the run
        ends = v["lr_decay_style"] in ("linear", "cosine", "WSD")
        if ends and warmup and decay and warmup >= decay:
            yield (
                f"--lr-warmup-{unit} {warmup} must be less than --lr-decay-{unit} {decay} (which "
                f"is --train-{unit} unless given)"
            )
    if v["lr_decay_style"] != "WSD":
        return
    decay_units, wsd = _units(v, "lr_decay"), _wsd_units(v)
    if not wsd:
        unit = decay_units[0] if decay_units else "iters"
        yield f"--lr-decay-style WSD needs the length of its last phase: give --lr-wsd-decay-{unit}"
    for unit in wsd:
        length, decay = v[f"lr_wsd_decay_{unit}"], v[f"lr_decay_{unit}"]
        if decay and length + (v[f"lr_warmup_{unit}"] or 0) > decay:
            yield (
                f"--lr-wsd-decay-{unit} {length} and the warm-up are longer than --lr-decay-{unit} "
                f"{decay}"
            )


@check("lr", "min_lr")
def _lowest_rate(v: Values) -> Iterator[str]:
    if v["min_lr"] > v["lr"]:
        yield f"--min-lr {v['min_lr']:g} is greater than --lr {v['lr']:g}"


@check("weight_decay", "start_weight_decay", "end_weight_decay")
def _weight_decay(v: Values) -> Iterator[str]:
    start, end, style = v["start_weight_decay"], v["end_weight_decay"], v["weight_decay_incr_style"]
    if style == "constant" and not start == end == v["weight_decay"]:
        yield (
            f"--start-weight-decay {start:g} and --end-weight-decay {end:g} need "
            "--weight-decay-incr-style linear or cosine; with constant only --weight-decay counts"
        )
    if start > end:
        yield (
            f"--start-weight-decay {start:g} is greater than --end-weight-decay {end:g}: weight "
            "decay only grows"
        )


# ---- precision, recomputation, data, checkpoints, tokenizer


@check("fp16", "bf16", "main_grads_dtype")
def _precision(v: Values) -> Iterator[str]:
    if v["fp16"] and v["bf16"]:
        yield "--fp16 and --bf16 contradict each other: choose one"
    if v["main_grads_dtype"] == "bf16" and not v["bf16"]:
        yield "--main-grads-dtype bf16 needs --bf16: gradients of other formats are summed in fp32"


@check("initial_loss_scale", "min_loss_scale")
def _loss_scale(v: Values) -> Iterator[str]:
    if v["min_loss_scale"] > v["initial_loss_scale"]:
        low, first = v["min_loss_scale"], v["initial_loss_scale"]
        yield f"--min-loss-scale {low:g} is greater than --initial-loss-scale {first:g}"


@check("recompute_num_layers")
def _recompute(v: Values) -> Iterator[str]:
    granularity, method, number = (
        v["recompute_granularity"],
        v["recompute_method"],
        v["recompute_num_layers"],
    )
    if granularity != "full" and method is not None:
        given = f"is {granularity}" if granularity else "is absent"
        yield f"--recompute-method {method} needs --recompute-granularity full, which {given}"
    if granularity != "selective" and v["recompute_modules"] not in (None, ("core_attn",)):
        listed = " ".join(v["recompute_modules"])
        yield f"--recompute-modules {listed} needs --recompute-granularity selective"
    layers, pp, chunks = (
        v["num_layers"],
        v["pipeline_model_parallel_size"],
        v["virtual_pipeline_model_parallel_size"],
    )
    if granularity == "full" and layers is not None and pp is not None and number > layers:
        yield f"--recompute-num-layers {number} is more than --num-layers {layers}"
    elif (
        granularity == "full"
        and method == "block"
        and layers
        and pp
        and v["pipeline_layout"] is None
    ):
        most = -(-layers // (pp * chunks))
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
    separate = [n for n in ("train_data_path", "valid_data_path", "test_data_path") if v[n]]
    whole = [n for n in ("data_path", "data_file_list") if v[n]]
    flags = [all_options()[n].flag for n in (*whole, *separate)]
    if len(whole) > 1 or (whole and separate):
        yield (
            f"{', '.join(flags)} contradict each other: use one of --data-path, --data-file-list, "
            "--train-data-path"
        )
    if v["mock_data"] and flags:
        yield f"--mock-data and {flags[0]} contradict each other: choose one"
    for name in (*separate, "data_path"):
        paths = v[name]
        if paths and len(paths) > 1:
            yield from _blend(all_options()[name].flag, paths)


@check("data_packing")
def _packing(v: Values) -> Iterator[str]:
    if v["data_packing"] != "best-fit" or v["mock_data"]:
        return
    for name in ("reset_position_ids", "reset_attention_mask"):
        if not v[name]:
            off = all_options()[name].written(False)
            yield (
                f"{off} and --data-packing best-fit contradict each other: packed documents are "
                "kept apart"
            )
    if v["train_data_exact_num_epochs"] is not None:
        yield (
            "--train-data-exact-num-epochs repeats samples of --data-packing concat: leave one of "
            "them out, best-fit takes as many epochs as the run needs"
        )


def _blend(flag: str, words: tuple[str, ...]) -> Iterator[str]:
    def number(word: str) -> float | None:
        try:
            return float(word)
        except ValueError:
            return None

    weights = [number(w) for w in words[::2]]
    if len(words) == 1:
        return  # one prefix
    if len(words) % 2 or any(w is None for w in weights):
        yield f"{flag} {' '.join(words)}: give one PREFIX, or pairs WEIGHT PREFIX WEIGHT PREFIX ..."
    elif any(w is not None and not 0 <= w < float("inf") for w in weights) or not any(weights):
        yield f"{flag} {' '.join(words)}: weights must be at least 0 and not all 0"


@check()
def _checkpoints(v: Values) -> Iterator[str]:
    for name in ("save_interval_minutes", "async_save", "keep_last", "requeue"):
        if v[name] and v["save"] is None:
            yield f"{all_options()[name].flag} needs --save FOLDER"
    if v["keep_every"] is not None and v["keep_last"] is None:
        yield f"--keep-every {v['keep_every']} removes nothing without --keep-last N: give both"
    if v["loss_spike_factor"] is not None and not (v["save"] and v["save"] == v["load"]):
        yield (
            "--loss-spike-factor goes back to checkpoints of this run: give --save and --load the "
            "same FOLDER"
        )
    for name in (
        "finetune",
        "reset_iteration",
        "use_checkpoint_args",
        "exit_on_missing_checkpoint",
        "load_tag",
    ):
        if v[name] and v["load"] is None:
            yield f"{all_options()[name].flag} needs --load FOLDER"
    for name in ("finetune", "reset_iteration"):
        if v[name] and v["load"] is not None and v["load"] == v["save"]:
            yield (
                f"{all_options()[name].flag} would begin at iteration 0 again at each start, from "
                f"its own checkpoints: give --save another FOLDER than --load {v['load']}, and "
                "resume from that one without the flag"
            )
    if v["override_opt_param_scheduler"] and v["use_checkpoint_opt_param_scheduler"]:
        yield (
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler contradict "
            "each other"
        )


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
    if v["optimizer_implementation"] != "auto" and v["optimizer"] != "adam":
        yield (
            f"--optimizer-implementation {v['optimizer_implementation']} is for --optimizer adam, "
            f"but --optimizer is {v['optimizer']}: remove it"
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


CHECKS = (
    _head_width,
    _grouped_queries,
    _positions,
    _rotary_width,
    _activations,
    _tensor_parallel,
    _pipeline,
    _world,
    _device_order,
    _batch,
    _rampup,
    _lengths,
    _rate_units,
    _rate_lengths,
    _lowest_rate,
    _weight_decay,
    _precision,
    _loss_scale,
    _recompute,
    _split,
    _data,
    _packing,
    _checkpoints,
    _walltime,
    _kernels,
    _profile,
    _tokenizer,
)
