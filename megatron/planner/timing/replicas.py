"""Exchange of gradients and new weights between data-parallel ranks at the end of a step."""
from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron.config import Config
from megatron.engine.optimizer_state import bucket_elements
from megatron.pipeline.clock import PipelineRun
from megatron.planner.channels import Channels
from megatron.planner.events import Trace
from megatron.planner.stage import Stage, parameters_of, stages_of


class Exchange(NamedTuple):
    """Seconds that data parallelism adds to a step.

    reduced   from the end of the last pass until all gradients are summed
    gathered  delay of the next step, which waits for new weights
    """

    reduced: float
    gathered: float


class Weight(NamedTuple):
    """A weight, or a bucket of them. needed: when a rank's first forward passes reach it; ready: when its gradient is
    there in the last backward passes."""

    elements: int
    needed: float
    ready: float


def exchange(config: Config, trace: Trace, channels: Channels, run: PipelineRun, *, hides: bool) -> Exchange:
    """Time the engine's buckets beside the last backward and the first forward passes of each pipeline rank.

    hides: messages travel while a device computes.
    """
    parallel, engine, precision = config.parallel, config.engine, config.precision
    replicas, size, owned = parallel.data_parallel_size, parallel.pipeline_model_parallel_size, engine.zero_stage > 0
    if replicas == 1:
        return Exchange(0.0, 0.0)
    limit, stages = bucket_elements(engine.zero_reduce_bucket_size, replicas), stages_of(config)
    early, late = engine.overlap_grad_reduce and hides, engine.overlap_param_gather and hides
    reduced, gathered = run.makespan, 0.0
    for rank in range(size):
        own = range(rank, len(stages), size)
        weights = [weight for stage in own for weight in weights_of(trace, stages[stage], run, stage)]
        first, end = min(run.first_forward_start[i] for i in own), max(run.last_backward_end[i] for i in own)
        others = sum(parameters_of(trace, stages[i]) for i in own) - sum(weight.elements for weight in weights)
        buckets = [*buckets_of(weights[::-1], limit), Weight(others, first, end)]
        free = arrived = 0.0
        for bucket in buckets:
            n_bytes = precision.gradient_bytes * bucket.elements
            free = max(free, bucket.ready if early else end)
            free += reduction_seconds(channels, n_bytes, replicas, owned=owned, hides=hides)
        for bucket in reversed(buckets if owned else []):
            arrived += channels.data_s("all_gather", precision.weight_bytes * bucket.elements)
            gathered = max(gathered, arrived - (bucket.needed if late else first))
        reduced = max(reduced, free)
    return Exchange(reduced - run.makespan, gathered)


def weights_of(trace: Trace, stage: Stage, run: PipelineRun, number: int) -> list[Weight]:
    """The weights of a stage, whose number is given, in the order of the model: layers one after the other in a pass,
    embedding and head at its ends. Norms and biases are left out: they are in a bucket of their own."""
    head = [p for p in trace.head.parameters if not (p.tied and stage.first)]
    places = [
        *[(0.0, trace.embedding.parameters)] * stage.first,
        *((i / stage.layers, trace.layer.parameters) for i in range(stage.layers)), *[(1.0, head)] * stage.last,
    ]  # fmt: skip
    start, forward = run.first_forward_start[number], run.pipeline.times.forward[number]
    end, backward = run.last_backward_end[number], run.last_backward_end[number] - run.last_backward_start[number]
    return [
        Weight(p.elements, start + place * forward, end - place * backward)
        for place, parameters in places for p in parameters if p.decays
    ]  # fmt: skip


def buckets_of(weights: Iterable[Weight], limit: int) -> list[Weight]:
    """Put weights into buckets, each of at most `limit` elements or one weight."""
    found: list[Weight] = []
    for weight in weights:
        if found and found[-1].elements + weight.elements <= limit:
            last = found.pop()
            weight = Weight(last.elements + weight.elements, min(last.needed, weight.needed),
                            max(last.ready, weight.ready))  # fmt: skip
        found.append(weight)
    return found


def reduction_seconds(channels: Channels, n_bytes: float, replicas: int, *, owned: bool, hides: bool) -> float:
    """Sum gradients for their owners (reduce_to_owners): on a CPU by one reduction for each of them."""
    if not owned:
        return channels.data_s("all_reduce", n_bytes)
    if hides:
        return channels.data_s("reduce_scatter", n_bytes)
    return replicas * channels.data_s("reduce", n_bytes / replicas)
