"""Content of a report: sections of lines, tables and plots, for one run or several side by side.

Values of tables are unrounded, under names like those in the metrics file; values.py formats them
by the units in these names. Plots are in the notation of plotly
(https://plotly.com/javascript/reference).
"""

from __future__ import annotations

import itertools
import json
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.data.history import blend_text, short_names
from megatron.jobs.scaling import SWEEP, Series, compare, row, throughput
from megatron_report.interruptions import interruptions
from megatron_report.reading import Record, RecordedRun, axes, events, provenance, read_timeline
from megatron_report.values import head, shown

# Okabe and Ito, Color Universal Design (2008), without yellow; the last one also marks events
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("solid", "dash", "dot", "dashdot")
_SOURCES = 12  # of data, drawn
_FEW = 40  # points of a curve that are marked
_START: Record = {"iteration": 0, "tokens": 0, "hours": 0.0, "sources": {}}
_FOLDED = 30  # a table of events with more rows is folded
_SPEED = (
    "run verdict value devices layout tokens_per_s noise efficiency efficiency_interval state remarks"
).split()
_MEASURED = ("step_s", "model_tflops", "mfu", "hfu", "memory_bytes")
_MANY = 5  # from this number of runs on, none has its own sentence, timeline or provenance


@dataclass(frozen=True)
class ReportTable:
    """Rows of values by column.

    across  each row is shown as a column
    exact   values are shown as they are, for example settings
    folded  the table is hidden until the reader opens it
    """

    caption: str
    rows: Sequence[Mapping[str, Any]]
    across: bool = False
    exact: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Plot:
    """Traces and layout of plotly.

    A trace may have `axes`: its positions on each horizontal axis that the reader can choose.
    """

    caption: str
    traces: Sequence[Record]
    layout: Mapping[str, Any]


Block = str | ReportTable | Plot


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


def sections(runs: Sequence[RecordedRun]) -> Iterator[Section]:
    """Yield the sections of a report; the last one names the sections without content."""
    shown = runs if len(runs) < _MANY else ()
    yield Section("At a glance", [*map(_verdict, shown), _overview(runs)])
    if len(runs) > 1:
        yield Section("Comparison", list(_comparison(runs)))
    absent = []
    for title, build, missing in (
        ("Loss", loss, "no run has logged an iteration or evaluated"),
        ("Learning rate and batch", rates, "no run has logged an iteration"),
        ("Throughput", _throughput, "no run has logged an iteration"),
        ("Phases of a step", _phases, "not measured: see --timing-log-level"),
        ("Pipeline", _pipeline, "no timeline was recorded"),
        ("Memory", _memory, "no peak of each stage was recorded"),
        ("Energy", _energy, "not recorded: no meter on the machine, or an older run"),
        ("Data", _data, "no account of the data sources was recorded"),
        ("Checkpoints", _checkpoints, "none was saved"),
        (
            "Events",
            _events,
            "no skipped step, restart, resume, roll-back, slow rank or failed checkpoint",
        ),
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


def summary(run: RecordedRun) -> Record:
    """Return facts and results of a run by name; unknown ones are None."""
    config = run.config
    measured = run.measured
    steps = run.of("iteration")
    last = next((r for r in reversed(run.effective) if r.get("iteration") is not None), {})
    layout = run.start.get("layout") or {}
    sizes = [config.get(f"{n}_model_parallel_size") for n in ("tensor", "pipeline")]
    losses = [r["lm_loss"] for r in steps if r.get("lm_loss") is not None]
    valid = {
        f"valid loss of {name}" if name else "valid_loss": checks[-1].get("lm_loss")
        for name, checks in _validations(run).items()
    }
    interval = throughput(measured)
    joules = [r["energy_j"] for r in run.records if r.get("energy_j") is not None]
    shape = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    return {
        "run": run.name,
        "ended": run.ended,
        "iteration": last.get("iteration"),
        "iterations_planned": (steps or [{}])[-1].get("total_iterations")
        or config.get("train_iters"),
        "tokens": next((r["tokens"] for r in reversed(run.effective) if r["tokens"]), None),
        "hours": last.get("hours"),
        **_interruptions(run),
        "lm_loss": losses[-1] if losses else None,
        **valid,
        "tokens_per_s": measured.tokens_per_s,
        "tokens_per_s_interval": [rate * measured.run.world_size for rate in interval[::2]]
        if interval and measured.median_s and measured.run.world_size
        else None,
        **{name: getattr(measured, name) for name in _MEASURED},
        "energy_kwh": sum(joules) / 3.6e6 if joules else None,
        "skipped": sum(r.get("skipped") or 0 for r in steps),
        "parameters": run.start.get("parameters"),
        "shape": ", ".join(f"{n.replace('_', ' ')} {config[n]}" for n in shape if config.get(n)),
        "devices": measured.run.world_size,
        "device": run.start.get("device"),
        "layout": "tensor {} x pipeline {} x data {}".format(*sizes, layout.get("data") or "?")
        if all(sizes)
        else None,
        "global_batch": config.get("global_batch_size"),
        "remarks": "; ".join([*measured.problems, *measured.notes]) or None,
    }


def _interruptions(run: RecordedRun) -> Record:
    """Return how often a run was interrupted, and what that cost; {} if it was not."""
    known = interruptions(run.records)
    if not known:
        return {}
    starts = known.job_starts if known.job_starts > 1 else None
    return {**vars(known), "job_starts": starts}


def _verdict(run: RecordedRun) -> str:
    """Describe in one sentence how a run went."""
    values = summary(run)
    names = ("iteration", "lm_loss", "valid_loss", "tokens_per_s", "mfu")
    phrases = [f"{head(k)} {shown(k, values[k])}" for k in names if values.get(k) is not None]
    return "; ".join([f"{run.name}: {run.ended}", *phrases]) + "."


def _overview(runs: Sequence[RecordedRun]) -> ReportTable:
    return ReportTable(
        "What was run, and how it went", [summary(r) for r in runs], across=len(runs) < _MANY
    )


def _comparison(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    yield (
        "Speeds are those of the steady steps. Two speeds differ only if the 95 % intervals of their "
        "medians do not overlap; neighbouring steps are correlated, so fewer of them count "
        "(“independent”). Steps of one run do not show how much a repetition would vary."
    )
    for series in compare([run.measured for run in runs]):
        caption = (
            f"{series.name}, {series.kind} scaling" if series.scales else f"Speed: {series.name}"
        )
        if series.kind == SWEEP:
            caption += f"; value is the {series.parameter}"
        if series.base is not None and len(series.members) > 1:
            caption += f"; efficiency is tokens/s per device relative to {series.base.run.name}"
        if series.published is not None:
            caption += f"; published HFU: {series.published.percent} %"
        rows = [row(series, member) for member in series.members]
        yield ReportTable(caption, [{name: each[name] for name in _SPEED} for each in rows])
        more = [{k: v for k, v in each.items() if k == "run" or k not in _SPEED} for each in rows]
        yield ReportTable("Further figures", more, folded=True)
        yield from _efficiency(series) if len(series.members) > 1 else ()
    configs = [run.config for run in runs]
    names = sorted({name for config in configs for name in config})
    different = [n for n in names if len({json.dumps(c.get(n)) for c in configs}) > 1]
    if different:
        yield _values("Settings that differ between the runs", different, runs)
    else:
        yield "No setting differs between the runs."


def _efficiency(series: Series) -> Iterator[Block]:
    """Yield bars of efficiency, or of a sweep's throughput, with the published point if any."""
    sweep = series.kind == SWEEP
    ranges = {m.run.name: throughput(m) if sweep else series.efficiency(m) for m in series.members}
    known = {k: (v[0], v[1], min(v[2], 2 * v[1])) for k, v in ranges.items() if v}
    if target := getattr(series.published, series.kind, None):
        known[f"published: {target[0]:,} GCDs"] = (target[1],) * 3
    what = "Tokens/s per device" if sweep else "Efficiency" if series.scales else "Relative speed"
    plot = _bars(f"{what}, with the intervals of the medians", [series.name], [known])
    yield from itertools.islice(plot, 1)


# -- curves ----------------------------------------------------------------------------------------


def _curve(name: str, number: int, mode: str = "lines", **trace: Any) -> Record:
    """Return a trace in the colour of this number; the dash changes once all colours are used."""
    color = COLORS[number % len(COLORS)]
    dash = _DASHES[number // len(COLORS) % len(_DASHES)]
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "line": {"color": color, "dash": dash, "width": 1.6},
        "marker": {"color": color, "size": 8, "symbol": "x-thin-open", "line": {"width": 1.6}},
        **trace,
    }


def _curves(
    runs: Sequence[RecordedRun],
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
            name = run.name if len(runs) > 1 else what
            y = [r[field] for r in steps]
            traces.append(_curve(name, number, y=y, axes=axes(steps)))
    if traces:
        yield Plot(
            caption, traces, {"yaxis": {"rangemode": "tozero"}} if layout is None else layout
        )


def _validations(run: RecordedRun) -> dict[str, list[Record]]:
    """Return the evaluations of the validation data by corpus, "" for the blend."""
    evaluations: dict[str, list[Record]] = {}
    for record in run.of("validation"):
        if record.get("dataset") in ("valid", None) and record.get("lm_loss") is not None:
            evaluations.setdefault(record.get("corpus") or "", []).append(record)
    return evaluations


def loss(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    """Yield a plot of training and validation loss with marks for events, and the validations."""
    traces = [t for plot in _curves(runs, "", "lm_loss", "training") for t in plot.traces]
    symbols = ("circle-open", "square-open", "diamond-open", "triangle-up-open", "star-open")
    for number, run in enumerate(runs):
        legend = {"showlegend": not number}
        for at, (corpus, checks) in enumerate(_validations(run).items()):
            color = number if len(runs) > 1 else at + 1
            y = [r["lm_loss"] for r in checks]
            name = f"validation {corpus}".strip()
            trace = _curve(name, color, "lines+markers", y=y, axes=axes(checks), text=run.name)
            trace["line"] |= {"width": 0.8, "dash": "dot"}
            trace["marker"]["symbol"] = symbols[at % len(symbols)]
            traces.append(trace | legend)
        steps = [r for r in run.of("iteration") if r.get("lm_loss") is not None]
        marks = [e for e in events(run) if e["iteration"] is not None]
        if steps and marks:
            at_step = [
                min(steps, key=lambda r: abs(r["iteration"] - e["iteration"])) for e in marks
            ]
            y = [r["lm_loss"] for r in at_step]
            text = [f"{e['event']}: {e['what']}"[:99] for e in marks]
            traces.append(
                _curve("events", 6, "markers", y=y, axes=axes(at_step), text=text) | legend
            )
    if traces:
        own = any(r.get("loss_name") for run in runs for r in run.of("iteration"))
        yield Plot("Loss" if own else "Loss (nats per token)", traces, {})
    names = "corpus iteration tokens lm_loss perplexity samples elapsed_s"
    yield from _listed("Validation", runs, "validation", names)


def rates(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    """Yield plots of the learning rate and, if it is not constant, of the global batch size."""
    scientific = {"yaxis": {"rangemode": "tozero", "exponentformat": "power"}}
    yield from _curves(runs, "Learning rate", "learning_rate", "learning rate", scientific)
    batches = {r.get("global_batch_size") for run in runs for r in run.of("iteration")}
    if len(batches) > 1:
        yield from _curves(runs, "Global batch (samples)", "global_batch_size", "batch")


def _throughput(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    yield from _curves(runs, "Tokens per second", "tokens_per_s", "tokens/s")
    yield from _curves(runs, "MFU, as a fraction of the devices' peak", "mfu", "MFU")


# -- one step --------------------------------------------------------------------------------------


def _bars(
    caption: str, names: Sequence[str], ranges: Sequence[Mapping[str, Sequence[float]]]
) -> Iterator[Block]:
    """Yield a plot with a bar of (least, middle, most) for each name and label, and its figures.

    Nothing is yielded without values.
    """
    traces: list[Record] = []
    rows = []
    for number, (name, values) in enumerate(zip(names, ranges, strict=True)):
        least, middle, most = zip(*values.values(), strict=True) if values else ((), (), ())
        bars: Record = {
            "type": "data",
            "symmetric": False,
            "array": [c - b for b, c in zip(middle, most, strict=True)],
            "arrayminus": [b - a for a, b in zip(least, middle, strict=True)],
        }
        trace = {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "marker": {"color": COLORS[number % len(COLORS)]},
            "y": list(values),
            "x": middle,
            "error_x": bars if any(bars["array"]) else {},
            "showlegend": len(names) > 1,
        }
        traces += [trace] if values else []
        rows += [
            {"run": name, "part": label, "least": v[0], "middle": v[1], "most": v[2]}
            for label, v in values.items()
        ]
    if traces:
        height = {"height": 110 + 26 * len(rows)}
        yield Plot(
            caption, traces, {"yaxis": {"autorange": "reversed"}, "barmode": "group", **height}
        )
        yield ReportTable(f"{caption.partition(',')[0]} in figures", rows, folded=True)


def _phases(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    ranges = []
    for run in runs:
        records_by_phase: dict[str, list[Record]] = {}
        records = [r for r in run.of("iteration") if r.get("phases_ms")]
        for record in records[1:] or records:  # the first interval also compiles and allocates
            for phase, ms in record["phases_ms"].items():
                records_by_phase.setdefault(phase, []).append(ms)
        ranges.append(
            {phase: v for phase, ms in records_by_phase.items() if (v := _over_ranks(ms))}
        )
    names = [run.name for run in runs]
    yield from _bars("Time of each phase (ms per step), median step, over all ranks", names, ranges)


def _over_ranks(records: Sequence[Record]) -> tuple[float, ...]:
    """Return the medians of the least, the mean and the greatest value over the ranks."""
    known = [r for r in records if r.get("min") is not None and r.get("max") is not None]
    triples = [(r["min"], r.get("mean") or (r["min"] + r["max"]) / 2, r["max"]) for r in known]
    return tuple(map(statistics.median, zip(*triples, strict=True)))


def _pipeline(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    caption = "Bubble: share of the time in which pipeline ranks do not compute"
    rows = list(_listed(caption, runs, "timeline", "iteration bubble predicted_bubble"))
    yield from rows
    for run in runs if len(runs) < _MANY else ():
        spans, why_not = read_timeline(run)
        if spans:
            yield _timeline(f"One step of {run.name} (ms)", spans)
        elif rows or "no timeline.json" not in why_not:
            yield f"{run.name}: {why_not}."


def _timeline(caption: str, spans: Sequence[Record]) -> Plot:
    """Plot spans as bars in a row for each stage, coloured by their names."""
    traces = []
    for number, name in enumerate(dict.fromkeys(span["name"] for span in spans)):
        named = [span for span in spans if span["name"] == name]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "marker": {
                    "color": "#c8c8c8" if "wait" in name else COLORS[number % len(COLORS)],
                    "line": {"color": "#ffffff", "width": 0.5},
                },
                "y": [span["row"] for span in named],
                "x": [span["ms"] for span in named],
                "base": [span["start_ms"] for span in named],
                "text": ["" if (m := span["micro_batch"]) is None else str(m) for span in named],
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


def _memory(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    peaks = []
    for run in runs:
        stages: dict[str, float] = {}
        for record in run.of("iteration"):
            for stage, peak in enumerate(record.get("stage_memory_bytes") or []):
                name = f"stage {stage}"
                stages[name] = max(stages.get(name, 0.0), (peak or 0) / 2**30)
        peaks.append({name: (peak, peak, peak) for name, peak in stages.items()})
    yield from _bars("Peak memory of each stage (GiB)", [run.name for run in runs], peaks)


def _energy(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    yield from _curves(runs, "Energy (J per token)", "joules_per_token", "J/token")


def _data(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    yield from _epochs(runs)
    for run in runs if len(runs) < _MANY else ():
        yield from _shares(run, f": {run.name}" if len(runs) > 1 else "")
    rows = []
    for run in runs:
        last = next((r for r in reversed(run.effective) if r.get("sources")), {})
        for source, counts in (last.get("sources") or {}).items():
            names = ("samples", "tokens", "epochs", "left_out")
            rows.append({"run": run.name, "source": source, **{n: counts.get(n) for n in names}})
    if rows:
        yield ReportTable("What was read of each source", rows)
    fields = "position tokens seq_length packing".split()
    phases = [
        {
            "run": run.name,
            "iteration": record.get("iteration") if phase["position"] else 1,
            **{name: phase[name] for name in fields},
            "seed": str(phase["seed"]),
            "blend": blend_text(phase["blend"]),
        }
        for run in runs
        for record, phase in _data_phases(run)
    ]
    if phases:
        yield ReportTable("Phases of the data, from sample and token on", phases)


def _counts(run: RecordedRun) -> list[Record]:
    """Return the records of what was read of each source."""
    return [record for record in run.of("data") if record.get("sources")]


def _data_phases(run: RecordedRun) -> list[tuple[Record, Record]]:
    """Return each phase of the data with the record in which it is, in order."""
    listed = ((record, phase) for record in run.of("data") for phase in record.get("phases") or ())
    by_position = {phase["position"]: (record, phase) for record, phase in listed}
    return [by_position[position] for position in sorted(by_position)]


def _most_read(records: Sequence[Record]) -> list[str]:
    """Return the sources of which most epochs were read at the end, at most _SOURCES."""
    epochs = {
        name: counts.get("epochs") or 0
        for record in records
        for name, counts in record["sources"].items()
    }
    return sorted(epochs, key=lambda name: -epochs[name])[:_SOURCES]


def _epochs(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    traces: list[Record] = []
    omitted = 0
    for run in runs:
        records = _counts(run)
        names = _most_read(records)
        omitted += len({name for r in records for name in r["sources"]}) - len(names)
        short = short_names(names)
        for name in names:
            known = [r for r in records if r["sources"].get(name, {}).get("epochs") is not None]
            y = [0.0, *(r["sources"][name]["epochs"] for r in known)]
            label = f"{run.name}: {short[name]}" if len(runs) > 1 else short[name]
            mode = "lines+markers" if len(y) < _FEW else "lines"
            traces.append(_curve(label, len(traces), mode, y=y, axes=axes([_START, *known])))
    if traces:
        caption = "Epochs of each source"
        if omitted:
            caption += f" (those read most; {omitted} others are in the table)"
        top = max(value for trace in traces for value in trace["y"])
        traces += _changes(runs, top)
        yield Plot(caption, traces, {"yaxis": {"rangemode": "tozero"}})


def _shares(run: RecordedRun, of_run: str) -> Iterator[Block]:
    """Yield a plot of the sources' shares in the tokens between two records."""
    records = [_START, *_counts(run)]
    names = _most_read(records)
    if len(names) < 2:
        return
    places = [_START]
    shares: list[dict[str, float]] = []
    for before, now in itertools.pairwise(records):
        read = {
            name: (counts.get("tokens") or 0) - (before["sources"].get(name, {}).get("tokens") or 0)
            for name, counts in now["sources"].items()
        }
        total = sum(read.values())
        if total > 0 and min(read.values()) >= 0:
            places.append(now)
            shares.append({name: tokens / total for name, tokens in read.items()})
    if not shares:
        return
    rows = {name: [share.get(name, 0.0) for share in shares] for name in names}
    short = short_names(names)
    if any(share.keys() - rows.keys() for share in shares):
        rows["others"] = [1 - sum(some[at] for some in rows.values()) for at in range(len(shares))]
    traces = []
    for number, (name, values) in enumerate(rows.items()):
        # each share holds for the interval that ends at its record
        trace = _curve(short.get(name, name), number, y=[values[0], *values], axes=axes(places))
        trace["line"] |= {"shape": "vh", "width": 0.5}
        traces.append(trace | {"stackgroup": "shares"})
    layout = {"yaxis": {"range": [0, 1], "tickformat": ".0%"}}
    caption = f"Share of each source in the tokens trained on{of_run}"
    yield Plot(caption, [*traces, *_changes([run], 1.0)], layout)


def _changes(runs: Sequence[RecordedRun], top: float) -> list[Record]:
    """Return vertical lines up to `top` where phases of the data begin after the start."""
    marks = [mark for run in runs for mark in _data_phases(run) if mark[1]["position"]]
    if not marks:
        return []
    records = [record for record, _ in marks for _ in range(3)]
    positions = axes(records)
    for values in positions.values():
        values[2::3] = [None] * len(marks)  # a gap between two lines
    text = [
        f"{phase['seq_length']} tokens: {blend_text(phase['blend'])}"[:99] for _, phase in marks
    ]
    trace = _curve("a phase begins", 6, y=[0.0, top, None] * len(marks), axes=positions)
    trace["line"] |= {"dash": "dot", "width": 1.2}
    return [trace | {"text": [each for each in text for _ in range(3)]}]


def _checkpoints(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    names = "iteration time size_bytes elapsed_s stall_s background"
    yield from _listed("Checkpoints", runs, "checkpoint", names)


def _events(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    rows = [{"run": run.name, **event} for run in runs for event in events(run)]
    if rows:
        yield ReportTable("Events", rows, folded=len(rows) > _FOLDED)


def _listed(
    caption: str, runs: Sequence[RecordedRun], event: str, names: str
) -> Iterator[ReportTable]:
    """Yield a table of fields of an event's records, without those of the test data, if any."""
    rows = [
        {"run": run.name, **{name: record.get(name) for name in names.split()}}
        for run in runs
        for record in run.of(event)
        if record.get("dataset") != "test"
    ]
    if rows:
        yield ReportTable(caption, rows, folded=len(rows) > _FOLDED)


# -- provenance ------------------------------------------------------------------------------------


def _values(
    caption: str, names: Sequence[str], runs: Sequence[RecordedRun], folded: bool = False
) -> ReportTable:
    heads = [f"in {run.name}" for run in runs] if len(runs) > 1 else ["value"]
    rows = [
        {"setting": name, **{h: r.config.get(name) for h, r in zip(heads, runs, strict=True)}}
        for name in names
    ]
    return ReportTable(caption, rows, exact=True, folded=folded)


def _settings(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    chosen = sorted({name for run in runs for name in run.chosen})
    names = list(dict.fromkeys([*chosen, *sorted({n for run in runs for n in run.config})]))
    if chosen:
        few = len(runs) == 1
        yield _values("Settings that differ from their defaults", chosen, runs, folded=not few)
    if names:
        yield _values("All settings", names, runs, folded=True)


def _provenance(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    for run in runs if len(runs) < _MANY else ():
        record, why_not = provenance(run)
        entries: Record = {"metrics": str(run.measured.run.path), **record}
        if why_not:
            entries |= {name: run.start.get(name) for name in ("versions", "device", "places")}
            yield (f"{run.name}: from the metrics file, without a checkpoint's record: {why_not}.")
        rows = [{"what": name, "value": value} for name, value in _flat("", entries)]
        yield ReportTable(f"Provenance of {run.name}", rows, exact=True, folded=len(runs) > 1)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested value, each with the path of names to it."""
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
