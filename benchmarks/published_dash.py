"""Tables of predictions and the published results of Dash et al. on Frontier (arXiv 2312.12705).

The time model predicts this code on the published layout. No figure of a machine's file is fitted
to these results; the bounds of each value follow from the ranges of its figures (`error_bars.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.config import Config
from megatron.config.command_line import parse_plan
from megatron.model.formulas import paper_flops
from megatron.planner.channels import Channels
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.error_bars import Spread, spread, with_factors
from megatron.planner.placement import Placement, choose_placement
from megatron.planner.published import MODELS, SEQ_LENGTH, VOCABULARY, Published
from megatron.planner.table import Table
from megatron.planner.timing import estimate

Seconds = Callable[[Sequence[str], Cluster], float]
"""Function that returns the seconds of a step, for a command line and a machine."""

PLAIN_ORDER = "--rank-order tp-dp-pp --device-order 0,1,2,3,4,5,6,7"
STRONG_MICRO_BATCHES = (1, 2, 4)


@dataclass(frozen=True)
class Comparison:
    """Published value, and how to predict it.

    result     name of the value
    published  the value, in `unit`
    runs       command lines whose seconds per step are predicted
    value      returns the value for these seconds
    dtype      type of the matrix products
    """

    result: str
    layout: str
    published: float
    unit: str
    runs: tuple[tuple[str, ...], ...]
    value: Callable[[Sequence[float]], float]
    dtype: str = "float16"
    note: str = ""


@dataclass(frozen=True)
class PredictedComparison:
    comparison: Comparison
    spread: Spread

    @property
    def ratio(self) -> float:
        """Predicted over published value."""
        return self.spread.value / self.comparison.published


def estimated_seconds(argv: Sequence[str], cluster: Cluster) -> float:
    """Predict by the time model, on the placement of the flags or of the machine's description."""
    config, placement = _placed(tuple(argv), cluster.name)
    return estimate(config, cluster, placement).seconds


@functools.cache
def _placed(argv: tuple[str, ...], cluster_name: str) -> tuple[Config, Placement]:
    """Return configuration and placement; a machine with varied figures keeps the placement."""
    config = parse_plan(argv)
    return config, choose_placement(config, load_cluster(cluster_name))


def rows(
    comparisons: Sequence[Comparison], cluster: Cluster, seconds: Seconds = estimated_seconds
) -> list[PredictedComparison]:
    """Return each comparison with its prediction on this machine."""

    def value_of(each: Comparison) -> Callable[[Cluster], float]:
        return lambda machine: each.value([seconds(argv, machine) for argv in each.runs])

    return [
        PredictedComparison(each, spread(value_of(each), cluster, each.dtype))
        for each in comparisons
    ]


def argv_of(
    model: Published, gcds: int, sequences: int, micro_batch: int = 1, *, placed: bool = False
) -> tuple[str, ...]:
    """Return flags of a layout of Dash et al.: fp16, vocabulary of 51,200, plain order of ranks.

    placed   whether to choose the placement by the machine's links instead
    """
    return tuple(
        f"--preset gpt-{model.name} --fp16 --make-vocab-size-divisible-by "
        f"{1024 // model.tensor_size} {'' if placed else PLAIN_ORDER} --micro-batch-size "
        f"{micro_batch} --global-batch-size {sequences} --world-size {gcds}".split()
    )


# -- Frontier --------------------------------------------------------------------------------------


def frontier_comparisons() -> list[Comparison]:
    """Return throughput, weak and strong scaling of all models, in this order."""
    return [
        *(_throughput(model) for model in MODELS),
        *(_weak(model, *model.weak) for model in MODELS if model.weak),
        *(each for model in MODELS if model.strong for each in _strong(model, *model.strong)),
    ]


def _layout(model: Published, gcds: int, micro_batch: int, sequences: int) -> str:
    return (
        f"TP {model.tensor_size} x PP {model.pipeline_size}, {gcds} GCDs, micro-batch "
        f"{micro_batch}, {sequences:,} sequences"
    )


def _throughput(model: Published) -> Comparison:
    """Return the case of one replica, the only plausible reading (docs/measured/published.md)."""
    gcds = model.replica_gcds
    sequences = model.per_replica
    flops = paper_flops(sequences, SEQ_LENGTH, model.num_layers, model.hidden_size, VOCABULARY)
    return Comparison(
        f"{model.name.upper()}: throughput",
        _layout(model, gcds, 1, sequences),
        model.tflops,
        "TFLOP/s per GCD",
        (argv_of(model, gcds, sequences),),
        lambda times: flops / (gcds * times[0] * 1e12),
    )


def _weak(model: Published, gcds: int, efficiency: float) -> Comparison:
    sequences = model.per_replica * gcds // model.replica_gcds
    return Comparison(
        f"{model.name.upper()}: weak scaling",
        _layout(model, gcds, 1, sequences),
        100 * efficiency,
        "%",
        (argv_of(model, model.replica_gcds, model.per_replica), argv_of(model, gcds, sequences)),
        lambda times: 100 * times[0] / times[1],
        note="of one replica's throughput",
    )


def _strong(model: Published, gcds: int, efficiency: float) -> Iterator[Comparison]:
    total = model.total or 0
    replicas = gcds // model.replica_gcds
    for micro_batch in STRONG_MICRO_BATCHES:
        yield Comparison(
            f"{model.name.upper()}: strong scaling",
            _layout(model, gcds, micro_batch, total),
            100 * efficiency,
            "%",
            (
                argv_of(model, model.replica_gcds, total, micro_batch),
                argv_of(model, gcds, total, micro_batch),
            ),
            lambda times: 100 * times[0] / (replicas * times[1]),
            note="of one replica's throughput",
        )


# -- what follows from the published results by arithmetic alone, without assumed figures ----------
#
# p is the pipeline size, R the number of replicas, T that of the sequences of a step, b the
# micro-batch size, and m = T / (R b) the number of micro-batches. A pipeline of equal stages needs
# m + p - 1 turns for m micro-batches (Narayanan et al., arXiv 2104.04473, section 2.2).


def efficiency_by_bubble(
    pipeline_size: int,
    sequences: int,
    replicas: int,
    micro_batch_size: float,
    base_replicas: int = 1,
) -> float:
    """Return the strong-scaling efficiency by the bubble alone: (1 + (p-1)/m0) / (1 + (p-1)/m).

    m0 is the number of micro-batches of a replica if `base_replicas` share the sequences.

    >>> round(efficiency_by_bubble(16, 8000, 16, 4), 4)
    0.8996
    """

    def turns(of: int) -> float:
        return 1 + (pipeline_size - 1) * of * micro_batch_size / sequences

    return turns(base_replicas) / turns(replicas)


def micro_batch_by_bubble(
    pipeline_size: int, sequences: int, replicas: int, efficiency: float
) -> float:
    """Return the micro-batch size of this efficiency by the bubble: b = (1-E) T / ((p-1) (E R - 1)).

    >>> round(micro_batch_by_bubble(16, 8000, 16, 0.8993), 2)
    4.01
    """
    return (1 - efficiency) * sequences / ((pipeline_size - 1) * (efficiency * replicas - 1))


@dataclass(frozen=True)
class Implied:
    """Implications of published TFLOP/s for a GCD in one turn: forward, recomputation, backward.

    step_s         seconds of a step
    turn_s         seconds of a turn, step_s / (m + p - 1)
    last, other    FLOPs per turn of a GCD in the last stage, which has the output layer, and in
                   another stage
    reduces_s      seconds of tensor-parallel all-reduces per turn, without overlap
    last_sends_s, other_sends_s
                   seconds of messages to and from neighbouring stages per turn, without overlap
    """

    name: str
    gcds: int
    micro_batches: int
    step_s: float
    turn_s: float
    last: float
    other: float
    reduces_s: float
    last_sends_s: float = 0.0
    other_sends_s: float = 0.0

    @property
    def overlapped_tflops(self) -> float:
        """TFLOP/s of the rest of a turn, if messages between stages are hidden."""
        return self.last / (self.turn_s - self.reduces_s) / 1e12

    @property
    def blocking_tflops(self) -> float:
        """TFLOP/s if they are not hidden, of the stage that needs the higher rate."""
        rest = self.turn_s - self.reduces_s
        return (
            max(self.last / (rest - self.last_sends_s), self.other / (rest - self.other_sends_s))
            / 1e12
        )


def implied(
    model: Published,
    collective_gb_per_s: Mapping[tuple[int, int], float],
    replicas: int = 1,
    last_sends_s: float = 0.0,
    other_sends_s: float = 0.0,
) -> Implied:
    """Derive Implied from the TFLOP/s of `model`, for this many replicas and micro-batch 1."""
    h = model.hidden_size
    s = SEQ_LENGTH
    tp = model.tensor_size
    p = model.pipeline_size
    gcds = replicas * model.replica_gcds
    m = model.per_replica // replicas
    total = paper_flops(1, s, model.num_layers, h, VOCABULARY)
    step = total * model.per_replica / (gcds * model.tflops * 1e12)
    head = 6.0 * s * h * VOCABULARY
    other = (total - head) / model.replica_gcds
    # Forward, recomputation and backward of a layer have two all-reduces of [s, h] each; in a ring
    # of n ranks, each one sends 2 (n-1)/n of the tensor.
    per_rank = 6 * model.num_layers // p * 2 * (tp - 1) / tp * s * h * 2  # fp16
    reduces = per_rank / (collective_gb_per_s[1, tp] * 1e9) if tp > 1 else 0.0
    return Implied(
        model.name,
        gcds,
        m,
        step,
        step / (m + p - 1),
        other + head / tp,
        other,
        reduces,
        last_sends_s,
        other_sends_s,
    )


# -- tables ----------------------------------------------------------------------------------------


def comparison_table(title: str, compared: Sequence[PredictedComparison]) -> Table:
    columns = (
        "result",
        "layout",
        "published",
        "predicted",
        "bounds",
        "+-",
        "predicted / published",
    )
    return Table(
        title,
        columns,
        [
            (
                row.comparison.result,
                row.comparison.layout,
                _text(row.comparison.published, row.comparison.unit),
                _text(row.spread.value, row.comparison.unit),
                f"{_number(row.spread.low, row.comparison.unit)} to "
                f"{_number(row.spread.high, row.comparison.unit)}",
                _number(row.spread.likely, row.comparison.unit),
                f"{row.ratio:.2f}",
            )
            for row in compared
        ],
    )


def effect_table(row: PredictedComparison, at_most: int = 8) -> Table:
    """Tabulate the effects of figures on a prediction, the strongest first."""
    unit = row.comparison.unit
    title = f"what moves '{row.comparison.result}' ({_text(row.spread.value, unit)})"
    return Table(
        title,
        ("figure", "basis", "factors", f"{unit} at them"),
        [
            (
                effect.figure,
                effect.basis,
                f"{effect.factors[0]:g}, {effect.factors[1]:g}",
                f"{_number(effect.slow, unit)}, {_number(effect.fast, unit)}",
            )
            for effect in row.spread.effects[:at_most]
        ],
    )


def micro_batch_table() -> Table:
    """Tabulate strong scaling by the bubble alone, and the micro-batch size that explains it."""
    columns = (
        "model",
        "replicas",
        "published",
        *(f"micro-batch {b}" for b in (1, 2, 4, 8)),
        "micro-batch that explains it",
    )
    lines = []
    for model in MODELS:
        if model.strong is None or model.total is None:
            continue
        gcds, efficiency = model.strong
        p = model.pipeline_size
        replicas = gcds // model.replica_gcds
        by_bubble = (efficiency_by_bubble(p, model.total, replicas, b) for b in (1, 2, 4, 8))
        implied_micro_batch = micro_batch_by_bubble(p, model.total, replicas, efficiency)
        lines.append(
            (
                model.name.upper(),
                str(replicas),
                f"{100 * efficiency:.2f} %",
                *(f"{100 * e:.2f} %" for e in by_bubble),
                f"{implied_micro_batch:.2f}",
            )
        )
    return Table("strong scaling by the bubble alone", columns, lines)


def implied_table(cluster: Cluster) -> Table:
    """Tabulate the device rates that the published TFLOP/s require, with and without overlap."""
    columns = (
        "model",
        "GCDs",
        "micro-batches",
        "step, s",
        "slot, ms",
        "TFLOP of the last stage",
        "all-reduces, ms",
        "messages, ms",
        "TFLOP/s per GCD, messages hidden",
        "TFLOP/s per GCD, messages not hidden",
    )
    lines = []
    for model in MODELS:
        readings = [1, *([model.weak[0] // model.replica_gcds] if model.weak else [])]
        for replicas in (r for r in readings if model.per_replica % r == 0):
            each = implied(
                model, cluster.collective_gb_per_s, replicas, *_stage_messages(model, cluster)
            )
            lines.append(
                (
                    model.name.upper(),
                    str(each.gcds),
                    str(each.micro_batches),
                    f"{each.step_s:.1f}",
                    f"{1e3 * each.turn_s:.0f}",
                    f"{each.last / 1e12:.1f}",
                    f"{1e3 * each.reduces_s:.0f}",
                    f"{1e3 * each.last_sends_s:.0f} to {1e3 * each.other_sends_s:.0f}",
                    f"{each.overlapped_tflops:.1f}",
                    f"{each.blocking_tflops:.1f}",
                )
            )
    return Table("what the published throughput asks of a device", columns, lines)


def _stage_messages(model: Published, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of the last stage's two messages, and of the slowest stage's four."""
    config, placement = _placed(argv_of(model, model.replica_gcds, model.per_replica), cluster.name)
    channels = Channels(config, cluster, placement)
    size = SEQ_LENGTH * model.hidden_size * 2
    edges = [
        2 * channels.boundary(rank, rank + 1, size)[0] for rank in range(model.pipeline_size - 1)
    ]
    return edges[-1], max(before + after for before, after in itertools.pairwise(edges))


# Differences of this code from the one that ran, as flags that undo them; each is added to the
# published layout.
_CHANGES: tuple[tuple[str, str], ...] = (
    (
        "unfused kernels: norms, GELU, dropout, cross entropy",
        "--no-persist-layer-norm --no-bias-gelu-fusion --no-bias-dropout-fusion "
        "--no-cross-entropy-loss-fusion",
    ),
    ("weight gradients accumulated by a separate kernel", "--no-gradient-accumulation-fusion"),
    ("all-reduces not overlapped", "--no-async-tensor-model-parallel-allreduce"),
    ("attention that stores its scores", "--attention-backend unfused"),
)


def change_table(cluster: Cluster, seconds: Seconds = estimated_seconds) -> Table:
    """Tabulate the effects of the published runs' choices on a step of this code, on one replica."""
    plain = [argv_of(model, model.replica_gcds, model.per_replica) for model in MODELS]
    placed = [
        argv_of(model, model.replica_gcds, model.per_replica, placed=True) for model in MODELS
    ]
    steps = [seconds(argv, cluster) for argv in plain]

    def row(
        title: str, flags: str = "", runs: Sequence[Sequence[str]] = plain, on: Cluster = cluster
    ) -> tuple[str, ...]:
        changed = (
            seconds((*argv, *flags.split()), on) / step
            for argv, step in zip(runs, steps, strict=True)
        )
        return (title, *(f"{100 * (each - 1):+.1f} %".replace("-0.0", "+0.0") for each in changed))

    lines = [
        ("predicted step of the published layout, s", *(f"{step:.1f}" for step in steps)),
        *(row(*change) for change in _CHANGES),
        row("the first three together", " ".join(flags for _, flags in _CHANGES[:3])),
        row(
            "products at 0.9 of their published rate",
            on=with_factors(cluster, {"products.float16": 0.9}),
        ),
        row("ranks placed by link bandwidth", runs=placed),
        row("no layer recomputed", "--recompute-granularity none"),
    ]
    return Table("choices that differ", ("", *(model.name.upper() for model in MODELS)), lines)


def finding_table(cluster: Cluster, seconds: Seconds = estimated_seconds) -> Table:
    """Tabulate findings of Dash et al. without numbers, each with a sweep by the time model.

    Values are TFLOP/s per GCD by their formula, on one replica with micro-batch 1; memory is not
    checked.
    """

    def rate(model: str, tp: int, pp: int, sequences: int, more: str = "") -> float:
        argv = (
            f"--preset gpt-{model} --fp16 --make-vocab-size-divisible-by {1024 // tp} "
            f"{PLAIN_ORDER} --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
            f"--micro-batch-size 1 --global-batch-size {sequences} --world-size {tp * pp} {more}"
        ).split()
        config = parse_plan(argv).model
        flops = paper_flops(
            sequences, SEQ_LENGTH, config.num_layers, config.hidden_size, VOCABULARY
        )
        return flops / (tp * pp * seconds(argv, cluster) * 1e12)

    def sweep(values: Iterable[tuple[str, float]]) -> str:
        return ", ".join(f"{name}: {value:.1f}" for name, value in values)

    stages = (8, 16, 32, 48)
    return Table(
        "findings without numbers",
        ("published", "varied", "predicted TFLOP/s per GCD"),
        [
            (
                "tensor parallelism belongs inside a node",
                "175B, PP 16, 640 sequences, TP",
                sweep((str(tp), rate("175b", tp, 16, 640)) for tp in (2, 4, 8, 16, 32)),
            ),
            (
                "more micro-batches raise throughput",
                "175B, TP 4 x PP 16, micro-batches",
                sweep((str(m), rate("175b", 4, 16, m)) for m in (40, 80, 160, 320, 640)),
            ),
            (
                "with a fixed batch, throughput falls with the number of stages",
                "175B, TP 4, 128 sequences, PP",
                sweep((str(pp), rate("175b", 4, pp, 128)) for pp in stages),
            ),
            (
                "with a batch that grows with the stages, it stays flat",
                "175B, TP 4, 8 sequences for each stage, PP",
                sweep((str(pp), rate("175b", 4, pp, 8 * pp)) for pp in stages),
            ),
            (
                "FlashAttention 2 gives up to about 30 %",
                "1.4B, 640 sequences on a GCD, and 22B, PP 8: with, without",
                sweep(
                    (f"{name}{' without' if more else ''}", rate(name.lower(), 1, pp, 640, more))
                    for name, pp in (("1.4B", 1), ("22B", 8))
                    for more in ("", "--attention-backend unfused")
                ),
            ),
        ],
    )


def _text(value: float, unit: str) -> str:
    return f"{_number(value, unit)} {unit}"


def _number(value: float, unit: str) -> str:
    return f"{value:.2f}" if unit == "s" else f"{value:.1f}"
