"""The objective against each parameter, as small multiples; of one parameter alone, the plot of a scaling question."""
from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from megatron.drawing import pyplot, save, tidy
from megatron.tuning.layouts import Layout
from megatron.tuning.report.context import ReportContext, kinds, value_key, value_text
from megatron.tuning.report.plots import BLUE, GREY, ORANGE, RED, headline, value_axis
from megatron.tuning.types import Parameter, Value

_COLUMNS = 3
_GOLDEN = 0.6180339887
_LONG = 26
"""Characters of all tick labels of a panel that stand side by side."""


def draw_parameters(context: ReportContext, path: Path) -> Path | None:
    """None where nothing varies."""
    parameters = context.varied()
    if not parameters:
        return None
    plot, one = pyplot(), len(parameters) == 1
    columns = min(_COLUMNS, len(parameters))
    rows = math.ceil(len(parameters) / columns)
    size = (7.6, 4.8) if one else (4.0 * columns + 0.4, 3.1 * rows + 1.0)
    figure, grid = plot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, sharey=True)
    panels = list(grid.flat)
    for number, (axes, parameter) in enumerate(zip(panels, parameters, strict=False)):
        value_axis(axes, context, [context.value(t) for t in context.valid])
        axes.set_ylabel(context.label if number % columns == 0 else "")
        _panel(axes, context, parameter, one)
    for axes in panels[len(parameters) :]:
        axes.set_visible(False)
    low, high = panels[0].get_ylim()
    if panels[0].get_yscale() == "linear":  # room for what failed
        panels[0].set_ylim(0.0 if one else low - 0.12 * (high - low), high)
    handles: dict[str, Any] = {}
    for axes in panels[: len(parameters)]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), frameon=False, fontsize=8, ncols=4, loc="outside lower center")
    headline(context, figure, f"{context.title}: {'against ' + parameters[0].name if one else 'each parameter'}")
    return save(figure, path)


def _panel(axes: Any, context: ReportContext, parameter: Parameter, one: bool) -> None:
    best: list[tuple[int, float]] = []
    tried = set[int]()
    for place, value in enumerate(parameter.values):
        with_it = [tried for tried in context.layouts if _has(tried, parameter.name, value)]
        valid = [tried for tried in with_it if tried.valid]
        values = [context.value(tried) for tried in valid]
        # Apart by their numbers: the same in every drawing, and no two at one place.
        places = [place if one else place + 0.5 * (_GOLDEN * tried.number % 1 - 0.5) for tried in valid]
        if not one:
            axes.plot(places, values, "o", color=GREY, markersize=3.5, alpha=0.6, label="layout", zorder=2)
        if valid:
            best.append((place, context.value(min(valid, key=context.cost))))
        if with_it:
            tried.add(place)
        _failed(axes, place, [tried for tried in with_it if not tried.valid], one)
    line = "-" if parameter.ordered else ""
    label = "measured" if one else "best with this value"
    axes.plot([x for x, _ in best], [y for _, y in best], f"o{line}", color=BLUE, markersize=6, label=label, zorder=4)
    if one:
        _predictions(axes, context, parameter)
    labels = [_label(value) for value in parameter.values]
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    longest = max(len(part) for label in labels for part in label.split("\n"))
    if longest * len(labels) > (3 * _LONG if one else 1.9 * _LONG):
        axes.tick_params(axis="x", labelrotation=90 if longest <= 3 else 30)
        for tick in axes.get_xticklabels():
            tick.set_horizontalalignment("center" if longest <= 3 else "right")
            tick.set_rotation_mode("default" if longest <= 3 else "anchor")
    for place, tick in enumerate(axes.get_xticklabels()):
        if place not in tried:
            tick.set_color(GREY)
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_xlabel(parameter.name)
    tidy(axes)
    axes.grid(axis="x", visible=False)


def _has(layout: Layout, name: str, value: Value) -> bool:
    return value_key(layout.candidate.values.get(name)) == value_key(value)


def _failed(axes: Any, place: int, failed: list[Layout], one: bool) -> None:
    """On the lower edge: how many, or of one parameter how they ended."""
    if not failed:
        return
    across = axes.get_xaxis_transform()
    axes.plot([place], [0.035], "x", color=RED, markersize=5.5, markeredgewidth=1.6, transform=across,
              label="ended without valid figures" + ("" if one else ", and how many"), zorder=4)  # fmt: skip
    words = ", ".join(kinds(failed)) if one else f"{len(failed)}"
    axes.text(place, 0.07, words, transform=across, rotation=90 if one else 0, fontsize=8 if one else 7, color=RED,
              ha="center", va="bottom")  # fmt: skip


def _predictions(axes: Any, context: ReportContext, parameter: Parameter) -> None:
    points = []
    for place, value in enumerate(parameter.values):
        own = [c for c in context.candidates if value_key(c.values.get(parameter.name)) == value_key(value)]
        known = [p for c in own if (p := context.predicted(c)) is not None]
        if known:
            points.append((place, max(known) if context.objective == "tokens_per_s" else min(known)))
    if points:
        axes.plot(*zip(*points, strict=True), "D--" if parameter.ordered else "D", color=ORANGE, fillstyle="none",
                  markersize=6, linewidth=1.2, label="planner", zorder=3)  # fmt: skip


def _label(value: Value) -> str:
    text = value_text(value)
    return "\n".join(textwrap.wrap(text.replace("+", "+ ").replace(":", ": "), 16)) if len(text) > 16 else text
