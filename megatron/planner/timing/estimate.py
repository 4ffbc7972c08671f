"""The time of a training step of any configuration on any described machine, with what it is made of.

Passes of the stages (stage.py) run on the clock of the schedule (pipeline/clock.py) with the messages between stages.
After the last pass come the gradients that are not summed yet, the optimizer, and waiting for new weights at the
beginning of the next step. Directions of communication do not slow each other down here, nor the computations beside
them; data is ready when it is wanted, nothing is saved, logged or evaluated.
"""
from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from megatron.model import formulas
from megatron.pipeline.clock import Boundaries, PipelineRun, StageTimes, run_pipeline
from megatron.planner.channels import Channels
from megatron.planner.clocked import crowding, rates_of
from megatron.planner.events import Trace
from megatron.planner.memory import RankMemory, memory_of_ranks
from megatron.planner.placement import choose_placement
from megatron.planner.rates import Rates
from megatron.planner.stage import StageSeconds, stage_flops, stage_seconds, stages_of, tied_elements
from megatron.planner.timing.parts import parts_of_step
from megatron.planner.timing.replicas import exchange, owned_partial_elements
from megatron.planner.timing.update import update_seconds
from megatron.planner.trace import trace

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.planner.cluster import Cluster
    from megatron.planner.compute import Confidence
    from megatron.planner.placement import Placement

_GIB = 2**30
_DAY = 86400.0


@dataclass(frozen=True)
class Estimate:
    """One step with the full global batch, in the steady state of a run.

    seconds        of a step; parts add up to them, as the pipeline rank that computes most spends them (parts.py)
    model_flops, hardware_flops   of a step on all devices, of products and attention; the second with recomputation
    mfu, hfu       of the machine's peak in this format; None where it has none
    links          the figures that messages rest on, and where they are from; confidence: all figures
    run            the schedule on its clock; stage_times what it was given, stage_seconds what those consist of
    placement      of the ranks on nodes and devices
    """

    config: Config
    cluster: Cluster = field(repr=False)
    placement: Placement = field(repr=False)
    seconds: float
    parts: Mapping[str, float]
    model_flops: float
    hardware_flops: float
    links: Confidence = field(repr=False)
    run: PipelineRun = field(repr=False)
    stage_times: StageTimes = field(repr=False)
    stage_seconds: tuple[StageSeconds, ...] = field(repr=False)

    @property
    def cluster_name(self) -> str:
        return self.cluster.name

    @property
    def devices(self) -> int:
        return self.config.parallel.world_size

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.cluster.devices_per_node)

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.config.batch.global_batch_size * self.config.model.seq_length

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_day(self) -> float:
        return self.tokens_per_s * _DAY

    @property
    def mfu(self) -> float | None:
        return self._utilization(self.model_flops)

    @property
    def hfu(self) -> float | None:
        return self._utilization(self.hardware_flops)

    def _utilization(self, flops: float) -> float | None:
        peak = self.cluster.peak_tflops.get(self.config.precision.dtype_name)
        return formulas.utilization(flops, self.seconds, self.devices, peak)

    def days(self, tokens: float) -> float:
        """Of training on so many tokens, without start, saving and failures."""
        return tokens / self.tokens_per_day

    def node_hours(self, tokens: float) -> float:
        return self.days(tokens) * 24 * self.nodes

    @functools.cached_property
    def confidence(self) -> Confidence:
        """The figures that the seconds rest on, and where they are from."""
        dtype_name, stages = self.config.precision.dtype_name, set(stages_of(self.config))
        device = self.cluster.device_type
        rates = Rates(self.cluster, dtype_name)  # which has not been asked for anything else
        for stage in stages:
            stage_seconds(trace(self.config, device), stage, rates, None)
        update_seconds(self.config, device, rates)
        return rates.confidence | self.links

    @functools.cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """Of a device of each pipeline rank."""
        return memory_of_ranks(self.config, self.cluster.device_type)

    @property
    def capacity_bytes(self) -> float:
        return self.cluster.memory_gib * _GIB

    @property
    def headroom_bytes(self) -> float:
        return self.capacity_bytes - max(rank.total for rank in self.memory)

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0

    def of_batch(self, samples: int) -> Estimate:
        """A step of another global batch, as while the batch ramps up.

        Raises ConfigError where it does not divide into micro-batches.
        """
        batch = dataclasses.replace(self.config.batch, global_batch_size=samples)
        return estimate(dataclasses.replace(self.config, batch=batch), self.cluster, self.placement)


def estimate(config: Config, cluster: Cluster, placement: Placement | None = None) -> Estimate:
    """Time, parts and memory of a step; the cheapest placement where none is given.

    Raises ConfigError for a world that does not fit on the machine, and for a format of which it knows no rates.
    """
    placement = placement or choose_placement(config, cluster)
    rates, channels = rates_of(cluster, config.precision.dtype_name), Channels(config, cluster, placement)
    traced = trace(config, cluster.device_type)
    hides = cluster.device_type != "cpu"  # gloo's messages need the cores themselves
    stages = stages_of(config)
    each = {stage: stage_seconds(traced, stage, rates, channels.tensor_s, hides=hides) for stage in set(stages)}
    seconds = tuple(each[stage] for stage in stages)
    times = StageTimes(
        tuple(s.forward_s for s in seconds), tuple(s.backward_s for s in seconds),
        tuple(s.weight_s for s in seconds) if stages[0].split else (),
    )  # fmt: skip
    run = _run(config, cluster, channels, times, traced)
    after = _after(config, cluster, channels, run, rates)
    parts = parts_of_step(config, seconds, run, after)
    model_flops, hardware_flops = (_flops(config, traced, again) for again in (False, None))
    return Estimate(
        config, cluster, placement, sum(parts.values()), MappingProxyType(parts), model_flops, hardware_flops,
        channels.confidence, run, times, seconds,
    )  # fmt: skip


def _run(config: Config, cluster: Cluster, channels: Channels, times: StageTimes, traced: Trace) -> PipelineRun:
    parallel, boundaries = config.parallel, None
    size, gpu = parallel.pipeline_model_parallel_size, cluster.device_type != "cpu"
    if size > 1:
        wraps = parallel.num_chunks > 1
        there, back = (
            tuple(
                channels.boundary(rank, forward, traced.layer.hands_on) if wraps or rank != end else (0.0, 0.0)
                for rank in range(size)
            )
            for forward, end in ((True, size - 1), (False, 0))
        )
        # A pair of ranks has one communicator on a GPU, whose messages follow each other in both directions.
        boundaries = Boundaries(there, back, duplex=not gpu)
    crowd = crowding(config, cluster)
    on_node = min(parallel.world_size, cluster.devices_per_node)
    return run_pipeline(
        config.schedule, size, parallel.num_chunks, config.num_micro_batches(), times, boundaries,
        cores=cluster.shared_cores if crowd > 1.0 else None, demand=on_node / size if crowd > 1.0 else 1.0,
    )


def _after(
    config: Config, cluster: Cluster, channels: Channels, run: PipelineRun, rates: Rates
) -> dict[str, float]:
    """Seconds of a step beside its passes."""
    hides, crowd = cluster.device_type != "cpu", crowding(config, cluster)
    traced = trace(config, cluster.device_type)
    replicas = exchange(config, traced, channels, run, run.pipeline.times.forward, hides)
    small = channels.model_s(8) + channels.world_s(8)  # the norm of the gradient; whether to stop or to save
    if config.parallel.data_parallel_size > 1:
        small += channels.data_s("all_reduce", 8)
    tied, partial = tied_elements(config, traced), owned_partial_elements(config, traced)
    if tied:
        small += channels.tied_s(4 * tied)
    if partial:
        small += channels.tensor_s("all_reduce", 4 * partial)
    return {
        "data-parallel": crowd * (replicas.reduced + replicas.gathered) + small,
        "optimizer": crowd * update_seconds(config, cluster.device_type, rates),
        "host": rates.step_overhead_s,
    }


def _flops(config: Config, traced: Trace, again: bool | None) -> float:
    """FLOPs of a step on all devices, without recomputation (again: False) or with it (None). What padding of the
    vocabulary is multiplied with is no work of the model."""
    parallel, stages = config.parallel, Counter(stages_of(config))
    of_pipeline = sum(n * sum(stage_flops(traced, stage, again=again).values()) for stage, n in stages.items())
    tensor = parallel.tensor_model_parallel_size
    of_pipeline -= traced.head.padding(tensor) * (traced.head.forward.flops() + traced.head.backward.flops())
    return of_pipeline * tensor * parallel.data_parallel_size * config.num_micro_batches()
