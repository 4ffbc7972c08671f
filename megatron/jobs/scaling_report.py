"""Runs that belong together: efficiency against the smallest, the best of a sweep; a table, rows of CSV and a picture.

Two runs are told apart only where the ranges of their steady steps do not overlap: nothing else is called better.
Needs no torch.
"""
from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.drawing import pyplot, save, tidy
from megatron.jobs.scaling import Figures
from megatron.model.formulas import device_unit
from megatron.planner.published import Published, published
from megatron.planner.table import Table

WEAK, STRONG, SWEEP, OTHER = "weak", "strong", "sweep", "other"
_TITLES = {WEAK: "weak scaling: batch per replica fixed", STRONG: "strong scaling: batch fixed", OTHER: "runs"}
_ALIKE = (
    "num_layers", "hidden_size", "seq_length", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "micro_batch_size", "virtual_pipeline_model_parallel_size", "fp16", "bf16", "recompute_granularity",
)  # fmt: skip
Range = tuple[float, float, float]
"""Low end, value, high end."""


@dataclass(frozen=True)
class Series:
    """Runs of which one thing varies.

    kind       weak (batch per replica is fixed), strong (batch is fixed), sweep (of `parameter`) or other
    members    in order of what varies
    base       the smallest valid run of weak or strong scaling, against which efficiency is taken
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
        return "GCD" if self.published else device_unit(self.members[0].run.device)

    def efficiency(self, member: Figures) -> Range | None:
        """Throughput per device over that of the base; the ends are those of the slowest steps of one against the
        fastest of the other. None without a base and for a run that is invalid."""
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
        """What there is to say about a run, the gravest first."""
        said = [*filter(None, [member.run.failure]), *member.problems, *member.notes]
        if self.kind == SWEEP and len(self.members) > 1 and member in (best := self.best()):
            said.append("best" if len(best) == 1 else f"as good as any: {len(best)} runs are best within their spread")
        return said

    def value(self, member: Figures) -> float | None:
        """What varies, of a run."""
        return member.run.point.get("value") if self.kind == SWEEP else member.run.world_size


def throughput(m: Figures) -> Range | None:
    """Tokens per second of a device: of the slowest steady step, the median and the fastest. A single step could have
    been any."""
    rate = m.tokens_per_s_per_device
    if rate is None or m.step_s is None:
        return None
    fast, slow = m.range_s or (0.0, math.inf)
    return rate * m.step_s / slow, rate, rate * m.step_s / fast if fast else math.inf


def compare(measured: Sequence[Figures]) -> list[Series]:
    """Put runs into series: by the experiment that their points name, else by model and layout of a replica."""
    groups: dict[str, list[Figures]] = {}
    for each in measured:
        key = each.run.point.get("experiment") or [each.run.get(name) for name in _ALIKE]
        groups.setdefault(str(key), []).append(each)
    return [_series(groups[key]) for key in sorted(groups)]


def _series(members: list[Figures]) -> Series:
    run, point = members[0].run, members[0].run.point
    known = published(run.get("num_layers"), run.get("hidden_size"))
    name = point.get("experiment") or (known.name if known else f"{run.get('num_layers')} layers")
    if point.get("kind") == SWEEP:
        members.sort(key=lambda m: m.run.point.get("value") or 0)
        return Series(name, SWEEP, str(point.get("parameter") or "value"), tuple(members), None, known)
    members.sort(key=lambda m: m.run.world_size or 0)
    valid = [m for m in members if m.valid and m.run.world_size]
    kind = _kind(valid)
    return Series(name, kind, "devices", tuple(members), None if kind == OTHER else valid[0], known)


def _kind(members: Sequence[Figures]) -> str:
    """What is fixed while the number of devices varies."""
    if len({m.run.world_size for m in members}) < 2:
        return OTHER
    if len({m.batch for m in members}) == 1:
        return STRONG
    return WEAK if len({m.batch / m.run.replicas for m in members if m.batch and m.run.replicas}) == 1 else OTHER


# -- tables ------------------------------------------------------------------------------------------------------------


def state(m: Figures) -> str:
    """'valid', 'invalid', or what became of a run without figures."""
    if m.run.failure is not None:
        return "not run" if m.run.failure == "not run yet" else "failed"
    return "valid" if m.valid else "invalid"


_FIGURES = (
    "steady", "step_s", "spread", "tokens_per_s", "tokens_per_s_per_device", "model_tflops", "hardware_tflops", "mfu",
    "hfu", "memory_bytes", "skipped",
)  # fmt: skip
_HEADS = {
    "run": "run", "devices": "{}s", "layout": "TPxPPxDP", "micro_batch": "micro", "global_batch": "batch",
    "step_s": "s/step", "spread": "spread", "tokens_per_s": "tokens/s", "model_tflops": "TFLOP/s", "mfu": "MFU",
    "hfu": "HFU", "published_hfu": "published", "efficiency": "efficiency", "within": "within", "memory_bytes": "GiB",
    "state": "state",
}  # fmt: skip
"""Heads of the table's columns, by the names of the CSV file; {} is a device."""
_SHARES = {"spread", "mfu", "hfu", "published_hfu", "efficiency"}


def _row(series: Series, m: Figures) -> dict[str, Any]:
    """A run's values by the names of the CSV file, unrounded; None where there is no figure."""
    sizes = (m.run.get(f"{name}_model_parallel_size") for name in ("tensor", "pipeline"))
    efficiency = series.efficiency(m)
    return {
        "series": series.name, "kind": series.kind, "parameter": series.parameter, "value": series.value(m),
        "run": m.run.name, "devices": m.run.world_size, "micro_batch": m.run.get("micro_batch_size"),
        "layout": "x".join(str(size or "?") for size in (*sizes, m.run.replicas)),
        "global_batch": m.batch or m.run.get("global_batch_size"), **{name: getattr(m, name) for name in _FIGURES},
        "published_hfu": series.published.percent / 100 if series.published else None,
        "efficiency": efficiency[1] if efficiency else None,
        "within": f"{efficiency[0]:.1%} to {efficiency[2]:.1%}" if efficiency and efficiency[2] < math.inf else None,
        "state": state(m), "remarks": "; ".join(series.remarks(m)),
    }  # fmt: skip


def _text(name: str, value: Any) -> str:
    """A cell, with three digits of what is measured.

    >>> _text("step_s", 69.234), _text("tokens_per_s", 12345.6), _text("mfu", 0.3614), _text("hfu", None)
    ('69.2', '12,346', '36.14 %', '')
    """
    if value is None or isinstance(value, str):
        return value or ""
    if name in _SHARES:
        return f"{100 * value:.2f} %"
    value = value / 2**30 if name == "memory_bytes" else value
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 999.5 else f"{value:.3g}"


def table(series: Series) -> Table:
    """The columns of which some row has a value."""
    says = f"throughput against {series.parameter}" if series.kind == SWEEP else _TITLES[series.kind]
    if series.base is not None:
        says += f"; efficiency against {series.base.run.world_size} {series.device}s"
    rows = [_row(series, m) for m in series.members]
    shown = [name for name in _HEADS if any(row[name] is not None for row in rows)]
    return Table(f"{series.name} ({says})", tuple(_HEADS[name].format(series.device) for name in shown),
                 [tuple(_text(name, row[name]) for name in shown) for row in rows])  # fmt: skip


def as_csv(everything: Sequence[Series]) -> str:
    """All runs, unrounded, with the remarks."""
    rows = [_row(series, m) for series in everything for m in series.members]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


# -- the picture -------------------------------------------------------------------------------------------------------


def draw(everything: Sequence[Series], path: Path) -> bool:
    """Draw efficiency of weak and strong scaling with the published point, throughput of each sweep; bars are the range
    of the steady steps. False where there is nothing to draw. Raises ConfigError without matplotlib, or where the file
    cannot be written."""
    plot = pyplot(instead="give --no-plots")
    shown = [series for series in everything if series.kind == SWEEP or series.base is not None]
    if not shown:
        return False
    figure, row = plot.subplots(1, len(shown), figsize=(5.4 * len(shown), 4.4), layout="constrained", squeeze=False)
    for axes, series in zip(row[0], shown, strict=True):
        sweep = series.kind == SWEEP
        axes.set_title(series.name, fontsize=11)
        axes.set_xlabel(series.parameter if sweep else f"{series.device}s")
        axes.set_ylabel(f"tokens/s per {series.device}" if sweep else f"efficiency of {series.kind} scaling")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        points = [(series.value(m), throughput(m) if sweep else series.efficiency(m))
                  for m in series.members if m.valid]  # fmt: skip
        known = [(x, y[1], y[1] - y[0], y[2] - y[1] if y[2] < math.inf else 0.0) for x, y in points if x and y]
        xs, ys, *bars = zip(*known, strict=True) if known else ((), (), (), ())
        axes.errorbar(xs, ys, bars, fmt="o-", capsize=3, label=series.name)
        target = getattr(series.published, series.kind, None)
        if target is not None:
            axes.plot(*target, "*", markersize=12, markeredgecolor="black", label=f"published: {100 * target[1]:.4g} %")
        tidy(axes)
        axes.set_ylim(0, None)
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    save(figure, path)
    return True
