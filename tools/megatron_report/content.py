"""Content of a report: sections of lines, tables and plots, for one run or for several side by side.

Values of tables are unrounded, under the names of the metrics file; pages.py formats them by the
units in their names. Plots are in the notation of plotly (https://plotly.com/javascript/reference).
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.jobs.scaling import SWEEP, Series, compare, row, throughput
from megatron_report.reading import Record, Run, axes, events

# Okabe and Ito, Color Universal Design (2008), in an order of contrast on white; without yellow
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("solid", "dash", "dot", "dashdot")
_FOLDED = 30  # rows of a table that is shown at once
_SPEED = (
    "run verdict value devices layout tokens_per_s noise efficiency efficiency_interval state remarks"
).split()
_MANY = 5  # runs from which on they are told of in tables only


@dataclass(frozen=True)
class Table:
    """Rows of values by column.

    across  each row is shown as a column
    exact   values are settings: shown as they are
    folded  shown on demand
    """

    caption: str
    rows: Sequence[Mapping[str, Any]]
    across: bool = False
    exact: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Plot:
    """Traces and layout of plotly.

    A trace may have `axes`, its positions by the names of the horizontal axis to choose from.
    """

    caption: str
    traces: Sequence[Record]
    layout: Mapping[str, Any]


Block = str | Table | Plot


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


def sections(runs: Sequence[Run]) -> Iterator[Section]:
    """Yield the sections of a report; what no run has recorded is one line that says so."""
    shown = runs if len(runs) < _MANY else ()
    yield Section("At a glance", [*map(_verdict, shown), _overview(runs)])
    if len(runs) > 1:
        yield Section("Comparison", list(_comparison(runs)))
    absent = []
    for title, build, missing in (
        ("Loss", _loss, "no run has logged an iteration or evaluated"),
        ("Learning rate and batch", _rates, "no run has logged an iteration"),
        ("Throughput", _throughput, "no run has logged an iteration"),
        ("Phases of a step", _phases, "not measured: see --timing-log-level"),
        ("Pipeline", _pipeline, "no timeline was recorded"),
        ("Memory", _memory, "no peak memory was recorded"),
        ("Energy", _energy, "not recorded: no meter on the machine, or an older run"),
        ("Data", _data, "no account of the data sources was recorded"),
        ("Checkpoints", _checkpoints, "none was saved"),
        ("Events", _events, "no skipped step, resume, roll-back, slow rank or failed checkpoint"),
        ("Settings", _settings, "not recorded"),
        ("Provenance", _provenance, "not recorded"),
    ):
        if blocks := list(build(runs)):
            yield Section(title, blocks)
        else:
            absent.append(f"{title}: {missing}.")
    if absent:
        yield Section("Not in this report", absent)


# -- summaries -------------------------------------------------------------------------------------


def summary(run: Run) -> Record:
    """Return what was run and how it went, by name; None where it is not known."""
    config, found, steps = run.config, run.measured, run.of("iteration")
    last = next((r for r in reversed(run.kept) if r.get("iteration") is not None), {})
    layout = run.start.get("layout") or {}
    sizes = [config.get(f"{n}_model_parallel_size") for n in ("tensor", "pipeline")]
    losses = [r["lm_loss"] for r in steps if r.get("lm_loss") is not None]
    valid = {
        f"valid loss of {name}" if name else "valid_loss": checks[-1].get("lm_loss")
        for name, checks in _validations(run).items()
    }
    spread = found.median_s and found.tokens_per_s and found.step_s
    shape = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    return {
        "run": run.name,
        "ended": run.ended,
        "iteration": last.get("iteration"),
        "iterations_planned": next(
            (r["total_iterations"] for r in steps[-1:] if r.get("total_iterations")), None
        )
        or config.get("train_iters"),
        "tokens": next((r["tokens"] for r in reversed(run.kept) if r["tokens"]), None),
        "hours": last.get("hours"),
        "lm_loss": losses[-1] if losses else None,
        **valid,
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_interval": [
            found.tokens_per_s * found.step_s / s for s in found.median_s[::-1]
        ]
        if spread and found.median_s and found.tokens_per_s and found.step_s
        else None,
        "step_s": found.step_s,
        "model_tflops": found.model_tflops,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "memory_bytes": found.memory_bytes,
        "energy_kwh": _kwh(run),
        "skipped": sum(r.get("skipped") or 0 for r in steps),
        "parameters": run.start.get("parameters"),
        "shape": ", ".join(f"{n.replace('_', ' ')} {config[n]}" for n in shape if config.get(n)),
        "devices": found.run.world_size,
        "device": run.start.get("device"),
        "layout": "tensor {} x pipeline {} x data {}".format(*sizes, layout.get("data") or "?")
        if all(sizes)
        else None,
        "global_batch": config.get("global_batch_size"),
        "remarks": "; ".join([*found.problems, *found.notes]) or None,
    }


def _verdict(run: Run) -> str:
    """Say in one sentence how a run went."""
    told = summary(run)
    parts = [f"{run.name}: {run.ended}"]
    if told["iteration"] is not None:
        planned = f" of {told['iterations_planned']:,}" if told["iterations_planned"] else ""
        parts.append(f"iteration {told['iteration']:,}{planned}")
    if told["lm_loss"] is not None:
        parts.append(f"loss {told['lm_loss']:.4f}")
    parts += [f"{k.replace('_', ' ')} {v:.4f}" for k, v in told.items() if k.startswith("valid")]
    if told["tokens_per_s"] is not None:
        parts.append(f"{told['tokens_per_s']:,.0f} tokens/s")
    if told["mfu"] is not None:
        parts.append(f"MFU {100 * told['mfu']:.1f} %")
    return "; ".join(parts) + "."


def _overview(runs: Sequence[Run]) -> Table:
    return Table(
        "What was run, and how it went", [summary(r) for r in runs], across=len(runs) < _MANY
    )


def _comparison(runs: Sequence[Run]) -> Iterator[Block]:
    yield (
        "Speeds are those of the steady steps. Two speeds differ only if the 95 % intervals of their "
        "medians do not overlap; neighbouring steps are correlated, so fewer of them count "
        "(“independent”). Steps of one run do not show how much a repetition would vary."
    )
    for series in compare([run.measured for run in runs]):
        said = f"{series.name}, {series.kind} scaling" if series.scales else f"Speed: {series.name}"
        if series.kind == SWEEP:
            said += f"; value is the {series.parameter}"
        if series.base is not None and len(series.members) > 1:
            said += f"; efficiency is tokens/s per device relative to {series.base.run.name}"
        if series.published is not None:
            said += f"; published HFU: {series.published.percent} %"
        rows = [row(series, member) for member in series.members]
        yield Table(said, [{name: each[name] for name in _SPEED} for each in rows])
        more = [{k: v for k, v in each.items() if k == "run" or k not in _SPEED} for each in rows]
        yield Table("Further figures", more, folded=True)
        yield from _efficiency(series)
    configs = [run.config for run in runs]
    names = sorted({name for config in configs for name in config})
    different = [n for n in names if len({json.dumps(c.get(n)) for c in configs}) > 1]
    if different:
        yield _values("Settings that differ between the runs", different, runs)
    else:
        yield "No setting differs between the runs."


def _efficiency(series: Series) -> Iterator[Plot]:
    """Yield a plot of efficiency, or of the throughput of a sweep, with intervals."""
    sweep = series.kind == SWEEP
    ranges = [throughput(m) if sweep else series.efficiency(m) for m in series.members]
    known = [(m, y) for m, y in zip(series.members, ranges, strict=True) if y is not None]
    if len(known) < 2:
        return
    numbered = sweep or series.scales
    x = [series.value(m) if numbered else m.run.name for m, _ in known]
    bars = {
        "type": "data",
        "array": [min(high, 2 * y) - y for _, (_, y, high) in known],
        "arrayminus": [y - low for _, (low, y, _) in known],
        "symmetric": False,
    }
    line = _line("measured", 0, x=x, y=[y[1] for _, y in known], error_y=bars)
    traces = [line | {"mode": "lines+markers" if numbered else "markers"}]
    if target := getattr(series.published, series.kind, None):
        traces.append(_points("published", 1, "star", x=[target[0]], y=[target[1]]))
    ticks = {"type": "log", "tickvals": x, "ticktext": [f"{v:,}" for v in x]} if numbered else {}
    what = f"Efficiency over {series.parameter}" if series.scales else "Relative speed"
    yield Plot(
        f"{f'Tokens/s per device over {series.parameter}' if sweep else what}, with the intervals "
        "of the medians",
        traces,
        {"xaxis": ticks or {"type": "category"}, "yaxis": {"rangemode": "tozero"}},
    )


# -- curves ----------------------------------------------------------------------------------------


def _line(name: str, color: int, dash: int = 0, **trace: Any) -> Record:
    style = {
        "color": COLORS[color % len(COLORS)],
        "dash": _DASHES[dash % len(_DASHES)],
        "width": 1.6,
    }
    return {"type": "scatter", "mode": "lines", "name": name, "line": style, **trace}


def _points(name: str, color: int, symbol: str = "circle-open", **trace: Any) -> Record:
    marker = {
        "color": COLORS[color % len(COLORS)],
        "size": 8,
        "symbol": symbol,
        "line": {"width": 1.6},
    }
    return {"type": "scatter", "mode": "markers", "name": name, "marker": marker, **trace}


def _curves(
    runs: Sequence[Run],
    caption: str,
    field: str,
    what: str,
    layout: Mapping[str, Any] | None = None,
) -> Iterator[Plot]:
    """Yield a plot of a field of the iteration records, unless no run has it."""
    traces = []
    for number, run in enumerate(runs):
        steps = [r for r in run.of("iteration") if r.get(field) is not None]
        if steps:
            name, y = run.name if len(runs) > 1 else what, [r[field] for r in steps]
            dash = number // len(COLORS)
            traces.append(_line(name, number, dash, y=y, axes=axes(steps)))
    if traces:
        yield Plot(
            caption, traces, {"yaxis": {"rangemode": "tozero"}} if layout is None else layout
        )


def _validations(run: Run) -> dict[str, list[Record]]:
    """Return the evaluations of the validation data by corpus, "" for the blend."""
    found: dict[str, list[Record]] = {}
    for record in run.of("validation"):
        if record.get("dataset") in ("valid", None) and record.get("lm_loss") is not None:
            found.setdefault(record.get("corpus") or "", []).append(record)
    return found


def _loss(runs: Sequence[Run]) -> Iterator[Block]:
    plots = list(_curves(runs, "", "lm_loss", "training"))
    traces = [trace for plot in plots for trace in plot.traces]
    rows = []
    for number, run in enumerate(runs):
        symbols = ("circle-open", "square-open", "diamond-open", "triangle-up-open", "star-open")
        for at, (corpus, checks) in enumerate(_validations(run).items()):
            color = number if len(runs) > 1 else at + 1
            y, name = [r["lm_loss"] for r in checks], f"validation {corpus}".strip()
            trace = _points(name, color, symbols[at % len(symbols)], y=y, axes=axes(checks))
            trace |= {"mode": "lines+markers", "line": {"width": 0.8, "dash": "dot"}}
            traces.append(trace | {"text": run.name, "showlegend": not number})
            rows += [
                {
                    "run": run.name,
                    "corpus": corpus or None,
                    **{
                        k: r.get(k)
                        for k in ("iteration", "tokens", "lm_loss", "perplexity", "samples")
                    },
                    "elapsed_s": r.get("elapsed_s"),
                }
                for r in checks
            ]
        traces += _marks(run, not number)
    if traces:
        yield Plot("Loss (nats per token)", traces, {})
    if rows:
        yield Table("Validation", rows, folded=len(rows) > 12)


def _marks(run: Run, listed: bool) -> list[Record]:
    """Return the events of a run as marks on its loss curve."""
    steps = [r for r in run.of("iteration") if r.get("lm_loss") is not None]
    if not steps:
        return []
    found = [e for e in events(run) if e["iteration"] is not None]
    at = [min(steps, key=lambda r: abs(r["iteration"] - e["iteration"])) for e in found]
    text = [f"{run.name}: {e['event']} at {e['iteration']}: {e['what']}"[:200] for e in found]
    if not found:
        return []
    y = [r["lm_loss"] for r in at]
    marks = _points("events", 6, "x-thin-open", y=y, axes=axes(at), text=text)
    return [marks | {"showlegend": listed}]


def _rates(runs: Sequence[Run]) -> Iterator[Block]:
    scientific = {"yaxis": {"rangemode": "tozero", "exponentformat": "power"}}
    yield from _curves(runs, "Learning rate", "learning_rate", "learning rate", scientific)
    batches = {r.get("global_batch_size") for run in runs for r in run.of("iteration")}
    if len(batches) > 1:
        yield from _curves(runs, "Global batch (samples)", "global_batch_size", "batch")


def _throughput(runs: Sequence[Run]) -> Iterator[Block]:
    yield from _curves(runs, "Tokens per second", "tokens_per_s", "tokens/s")
    yield from _curves(runs, "MFU, as a fraction of the devices' peak", "mfu", "MFU")


# -- one step --------------------------------------------------------------------------------------


def _bars(
    caption: str, runs: Sequence[Run], found: Sequence[Mapping[str, Sequence[float]]], unit: str
) -> Iterator[Block]:
    """Yield horizontal bars of (least, mean, most) by name for each run, if there are any."""
    traces: list[Record] = []
    for number, (run, values) in enumerate(zip(runs, found, strict=True)):
        if values:
            mean = [v[1] for v in values.values()]
            bars: Record = {
                "type": "data",
                "symmetric": False,
                "array": [v[2] - v[1] for v in values.values()],
                "arrayminus": [v[1] - v[0] for v in values.values()],
            }
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": run.name,
                    "marker": {"color": COLORS[number % len(COLORS)]},
                    "y": list(values),
                    "x": mean,
                    "error_x": bars if any(bars["array"]) else {},
                    "showlegend": len(runs) > 1,
                }
            )
    if traces:
        rows = max(len(t["y"]) for t in traces) * len(traces)
        height = {"height": 110 + 26 * rows}
        yield Plot(
            caption, traces, {"yaxis": {"autorange": "reversed"}, "barmode": "group", **height}
        )
        yield Table(
            f"{caption.partition(',')[0]} in figures",
            [
                {"run": run.name, "part": name, f"least_{unit}": v[0], f"mean_{unit}": v[1]}
                | {f"most_{unit}": v[2]}
                for run, values in zip(runs, found, strict=True)
                for name, v in values.items()
            ],
            folded=True,
        )


def _phases(runs: Sequence[Run]) -> Iterator[Block]:
    found = []
    for run in runs:
        parts: dict[str, list[Record]] = {}
        records = [r for r in run.of("iteration") if r.get("phases_ms") or r.get("times_ms")]
        for record in records[1:] or records:  # the first interval also compiles and allocates
            for part, ms in (record.get("phases_ms") or record["times_ms"]).items():
                parts.setdefault(part, []).append(ms)
        found.append({part: v for part, ms in parts.items() if (v := _over_ranks(ms))})
    yield from _bars(
        "Time of each phase (ms per step), median step, over all ranks", runs, found, "ms"
    )


def _over_ranks(records: Sequence[Record]) -> tuple[float, float, float] | None:
    """Return the medians of the least, the mean and the greatest value over the ranks."""
    both = [r for r in records if r.get("min") is not None and r.get("max") is not None]
    if not both:
        return None
    means = [r["mean"] if r.get("mean") is not None else (r["min"] + r["max"]) / 2 for r in both]
    low, high = (statistics.median(r[name] for r in both) for name in ("min", "max"))
    return low, min(max(low, statistics.median(means)), high), high


def _pipeline(runs: Sequence[Run]) -> Iterator[Block]:
    names = ("iteration", "bubble", "predicted_bubble")
    rows = [
        {"run": run.name, **{name: record.get(name) for name in names}}
        for run in runs
        for record in run.of("timeline")
    ]
    if rows:
        yield Table("Bubble: time of the pipeline's ranks without computation", rows)
    for run in runs if len(runs) < _MANY else ():
        if run.timeline:
            caption = "One step of the pipeline (ms)"
            yield _timeline(f"{caption}: {run.name}" if len(runs) > 1 else caption, run.timeline)
        elif rows:
            yield f"Nothing to draw{f' for {run.name}' if len(runs) > 1 else ''}: {run.no_timeline}."


def _timeline(caption: str, spans: Sequence[Record]) -> Plot:
    """Plot spans as bars in a row for each stage, coloured by what is done."""
    traces = []
    for number, name in enumerate(dict.fromkeys(span["name"] for span in spans)):
        own = [span for span in spans if span["name"] == name]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "marker": {
                    "color": COLORS[number] if number < len(COLORS) else "#999999",
                    "line": {"color": "#ffffff", "width": 0.5},
                },
                "y": [span["row"] for span in own],
                "x": [span["ms"] for span in own],
                "base": [span["start_ms"] for span in own],
                "text": ["" if (m := span["micro_batch"]) is None else str(m) for span in own],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "constraintext": "inside",
            }
        )
    rows = sorted({span["row"] for span in spans}, key=lambda text: (len(text), text))
    order = {"categoryorder": "array", "categoryarray": rows, "autorange": "reversed"}
    height = 130 + 34 * len(rows)
    return Plot(caption, traces, {"yaxis": order, "barmode": "overlay", "height": height})


# -- the machine -----------------------------------------------------------------------------------


def _memory(runs: Sequence[Run]) -> Iterator[Block]:
    found, rows = [], []
    for run in runs:
        stages: dict[str, float] = {}
        for record in run.of("iteration"):
            for stage, held in enumerate(record.get("stage_memory_bytes") or []):
                if held is not None:
                    name = f"stage {stage}"
                    stages[name] = max(stages.get(name, 0.0), held / 2**30)
        found.append({name: (held, held, held) for name, held in stages.items()})
        peak = max(run.of("iteration"), key=lambda r: r.get("memory_bytes") or 0, default={})
        if peak.get("memory_bytes"):
            names = ("memory_bytes", "memory_rank", "reserved_bytes")
            rows.append({"run": run.name, **{name: peak.get(name) for name in names}})
    if rows:
        yield Table("Most memory held by a rank", rows)
    yield from _bars("Peak memory of each stage (GiB)", runs, found, "GiB")


def _energy(runs: Sequence[Run]) -> Iterator[Block]:
    rows = []
    for run in runs:
        per = [r["joules_per_token"] for r in run.of("iteration") if r.get("joules_per_token")]
        if (kwh := _kwh(run)) is not None:
            median = statistics.median(per) if per else None
            rows.append({"run": run.name, "energy_kwh": kwh, "joules_per_token": median})
    if rows:
        yield Table("Energy of all nodes while it was metered; median per token", rows)
    yield from _curves(runs, "Energy (J per token)", "joules_per_token", "J/token")


def _kwh(run: Run) -> float | None:
    """Return the energy of a run, with the steps that were done again; None if unknown."""
    joules = [r["energy_j"] for r in run.records if r.get("energy_j") is not None]
    return sum(joules) / 3.6e6 if joules else None


def _data(runs: Sequence[Run]) -> Iterator[Block]:
    rows = []
    for run in runs:
        last = next((r for r in reversed(run.kept) if r.get("sources")), {})
        for source, counts in (last.get("sources") or {}).items():
            names = ("samples", "tokens", "epochs", "left_out")
            rows.append({"run": run.name, "source": source, **{n: counts.get(n) for n in names}})
    if rows:
        yield Table("What was read of each source", rows)


def _checkpoints(runs: Sequence[Run]) -> Iterator[Block]:
    names = ("iteration", "time", "size_bytes", "elapsed_s", "stall_s", "background")
    rows = [
        {"run": run.name, **{name: record.get(name) for name in names}}
        for run in runs
        for record in run.records
        if record["event"] == "checkpoint"
    ]
    if rows:
        yield Table("Checkpoints", rows, folded=len(rows) > _FOLDED)


def _events(runs: Sequence[Run]) -> Iterator[Block]:
    rows = [{"run": run.name, **event} for run in runs for event in events(run)]
    if rows:
        yield Table("Events", rows, folded=len(rows) > _FOLDED)


# -- where it comes from ---------------------------------------------------------------------------


def _values(caption: str, names: Sequence[str], runs: Sequence[Run], folded: bool = False) -> Table:
    heads = [f"in {run.name}" for run in runs] if len(runs) > 1 else ["value"]
    found = [
        {"setting": name, **{h: r.config.get(name) for h, r in zip(heads, runs, strict=True)}}
        for name in names
    ]
    return Table(caption, found, exact=True, folded=folded)


def _settings(runs: Sequence[Run]) -> Iterator[Block]:
    chosen = sorted({name for run in runs for name in run.chosen})
    names = list(dict.fromkeys([*chosen, *sorted({n for run in runs for n in run.config})]))
    if chosen:
        few = len(runs) == 1
        yield _values("Settings that differ from their defaults", chosen, runs, folded=not few)
    if names:
        yield _values("All settings", names, runs, folded=True)


def _provenance(runs: Sequence[Run]) -> Iterator[Block]:
    for run in runs if len(runs) < _MANY else ():
        told: Record = {"metrics": str(run.measured.run.path), **run.provenance}
        if not run.provenance:
            told |= {name: run.start.get(name) for name in ("versions", "device", "places")}
            yield (
                f"{run.name}: from the metrics file, without a checkpoint's record: "
                f"{run.no_provenance}."
            )
        rows = [{"what": name, "value": value} for name, value in _flat("", told)]
        yield Table(f"Provenance of {run.name}", rows, exact=True, folded=len(runs) > 1)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the single values of nested ones, with the names on the way to them."""
    if isinstance(value, dict):
        for inner, deeper in value.items():
            yield from _flat(f"{name} {inner}".strip(), deeper)
    elif isinstance(value, list):
        if any(isinstance(one, (dict, list)) for one in value):
            yield from _flat(name, {str(i): one for i, one in enumerate(value)})
        elif value:
            yield name, shlex.join(map(str, value))
    elif value not in (None, ""):
        yield name, value
