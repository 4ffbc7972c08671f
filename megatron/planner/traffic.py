"""What the ranks of a run send in one step, by the messages of its trace."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.config import Config
from megatron.model.formulas import ring_bytes
from megatron.planner.events import Trace
from megatron.planner.stage import Stage, parameters_of, stage_passes, stages_of, tied_elements
from megatron.planner.trace import GPT2_VOCABULARY, trace


class Flow(NamedTuple):
    """Collectives of a kind: what they are, and the bytes that a rank of the busiest stage sends in them per step."""

    name: str
    bytes: float


@dataclass(frozen=True)
class Traffic:
    """One step's messages.

    tensor, data     collectives of a rank of the busiest pipeline rank
    message_bytes    of a message between stages
    boundary, wrap   messages per step and direction over a boundary of two pipeline ranks, and between the last and the
                     first (interleaved chunks)
    stages           pipeline ranks times chunks
    tied             the sum of a tied embedding's gradients over the first and the last stage
    notes            what had to be assumed
    """

    tensor: tuple[Flow, ...]
    data: tuple[Flow, ...]
    message_bytes: int
    boundary: int
    wrap: int
    stages: int
    tied: Flow | None
    notes: tuple[str, ...] = ()


def traffic_of(config: Config, device: str) -> Traffic:
    """What a step of this run sends on a "cuda" or "cpu" device."""
    parallel, traced, stages = config.parallel, trace(config, device), stages_of(config)
    notes = []
    if config.model.vocab_size is None:
        notes.append(
            f"the vocabulary is known only when the tokenizer is read: {GPT2_VOCABULARY} entries are assumed"
        )
    micro_batches, size = config.num_micro_batches(), parallel.pipeline_model_parallel_size
    own = [stages[rank::size] for rank in range(size)]
    tensor = max(
        (_tensor(parallel.tensor_model_parallel_size, traced, each, micro_batches) for each in own),
        key=lambda flows: sum(flow.bytes for flow in flows),
    )
    several = size > 1
    return Traffic(
        tensor=tensor, data=_data(config, max(sum(parameters_of(traced, stage) for stage in each) for each in own)),
        message_bytes=traced.layer.hands_on, boundary=parallel.num_chunks * micro_batches * several,
        wrap=(parallel.num_chunks - 1) * micro_batches * several, stages=parallel.num_stages,
        tied=_tied(config, traced), notes=tuple(notes),
    )  # fmt: skip


def _tensor(ranks: int, traced: Trace, stages: Sequence[Stage], micro_batches: int) -> tuple[Flow, ...]:
    """Sum the collectives in these stages' passes."""
    found: dict[str, float] = {}
    for stage in stages:
        for name, runs in stage_passes(traced, stage).items():
            for run in runs:
                kinds = ", ".join(sorted({message.kind.replace("_", "-") for message in run.of.messages()}))
                title = "recomputed forward" if run.again else f"{name} of the {run.part} ({kinds})"
                sent = sum(ring_bytes(message.bytes, ranks, message.kind) for message in run.of.messages())
                found[title] = found.get(title, 0.0) + run.times * micro_batches * sent
    return tuple(Flow(title, sent) for title, sent in found.items() if sent)


def _data(config: Config, parameters: int) -> tuple[Flow, ...]:
    replicas, precision = config.parallel.data_parallel_size, config.precision
    if replicas == 1:
        return ()
    gradients, kind = parameters * precision.gradient_bytes, f"{precision.main_grads_dtype} gradients"
    if config.engine.zero_stage == 0:
        return (Flow(f"{kind} (all-reduce)", ring_bytes(gradients, replicas)),)
    width = precision.weight_bytes
    return (
        Flow(f"{kind} (scatter)", ring_bytes(gradients, replicas, "reduce_scatter")),
        Flow(f"{8 * width}-bit weights (gather)", ring_bytes(parameters * width, replicas, "all_gather")),
    )


def _tied(config: Config, traced: Trace) -> Flow | None:
    elements = tied_elements(config, traced)
    return Flow("tied embedding", ring_bytes(4 * elements, 2)) if elements else None
