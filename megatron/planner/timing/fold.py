"""Approximate time of a step by a formula, without a clock: the score that ranks layouts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from megatron.config import Config
from megatron.planner.channels import Channels
from megatron.planner.cluster import Cluster
from megatron.planner.events import Trace
from megatron.planner.rates import Rates
from megatron.planner.stage import (
    Stage,
    crowding,
    parameters_of,
    rates_of,
    stage_seconds,
    stages_of,
)
from megatron.planner.timing.estimate import reduction_seconds, update_seconds
from megatron.planner.trace import trace


def folded_seconds(config: Config, cluster: Cluster, channels: Channels) -> float:
    """Approximate estimate().seconds of this configuration, in a hundredth of its time.

    Counted are the work of the slowest rank, with the passes of other ranks that its first and last
    passes wait for; the messages between stages on the way through all of them; and the gradients
    and weights that are not hidden by the last and the first micro-batch of the first rank. Raises
    ConfigError as estimate does for a dtype without rates.
    """
    rates = rates_of(cluster, config.precision.dtype_name)
    traced = trace(config, cluster.device_type)
    hides = cluster.device_type != "cpu"
    stages = stages_of(config)
    each = {stage: _seconds(traced, stage, rates, channels, hides) for stage in set(stages)}
    seconds = [each[stage] for stage in stages]
    size = config.parallel.pipeline_model_parallel_size
    m = config.num_micro_batches()
    passes = _passes(seconds, size, m)
    crowd = crowding(config, cluster)
    if crowd > 1.0:  # the shared cores do all of the work
        passes = max(passes, m * sum(map(sum, seconds)) / size * crowd)
    if size > 1:
        occupies, latency = _boundary(channels, size, traced.layer.hands_on)
        on_link = (2 if hides else 1) * m * config.parallel.num_chunks * occupies
        passes = max(passes + 2 * (size - 1) * (occupies + latency), on_link)
    after = _exchanged(config, traced, channels, seconds, hides) + update_seconds(
        config, cluster.device_type, rates
    )
    return passes + crowd * after + rates.step_overhead_s


_Seconds = tuple[float, float, float]
_known: dict[tuple[object, ...], _Seconds] = {}


def _seconds(
    traced: Trace, stage: Stage, rates: Rates, channels: Channels, hides: bool
) -> _Seconds:
    """Time a stage's passes; cached for placements with the same kind of tensor groups."""
    key = traced, stage, rates, channels.tensor_lane, hides
    if key not in _known:
        found = stage_seconds(traced, stage, rates, channels.tensor_s, hides=hides)
        _known[key] = found.forward_s, found.backward_s, found.weight_s
    return _known[key]


@functools.lru_cache(maxsize=1 << 14)
def _boundary(channels: Channels, size: int, n_bytes: float) -> tuple[float, float]:
    """Return seconds on the link and latency of the slowest boundary."""
    return max(channels.boundary(rank, True, n_bytes) for rank in range(size - 1))


def _passes(stages: Sequence[_Seconds], size: int, micro_batches: int) -> float:
    """Time the passes of a step.

    A rank's first pass waits for the forward passes of the earlier stages; their backward passes
    follow its last one. In between it does all its work, except for the weight gradients of a split
    backward pass that follow its last backward pass: of one micro-batch on the first rank, of one
    more on each later rank.
    """
    most = ahead = behind = 0.0
    busy = [sum(stage) for stage in stages]
    for rank in range(size):
        forward, backward, weight = stages[rank]
        held_back = min(rank + 1, micro_batches) * weight  # including its last micro-batch
        most = max(
            most, ahead + micro_batches * sum(busy[rank::size]) + max(0.0, behind - held_back)
        )
        ahead, behind = ahead + forward, behind + backward
    return most


def _exchanged(
    config: Config, traced: Trace, channels: Channels, seconds: Sequence[_Seconds], hides: bool
) -> float:
    """Return the seconds of gradients and weights that the first rank's passes do not hide.

    Gradients overlap with its last backward passes, weights with its first forward passes. Those of
    a chunk are sent while each earlier chunk runs one micro-batch per rank.
    """
    parallel, engine = config.parallel, config.engine
    size = parallel.pipeline_model_parallel_size
    chunks = parallel.num_chunks
    replicas = parallel.data_parallel_size
    if replicas == 1:
        return 0.0
    own = stages_of(config)[::size]
    owned = engine.zero_stage > 0
    count = sum(parameters_of(traced, stage) for stage in own)
    layers = max(1, sum(stage.layers for stage in own))

    def left(whole: float, beside: float, overlaps: bool) -> float:
        if not (overlaps and hides):
            return whole
        return max(
            whole / chunks - beside, whole - (1 + (chunks - 1) * size) * beside, whole / layers
        )

    up = reduction_seconds(
        channels, config.precision.gradient_bytes * count, replicas, owned=owned, hides=hides
    )
    down = channels.data_s("all_gather", config.precision.weight_bytes * count) if owned else 0.0
    forward, backward, weight = seconds[0]
    return left(up, backward + weight, engine.overlap_grad_reduce) + left(
        down, forward, engine.overlap_param_gather
    )
