"""Settings for the training run: batches, optimizer, learning rate, precision, kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.option import (
    BATCH,
    COUNT,
    LEAST_NORMAL,
    MOST_SAMPLES,
    MOST_TOKENS,
    NATURAL,
    POSITIVE_RATE,
    RATE,
    SAMPLES,
    SHARE,
    TOKENS,
    Range,
    option,
)
from megatron.config.phases import (
    norm_limits,
    parse_batch_sizes,
    parse_curriculum,
    parse_iterations,
    parse_phases,
)

# With this limit the sum of squares of scaled gradients, for the global norm, stays below fp32's
# 2**128 for gradients up to 16.
_MOST_SCALE = 2.0**60
_IMPLEMENTATIONS = "auto fused apex torch"
_MOMENT: dict[str, Any] = dict(choices="fp32 bf16", value_names="float32=fp32 bfloat16=bf16")


@dataclass(frozen=True)
class BatchConfig:
    """Batch sizes and length of the run."""

    micro_batch_size: int = option(None, "Micro-batch size, in samples.", BATCH)
    global_batch_size: int = option(
        None,
        "Global batch size, in samples.",
        BATCH,
        derived="micro-batch-size x data-parallel size",
    )
    rampup_batch_size: tuple[int, ...] | None = option(
        None,
        "Batch size ramp-up: initial global batch size, increment, and number of samples over "
        "which it grows.",
        SAMPLES,
        metavar="START INCREMENT SAMPLES",
    )
    step_batch_size_schedule: str | None = option(
        None,
        "Global batch sizes, each after the number of consumed tokens at which it begins, such as "
        "'0:768 250B:1536 500B:3072'. The last one is --global-batch-size.",
        metavar="TOKENS:SAMPLES ...",
        syntax=parse_batch_sizes,
    )
    train_iters: int | None = option(None, "Number of training iterations.", COUNT)
    train_samples: int | None = option(None, "Number of training samples.", SAMPLES)
    train_tokens: int | None = option(
        None,
        "Number of training tokens. If --train-iters or --train-samples is given too, training "
        "ends at whichever comes first.",
        TOKENS,
    )
    calculate_per_token_loss: bool = option(
        False, "Weight micro-batches by their number of unmasked tokens instead of equally."
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning rate and weight decay."""

    optimizer: str = option(
        "adam",
        "Optimizer. adam is AdamW (decoupled weight decay). muon orthogonalizes the updates of the "
        "layers' matrices; other parameters use AdamW.",
        choices="adam sgd lion muon ademamix",
        value_names="adamw=adam fusedadam=adam fusedadamw=adam dist_muon=muon",
        hint="use --optimizer adam",
    )
    lr: float = option(None, "Maximum learning rate.", POSITIVE_RATE)
    min_lr: float = option(0.0, "Minimum learning rate.", RATE)
    decoupled_lr: float = option(
        None,
        "Maximum learning rate of the word embedding and the output layer.",
        POSITIVE_RATE,
        derived="lr",
    )
    decoupled_min_lr: float = option(
        None,
        "Minimum learning rate of the word embedding and the output layer.",
        RATE,
        derived="min-lr",
    )
    lr_decay_style: str = option(
        "linear",
        "Learning rate decay. WSD is warmup-stable-decay.",
        choices="constant linear cosine inverse-square-root WSD",
        value_names="warmup-stable-decay=WSD",
    )
    lr_decay_iters: int | None = option(
        None,
        "Number of iterations, warm-up included, after which the learning rate's decay ends.",
        COUNT,
        derived="train-iters",
    )
    lr_decay_samples: int | None = option(
        None,
        "Number of samples, warm-up included, after which the learning rate's decay ends.",
        SAMPLES,
        derived="train-samples",
    )
    lr_decay_tokens: int | None = option(
        None,
        "Number of tokens, warm-up included, after which the learning rate's decay ends.",
        TOKENS,
        derived="train-tokens",
    )
    lr_warmup_fraction: float | None = option(
        None,
        "Warm-up as a fraction of --lr-decay-iters, --lr-decay-samples or --lr-decay-tokens.",
        SHARE,
    )
    lr_warmup_init: float = option(0.0, "Learning rate at which the warm-up starts.", RATE)
    lr_warmup_iters: int = option(0, "Number of warm-up iterations.", NATURAL)
    lr_warmup_samples: int = option(0, "Number of warm-up samples.", Range(0, MOST_SAMPLES))
    lr_warmup_tokens: int | None = option(None, "Number of warm-up tokens.", Range(0, MOST_TOKENS))
    lr_wsd_decay_style: str = option(
        "exponential",
        "Shape of the final WSD decay.",
        choices="exponential linear cosine minus_sqrt",
        value_names="1-sqrt=minus_sqrt",
    )
    lr_wsd_decay_iters: int | None = option(
        None, "Length of the final WSD decay in iterations.", COUNT
    )
    lr_wsd_decay_samples: int | None = option(
        None, "Length of the final WSD decay in samples.", SAMPLES
    )
    lr_schedule: str | None = option(
        None,
        "Learning rate by phases, instead of --lr-decay-style and its lengths: 'warmup 1000, "
        "constant 80%, cosine'. See docs/schedules.md.",
        metavar="PHASES",
        syntax=parse_phases,
    )
    weight_decay: float = option(0.01, "Weight decay.", RATE)
    start_weight_decay: float = option(None, "Initial weight decay.", RATE, derived="weight-decay")
    end_weight_decay: float = option(None, "Final weight decay.", RATE, derived="weight-decay")
    weight_decay_incr_style: str = option(
        "constant",
        "How weight decay changes from its initial to its final value.",
        choices="constant linear cosine",
    )
    weight_decay_schedule: str | None = option(
        None,
        "Weight decay by phases, from --weight-decay: 'constant 50%, linear to 0.01'.",
        metavar="PHASES",
        syntax=parse_phases,
    )
    schedule_basis: dict[str, object] = option(  # noqa: RUF009
        dict,
        "Settings that the schedules follow if --use-checkpoint-opt_param-scheduler has taken them "
        "from a checkpoint.",
        flags="",
    )
    clip_grad: float = option(1.0, "Maximum global gradient norm. 0: no clipping.", NATURAL)
    clip_grad_by_kind: tuple[str, ...] | None = option(
        None,
        "Maximum norms of the gradients of some kinds of parameters: embedding (of tokens and "
        "positions), output (also of routers and of shared experts' gates), hidden (other matrices "
        "of layers), vector (norms and biases). These are clipped first; --clip-grad then limits "
        "the norm of the result.",
        metavar="KIND=NORM ...",
        syntax=norm_limits,
    )
    adam_beta1: float = option(0.9, "Adam beta1.", SHARE)
    adam_beta2: float = option(0.999, "Adam beta2.", SHARE)
    adam_beta1_schedule: str | None = option(
        None,
        "Adam beta1 by phases, from --adam-beta1.",
        metavar="PHASES",
        syntax=parse_phases,
    )
    adam_beta2_schedule: str | None = option(
        None,
        "Adam beta2 by phases, from --adam-beta2: 'constant 1000, linear 5000 to 0.99'.",
        metavar="PHASES",
        syntax=parse_phases,
    )
    adam_eps: float = option(1e-8, "Adam epsilon.", Range(LEAST_NORMAL, 1))
    exp_avg_dtype: str = option(
        "fp32",
        "Type of AdamW's first moment. bf16 saves 2 bytes per parameter; the moment is rounded "
        "stochastically, and the update is computed in fp32.",
        **_MOMENT,
    )
    exp_avg_sq_dtype: str = option("fp32", "The same for AdamW's second moment.", **_MOMENT)
    sgd_momentum: float = option(0.9, "SGD momentum.", SHARE)
    ema_decay: float | None = option(
        None,
        "Keep an exponential moving average of the weights with this decay, as an fp32 tensor "
        "along with the optimizer's state. The average is saved and loaded with this state. Unset: "
        "off.",
        SHARE,
    )
    ema_warmup: bool = option(
        False,
        "Use the decay min(--ema-decay, (1 + n) / (10 + n)) after n updates of the average.",
    )
    ema_interval: int = option(
        1, "Number of steps between updates of the average of the weights.", COUNT
    )
    lion_beta1: float = option(0.95, "Share of the momentum in Lion's update.", SHARE)
    lion_beta2: float = option(0.98, "Decay of Lion's momentum.", SHARE)
    ademamix_alpha: float = option(2.0, "Factor of AdEMAMix's slow average in its update.", RATE)
    ademamix_beta3: float = option(
        0.9999, "Decay of AdEMAMix's slow average.", Range(above=0, below=1)
    )
    ademamix_alpha_warmup: int | None = option(
        None, "Number of steps in which the factor of the slow average grows from 0.", COUNT
    )
    ademamix_beta3_warmup: int | None = option(
        None,
        "Number of steps in which the half-life of the slow average grows from that of "
        "--adam-beta1.",
        COUNT,
    )
    muon_momentum: float = option(0.9, "Muon momentum.", SHARE)
    muon_nesterov: bool = option(
        False, "Use Nesterov momentum in Muon.", flags="--muon-nesterov --muon-use-nesterov"
    )
    muon_split_qkv: bool = option(
        True,
        "Orthogonalize the fused query, key and value matrix as three matrices.",
        off_flags="--muon-no-split-qkv",
    )
    muon_scale_mode: str = option(
        "spectral",
        "Factor applied to Muon's update of a matrix [out, in]. spectral: sqrt(max(out, in)). "
        "shape_scaling: sqrt(max(1, out/in)). unit_rms_norm: sqrt(out/in).",
        choices="spectral unit_rms_norm shape_scaling",
    )
    muon_extra_scale_factor: float = option(
        1.0,
        "Further factor applied to Muon's update. With spectral, 0.2 gives it the size of Adam's.",
        POSITIVE_RATE,
    )
    muon_num_ns_steps: int = option(5, "Number of Muon's Newton-Schulz steps.", Range(1, 100))
    muon_coefficient_type: str = option(
        "quintic",
        "Coefficients of the Newton-Schulz steps. simple: the same in all steps. quintic: a cycle "
        "of 5 sets. polar_express: 8 sets, of which the last is repeated.",
        choices="simple quintic polar_express",
    )
    muon_fp32_matmul_prec: str = option(
        "medium",
        "Precision of the Newton-Schulz steps and of the messages that carry updates. "
        "medium: bf16. high: fp32.",
        choices="medium high",
    )
    qk_clip: bool = option(
        False,
        "After a step, scale down the query and key weights of heads whose largest attention logit "
        "was above --qk-clip-threshold.",
    )
    qk_clip_alpha: float = option(
        0.5,
        "Exponent of QK-clip: with eta = threshold / largest logit, the queries of a head are "
        "scaled by eta^X, and its keys by eta^(1-X). In grouped-query attention, the keys take the "
        "smallest eta of their group, and the queries the rest of their own eta.",
        Range(above=0, below=1),
    )
    qk_clip_threshold: float = option(
        100.0, "Largest attention logit that QK-clip leaves as it is.", Range(above=0, at_most=1e9)
    )

    @property
    def decouples(self) -> bool:
        """Return whether word embedding and output layer have a learning rate of their own."""
        basis = self.schedule_basis or vars(self)
        return any(basis.get(f"decoupled_{n}", basis[n]) != basis[n] for n in ("lr", "min_lr"))


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats and loss scale."""

    fp16: bool = option(False, "Train in fp16 with fp32 master weights.")
    bf16: bool = option(False, "Train in bf16 with fp32 master weights.")
    loss_scale: float | None = option(
        None,
        "Static fp16 loss scale. Unset or 0: dynamic.",
        Range(0, _MOST_SCALE),
        derived="dynamic",
    )
    initial_loss_scale: float = option(
        2.0**32, "Initial dynamic loss scale.", Range(1 / _MOST_SCALE, _MOST_SCALE)
    )
    min_loss_scale: float = option(
        1.0,
        "Minimum dynamic loss scale.",
        Range(1 / _MOST_SCALE, _MOST_SCALE),
        flags="--min-loss-scale --min-scale",
    )
    loss_scale_window: int = option(
        1000, "Number of steps without overflow after which the loss scale is doubled.", COUNT
    )
    hysteresis: int = option(
        2,
        "The loss scale is halved at the N-th overflow since the start, or since it was last "
        "doubled, and at each later overflow.",
        COUNT,
    )
    fp16_lm_cross_entropy: bool = option(
        False,
        "Compute the cross entropy in fp16.",
        inert="the cross entropy is always computed in fp32",
    )
    main_grads_dtype: str = option(
        "fp32",
        "Type in which gradients are accumulated and reduced. bf16 (only with --bf16) saves 2 "
        "bytes per parameter and half of the bytes in gradient messages, but rounds every sum.",
        choices="fp32 bf16",
        value_names="float32=fp32 bfloat16=bf16",
        shortcuts="--grad-reduce-in-bf16=bf16 --accumulate-allreduce-grads-in-fp32=fp32",
    )

    @property
    def dtype_name(self) -> str:
        """Return the compute dtype: 'float16', 'bfloat16' or 'float32'."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"

    @property
    def weight_bytes(self) -> int:
        """Return the bytes per element of the compute dtype."""
        return 4 if self.dtype_name == "float32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes per element of the gradient sums."""
        return 2 if self.main_grads_dtype == "bf16" else 4


@dataclass(frozen=True)
class KernelConfig:
    """Fused kernels and attention implementation.

    Each kernel has a plain torch equivalent that gives the same results up to rounding, except that
    torch draws other dropout masks. A kernel is used if a library for the device is loaded, if no
    flag forbids it and, on a CPU, if it is faster than torch or requested by "fused".
    megatron.kernels.choose decides, and the log reports the decision.
    """

    use_flash_attn: bool = option(
        False,
        "Use flash-attn if it is installed and supports the device.",
        inert="--attention-backend auto uses flash-attn wherever it runs",
        flags="--use-flash-attn --use-flash-attn-v2 --use-flash-attn-triton "
        "--use-flash-attn-v1 --use-flash-attn-builder",
    )
    attention_backend: str = option(
        "auto",
        "Attention implementation. auto: flash-attn if it runs; else blocked if that is "
        "faster (on a CPU without a ring: bf16, and fp32 with a window or up to 512 tokens, unless "
        "measurements on this CPU differ); else torch's. flash: flash-attn, else torch's. fused: "
        "torch's. Where torch's lacks something (soft-capping, dropout on a CPU, features of a "
        "ring), blocked replaces it. blocked: matrix products over blocks of queries, without "
        "storing all scores. unfused, local: explicit softmax(q k^T) v.",
        choices="auto flash fused blocked unfused local",
    )
    cuda_graph_impl: str | None = option(
        None,
        "local: record each forward and backward pass of a micro-batch over a chunk once, as a "
        "CUDA or HIP graph, and replay it: the host launches a pass in one call. Values do not "
        "change. On a CPU, operators are recorded and called again, for tests: this is not faster. "
        "transformer_engine, for Megatron's scripts, means local. Dropout needs the kernels' "
        "masks, attention dropout also --attention-backend blocked or unfused. Not supported with "
        "experts, separated documents, ring attention, ZeRO 2 and 3, or your own layers or models.",
        choices="local",
        value_names="transformer_engine=local",
        shortcuts="--enable-cuda-graph=local --external-cuda-graph=local",
    )
    cuda_graph_warmup_steps: int = option(
        3, "Number of steps after each start that run eagerly before passes are recorded.", COUNT
    )
    masked_softmax_fusion: bool = option(
        True,
        "Fuse scale, mask and softmax of --attention-backend unfused.",
        off_flags="--no-masked-softmax-fusion --no-scaled-masked-softmax-fusion",
    )
    bias_gelu_fusion: bool = option(
        True,
        "Fuse bias and activation (GELU in both forms, SwiGLU, GeGLU, squared ReLU).",
        shortcuts={"--bias-swiglu-fusion": True},
        off_flags="--no-bias-gelu-fusion --no-bias-swiglu-fusion",
    )
    bias_dropout_fusion: bool = option(
        True,
        "Fuse bias, dropout and residual sum. Fused and unfused operators draw different masks.",
    )
    gradient_accumulation_fusion: bool = option(
        True,
        "Add weight gradients to their accumulated sum inside the matrix product that computes "
        "them.",
    )
    persist_layer_norm: bool = option(
        True,
        "Compute norms, and the residual sum before them, in fused kernels.",
        off_flags="--no-persist-layer-norm --no-layer-norm-fusion",
    )
    rope_fusion: bool = option(
        True,
        "Fuse RoPE with reading the QKV projection.",
        shortcuts={"--apply-rope-fusion": True},
        off_flags="--no-rope-fusion --disable-te-fused-rope",
    )
    cross_entropy_loss_fusion: bool = option(
        True, "Fuse the cross entropy. The fused kernel needs no copy of the logits."
    )
    moe_permute_fusion: bool = option(
        True,
        "Fuse the permutation of tokens to their experts, and the weighted sum on the way back.",
    )
    cross_entropy_chunk_tokens: int | None = option(
        None,
        "Number of tokens whose logits are held in memory at a time. 0: a whole micro-batch, as "
        "always with schedules that split backward passes.",
        NATURAL,
        derived="512 on a CPU, 4096 on a GPU",
    )
    norm_implementation: str = option(
        "auto",
        "Norm kernels. auto: ours if available and faster, else torch's. fused: ours if "
        "available. apex: apex's if installed for the device. torch: torch's. If the chosen "
        "kernels are not available, the log says so.",
        choices=_IMPLEMENTATIONS,
    )
    optimizer_implementation: str = option(
        "auto",
        "Optimizer kernels: AdamW over all weights in one pass. Choices as for "
        "--norm-implementation.",
        choices=_IMPLEMENTATIONS,
    )


@dataclass(frozen=True)
class TrainingConfig:
    """Training loop: seed, evaluation, and end of the run."""

    seed: int = option(
        1234, "Random seed for weights, data order and dropout.", Range(0, 2**32 - 1)
    )
    deterministic_mode: bool = option(
        False,
        "On a GPU, use only algorithms that give the same bits each time, so that a resumed run is "
        "bit-identical; attention is slower. On a CPU all algorithms do.",
    )
    eval_iters: int = option(
        100,
        "Number of iterations per evaluation. 0: no evaluation.",
        Range(0, 10**6),
        value_names={"-1": 0},
        hint="below 1 there is no evaluation, as in Megatron; to use all validation data, give its "
        "number of global batches",
    )
    eval_ema: bool = option(
        False, "Also measure the loss of the average of the weights at each evaluation."
    )
    eval_tasks: tuple[str, ...] | None = option(
        None,
        "Files of tasks to evaluate at each evaluation: JSON lines with 'context', 'choices' and "
        "'answer', or with 'context' and 'ending'.",
        metavar="FILE ...",
    )
    eval_interval: int = option(1000, "Number of iterations between evaluations.", COUNT)
    eval_at_start: bool = option(
        False,
        "Also evaluate before the first step of a run that starts at iteration 0.",
        flags="--eval-at-start --eval-first",
    )
    exit_interval: int | None = option(
        None,
        "Save and exit after an iteration that is a multiple of N. 0: never.",
        NATURAL,
        one_start=True,
    )
    exit_duration_in_mins: float | None = option(
        None,
        "Save and exit within this many minutes from the start of the program.",
        Range(above=0),
        metavar="MINUTES",
        one_start=True,
    )
    exit_signal_handler: bool = option(
        None,
        "On SIGTERM, SIGUSR1, SIGINT (Ctrl-C) or SIGHUP (except under nohup), save and exit with "
        "code 0. A second SIGINT, or a third while a checkpoint is being written, exits "
        "immediately with code 130.",
        derived="on with --save",
    )
    walltime: str | None = option(
        None,
        "Time limit from the start of the program: D-HH:MM:SS, HH:MM:SS, MM:SS or minutes. The run "
        "saves and exits before it. none: no limit.",
        metavar="TIME",
        derived="under Slurm with --save, the remaining time of the job",
        one_start=True,
    )
    requeue: bool = option(
        False,
        "Requeue the Slurm job if a signal other than SIGINT, its time limit or, after a save, the "
        "loss of a rank ends it before training is done.",
        one_start=True,
    )
    max_restarts: int = option(
        0,
        "Restart within the job up to N times after the loss of a rank: processes that survive "
        "continue, lost ones are replaced. 0: a lost rank ends the job.",
        NATURAL,
        one_start=True,
    )
    spare_ranks: int = option(
        0,
        "Number of processes, the last of those that are started, that wait to replace lost ones.",
        NATURAL,
        one_start=True,
    )
    min_ranks: int | None = option(
        None,
        "If more ranks are lost than spare ones are left, continue with fewer data-parallel "
        "replicas and more micro-batches per step, on at least N ranks.",
        COUNT,
        derived="the number of ranks at the start",
        one_start=True,
    )
    replace_slow_ranks: float | None = option(
        None,
        "Restart on a spare node in place of the node of a rank whose computing time is at least "
        "FACTOR times the median of its pipeline stage, at three log lines in a row. Without a spare "
        "node slow ranks are only reported.",
        Range(above=1),
        metavar="FACTOR",
    )
    max_consecutive_skips: int = option(
        None,
        "Exit with an error after N consecutive steps with non-finite loss or gradients, or "
        "without a token in the loss. 0: never. With a dynamic loss scale, gradients count only "
        "once the scale cannot fall further.",
        NATURAL,
        derived="10, or 100 in fp16",
    )
    loss_spike_factor: float | None = option(
        None,
        "If a step's loss is not finite or exceeds this factor times the median of recent steps, "
        "roll back to the last good checkpoint and skip the samples of the step. Unset: off.",
        Range(above=1),
        metavar="FACTOR",
    )
    loss_spike_window: int = option(
        100, "Number of steps in the median of --loss-spike-factor.", Range(2, 10**5)
    )
    skip_train_iteration_range: tuple[str, ...] | None = option(
        None,
        "Iterations whose data is consumed without training, counted from 1: FIRST-LAST, with both "
        "ends, or one number. The learning rate does not advance.",
        metavar="FIRST-LAST ...",
        flags="--skip-train-iteration-range --iterations-to-skip --train-iters-to-skip",
        syntax=parse_iterations,
    )
    curriculum_learning: dict[str, Any] = option(  # noqa: RUF009
        dict,
        "Sequence lengths that grow during the run: curriculum_learning of a DeepSpeed JSON.",
        flags="",
        syntax=parse_curriculum,
    )
    hang_timeout: float = option(
        300.0,
        "If a rank makes no progress for this many seconds, the job reports which rank waits for "
        "which, and exits; with --max-restarts, it replaces the process that hangs and continues "
        "instead. 0: never. For the first step and the first evaluation batch, the limit "
        "is at least 0.9 times --distributed-timeout-minutes.",
        NATURAL,
        metavar="SECONDS",
    )
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        None,
        "Number of steps between checks that replicated weights are identical (data-parallel "
        "copies, weights not sharded over tensor-parallel ranks, tied embeddings). They are also "
        "checked after the first step that changes them and before every save.",
        COUNT,
    )
    skip_train: bool = option(False, "Evaluate only.", one_start=True)
    allocator_tuning: bool = option(
        True, "Let malloc keep the freed memory of a step for the next step (CPU only)."
    )
    kill_switch_file: str | None = option(
        None,
        "Save and exit once this file exists.",
        metavar="FILE",
        flags="--kill-switch-file --kill-switch-path",
        one_start=True,
    )
    manual_gc: bool = option(
        False, "Run Python's garbage collection at fixed iterations on all ranks."
    )
    manual_gc_interval: int = option(
        0,
        "Number of iterations between garbage collections. 0: only at evaluation and saving.",
        NATURAL,
    )
