"""Exchange of gradients and new weights between data-parallel ranks at the end of a step."""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from megatron.config import Config
from megatron.engine.bucket_size import bucket_elements
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


def exchange(config: Config, trace: Trace, channels: Channels, run: PipelineRun, *, hides: bool) -> Exchange:
    """Time the engine's buckets beside the last backward and the first forward passes of each pipeline rank.

    The gradients of a stage's layers become ready evenly over its last backward pass, in the reverse order of the
    model; the weights are needed evenly over its first forward pass. hides: messages travel while a device computes.
    """
    parallel, engine, precision = config.parallel, config.engine, config.precision
    replicas, size, owned = parallel.data_parallel_size, parallel.pipeline_model_parallel_size, engine.zero_stage > 0
    if replicas == 1:
        return Exchange(0.0, 0.0)
    limit, stages = bucket_elements(engine.zero_reduce_bucket_size, replicas), stages_of(config)
    reduced, gathered = run.makespan, 0.0
    for rank in range(size):
        own = range(rank, len(stages), size)
        weights = [part for stage in own for part in weights_of(trace, stages[stage])]
        elements = [sum(part) for part in weights]
        others = sum(parameters_of(trace, stages[stage]) for stage in own) - sum(elements)
        buckets = [*bucket_sizes([*itertools.chain(*weights)][::-1], limit), others]

        backward = [(run.last_backward_start[i], run.last_backward_end[i]) for i in reversed(own)]
        end = max(end for _, end in backward)
        ready = _moments(itertools.accumulate(buckets), elements[::-1], backward)
        early, free = engine.overlap_grad_reduce and hides, 0.0
        for moment, count in zip(ready, buckets, strict=True):
            free = max(free, moment if early else end)
            n_bytes = precision.gradient_bytes * count
            free += reduction_seconds(channels, n_bytes, replicas, owned=owned, hides=hides)
        reduced = max(reduced, free)
        if not owned:
            continue

        buckets.reverse()
        forward = [(start := run.first_forward_start[i], start + run.pipeline.times.forward[i]) for i in own]
        first = min(start for start, _ in forward)
        needed = _moments(itertools.accumulate(buckets[:-1], initial=-others), elements, forward)
        late, arrived = engine.overlap_param_gather and hides, 0.0
        for moment, count in zip(needed, buckets, strict=True):
            arrived += channels.data_s("all_gather", precision.weight_bytes * count)
            gathered = max(gathered, arrived - (moment if late else first))
    return Exchange(reduced - run.makespan, gathered)


def bucket_sizes(weights: Sequence[int], limit: int) -> list[int]:
    """Elements of buckets of whole weights, each of at most `limit` elements or one weight."""
    found = [0]
    for count in weights:
        if found[-1] and found[-1] + count > limit:
            found.append(0)
        found[-1] += count
    return found


def weights_of(trace: Trace, stage: Stage) -> list[list[int]]:
    """Elements of a stage's weights in the order of the model, of embedding, layers and head. The others, of norms and
    biases, are in a bucket of their own."""
    head = [p for p in trace.head.parameters if not (p.tied and stage.first)]
    parts = (stage.first, trace.embedding.parameters), (stage.layers, trace.layer.parameters), (stage.last, head)
    return [[p.elements for p in parameters if p.decays] * times for times, parameters in parts]


def _moments(places: Iterable[int], elements: Sequence[int], passes: Sequence[tuple[float, float]]) -> list[float]:
    """When the weights at these places of a rank's list are reached: those of layers evenly in the passes of their
    stages, those before and after them at begin and end. elements: of these three for each pass."""
    bounds = [0, *(bound for end in itertools.accumulate(elements) for bound in (end, end))][:-1]
    times = [moment for start, end in passes for moment in (start, start, start, end, end, end)]
    found: list[float] = np.interp([*places], bounds, times).tolist()
    return found


def reduction_seconds(channels: Channels, n_bytes: float, replicas: int, *, owned: bool, hides: bool) -> float:
    """Sum gradients for their owners (reduce_to_owners): on a CPU by one reduction for each of them."""
    if not owned:
        return channels.data_s("all_reduce", n_bytes)
    if hides:
        return channels.data_s("reduce_scatter", n_bytes)
    return replicas * channels.data_s("reduce", n_bytes / replicas)
