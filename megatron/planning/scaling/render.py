"""The table of a report: for a terminal, as Markdown and as CSV."""
from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.planning.scaling.compare import Series
from megatron.planning.scaling.figures import Figures

if TYPE_CHECKING:
    from rich.table import Table


_SHARE = {"model_tflops": "mfu", "hardware_tflops": "hfu", "paper_tflops": "paper_hfu"}
_WORDS = ("run", "layout", "state")  # columns of text


@dataclass(frozen=True)
class Column:
    """A column: its head in tables, its name in the CSV file, its value (unrounded), its text."""

    head: str
    name: str
    value: Callable[[Series, Figures], Any]
    text: Callable[[Any], str] = str


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _three(value: float) -> str:
    """Three digits, without an exponent.

    >>> _three(0.012345), _three(69.234), _three(12345.6)
    ('0.0123', '69.2', '12,346')
    """
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def _layout(series: Series, m: Figures) -> str | None:
    sizes = [m.run.get(f"{name}_model_parallel_size") for name in ("tensor", "pipeline")]
    if None in sizes:
        return None
    chunks = m.run.get("virtual_pipeline_model_parallel_size") or 1
    return f"{sizes[0]}x{sizes[1]}x{m.run.replicas or '?'}" + (f" v{chunks}" if chunks > 1 else "")


def state(m: Figures) -> str:
    """'valid', 'invalid', or what became of a run without figures."""
    if m.run.failure is not None:
        return "not run" if m.run.failure == "not run yet" else "failed"
    return "valid" if m.valid else "invalid"


COLUMNS: tuple[Column, ...] = (
    Column("run", "run", lambda s, m: m.run.name),
    Column("devices", "devices", lambda s, m: m.run.world_size, lambda v: f"{v:,}"),
    Column("TPxPPxDP", "layout", _layout),
    Column("micro", "micro_batch", lambda s, m: m.run.get("micro_batch_size")),
    Column("batch", "global_batch", lambda s, m: m.batch or m.run.get("global_batch_size"), lambda v: f"{v:,}"),
    Column("steps", "steady_steps", lambda s, m: m.steady or None),
    Column("s/step", "step_s", lambda s, m: m.step_s, _three),
    Column("spread", "spread", lambda s, m: m.spread if m.steady > 1 else None, lambda v: f"{100 * v:.1f} %"),
    Column("tokens/s", "tokens_per_s", lambda s, m: m.tokens_per_s, _three),
    Column("model TFLOP/s", "model_tflops", lambda s, m: m.model_tflops, _three),
    Column("MFU", "mfu", lambda s, m: m.mfu, _percent),
    Column("hw TFLOP/s", "hardware_tflops", lambda s, m: m.hardware_tflops, _three),
    Column("HFU", "hfu", lambda s, m: m.hfu, _percent),
    Column("paper's TFLOP/s", "paper_tflops", lambda s, m: m.paper_tflops, _three),
    Column("paper's HFU", "paper_hfu", lambda s, m: m.paper_hfu, _percent),
    Column("published", "published_hfu", lambda s, m: p.percent / 100 if (p := s.published) else None, _percent),
    Column("efficiency", "efficiency", lambda s, m: s.efficiency(m), _percent),
    Column("GiB", "memory_bytes", lambda s, m: m.memory_bytes, lambda v: f"{v / 2**30:.1f}"),
    Column("on rank", "memory_rank", lambda s, m: m.memory_rank),
    Column("skipped", "skipped", lambda s, m: m.skipped if m.run.lines else None),
    Column("state", "state", lambda s, m: state(m)),
)


def cells(series: Series, member: Figures, columns: Sequence[Column]) -> list[str]:
    """A row as text; what is not known is empty."""
    values = [(column, column.value(series, member)) for column in columns]
    return ["" if value is None else column.text(value) for column, value in values]


def used_columns(series: Series) -> list[Column]:
    """Columns of which some row has a value."""
    return [c for c in COLUMNS if any(c.value(series, m) is not None for m in series.members)]


def _head(series: Series, column: Column) -> str:
    if column.name == "devices":
        return series.devices
    return f"{column.head} per {series.devices[:-1]}" if column.name in _SHARE else column.head


def title(series: Series) -> str:
    """A line over the table: what varies and what efficiency means."""
    says = {
        "weak": "weak scaling: batch per replica fixed",
        "strong": "strong scaling: batch fixed",
        "sweep": f"throughput against {series.parameter}",
    }.get(series.kind, "runs")
    against = f"; efficiency against {series.base.run.world_size} {series.devices}" if series.base is not None else ""
    return f"{series.name} ({says}{against})"


def as_table(series: Series) -> Table:
    """A table for a terminal: TFLOP/s only where no part of a peak stands for them."""
    from rich.table import Table

    columns = used_columns(series)
    shares = {column.name for column in columns}
    columns = [c for c in columns if _SHARE.get(c.name) not in shares]
    table = Table(title=title(series), title_justify="left", show_lines=False)
    for column in columns:
        table.add_column(_head(series, column), no_wrap=True, justify="left" if column.name in _WORDS else "right")
    for member in series.members:
        table.add_row(*cells(series, member, columns), style=None if member.valid else "dim")
    return table


def as_markdown(everything: Sequence[Series], pictures: Sequence[str] = ()) -> str:
    """The whole report as Markdown: tables, remarks, pictures, and what the columns mean."""
    lines = ["# Scaling report", ""]
    for series in everything:
        columns = used_columns(series)
        lines += [f"## {title(series)}", "", "| " + " | ".join(_head(series, c) for c in columns) + " |"]
        lines.append("|" + "|".join(" --- " if c.name in _WORDS else " ---: " for c in columns) + "|")
        lines += ["| " + " | ".join(cells(series, m, columns)) + " |" for m in series.members]
        said = [f"- {m.run.name}: {text}" for m in series.members for text in series.remarks(m)]
        lines += ["", *said, ""] if said else [""]
    lines += [f"![{name}]({name})\n" for name in pictures]
    return "\n".join([*lines, *_MEANING]) + "\n"


_MEANING = (
    "Medians over steady steps: after the warm-up, of the full batch, not skipped; spread is their range over it.",
    "Model FLOPs leave recomputation out, hardware FLOPs count it;",
    "the paper's are 24 k B s L h^2 (1 + s/(6h) + V/(16 L h)), k = 4 with full recomputation and 3 without",
    "(arXiv 2312.12705), and the published figure beside them is theirs for this model. Efficiency is throughput per",
    "device over that of the smallest valid run of the table. Memory is the most that any rank held, and which it was;",
    "of rank 0 alone where none is named. Invalid and failed runs enter no efficiency and no curve.",
)


def as_csv(everything: Sequence[Series]) -> str:
    """All rows, unrounded, with the remarks."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["series", "kind", "parameter", "value", *(c.name for c in COLUMNS), "remarks"])
    for series in everything:
        for m in series.members:
            values = ["" if (v := column.value(series, m)) is None else v for column in COLUMNS]
            value = series.value(m)
            head = [series.name, series.kind, series.parameter, "" if value is None else value]
            writer.writerow([*head, *values, "; ".join(series.remarks(m))])
    return out.getvalue()
