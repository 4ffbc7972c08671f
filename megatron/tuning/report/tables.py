"""trials.csv and trials.md: all trials, what the best one gains, what every value costs."""
from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.planning.search.tables import first_problem
from megatron.planning.table import Table
from megatron.tuning.layouts import Layout
from megatron.tuning.report.best import lacking
from megatron.tuning.report.context import (
    GIB,
    ReportContext,
    amount,
    kinds,
    percent,
    save_text,
    state_of,
    value_key,
    value_text,
)
from megatron.tuning.report.doubts import doubts, failing
from megatron.tuning.report.importance import Importance, OfValue, Worth
from megatron.tuning.report.plots import prediction_words
from megatron.tuning.types import FAILED, Trial, Value, objective_value, seconds_cost

_LONGEST_REASON = 160
_SIZES = {"nodes", "processes"}  # parameters that are columns
_LITTLE = 0.4
"""R2 below which importances are called doubtful."""


def record(trial: Trial, context: ReportContext) -> dict[str, Any]:
    """A trial as one flat row, unrounded; None where there is no figure."""
    candidate, result = trial.candidate, trial.result
    row: dict[str, Any] = {
        "trial": trial.number, "state": state_of(trial), "reason": result.reason if result else None, "by": trial.by,
        "processes": candidate.processes, "nodes": candidate.nodes, "tokens_per_step": candidate.tokens,
    }  # fmt: skip
    figures = ("step_s", "spread", "steady", "tokens_per_s", "tokens_per_s_per_device", "model_tflops",
               "hardware_tflops", "memory_bytes", "skipped", "nan")  # fmt: skip
    row |= {name: getattr(result, name) if result else None for name in figures}
    step_s = result.step_s if result else None
    row["node_hours_per_gtoken"] = (
        objective_value(seconds_cost(step_s, candidate, "node_hours"), "node_hours") if step_s else None
    )
    lasted = trial.ended - trial.started if trial.ended is not None and trial.started is not None else None
    row |= {
        "predicted_step_s": candidate.step_s, "predicted_memory_bytes": candidate.memory_bytes, "seconds": lasted,
        "started": trial.started, "hosts": " ".join(trial.hosts), "folder": trial.folder,
        "notes": "; ".join(result.notes) if result else None,
    }  # fmt: skip
    values = {p.name: _exact(candidate.values.get(p.name)) for p in context.parameters}
    # A variable of a space may have the name of a column.
    values = {f"variable {name}" if name in row.keys() - _SIZES else name: text for name, text in values.items()}
    first = {name: row[name] for name in ("trial", "state", "reason", "by")}
    return first | values | row


def write_trials_csv(path: Path, context: ReportContext) -> Path:
    return save_csv(path, [record(trial, context) for trial in context.trials])


def write_importance_csv(
    path: Path, found: Sequence[Worth], measured: Importance, predicted: Importance | None
) -> Path:
    """A row for each value of each parameter."""
    rows = [
        {"parameter": worth.parameter.name, "importance": measured.shares.get(worth.parameter.name),
         "importance_by_planner": predicted.shares.get(worth.parameter.name) if predicted else None,
         "value": _exact(v.value), "best": value_key(v.value) == value_key(worth.best), "valid_layouts": v.valid,
         "failed_layouts": v.failed, "loss": v.loss}
        for worth in found for v in worth.values
    ]  # fmt: skip
    return save_csv(path, rows)


def _exact(value: Value) -> str:
    """As users read it, but no digit less."""
    return str(value) if isinstance(value, float) else value_text(value)


def save_csv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return save_text(path, text.getvalue())


def summary(context: ReportContext) -> list[str]:
    """What came of the search, as sentences for a document and for a terminal."""
    ended = [t for t in context.trials if t.result is not None]
    sample = f"a sample of {context.sampled:,} of " if context.sampled else ""
    of = f" (the valid ones of {sample}{context.combinations:,} combinations)" if context.combinations else ""
    again = sum(t.confirms for t in ended)
    more = f"; {again} more trial(s) measured leading ones again" if again else ""
    lines = [f"{len(context.layouts)} of {len(context.candidates):,} layouts{of} were tried, searched by "
             f"{context.search}{more}."]  # fmt: skip
    failed = kinds(ended)
    if failed:
        lines.append("Without valid figures: " + ", ".join(f"{n} {kind}" for kind, n in failed.items()) + ".")
    unfinished = [str(t.number) for t in context.trials if t.result is None]
    if unfinished:
        lines.append(f"Not finished: trial {', '.join(unfinished)}.")
    best = context.best
    if best is None:
        return [*lines, *failing(context, None), "No layout has valid figures: there is no best layout."]
    result = best.result
    assert result.step_s is not None
    spread = f" (spread {percent(result.spread)})" if result.spread is not None else ""
    memory = f", {result.memory_bytes / GIB:.2f} GiB on its fullest rank" if result.memory_bytes else ""
    apart = f": measured {len(best.runs)} times, {percent(best.apart)} apart" if best.apart is not None else ""
    lines.insert(0, f"Best: {best.candidate.key} ({best.numbers}{apart}): {context.written(context.value(best))}, "
                 f"{result.step_s:.4g} s a step over {result.steady} steady steps{spread}{memory}.")  # fmt: skip
    lines[1:1] = [*doubts(context, best), *_gains(context, best)]
    words = prediction_words(context)
    return [*lines, f"The planner's {words}."] if words else lines


def _gains(context: ReportContext, best: Layout) -> list[str]:
    """Over the layout that the planner ranks first, and over the median of the valid ones."""
    lines, unit = [], "throughput" if context.objective == "tokens_per_s" else "throughput of a node"
    known = [(context.predicted(c), c.index, c) for c in context.candidates]
    ranked = sorted((p if context.objective == "node_hours" else -p, i, c) for p, i, c in known if p is not None)
    if ranked and len(ranked) == len(known):
        first = ranked[0][2]
        tried = next((one for one in context.layouts if one.candidate.index == first.index), None)
        if tried is None:
            lines.append(f"The planner's first, {first.key}, was not tried.")
        elif not tried.valid:
            lines.append(f"The planner's first, {first.key} ({tried.numbers}): {state_of(tried)}.")
        elif tried.number == best.number:
            lines.append("It is the planner's first.")
        else:
            gain = context.cost(tried) / context.cost(best) - 1
            lines.append(f"{percent(gain)} more {unit} than the planner's first, {first.key} ({tried.numbers}).")
    costs = sorted(context.cost(one) for one in context.valid)
    if len(costs) > 2:
        median = (costs[(len(costs) - 1) // 2] + costs[len(costs) // 2]) / 2
        lines.append(f"{percent(median / context.cost(best) - 1)} more {unit} than the median of {len(costs)} valid "
                     "layouts.")  # fmt: skip
    return lines


def layouts_table(context: ReportContext) -> Table:
    """Valid layouts, best first: how often each was measured, and how far its runs lie apart."""
    names = [p.name for p in context.varied()]
    unit = "tokens/s" if context.objective == "tokens_per_s" else "node-h/Gtok"
    columns = ("trials", *names, unit, "to the best", "s/step", "spread", "runs", "apart", "planner", "GiB",
               "proposed by")  # fmt: skip
    rows = []
    for one in sorted(context.valid, key=lambda one: (context.cost(one), one.number)):
        result, predicted = one.result, one.candidate.step_s
        assert result.step_s is not None
        rows.append((
            one.numbers.partition(" ")[2], *(value_text(one.candidate.values.get(name)) for name in names),
            amount(context.value(one)), context.against_best(loss) if (loss := context.loss(one)) else "best",
            f"{result.step_s:.4g}", "-" if result.spread is None else percent(result.spread),
            f"{len(one.runs)}" + (f" of {len(one.runs) + len(one.failures)}" if one.failures else ""),
            "-" if one.apart is None else percent(one.apart),
            "-" if predicted is None else f"{100 * (predicted / result.step_s - 1):+.1f} %",
            "-" if not result.memory_bytes else f"{result.memory_bytes / GIB:.2f}", one.by,
        ))  # fmt: skip
    return Table("valid layouts, the best first", columns, rows)


def failures_table(context: ReportContext) -> Table:
    rows = []
    for trial in context.trials:
        if trial.result is not None and not trial.valid:
            kind = state_of(trial) if trial.result.status == FAILED else "invalid"
            rows.append((str(trial.number), trial.candidate.key, kind, _one_line(trial.result.reason or "")))
    return Table("trials without valid figures", ("trial", "layout", "ended", "reason"), rows)


def worth_table(context: ReportContext, found: Sequence[Worth], measured: Importance) -> Table:
    """What each parameter is worth, the most important first."""
    rows = []
    for worth in sorted(found, key=lambda w: (-measured.shares.get(w.parameter.name, 0.0), -w.spread)):
        share = measured.shares.get(worth.parameter.name)
        others = [v for v in worth.values if value_key(v.value) != value_key(worth.best)]
        rows.append((worth.parameter.name, "-" if share is None else f"{100 * share:.0f} %", value_text(worth.best),
                     ", ".join(_cost_words(context, v) for v in others)))  # fmt: skip
    columns = ("parameter", "importance", "best", f"{_counted(context)} with others")
    return Table("what each parameter is worth", columns, rows)


def _counted(context: ReportContext) -> str:
    return "throughput" if context.objective == "tokens_per_s" else "node-hours"


def _cost_words(context: ReportContext, value: OfValue) -> str:
    if value.loss is not None:
        return f"{value_text(value.value)}: {context.against_best(value.loss)}"
    return f"{value_text(value.value)}: " + (f"failed ({value.failed})" if value.failed else "not tried")


def rejections_table(context: ReportContext) -> Table | None:
    if context.rejections is None or not context.rejections.counts:
        return None
    rows = [
        (f"{count:,}", reason, first_problem(context.rejections.examples.get((unit, reason), "")))
        for (unit, reason), count in context.rejections.counts.most_common()
    ]
    return Table("combinations that are no layouts", ("how many", "why", "for example"), rows)


def write_markdown(
    path: Path, context: ReportContext, found: Sequence[Worth], measured: Importance, predicted: Importance | None,
    pictures: Sequence[Path], command: str | None, remarks: Sequence[str],
) -> Path:  # fmt: skip
    """The whole report: summary, command, pictures, tables."""
    parts = [f"# {context.title}", "\n".join(f"- {line}" for line in [*summary(context), *remarks])]
    if command is not None:
        parts += ["The best layout for a real run:", f"```\n{command}\n```"]
    if context.best is not None and (needs := lacking(context.best.candidate)):
        items = (line if line[:1].isdigit() else f"- {line}" for line in needs)
        parts.append("It still needs, as more flags behind these:\n\n" + "\n".join(items))
    parts += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    if found:
        parts.append(_section(worth_table(context, found, measured), _importance_words(context, measured, predicted)))
    fixed = f"All of them with: `{shlex.join(context.flags)}`" if context.flags else ""
    tables = ((layouts_table(context), fixed), (failures_table(context), ""), (rejections_table(context), ""))
    parts += [_section(table, words) for table, words in tables if table is not None and table.rows]
    return save_text(path, "\n\n".join(parts) + "\n")


def _importance_words(context: ReportContext, measured: Importance, predicted: Importance | None) -> str:
    if measured.refused is not None:
        words = f"No importances: {measured.refused}."
    else:
        words = (
            f"Importance: part of the variance of the cost that the parameter explains alone (fANOVA over "
            f"{measured.layouts} valid layouts, which the search chose: not a fair sample of the space)."
        )
        if measured.trusted is not None:
            words += f" Trees foretell the layouts that they have not seen with an R2 of {max(measured.trusted, 0):.2f}"
            words += ": these importances mean little." if measured.trusted < _LITTLE else "."
    if predicted is not None and predicted.shares:
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in predicted.shares.items())
        words += f" By the planner's predictions for {predicted.layouts} candidates it would be: {shares}."
    counted = _counted(context).capitalize()
    return words + f" {counted} with another value: that of the best layout which has it, against the best of all."


def _section(table: Table, words: str = "") -> str:
    safe = Table(table.title, table.columns, [tuple(_cell(text) for text in row) for row in table.rows])
    title = table.title[0].upper() + table.title[1:]
    return "\n\n".join(part for part in (f"## {title}", words, safe.markdown()) if part)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."
