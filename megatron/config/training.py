"""Settings of the training run: batches, optimizer, learning rate, precision, kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.option import LEAST_NORMAL, MOST_BATCH, MOST_SAMPLES, MOST_TOKENS, option

# the square of a gradient, for the norm of all, then stays below fp32's 2**128 up to 16
_MOST_SCALE = 2.0**60
_IMPLEMENTATIONS = ("auto", "fused", "apex", "torch")


@dataclass(frozen=True)
class BatchConfig:
    """Batch sizes and length of the run."""

    title: ClassVar[str] = "batch and length of the run"

    micro_batch_size: int = option(
        None, "Samples of one forward pass on one replica.", at_least=1, at_most=MOST_BATCH
    )
    global_batch_size: int = option(
        None,
        "Samples of one optimizer step.",
        at_least=1,
        at_most=MOST_BATCH,
        derived="micro-batch-size x data-parallel size",
    )
    rampup_batch_size: tuple[int, ...] | None = option(
        None,
        "Batch ramp-up: first global batch, increment, samples until the full batch.",
        at_least=1,
        at_most=MOST_SAMPLES,
        metavar="START INCREMENT SAMPLES",
    )
    train_iters: int | None = option(None, "Length of the run in iterations.", at_least=1)
    train_samples: int | None = option(
        None, "Length of the run in samples.", at_least=1, at_most=MOST_SAMPLES
    )
    train_tokens: int | None = option(
        None,
        "Length of the run in tokens; ends it early beside another length.",
        at_least=1,
        at_most=MOST_TOKENS,
    )
    calculate_per_token_loss: bool = option(
        False, "Weigh micro-batches by their unmasked tokens instead of equally."
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning rate and weight decay over the run."""

    title: ClassVar[str] = "optimizer and learning rate"

    optimizer: str = option(
        "adam",
        "adam is AdamW (decoupled weight decay).",
        choices=("adam", "sgd"),
        value_names=dict.fromkeys(("adamw", "fusedadam", "fusedadamw"), "adam"),
        hint="use --optimizer adam",
    )
    lr: float = option(None, "Highest learning rate.", above=0, at_most=1000)
    min_lr: float = option(0.0, "Lowest learning rate.", at_least=0, at_most=1000)
    lr_decay_style: str = option(
        "linear",
        "Form of the decay; WSD is warmup-stable-decay.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        value_names={"warmup-stable-decay": "WSD"},
    )
    lr_decay_iters: int | None = option(
        None, "Decay length in iterations.", at_least=1, derived="train-iters"
    )
    lr_decay_samples: int | None = option(
        None, "Decay length in samples.", at_least=1, at_most=MOST_SAMPLES, derived="train-samples"
    )
    lr_decay_tokens: int | None = option(
        None, "Decay length in tokens.", at_least=1, at_most=MOST_TOKENS, derived="train-tokens"
    )
    lr_warmup_fraction: float | None = option(
        None, "Warm-up as a part of the decay length.", at_least=0, below=1
    )
    lr_warmup_iters: int = option(0, "Warm-up in iterations.", at_least=0)
    lr_warmup_samples: int = option(0, "Warm-up in samples.", at_least=0, at_most=MOST_SAMPLES)
    lr_warmup_tokens: int | None = option(
        None, "Warm-up in tokens.", at_least=0, at_most=MOST_TOKENS
    )
    lr_wsd_decay_style: str = option(
        "exponential",
        "Form of the final decay of WSD.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = option(None, "Final decay of WSD in iterations.", at_least=1)
    lr_wsd_decay_samples: int | None = option(
        None, "Final decay of WSD in samples.", at_least=1, at_most=MOST_SAMPLES
    )
    weight_decay: float = option(0.01, "Weight decay.", at_least=0, at_most=1000)
    start_weight_decay: float = option(
        None, "Weight decay at the start.", at_least=0, at_most=1000, derived="weight-decay"
    )
    end_weight_decay: float = option(
        None, "Weight decay at the end.", at_least=0, at_most=1000, derived="weight-decay"
    )
    weight_decay_incr_style: str = option(
        "constant", "Form of the change of weight decay.", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = option(
        1.0, "Gradients are scaled down to this global norm; 0 turns it off.", at_least=0
    )
    adam_beta1: float = option(0.9, "Decay of Adam's first moment.", at_least=0, below=1)
    adam_beta2: float = option(0.999, "Decay of Adam's second moment.", at_least=0, below=1)
    adam_eps: float = option(1e-8, "Epsilon of Adam.", at_least=LEAST_NORMAL, at_most=1)
    sgd_momentum: float = option(0.9, "Momentum of SGD.", at_least=0, below=1)


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats and loss scale."""

    title: ClassVar[str] = "precision"

    fp16: bool = option(False, "Compute in fp16 with fp32 master weights.")
    bf16: bool = option(False, "Compute in bf16 with fp32 master weights.")
    loss_scale: float | None = option(
        None,
        "Fixed loss scale of fp16; unset or 0 is dynamic.",
        at_least=0,
        at_most=_MOST_SCALE,
        derived="dynamic",
    )
    initial_loss_scale: float = option(
        2.0**32, "First dynamic loss scale.", at_least=1 / _MOST_SCALE, at_most=_MOST_SCALE
    )
    min_loss_scale: float = option(
        1.0,
        "Lowest dynamic loss scale.",
        at_least=1 / _MOST_SCALE,
        at_most=_MOST_SCALE,
        flags=("--min-loss-scale", "--min-scale"),
    )
    loss_scale_window: int = option(
        1000, "Steps without overflow until the scale is raised.", at_least=1
    )
    hysteresis: int = option(2, "Overflows until the scale is lowered.", at_least=1)
    fp16_lm_cross_entropy: bool = option(
        False, "Cross entropy in fp16.", inert="it is always computed in fp32"
    )
    main_grads_dtype: str = option(
        "fp32",
        "Format in which gradients are summed, over micro-batches and over replicas; bf16, with "
        "--bf16 only, "
        "saves 2 bytes for each parameter and half of the reduction's messages, and rounds every "
        "sum.",
        choices=("fp32", "bf16"),
        value_names={"float32": "fp32", "bfloat16": "bf16"},
        shortcuts={"--grad-reduce-in-bf16": "bf16", "--accumulate-allreduce-grads-in-fp32": "fp32"},
    )

    @property
    def dtype_name(self) -> str:
        """Format of computation: 'float16', 'bfloat16' or 'float32'."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element in the format of computation."""
        return 4 if self.dtype_name == "float32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of the gradient sums."""
        return 2 if self.main_grads_dtype == "bf16" else 4


@dataclass(frozen=True)
class KernelConfig:
    """Fused kernels and attention backends; all have a plain torch path that computes the same to
    rounding.

    A fusion that is on is used where a kernel library for the device is loaded and, on a CPU, where
    it is faster than torch's operators; megatron.kernels.choose decides, and the log says what was
    decided.
    """

    title: ClassVar[str] = "kernels"

    use_flash_attn: bool = option(
        False,
        "flash-attn where it is installed and the device can run it.",
        inert="--attention-backend auto takes flash-attn wherever it can run",
        flags=(
            "--use-flash-attn",
            "--use-flash-attn-v2",
            "--use-flash-attn-triton",
            "--use-flash-attn-v1",
            "--use-flash-attn-builder",
        ),
        off_flags=("--no-use-flash-attn",),
    )
    attention_backend: str = option(
        "auto",
        "auto takes flash-attn where it can run, else blocked where it is faster (on a CPU: bf16, "
        "and fp32 up to "
        "512 tokens), else torch's scaled_dot_product_attention; flash takes flash-attn or "
        "torch's; fused takes "
        "torch's; blocked is made of matrix products of query blocks and keeps no scores; unfused "
        "and local are an "
        "explicit softmax(q k^T) v.",
        choices=("auto", "flash", "fused", "blocked", "unfused", "local"),
    )
    masked_softmax_fusion: bool = option(
        True,
        "Scale, mask and softmax of --attention-backend unfused in one kernel.",
        flags=(),
        off_flags=("--no-masked-softmax-fusion", "--no-scaled-masked-softmax-fusion"),
    )
    bias_gelu_fusion: bool = option(
        True,
        "Bias and activation (GELU in its tanh form, SwiGLU, squared ReLU) in one kernel.",
        flags=(),
        shortcuts={"--bias-swiglu-fusion": True},
        off_flags=("--no-bias-gelu-fusion", "--no-bias-swiglu-fusion"),
    )
    bias_dropout_fusion: bool = option(
        True,
        "Bias, dropout and residual in one kernel; its dropout masks are other ones than torch's.",
        flags=(),
        off_flags=("--no-bias-dropout-fusion",),
    )
    gradient_accumulation_fusion: bool = option(
        True,
        "Weight gradients added into the fp32 sum by the matrix product, without a tensor of their "
        "own.",
        flags=(),
        off_flags=("--no-gradient-accumulation-fusion",),
    )
    persist_layer_norm: bool = option(
        True,
        "Norm, with the residual sum before it, in one kernel.",
        flags=(),
        off_flags=("--no-persist-layer-norm", "--no-layer-norm-fusion"),
    )
    rope_fusion: bool = option(
        True,
        "Rotary embedding in one kernel, read from the fused projection.",
        flags=(),
        shortcuts={"--apply-rope-fusion": True},
        off_flags=("--no-rope-fusion", "--disable-te-fused-rope"),
    )
    cross_entropy_loss_fusion: bool = option(
        True,
        "Cross entropy in two passes over the logits, which the gradient overwrites.",
        flags=(),
        off_flags=("--no-cross-entropy-loss-fusion",),
    )
    cross_entropy_chunk_tokens: int | None = option(
        None,
        "Tokens whose logits exist at a time in training and evaluation; 0 takes a micro-batch at "
        "once.",
        at_least=0,
        derived="512 on a CPU, 4096 on a GPU",
    )
    norm_implementation: str = option(
        "auto",
        "auto takes our kernel where it is there and faster, else torch's; fused takes our kernel "
        "wherever it is "
        "there; apex takes apex's where it is installed for the device. The log says so where a "
        "wish cannot be met.",
        choices=_IMPLEMENTATIONS,
    )
    optimizer_implementation: str = option(
        "auto",
        "AdamW over all weights in one pass; the choices are those of --norm-implementation.",
        choices=_IMPLEMENTATIONS,
    )


@dataclass(frozen=True)
class TrainingConfig:
    """The loop: seed, evaluation, and when it ends."""

    title: ClassVar[str] = "training loop"

    seed: int = option(
        1234, "Seed of weights, data order and dropout.", at_least=0, at_most=2**32 - 1
    )
    eval_iters: int = option(
        100,
        "Iterations of one evaluation; 0 turns it off.",
        at_least=0,
        at_most=10**6,
        value_names={"-1": 0},
        hint="below 1 there is no evaluation, as in Megatron; for all validation data give their "
        "global batches",
    )
    eval_interval: int = option(1000, "Iterations between evaluations.", at_least=1)
    exit_interval: int | None = option(
        None, "End after an iteration that is a multiple of this; 0: never.", at_least=0
    )
    exit_duration_in_mins: float | None = option(
        None, "End after this many minutes.", above=0, metavar="MINUTES"
    )
    exit_signal_handler: bool = option(
        None,
        "Save and end with exit code 0 on SIGTERM, SIGUSR1 and, but under nohup, SIGHUP.",
        derived="on with --save",
    )
    walltime: str | None = option(
        None,
        "When the job ends, counted from the start of the program: D-HH:MM:SS, HH:MM:SS, MM:SS or "
        "minutes. The "
        "run saves and ends in time for it; 'none' lets it run on.",
        metavar="TIME",
        derived="under Slurm, what squeue says is left of the job",
    )
    requeue: bool = option(
        False,
        "Put the Slurm job back into the queue when a signal or the end of its time ends it before "
        "training is "
        "done.",
    )
    max_consecutive_skips: int = option(
        None,
        "End with an error after so many steps in a row whose loss or gradients were not finite; "
        "0: never.",
        at_least=0,
        derived="10; in fp16 100",
    )
    loss_spike_factor: float | None = option(
        None,
        "Go back to the last good checkpoint and leave out the samples of a step whose loss is "
        "more than so many "
        "times the median of the last steps, or not finite; without it nothing is done.",
        above=1,
        metavar="FACTOR",
    )
    loss_spike_window: int = option(
        100, "Steps of the median of --loss-spike-factor.", at_least=2, at_most=10**5
    )
    hang_timeout: float = option(
        300.0,
        "Seconds without progress on a rank after which the job says who waits for whom and ends; "
        "0: never. In "
        "the first step and evaluation batch 0.9 of --distributed-timeout-minutes, where that is "
        "more.",
        at_least=0,
        metavar="SECONDS",
    )
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        None,
        "Steps between comparisons, by digest, of the weights that several ranks hold: "
        "data-parallel copies, "
        "what is not cut over tensor-parallel ranks, a tied embedding. After the first step and "
        "before every save "
        "they are compared anyway.",
        at_least=1,
    )
    skip_train: bool = option(False, "Only evaluate.")
    allocator_tuning: bool = option(
        True,
        "On a CPU, malloc keeps the memory that a step frees for the next one.",
        flags=(),
        off_flags=("--no-allocator-tuning",),
    )
    kill_switch_file: str | None = option(
        None,
        "Save and end once this file exists.",
        metavar="FILE",
        flags=("--kill-switch-file", "--kill-switch-path"),
    )
    manual_gc: bool = option(
        False, "Run Python's garbage collector at set iterations on all ranks."
    )
    manual_gc_interval: int = option(
        0, "Iterations between manual collections; 0 only at evaluation and saving.", at_least=0
    )
