"""Pictures of a search: what nodes and memory buy, and what each choice is worth."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron import drawing
from megatron.config.layout import Layout, write_value
from megatron.drawing import plain_numbers, save, tidy
from megatron.planner.search.find import GIB, Found, Search
from megatron.planner.search.outcome import Effect

_BLUE, _RED, _GREY = "#3b6ea5", "#c8553d", "#888888"
_PER_DAY = 86400.0 / 1e9
_CHOOSE, _INSTEAD = "another --output folder", "leave --output out"
_MOST_LOSS = 0.6
"""Losses beyond this are drawn at the edge."""


def draw_pareto(given: Search, found: Found, path: Path) -> Path:
    """Throughput against the memory of the fullest device; against nodes, too, where several numbers were searched."""
    cluster, several = given.space.cluster, len(given.space.worlds) > 1
    pyplot = drawing.pyplot(instead=_INSTEAD)
    figure, panels = pyplot.subplots(
        1, 1 + several, figsize=(6 + 5 * several, 4.6), layout="constrained", squeeze=False
    )
    axes, *more = panels[0]
    front = found.front
    rest = [judged for judged in found.estimated if judged not in front]
    axes.plot([j.memory / GIB for j in rest], [_PER_DAY * j.tokens_per_s for j in rest], ".", color=_GREY, markersize=4,
              label="estimated", zorder=1)  # fmt: skip
    axes.step([j.memory / GIB for j in front], [_PER_DAY * j.tokens_per_s for j in front], "o-", where="post",
              color=_BLUE, markersize=4, linewidth=1.2, label="none of them is faster in as little memory")  # fmt: skip
    axes.axvline(given.capacity / GIB, color=_RED, linewidth=1, label=f"{given.capacity / GIB:.1f} GiB may be used")
    for judged in (front[0], front[-1]):
        axes.annotate(_few_words(judged.layout), (judged.memory / GIB, _PER_DAY * judged.tokens_per_s), fontsize=7,
                      xytext=(0, 7), textcoords="offset points", ha="center")  # fmt: skip
    axes.set_xlabel("memory of the fullest device, GiB")
    for panel in more:
        by_value = found.by_value(cluster.devices_per_node)
        points = sorted((v[1], best.tokens_per_s) for v, best in by_value.items() if v[0] == "nodes")
        (first, rate), *_ = points
        panel.plot([n for n, _ in points], [_PER_DAY * rate / first * n for n, _ in points], "--", color=_GREY,
                   linewidth=1, label="as many for each node")  # fmt: skip
        panel.plot([n for n, _ in points], [_PER_DAY * r for _, r in points], "o-", color=_BLUE, label="best layout")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel("nodes")
        plain_numbers(panel.xaxis)
        plain_numbers(panel.yaxis)
    for panel in (axes, *more):
        panel.set_ylabel("billion tokens a day")
        panel.legend(frameon=False, fontsize=8)
        tidy(panel)
    figure.suptitle(f"{given.space.base.name} on {cluster.name}, predicted", fontsize=11)
    return save(figure, path, choose=_CHOOSE)


def _few_words(layout: Layout) -> str:
    chunks = f"x{layout.chunks}" if layout.chunks > 1 else ""
    again = "" if layout.recompute == "none" else f", {layout.recompute.partition(':')[0]} recompute"
    return f"TP {layout.tp} PP {layout.pp}{chunks} mbs {layout.micro}{again}"


def draw_sensitivity(effects: Sequence[Effect], title: str, path: Path) -> Path:
    """A line for each choice, a point for each of its values at what it costs."""
    pyplot = drawing.pyplot(instead=_INSTEAD)
    figure, axes = pyplot.subplots(figsize=(10, 1.1 + 0.5 * len(effects)), layout="constrained")
    for line, effect in enumerate(reversed(effects)):
        known = [(min(loss, _MOST_LOSS), write_value(value)) for value, loss in effect.losses if loss is not None]
        axes.plot([loss for loss, _ in known], [line] * len(known), "o-", color=_BLUE, linewidth=1, markersize=5)
        last = -1.0
        for loss, text in known:  # the best first; values too close to have a text of their own have none
            if loss - last > 0.02:
                axes.annotate(text, (loss, line), xytext=(-3, 7), fontsize=7.5, textcoords="offset points")
                last = loss
    axes.set_yticks(range(len(effects)), [effect.title for effect in reversed(effects)])
    axes.set_ylim(-0.7, len(effects) - 0.2)
    axes.xaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f} %")
    axes.set_xlabel("throughput lost with this value, everything else searched again")
    axes.set_title(title, fontsize=11)
    tidy(axes)
    return save(figure, path, choose=_CHOOSE)
