"""How much of a step's time devices spend on the model's own FLOPs, by counting.

Every matrix product is taken to run at the same rate and every message to be free. What is left are the losses that a
schedule and a layout decide: the bubble, stages that have more to do than others (the last has the output layer), and
recomputation. It ranks recipes; it predicts no seconds.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.pipeline.clock import StageTimes, run_pipeline
from megatron.planner.stage import stage_flops, stages_of
from megatron.planner.trace import trace

if TYPE_CHECKING:
    from megatron.config import Config


@dataclass(frozen=True)
class StepWork:
    """One step of one replica; FLOPs are those of one tensor rank.

    makespan      FLOPs that one device could have done from the step's first product to its last
    busiest       FLOPs of the pipeline rank that has most to do
    hardware      FLOPs of all pipeline ranks, recomputation included
    model         FLOPs of all pipeline ranks without recomputation
    """

    ranks: int
    micro_batches: int
    makespan: float
    busiest: float
    hardware: float
    model: float

    @property
    def bubble(self) -> float:
        """Share of the time in which even the busiest rank waits."""
        return 1 - self.busiest / self.makespan

    @property
    def imbalance(self) -> float:
        """Share of the remaining time in which the others wait for the busiest rank."""
        return 1 - self.hardware / (self.ranks * self.busiest)

    @property
    def recomputed(self) -> float:
        """Share of the products that are made a second time."""
        return 1 - self.model / self.hardware

    @property
    def useful(self) -> float:
        """Share of the time that goes into the model's FLOPs: (1 - bubble) (1 - imbalance) (1 - recomputed)."""
        return self.model / (self.ranks * self.makespan)


def step_work(config: Config) -> StepWork:
    """The work of a step with the full global batch, run on a clock that counts FLOPs."""
    parallel, m, stages = config.parallel, config.num_micro_batches(), stages_of(config)
    traced, ranks = trace(config, "cuda"), parallel.pipeline_model_parallel_size
    forward, backward, weight = (
        tuple(stage_flops(traced, stage)[name] for stage in stages) for name in ("forward", "backward", "weight")
    )
    times = StageTimes(forward, backward, weight if stages[0].split else ())
    run = run_pipeline(config.schedule, ranks, parallel.num_chunks, m, times)
    model = m * sum(sum(stage_flops(traced, stage, again=False).values()) for stage in stages)
    return StepWork(
        ranks=ranks, micro_batches=m, makespan=run.makespan, busiest=max(run.busy), hardware=sum(run.busy), model=model,
    )
