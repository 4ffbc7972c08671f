"""Pictures of a pipeline's step: what each rank computes when, and where its time goes. Need matplotlib.

Of a step with more passes than can be told apart only its begin and its end are drawn, where the pipeline fills and
empties; between the two it does the same over and over.
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron import drawing
from megatron.pipeline.clock import PipelineRun, timeline
from megatron.pipeline.instructions import Op
from megatron.pipeline.replay import Span, Timeline

_COLOURS = {
    Op.FORWARD: "#4878b0", Op.BACKWARD: "#5a9e6f", Op.BACKWARD_INPUT: "#5a9e6f", Op.BACKWARD_WEIGHT: "#d9a441",
}  # fmt: skip
_NAMES = {
    Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward, inputs",
    Op.BACKWARD_WEIGHT: "backward, weights",
}  # fmt: skip
_MESSAGE = "#d9534f"
_IDLE = "#e6e6e6"
_WAITING = "message under way"
_IDLING = "bubble"

_PASSES_AT_ONCE = 100  # of one rank, in one panel
_WIDTH = 15.0  # inches of a panel
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


class _Window(NamedTuple):
    start: float
    end: float
    title: str


def plot_timeline(run: PipelineRun, path: Path, title: str | None = None) -> None:
    """Draw a run whose times are seconds to an image file. Raises ConfigError without matplotlib, or where the file
    cannot be written."""
    pipeline = run.pipeline
    unit, name = next(((u, n) for u, n in _UNITS if run.makespan >= 2 * u), _UNITS[-1])
    draw_timeline(
        timeline(run), pipeline.size, pipeline.chunks, path,
        title=title or _describe(run, f"{run.makespan / unit:.4g} {name}"), unit=unit, unit_name=name,
        message_wait=run.message_wait,
    )  # fmt: skip


def _describe(run: PipelineRun, length: str) -> str:
    pipeline = run.pipeline
    chunks = f", {pipeline.chunks} chunks" if pipeline.chunks > 1 else ""
    return (
        f"{pipeline.name}: {pipeline.size} ranks{chunks}, {pipeline.micro_batches} micro-batches, {length}, "
        f"ranks compute {1 - run.bubble_fraction:.1%} of the time"
    )


def draw_timeline(
    lanes: Timeline, size: int, chunks: int, path: Path, *, title: str, unit: float = 1.0, unit_name: str = "",
    message_wait: Sequence[float] | None = None,
) -> None:  # fmt: skip
    """Draw passes of `size` ranks with `chunks` chunks each; times are divided by `unit`, whose name is `unit_name`.

    Later chunks are lighter. A rank's waiting for a result that is made but not there yet is drawn between its passes;
    `message_wait`, all of it by rank, is told apart in the summary.
    """
    pyplot = drawing.pyplot(instead="do without the plot")
    from matplotlib.patches import Patch

    windows = _windows(lanes)
    row = min(0.34, max(0.11, 7.0 / size))  # inches
    figure, axes = pyplot.subplots(
        len(windows), 2, squeeze=False, layout="constrained", width_ratios=[_WIDTH, 2.6],
        figsize=(_WIDTH + 3.2, 1.2 + len(windows) * (row * size + 0.8)),
    )  # fmt: skip
    made = _made(lanes)
    kinds: dict[str, str] = {}  # what is drawn, and its colour
    for window, (panel, summary) in zip(windows, axes, strict=True):
        kinds |= _draw_window(panel, window, lanes, size, chunks, made, unit, row)
        panel.set_title(window.title + ("; later chunks are lighter" if chunks > 1 else ""), loc="left", fontsize=9)
        panel.set_xlabel(f"time [{unit_name}]" if unit_name else "time", fontsize=9)
        _rows(panel, size)
        summary.set_axis_off()
    _draw_summary(axes[0][1], lanes, message_wait)
    _rows(axes[0][1], size)
    kinds[_IDLING] = _IDLE
    axes[0][0].legend(
        handles=[Patch(color=colour, label=name) for name, colour in kinds.items()], loc="lower right",
        bbox_to_anchor=(1, 1), borderpad=0, ncol=len(kinds), frameon=False, fontsize=8,
    )  # fmt: skip
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    drawing.save(figure, path, dpi=110, choose="another file for the timeline")


def _windows(lanes: Timeline) -> list[_Window]:
    """The whole step, or its begin and its end: filling and emptying, and some of what is between."""
    longest, end = max(map(len, lanes.ranks)), lanes.makespan
    filling = max(
        next((s.end for s in spans if s.instruction.op is not Op.FORWARD), spans[0].end) for spans in lanes.ranks
    )
    emptying = end - min(
        next((s.start for s in reversed(spans) if s.instruction.op is Op.FORWARD), 0.0) for spans in lanes.ranks
    )
    some = end * _PASSES_AT_ONCE / 2 / longest
    first, last = max(1.25 * filling, some), max(1.25 * emptying, some)
    if longest <= _PASSES_AT_ONCE or first + last >= 0.9 * end:
        return [_Window(0.0, end, "the whole step")]
    return [
        _Window(0.0, first, f"its begin: {first / end:.2%} of the step"),
        _Window(end - last, end, f"its end: {last / end:.2%} of the step"),
    ]


_Made = dict[tuple[bool, int, int], float]


def _made(lanes: Timeline) -> _Made:
    """When each result was there, by (activation or gradient, stage that made it, micro-batch)."""
    return {
        (span.instruction.op is Op.FORWARD, *span.instruction[1:]): span.end
        for spans in lanes.ranks for span in spans if span.instruction.op is not Op.BACKWARD_WEIGHT
    }  # fmt: skip


def _input(span: Span, made: _Made) -> float:
    """When what a pass needs from another stage had been computed; 0 where it needs nothing."""
    op, stage, micro_batch = span.instruction
    if op is Op.BACKWARD_WEIGHT:
        return 0.0
    forward = op is Op.FORWARD
    return made.get((forward, stage - 1 if forward else stage + 1, micro_batch), 0.0)


def _draw_window(
    axes: Any, window: _Window, lanes: Timeline, size: int, chunks: int, made: _Made, unit: float, row: float
) -> dict[str, str]:
    """The passes within a window, and the waiting for messages between them; the kinds that are there."""
    kinds: dict[str, str] = {}
    inches = _WIDTH * 0.93 / (window.end - window.start)
    for rank, spans in enumerate(lanes.ranks):
        bars: dict[tuple[str, float], list[tuple[float, float]]] = {}  # by colour and opacity: (start, length)
        before = 0.0
        for span in spans[: bisect_left(spans, window.end, key=lambda span: span.start)]:
            late, before = max(before, _input(span, made)), span.end
            if span.end <= window.start:
                continue
            if late < span.start:
                kinds[_WAITING] = _MESSAGE
                bars.setdefault((_MESSAGE, 1.0), []).append((late / unit, (span.start - late) / unit))
            op, stage, micro_batch = span.instruction
            opacity = 1 - 0.6 * (stage // size) / chunks
            kinds[_NAMES[op]] = _COLOURS[op]
            bars.setdefault((_COLOURS[op], opacity), []).append((span.start / unit, (span.end - span.start) / unit))
            if row >= 0.14 and (span.end - span.start) * inches > 0.075 * len(str(micro_batch)) + 0.04:
                axes.text(
                    (span.start + span.end) / 2 / unit, rank, str(micro_batch), ha="center", va="center", clip_on=True,
                    fontsize=min(7.0, 40 * row), color="white" if opacity > 0.75 else "black",
                )  # fmt: skip
        for (colour, opacity), pieces in bars.items():
            # White edges part one pass from the next, as far as passes are wider than an edge.
            wide = pieces[0][1] * unit * inches > 0.05
            axes.broken_barh(
                pieces, (rank - 0.45, 0.9), facecolor=colour, alpha=opacity,
                edgecolor="white" if wide else "none", linewidth=0.5 if wide else 0.0,
            )  # fmt: skip
    axes.set_xlim(window.start / unit, window.end / unit)
    axes.set_facecolor(_IDLE)
    # In the order of the names, not of who came first.
    order = [*_NAMES.values(), _WAITING]
    return {name: kinds[name] for name in dict.fromkeys(order) if name in kinds}


def _draw_summary(axes: Any, lanes: Timeline, message_wait: Sequence[float] | None) -> None:
    """Of each rank the shares of its time: passes by kind, and what it waits."""
    end = lanes.makespan
    for rank, spans in enumerate(lanes.ranks):
        by_colour: dict[str, float] = {}
        for span in spans:
            colour = _COLOURS[span.instruction.op]
            by_colour[colour] = by_colour.get(colour, 0.0) + span.end - span.start
        if message_wait is not None:
            by_colour[_MESSAGE] = message_wait[rank]
        left = 0.0
        for colour, time in by_colour.items():
            axes.barh(rank, 100 * time / end, left=left, height=0.9, color=colour)
            left += 100 * time / end
    axes.set_axis_on()
    axes.set_xlim(0, 100)
    axes.set_facecolor(_IDLE)
    axes.set_title("share of the whole step", loc="left", fontsize=9)
    axes.set_xlabel("% of the time", fontsize=9)


def _rows(axes: Any, size: int) -> None:
    step = next(step for step in (1, 2, 4, 8, 16, 32, size) if size / step <= 20)
    axes.set(ylim=(size - 0.5, -0.5), yticks=range(0, size, step))
    axes.set_ylabel("pipeline rank", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
