"""Predictions beside published results, one row for each: Frontier (Dash et al.), DGX H100 and MI250X (others' codes).

The time model predicts this code on the published layout. No figure of a machine's file is chosen by these results;
each value has the bounds that follow from the ranges of the figures it rests on (`error_bars.py`).
"""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.command_line import parse_plan
from megatron.model.formulas import paper_flops
from megatron.planning.error_bars import Spread, spread, with_factors
from megatron.planning.published import SEQ_LENGTH, VOCABULARY, Published, published_models
from megatron.planning.published_arithmetic import efficiency_by_bubble, implied, micro_batch_by_bubble
from megatron.planning.published_runs import MI250X_RUNS, RUNS, Run
from megatron.planning.table import Table

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.planning.cluster import Cluster
    from megatron.planning.placement import Placement

Seconds = Callable[[Sequence[str], "Cluster"], float]
"""Seconds of a step of a command line on a machine."""

STRONG_MICRO_BATCHES = (1, 2, 4)


@dataclass(frozen=True)
class Comparison:
    """A published value; the command lines whose steps are predicted for it, and how it follows from their seconds."""

    result: str
    layout: str
    published: float
    unit: str
    runs: tuple[tuple[str, ...], ...]
    value: Callable[[Sequence[float]], float]
    dtype: str = "float16"
    note: str = ""


@dataclass(frozen=True)
class Row:
    comparison: Comparison
    spread: Spread

    @property
    def ratio(self) -> float:
        """Predicted to published."""
        return self.spread.value / self.comparison.published


def estimated_seconds(argv: Sequence[str], cluster: Cluster) -> float:
    """By the time model, on the placement that the flags give or that is chosen for the machine as described."""
    from megatron.planning.timing.estimate import estimate

    config, placement = _placed(tuple(argv), cluster.name)
    return estimate(config, cluster, placement).seconds


@functools.cache
def _placed(argv: tuple[str, ...], cluster_name: str) -> tuple[Config, Placement]:
    """Varied machines keep the placement of the one whose name they have."""
    from megatron.planning.cluster import load_cluster
    from megatron.planning.placement import choose_placement

    config = parse_plan(argv)
    return config, choose_placement(config, load_cluster(cluster_name))


def rows(comparisons: Sequence[Comparison], cluster: Cluster, seconds: Seconds = estimated_seconds) -> list[Row]:
    """Each comparison with its prediction on this machine."""

    def value_of(each: Comparison) -> Callable[[Cluster], float]:
        return lambda machine: each.value([seconds(argv, machine) for argv in each.runs])

    return [Row(each, spread(value_of(each), cluster, each.dtype)) for each in comparisons]


# -- Frontier ----------------------------------------------------------------------------------------------------------


def frontier_comparisons() -> list[Comparison]:
    """Throughput, weak and strong scaling of all models, in this order."""
    models = published_models()
    return [
        *(_throughput(model) for model in models),
        *(_weak(model, *model.weak) for model in models if model.weak),
        *(each for model in models if model.strong for each in _strong(model, *model.strong)),
    ]


def _layout(model: Published, gcds: int, micro_batch: int, sequences: int) -> str:
    return (
        f"TP {model.tensor_size} x PP {model.pipeline_size}, {gcds} GCDs, micro-batch {micro_batch}, "
        f"{sequences:,} sequences"
    )


def _argv(model: Published, gcds: int, sequences: int, micro_batch: int = 1) -> tuple[str, ...]:
    return tuple(model.flags(gcds, sequences, micro_batch).split())


def _throughput(model: Published) -> Comparison:
    """Of one replica: the only reading whose rate of products is possible (docs/planning.md)."""
    gcds, sequences = model.replica_gcds, model.per_replica
    flops = paper_flops(sequences, SEQ_LENGTH, model.num_layers, model.hidden_size, VOCABULARY)
    return Comparison(
        f"{model.name.upper()}: throughput", _layout(model, gcds, 1, sequences), model.tflops, "TFLOP/s per GCD",
        (_argv(model, gcds, sequences),), lambda times: flops / (gcds * times[0] * 1e12),
    )


def _weak(model: Published, gcds: int, efficiency: float) -> Comparison:
    sequences = model.per_replica * gcds // model.replica_gcds
    return Comparison(
        f"{model.name.upper()}: weak scaling", _layout(model, gcds, 1, sequences), 100 * efficiency, "%",
        (_argv(model, model.replica_gcds, model.per_replica), _argv(model, gcds, sequences)),
        lambda times: 100 * times[0] / times[1], note="of one replica's throughput",
    )


def _strong(model: Published, gcds: int, efficiency: float) -> Iterator[Comparison]:
    total = model.total or 0
    replicas = gcds // model.replica_gcds
    for micro_batch in STRONG_MICRO_BATCHES:
        yield Comparison(
            f"{model.name.upper()}: strong scaling", _layout(model, gcds, micro_batch, total), 100 * efficiency, "%",
            (_argv(model, model.replica_gcds, total, micro_batch), _argv(model, gcds, total, micro_batch)),
            lambda times: 100 * times[0] / (replicas * times[1]), note="of one replica's throughput",
        )


# -- others' codes -----------------------------------------------------------------------------------------------------


def h100_comparisons() -> list[Comparison]:
    """Steps of published runs on DGX H100 nodes."""
    return [
        Comparison(run.name, _sizes(run, "GPUs"), run.seconds, "s", (tuple(run.argv()),), lambda times: times[0],
                   "bfloat16", run.unlike)
        for run in RUNS
    ]  # fmt: skip


def mi250x_comparisons() -> list[Comparison]:
    """Throughput of published runs on MI250X nodes."""
    return [_throughput_of(run) for run in MI250X_RUNS]


def _throughput_of(run: Run) -> Comparison:
    config = parse_plan(run.argv())
    tokens = config.batch.global_batch_size * config.model.seq_length / run.devices
    return Comparison(
        run.name, _sizes(run, "GCDs"), tokens / run.seconds, "tokens/s per GCD", (tuple(run.argv()),),
        lambda times: tokens / times[0], config.precision.dtype_name, run.unlike,
    )


def _sizes(run: Run, devices: str) -> str:
    parallel = parse_plan(run.argv()).parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    return f"TP {tensor} x PP {pipeline}, {run.devices:,} {devices}"


# -- tables ------------------------------------------------------------------------------------------------------------


def comparison_table(title: str, found: Sequence[Row]) -> Table:
    columns = ("result", "layout", "published", "predicted", "bounds", "+-", "predicted / published")
    return Table(title, columns, [
        (
            row.comparison.result, row.comparison.layout, _text(row.comparison.published, row.comparison.unit),
            _text(row.spread.value, row.comparison.unit),
            f"{_number(row.spread.low, row.comparison.unit)} to {_number(row.spread.high, row.comparison.unit)}",
            _number(row.spread.likely, row.comparison.unit), f"{row.ratio:.2f}",
        )
        for row in found
    ])


def effect_table(row: Row, at_most: int = 8) -> Table:
    """What moves one prediction, the strongest figure first."""
    unit = row.comparison.unit
    title = f"what moves '{row.comparison.result}' ({_text(row.spread.value, unit)})"
    return Table(title, ("figure", "basis", "factors", f"{unit} at them"), [
        (
            effect.figure, effect.basis, f"{effect.factors[0]:g}, {effect.factors[1]:g}",
            f"{_number(effect.slow, unit)}, {_number(effect.fast, unit)}",
        )
        for effect in row.spread.effects[:at_most]
    ])


def micro_batch_table() -> Table:
    """Strong scaling if nothing but the bubble grew, and the micro-batch that it would take."""
    columns = ("model", "replicas", "published", *(f"micro-batch {b}" for b in (1, 2, 4, 8)), "published if")
    found = []
    for model in published_models():
        if model.strong is None or model.total is None:
            continue
        gcds, efficiency = model.strong
        p, replicas = model.pipeline_size, gcds // model.replica_gcds
        by_bubble = (efficiency_by_bubble(p, model.total, replicas, b) for b in (1, 2, 4, 8))
        wanted = micro_batch_by_bubble(p, model.total, replicas, efficiency)
        found.append((
            model.name.upper(), str(replicas), f"{100 * efficiency:.2f} %", *(f"{100 * e:.2f} %" for e in by_bubble),
            f"{wanted:.2f}",
        ))
    return Table("strong scaling by the bubble alone", columns, found)


def implied_table(cluster: Cluster) -> Table:
    """What the published TFLOP/s ask of a device, with messages between stages hidden and not."""
    columns = (
        "model", "GCDs", "micro-batches", "step, s", "turn, ms", "TFLOP of the last stage", "all-reduces, ms",
        "messages, ms", "TFLOP/s per GCD, messages hidden", "TFLOP/s per GCD, messages not hidden",
    )  # fmt: skip
    found = []
    for model in published_models():
        readings = [1, *([model.weak[0] // model.replica_gcds] if model.weak else [])]
        for replicas in (r for r in readings if model.per_replica % r == 0):
            each = implied(model, cluster.collective_gb_per_s, replicas, *_stage_messages(model, cluster))
            found.append((
                model.name.upper(), str(each.gcds), str(each.micro_batches), f"{each.step_s:.1f}",
                f"{1e3 * each.turn_s:.0f}", f"{each.last / 1e12:.1f}", f"{1e3 * each.reduces_s:.0f}",
                f"{1e3 * each.last_sends_s:.0f} to {1e3 * each.other_sends_s:.0f}", f"{each.overlapped_tflops:.1f}",
                f"{each.blocking_tflops:.1f}",
            ))
    return Table("what the published throughput asks of a device", columns, found)


def _stage_messages(model: Published, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the two messages of the last stage, and of the four of the stage that has most, in their layout."""
    from megatron.planning.channels import Channels

    config, placement = _placed(_argv(model, model.replica_gcds, model.per_replica), cluster.name)
    channels, size = Channels(config, cluster, placement), SEQ_LENGTH * model.hidden_size * 2
    edges = [
        sum(channels.boundary(rank + backward, not backward, size)[0] for backward in (0, 1))
        for rank in range(model.pipeline_size - 1)
    ]
    return edges[-1], max(before + after for before, after in itertools.pairwise(edges))


# What this code does otherwise than those that ran, as flags that undo it; each beside the published layout.
_CHANGES: tuple[tuple[str, str], ...] = (
    ("kernels apart: norms, GELU, dropout, cross entropy", "--no-persist-layer-norm --no-bias-gelu-fusion "
     "--no-bias-dropout-fusion --no-cross-entropy-loss-fusion"),
    ("weight gradients not added by their product", "--no-gradient-accumulation-fusion"),
    ("all-reduces hidden by nothing", "--no-async-tensor-model-parallel-allreduce"),
    ("attention that stores its scores", "--attention-backend unfused"),
)


def change_table(cluster: Cluster, seconds: Seconds = estimated_seconds) -> Table:
    """By how much choices of the published runs make a step of this code longer or shorter, on one replica."""
    models = published_models()
    plain = [_argv(model, model.replica_gcds, model.per_replica) for model in models]
    placed = [model.flags(model.replica_gcds, model.per_replica, placed=True).split() for model in models]
    steps = [seconds(argv, cluster) for argv in plain]

    def row(
        title: str, flags: str = "", runs: Sequence[Sequence[str]] = plain, on: Cluster = cluster
    ) -> tuple[str, ...]:
        changed = (seconds((*argv, *flags.split()), on) / step for argv, step in zip(runs, steps, strict=True))
        return (title, *(f"{100 * (each - 1):+.1f} %".replace("-0.0", "+0.0") for each in changed))

    found = [
        ("a step as published, s", *(f"{step:.1f}" for step in steps)),
        *(row(*change) for change in _CHANGES),
        row("the first three together", " ".join(flags for _, flags in _CHANGES[:3])),
        row("products at 0.9 of their published rate", on=with_factors(cluster, {"products.float16": 0.9})),
        row("ranks placed by the links", runs=placed),
        row("no layer recomputed", "--recompute-granularity none"),
    ]
    return Table("choices that differ", ("", *(model.name.upper() for model in models)), found)


def _text(value: float, unit: str) -> str:
    return f"{_number(value, unit)} {unit}"


def _number(value: float, unit: str) -> str:
    return f"{value:.2f}" if unit == "s" else f"{value:.1f}"
