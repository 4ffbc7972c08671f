"""Tables of predictions and published speeds of other codes (published_runs.py), and of errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from benchmarks.published_runs import RUNS, PublishedRun
from megatron.config import Config, ParallelConfig
from megatron.config.command_line import parse_plan
from megatron.pipeline.schedule import moments_of_rank
from megatron.planner.cluster import GIB, Cluster
from megatron.planner.compute import is_rate
from megatron.planner.evidence import CURRENT, Errors, kind_of_layout
from megatron.planner.memory import memory_of_ranks
from megatron.planner.placement import with_dispatch
from megatron.planner.stage import stages_on
from megatron.planner.table import Table
from megatron.planner.timing import dispatch_choice, estimate


@dataclass(frozen=True)
class PredictedRun:
    """Published run with the predicted seconds of its step."""

    run: PublishedRun
    seconds: float

    @property
    def ratio(self) -> float:
        """Predicted over published seconds."""
        return self.seconds / self.run.seconds


def predicted_runs(runs: Sequence[PublishedRun], of_peaks: bool = False) -> list[PredictedRun]:
    """Predict these of RUNS in as many processes as there are cores.

    of_peaks  whether the speed of devices is not known but for their peaks
    """
    numbers = {run.name: number for number, run in enumerate(RUNS)}
    with ProcessPoolExecutor() as pool:
        chosen = (numbers[run.name] for run in runs)
        seconds = pool.map(_seconds, chosen, itertools.repeat(of_peaks), chunksize=8)
        return [PredictedRun(run, of_run) for run, of_run in zip(runs, seconds, strict=True)]


def _seconds(number: int, of_peaks: bool) -> float:
    run = RUNS[number]
    cluster = _of_peaks(run.cluster) if of_peaks else run.cluster
    return estimate(run.config, cluster).seconds


def layout_words(config: Config) -> str:
    """Describe a layout in a few words, such as "TP 8 x PP 4, ZeRO 1, mbs 1"."""
    parallel = config.parallel
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "CP": parallel.context_parallel_size,
    }
    recompute = config.recompute.recompute_granularity
    words = (
        " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1),
        f"ZeRO {config.engine.zero_stage}",
        f"{recompute} recompute" if recompute else "",
        f"mbs {config.batch.micro_batch_size}",
        _experts(parallel).removeprefix(", "),
    )
    return ", ".join(filter(None, words))


def run_table(title: str, runs: Sequence[PredictedRun]) -> Table:
    """Tabulate published and predicted seconds, sorted by kind of layout."""
    lines = sorted(
        (
            kind_of_layout(one.run.config),
            one.run.name,
            layout_words(one.run.config),
            f"{one.run.seconds:.4g} s",
            f"{one.seconds:.4g} s",
            f"{one.ratio:.2f}{' (irregular)' if one.run.irregular else ''}",
        )
        for one in runs
    )
    heads = ("kind", "run", "layout", "published", "predicted", "ratio")
    regular = [one.ratio for one in runs if not one.run.irregular]
    if regular:
        errors = Errors.of(regular)
        words = f"median error {errors.median:.1%}, worst {errors.worst:.1%}"
        lines.append(("all", words, f"{errors.runs} regular runs", "", "", ""))
    return Table(title, heads, lines)


def summary_table(title: str, runs: Sequence[PredictedRun], by: str) -> Table:
    """Summarize the errors of predictions by "machine", "kind" of layout, or "scope"."""
    group_of: dict[str, Callable[[PublishedRun], str]] = {
        "machine": lambda run: run.machine,
        "kind": lambda run: kind_of_layout(run.config),
        "scope": lambda run: run.outside or "within the scope",
    }
    groups: dict[str, list[float]] = {}
    for one in runs:
        groups.setdefault(group_of[by](one.run), []).append(one.ratio)
    lines = [(group, *Errors.of(ratios).cells) for group, ratios in sorted(groups.items())]
    every = ("all", *Errors.of(one.ratio for one in runs).cells)
    heads = (by, "runs", "median error", "nine of ten within", "worst")
    return Table(title, heads, [*lines, every])


def ratios_by_kind(runs: Iterable[PredictedRun]) -> dict[tuple[str, str], list[float]]:
    """Return predicted over published seconds by machine and kind of layout.

    Irregular runs and those with software before 2024 are left out.
    """
    ratios: dict[tuple[str, str], list[float]] = {}
    for one in runs:
        if not one.run.irregular and one.run.date >= CURRENT:
            key = one.run.machine, kind_of_layout(one.run.config)
            ratios.setdefault(key, []).append(one.ratio)
    return ratios


class Orders(NamedTuple):
    """Pairs of layouts of one source on the same devices: number, and those in the wrong order."""

    pairs: int
    wrong: tuple[tuple[str, str, float, float], ...]


def orders(runs: Iterable[PredictedRun], spread: float) -> Orders:
    """Compare the order of speeds within each source, model, machine and number of devices.

    Only pairs are counted whose published speeds per token differ by more than `spread`, a share;
    a pair is wrong if the predicted speeds differ by more than this the other way.
    """
    wrong = []
    pairs = 0
    for group in _by_model(runs):
        for a, b in itertools.combinations(group, 2):
            published = _device_seconds(a, a.run.seconds) / _device_seconds(b, b.run.seconds)
            predicted = _device_seconds(a, a.seconds) / _device_seconds(b, b.seconds)
            least = max(spread, a.run.spread or 0.0, b.run.spread or 0.0)
            if abs(math.log(published)) <= math.log1p(least):
                continue
            pairs += 1
            if math.log(published) * math.log(predicted) < 0 and abs(
                math.log(predicted)
            ) > math.log1p(least):
                wrong.append((a.run.name, b.run.name, published, predicted))
    return Orders(pairs, tuple(wrong))


def _by_model(runs: Iterable[PredictedRun]) -> list[list[PredictedRun]]:
    """Group runs by source, machine and model, in the order in which they first appear."""
    groups: dict[tuple[object, ...], list[PredictedRun]] = {}
    for one in runs:
        model = one.run.config.model
        sizes = model.num_layers, model.hidden_size, model.seq_length
        groups.setdefault((one.run.origin, one.run.machine, *sizes), []).append(one)
    return list(groups.values())


def gain_table(runs: Sequence[PredictedRun]) -> Table:
    """Summarize the errors of predictions from more and more knowledge of a machine.

    The first row has only a device's peaks and the links of a node (`assumed.toml` for the rest).
    The last one corrects the predictions for a source's runs of a model on a machine by the factor
    between the published and the predicted seconds of the one on the fewest devices, which is left
    out.
    """
    of_peaks = predicted_runs([one.run for one in runs], of_peaks=True)
    ordered = sorted(runs, key=lambda one: (one.run.devices, one.run.name))
    series = [(first, others) for first, *others in _by_model(ordered)]
    rest = [one for _, others in series for one in others]
    corrected = [
        PredictedRun(one.run, one.seconds / first.ratio)
        for first, others in series
        for one in others
    ]
    rows = (
        ("peaks and links of a data sheet", of_peaks),
        ("the machine's file", runs),
        ("the same, without the first run of a model", rest),
        ("corrected by the first run of the model", corrected),
    )
    heads = ("predicted from", "runs", "median error", "nine of ten within", "worst")
    lines = [(name, *Errors.of(one.ratio for one in each).cells) for name, each in rows if each]
    return Table("what measurements of one node add", heads, lines)


def _of_peaks(cluster: Cluster) -> Cluster:
    """Return the machine without figures of its devices' speed."""
    figures = {
        name: figure
        for name, figure in cluster.compute.items()
        if not is_rate(name) and name != "kernel_s"
    }
    return replace(cluster, compute=figures)


def memory_table(runs: Iterable[PublishedRun]) -> Table:
    """Tabulate the published peak memory of a device and that of the busiest predicted rank.

    runs  runs whose memory is published
    """
    lines = []
    for run in runs:
        assert run.memory_gib is not None
        ranks = memory_of_ranks(run.config)
        more = _stored_by_other_code(run)
        predicted = max(rank.total for rank in ranks) / GIB
        comparable = max(rank.total + extra for rank, extra in zip(ranks, more, strict=True)) / GIB
        lines.append(
            (
                run.memory_kind or "not stated",
                run.name,
                f"{run.memory_gib:.1f}",
                f"{predicted:.1f}",
                f"{comparable:.1f}",
                f"{comparable / run.memory_gib:.2f}",
            )
        )
    heads = (
        "kind",
        "run",
        "published, GiB",
        "predicted, GiB",
        "with the other code's tensors",
        "ratio",
    )
    return Table("peak memory of a device", heads, sorted(lines))


def _stored_by_other_code(run: PublishedRun) -> list[float]:
    """Return the bytes of a rank, for each pipeline rank, that only the other code stores.

    Megatron-LM's unfused attention stores the probabilities before and after dropout, 2 bytes each
    for each pair of tokens, and the dropout mask (Korthikanti et al., arXiv 2205.05198, section 4.1).
    This code does not store the probabilities after dropout.
    """
    config = run.config
    model = config.model
    parallel = config.parallel
    size = parallel.pipeline_model_parallel_size
    if run.attention != "unfused" or not model.attention_dropout:
        return [0.0] * size
    heads = model.num_attention_heads / parallel.tensor_model_parallel_size
    of_layer = 2.0 * heads * model.seq_length**2 * config.batch.micro_batch_size
    result = []
    for rank in range(size):
        stages = stages_on(config, rank)
        layers = np.array([stage.layers - sum(stage.recomputed) for stage in stages])
        moments = moments_of_rank(
            config.schedule, size, parallel.num_chunks, config.num_micro_batches(), rank
        )
        live = moments.in_flight @ layers + layers[moments.chunk]
        result.append(of_layer * float(live.max()))
    return result


def order_table(title: str, runs: Sequence[PredictedRun], spread: float) -> Table:
    """Tabulate by source how many pairs of its runs are predicted in the right order."""
    lines = []
    for source in sorted({one.run.origin for one in runs}):
        compared = orders([one for one in runs if one.run.origin == source], spread)
        if compared.pairs:
            right = compared.pairs - len(compared.wrong)
            lines.append((source, str(compared.pairs), f"{100 * right / compared.pairs:.0f} %"))
    return Table(title, ("source", "pairs", "in the right order"), lines)


def _device_seconds(one: PredictedRun, seconds: float) -> float:
    """Return the seconds of a device for a token."""
    tokens = one.run.config.batch.global_batch_size * one.run.config.model.seq_length
    return seconds * one.run.devices / tokens


def dispatch_table(cluster: Cluster) -> Table:
    """Tabulate steps with tokens sent over nodes and directly to ranks, and which is chosen."""
    runs = [
        (run.name, run.argv())
        for run in RUNS
        if run.machine == cluster.name
        and run.config.model.num_experts
        and run.known
        and run.devices > cluster.devices_per_node
    ]
    runs.append(("preset moe-55b", ["--preset", "moe-55b", "--world-size", "256"]))
    rows = []
    for name, argv in runs:
        config = with_dispatch(parse_plan(argv), 0)
        choice = dispatch_choice(estimate(config, cluster))
        if choice is None:
            continue
        parallel = config.parallel
        times = choice.seconds, choice.other_s
        direct, over = times if choice.directly else times[::-1]
        rows.append(
            (
                name,
                f"TP {parallel.tensor_model_parallel_size}{_experts(parallel)}, "
                f"{parallel.world_size:,} GCDs",
                f"{over:.2f} s",
                f"{direct:.2f} s",
                "directly" if choice.directly else "over nodes",
                f"{1 - choice.seconds / choice.other_s:.1%}",
            )
        )
    heads = ("model", "layout", "over nodes", "directly", "chosen", "saves")
    return Table("Steps with tokens sent over nodes, and directly to ranks", heads, rows)


def _experts(parallel: ParallelConfig) -> str:
    experts = parallel.expert_model_parallel_size
    each = f", ETP {parallel.expert_tensor_parallel_size}" if parallel.folded else ""
    return f", EP {experts}{each}" if experts > 1 else each
