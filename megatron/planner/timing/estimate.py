"""Time of a training step of any configuration on any described machine, and its parts.

Passes of the stages (stage.py) run on the clock of the schedule (pipeline/clock.py) with the messages between stages.
After the last pass come gradients that are not summed yet, the optimizer, and waiting for new weights at the beginning
of the next step. Messages of different kinds do not slow each other down, nor the computations beside them.
"""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.config import Config
from megatron.model import formulas
from megatron.pipeline.clock import Boundaries, PipelineRun, StageTimes, run_pipeline
from megatron.planner.channels import Channels
from megatron.planner.clocked import crowding, rates_of
from megatron.planner.cluster import Cluster
from megatron.planner.compute import Confidence
from megatron.planner.events import Trace
from megatron.planner.memory import RankMemory, memory_of_ranks
from megatron.planner.placement import Placement, choose_placement
from megatron.planner.rates import Rates
from megatron.planner.stage import StageSeconds, stage_flops, stage_seconds, stages_of, tied_elements
from megatron.planner.timing.replicas import exchange
from megatron.planner.timing.update import update_seconds
from megatron.planner.trace import trace

PARTS = (
    "forward", "backward", "recompute", "tensor messages", "bubble", "pipeline messages", "data-parallel", "optimizer",
    "host",
)  # fmt: skip
"""forward, backward    computations of the passes
recompute            computations of recomputation, within backward passes
tensor messages      waiting for tensor-parallel collectives in all passes
bubble               neither computing nor waiting for a message that is under way
pipeline messages    waiting for messages between stages that have been made
data-parallel        gradients and weights that no pass hides, and the tied embedding
optimizer            the update
host                 what the host adds to each layer's pass and to a step"""


@dataclass(frozen=True)
class Estimate:
    """One step with the full global batch, in the steady state of a run.

    seconds        of a step: the sum of parts, as the pipeline rank that computes longest spends them
    model_flops, hardware_flops   of a step on all devices, of products and attention; the second with recomputation
    mfu, hfu       of the machine's peak in this format; None where it has none
    links          figures that messages rest on; confidence: all figures
    run            the schedule on its clock; stage_seconds: by global stage
    memory         of a device of each pipeline rank
    """

    config: Config
    cluster: Cluster = field(repr=False)
    placement: Placement = field(repr=False)
    parts: Mapping[str, float]
    model_flops: float
    hardware_flops: float
    links: Confidence = field(repr=False)
    run: PipelineRun = field(repr=False)
    stage_seconds: tuple[StageSeconds, ...] = field(repr=False)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def devices(self) -> int:
        return self.config.parallel.world_size

    @property
    def tokens_per_s(self) -> float:
        return self.config.batch.global_batch_size * self.config.model.seq_length / self.seconds

    @property
    def mfu(self) -> float | None:
        return self._utilization(self.model_flops)

    @property
    def hfu(self) -> float | None:
        return self._utilization(self.hardware_flops)

    def _utilization(self, flops: float) -> float | None:
        peak = self.cluster.peak_tflops.get(self.config.precision.dtype_name)
        return formulas.utilization(flops, self.seconds, self.devices, peak)

    @functools.cached_property
    def confidence(self) -> Confidence:
        rates = Rates(self.cluster, self.config.precision.dtype_name)  # which has not been asked for anything else
        for stage in set(stages_of(self.config)):
            stage_seconds(trace(self.config, self.cluster.device_type), stage, rates, None)
        update_seconds(self.config, self.cluster.device_type, rates)
        return rates.confidence | self.links

    @functools.cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        return memory_of_ranks(self.config, self.cluster.device_type)


def estimate(config: Config, cluster: Cluster, placement: Placement | None = None) -> Estimate:
    """Estimate the time of a step on a placement, by default the cheapest.

    Raises ConfigError for a world that does not fit on the machine, and for a format of which it knows no rates.
    """
    placement = placement or choose_placement(config, cluster)
    rates, channels = rates_of(cluster, config.precision.dtype_name), Channels(config, cluster, placement)
    traced, stages = trace(config, cluster.device_type), stages_of(config)
    hides = cluster.device_type != "cpu"  # gloo's messages need the cores themselves
    each = {stage: stage_seconds(traced, stage, rates, channels.tensor_s, hides=hides) for stage in set(stages)}
    seconds = tuple(each[stage] for stage in stages)
    run = _run(config, cluster, channels, seconds, traced)

    crowd, replicas = crowding(config, cluster), exchange(config, traced, channels, run, hides=hides)
    parts = _parts_of_passes(config, seconds, run)
    parts["data-parallel"] = crowd * (replicas.reduced + replicas.gathered)
    if tied := tied_elements(config, traced):
        parts["data-parallel"] += channels.tied_s(4 * tied)
    parts["optimizer"] = crowd * update_seconds(config, cluster.device_type, rates)
    parts["host"] += rates.step_overhead_s
    return Estimate(
        config, cluster, placement, {name: parts[name] for name in PARTS}, _flops(config, traced, again=False),
        _flops(config, traced, again=None), channels.confidence, run, seconds,
    )  # fmt: skip


def busiest_rank(run: PipelineRun) -> int:
    """Find the pipeline rank that computes longest, the first of equals."""
    return max(range(len(run.busy)), key=lambda rank: (run.busy[rank], -rank))


def _run(
    config: Config, cluster: Cluster, channels: Channels, seconds: tuple[StageSeconds, ...], traced: Trace
) -> PipelineRun:
    parallel, boundaries, crowd = config.parallel, None, crowding(config, cluster)
    size, chunks = parallel.pipeline_model_parallel_size, parallel.num_chunks
    if size > 1:
        there, back = (
            tuple(
                channels.boundary(rank, forward, traced.layer.hands_on) if chunks > 1 or rank != end else (0.0, 0.0)
                for rank in range(size)
            )
            for forward, end in ((True, size - 1), (False, 0))
        )
        # A pair of ranks has one communicator on a GPU, whose messages follow each other in both directions.
        boundaries = Boundaries(there, back, duplex=cluster.device_type == "cpu")
    times = StageTimes(
        tuple(s.forward_s for s in seconds), tuple(s.backward_s for s in seconds),
        tuple(s.weight_s for s in seconds) if stages_of(config)[0].split else (),
    )  # fmt: skip
    on_node = min(parallel.world_size, cluster.devices_per_node)
    return run_pipeline(
        config.schedule, size, chunks, config.num_micro_batches(), times, boundaries,
        cores=cluster.shared_cores if crowd > 1.0 else None, demand=on_node / size if crowd > 1.0 else 1.0,
    )


def _parts_of_passes(config: Config, stages: tuple[StageSeconds, ...], run: PipelineRun) -> dict[str, float]:
    rank = busiest_rank(run)
    own = stages[rank :: config.parallel.pipeline_model_parallel_size]
    passes = {
        "forward": sum(s.forward.compute for s in own),
        "backward": sum(s.backward.compute + s.weight.compute for s in own),
        "recompute": sum(s.backward.again for s in own),
        "tensor messages": sum(s.forward.waited + s.backward.waited + s.weight.waited for s in own),
        "host": sum(sum(s.overhead) for s in own),
    }
    # Where ranks share cores, the clock makes passes longer than they are by themselves.
    stretched = run.busy[rank] / sum(passes.values())
    waits = run.message_wait[rank]
    return {
        **{name: stretched * seconds for name, seconds in passes.items()}, "pipeline messages": waits,
        "bubble": max(0.0, run.makespan - run.busy[rank] - waits),
    }  # fmt: skip


def _flops(config: Config, traced: Trace, *, again: bool | None) -> float:
    """FLOPs of a step on all devices, without recomputation (again=False) or with it (None). Padding of the vocabulary
    is no work of the model."""
    parallel, stages = config.parallel, Counter(stages_of(config))
    of_pipeline = sum(n * sum(stage_flops(traced, stage, again=again).values()) for stage, n in stages.items())
    tensor = parallel.tensor_model_parallel_size
    of_pipeline -= traced.head.padding(tensor) * (traced.head.forward.flops() + traced.head.backward.flops())
    return of_pipeline * tensor * parallel.data_parallel_size * config.num_micro_batches()
