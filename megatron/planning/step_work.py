"""How much of a step's time devices spend on the model's own FLOPs, by counting. Needs no torch.

Every matrix product is taken to run at the same rate and every message to be free. What is left are the losses that a
schedule and a layout decide: the bubble, stages that have more to do than others (the last has the output layer), and
recomputation. It ranks recipes; it predicts no seconds.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.model import formulas
from megatron.pipeline.clock import StageTimes, run_pipeline
from megatron.planning.memory import sized_model, stage_layers

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
    parallel, m = config.parallel, config.num_micro_batches()
    forward, again = _stage_flops(config)
    split = parallel.schedule == "zb-h1" and parallel.pipeline_model_parallel_size > 1
    inputs = [(1.0 if split else 2.0) * work + extra for work, extra in zip(forward, again, strict=True)]
    times = StageTimes(tuple(forward), tuple(inputs), tuple(forward) if split else ())
    ranks = parallel.pipeline_model_parallel_size
    run = run_pipeline(parallel.schedule, ranks, parallel.num_chunks, m, times)
    return StepWork(
        ranks=ranks, micro_batches=m, makespan=run.makespan, busiest=max(run.busy), hardware=sum(run.busy),
        model=3.0 * m * sum(forward),
    )


def _stage_flops(config: Config) -> tuple[list[float], list[float]]:
    """Of each global stage: FLOPs of a forward pass, and those that recomputation adds to its backward pass."""
    model, recompute = sized_model(config), config.recompute
    tp = config.parallel.tensor_model_parallel_size
    tokens = model.seq_length * config.batch.micro_batch_size / tp
    layer = tokens * formulas.layer_flops(model)
    layers = stage_layers(config)
    forward = [count * layer for count in layers]
    forward[-1] += tokens * formulas.head_flops(model, model.padded_vocab_size(tp))
    if recompute.recompute_granularity == "full":
        most = recompute.recompute_num_layers if recompute.recompute_method == "block" else model.num_layers
        return forward, [min(most, count) * layer for count in layers]
    if recompute.recompute_granularity == "selective" and "core_attn" in recompute.recompute_modules:
        return forward, [count * tokens * formulas.attention_score_flops(model) for count in layers]
    return forward, [0.0] * len(layers)
