"""Pictures of a tuning: its trajectory, the objective against each parameter and against memory, the planner's error.

Colours are those of Okabe and Ito, which colour-blind readers tell apart; kinds of points differ in shape, too.
"""
from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.drawing import plain_numbers, pyplot, save, tidy
from megatron.tuning.layouts import Layout, best_layout
from megatron.tuning.report.context import GIB, ReportContext, kinds, percent, state_of
from megatron.tuning.report.importance import Importance
from megatron.tuning.types import OUT_OF_MEMORY, Trial, seconds_cost

BLUE, RED, GREEN, ORANGE, SKY, PINK, GREY = (
    "#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#888888"
)  # fmt: skip
_LOOKS = ((ORANGE, "s"), (BLUE, "o"), (GREEN, "^"), (PINK, "D"), (SKY, "v"))
_LOG_FROM = 8.0
"""Costs that differ by more have a logarithmic axis."""


def value_axis(axes: Any, context: ReportContext, values: Sequence[float]) -> None:
    """The objective upwards."""
    if context.objective == "node_hours" and values and max(values) / min(values) > _LOG_FROM:
        axes.set_yscale("log")
    axes.set_ylabel(context.label)
    plain_numbers(axes.yaxis)


def headline(context: ReportContext, figure: Any, text: str) -> None:
    """The space's title and the best layout above a figure."""
    lines = [text]
    if (best := context.best) is not None:
        layout = best.candidate.key.replace(",", ", ")
        what = f"best: {layout} ({best.numbers}), {context.written(context.value(best))}"
        lines += textwrap.wrap(what, int(12.5 * figure.get_figwidth()), break_on_hyphens=False)
    figure.suptitle("\n".join(lines), fontsize=10)


def draw_trajectory(context: ReportContext, path: Path) -> Path:
    """Every trial in order and what would have been named the best after each of them, by all measurements of a layout;
    below, those that ended without valid figures, by how they ended."""
    from matplotlib.ticker import MaxNLocator

    plot = pyplot()
    ended = [trial for trial in context.trials if trial.result is not None]
    rows = list(reversed(kinds(ended)))
    strip = 0.28 * len(rows)
    figure, grid = plot.subplots(
        2 if rows else 1, 1, sharex=True, figsize=(9, 4.4 + strip), layout="constrained", squeeze=False,
        height_ratios=[3.6, strip] if rows else None,
    )  # fmt: skip
    top, bottom = grid[0, 0], grid[-1, 0]
    _values_in_order(top, context)
    tidy(top)
    if rows:
        _strip(bottom, ended, rows)
    most = max((trial.number for trial in ended), default=1)
    bottom.set_xlim(0.5 - 0.02 * most, most + 0.5 + 0.02 * most)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    bottom.set_xlabel("trial")
    headline(context, figure, f"{context.title}: trials in order, searched by {context.search}")
    return save(figure, path)


def _strip(axes: Any, ended: Sequence[Trial], rows: Sequence[str]) -> None:
    for line, kind in enumerate(rows):
        numbers = [trial.number for trial in ended if state_of(trial) == kind]
        axes.plot(numbers, [line] * len(numbers), "x", color=RED, markersize=6, markeredgewidth=1.6)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="x", alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _values_in_order(axes: Any, context: ReportContext) -> None:
    valid = [trial for trial in context.trials if trial.valid]
    _by_maker(axes, context, [(t.number, context.value(t), t) for t in valid if not t.confirms])
    if again := [(t.number, context.value(t)) for t in valid if t.confirms]:
        axes.plot(*zip(*again, strict=True), "D", color=RED, fillstyle="none", markersize=6.5, markeredgewidth=1.5,
                  label="measured again to confirm", zorder=4)  # fmt: skip
    steps = _best_after_each(context)
    if steps:
        axes.step(*zip(*steps, strict=True), where="post", color="black", linewidth=1.3, label="best so far", zorder=2)
    value_axis(axes, context, [context.value(t) for t in valid])
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        # Above the points: where they are is not known.
        axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(-0.01, 1), borderaxespad=0.2)


def _best_after_each(context: ReportContext) -> list[tuple[int, float]]:
    """(trial, value of the layout that was the best by then), from the first valid trial on."""
    ended = [trial for trial in context.trials if trial.result is not None]
    best = ((t.number, best_layout(ended[:count], context.objective)) for count, t in enumerate(ended, 1))
    return [(number, context.value(layout)) for number, layout in best if layout is not None]


def _by_maker(axes: Any, context: ReportContext, points: Sequence[tuple[float, float, Trial | Layout]]) -> None:
    """A point for each (x, y, trial or layout), which looks the same in all pictures by what proposed it."""
    makers = dict.fromkeys(trial.by for trial in context.trials)
    for maker, (colour, marker) in zip(makers, _LOOKS * len(makers), strict=False):
        own = [(x, y) for x, y, trial in points if trial.by == maker]
        if own:
            axes.plot(*zip(*own, strict=True), marker, color=colour, markersize=5, alpha=0.85,
                      label=f"proposed by {maker}", zorder=3)  # fmt: skip


def draw_memory(context: ReportContext, path: Path) -> Path | None:
    """The objective against what the fullest rank held, and what nothing beats in as little memory; None where that is
    not known of any trial."""
    known = [(one.result.memory_bytes / GIB, one) for one in context.valid if one.result.memory_bytes]
    if not known:
        return None
    plot = pyplot()
    figure, axes = plot.subplots(figsize=(7.6, 4.8), layout="constrained")
    axes.plot([m for m, _ in known], [context.value(t) for _, t in known], "o", color=GREY, markersize=4.5, alpha=0.75,
              label="layout", zorder=2)  # fmt: skip
    front: list[tuple[float, Layout]] = []
    for memory, layout in sorted(known, key=lambda found: (found[0], context.cost(found[1]))):
        if not front or context.cost(layout) < context.cost(front[-1][1]):
            front.append((memory, layout))
    axes.step([m for m, _ in front], [context.value(one) for _, one in front], "o-", where="post", color=BLUE,
              markersize=5.5, linewidth=1.4, label="nothing is better in as little memory", zorder=3)  # fmt: skip
    too_big = [one.candidate.memory_bytes / GIB for one in context.layouts
               if one.result.kind == OUT_OF_MEMORY and one.candidate.memory_bytes]  # fmt: skip
    if too_big:
        axes.plot(too_big, [0.03] * len(too_big), "x", color=RED, markersize=6, markeredgewidth=1.6, zorder=4,
                  transform=axes.get_xaxis_transform(), label="out of memory (place: by the planner)")  # fmt: skip
    value_axis(axes, context, [context.value(t) for _, t in known])
    low, high = axes.get_ylim()
    if too_big and axes.get_yscale() == "linear":
        axes.set_ylim(low - 0.08 * (high - low), high)
    _capacity(axes, context, max(*(m for m, _ in known), *too_big, 0.0))
    axes.set_xlabel("memory that the fullest rank held, GiB")
    axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))
    tidy(axes)
    figure.legend(frameon=False, fontsize=8, ncols=2, loc="outside lower center")
    headline(context, figure, f"{context.title}: memory")
    return save(figure, path)


def _capacity(axes: Any, context: ReportContext, most: float) -> None:
    """Lines of what a device has and may hold; far from all trials, they are named alone."""
    lines = []
    if context.capacity_bytes is not None:
        lines.append((context.capacity_bytes / GIB, "-", "may be used"))
    whole = None if context.cluster is None else float(context.cluster.memory_gib)
    if whole is not None and not any(abs(place - whole) < 0.05 for place, *_ in lines):
        lines.append((whole, ":", "of a device"))
    for place, style, words in lines:
        if place <= 2.5 * most:
            axes.axvline(place, color=RED, linestyle=style, linewidth=1.2, label=f"{place:.1f} GiB {words}", zorder=1)
        else:
            axes.plot([], [], linestyle=style, color=RED, label=f"{place:.1f} GiB {words}: beyond the right edge")


def draw_predicted(context: ReportContext, path: Path) -> Path | None:
    """Measured against predicted steps; None where the planner predicted none."""
    found = [(one.candidate.step_s, one.result.step_s, one) for one in context.valid
             if one.result.step_s and one.candidate.step_s]  # fmt: skip
    if not found:
        return None
    plot = pyplot()
    figure, axes = plot.subplots(figsize=(6.4, 6.2), layout="constrained")
    _by_maker(axes, context, found)
    low = 0.9 * min(min(p, m) for p, m, _ in found)
    high = 1.1 * max(max(p, m) for p, m, _ in found)
    ends = [low, high]
    axes.plot(ends, ends, color="black", linewidth=1, label="as predicted", zorder=2)
    axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color=GREY, alpha=0.2, linewidth=0,
                      label="within 10 %", zorder=1)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal")
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    axes.tick_params(axis="x", labelrotation=45)
    axes.set_xlabel("seconds of a step by the planner")
    axes.set_ylabel("seconds of a step, measured")
    tidy(axes)
    figure.legend(frameon=False, fontsize=8, ncols=3, loc="outside lower center")
    words = textwrap.fill(f"The planner's {prediction_words(context)}", 78)
    figure.suptitle(f"{context.title}: the planner\n{words}", fontsize=10)
    return save(figure, path)


def prediction_words(context: ReportContext) -> str:
    """How good the planner's predictions were, as a sentence; nothing where it made none."""
    found = [(one.candidate.step_s, one.result.step_s, one.candidate) for one in context.valid
             if one.result.step_s and one.candidate.step_s]  # fmt: skip
    if not found:
        return ""
    errors = [abs(p / m - 1) for p, m, _ in found]
    words = f"steps are {percent(statistics.median(errors))} off in the median, {percent(max(errors))} at most"
    # By what is searched for: a step of a larger batch is longer, and says nothing of the layout.
    costs = [tuple(seconds_cost(s, candidate, context.objective) for s in (p, m)) for p, m, candidate in found]
    pairs = [(a, b) for i, a in enumerate(costs) for b in costs[:i] if a[1] != b[1] and a[0] != b[0]]
    if pairs:
        right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
        better = "faster" if context.objective == "tokens_per_s" else "cheaper"
        words += f"; of two layouts it names the {better} in {100 * right / len(pairs):.0f} % of pairs"
    return words


def draw_importance(
    measured: Importance, predicted: Importance | None, context: ReportContext, path: Path
) -> Path | None:
    """A bar for each parameter's part of the variance: as measured, and as the planner predicts for candidates;
    None where there are too few layouts."""
    shares = measured.shares
    if not shares:
        return None
    others = predicted.shares if predicted is not None else {}
    plot = pyplot()
    figure, axes = plot.subplots(figsize=(7.6, 1.7 + 0.5 * len(shares)), layout="constrained")
    names = sorted(shares, key=lambda name: shares[name])
    width = 0.36 if others else 0.6
    places = range(len(names))
    shift = width / 2 if others else 0.0
    bars = [axes.barh([p + shift for p in places], [100 * shares[n] for n in names], width, color=BLUE,
                      label=f"measured: {measured.layouts} layouts")]  # fmt: skip
    if predicted is not None and others:
        below = axes.barh([p - shift for p in places], [100 * others.get(n, 0.0) for n in names], width, color="white",
                          edgecolor=GREY, hatch="////", label=f"planner: {predicted.layouts} candidates")  # fmt: skip
        bars.append(below)
    for container in bars:
        axes.bar_label(container, fmt="%.0f %%", padding=3, fontsize=8)
    axes.set_yticks(places, names)
    axes.set_xlim(0, 1.12 * max([*(100 * v for v in shares.values()), *(100 * v for v in others.values())]))
    axes.set_xlabel(f"part of the variance of log({'time' if context.objective == 'tokens_per_s' else 'node-hours'} "
                    "for a token), % (fANOVA)")  # fmt: skip
    tidy(axes)
    axes.grid(axis="y", visible=False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle(f"{context.title}: importance of each parameter alone", fontsize=10)
    return save(figure, path)


