"""A time that no placement of a configuration can beat, in microseconds: what a search drops layouts by."""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from megatron.planning.channels import Channels
from megatron.planning.clocked import MessageSeconds, crowding, rates_of
from megatron.planning.events import Trace
from megatron.planning.stage import Stage, StageSeconds, stage_seconds, stages_of
from megatron.planning.timing.update import update_seconds
from megatron.planning.trace import trace

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.planning.cluster import Cluster
    from megatron.planning.placement import Placement
    from megatron.planning.rates import Rates

_ROUNDING = 1 - 1e-9
"""The clock counts in whole ticks; sums here are rounded otherwise."""


def lower_bound(config: Config, cluster: Cluster, placement: Placement | None = None) -> float:
    """At most estimate().seconds of this configuration.

    placement  None: on any placement, and no message counts. Given: on this one, and waiting for tensor-parallel
               messages counts, which makes it closer.

    A rank's first pass is a forward pass of its first stage, which waits for those of all stages before; its last
    backward pass is of that stage, too, and those of the stages before follow it. Between the two it does all its work,
    but for the weight gradients of 'zb-h1' that follow its last backward pass: of one micro-batch on the first rank, of
    one more on each after it. After that the optimizer runs.

    Raises ConfigError as estimate does for a format of which the machine knows no rates.
    """
    rates, traced = rates_of(cluster, config.precision.dtype_name), trace(config, cluster.device_type)
    message_s: MessageSeconds | None = None
    if placement is not None:
        message_s = Channels(config, cluster, placement).tensor_s
    hides, stages = cluster.device_type != "cpu", stages_of(config)
    each = {
        stage: _without_messages(traced, stage, rates, hides) if message_s is None
        else stage_seconds(traced, stage, rates, message_s, hides=hides) for stage in set(stages)
    }  # fmt: skip
    size, micro_batches = config.parallel.pipeline_model_parallel_size, config.num_micro_batches()
    passes = _passes([each[stage] for stage in stages], size, micro_batches)
    crowd = crowding(config, cluster)
    if crowd > 1.0:  # the cores that there are have all of the work to do
        work = micro_batches * sum(each[stage].busy_s for stage in stages)
        passes = max(passes, work / size * crowd)
    return _ROUNDING * (passes + crowd * update_seconds(config, cluster.device_type, rates) + rates.step_overhead_s)


@functools.lru_cache(maxsize=1 << 14)
def _without_messages(traced: Trace, stage: Stage, rates: Rates, hides: bool) -> StageSeconds:
    return stage_seconds(traced, stage, rates, None, hides=hides)


def _passes(stages: list[StageSeconds], size: int, micro_batches: int) -> float:
    most = ahead = behind = 0.0
    forward, backward = [s.forward_s for s in stages], [s.backward_s for s in stages]
    weight = [s.weight_s for s in stages]
    busy = [f + b + w for f, b, w in zip(forward, backward, weight, strict=True)]
    for rank in range(size):
        work = micro_batches * sum(busy[rank::size])
        held_back = min(rank + 1, micro_batches) * weight[rank]  # that of its last micro-batch, too
        most = max(most, ahead + work + max(0.0, behind - held_back))
        ahead, behind = ahead + forward[rank], behind + backward[rank]
    return most
