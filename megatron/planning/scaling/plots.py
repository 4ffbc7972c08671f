"""Pictures of a report: scaling with its ideal and the published points, and throughput against what a sweep varies."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.drawing import plain_numbers, pyplot, save, tidy
from megatron.model.formulas import paper_flops
from megatron.planning.scaling.compare import STRONG, SWEEP, WEAK, Series
from megatron.planning.scaling.figures import Figures

_COLOURS = ("#3b6ea5", "#c8553d", "#5a9e6f", "#8e6bb0", "#b8860b", "#4a4a4a")
_PUBLISHED_VOCABULARY, _PUBLISHED_SEQUENCE = 51200, 2048
_TITLES = {
    WEAK: "Weak scaling: the batch grows with the replicas", STRONG: "Strong scaling: one batch for all sizes",
}  # fmt: skip


def draw_all(everything: Sequence[Series], folder: Path) -> list[Path]:
    """Draw what the series allow into `folder`: weak_scaling.png, strong_scaling.png, sweep_<parameter>.png.

    Returns the files. Raises ConfigError without matplotlib, or where the folder cannot be written.
    """
    pyplot(instead="give --no-plots")
    files = []
    for kind in (WEAK, STRONG):
        found = [s for s in everything if s.kind == kind and _points(s)]
        if found:
            files.append(save(_scaling(found, _TITLES[kind]), folder / f"{kind}_scaling.png"))
    sweeps = [s for s in everything if s.kind == SWEEP]
    for parameter in dict.fromkeys(s.parameter for s in sweeps):
        found = [s for s in sweeps if s.parameter == parameter and (_points(s) or _failures(s))]
        if any(_points(s) for s in found):
            name = "".join(c if c.isalnum() else "_" for c in parameter.lower())
            files.append(save(_sweep(found, parameter), folder / f"sweep_{name}.png"))
    return files


def _points(series: Series) -> list[tuple[float, Figures]]:
    """(what varies, run) of the valid runs, where it is known."""
    return [(x, m) for m in series.members if m.valid and (x := series.value(m)) is not None and m.tokens_per_s]


def _failures(series: Series) -> list[tuple[float, Figures]]:
    return [(x, m) for m in series.members if m.run.failure and (x := series.value(m)) is not None and m.run.point]


def _doubling_axis(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic axis with the values themselves as ticks, as many as fit; the largest has its tick in any case."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    apart = (max(values) / min(values)) ** 0.12
    ticks: list[float] = []
    for value in sorted(set(values), reverse=True):
        if not ticks or ticks[-1] / value >= apart:
            ticks.append(value)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    low, high = min(values), max(values)
    margin = (high / low) ** 0.06 if high > low else 1.4
    axes.set_xlim(low / margin, high * margin)


def _scaling(found: Sequence[Series], title: str) -> Any:
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(10.5, 4.4), layout="constrained")
    everywhere: list[float] = []
    devices = found[0].devices
    for series, colour in zip(found, _COLOURS * len(found), strict=False):
        everywhere += _throughput(left, series, colour)
        everywhere += _efficiency(right, series, colour)
    for axes in (left, right):
        tidy(axes)
        _doubling_axis(axes, everywhere)
        axes.set_xlabel(devices)
    left.set_yscale("log")
    plain_numbers(left.yaxis)
    left.set_ylabel("tokens per second")
    left.plot([], [], "--", color="#888888", linewidth=1.0, label="ideal: from the smallest run")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    right.set_ylabel("efficiency against the smallest run (%)")
    low, high = right.get_ylim()
    right.set_ylim(min(low, 80.0) - 2, max(high, 102.0) + 3)
    right.axhline(100, color="#888888", linestyle="--", linewidth=1.0, zorder=1)
    right.legend(frameon=False, fontsize=8, loc="lower left")
    figure.suptitle(title, fontsize=11)
    return figure


def _throughput(axes: Any, series: Series, colour: str) -> list[float]:
    points = _points(series)
    xs, ys = [x for x, _ in points], [m.tokens_per_s or 0.0 for _, m in points]
    axes.plot(xs, ys, "o-", color=colour, markersize=5, linewidth=1.6, label=series.name, zorder=3)
    known, used = series.published, list(xs)
    if known is not None and series.kind == WEAK and known.weak is not None:
        gcds, efficiency = known.weak
        rate = known.tflops * 1e12 * gcds * efficiency / _flops_per_token(known.num_layers, known.hidden_size)
        label = f"published, {known.name} ({known.tflops:g} TFLOP/s per GCD)"
        _star(axes, gcds, rate, colour, label)
        used.append(gcds)
    ideal = [ys[0] * x / xs[0] for x in used]
    line = sorted(zip(used, ideal, strict=True))
    axes.plot(*zip(*line, strict=True), "--", color=colour, alpha=0.55, linewidth=1.0, label="_ideal", zorder=2)
    return used


def _star(axes: Any, x: float, y: float, colour: str, label: str) -> None:
    """A published point, once for all series of its model."""
    if label not in {line.get_label() for line in axes.get_lines()}:
        axes.plot([x], [y], "*", color=colour, markersize=12, markeredgecolor="black", markeredgewidth=0.6,
                  label=label, zorder=4)  # fmt: skip


def _flops_per_token(num_layers: int, hidden_size: int) -> float:
    sequence = _PUBLISHED_SEQUENCE
    return paper_flops(1, sequence, num_layers, hidden_size, _PUBLISHED_VOCABULARY) / sequence


def _efficiency(axes: Any, series: Series, colour: str) -> list[float]:
    points = [(x, 100 * e) for x, m in _points(series) if (e := series.efficiency(m)) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=5, linewidth=1.6, label=series.name,
                  zorder=3)  # fmt: skip
    known = series.published
    target = None if known is None else known.weak if series.kind == WEAK else known.strong
    if known is None or target is None:
        return [x for x, _ in points]
    label = f"published, {known.name}: {100 * target[1]:.4g} %"
    _star(axes, target[0], 100 * target[1], colour, label)
    return [*(x for x, _ in points), target[0]]


def _sweep(found: Sequence[Series], parameter: str) -> Any:
    """Throughput per device; runs that failed are crosses on the lower edge.

    Hardware TFLOP/s, as published; where only some runs recompute their layers these cannot be compared, and it is
    model TFLOP/s, of which three make four with full recomputation.
    """
    figure, axes = pyplot().subplots(figsize=(6.4, 4.4), layout="constrained")
    members = [m for s in found for _, m in _points(s)]
    same = len({m.run.get("recompute_granularity") for m in members}) == 1
    kind, part = ("hardware", 1.0) if same else ("model", 0.75)
    scale, unit = (1.0, "TFLOP/s") if max(_rate(m, kind) for m in members) >= 0.1 else (1000.0, "GFLOP/s")
    everywhere: list[float] = []
    for series, colour in zip(found, _COLOURS * len(found), strict=False):
        points = _points(series)
        xs, ys = [x for x, _ in points], [scale * _rate(m, kind) for _, m in points]
        axes.plot(xs, ys, "o-", color=colour, markersize=5, linewidth=1.6, label=series.name, zorder=3)
        for x, m in _failures(series):
            axes.plot([x], [0.0], "x", color=colour, markersize=8, markeredgewidth=2, clip_on=False, zorder=4)
            axes.annotate(
                _short(m.run.failure or ""), (x, 0.0), (0, 8), textcoords="offset points", rotation=90, fontsize=8,
                ha="center", va="bottom", color=colour,
            )  # fmt: skip
        everywhere += xs + [x for x, _ in _failures(series)]
    for known in {s.published for s in found} - {None}:
        assert known is not None
        label = f"published, {known.name}: {part * known.tflops:.1f} TFLOP/s per GCD"
        axes.axhline(scale * part * known.tflops, color="#666666", linestyle=":", linewidth=1.2, label=label, zorder=1)
    tidy(axes)
    _doubling_axis(axes, everywhere)
    top = axes.get_ylim()[1]
    axes.set_ylim(0, 1.25 * top)  # room for the legend
    axes.set_xlabel(parameter)
    axes.set_ylabel(f"{kind} {unit} per {found[0].devices[:-1]}")
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncol=2)
    axes.set_title(f"Throughput against {parameter}", fontsize=11)
    return figure


def _short(text: str) -> str:
    """The part of a reason before its details."""
    return text.split(":")[0][:28]


def _rate(m: Figures, kind: str) -> float:
    """TFLOP/s of a device; of hardware by the paper's formula where sizes are known, else as the run printed them."""
    if kind == "model":
        return m.model_tflops or 0.0
    return m.paper_tflops or m.hardware_tflops or 0.0
