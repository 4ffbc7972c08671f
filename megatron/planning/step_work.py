"""How much of a step's time devices spend on the model's own FLOPs, by counting. Needs no torch.

Every matrix product is taken to run at the same rate and every message to be free. What is left are the losses that a
schedule and a layout decide: the bubble, stages that have more to do than others (the last has the output layer), and
recomputation. It ranks recipes; it predicts no seconds.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.model import formulas
from megatron.pipeline.instructions import Instruction, Op
from megatron.pipeline.simulate import run_orders
from megatron.planning.memory import compute_order, sized_model, stage_layers

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
    ranks, m = config.parallel.pipeline_model_parallel_size, config.num_micro_batches()
    if m % ranks == 0 and m > _ROUNDS * ranks:
        # Whole rounds of micro-batches follow each other alike: what one more adds, each further one adds.
        fewer, more = (_of_micro_batches(config, rounds * ranks) for rounds in (_ROUNDS - 1, _ROUNDS))
        return _extended(fewer, more, m)
    return _of_micro_batches(config, m)


# Rounds of as many micro-batches as ranks, after which nothing new happens in a schedule.
_ROUNDS = 6


def _extended(fewer: StepWork, more: StepWork, micro_batches: int) -> StepWork:
    times = (micro_batches - more.micro_batches) // (more.micro_batches - fewer.micro_batches)

    def extend(a: float, b: float) -> float:
        return b + times * (b - a)

    return StepWork(
        ranks=more.ranks, micro_batches=micro_batches, makespan=extend(fewer.makespan, more.makespan),
        busiest=extend(fewer.busiest, more.busiest), hardware=extend(fewer.hardware, more.hardware),
        model=extend(fewer.model, more.model),
    )


def _of_micro_batches(config: Config, micro_batches: int) -> StepWork:
    forward, again = _stage_flops(config)

    def duration(instruction: Instruction) -> float:
        passes = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}
        extra = again[instruction.stage] if instruction.op in (Op.BACKWARD, Op.BACKWARD_INPUT) else 0.0
        return passes[instruction.op] * forward[instruction.stage] + extra

    ranks = config.parallel.pipeline_model_parallel_size
    spans = run_orders([compute_order(config, rank, micro_batches) for rank in range(ranks)], duration)
    work = [sum(span.end - span.start for span in of_rank) for of_rank in spans]
    return StepWork(
        ranks=ranks, micro_batches=micro_batches, makespan=max(of_rank[-1].end for of_rank in spans), busiest=max(work),
        hardware=sum(work), model=3.0 * micro_batches * sum(forward),
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
