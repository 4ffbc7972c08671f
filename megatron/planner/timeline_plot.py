"""Pictures of a pipeline's step: what each rank computes when. Need matplotlib.

Of a step with more passes than can be told apart only its begin and its end are drawn, where the pipeline fills and
empties; between the two it does the same over and over.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron import drawing
from megatron.pipeline.clock import PipelineRun, timeline
from megatron.pipeline.instructions import Op
from megatron.pipeline.replay import Span, Timeline

_KINDS = {
    Op.FORWARD: ("forward", "#4878b0"), Op.BACKWARD: ("backward", "#5a9e6f"),
    Op.BACKWARD_INPUT: ("backward, inputs", "#5a9e6f"), Op.BACKWARD_WEIGHT: ("backward, weights", "#d9a441"),
}  # fmt: skip
_IDLE = "#e6e6e6"
_PASSES_AT_ONCE = 100  # of one rank, in one panel


def plot_timeline(run: PipelineRun, path: Path) -> None:
    """Draw a run whose times are seconds to an image file. Raises ConfigError without matplotlib, or where the file
    cannot be written."""
    pipeline = run.pipeline
    title = (
        f"{pipeline.name}: {pipeline.size} ranks, {pipeline.chunks} chunk(s), {pipeline.micro_batches} micro-batches, "
        f"{run.makespan:.4g} s, ranks compute {1 - run.bubble_fraction:.1%} of the time"
    )
    draw_timeline(timeline(run), pipeline.size, pipeline.chunks, path, title=title)


def draw_timeline(lanes: Timeline, size: int, chunks: int, path: Path, *, title: str) -> None:
    """Draw passes of `size` ranks with `chunks` chunks each; later chunks are lighter."""
    pyplot = drawing.pyplot(instead="do without the plot")
    windows = _windows(lanes)
    figure, axes = pyplot.subplots(
        len(windows), squeeze=False, layout="constrained", figsize=(16, 1.2 + len(windows) * (0.8 + min(8, 0.3 * size)))
    )
    for (start, end), panel in zip(windows, axes[:, 0], strict=True):
        seen: dict[str, Any] = {}
        for rank, spans in enumerate(lanes.ranks):
            for span in spans:
                if span.end > start and span.start < end:
                    name, bar = _draw(panel, span, rank, size, chunks, numbered=len(spans) <= _PASSES_AT_ONCE)
                    seen.setdefault(name, bar)
        panel.legend(seen.values(), seen.keys(), loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
        panel.set(xlim=(start, end), ylim=(size - 0.5, -0.5), xlabel="time", ylabel="pipeline rank", facecolor=_IDLE)
    figure.suptitle(title)
    drawing.save(figure, path, dpi=110, choose="another file for the timeline")


def _windows(lanes: Timeline) -> Sequence[tuple[float, float]]:
    """The whole step, or its begin and its end."""
    end = lanes.makespan
    part = end * _PASSES_AT_ONCE / 2 / max(map(len, lanes.ranks))
    return [(0.0, end)] if part >= end / 2 else [(0.0, part), (end - part, end)]


def _draw(panel: Any, span: Span, rank: int, size: int, chunks: int, *, numbered: bool) -> tuple[str, Any]:
    """Draw a pass, with its micro-batch if it is to be numbered; (its kind, the bar)."""
    op, stage, micro_batch = span.instruction
    name, colour = _KINDS[op]
    alpha = 1 - 0.6 * (stage // size) / chunks
    bar = panel.barh(rank, span.end - span.start, 0.9, span.start, color=colour, alpha=alpha, edgecolor="white")
    if numbered:
        panel.bar_label(bar, [str(micro_batch)], label_type="center", fontsize=6)
    return name, bar
