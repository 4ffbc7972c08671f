"""Seconds of one micro-batch in a pipeline stage, forward and backward, and what they are made of."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron.model.stages import assign_layers
from megatron.planning.timing.clocked import NOTHING, MessageSeconds, PassSeconds, pass_seconds
from megatron.planning.timing.ends import embedding_passes, head_passes
from megatron.planning.timing.layer import layer_passes
from megatron.planning.timing.operations import Pass, as_again
from megatron.planning.timing.shape import Shape

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.planning.rates import Rates


class Stage(NamedTuple):
    """What a global stage has to do. again: groups of layers that are recomputed, and the layers in them; split: the
    backward pass is run in two halves."""

    layers: int
    first: bool
    last: bool
    groups_again: int = 0
    layers_again: int = 0
    split: bool = False


def stages_of(config: Config) -> tuple[Stage, ...]:
    """All global stages of a configuration."""
    parallel, recompute = config.parallel, config.recompute
    split = parallel.schedule == "zb-h1" and parallel.pipeline_model_parallel_size > 1
    return _stages(
        config.model.num_layers, parallel.num_stages, parallel.pipeline_layout, recompute.recompute_granularity,
        recompute.recompute_method, recompute.recompute_num_layers, split,
    )


@functools.lru_cache(maxsize=4096)
def _stages(
    layers: int, stages: int, layout: str | None, granularity: str | None, method: str | None, n: int, split: bool
) -> tuple[Stage, ...]:
    counts = [len(of_stage) for of_stage in assign_layers(layers, stages, layout)]

    def again(count: int) -> tuple[int, int]:
        """Groups and layers of a stage that run forward a second time (GPTChunk._run_layers)."""
        if granularity != "full":
            return 0, 0
        return (min(n, count), min(n, count)) if method == "block" else (-(-count // n), count)

    return tuple(
        Stage(count, i == 0, i == stages - 1, *again(count), split) for i, count in enumerate(counts)
    )


def stage_passes(shape: Shape, stage: Stage) -> dict[str, list[tuple[int, Pass]]]:
    """What a stage runs for one micro-batch: "forward", "backward" (or its first half) and "weight" (the second half),
    each as (how often, pass). In this order but for layers, of which recomputation and backward pass alternate."""
    layer, embedding, head = layer_passes(shape), embedding_passes(shape), head_passes(shape)
    inside, at_end = stage.layers_again - stage.groups_again, stage.groups_again
    forward = [(int(stage.first), embedding.forward), (stage.layers, layer.forward), (int(stage.last), head.forward)]
    backward = [
        (int(stage.last), head.inputs if stage.split else head.backward), (inside, as_again(layer.inside)),
        (at_end, as_again(layer.at_end)), (stage.layers, layer.inputs if stage.split else layer.backward),
        (int(stage.first), embedding.inputs if stage.split else embedding.backward),
    ]  # fmt: skip
    weight = [(int(stage.first), embedding.weights), (stage.layers, layer.weights), (int(stage.last), head.weights)]
    found = {"forward": forward, "backward": backward, "weight": weight if stage.split else []}
    return {name: [(count, steps) for count, steps in passes if count] for name, passes in found.items()}


@dataclass(frozen=True)
class StageSeconds:
    """Of one micro-batch. `backward` is the first half where the backward pass is split, `weight` the second. overhead:
    of the host, for each of the three."""

    forward: PassSeconds
    backward: PassSeconds
    weight: PassSeconds
    overhead: tuple[float, float, float]

    @property
    def forward_s(self) -> float:
        return self.forward.total + self.overhead[0]

    @property
    def backward_s(self) -> float:
        return self.backward.total + self.overhead[1]

    @property
    def weight_s(self) -> float:
        return self.weight.total + self.overhead[2]

    @property
    def busy_s(self) -> float:
        return self.forward_s + self.backward_s + self.weight_s


def stage_seconds(
    shape: Shape, stage: Stage, rates: Rates, message_s: MessageSeconds | None, *, hides: bool = True
) -> StageSeconds:
    """Seconds of a stage; message_s None: messages take no time."""
    found = {
        name: functools.reduce(
            PassSeconds.__add__, (_often(count, steps, rates, message_s, hides) for count, steps in passes), NOTHING
        )
        for name, passes in stage_passes(shape, stage).items()
    }
    layers, again, each = stage.layers, stage.layers_again, rates.instruction_overhead_s
    ahead, back = rates.layer_forward_overhead_s, rates.layer_backward_overhead_s
    return StageSeconds(
        found["forward"], found["backward"], found["weight"],
        (each + ahead * layers, each + back * layers + ahead * again, each if stage.split else 0.0),
    )  # fmt: skip


def _often(count: int, steps: Pass, rates: Rates, message_s: MessageSeconds | None, hides: bool) -> PassSeconds:
    """The same pass so many times in a row: a message left over from one may hold up the next."""
    total, busy, done = NOTHING, 0.0, 0
    while done < count:
        one = pass_seconds(steps, rates, message_s, hides=hides, busy=busy)
        alike = abs(one.left - busy) <= 1e-12 * max(one.left, busy)
        step = count - done if alike else 1
        total, busy, done = total + one.times(step), one.left, done + step
    return total
