"""Runs that belong together: efficiency against the smallest, the best of a sweep, tables and a picture. No torch.

Two runs are told apart only where the ranges of their steady steps do not overlap: nothing else is called better.
"""
from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.drawing import pyplot, save, tidy
from megatron.jobs.scaling import Figures
from megatron.planner.published import Published, published
from megatron.planner.table import Table

WEAK, STRONG, SWEEP, OTHER = "weak", "strong", "sweep", "other"
_TITLES = {WEAK: "weak scaling: batch per replica fixed", STRONG: "strong scaling: batch fixed"}
Range = tuple[float, float, float]
"""Low end, value, high end."""


@dataclass(frozen=True)
class Series:
    """Runs of which one thing varies.

    kind       weak (batch per replica is fixed), strong (batch is fixed), sweep (of `parameter`) or other
    members    in order of what varies
    base       the smallest valid run, against which efficiency is taken; None without one, and for sweeps
    published  the paper's model, when these runs are of it
    """

    name: str
    kind: str
    parameter: str
    members: tuple[Figures, ...]
    base: Figures | None
    published: Published | None

    @property
    def device(self) -> str:
        """What a process has, in a word: a GCD where it is one or the model is one of the paper's."""
        return "GCD" if self.published else self.members[0].device

    def efficiency(self, member: Figures) -> Range | None:
        """Throughput per device over that of the base: weak efficiency in weak scaling, strong in strong scaling; the
        ends are those of the slowest steps of one against the fastest of the other. None without a base and for a run
        that is invalid."""
        base, mine = None if self.base is None else throughput(self.base), throughput(member)
        if base is None or mine is None or not member.valid:
            return None
        return mine[0] / base[2], mine[1] / base[1], mine[2] / base[0]

    def best(self) -> list[Figures]:
        """The valid run of most throughput per device, and all that cannot be told apart from it."""
        rates = [(rate, m) for m in self.members if m.valid and (rate := throughput(m))]
        top = max(rates, key=lambda pair: pair[0][1], default=None)
        return [m for rate, m in rates if top and rate[2] >= top[0][0]]

    def remarks(self, member: Figures) -> list[str]:
        """Everything to say about a run, the gravest first."""
        said = [*filter(None, [member.run.failure]), *member.problems, *member.notes]
        low, middle, high = self.efficiency(member) or (0.0, 0.0, 0.0)
        if low > 1:
            said.append(f"efficiency of {middle:.0%}: the smallest run was slowed down by something")
        elif high >= 1 and member is not self.base:
            said.append("within the spread no slower for each device than the smallest run")
        if self.kind == SWEEP and len(self.members) > 1 and member in (best := self.best()):
            said.append("best" if len(best) == 1 else f"as good as any: {len(best)} runs are best within their spread")
        return said


def value(kind: str, m: Figures) -> float | None:
    """What varies, of a run."""
    return m.run.point.get("value") if kind == SWEEP else m.run.world_size


def throughput(m: Figures) -> Range | None:
    """Tokens per second of a device: of the slowest steady step, the median and the fastest. Of a single step nothing
    is known about what it could have been."""
    rate = m.tokens_per_s_per_device
    if rate is None or m.step_s is None:
        return None
    fast, slow = m.range_s or (0.0, math.inf)
    return rate * m.step_s / slow, rate, rate * m.step_s / fast if fast else math.inf


def compare(measured: Sequence[Figures]) -> list[Series]:
    """Put runs into series: by the experiment that their points name, else by model and layout of a replica."""
    names = ("num_layers", "hidden_size", "seq_length", "tensor_model_parallel_size", "pipeline_model_parallel_size",
             "micro_batch_size", "virtual_pipeline_model_parallel_size", "fp16", "bf16",
             "recompute_granularity")  # fmt: skip
    groups: dict[str, list[Figures]] = {}
    for each in measured:
        key = each.run.point.get("experiment") or [each.run.get(name) for name in names]
        groups.setdefault(str(key), []).append(each)
    return [_series(groups[key]) for key in sorted(groups)]


def _series(members: list[Figures]) -> Series:
    run, point = members[0].run, members[0].run.point
    known = published(run.get("num_layers"), run.get("hidden_size"))
    sizes = f"{run.get('num_layers')} layers of {run.get('hidden_size')}"
    kind = point.get("kind") or _kind(members)
    members.sort(key=lambda m: (value(kind, m) or 0, m.run.name))
    valid = [m for m in members if m.valid and m.run.world_size]
    comparable = kind in (WEAK, STRONG) and _kind(valid) in (kind, OTHER)
    return Series(
        point.get("experiment") or (known.name if known else sizes), kind,
        str(point.get("parameter") or "value") if kind == SWEEP else "devices", tuple(members),
        valid[0] if valid and comparable else None, known,
    )  # fmt: skip


def _kind(members: Sequence[Figures]) -> str:
    """What is fixed while the number of devices varies."""
    worlds = {m.run.world_size for m in members}
    if len(worlds) < 2 or None in worlds:
        return OTHER
    if len({m.batch for m in members if m.batch}) == 1:
        return STRONG
    return WEAK if len({m.batch / m.run.replicas for m in members if m.batch and m.run.replicas}) == 1 else OTHER


# -- tables ------------------------------------------------------------------------------------------------------------


def state(m: Figures) -> str:
    """'valid', 'invalid', or what became of a run without figures."""
    if m.run.failure is not None:
        return "not run" if m.run.failure == "not run yet" else "failed"
    return "valid" if m.valid else "invalid"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _three(value: float) -> str:
    """Three digits, without an exponent.

    >>> _three(0.012345), _three(69.234), _three(12345.6)
    ('0.0123', '69.2', '12,346')
    """
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


# Name in the CSV file, head in tables, text; {} is a device. Without a head: in the CSV file alone.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("run", "run", str), ("devices", "{}s", "{:,}".format), ("layout", "TPxPPxDP", str), ("micro_batch", "micro", str),
    ("global_batch", "batch", "{:,}".format), ("steady", "", str), ("step_s", "s/step", _three),
    ("spread", "spread", "{:.1%}".format), ("tokens_per_s", "tokens/s", _three),
    ("model_tflops", "model TFLOP/s per {}", _three), ("mfu", "MFU", _percent), ("hardware_tflops", "", _three),
    ("hfu", "", _percent), ("paper_tflops", "paper's TFLOP/s per {}", _three), ("paper_hfu", "paper's HFU", _percent),
    ("published_hfu", "published", _percent), ("efficiency", "efficiency", _percent), ("within", "within, %", str),
    ("memory_bytes", "GiB", lambda v: f"{v / 2**30:.1f}"), ("memory_rank", "", str), ("skipped", "", str),
    ("state", "state", str),
)  # fmt: skip
_SHARES = {"model_tflops": "mfu", "paper_tflops": "paper_hfu"}  # which stand for them where the peak is known


def _row(series: Series, m: Figures) -> dict[str, Any]:
    """A run's values, unrounded."""
    sizes = [m.run.get(f"{name}_model_parallel_size") for name in ("tensor", "pipeline")]
    low, middle, high = series.efficiency(m) or (0.0, None, 0.0)
    own = {
        "run": m.run.name, "devices": m.run.world_size, "micro_batch": m.run.get("micro_batch_size"),
        "layout": None if None in sizes else f"{sizes[0]}x{sizes[1]}x{m.run.replicas or '?'}",
        "global_batch": m.batch or m.run.get("global_batch_size"), "steady": m.steady or None, "state": state(m),
        "published_hfu": p.percent / 100 if (p := series.published) else None,
        "efficiency": middle, "within": f"{100 * low:.1f} to {100 * high:.1f}" if 0 < high < math.inf else None,
    }  # fmt: skip
    return {name: own[name] if name in own else getattr(m, name) for name, *_ in _COLUMNS}


def table(series: Series) -> Table:
    """The columns of which some row has a value."""
    says = f"throughput against {series.parameter}" if series.kind == SWEEP else _TITLES.get(series.kind, "runs")
    if series.base is not None:
        says += f"; efficiency against {series.base.run.world_size} {series.device}s"
    rows = [_row(series, m) for m in series.members]
    used = {name for name, head, _ in _COLUMNS if head and any(row[name] is not None for row in rows)}
    shown = [column for column in _COLUMNS if column[0] in used and _SHARES.get(column[0]) not in used]
    cells = [tuple("" if row[name] is None else text(row[name]) for name, _, text in shown) for row in rows]
    heads = tuple(head.format(series.device) for _, head, _ in shown)
    return Table(f"{series.name} ({says})", heads, cells)


def as_markdown(everything: Sequence[Series], pictures: Sequence[str] = ()) -> str:
    """The whole report as Markdown: tables, remarks, pictures, and what the columns mean."""
    lines = ["# Scaling report", ""]
    for series in everything:
        made = table(series)
        said = [f"- {m.run.name}: {text}" for m in series.members for text in series.remarks(m)]
        lines += [f"## {made.title}", "", made.markdown(), "", *said, ""]
    return "\n".join([*lines, *(f"![{name}]({name})\n" for name in pictures), _MEANING])


_MEANING = """\
Medians over steady steps: after the warm-up, of the full batch, not skipped; spread is their range over it. Model FLOPs
leave recomputation out, hardware FLOPs count it; the paper's are 24 k B s L h^2 (1 + s/(6h) + V/(16 L h)), k = 4 with
full recomputation and 3 without (arXiv 2312.12705), and the published figure beside them is theirs for this model.
Efficiency is throughput per device over that of the smallest valid run of the table; it lies within what the slowest
steps of one and the fastest of the other make. Memory is the most that any rank held. Invalid and failed runs enter no
efficiency and no curve. report.csv has all figures.
"""


def as_csv(everything: Sequence[Series]) -> str:
    """All rows, unrounded, with the remarks."""
    out = io.StringIO()
    names = ["series", "kind", "parameter", "value", *(name for name, *_ in _COLUMNS), "remarks"]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for series in everything:
        for m in series.members:
            more = {"series": series.name, "kind": series.kind, "parameter": series.parameter,
                    "value": value(series.kind, m), "remarks": "; ".join(series.remarks(m))}  # fmt: skip
            writer.writerow({**_row(series, m), **more})
    return out.getvalue()


# -- the picture -------------------------------------------------------------------------------------------------------


def draw(everything: Sequence[Series], path: Path) -> bool:
    """Efficiency of weak and strong scaling with the published points, throughput of each sweep with the points that
    failed; bars are the range of the steady steps. False where there is nothing to draw. Raises ConfigError without
    matplotlib, or where the file cannot be written."""
    plot = pyplot(instead="give --no-plots")
    panels: dict[tuple[str, str], list[Series]] = {}
    for series in everything:
        if series.kind == SWEEP or series.base is not None:
            panels.setdefault((series.kind, series.parameter), []).append(series)
    if not panels:
        return False
    figure, row = plot.subplots(1, len(panels), figsize=(5.4 * len(panels), 4.4), layout="constrained", squeeze=False)
    for axes, ((kind, parameter), found) in zip(row[0], panels.items(), strict=True):
        sweep, device = kind == SWEEP, found[0].device
        axes.set_title(f"against {parameter}" if sweep else f"{kind} scaling", fontsize=11)
        axes.set_xlabel(parameter if sweep else f"{device}s")
        axes.set_ylabel(f"tokens/s per {device}" if sweep else "efficiency (%)")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        for series in found:
            _curve(axes, series)
        tidy(axes)
        axes.set_ylim(0, None if sweep else max(105.0, axes.get_ylim()[1]))
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    save(figure, path)
    return True


def _curve(axes: Any, series: Series) -> None:
    sweep, scale = series.kind == SWEEP, 1 if series.kind == SWEEP else 100
    points = [(x, throughput(m) if sweep else series.efficiency(m)) for m in series.members
              if m.valid and (x := value(series.kind, m)) is not None]  # fmt: skip
    known = [(x, y[1] * scale, (y[1] - y[0]) * scale, (y[2] - y[1]) * scale if y[2] < math.inf else 0.0)
             for x, y in points if y]  # fmt: skip
    xs, ys, *bars = zip(*known, strict=True) if known else ((), (), (), ())
    axes.errorbar(xs, ys, bars, fmt="o-", capsize=3, label=series.name)
    failed = [x for m in series.members if m.run.failure and (x := value(series.kind, m)) is not None]
    axes.plot(failed, [0] * len(failed), "x", color="#c8553d", markersize=9)
    paper = series.published
    target = None if sweep or paper is None else paper.weak if series.kind == WEAK else paper.strong
    if paper is not None and target is not None:
        label = f"published, {paper.name}: {100 * target[1]:.4g} %"
        axes.plot([target[0]], [100 * target[1]], "*", markersize=12, markeredgecolor="black", label=label)
