"""Arithmetic behind an estimate, as tables of operations, passes, parts of a step and memory."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from megatron.config import Config
from megatron.config.model import LayerKind
from megatron.engine.zero_plan import (
    BucketInstruction,
    ModulePass,
    Reductions,
    Zero,
    ZeroPlan,
    zero_of,
)
from megatron.kernels.cost import Attention, Computation, Memory
from megatron.model.formulas import device_unit
from megatron.model.stages import stages_of_rank
from megatron.planner.cluster import GIB
from megatron.planner.events import GroupMessage, Pass, Trace, TracedModule
from megatron.planner.memory import host_bytes
from megatron.planner.rates import (
    BACKWARD_OPERATIONS,
    attention_operations,
    causal_pairs,
    rates_of,
    seconds_of,
)
from megatron.planner.stage import (
    StageWork,
    messages_in_passes,
    plan_in_passes,
    plan_of_rank,
    stages_of,
    stages_on,
)
from megatron.planner.table import Table
from megatron.planner.timing.estimate import Estimate, busiest_rank
from megatron.planner.trace import kinds_of_layers, trace
from megatron.planner.zero import messages_at_end

_LAYER = re.compile(r"^layers\.\d+\.?")

_SMALL = 1e-3
_Row = tuple[str, str, str, str]
_MESSAGE_COLUMNS = ("message", "formula", "time", "overlaps with")


def explain(predicted: Estimate) -> list[Table]:
    """Explain an estimate in tables, beginning with the modules.

    These are a layer of each kind, a recomputed one of each kind with full recomputation, and the
    embedding and the output layer if the busiest rank has them.
    """
    traced = trace(predicted.config, predicted.cluster.device_type)
    rank = busiest_rank(predicted.run)
    rank_stages = stages_on(predicted.config, rank)
    modules = dict[str, TracedModule]()
    for kind, of_kind in zip(kinds_of_layers(predicted.config)[0], traced.kinds, strict=True):
        for name, module in zip(("", "recomputed "), of_kind, strict=True):
            if module is not None:
                modules[f"one {name}layer{_kind(kind, predicted.config)}"] = module
    if rank_stages[0].first:
        modules["the embedding"] = traced.embedding
    if rank_stages[-1].last:
        modules["the output layer"] = traced.head
    device = device_unit(predicted.cluster.device)
    tables = list[Table]()
    for title, module in modules.items():
        for half, of in _passes(module, rank_stages[0].split):
            if of.steps:
                tables.append(_pass(predicted, f"{title}, {half}, on one {device}", of))
    tables += _stages(predicted, rank), _step(predicted, rank)
    if (plan := plan_in_passes(predicted.config, traced, rank_stages[0])) is not None:
        tables += _zero_steps(plan), *_zero_messages(predicted, traced, rank_stages, rank)
    if zero_of(predicted.config).gradient_ranks > 1:
        tables.append(_end_of_step(predicted, rank))
    return [*tables, _memory(predicted), _figures(predicted)]


_FEATURES = {
    "window_size": "a window",
    "num_experts": "experts",
    "experimental_attention_variant": "linear attention",
    "position_embedding_type": "RoPE",
    "rope_scaling": "scaled RoPE",
    "freeze": "frozen parameters",
    "lora_target": "adapters",
}
"""Features of some layers, by the settings of a LayerKind; layers without one have None or none."""


def _kind(kind: LayerKind, config: Config) -> str:
    """Describe a kind of layer by the features in which the model's layers differ."""
    kinds = kinds_of_layers(config)[0]
    differing = [name for name in _FEATURES if len({getattr(each, name) for each in kinds}) > 1]
    return "".join(
        f" {'without' if getattr(kind, name) in (None, 'none', ()) else 'with'} {_FEATURES[name]}"
        for name in differing
    )


def _passes(module: TracedModule, split: bool) -> list[tuple[str, Pass]]:
    """Return each pass with its title."""
    passes = [("forward", module.forward)]
    if not split:
        return [*passes, ("backward", module.backward)]
    return [*passes, ("backward, inputs", module.inputs), ("backward, weights", module.weights)]


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def _pass(predicted: Estimate, title: str, of: Pass) -> Table:
    """Tabulate each distinct operation of each module, and each distinct message."""
    rates = rates_of(predicted.cluster, predicted.config.precision.dtype_name)
    rows = list[_Row]()
    total = sum(seconds_of(operation, rates) for operation in of.computations())
    rest = 0.0
    for recompute in (False, True):
        for (label, operation), count in Counter(of.labelled(recompute=recompute)).items():
            seconds = count * seconds_of(operation, rates)
            if seconds > _SMALL * total:
                name, formula = _described(operation, count, seconds)
                module = _LAYER.sub("", label)
                rows.append((name + ", again" * recompute, formula, _time(seconds), module))
            else:
                rest += seconds
    rows.append(("others", f"of at most {100 * _SMALL:g} % of the pass each", _time(rest), ""))
    rows.append(("computations", "sum of the above", _time(total), ""))
    rows += _messages(predicted, of.messages(), "on a GPU, hidden by computations before the wait")
    return Table(title, ("operation", "formula", "time", "module"), rows)


def _messages(predicted: Estimate, messages: Iterable[GroupMessage], overlap: str) -> list[_Row]:
    """Return one row per distinct message."""
    rows = list[_Row]()
    for message, count in Counter(messages).items():
        each = predicted.channels.seconds(*message)
        formula = f"{count} x {message.bytes / 1e6:.4g} MB, {_time(each)} each"
        name = f"message: {message.group}, {message.kind}"
        rows.append((name, formula, _time(count * each), overlap))
    return rows


def _described(operation: Computation, count: int, seconds: float) -> tuple[str, str]:
    """Return the name and formula for `count` identical operations."""
    if isinstance(operation, Memory):
        moved = f"{operation.bytes / 1e6:.4g} MB in {operation.kernels} kernel(s)"
        speed = f"{count * operation.bytes / seconds / 1e9:.4g} GB/s"
        return f"kernel: {operation.kind}", f"{count} x {moved}, {speed}"
    if isinstance(operation, Attention):
        b, n, s, d, backward, keys = operation
        factor = 2 * (BACKWARD_OPERATIONS if backward else 1)
        name = "attention"
        pairs = f"{s}^2" if keys is None else f"{2 * causal_pairs(s, keys):g}"
        formula = f"{factor:g} x {b} x {n} heads x {pairs} x {d}"
        flops = attention_operations(operation)
    else:
        m, n, k, batch, _ = operation
        name = f"matrix product [{m}, {k}] x [{k}, {n}]"
        formula = f"2 x {m} x {n} x {k} x {batch}"
        flops = operation.flops
    return (
        name,
        f"{count} x {formula} = {count * flops / 1e9:.4g} GFLOP, "
        f"{count * flops / seconds / 1e12:.4g} TFLOP/s",
    )


def _stages(predicted: Estimate, rank: int) -> Table:
    """Tabulate each pass of each stage of a rank."""
    rows = []
    stages = stages_of(predicted.config)
    for number in stages_of_rank(predicted.config, rank):
        seconds = predicted.stage_seconds[number]
        name = f"stage {number}, {stages[number].layers} layer(s)"
        for title, of, host in zip(
            ("forward", "backward", "weight gradients"),
            (seconds.forward, seconds.backward, seconds.weight),
            seconds.overhead,
            strict=True,
        ):
            if of.total:
                times = (of.compute, of.recompute, of.waited, of.shared, host, of.total + host)
                rows.append((f"{name}, {title}", *map(_time, times)))
    columns = (
        "pass",
        "computations",
        "recomputation",
        "waiting for messages",
        "waiting for ZeRO",
        "host",
        "all",
    )
    return Table(f"one micro-batch on pipeline rank {rank}, the busiest one", columns, rows)


def _step(predicted: Estimate, rank: int) -> Table:
    config = predicted.config
    zero = zero_of(config)
    run = predicted.run
    layout = predicted.placement.layout
    m = config.num_micro_batches()
    batch = config.batch
    samples = (
        f"{batch.global_batch_size} samples / "
        f"({batch.micro_batch_size} x {layout.replicas} replicas)"
    )
    context = f"CP {layout.context} x " * (layout.context > 1)
    rows = [
        (
            "devices",
            f"TP {layout.tensor} x PP {layout.pipeline} x {context}DP {layout.replicas}",
            f"{predicted.devices}",
        ),
        *_experts(predicted),
        *_zero(zero),
        ("micro-batches", samples, f"{m}"),
        ("passes", f"{m} x {_time(run.busy[rank] / m)} on rank {rank}", _time(run.busy[rank])),
        *(
            (name, f"{100 * seconds / predicted.seconds:.1f} % of the step", _time(seconds))
            for name, seconds in predicted.breakdown.items()
            if seconds
        ),
        ("step", "sum of the parts", _time(predicted.seconds)),
    ]
    for name, flops, share in (
        ("MFU", predicted.model_flops, predicted.mfu),
        ("HFU, with recomputation", predicted.hardware_flops, predicted.hfu),
    ):
        each = f"{flops:.5g} FLOPs / ({_time(predicted.seconds)} x {predicted.devices} devices)"
        each += f" = {flops / predicted.seconds / predicted.devices / 1e12:.1f} TFLOP/s"
        rows.append((name, each, "" if share is None else f"{100 * share:.1f} %"))
    return Table("one step", ("part", "formula", "value"), rows)


def _experts(predicted: Estimate) -> list[tuple[str, str, str]]:
    """Return a row with the experts' ranks of a stage; no row for a model without experts."""
    layout = predicted.placement.layout
    if predicted.config.model.num_experts is None:
        return []
    lanes = predicted.channels.lanes
    copies = lanes["expert_data"].ranks
    sizes = f"each over {layout.expert_tensor_size} x EP {layout.expert} x {copies} copies"
    nodes = f"{max(lanes['expert'].nodes, lanes['expert_tensor'].nodes)} nodes"
    return [("experts", sizes, "on a node" if nodes == "1 nodes" else f"over {nodes}")]


def _zero(zero: Zero) -> list[tuple[str, str, str]]:
    """Return a row with ZeRO's stage and sizes; no row for a single data-parallel rank."""
    if zero.gradient_ranks == 1:
        return []
    sizes = f"states over {zero.sizes.states}"
    if zero.stage > 1:
        sizes = (
            f"{'weights and ' * (zero.stage > 2)}gradients over {zero.sizes.inner} ranks, {sizes}"
        )
    return [("ZeRO", sizes if zero.stage else "nothing is sharded", f"stage {zero.stage}")]


def _zero_steps(plan: ZeroPlan) -> Table:
    """Tabulate ZeRO's instructions around the steps of a stage's passes; merge equal rows."""
    steps = (*plan.forward(0), *plan.reducing(0, True, Reductions(plan)))
    rows = list[tuple[str, int, tuple[str, ...]]]()
    begun = set[BucketInstruction]()
    for step in steps:
        before = [one for one in step.before if one not in begun]
        begun = begun.difference(step.before).union(step.beside)
        columns = (_instructions(plan, step, some) for some in (before, step.beside, step.after))
        rows.append((step.kind, step.call, tuple(columns)))
    drawn = list[tuple[str, ...]]()
    for (kind, columns), group in itertools.groupby(rows, lambda row: (row[0], row[2])):
        calls = [call for _, call, _ in group]
        names = dict.fromkeys((_call(plan, calls[0]), _call(plan, calls[-1])))
        drawn.append((f"{kind}, {' to '.join(names)}", *columns))
    return Table(
        "ZeRO in the forward and the last backward pass of the first stage of this rank",
        ("step", "before", "beside", "after"),
        drawn,
    )


def _call(plan: ZeroPlan, call: int) -> str:
    """Return the name of a call in the plan's stage 0."""
    calls = plan.calls[0]
    if calls[call].layer:
        return f"layer {sum(one.layer for one in calls[:call])}"
    return "output layer" if calls[call].outlives else f"embedding {call}"


_AWAY = {-1: "the layer before", 0: "this layer", 1: "the next layer"}


def _instructions(
    plan: ZeroPlan, step: ModulePass, instructions: Iterable[BucketInstruction]
) -> str:
    """Describe the instructions around a step, by the positions of their parameters."""

    def position(bucket: int) -> str:
        ends = [plan.first_uses[member][1] for member in plan.buckets[bucket].members]
        first = min(ends)
        last = max(ends)
        if first == last and plan.calls[0][first].layer and plan.calls[0][step.call].layer:
            return _AWAY.get(first - step.call, _call(plan, first))
        return " to ".join(dict.fromkeys((_call(plan, first), _call(plan, last))))

    counts = Counter(f"{one.op.value} {position(one.bucket)}" for one in instructions)
    return ", ".join(f"{words} ({n} buckets)" if n > 1 else words for words, n in counts.items())


def _zero_messages(
    predicted: Estimate, traced: Trace, stages: Sequence[StageWork], rank: int
) -> Iterator[Table]:
    """Tabulate ZeRO's messages in the passes of one micro-batch."""
    engine = predicted.config.engine
    for name in ("forward", "backward", "weight"):
        overlaps = engine.overlap_param_gather if name == "forward" else engine.overlap_grad_reduce
        hides = overlaps and predicted.cluster.device_type != "cpu"
        beside = "steps of the pass" if hides else ""
        messages = list[GroupMessage]()
        for stage in stages:
            if (plan := plan_in_passes(predicted.config, traced, stage)) is not None:
                messages += messages_in_passes(traced, stage, plan, name)
        if messages:
            title = f"messages of ZeRO in one {name} pass, pipeline rank {rank}"
            yield Table(title, _MESSAGE_COLUMNS, _messages(predicted, messages, beside))


def _end_of_step(predicted: Estimate, rank: int) -> Table:
    """Tabulate the messages that sum gradients and gather new weights."""
    engine = predicted.config.engine
    hides = predicted.cluster.device_type != "cpu"
    traced = trace(predicted.config, predicted.cluster.device_type)
    sums, news = messages_at_end(plan_of_rank(predicted.config, traced, rank).plan)
    rows = _messages(predicted, sums, "last backward pass" * (engine.overlap_grad_reduce and hides))
    rows += _messages(
        predicted, news, "first forward pass" * (engine.overlap_param_gather and hides)
    )
    return Table(f"messages at the end of a step, pipeline rank {rank}", _MESSAGE_COLUMNS, rows)


def _memory(predicted: Estimate) -> Table:
    peak = max(predicted.memory, key=lambda rank: rank.total)
    tensors = {
        name: value for name, value in vars(peak).items() if isinstance(value, float) and value
    }
    tensors["all"] = peak.total
    if on_host := host_bytes(predicted.config, peak.rank, predicted.cluster.device_type):
        tensors["on the host, for each device"] = on_host
    rows = [(name, f"{value / GIB:.2f}") for name, value in tensors.items()]
    return Table(f"memory, rank {peak.rank}", ("tensors", "GiB"), rows)


def _figures(predicted: Estimate) -> Table:
    rows = [
        (used.figure, used.value, used.basis, used.source) for used in predicted.confidence.used
    ]
    return Table(
        "figures of the machine that were used", ("figure", "value", "basis", "source"), rows
    )
