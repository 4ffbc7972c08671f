"""What data-parallel ranks exchange at the end of a step: gradients behind the last backward passes, new weights behind
the first forward passes, in the buckets that the engine makes (engine/optimizer.py, gradients.py, weights.py)."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron.engine.bucket_size import bucket_elements
from megatron.planner.events import Parameter, Trace
from megatron.planner.stage import Stage, owners, stages_of

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.pipeline.clock import PipelineRun
    from megatron.planner.channels import Channels


class Weight(NamedTuple):
    """A parameter on one tensor rank, as far as buckets care. chunk: of its pipeline rank, which it belongs to.
    complete: at which part of the chunk's backward pass its gradient is; needed: at which part of its forward pass."""

    elements: int
    decays: bool
    tied: bool
    chunk: int
    complete: float
    needed: float


class Bucket(NamedTuple):
    """Parameters that travel together. complete, needed: (chunk, part) of those that are latest and first."""

    elements: int
    place: int
    complete: tuple[tuple[int, float], ...]
    needed: tuple[tuple[int, float], ...]


def weights_of_rank(trace: Trace, chunks: Sequence[Stage]) -> list[Weight]:
    """The parameters of a pipeline rank, in the order in which its module lists them.

    A chunk's output weight, which is its own and no module's, comes before those of its modules.
    """
    found: list[Weight] = []
    # One parameter serves both ends where one rank has them.
    shared = chunks[0].first and chunks[-1].last and any(p.tied for p in trace.head.parameters)

    def add(parameters: Iterable[Parameter], chunk: int, complete: float, needed: float) -> None:
        found.extend(Weight(p.elements, p.decays, p.tied, chunk, complete, needed) for p in parameters)

    for number, stage in enumerate(chunks):
        (output, *of_head), of_embedding = trace.head.parameters, trace.embedding.parameters
        if stage.last and not shared:
            add([output], number, 0.0, 1.0)
        if stage.first:
            add(of_embedding, number, 1.0, 0.0)
        for i in range(stage.layers):
            add(trace.layer.parameters, number, (stage.layers - i) / stage.layers, i / stage.layers)
        if stage.last:
            add(of_head, number, 0.0, 1.0)
    return found


@functools.lru_cache(maxsize=4096)
def buckets_of_rank(trace: Trace, chunks: tuple[Stage, ...], limit: int) -> tuple[Bucket, ...]:
    """The buckets in the order in which gradients are sent; new weights come in the reverse order."""
    backward = list(enumerate(weights_of_rank(trace, chunks)))[::-1]
    groups: list[list[tuple[int, Weight]]] = []
    for decays in (True, False):
        kind = [(place, w) for place, w in backward if w.decays == decays]
        groups += _cut([(place, w) for place, w in kind if not w.tied], limit)
        groups.append([(place, w) for place, w in kind if w.tied])
    found = [_bucket(group) for group in groups if group]
    return tuple(sorted(found, key=lambda bucket: -bucket.place))


def _cut(weights: Sequence[tuple[int, Weight]], limit: int) -> list[list[tuple[int, Weight]]]:
    found: list[list[tuple[int, Weight]]] = [[]]
    count = 0
    for place, w in weights:
        if count and count + w.elements > limit:
            found.append([])
            count = 0
        found[-1].append((place, w))
        count += w.elements
    return found


def _bucket(group: Sequence[tuple[int, Weight]]) -> Bucket:
    latest, first = dict[int, float](), dict[int, float]()
    for _, w in group:
        latest[w.chunk] = max(w.complete, latest.get(w.chunk, 0.0))
        first[w.chunk] = min(w.needed, first.get(w.chunk, 1.0))
    return Bucket(
        sum(w.elements for _, w in group), min(place for place, _ in group), tuple(latest.items()), tuple(first.items())
    )


@dataclass(frozen=True)
class Exchange:
    """Seconds that replicas add to a step. reduced: from the end of the last pass until all gradients are summed;
    gathered: by how much waiting for new weights delays the next step. sent: seconds of all messages of the busiest
    rank, hidden or not."""

    reduced: float
    gathered: float
    sent: float


def exchange(
    config: Config, trace: Trace, channels: Channels, run: PipelineRun, forward: Sequence[float], hides: bool
) -> Exchange:
    """forward: seconds of a forward pass, by global stage; hides: messages travel while a device computes."""
    parallel, engine = config.parallel, config.engine
    if parallel.data_parallel_size == 1:
        return Exchange(0.0, 0.0, 0.0)
    width, sum_width = config.precision.weight_bytes, config.precision.gradient_bytes
    limit = bucket_elements(engine.zero_reduce_bucket_size, parallel.data_parallel_size)
    stages, size = stages_of(config), parallel.pipeline_model_parallel_size
    replicas, owned = parallel.data_parallel_size, engine.zero_stage > 0
    early, late = engine.overlap_grad_reduce and hides, engine.overlap_param_gather and hides
    reduced = gathered = sent = 0.0
    seconds = functools.lru_cache(maxsize=None)(channels.data_s)
    times: dict[int, tuple[list[float], list[float]]] = {}
    for rank in range(size):
        own = range(rank, len(stages), size)
        buckets = buckets_of_rank(trace, tuple(stages[g] for g in own), limit)
        if id(buckets) not in times:
            times[id(buckets)] = (
                [_reduction(seconds, sum_width * bucket.elements, replicas, owned, hides) for bucket in buckets],
                [seconds("all_gather", width * bucket.elements) for bucket in buckets] if owned else [],
            )
        up, down = times[id(buckets)]
        total_up, total_down = sum(up), sum(down)
        sent = max(sent, total_up + total_down)
        # Most ranks cannot be the last one, and need no closer look.
        if max(run.last_backward_end[g] for g in own) + total_up > reduced:
            reduced = max(reduced, _reduced(run, own, buckets, up, early))
        if total_down - run.first_forward_start[rank] > gathered:
            gathered = max(gathered, _delay(run, own, buckets, down, forward, late))
    return Exchange(max(0.0, reduced - run.makespan), gathered, sent)


def _reduction(
    seconds: Callable[[str, float], float], n_bytes: float, replicas: int, owned: bool, device: bool
) -> float:
    """The sum of a bucket's gradients for its owners (reduce_to_owners): on a CPU one reduction for each of them."""
    if not owned:
        return seconds("all_reduce", n_bytes)
    return seconds("reduce_scatter", n_bytes) if device else replicas * seconds("reduce", n_bytes / replicas)


def _reduced(
    run: PipelineRun, own: Sequence[int], buckets: Sequence[Bucket], seconds: Sequence[float], early: bool
) -> float:
    """When the gradients of a rank are summed. Buckets go one after the other, each when it is complete."""
    starts, ends = [run.last_backward_start[g] for g in own], [run.last_backward_end[g] for g in own]
    end = max(ends)
    if not early:
        return end + sum(seconds)
    free = 0.0
    for bucket, duration in zip(buckets, seconds, strict=True):
        ready = max(_at(starts[c], ends[c], part) for c, part in bucket.complete)
        free = max(free, ready) + duration
    return max(end, free)


def _delay(
    run: PipelineRun, own: Sequence[int], buckets: Sequence[Bucket], seconds: Sequence[float],
    forward: Sequence[float], late: bool,
) -> float:
    """By how much a rank's first forward passes wait for weights, which are sent in their order."""
    if not seconds:
        return 0.0
    if not late:
        return max(0.0, sum(seconds) - min(run.first_forward_start[g] for g in own))
    there = delay = 0.0
    for bucket, duration in zip(reversed(buckets), reversed(seconds), strict=True):
        there += duration
        needed = min(run.first_forward_start[own[c]] + part * forward[own[c]] for c, part in bucket.needed)
        delay = max(delay, there - needed)
    return delay


def _at(start: float, end: float, part: float) -> float:
    return start + part * (end - start)


def owned_partial_elements(config: Config, trace: Trace) -> float:
    """Elements of which tensor-parallel ranks hold terms of a sum: norms, row biases, positions (sequence parallel)."""
    embedding, layer, head = (
        sum(p.elements for p in part.parameters if p.partial) for part in (trace.embedding, trace.layer, trace.head)
    )
    stages, size = stages_of(config), config.parallel.pipeline_model_parallel_size
    most = max(
        sum(stage.layers * layer + stage.first * embedding + stage.last * head for stage in stages[rank::size])
        for rank in range(size)
    )
    return most / owners(config)
