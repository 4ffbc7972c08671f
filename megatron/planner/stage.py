"""Work of a pipeline stage for one micro-batch, from a trace's modules, and ZeRO's messages.

The time of this work is computed in timing/passes.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.config import Config
from megatron.config.parallel import RecomputeConfig
from megatron.engine.buckets import BucketPlan, BucketRule, bucket_rule
from megatron.engine.optimizer_state import optimizer_state
from megatron.engine.zero_plan import (
    BACKWARD,
    RECOMPUTE,
    BucketInstruction,
    ModuleCall,
    ModulePass,
    Reductions,
    ShardSizes,
    Zero,
    ZeroPlan,
    zero_of,
    zero_plan,
)
from megatron.model.stages import assign_layers, end_ranks, recomputed_groups, stages_of_rank
from megatron.parallel.sharding import Sharding
from megatron.pipeline.schedule import splits_backward
from megatron.planner.events import (
    GroupMessage,
    Pass,
    Trace,
    TracedModule,
)
from megatron.planner.trace import kinds_of_layers
from megatron.planner.zero import messages_of


class StageWork(NamedTuple):
    """Work of a global stage, which is one chunk (model.stages.assign_layers).

    layers     number of its layers
    first      whether it has the embedding; last: whether it has the output layer
    recomputed number of layers in each group that is fully recomputed
               (model.stages.recomputed_groups)
    split      whether the backward pass runs in two halves
    kinds      kind of each layer (trace.kinds_of_layers), if the model has several kinds
    """

    layers: int
    first: bool
    last: bool
    recomputed: tuple[int, ...] = ()
    split: bool = False
    kinds: tuple[int, ...] = ()

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        return self.kinds or (0,) * self.layers


def stages_of(config: Config) -> tuple[StageWork, ...]:
    """List the global stages of a configuration."""
    parallel = config.parallel
    size = parallel.pipeline_model_parallel_size
    split = splits_backward(config.schedule, size, parallel.num_chunks, config.num_micro_batches())
    distinct, kinds = kinds_of_layers(config)
    return _stages(
        config.model.num_layers,
        parallel.num_stages,
        parallel.pipeline_layout,
        config.recompute,
        split,
        kinds if len(distinct) > 1 else (),
    )


@functools.lru_cache(maxsize=4096)
def _stages(
    layers: int,
    stages: int,
    layout: str | None,
    recompute: RecomputeConfig,
    split: bool,
    kinds: tuple[int, ...],
) -> tuple[StageWork, ...]:
    layer_ranges = assign_layers(layers, stages, layout)
    return tuple(
        StageWork(
            len(layer_range),
            i == 0,
            i == stages - 1,
            tuple(recomputed_groups(len(layer_range), recompute)),
            split,
            kinds[layer_range.start : layer_range.stop],
        )
        for i, layer_range in enumerate(layer_ranges)
    )


def stages_on(config: Config, rank: int) -> tuple[StageWork, ...]:
    """List the stages of a pipeline rank, in the order of its chunks."""
    stages = stages_of(config)
    return tuple(stages[stage] for stage in stages_of_rank(config, rank))


def modules_of(traced: Trace, stage: StageWork) -> list[TracedModule]:
    """List a stage's modules in the order of a forward pass."""
    layers = (traced.kinds[kind][0] for kind in stage.layer_kinds)
    return [*[traced.embedding] * stage.first, *layers, *[traced.head] * stage.last]


ALONE = Zero(
    stage=0,
    sizes=ShardSizes(1, 1, 1),
    of_experts=ShardSizes(1, 1, 1),
    ahead=False,
    early=False,
    offload=False,
    weight_bytes=0,
    gradient_bytes=0,
)
"""ZeRO sizes for a rank that shards nothing."""


class PlannedRank(NamedTuple):
    """ZeRO's plan for a rank, and the parameters that its numbers refer to."""

    plan: ZeroPlan
    records: tuple[Sharding, ...]


def plan_of_rank(config: Config, traced: Trace, rank: int) -> PlannedRank:
    """Return ZeRO's plan for a pipeline rank, and its parameters."""
    zero = zero_of(config)
    of_rank = tuple(zip(stages_of_rank(config, rank), stages_on(config, rank), strict=True))
    sweeps = optimizer_state(config).sweeps
    return planned(traced, of_rank, zero, bucket_rule(config, zero.gradient_ranks), sweeps)


def planned(
    traced: Trace,
    stages: tuple[tuple[int, StageWork], ...],
    zero: Zero,
    rule: BucketRule,
    sweeps: tuple[tuple[str, ...], ...] = ((),),
) -> PlannedRank:
    """Return the plan for a rank with these (number, stage) pairs."""
    return _planned(_weights_of(traced), stages, zero, rule, sweeps)


@functools.lru_cache(maxsize=1 << 12)
def _planned(
    weights: _Weights,
    stages: tuple[tuple[int, StageWork], ...],
    zero: Zero,
    rule: BucketRule,
    sweeps: tuple[tuple[str, ...], ...],
) -> PlannedRank:
    # buckets depend neither on ZeRO's sizes nor on recomputation
    plain = tuple((n, stage._replace(recomputed=(), split=False)) for n, stage in stages)
    plan = _divided(weights, plain, zero.stage, rule)
    recomputed = {number: stage.recomputed for number, stage in stages}
    changed = dataclasses.replace(plan, zero=zero, sweeps=sweeps, recomputed=recomputed)
    return PlannedRank(changed, _called(weights, plain)[0])


@dataclass(frozen=True, eq=False)
class _Weights:
    """Parameters of a trace's modules; one object for all traces with equal parameters."""

    embedding: tuple[Sharding, ...]
    kinds: tuple[tuple[Sharding, ...], ...]
    head: tuple[Sharding, ...]


_known_weights: dict[tuple[object, ...], _Weights] = {}


@functools.lru_cache(maxsize=1 << 12)
def _weights_of(traced: Trace) -> _Weights:
    kinds = tuple(layer.parameters for layer, _ in traced.kinds)
    key = traced.embedding.parameters, kinds, traced.head.parameters
    return _known_weights.setdefault(key, _Weights(*key))


@functools.lru_cache(maxsize=1 << 12)
def _divided(
    weights: _Weights, stages: tuple[tuple[int, StageWork], ...], zero_stage: int, rule: BucketRule
) -> ZeroPlan:
    records, calls = _called(weights, stages)
    return zero_plan(ALONE._replace(stage=zero_stage), rule, records, calls, {})


@functools.lru_cache(maxsize=1 << 12)
def _called(
    weights: _Weights, stages: tuple[tuple[int, StageWork], ...]
) -> tuple[tuple[Sharding, ...], dict[int, list[ModuleCall]]]:
    """Return a rank's parameters, in the order of their first use, and the calls that use them."""
    records = list[Sharding]()
    tied: list[int] = []

    def numbers(parameters: Iterable[Sharding]) -> Iterator[int]:
        for record in parameters:
            if record.tied and tied:
                yield tied[0]
                continue
            records.append(record)
            if record.tied:
                tied.append(len(records) - 1)
            yield len(records) - 1

    calls: dict[int, list[ModuleCall]] = {}
    for number, stage in stages:
        calls[number] = of_stage = []
        tables = itertools.groupby(weights.embedding, lambda p: p.name.rpartition(".")[0])
        for _, group in tables if stage.first else ():
            some = tuple(group)
            is_table = all(record.kind == "embedding" for record in some)
            of_stage.append(ModuleCall(tuple(numbers(some)), table=is_table))
        for kind in stage.layer_kinds:
            of_stage.append(ModuleCall(tuple(numbers(weights.kinds[kind])), layer=True))
        if stage.last:
            of_stage.append(ModuleCall(tuple(numbers(weights.head)), outlives=True))
    return tuple(records), calls


def plan_in_passes(config: Config, traced: Trace, stage: StageWork) -> ZeroPlan | None:
    """Return ZeRO's plan for a stage's passes; None below ZeRO stage 2.

    In the plan the pipeline stage has number 0.
    """
    zero = zero_of(config)
    if not zero.divides_gradients:
        return None
    return planned(traced, ((0, stage),), zero, bucket_rule(config, zero.gradient_ranks)).plan


def elements_of_rank(config: Config, traced: Trace, rank: int) -> tuple[BucketPlan, ...]:
    """Return a pipeline rank's parameters in as few buckets as possible.

    These buckets serve for results that depend only on numbers of elements. Experts, vectors and
    parameters that the optimizer needs in full are in separate buckets.
    """
    takes_full = bucket_rule(config, 1).full_parameters
    key = config.optimizer, config.pieces.optimizer
    stages = stages_on(config, rank)
    return _elements(
        _weights_of(traced), stages, BucketRule(full_parameters=takes_full, settings=key)
    )


@functools.lru_cache(maxsize=1 << 12)
def _elements(
    weights: _Weights, stages: tuple[StageWork, ...], rule: BucketRule
) -> tuple[BucketPlan, ...]:
    plain = (stage._replace(recomputed=(), split=False) for stage in stages)
    records, _ = _called(weights, tuple(enumerate(plain)))
    return tuple(rule.plan(records, [record.kind == "vector" for record in records]))


class RepeatedPass(NamedTuple):
    """Pass that a stage runs `times` times in a row; recompute: whether it is all recomputation."""

    times: int
    of: Pass
    recompute: bool = False


def stage_passes(trace: Trace, stage: StageWork) -> dict[str, list[RepeatedPass]]:
    """List a stage's passes of modules for one micro-batch: "forward", "backward" and "weight".

    If the backward pass is split, "backward" is its first half and "weight" its second. The passes
    of all layers of a kind are listed together, and their recomputation before their backward
    passes; training alternates between kinds, and recomputes each group of layers right before its
    backward passes.

    In a group of layers that keeps only its input, all layers are recomputed before the first
    backward pass. The recomputation of the last layer stops early, as in torch: at the last tensor
    that the backward pass needs.
    """
    first = int(stage.first)
    last = int(stage.last)
    kinds = list(_kinds(trace, stage))
    passes = {
        "forward": [
            RepeatedPass(first, trace.embedding.forward),
            *(RepeatedPass(count, layer.forward) for layer, _, count, _, _ in kinds),
            RepeatedPass(last, trace.head.forward),
        ]
    }
    for name, half in _halves(stage).items():
        passes[name] = [RepeatedPass(last, getattr(trace.head, half))]
        for layer, recompute, count, recomputed, alone in kinds:
            inside = recomputed - alone if name == "backward" else 0
            passes[name] += [
                RepeatedPass(inside, layer.forward, recompute=True),
                RepeatedPass(alone, getattr(recompute, half)),
                RepeatedPass(count - alone, getattr(layer, half)),
            ]
        passes[name].append(RepeatedPass(first, getattr(trace.embedding, half)))
    return {
        name: [run for run in passes.get(name, []) if run.times]
        for name in ("forward", "backward", "weight")
    }


def halves_of(stage: StageWork) -> tuple[str, ...]:
    """Return the names of a backward pass, or of its two halves, in events.TracedModule."""
    return tuple(_halves(stage).values())


def _halves(stage: StageWork) -> dict[str, str]:
    """Map a backward pass, or its halves, to the names of their passes in events.TracedModule."""
    return {"backward": "inputs", "weight": "weights"} if stage.split else {"backward": "backward"}


def _kinds(
    trace: Trace, stage: StageWork
) -> Iterator[tuple[TracedModule, TracedModule, int, int, int]]:
    """Yield a tuple for each kind of layer in a stage.

    It is (layer, layer with recomputation, number of layers, number of recomputed layers, number of
    recomputed layers that are the last of their group).
    """
    left = sum(stage.recomputed)
    groups = len(stage.recomputed)
    for kind in sorted(set(stage.layer_kinds)):
        recomputed = stage.layer_kinds[: sum(stage.recomputed)].count(kind)
        # Layers of several kinds alternate: assume that the share of the groups that end with a
        # kind is its share of the recomputed layers.
        alone = round(groups * recomputed / left) if left else 0
        left = left - recomputed
        groups = groups - alone
        yield *trace.layer_of(kind), stage.layer_kinds.count(kind), recomputed, alone


def stage_flops(
    trace: Trace, stage: StageWork, *, recompute: bool | None = None
) -> dict[str, float]:
    """Count one tensor rank's FLOPs for a micro-batch, by pass; `recompute` as in Pass.flops."""
    return {
        name: sum(
            run.times * run.of.flops(recompute=None if run.recompute else recompute)
            for run in runs
            if recompute is not False or not run.recompute
        )
        for name, runs in stage_passes(trace, stage).items()
    }


def parameters_of(trace: Trace, stage: StageWork) -> int:
    """Count a stage's parameters on one tensor rank, including the last stage's tied embedding."""
    return sum(bucket.elements for bucket in _elements(_weights_of(trace), (stage,), BucketRule()))


def tied_elements(config: Config, trace: Trace) -> float:
    """Count the elements of the tied embedding's gradient that each device sums with its peer.

    The devices are those of the first and the last stage.
    """
    first, last = end_ranks(config)
    if first == last:
        return 0.0
    return sum(p.elements for p in trace.head.parameters if p.tied) / zero_of(config).sizes.states


def first_layer(stage: StageWork, plan: ZeroPlan) -> int:
    """Return the number of the first layer's call; in the plan the stage has number 0."""
    return len(plan.calls[0]) - stage.layers - stage.last


def computed(
    trace: Trace, stage: StageWork, plan: ZeroPlan, step: ModulePass, half: str
) -> tuple[TracedModule | None, str]:
    """Return the computation for a step of the plan: a module and the name of its pass.

    plan  ZeRO's plan, with the stage as number 0
    half  name of a half of the backward pass, or "backward"

    The embedding is computed at the call of the last of its tables. The last layer of a recomputed
    group repeats its forward pass within its backward pass; the second half of a split backward
    pass repeats nothing.
    """
    layer = step.call - first_layer(stage, plan)
    name = half if step.kind == BACKWARD else "forward"
    if layer < 0:
        return (trace.embedding if layer == -1 else None), name
    if layer >= stage.layers:
        return trace.head, name
    plain, recompute = trace.layer_of(stage.layer_kinds[layer])
    ends_group = step.call in plan.groups[0]
    if step.kind == RECOMPUTE and (ends_group or half == "weights"):
        return None, name
    return (recompute if step.kind == BACKWARD and ends_group else plain), name


Sends = tuple[tuple[BucketInstruction, tuple[GroupMessage, ...]], ...]
"""Instructions with their messages."""


class ZeroStep(NamedTuple):
    """A module's pass with ZeRO's messages around it (engine.zero_plan.ModulePass).

    name     name of the pass, as in stage_passes
    of       the computation; None: nothing is computed
    buckets  buckets of the computed module's parameters; () for an embedding, whose tables have
             separate calls
    """

    name: str
    of: Pass | None
    buckets: tuple[int, ...]
    before: Sends
    beside: Sends
    after: Sends


@functools.lru_cache(maxsize=1 << 12)
def zero_steps(trace: Trace, stage: StageWork, plan: ZeroPlan) -> tuple[ZeroStep, ...]:
    """List the steps of a micro-batch's passes in the middle of a training step."""

    def sends(instructions: Iterable[BucketInstruction]) -> Sends:
        return tuple((one, tuple(messages_of(plan, [one]))) for one in instructions)

    halves = _halves(stage)
    passes = {"forward": plan.forward(0), **dict.fromkeys(halves, plan.backward(0))}
    sums = Reductions(plan)
    plan.reducing(0, False, sums)  # for the previous micro-batch, whose sums are being reduced
    passes[list(halves)[-1]] = plan.reducing(0, False, sums)
    result = []
    for name, steps in passes.items():
        for step in steps:
            module, attribute = computed(trace, stage, plan, step, halves.get(name, ""))
            of = None if module is None else getattr(module, attribute)
            parameters = () if module is trace.embedding else plan.calls[0][step.call].parameters
            buckets = tuple(plan.bucket_of[number] for number in parameters)
            around = (step.before, step.beside, step.after)
            result.append(ZeroStep(name, of, buckets, *map(sends, around)))
    return tuple(result)


def messages_in_passes(
    trace: Trace, stage: StageWork, plan: ZeroPlan, name: str | None = None
) -> list[GroupMessage]:
    """List ZeRO's messages in a micro-batch's passes, or in the pass `name`.

    Messages in `beside` are also in `before` of a later step, and are counted there.
    """
    return [
        message
        for step in zero_steps(trace, stage, plan)
        if name in (None, step.name)
        for _, messages in (*step.before, *step.after)
        for message in messages
    ]
