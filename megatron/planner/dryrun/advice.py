"""What to change where a rank does not fit. Needs no torch."""
from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.config import Config
from megatron.kernels.availability import UNFUSED_BACKENDS
from megatron.planner.dryrun.checks import Finding
from megatron.planner.dryrun.memory_kinds import Unit

if TYPE_CHECKING:
    from megatron.planner.dryrun.rehearsal import RankRehearsal


def memory_findings(config: Config, rank: RankRehearsal, capacity_bytes: float | None) -> list[Finding]:
    """One finding where the rank needs more than `capacity_bytes`, with the tensor that breaks it, the largest and
    what to change."""
    if capacity_bytes is None or rank.needed_bytes <= capacity_bytes:
        return []
    unit = Unit.of(rank.needed_bytes)
    largest = "; ".join(f"{unit.show(held.n_bytes)} {unit.name} {held}" for held in rank.largest_tensors[:3])
    text = (
        f"needs {unit.show(rank.needed_bytes)} {unit.name} of {unit.show(capacity_bytes)}. What does not fit any more: "
        f"{rank.broken_by}. The largest at the peak: {largest}. What helps: {'; '.join(advice(config, rank))}"
    )
    return [Finding("memory", rank.rank, text)]


def advice(config: Config, rank: RankRehearsal) -> list[str]:
    """What makes the largest parts of this rank's memory smaller, the largest first."""
    p = config.parallel
    ideas = [
        (rank.peak["weights"] + rank.peak["gradients"], _MODEL),
        (rank.peak["master"] + rank.peak["moments"], _OPTIMIZER),
        (rank.peak["activations"], _ACTIVATIONS),
        (rank.peak["logits"], _LOGITS),
    ]
    found: list[str] = []
    for n_bytes, part in sorted(ideas, reverse=True):
        if n_bytes < rank.total_peak_bytes / 10:
            continue
        if part == _OPTIMIZER:
            more = f"more ranks than {p.world_size}, over which the optimizer is divided"
            found.append(more if config.engine.zero_stage else "--zero-stage 1")
        elif part == _MODEL:
            found.append(
                f"a larger --tensor-model-parallel-size than {p.tensor_model_parallel_size} or "
                f"--pipeline-model-parallel-size than {p.pipeline_model_parallel_size}"
            )
        elif part == _ACTIVATIONS:
            found += _for_activations(config)
        else:
            found += _for_logits(config)
    return found or [_LESS_AT_A_TIME]


_MODEL, _OPTIMIZER, _ACTIVATIONS, _LOGITS = range(4)
_LESS_AT_A_TIME = "fewer tokens at a time: a shorter --seq-length, or a larger --tensor-model-parallel-size"


def _for_activations(config: Config) -> list[str]:
    parallel, granularity, found = config.parallel, config.recompute.recompute_granularity, list[str]()
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        found.append("--sequence-parallel")
    if config.kernels.attention_backend in UNFUSED_BACKENDS:
        found.append("--attention-backend auto, which keeps no scores")
    if config.batch.micro_batch_size > 1:
        found.append(f"a smaller --micro-batch-size than {config.batch.micro_batch_size}")
    if granularity is None:
        found.append("--recompute-granularity selective --recompute-modules mlp_act layernorm")
    if granularity != "full":
        found.append("--recompute-granularity full --recompute-method uniform")
    return found


def _for_logits(config: Config) -> list[str]:
    tensor = f"a larger --tensor-model-parallel-size than {config.parallel.tensor_model_parallel_size}"
    if config.parallel.schedule == "zb-h1":
        return ["no --enable-zbh1-pipeline, which needs the logits of all tokens at once", tensor]
    tokens = config.kernels.cross_entropy_chunk_tokens
    if tokens == 0:
        return ["no --cross-entropy-chunk-tokens 0, which makes the logits of all tokens at once", tensor]
    return [f"a smaller --cross-entropy-chunk-tokens{'' if tokens is None else f' than {tokens}'}", tensor]
