"""Pictures of a search: what nodes and memory buy, and what each choice is worth."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron import drawing
from megatron.drawing import plain_numbers, save, tidy
from megatron.planning.search.choices import write_value
from megatron.planning.search.judging import GIB, Judge, Judged
from megatron.planning.search.outcome import Effect
from megatron.planning.search.tree import Found

_BLUE, _RED, _GREY = "#3b6ea5", "#c8553d", "#888888"
_DAY = 86400.0
_INSTEAD = "leave --output out"
# Losses beyond this are drawn at the edge, with their number.
_MOST_LOSS = 0.6


def draw_pareto(judge: Judge, found: Found, others: Sequence[tuple[int, float]], path: Path) -> Path:
    """Throughput against nodes, and the memory of the fullest device against throughput.

    others: (nodes, tokens a second) of the best layouts' sizes on other numbers of nodes, which were not searched.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    pyplot = drawing.pyplot(instead=_INSTEAD)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    searched = sorted((v[1], best) for v, best in found.by_value.items() if v[0] == "nodes")
    _nodes(left, [(n, best.tokens_per_s) for n, best in searched], others)
    ticks = sorted({n for n, _ in searched} | {n for n, _ in others})
    left.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    left.set_xticks(_apart(ticks))
    left.xaxis.set_minor_locator(NullLocator())
    _memory(right, judge, found)
    figure.suptitle(f"{judge.space.base.name} on {judge.space.cluster.name}, predicted", fontsize=11)
    return save(figure, path, choose="another --output folder")


def _apart(ticks: Sequence[int]) -> list[int]:
    """As many of these on a logarithmic axis as do not touch."""
    kept: list[int] = []
    for tick in sorted(ticks, reverse=True):
        if not kept or kept[-1] / tick > 1.2:
            kept.append(tick)
    return kept


def _nodes(axes: Any, searched: Sequence[tuple[int, float]], others: Sequence[tuple[int, float]]) -> None:
    everything = sorted([*searched, *others])
    scale = _DAY / 1e9
    n, rate = searched[0]
    ideal = [(nodes, rate / n * nodes) for nodes, _ in everything]
    axes.plot([x for x, _ in ideal], [scale * y for _, y in ideal], "--", color=_GREY, linewidth=1, label="as many for "
              "each node", zorder=1)  # fmt: skip
    axes.plot([x for x, _ in searched], [scale * y for _, y in searched], "o-", color=_BLUE, label="best of a search",
              zorder=3)  # fmt: skip
    if others:
        axes.plot([x for x, _ in others], [scale * y for _, y in others], "o", color=_BLUE, fillstyle="none",
                  label="best of this search's best layouts,\nwith more or fewer replicas", zorder=2)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("nodes")
    axes.set_ylabel("billion tokens a day")
    plain_numbers(axes.yaxis)
    for nodes, rate in searched:
        axes.annotate(f"{scale * rate:.3g}", (nodes, scale * rate), xytext=(7, -10), fontsize=8,
                      textcoords="offset points")  # fmt: skip
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    tidy(axes)


def _memory(axes: Any, judge: Judge, found: Found) -> None:
    """The front as steps, the best shapes beside it."""
    scale = _DAY / 1e9
    front = sorted(found.front, key=lambda j: j.memory)
    rest = [j for j in found.best if j not in front]
    axes.plot([j.memory / GIB for j in rest], [scale * j.tokens_per_s for j in rest], ".", color=_GREY, markersize=4,
              label="best of other sizes, as far as estimated", zorder=1)  # fmt: skip
    axes.step([j.memory / GIB for j in front], [scale * j.tokens_per_s for j in front], "o-", where="post", color=_BLUE,
              markersize=4, linewidth=1.2, label="nothing is faster in as little memory", zorder=3)  # fmt: skip
    axes.axvline(judge.capacity / GIB, color=_RED, linewidth=1, label=f"{judge.capacity / GIB:.1f} GiB may be used")
    axes.axvline(judge.space.cluster.memory_gib, color=_RED, linewidth=1, linestyle=":",
                 label=f"{judge.space.cluster.memory_gib:g} GiB of a device")  # fmt: skip
    for judged, fastest in _labelled(front):
        axes.annotate(_few_words(judged), (judged.memory / GIB, scale * judged.tokens_per_s), fontsize=7, zorder=4,
                      xytext=(0, 7) if fastest else (6, -9), textcoords="offset points",
                      ha="right" if fastest else "left",
                      bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.6})  # fmt: skip
    axes.set_xlabel("memory of the fullest device, GiB")
    axes.set_ylabel("billion tokens a day")
    low = min((scale * j.tokens_per_s for j in front), default=0.0)
    high = max((scale * j.tokens_per_s for j in front), default=1.0)
    axes.set_ylim(low - 0.12 * (high - low), high + 0.12 * (high - low) + 1e-9)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    tidy(axes)


def _labelled(front: Sequence[Judged]) -> list[tuple[Judged, bool]]:
    """The smallest, the fastest (which is said) and what lies between them far enough apart."""
    if not front:
        return []
    fastest, found = front[-1], [front[0]]
    span = (fastest.tokens_per_s - front[0].tokens_per_s) or 1.0
    for judged in front[1:-1]:
        apart = min(judged.tokens_per_s - found[-1].tokens_per_s, fastest.tokens_per_s - judged.tokens_per_s)
        if apart / span > 0.1:
            found.append(judged)
    return [*((judged, False) for judged in found if judged is not fastest), (fastest, True)]


def _few_words(judged: Judged) -> str:
    shape = judged.choices.shape
    chunks = f"x{shape.chunks}" if shape.chunks > 1 else ""
    again = "" if judged.choices.recompute == "none" else f", {judged.choices.recompute.partition(':')[0]} recompute"
    return f"TP {shape.tp} PP {shape.pp}{chunks} mbs {shape.micro}{again}"


def _labels(known: Sequence[tuple[float, Any]], widest: float) -> list[tuple[float, str]]:
    """(place, text) for values by their losses: those that are close together have one text."""
    found: list[tuple[float, list[str]]] = []
    for loss, value in known:
        place = min(loss, _MOST_LOSS)
        text = write_value(value) + (f" ({100 * loss:.0f} %)" if loss > _MOST_LOSS else "")
        length = sum(len(word) + 2 for word in found[-1][1]) if found else 0
        # A character is about a hundred-and-twentieth of the width.
        if found and place - found[-1][0] < widest * max(0.02, length / 120):
            found[-1][1].append(text)
        else:
            found.append((place, [text]))
    return [(place, ", ".join(words)) for place, words in found]


def draw_sensitivity(effects: Sequence[Effect], title: str, path: Path) -> Path:
    """A line for each choice, a point for each of its values at what it costs."""
    pyplot = drawing.pyplot(instead=_INSTEAD)
    figure, axes = pyplot.subplots(figsize=(10, 1.1 + 0.5 * len(effects)), layout="constrained")
    widest = max(min(_MOST_LOSS, max((effect.worst for effect in effects), default=0.0)), 0.01)
    for line, effect in enumerate(reversed(effects)):
        known = sorted((loss, value) for value, loss in effect.losses if loss is not None)
        places = [min(loss, _MOST_LOSS) for loss, _ in known]
        axes.plot([places[0], places[-1]], [line, line], "-", color=_BLUE, linewidth=1, zorder=1)
        colours = [_BLUE if loss else _RED for loss, _ in known]
        order = range(len(known))[::-1]  # the best on top
        axes.scatter([places[i] for i in order], [line] * len(places), c=[colours[i] for i in order], s=34, zorder=3)
        for place, text in _labels(known, widest):
            axes.annotate(text, (place, line), xytext=(-3, 7), fontsize=7.5, textcoords="offset points")
    axes.set_yticks(range(len(effects)), [effect.title for effect in reversed(effects)])
    axes.set_ylim(-0.7, len(effects) - 0.2)
    axes.set_xlim(-0.02 * widest, 1.2 * widest)
    axes.xaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f} %")
    axes.set_xlabel("throughput lost with this value, everything else searched again (red: the best)")
    axes.set_title(title, fontsize=11)
    tidy(axes)
    return save(figure, path, choose="another --output folder")
