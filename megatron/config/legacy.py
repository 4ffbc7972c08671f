"""Flags of existing launch scripts that are no settings here.

ACCEPTED flags have no effect and get a notice that says why. TRIVIAL flags belong to features that are not here: a
value that leaves the feature off is accepted with a notice, any other is refused. REFUSED flags are errors that name
what to use instead.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Legacy:
    """One such flag. `values`: how many values it takes, '0', '1', '?' or '*'. `harmless` is for TRIVIAL flags."""

    text: str
    values: str = "0"
    harmless: tuple[str, ...] = ()

    def is_harmless(self, words: list[str]) -> bool:
        """Whether all these values leave the feature off. Numbers compare as numbers."""
        return all(any(_equal(word, value) for value in self.harmless) for word in words)


def _equal(a: str, b: str) -> bool:
    try:
        return float(a) == float(b)
    except ValueError:
        return a.lower() == b.lower()


_NO_EXPERTS = "there are no experts (--num-experts is 1)"
_RECOMPUTE = "recomputation is set by --recompute-granularity"
_REDUCTION = "gradients are reduced once in a step, in flat buckets, to the processes that own a part of them"
_NO_TEACHER = "there is no distillation: remove it"
_NO_WANDB = "Weights & Biases is not used: figures go to --metrics-file and --tensorboard-dir"
_ONE_LENGTH = "remove it: samples have one length; use --rampup-batch-size"
_BAD_SAMPLES = "remove the bad samples from the data instead"
_SPLIT_PATHS = "use --train-data-path, --valid-data-path and --test-data-path with WEIGHT PREFIX pairs"
_LONG_SEQUENCES = "use --sequence-parallel with --tensor-model-parallel-size"
_ALL_TOKENS = "remove it: all tokens of a sample have the same weight"
_NO_FP8 = "use --bf16"

ACCEPTED: Mapping[str, Legacy] = {
    # DeepSpeed and its activation checkpointing
    "--zero-reduce-scatter": Legacy(_REDUCTION),
    "--zero-contigious-gradients": Legacy(_REDUCTION),
    "--use-pin-memory": Legacy("nothing is offloaded"),
    "--cpu_torch_adam": Legacy("the optimizer runs where the model is"),
    "--deepspeed-activation-checkpointing": Legacy(_RECOMPUTE),
    "--partition-activations": Legacy("kept activations are divided by --sequence-parallel"),
    "--distribute-checkpointed-activations": Legacy("kept activations are divided by --sequence-parallel"),
    "--distribute-saved-activations": Legacy("kept activations are divided by --sequence-parallel"),
    "--contigious-checkpointing": Legacy(_RECOMPUTE),
    "--checkpoint-in-cpu": Legacy("kept activations stay on the device"),
    "--synchronize-each-layer": Legacy(_RECOMPUTE),
    "--profile-backward": Legacy("--profile records the backward pass too"),
    # pipeline, launch, memory
    "--enable-zbh1-exact-semantics": Legacy("the zero-bubble schedule is always exact"),
    "--no-scatter-gather-tensors-in-pipeline": Legacy("--sequence-parallel decides what stages send"),
    "--overlap-p2p-communication": Legacy("stages always send and receive while they compute"),
    "--no-overlap-p2p-communication": Legacy("stages always send and receive while they compute"),
    "--use-cpu-initialization": Legacy("initial weights do not depend on the device or the layout"),
    "--empty-unused-memory-level": Legacy("the allocator keeps its cache", "1"),
    "--delay-grad-reduce": Legacy(_REDUCTION),
    "--use-contiguous-parameters-in-local-ddp": Legacy(_REDUCTION),
    "--use-mpi": Legacy("the launcher is known by its environment variables"),
    "--deepspeed_mpi": Legacy("the launcher is known by its environment variables"),
    "--sync-tp-duplicated-parameters": Legacy("copies on tensor-parallel processes stay equal, and are compared"),
    # experts: without experts these say nothing
    "--expert-interval": Legacy(_NO_EXPERTS, "1"),
    "--topk": Legacy(_NO_EXPERTS, "1"),
    "--moe-router-topk": Legacy(_NO_EXPERTS, "1"),
    "--moe-train-capacity-factor": Legacy(_NO_EXPERTS, "1"),
    "--moe-eval-capacity-factor": Legacy(_NO_EXPERTS, "1"),
    "--moe-min-capacity": Legacy(_NO_EXPERTS, "1"),
    "--moe-loss-coeff": Legacy(_NO_EXPERTS, "1"),
    "--moe-aux-loss-coeff": Legacy(_NO_EXPERTS, "1"),
    "--create-moe-param-group": Legacy(_NO_EXPERTS),
    "--disable-moe-token-dropping": Legacy(_NO_EXPERTS),
    "--moe-router-load-balancing-type": Legacy(_NO_EXPERTS, "1"),
    "--moe-grouped-gemm": Legacy(_NO_EXPERTS),
    "--moe-token-dispatcher-type": Legacy(_NO_EXPERTS, "1"),
    # kernels and layers
    "--transformer-impl": Legacy("there is one implementation; fused kernels are found at run time", "1"),
    "--use-mcore-models": Legacy("there is one model"),
    "--use-legacy-models": Legacy("there is one model"),
    "--no-initialization": Legacy("weights are always initialised"),
    "--group-query-attention": Legacy("--num-query-groups alone decides"),
    "--abort-on-unmet-fused-kernel-constraints": Legacy("the log says which kernels are used"),
    "--pad-vocab-size-to": Legacy(
        "padding is in no softmax and no checkpoint, and --make-vocab-size-divisible-by decides about it", "1"
    ),
    # data
    "--mmap-warmup": Legacy("files are mapped and read on demand"),
    "--return-data-index": Legacy("samples carry their number anyway"),
    "--valid-num-workers": Legacy("--num-workers serves all data", "1"),
    "--resume-dataloader": Legacy("data always go on where the run ended"),
    "--repeated-dataloader": Legacy("the loader never runs out of samples before the run ends"),
    "--no-create-attention-mask-in-dataloader": Legacy("masks are made where attention uses them"),
    # checkpoints, logs, timers
    "--universal-checkpoint": Legacy("--load takes every checkpoint on any layout"),
    "--use-dist-ckpt": Legacy("checkpoints are always distributed"),
    "--log-throughput": Legacy("throughput is in every log line"),
    "--no-barrier-with-level-1-timing": Legacy("timers set no barriers"),
    "--log-level": Legacy("the log has one level", "1"),
    "--log-level-replica": Legacy("the log has one level", "1"),
    "--codecarbon-dir": Legacy("energy is not measured", "1"),
    "--use-pytorch-profiler": Legacy("--profile always takes torch's profiler"),
    "--check-for-nan-in-loss-and-grad": Legacy("steps that are not finite are always found and skipped"),
    "--no-check-for-nan-in-loss-and-grad": Legacy("steps that are not finite are always found and skipped"),
    "--wandb-name": Legacy(_NO_WANDB, "1"),
    "--wandb-entity": Legacy(_NO_WANDB, "1"),
}

TRIVIAL: Mapping[str, Legacy] = {
    "--num-experts": Legacy("there are no experts: use 1", "*", ("1",)),
    "--mlp-type": Legacy("there are no experts: use standard", "1", ("standard",)),
    "--moe-expert-parallel-size": Legacy("there are no experts: use 1", "1", ("1",)),
    "--expert-model-parallel-size": Legacy("there are no experts: use 1", "1", ("1",)),
    "--expert-tensor-parallel-size": Legacy("there are no experts: use 1", "1", ("1",)),
    "--context-parallel-size": Legacy(_LONG_SEQUENCES, "1", ("1",)),
    "--ds-sequence-parallel-size": Legacy(_LONG_SEQUENCES, "1", ("1",)),
    "--pp-partition-method": Legacy("use --pipeline-layout with the layers of each stage", "1", ("type:transformer",)),
    "--DDP-impl": Legacy("replicas are kept by the DeepSpeed engine: use --zero-stage 0 or 1", "1", ("local", "torch")),
    "--remote-device": Legacy("there is no offloading: use none, and --zero-stage 1 or more stages", "1", ("none",)),
    "--data-impl": Legacy("use mmap: data are .bin and .idx files", "1", ("mmap", "infer")),
    "--use-dataset-only": Legacy("use --skip-train to run without training", "1", ("false", "0")),
    "--kd-beta-ce": Legacy(_NO_TEACHER, "1", ("1",)),
    "--encoder-tensor-model-parallel-size": Legacy("there is no encoder: use 0", "1", ("0",)),
    "--encoder-pipeline-model-parallel-size": Legacy("there is no encoder: use 0", "1", ("0",)),
}

REFUSED: Mapping[str, Legacy] = {
    # old names
    "--batch-size": Legacy("use --micro-batch-size (samples of one forward pass) and --global-batch-size", "1"),
    "--warmup": Legacy("use --lr-warmup-fraction or --lr-warmup-iters", "1"),
    "--model-parallel-size": Legacy("use --tensor-model-parallel-size", "1"),
    "--activations-checkpoint-method": Legacy("use --recompute-granularity full with --recompute-method", "1"),
    "--activations-checkpoint-granularity": Legacy("use --recompute-granularity", "1"),
    "--activations-checkpoint-num-layers": Legacy("use --recompute-num-layers", "1"),
    "--num-virtual-stages-per-pipeline-rank": Legacy(
        "use --num-layers-per-virtual-pipeline-stage: layers / pipeline ranks / chunks", "1"
    ),
    "--num-stages": Legacy("use --pipeline-model-parallel-size", "1"),
    "--pipe-parallel-size": Legacy("use --pipeline-model-parallel-size", "1"),
    "--train-data": Legacy("use --data-path", "*"),
    "--lazy-loader": Legacy("remove it: files of --data-path are mapped and read on demand"),
    "--cache-dir": Legacy("use --data-cache-path", "1"),
    # optimizer and precision
    "--cpu-optimizer": Legacy("there is no offloading: use --zero-stage 1 and more tensor or pipeline parallelism"),
    "--decoupled-lr": Legacy("one learning rate serves all parameters: use --lr", "1"),
    "--decoupled-min-lr": Legacy("one learning rate serves all parameters: use --min-lr", "1"),
    "--lr_constant_plus_cooldown": Legacy("use --lr-decay-style WSD with --lr-wsd-decay-iters"),
    "--lr_constant_plus_cooldown_frac": Legacy("use --lr-decay-style WSD with --lr-wsd-decay-iters", "1"),
    "--embedding-weights-in-fp32": Legacy("remove it: the master weights of all parameters are fp32"),
    "--use-mics": Legacy("use --zero-stage 1"),
    "--use-torch-fsdp2": Legacy("use --zero-stage 1 with more tensor or pipeline parallelism"),
    "--use-bnb-optimizer": Legacy("use --optimizer adam"),
    "--fp8-format": Legacy(_NO_FP8, "1"),
    "--fp8-margin": Legacy(_NO_FP8, "1"),
    "--fp8-interval": Legacy(_NO_FP8, "1"),
    "--fp8-amax-history-len": Legacy(_NO_FP8, "1"),
    "--fp8-amax-compute-algo": Legacy(_NO_FP8, "1"),
    "--data-parallel-random-init": Legacy("remove it: replicas start equal and must stay so"),
    # model
    "--adjust-word-embedding-init": Legacy("use --init-method-std, which holds for all weights"),
    "--word-embedding-init-std": Legacy("use --init-method-std, which holds for all weights", "1"),
    "--use-tutel": Legacy("there are no experts: remove it"),
    "--embed-layernorm": Legacy("remove it: there is no norm behind the embedding, and the model is another one"),
    "--glu-activation": Legacy("use --swiglu, the only gated activation here", "1"),
    "--ds-sequence-parallel-fpdt": Legacy(_LONG_SEQUENCES),
    "--ds-sequence-parallel-fpdt-chunk-size": Legacy(_LONG_SEQUENCES, "1"),
    "--ds-sequence-parallel-fpdt-offloading": Legacy(_LONG_SEQUENCES),
    # data
    "--shuffle-sample-in-corpus": Legacy("list the files as --data-path WEIGHT PREFIX pairs; samples are shuffled"),
    "--blend-sample-in-corpus": Legacy("list the files as --data-path WEIGHT PREFIX pairs; they are blended"),
    "--train-range-to-skip": Legacy(_BAD_SAMPLES, "*"),
    "--train-iters-to-skip": Legacy(_BAD_SAMPLES, "*"),
    "--skip-train-iteration-range": Legacy(_BAD_SAMPLES, "*"),
    "--train-weighted-split-paths": Legacy(_SPLIT_PATHS, "*"),
    "--valid-weighted-split-paths": Legacy(_SPLIT_PATHS, "*"),
    "--test-weighted-split-paths": Legacy(_SPLIT_PATHS, "*"),
    "--train-weighted-split-paths-path": Legacy(_SPLIT_PATHS, "1"),
    "--valid-weighted-split-paths-path": Legacy(_SPLIT_PATHS, "1"),
    "--test-weighted-split-paths-path": Legacy(_SPLIT_PATHS, "1"),
    "--norm-target-loss": Legacy(_ALL_TOKENS),
    "--loss-on-targets-only": Legacy(_ALL_TOKENS),
    "--train-doc-idx-path": Legacy("index files are found in --data-cache-path", "1"),
    "--train-sample-idx-path": Legacy("index files are found in --data-cache-path", "1"),
    "--train-shuffle-idx-path": Legacy("index files are found in --data-cache-path", "1"),
    # checkpoints
    "--no-load-lr-state": Legacy("use --override-opt_param-scheduler"),
    "--reset-progress": Legacy("use --reset-iteration"),
    # research extras
    "--data-efficiency-curriculum-learning": Legacy(_ONE_LENGTH),
    "--curriculum-learning": Legacy(_ONE_LENGTH),
    "--random-ltd": Legacy("remove it: every layer sees every token"),
    "--mos": Legacy(_NO_TEACHER),
    "--kd": Legacy(_NO_TEACHER),
    "--load-teacher": Legacy(_NO_TEACHER, "1"),
    "--num-layers-teacher": Legacy(_NO_TEACHER, "1"),
    "--hidden-size-teacher": Legacy(_NO_TEACHER, "1"),
    "--num-attention-heads-teacher": Legacy(_NO_TEACHER, "1"),
    "--eval-only": Legacy("use --skip-train", "1"),
    "--inference": Legacy("remove it: this command trains; --skip-train evaluates"),
    "--ds-inference": Legacy("remove it: this command trains; --skip-train evaluates"),
}
# --no-pipeline-parallel is accepted beside one stage, and refused beside more: command_line.py decides.
NO_PIPELINE = "--no-pipeline-parallel"
