"""Runs that belong together: efficiency against the smallest, the best of a sweep, tables and a picture. No torch.

Two runs are told apart only where the ranges of their steady steps do not overlap: nothing else is called better.
"""
from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.drawing import pyplot, save, tidy
from megatron.jobs.scaling import Figures, MeasuredRun
from megatron.planning.published import Published, published
from megatron.planning.table import Table

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
    """

    name: str
    kind: str
    parameter: str
    members: tuple[Figures, ...]
    base: Figures | None = None

    @property
    def published(self) -> Published | None:
        """The paper's model, when these runs are of it."""
        run = self.members[0].run
        return published(run.get("num_layers"), run.get("hidden_size"))

    @property
    def devices(self) -> str:
        """What a process has, in words: GCDs where they are or the model is one of the paper's."""
        gcds = self.published is not None or any(m.device == "GCD" for m in self.members)
        return "GCDs" if gcds else "devices"

    def value(self, member: Figures) -> float | None:
        """What varies, of this run."""
        return member.run.point.get("value") if self.kind == SWEEP else member.run.world_size

    def efficiency(self, member: Figures) -> Range | None:
        """Throughput per device over that of the base: weak efficiency in weak scaling, strong in strong scaling; the
        ends are those of the slowest steps of one against the fastest of the other. None without a base and for a run
        that is invalid."""
        base = throughput(self.base) if self.base is not None and member.valid else None
        mine = throughput(member)
        if base is None or mine is None:
            return None
        return mine[0] / base[2], mine[1] / base[1], mine[2] / base[0]

    def best(self) -> list[Figures]:
        """The valid run of most throughput per device, and all that cannot be told apart from it."""
        rates = [(rate, m) for m in self.members if m.valid and (rate := throughput(m))]
        if len(rates) < 2:
            return []
        top = max(rates, key=lambda pair: pair[0][1])
        return [m for rate, m in rates if rate[2] >= top[0][0] or None in (m.range_s, top[1].range_s)]

    def remarks(self, member: Figures) -> list[str]:
        """Everything to say about a run, the gravest first."""
        said = [member.run.failure] if member.run.failure else []
        said += [*member.problems, *member.notes]
        efficiency = self.efficiency(member)
        if efficiency is not None and member is not self.base:
            if efficiency[0] > 1:
                said.append(f"efficiency of {efficiency[1]:.0%}: the smallest run was slowed down by something")
            elif efficiency[2] >= 1:
                said.append("within the spread no slower for each device than the smallest run")
        if self.kind == SWEEP and member in (best := self.best()):
            said.append("best" if len(best) == 1 else f"as good as any: {len(best)} runs are best within their spread")
        return said


def throughput(m: Figures) -> Range | None:
    """Tokens per second of a device: of the slowest steady step, the median and the fastest."""
    rate = m.tokens_per_s_per_device
    if rate is None or m.step_s is None:
        return None
    fast, slow = m.range_s or (m.step_s, m.step_s)
    return rate * m.step_s / slow, rate, rate * m.step_s / fast


def compare(measured: Sequence[Figures]) -> list[Series]:
    """Put runs into series: by the experiment that their points name, else by model and layout of a replica."""
    groups: dict[str, list[Figures]] = {}
    for each in measured:
        groups.setdefault(_key(each.run), []).append(each)
    return [_series(groups[key]) for key in sorted(groups)]


def _key(run: MeasuredRun) -> str:
    names = ("num_layers", "hidden_size", "seq_length", "tensor_model_parallel_size", "pipeline_model_parallel_size",
             "micro_batch_size", "virtual_pipeline_model_parallel_size", "fp16", "bf16",
             "recompute_granularity")  # fmt: skip
    return str(run.point.get("experiment") or [run.get(name) for name in names])


def _series(members: list[Figures]) -> Series:
    run = members[0].run
    known = published(run.get("num_layers"), run.get("hidden_size"))
    sizes = f"{run.get('num_layers')} layers of {run.get('hidden_size')}"
    name = run.point.get("experiment") or (known.name if known else sizes)
    kind = run.point.get("kind") or _kind(members)
    parameter = str(run.point.get("parameter") or "value") if kind == SWEEP else "devices"
    series = Series(name, kind, parameter, tuple(members))
    ordered = sorted(members, key=lambda m: (series.value(m) is None, series.value(m) or 0, m.run.name))
    valid = [m for m in ordered if m.valid and m.run.world_size]
    one_size = len({m.run.world_size for m in valid}) < 2
    comparable = kind in (WEAK, STRONG) and (one_size or _kind(valid) == kind)
    return Series(name, kind, parameter, tuple(ordered), valid[0] if valid and comparable else None)


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


# Name in the CSV file, head in tables, text; {} is what TFLOP/s are per.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("run", "run", str), ("devices", "{}s", "{:,}".format), ("layout", "TPxPPxDP", str), ("micro_batch", "micro", str),
    ("global_batch", "batch", "{:,}".format), ("steady", "steps", str), ("step_s", "s/step", _three),
    ("spread", "spread", "{:.1%}".format), ("tokens_per_s", "tokens/s", _three),
    ("model_tflops", "model TFLOP/s per {}", _three), ("mfu", "MFU", _percent),
    ("hardware_tflops", "hw TFLOP/s per {}", _three), ("hfu", "HFU", _percent),
    ("paper_tflops", "paper's TFLOP/s per {}", _three), ("paper_hfu", "paper's HFU", _percent),
    ("published_hfu", "published", _percent), ("efficiency", "efficiency", _percent),
    ("efficiency_low", "at least", _percent), ("efficiency_high", "at most", _percent),
    ("memory_bytes", "GiB", lambda v: f"{v / 2**30:.1f}"), ("memory_rank", "on rank", str), ("skipped", "skipped", str),
    ("state", "state", str),
)  # fmt: skip


def _row(series: Series, m: Figures) -> dict[str, Any]:
    """A run's values, unrounded."""
    sizes = [m.run.get(f"{name}_model_parallel_size") for name in ("tensor", "pipeline")]
    low, middle, high = series.efficiency(m) or (None, None, None)
    own = {
        "run": m.run.name, "devices": m.run.world_size, "micro_batch": m.run.get("micro_batch_size"),
        "layout": None if None in sizes else f"{sizes[0]}x{sizes[1]}x{m.run.replicas or '?'}",
        "global_batch": m.batch or m.run.get("global_batch_size"), "steady": m.steady or None, "state": state(m),
        "published_hfu": p.percent / 100 if (p := series.published) else None,
        "efficiency": middle, "efficiency_low": low, "efficiency_high": high,
    }  # fmt: skip
    return {name: own[name] if name in own else getattr(m, name) for name, *_ in _COLUMNS}


def table(series: Series) -> Table:
    """The columns of which some row has a value."""
    says = f"throughput against {series.parameter}" if series.kind == SWEEP else _TITLES.get(series.kind, "runs")
    if series.base is not None:
        says += f"; efficiency against {series.base.run.world_size} {series.devices}"
    rows = [_row(series, m) for m in series.members]
    shown = [column for column in _COLUMNS if any(row[column[0]] is not None for row in rows)]
    cells = [tuple("" if row[name] is None else text(row[name]) for name, _, text in shown) for row in rows]
    heads = tuple(head.format(series.devices[:-1]) for _, head, _ in shown)
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
Efficiency is throughput per device over that of the smallest valid run of the table, at least and at most by the
slowest steps of one and the fastest of the other. Memory is the most that any rank held, and which it was; of rank 0
alone where none is named. Invalid and failed runs enter no efficiency and no curve.
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
                    "value": series.value(m), "remarks": "; ".join(series.remarks(m))}  # fmt: skip
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
        axes.set_title(kind if kind != SWEEP else f"against {parameter}", fontsize=11)
        axes.set_xlabel(parameter if kind == SWEEP else found[0].devices)
        axes.set_ylabel(f"tokens/s per {found[0].devices[:-1]}" if kind == SWEEP else "efficiency (%)")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        for series in found:
            _curve(axes, series)
        tidy(axes)
        axes.set_ylim(0, None if kind == SWEEP else max(105.0, axes.get_ylim()[1]))
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    save(figure, path)
    return True


def _curve(axes: Any, series: Series) -> None:
    sweep, points = series.kind == SWEEP, list[tuple[float, Range]]()
    for m in series.members:
        x, y = series.value(m), throughput(m) if sweep and m.valid else series.efficiency(m)
        if x is not None and y is not None:
            points.append((x, y if sweep else (100 * y[0], 100 * y[1], 100 * y[2])))
        elif sweep and x is not None and m.run.failure:
            axes.plot([x], [0], "x", color="#c8553d", clip_on=False)
    bars = [[y[1] - y[0] for _, y in points], [y[2] - y[1] for _, y in points]]
    axes.errorbar([x for x, _ in points], [y[1] for _, y in points], bars, fmt="o-", capsize=3, label=series.name)
    known = series.published
    target = None if sweep or known is None else known.weak if series.kind == WEAK else known.strong
    if known is not None and target is not None:
        label = f"published, {known.name}: {100 * target[1]:.4g} %"
        axes.plot([target[0]], [100 * target[1]], "*", markersize=12, markeredgecolor="black", label=label)
