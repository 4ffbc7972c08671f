"""Checks of the settings of training.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from megatron.config.checks import Problems, check, nearest_multiples
from megatron.config.duration import duration_s
from megatron.config.phases import (
    PHASED,
    parse_batch_sizes,
    parse_curriculum,
    parse_phases,
)
from megatron.config.pieces import Pieces
from megatron.config.settings import Sections, all_options

CONFLICTS = """
    fp16 bf16
    train_iters train_samples
    lr_decay_iters lr_decay_samples lr_decay_tokens
    lr_warmup_iters lr_warmup_samples lr_warmup_tokens lr_warmup_fraction
    lr_wsd_decay_iters lr_wsd_decay_samples
    override_opt_param_scheduler use_checkpoint_opt_param_scheduler
    rampup_batch_size step_batch_size_schedule
    weight_decay_incr_style weight_decay_schedule
    norm_implementation=fused persist_layer_norm=false: the latter leaves norms to torch
    curriculum_learning data_packing=best-fit: samples of whole documents have one length
    curriculum_learning cuda_graph_impl: a graph has one length
    curriculum_learning step_batch_size_schedule: its tokens would depend on the lengths
    cuda_graph_impl num_experts: the host reads how many tokens each expert gets
    cuda_graph_impl data_packing=best-fit: documents determine which kernels run
""" + "\n".join(
    f"lr_schedule lr_{each}"
    for each in (
        "warmup_iters warmup_samples warmup_tokens warmup_fraction warmup_init decay_iters "
        "decay_samples decay_tokens wsd_decay_iters wsd_decay_samples"
    ).split()
)
ASCENDING = """
    min_lr lr
    lr_warmup_init lr
    decoupled_min_lr decoupled_lr
    min_loss_scale initial_loss_scale
    start_weight_decay end_weight_decay
"""
NEEDED = """
    bf16=true  main_grads_dtype
    optimizer=adam  optimizer_implementation exp_avg_dtype exp_avg_sq_dtype
    optimizer=adam  adam_beta1_schedule adam_beta2_schedule
    ema_decay  ema_warmup ema_interval eval_ema save_hf_ema
    optimizer=lion  lion_beta1 lion_beta2
    optimizer=ademamix  ademamix_alpha ademamix_beta3 ademamix_alpha_warmup ademamix_beta3_warmup
    optimizer=muon  muon_momentum muon_nesterov muon_split_qkv muon_scale_mode
    optimizer=muon  muon_extra_scale_factor muon_num_ns_steps muon_coefficient_type
    optimizer=muon  muon_fp32_matmul_prec
    qk_clip=true  qk_clip_alpha qk_clip_threshold
    cuda_graph_impl=local  cuda_graph_warmup_steps
    max_restarts  spare_ranks min_ranks replace_slow_ranks
    straggler_report  replace_slow_ranks
"""


@check("micro_batch_size", "global_batch_size", "data_parallel_size")
def _batch(config: Sections) -> Problems:
    mbs = config.batch.micro_batch_size
    gbs = config.batch.global_batch_size
    dp = config.parallel.data_parallel_size
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
    if (schedule := config.batch.step_batch_size_schedule) is None:
        return
    sizes = parse_batch_sizes(schedule)
    if sizes[-1][1] != gbs:
        yield (
            f"--global-batch-size {gbs} is not the last size of --step-batch-size-schedule, "
            f"{sizes[-1][1]}: leave --global-batch-size out"
        )
    named = (("size", size) for _, size in sizes)
    yield from _not_multiples(config, "--step-batch-size-schedule", named)


@check("min_ranks", "world_size")
def _fewer_ranks(config: Sections) -> Problems:
    ranks = config.parallel.world_size
    least = config.training.min_ranks
    if least is not None and least > ranks:
        yield (
            f"--min-ranks {least} is more than the number of ranks at the start, "
            f"{ranks}: give at most as many"
        )


@check("global_batch_size")
def _rampup(config: Sections) -> Problems:
    batch = config.batch
    ramp = batch.rampup_batch_size
    gbs = batch.global_batch_size
    if ramp is None:
        return
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
            "the difference between the two sizes"
        )
    if batch.micro_batch_size is None or config.parallel.data_parallel_size is None:
        return
    sizes = (("start", start), ("increment", increment))
    yield from _not_multiples(config, "--rampup-batch-size", sizes)


def _not_multiples(config: Sections, flag: str, sizes: Iterable[tuple[str, int]]) -> Problems:
    step = config.batch.micro_batch_size * config.parallel.data_parallel_size
    for what, value in sizes:
        if value % step:
            yield (
                f"{flag}: its {what} {value} is not a multiple of --micro-batch-size x "
                f"data-parallel size = {step}: use {nearest_multiples(value, step)}"
            )


@check("curriculum_learning", "seq_length")
def _curriculum(config: Sections) -> Problems:
    if not config.training.curriculum_learning:
        return
    lengths = [length for _, length in parse_curriculum(config.training.curriculum_learning)]
    if max(lengths) > config.model.seq_length:
        yield (
            f"curriculum_learning reaches {max(lengths)} tokens, but --seq-length is "
            f"{config.model.seq_length}: make them equal"
        )
    parallel = config.parallel
    context = parallel.context_parallel_size or 1
    shares = context * (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)
    multiple_of = math.lcm(shares, 2 * context if context > 1 else 1)
    if odd := [length for length in lengths if length % multiple_of]:
        yield (
            f"curriculum_learning has samples of {odd[0]} tokens, but context and sequence "
            f"parallelism need multiples of {multiple_of}: use a difficulty_step and a "
            "min_difficulty that are such multiples"
        )
    if context > 1 and config.model.attention_dropout:
        yield (
            f"curriculum_learning does not work with {config.written('attention_dropout')} and "
            "context parallelism: use one of them"
        )


def _units(config: Sections, prefix: str) -> list[str]:
    return [unit for unit in ("iters", "samples") if config.get(f"{prefix}_{unit}")]


@check("lr_decay_style")
def _rate_lengths(config: Sections) -> Problems:
    for unit in ("iters", "samples", "tokens"):
        warmup = config.get(f"lr_warmup_{unit}")
        decay = config.get(f"lr_decay_{unit}")
        # constant and inverse-square-root never end, so a warm-up may be as long as the run
        ends = config.optimizer.lr_decay_style in ("linear", "cosine", "WSD")
        if ends and warmup and decay and warmup >= decay:
            yield (
                f"--lr-warmup-{unit} {warmup} must be less than --lr-decay-{unit} {decay} (which "
                f"is --train-{unit} unless given)"
            )
    if config.optimizer.lr_decay_style != "WSD":
        return
    wsd = _units(config, "lr_wsd_decay")
    if not wsd:
        unit = [*_units(config, "lr_decay"), "iters"][0]
        yield f"--lr-decay-style WSD needs the length of its last phase: give --lr-wsd-decay-{unit}"
    for unit in wsd:
        length = config.get(f"lr_wsd_decay_{unit}")
        decay = config.get(f"lr_decay_{unit}")
        if decay and length + (config.get(f"lr_warmup_{unit}") or 0) > decay:
            yield (
                f"--lr-wsd-decay-{unit} {length} and the warm-up together are longer than "
                f"--lr-decay-{unit} {decay}"
            )


@check("weight_decay", "start_weight_decay", "end_weight_decay")
def _weight_decay(config: Sections) -> Problems:
    optimizer = config.optimizer
    start = optimizer.start_weight_decay
    end = optimizer.end_weight_decay
    style = optimizer.weight_decay_incr_style
    if style == "constant" and not start == end == optimizer.weight_decay:
        yield (
            f"--start-weight-decay {start:g} and --end-weight-decay {end:g} need "
            "--weight-decay-incr-style linear or cosine; with constant only --weight-decay has an "
            "effect"
        )


@check()
def _schedules(config: Sections) -> Problems:
    if len(run := _units(config, "train")) == 1:
        for what in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
            for unit in _units(config, what):
                if unit != run[0]:
                    flag = f"--{what.replace('_', '-')}"
                    yield f"{flag}-{unit} does not fit --train-{run[0]}: use {flag}-{run[0]}"
    limit = config.training.walltime
    if limit not in (None, "none") and not duration_s(limit or ""):
        yield f"--walltime {limit}: give D-HH:MM:SS, HH:MM:SS, MM:SS, minutes or none"
    for name in PHASED[1:]:  # --lr-schedule may have all shapes
        flag = all_options()[name].flag
        for phase in parse_phases(config.get(name) or "constant"):
            ends = [value for which, value in phase.numbers.items() if which in ("from", "to")]
            if phase.shape == "power":
                yield f"{flag}: the shape power is for --lr-schedule"
            elif phase.shape not in ("constant", "warmup") and "to" not in phase.numbers:
                yield f"{flag}: '{phase.shape}' needs the value at its end: add 'to VALUE'"
            if name.startswith("adam_beta") and any(value >= 1 for value in ends):
                yield f"{flag}: {max(ends):g} must be less than 1"


@check("muon_coefficient_type", "muon_num_ns_steps")
def _newton_schulz(config: Sections) -> Problems:
    optimizer = config.optimizer
    kind = optimizer.muon_coefficient_type
    steps = optimizer.muon_num_ns_steps
    if optimizer.optimizer != "muon":
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


@check("decoupled_lr")
def _decoupled_rate(config: Sections) -> Problems:
    names = "embedding.word_embeddings.weight", "output_layer.weight"
    ends = names[: 1 + config.model.untie_embeddings_and_output_weights]
    if config.optimizer.decouples and not any(map(config.model.trains, ends)):
        yield (
            "--decoupled-lr has no effect: --freeze or --lora-rank leaves neither the word embedding "
            "nor the output layer to train; leave it out"
        )


RATE_SCHEDULE = ("lr_decay", "lr_warmup", "lr_wsd", "lr_schedule")
"""Prefixes of the settings that shape the learning rate."""


def piece_problems(
    cuda_graph_impl: str | None, pieces: Pieces, explicit: Mapping[str, object]
) -> Problems:
    """Yield problems of the user's own pieces with the settings that were set explicitly."""
    if pieces.loss is not None and explicit.get("mtp_num_layers"):
        yield (
            f"your own loss ({pieces.describe()['loss']}) does not include the losses of "
            f"--mtp-num-layers {explicit['mtp_num_layers']}: leave one of them out"
        )
    beside = [name for name in explicit if name.startswith(RATE_SCHEDULE)]
    if pieces.learning_rate is not None and beside:
        yield (
            f"{all_options()[beside[0]].written(explicit[beside[0]])} has no effect on your own "
            f"learning rate ({pieces.describe()['learning_rate']}): leave one of them out"
        )
    for name in ("blend_schedule", "max_epochs", "data_order"):
        if pieces.datasets is not None and explicit.get(name) is not None:
            yield (
                f"{all_options()[name].written(explicit[name])} is for data files, and the run reads "
                f"your own data sets ({pieces.describe()['datasets']}): leave one of them out"
            )
    for name in ("layer", "model", "loss"):
        if cuda_graph_impl is not None and getattr(pieces, name) is not None:
            yield (
                f"your own {name} ({pieces.describe()[name]}) does not work with "
                f"--cuda-graph-impl {cuda_graph_impl}: replays would not run its Python code in "
                "each pass. Use --cuda-graph-impl none"
            )


@check("zero_stage")
def _captured_passes(config: Sections) -> Problems:
    model = config.model
    kernels = config.kernels
    parallel = config.parallel
    if kernels.cuda_graph_impl is None:
        return
    masks = "a replay would repeat the masks, which come from torch's generator"
    narrow = config.precision.dtype_name != "float32"
    unfused = kernels.attention_backend in ("unfused", "local")
    torch_drops = model.attention_dropout and not unfused
    packed = config.data.data_packing == "best-fit"
    for holds, name, reason, instead in (
        (
            torch_drops and kernels.attention_backend != "blocked",
            "attention_dropout",
            masks,
            "--attention-dropout 0.0, --attention-backend blocked",
        ),
        (
            (model.hidden_dropout or (model.attention_dropout and unfused))
            and not kernels.bias_dropout_fusion,
            "bias_dropout_fusion",
            masks,
            "--bias-dropout-fusion",
        ),
        (
            model.hidden_dropout and model.fp32_residual_connection and narrow,
            "fp32_residual_connection",
            f"with dropout {masks}",
            "--hidden-dropout 0.0",
        ),
        (
            config.data.reset_attention_mask and not packed,
            "reset_attention_mask",
            "the division into documents determines which kernels run",
            "--no-reset-attention-mask",
        ),
        (
            config.engine.zero_stage > 1,
            "zero_stage",
            "a replay uses fixed addresses, but those of gradients or weights change",
            "--zero-stage 1",
        ),
        (
            parallel.context_parallel_size > 1 and parallel.cp_comm_type != "a2a",
            "cp_comm_type",
            "only collectives are captured, and a ring sends point-to-point messages",
            "--cp-comm-type a2a",
        ),
    ):
        if holds:
            yield (
                f"{config.written(name)} does not work with "
                f"--cuda-graph-impl {kernels.cuda_graph_impl}: {reason}. Use "
                f"{instead}, or --cuda-graph-impl none"
            )
