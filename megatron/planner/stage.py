"""Work of a pipeline stage for one micro-batch, composed from a trace's parts, and its time.

The time of a pass is simulated: a clock for computations on the device, one for its messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.config import Config
from megatron.config.parallel import RecomputeConfig
from megatron.engine.optimizer_state import wants_whole
from megatron.engine.zero_plan import BucketPlan, BucketRule, bucket_rule, send_order, unit_of
from megatron.kernels.work import Attention, Computation, Product
from megatron.model.stages import assign_layers, recomputed_layers
from megatron.parallel.sharding import Sharding
from megatron.pipeline.schedule import splits_backward
from megatron.planner.cluster import Cluster
from megatron.planner.events import (
    Again,
    Give,
    Message,
    Part,
    Pass,
    Post,
    Sum,
    Take,
    Trace,
    Wait,
)
from megatron.planner.rates import Rates
from megatron.planner.trace import kinds_of_layers
from megatron.planner.zero import Zero, zero_of


class Stage(NamedTuple):
    """Work of a global stage.

    again      (recomputed groups of layers, layers in them)
    split      whether the backward pass runs in two halves
    kinds      of each layer (trace.kinds_of_layers), if the model has layers of several
    """

    layers: int
    first: bool
    last: bool
    groups_again: int = 0
    layers_again: int = 0
    split: bool = False
    kinds: tuple[int, ...] = ()

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        return self.kinds or (0,) * self.layers


def stages_of(config: Config) -> tuple[Stage, ...]:
    """List the global stages of a configuration."""
    parallel = config.parallel
    size = parallel.pipeline_model_parallel_size
    split = size > 1 and splits_backward(
        config.schedule, size, parallel.num_chunks, config.num_micro_batches()
    )
    found, kinds = kinds_of_layers(config.model)
    return _stages(
        config.model.num_layers,
        parallel.num_stages,
        parallel.pipeline_layout,
        config.recompute,
        split,
        kinds if len(found) > 1 else (),
    )


@functools.lru_cache(maxsize=4096)
def _stages(
    layers: int,
    stages: int,
    layout: str | None,
    recompute: RecomputeConfig,
    split: bool,
    kinds: tuple[int, ...],
) -> tuple[Stage, ...]:
    parts = assign_layers(layers, stages, layout)
    return tuple(
        Stage(
            len(part),
            i == 0,
            i == stages - 1,
            *recomputed_layers(len(part), recompute),
            split,
            kinds[part.start : part.stop],
        )
        for i, part in enumerate(parts)
    )


def parts_of(traced: Trace, stage: Stage) -> list[Part]:
    """List a stage's parts in the order of a forward pass."""
    layers = (traced.kinds[kind][0] for kind in stage.layer_kinds)
    return [*[traced.embedding] * stage.first, *layers, *[traced.head] * stage.last]


class Located(NamedTuple):
    """Parameter of a rank, with the numbers of its stage and of its part in the stage."""

    record: Sharding
    stage: int
    part: int


class LocatedBucket(NamedTuple):
    """Bucket with its parameters."""

    plan: BucketPlan
    members: tuple[Located, ...]

    @property
    def vectors(self) -> bool:
        """Return whether it has norms and biases alone, which ZeRO-3 does not divide."""
        return all(one.record.kind == "vector" for one in self.members)


def parameters_in_order(traced: Trace, stage: Stage, number: int = 0) -> list[Located]:
    """List a stage's parameters in the order of their first use, a tied weight once."""
    return [
        Located(p, number, at)
        for at, part in enumerate(parts_of(traced, stage))
        for p in part.parameters
        if not (p.tied and stage.first and at)
    ]


def buckets_of_rank(config: Config, traced: Trace, rank: int) -> tuple[LocatedBucket, ...]:
    """List the buckets of a pipeline rank in the order in which they are sent."""
    size = config.parallel.pipeline_model_parallel_size
    zero = zero_of(config)
    of_rank = tuple(enumerate(stages_of(config)))[rank::size]
    return _buckets(traced, of_rank, bucket_rule(config, zero.line), zero.stage)


@functools.lru_cache(maxsize=1 << 10)
def _buckets(
    traced: Trace, stages: tuple[tuple[int, Stage], ...], rule: BucketRule, zero_stage: int
) -> tuple[LocatedBucket, ...]:
    located = [one for n, stage in stages for one in parameters_in_order(traced, stage, n)]
    first = stages[0][0]
    if stages[0][1].first:  # the last of several stages has the same tied embedding
        located = [one for one in located if not (one.record.tied and one.stage != first)]
    units = [unit_of(one.record, zero_stage, one.stage, one.part) for one in located]
    plans = rule.plan([one.record for one in located], units)
    return tuple(
        LocatedBucket(plan, tuple(located[member] for member in plan.members))
        for plan in send_order(plans)
    )


class Run(NamedTuple):
    """Pass that a stage runs `times` times in a row.

    again   whether all of it is recomputation
    shared  messages of ZeRO in each pass
    """

    times: int
    of: Pass
    again: bool = False
    shared: tuple[Message, ...] = ()


def stage_passes(trace: Trace, stage: Stage, zero: Zero | None = None) -> dict[str, list[Run]]:
    """List a stage's runs for one micro-batch: "forward", "backward" and "weight".

    If the backward pass is split, "backward" is its first half and "weight" its second. Runs are in
    order, except that recomputation and backward passes of layers alternate.

    In a group of layers of which only the input is kept, all layers are recomputed before the first
    backward pass. The last one stops early, as in torch: at the last tensor that is kept.
    """
    first = int(stage.first)
    last = int(stage.last)
    kinds = list(_kinds(trace, stage))

    def shared(part: Part, name: str) -> tuple[Message, ...]:
        if zero is None:
            return ()
        return messages_of_part(zero, part, name, layer=part in layers, split=stage.split)

    layers = [layer for layer, *_ in kinds]
    found = {
        "forward": [
            Run(first, trace.embedding.forward, shared=shared(trace.embedding, "forward")),
            *(
                Run(count, layer.forward, shared=shared(layer, "forward"))
                for layer, _, count, _, _ in kinds
            ),
            Run(last, trace.head.forward, shared=shared(trace.head, "forward")),
        ]
    }
    halves = ("inputs", "weights") if stage.split else ("backward",)
    for name, half in zip(("backward", "weight"), halves, strict=False):
        found[name] = [Run(last, getattr(trace.head, half), shared=shared(trace.head, name))]
        for layer, again, count, recomputed, alone in kinds:
            inside = recomputed - alone if name == "backward" else 0
            found[name] += [
                Run(inside, layer.forward, again=True),
                Run(alone, getattr(again, half), shared=shared(layer, name)),
                Run(count - alone, getattr(layer, half), shared=shared(layer, name)),
            ]
        found[name].append(
            Run(first, getattr(trace.embedding, half), shared=shared(trace.embedding, name))
        )
    return {
        name: [run for run in found.get(name, []) if run.times]
        for name in ("forward", "backward", "weight")
    }


def messages_of_part(
    zero: Zero, part: Part, name: str, *, layer: bool, split: bool
) -> tuple[Message, ...]:
    """List ZeRO's messages in a pass of a part; those of a split backward pass are in its second half.

    With stage 3 a layer's weights are gathered for each of both passes; the embedding's are not
    needed in its backward pass, and the output layer's stay from one to the other.

    name   as in stage_passes
    layer  whether the part is a layer
    """
    if zero.stage < 2:
        return ()
    gathered = name == "forward" or (name == "backward" and layer)
    reduced = name == ("weight" if split else "backward")
    ways = [False] * gathered + [True] * reduced
    return tuple(m for way in ways for m in zero.of_pass(part.parameters, way))


def _kinds(trace: Trace, stage: Stage) -> Iterator[tuple[Part, Part, int, int, int]]:
    """Yield each kind of a stage's layers.

    (layer, layer with recomputation, how many, how many of them are recomputed, how many of these
    are the last of their group)
    """
    left = stage.layers_again
    groups = stage.groups_again
    for kind in sorted(set(stage.layer_kinds)):
        recomputed = stage.layer_kinds[: stage.layers_again].count(kind)
        # Layers of several kinds alternate: groups end with each in proportion.
        alone = round(groups * recomputed / left) if left else 0
        left = left - recomputed
        groups = groups - alone
        yield *trace.layer_of(kind), stage.layer_kinds.count(kind), recomputed, alone


def stage_flops(trace: Trace, stage: Stage, *, again: bool | None = None) -> dict[str, float]:
    """Count the FLOPs of one tensor rank for one micro-batch, by pass; `again` as in Pass.flops."""
    return {
        name: sum(
            run.times * run.of.flops(again=None if run.again else again)
            for run in runs
            if again is not False or not run.again
        )
        for name, runs in stage_passes(trace, stage).items()
    }


@functools.lru_cache(maxsize=1 << 14)
def parameters_of(trace: Trace, stage: Stage) -> int:
    """Count parameters of one tensor rank of a stage, including the last one's tied embedding."""
    count = sum(trace.kinds[kind][0].elements for kind in stage.layer_kinds)
    count += stage.first * trace.embedding.elements
    if not stage.last:
        return count
    return count + sum(p.elements for p in trace.head.parameters if not (p.tied and stage.first))


def experts_of(trace: Trace, stage: Stage) -> int:
    """Count those of them that are of experts."""
    return sum(trace.kinds[kind][0].of_experts for kind in stage.layer_kinds)


def whole_parameters(config: Config, trace: Trace, stage: Stage) -> list[Sharding]:
    """List the parameters of a stage that the optimizer takes whole, as one tensor rank has them."""
    wants = wants_whole(config)
    parts = [trace.embedding] * stage.first + [trace.head] * stage.last
    found = [*(trace.kinds[kind][0] for kind in stage.layer_kinds), *parts]
    return [p for part in found for p in part.parameters if wants and wants(p.name, p.global_shape)]


def vectors_of(trace: Trace, stage: Stage) -> int:
    """Count the parameters of a stage's norms and biases."""
    parts = [trace.embedding] * stage.first + [trace.head] * stage.last
    parts += [trace.kinds[kind][0] for kind in stage.layer_kinds]
    return sum(
        p.elements
        for part in parts
        for p in part.parameters
        if p.kind == "vector" and not p.experts
    )


def owners(config: Config) -> int:
    """Count the devices over which a parameter's optimizer state is partitioned."""
    return zero_of(config).states


def owned_elements(config: Config, elements: float, experts: float) -> float:
    """Return the elements of optimizer state on a device, of which `experts` are of experts."""
    zero = zero_of(config)
    return (elements - experts) / zero.sizes()[1] + experts / zero.sizes(experts=True)[1]


def tied_elements(config: Config, trace: Trace) -> float:
    """Count a tied embedding's gradient elements that first and last stage sum per device."""
    if config.parallel.pipeline_model_parallel_size == 1:
        return 0.0
    return sum(p.elements for p in trace.head.parameters if p.tied) / owners(config)


# -- time ------------------------------------------------------------------------------------------

MessageSeconds = Callable[[str, float, str], float]
"""Function from a message's kind, bytes and group to its seconds."""


@functools.lru_cache(maxsize=64)
def rates_of(cluster: Cluster, dtype_name: str) -> Rates:
    """Return the rates of a machine and dtype; one object for each, which caches its results."""
    return Rates(cluster, dtype_name)


@functools.lru_cache(maxsize=1 << 16)
def seconds_of(operation: Computation, rates: Rates) -> float:
    if isinstance(operation, Product):
        if not operation.flops:  # of an expert without rows
            return 0.0
        moved = rates.memory_s(operation.moved, 0) if operation.moved else 0.0
        return max(rates.product_s(*operation[:4]), moved)
    if isinstance(operation, Attention):
        return rates.attention_s(operation)
    return rates.memory_s(*operation)


def crowding(config: Config, cluster: Cluster) -> float:
    """Count the ranks that share a core while a whole node computes; 1 for GPUs."""
    if cluster.shared_cores is None:
        return 1.0
    return max(
        1.0, min(config.parallel.world_size, cluster.devices_per_node) / cluster.shared_cores
    )


class PassSeconds(NamedTuple):
    """Seconds of one pass: computation, recomputation, and waiting for messages, or for ZeRO's."""

    compute: float
    again: float
    waited: float
    shared: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.again + self.waited + self.shared


@functools.lru_cache(maxsize=1 << 14)
def _timed(of: Pass, rates: Rates) -> tuple[list[float | Post | Wait], float, float]:
    """Return a pass's messages and the seconds between them, then its compute and recompute time."""
    found: list[float | Post | Wait] = []
    sums = {False: 0.0, True: 0.0}
    since = 0.0
    for step in of.steps:
        if isinstance(step, Post | Wait):
            found += [since, step]
            since = 0.0
        elif not isinstance(step, Take | Give | Sum):
            seconds = seconds_of(step.operation if isinstance(step, Again) else step, rates)
            sums[isinstance(step, Again)] += seconds
            since += seconds
    return [*found, since], sums[False], sums[True]


def pass_seconds(
    of: Pass, rates: Rates, message_s: MessageSeconds | None, *, hides: bool = True
) -> PassSeconds:
    """Simulate a pass. A message without a wait in it overlaps with the next pass.

    message_s  None: messages take no time
    hides      messages overlap with computation; otherwise each is waited for when it is posted
    """
    timed, compute, again = _timed(of, rates)
    if message_s is None:
        return PassSeconds(compute, again, 0.0)
    clock = waited = 0.0
    arrives: dict[int, float] = {}
    free: dict[str, float] = {}  # the links of each group
    for step in timed:
        if isinstance(step, float):
            clock += step
            continue
        if isinstance(step, Post):
            group = step.message.group
            there = max(clock, free.get(group, 0.0)) + message_s(*step.message)
            free[group] = arrives[step.number] = there
            if hides:
                continue
        there = max(clock, arrives.get(step.number, 0.0))
        waited = waited + there - clock
        clock = there
    return PassSeconds(compute, again, waited)


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch; `backward` and `weight` are the halves of a split backward pass.

    overhead  of the host, for each of the three passes
    """

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


def stage_seconds(
    trace: Trace,
    stage: Stage,
    rates: Rates,
    message_s: MessageSeconds | None,
    *,
    hides: bool = True,
    zero: Zero | None = None,
) -> StageSeconds:
    """Time a stage; message_s None: messages take no time.

    ZeRO's messages of a part overlap with a pass of its size: that of the part before or after.
    """
    found = {}
    for name, runs in stage_passes(trace, stage, zero).items():
        parts = [(run, pass_seconds(run.of, rates, message_s, hides=hides)) for run in runs]
        compute = sum(run.times * one.compute for run, one in parts if not run.again)
        again = sum(run.times * (one.again + one.compute * run.again) for run, one in parts)
        waited = sum(run.times * one.waited for run, one in parts)
        shared = sum(
            run.times
            * max(0.0, sum(message_s(*m) for m in run.shared) - (one.total if hides else 0.0))
            for run, one in parts
            if message_s is not None
        )
        found[name] = PassSeconds(compute, again, waited, shared)
    each = rates.instruction_overhead_s
    ahead = rates.layer_forward_overhead_s
    back = rates.layer_backward_overhead_s
    backward = each + back * stage.layers + ahead * stage.layers_again
    overhead = each + ahead * stage.layers, backward, each if stage.split else 0.0
    return StageSeconds(found["forward"], found["backward"], found["weight"], overhead)
