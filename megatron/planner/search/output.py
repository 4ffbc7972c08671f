"""Tables of search results, and the files that --output writes."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import operator
import re
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.drawing import pyplot
from megatron.errors import ConfigError
from megatron.model import formulas
from megatron.pipeline.trace import trace_of
from megatron.planner import error_bars
from megatron.planner.cluster import GIB, Cluster
from megatron.planner.layout import DIMENSIONS, CandidateLayout, write_value
from megatron.planner.progress import Progress
from megatron.planner.search.find import LayoutSearch, SearchResult
from megatron.planner.search.script import CHOOSE, JobSite, write_script
from megatron.planner.search.space import Rejections
from megatron.planner.table import Table
from megatron.planner.timeline_plot import plot_timeline
from megatron.planner.timing import COMPONENTS, Estimate, estimate
from megatron.planner.trace import sized
from megatron.untrusted import write_text

_DAY = 86400.0


class ChosenLayout(NamedTuple):
    """Layout with its estimate.

    record  values and figures by name, as in the files; days and node-hours are for the whole run,
            or per billion tokens if its length is unknown
    """

    layout: CandidateLayout
    estimate: Estimate
    record: dict[str, Any]


def chosen_layout(
    layout_search: LayoutSearch, layout: CandidateLayout, tokens: float | None
) -> ChosenLayout:
    """Estimate a layout on its placement. tokens: length of the run; None: unknown."""
    cluster = layout_search.space.cluster
    predicted = estimate(layout_search.space.config(layout), cluster)
    each = cluster.devices_per_node
    most = max(rank.total for rank in predicted.memory)
    days = (tokens or 1e9) / predicted.tokens_per_s / _DAY
    record = {
        **{dimension.name: write_value(dimension.value(layout, each)) for dimension in DIMENSIONS},
        "dp": layout.replicas,
        "seconds_per_step": predicted.seconds,
        "run_variation": predicted.run_variation,
        "mfu": predicted.mfu,
        "hfu": predicted.hfu,
        "tokens_per_day": _DAY * predicted.tokens_per_s,
        "days": days,
        "node_hours": 24 * days * -(-layout.world // each),
        "memory_gib": most / GIB,
        "left_gib": (layout_search.capacity - most) / GIB,
        **{f"{re.sub('[ -]', '_', name)}_s": predicted.breakdown[name] for name in COMPONENTS},
    }
    return ChosenLayout(layout, predicted, record)


def equal_to_first(chosen: Sequence[ChosenLayout]) -> list[int]:
    """List the numbers of the layouts that are as fast as the first one, but for noise.

    The noise is that of identical runs (run_variation).
    """
    first = chosen[0].estimate
    least = first.tokens_per_s / (1 + first.run_variation)
    return [
        number for number, one in enumerate(chosen, start=1) if one.estimate.tokens_per_s >= least
    ]


# -- tables ----------------------------------------------------------------------------------------


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float) -> str:
    """Format with four digits, and from 1000 on as a whole number with thousands separators."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _numbered(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    return Table(
        title, ("#", *rows[0]), [(str(number), *row.values()) for number, row in enumerate(rows, 1)]
    )


def layout_table(chosen: Sequence[ChosenLayout], tokens: float | None, *, papers: bool) -> Table:
    """Tabulate sizes, time, utilization, cost and peak memory of layouts.

    `papers` adds the TFLOP/s per device by the formula of Dash et al.
    """
    rows = []
    divisions = [name for name in ("cp", "ep") if any(getattr(c.layout, name) > 1 for c in chosen)]
    divisions += ["etp"] * any(c.estimate.config.parallel.folded for c in chosen)
    for layout, predicted, record in chosen:
        over = f" over {write_value(layout.shard)}" if layout.shard else ""
        zero = f"ZeRO {layout.zero}{over}" if layout.zero > 1 else "ZeRO"
        names = {"sp": layout.sp, "overlap": layout.overlap, zero: layout.zero}
        names["offload"] = layout.offload
        row = {
            **{name.upper(): str(record[name]) for name in ("tp", "pp", *divisions, "dp")},
            **{name: record[name] for name in ("nodes", "gbs", "chunks", "schedule", "mbs")},
            "recompute": layout.recompute.removeprefix("selective:"),
            "also on": ", ".join(name for name, on in names.items() if on) or "-",
            "s/step": _number(predicted.seconds),
            "MFU": _percent(predicted.mfu),
            "HFU": _percent(predicted.hfu),
            "Gtok/day": _number(record["tokens_per_day"] / 1e9),
            "days": _number(record["days"]),
            "node-hours": _number(record["node_hours"]),
            "GiB": f"{record['memory_gib']:.1f}",
            "left": f"{record['left_gib']:.1f}",
        }
        if papers:
            row["TFLOP/s (paper)"] = _paper_tflops(predicted)
        rows.append(row)
    title = f"layouts, with days and node-hours for {_number(tokens or 1e9)} tokens"
    table = _numbered(title, rows)
    return dataclasses.replace(table, split=table.columns.index("s/step"))


def _paper_tflops(predicted: Estimate) -> str:
    """Return a device's TFLOP/s by `formulas.paper_flops`.

    This formula assumes a GPT whose FFN size is four times its hidden size.
    """
    config = predicted.config
    model = sized(config).model
    flops = formulas.paper_flops(
        config.batch.global_batch_size,
        model.seq_length,
        model.num_layers,
        model.hidden_size,
        model.padded_vocab_size(config.parallel.tensor_model_parallel_size),
        checkpointing=config.recompute.recompute_granularity == "full",
    )
    return f"{formulas.achieved_tflops(flops, predicted.seconds, predicted.devices):.1f}"


def components_table(chosen: Sequence[ChosenLayout]) -> Table:
    """Tabulate the parts of a step on the busiest pipeline rank."""
    used = [name for name in COMPONENTS if any(one.estimate.breakdown[name] for one in chosen)]
    rows = [{name: _number(one.estimate.breakdown[name]) for name in used} for one in chosen]
    return _numbered("seconds of a step, on the busiest pipeline rank", rows)


def bounds_table(chosen: Sequence[ChosenLayout], progress: Progress) -> Table:
    """Tabulate the uncertainty of a step's seconds, and the seconds of its FLOPs at the peak."""
    rows = []
    for done, (_, predicted, _) in enumerate(chosen):
        progress("varying figures", "layouts", done, len(chosen))

        def seconds(cluster: Cluster, predicted: Estimate = predicted) -> float:
            return estimate(predicted.config, cluster, predicted.placement).seconds

        spread = error_bars.spread(
            seconds, predicted.cluster, predicted.config.precision.dtype_name
        )
        peak = "-" if predicted.hfu is None else _number(predicted.hfu * predicted.seconds)
        rows.append(
            {
                "s/step": _number(spread.value),
                "fast ends": _number(spread.low),
                "slow ends": _number(spread.high),
                "+-": _number(spread.likely),
                "at the peak": peak,
                "largest effect": spread.effects[0].figure,
            }
        )
    return _numbered(
        "bounds: all figures at the fast or slow ends of their ranges; +-: independent errors",
        rows,
    )


def values_table(layout_search: LayoutSearch, result: SearchResult, name: str) -> Table:
    """Tabulate the best layout for each value of one dimension."""
    seq = layout_search.space.base.model.seq_length
    best_of = result.by_value(layout_search.space.cluster.devices_per_node)
    rows = [
        (
            f"{value:,}",
            _number(best.seconds),
            _number(_DAY * seq / best.score / 1e9),
            f"{best.memory / GIB:.1f}",
            layout_search.space.write(best.layout),
        )
        for (choice, value), best in sorted(best_of.items(), key=operator.itemgetter(0))
        if choice == name
    ]
    return Table(
        f"best layout for each {name}", (name, "s/step", "Gtok/day", "GiB", "layout"), rows
    )


def losses(layout_search: LayoutSearch, result: SearchResult) -> dict[str, dict[str, float]]:
    """Return the share of throughput lost by fixing each value, with other dimensions optimized.

    The shares are by dimension and value; the dimension that matters most comes first.
    """
    values: dict[str, dict[str, float]] = {}
    best_of = result.by_value(layout_search.space.cluster.devices_per_node)
    for (name, value), one in sorted(best_of.items(), key=operator.itemgetter(1)):
        values.setdefault(name, {})[write_value(value)] = 1 - result.estimated[0].score / one.score
    several = {name: of for name, of in values.items() if len(of) > 1}
    return dict(sorted(several.items(), key=lambda item: -statistics.fmean(item[1].values())))


def losses_table(lost: Mapping[str, Mapping[str, float]]) -> Table:
    rows = [
        (
            name,
            ", ".join(
                f"{value}: -{_percent(loss)}" if loss else f"{value}: best"
                for value, loss in values.items()
            ),
        )
        for name, values in lost.items()
    ]
    return Table(
        "throughput lost with each value, with the rest optimized", ("choice", "values"), rows
    )


def rejection_table(rejections: Rejections, title: str) -> Table:
    rows = [
        (f"{count:,}", reason, first_problem(rejections.nearest[reason][1]))
        for reason, count in rejections.counts.most_common()
    ]
    return Table(title, ("cases", "why", "for example"), rows)


def first_problem(text: str) -> str:
    r"""Return the first problem in the message of a configuration error, on one line.

    >>> first_problem("the configuration has 2 problems:\n  1. this\n  2. that")
    'this'
    """
    if not text.startswith("the configuration has "):
        return " ".join(text.split())
    first = text.splitlines()[1] if "\n" in text else text
    return " ".join(first.split()).partition(". " if "\n" in text else "problem: ")[2]


# -- files -----------------------------------------------------------------------------------------


def make_folder(folder: Path) -> None:
    """Create a folder. Raises ConfigError if it is not writable or matplotlib is missing."""
    pyplot("leave out --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--output {folder}: {error.strerror}: choose another folder") from error


def write_files(
    folder: Path,
    layout_search: LayoutSearch,
    result: SearchResult,
    chosen: Sequence[ChosenLayout],
    preset: str | None,
    tokens: float | None,
    site: JobSite | None,
) -> list[Path]:
    """Write the tables, and the best layout's plot, trace and job script; return their paths.

    `site` is where the job runs, as returned by `site_of`. Raises ConfigError if a file cannot be
    written.
    """
    space = layout_search.space
    (layout, winner, record) = chosen[0]
    rows = io.StringIO()
    writer = csv.DictWriter(rows, list(record))
    writer.writeheader()
    writer.writerows(one.record for one in chosen)
    content = {
        "model": space.name,
        "cluster": space.cluster.name,
        "best": [one.record for one in chosen],
        "losses": losses(layout_search, result),
        "rejected": [
            {"cases": count, "why": why, "example": result.rejections.nearest[why][1]}
            for why, count in result.rejections.counts.items()
        ],
        "figures": [used._asdict() for used in winner.confidence.used],
    }
    predicted = (
        f"{_number(winner.seconds)} s per step, {record['memory_gib']:.1f} GiB on the device "
        "with the highest peak"
    )
    notes = [f"Predicted, not run: {predicted}.", space.write(layout)]
    plot_timeline(winner.run, folder / "timeline.png")
    return [
        write_text(folder / "table.csv", rows.getvalue(), choose=CHOOSE),
        write_text(folder / "table.json", json.dumps(content, indent=1) + "\n", choose=CHOOSE),
        folder / "timeline.png",
        write_text(folder / "trace.json", trace_of(winner.run), choose=CHOOSE),
        write_script(folder, winner.config, preset, space.cluster, tokens, notes, site),
    ]
