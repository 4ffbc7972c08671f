"""What an experiment costs before it is run: times from the published throughput, limits of the machine, node-hours."""
from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.model.formulas import paper_flops
from megatron.planning.cluster import Cluster
from megatron.planning.experiments.points import Point
from megatron.planning.published import published

# Beside the published throughput: what a run of another size, recipe or network may need, as a limit and not a guess.
SLACK = 3.0
# Start of Python, rendezvous, building the model, the first collectives: a guess; not measured on Frontier.
START_UP_S = 300.0


@dataclass(frozen=True)
class Cost:
    """iteration_s, total_s: of the full batch, and of the whole point with its warm-up and start-up; None: unknown.

    bubble: part of a step in which a stage waits, (p - 1) / (v m + p - 1). limit_h: longest job on so many nodes;
    queue: a partition that would let such a job last long enough, where the default one does not.
    """

    iteration_s: float | None
    total_s: float | None
    bubble: float | None
    limit_h: float | None
    queue: str | None = None

    def fits_alone(self) -> bool | None:
        """Whether a job of just this point's nodes may last long enough."""
        return None if self.total_s is None or self.limit_h is None else self.total_s <= 3600 * self.limit_h


def cost(
    point: Point, cluster: Cluster | None, tflops: float | None = None, partition: str | None = None
) -> Cost:
    """The cost of a point. `tflops`: hardware TFLOP/s of a device; None: what is published for this model.

    Raises ConfigError for more nodes than the machine or the partition gives.
    """
    limit = cluster.wall_limit_hours(point.nodes, partition) if cluster is not None else None
    config = point.config
    if config is None:
        return Cost(None, None, None, limit)
    stages, micro_batches = config.parallel.pipeline_model_parallel_size, config.num_micro_batches()
    chunks = config.parallel.virtual_pipeline_model_parallel_size
    bubble = (stages - 1) / (chunks * micro_batches + stages - 1)
    known = published(config.model.num_layers, config.model.hidden_size)
    rate = tflops or (known.tflops if known else None)
    if rate is None:
        return Cost(None, None, bubble, limit)
    vocabulary = config.model.padded_vocab_size(config.parallel.tensor_model_parallel_size)
    per_sample = paper_flops(
        1, config.model.seq_length, config.model.num_layers, config.model.hidden_size, vocabulary
    )
    # The published rate is that of a nearly full pipeline: a larger bubble makes a step longer.
    sample_s = per_sample / (rate * 1e12 * point.world)
    iteration_s = sample_s * config.batch.global_batch_size / (1 - bubble)
    ramp = config.batch.rampup_batch_size
    small = ramp[0] if ramp else config.batch.global_batch_size
    warm_up_s = point.request.warm_up * sample_s * small / (1 - bubble)
    total_s = START_UP_S + warm_up_s + point.request.iterations * iteration_s
    longer = (
        queue.name
        for queue in (cluster.partitions if cluster is not None else ())
        if (queue.max_nodes or point.nodes) >= point.nodes and 3600 * (queue.max_hours or 0) >= total_s
    )
    return Cost(iteration_s, total_s, bubble, limit, next(longer, None))


@dataclass(frozen=True)
class Slot:
    """When and where a point runs in an allocation: seconds from its start, number of its first node."""

    point: Point
    start_s: float
    end_s: float


def pack(points: Sequence[tuple[Point, float]], nodes: int, *, side_by_side: bool = True) -> list[Slot]:
    """Place points with known durations in an allocation as the runner does: the longest first, whatever fits.

    Points that need more nodes are left out.
    """
    waiting = sorted((p for p in points if p[0].nodes <= nodes), key=lambda p: (-p[1], -p[0].nodes))
    running: list[tuple[float, int]] = []  # (end, nodes)
    slots, now, free = [], 0.0, nodes
    while waiting:
        for entry in list(waiting):
            if entry[0].nodes <= free and (side_by_side or not running):
                waiting.remove(entry)
                slots.append(Slot(entry[0], now, now + entry[1]))
                heapq.heappush(running, (now + entry[1], entry[0].nodes))
                free -= entry[0].nodes
        now, released = heapq.heappop(running)
        free += released
    return slots
