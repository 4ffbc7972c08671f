"""Plot of a pipeline's step: a timeline of each rank's passes. Needs matplotlib.

If a step has too many passes to distinguish, only its beginning and end are drawn, where the
pipeline fills and drains; the rest repeats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from megatron import drawing
from megatron.pipeline.clock import PipelineRun, ScheduleTimeline, Span, timeline
from megatron.pipeline.orders import Op

_KINDS = {
    Op.FORWARD: ("forward", "#4878b0"),
    Op.BACKWARD: ("backward", "#5a9e6f"),
    Op.BACKWARD_INPUT: ("backward, inputs", "#5a9e6f"),
    Op.BACKWARD_WEIGHT: ("backward, weights", "#d9a441"),
}
_IDLE = "#e6e6e6"
_PASSES_AT_ONCE = 100  # per rank, in all panels together


def plot_timeline(run: PipelineRun, path: Path) -> None:
    """Draw a run, whose times are in seconds, to an image file.

    Raises ConfigError if matplotlib is missing or the file cannot be written.
    """
    pipeline = run.pipeline
    title = (
        f"{pipeline.name}: {pipeline.size} ranks, {pipeline.chunks} chunk(s), "
        f"{pipeline.micro_batches} micro-batches, {run.makespan:.4g} s, ranks compute "
        f"{1 - run.bubble_fraction:.1%} of the time"
    )
    draw_timeline(timeline(run), pipeline.size, pipeline.chunks, path, title=title)


def draw_timeline(
    lanes: ScheduleTimeline, size: int, chunks: int, path: Path, *, title: str
) -> None:
    """Draw passes of `size` ranks with `chunks` chunks each; later chunks are lighter."""
    pyplot = drawing.pyplot(instead="do without the plot")
    windows = _windows(lanes)
    figure, axes = pyplot.subplots(
        len(windows),
        squeeze=False,
        layout="constrained",
        figsize=(16, 1.2 + len(windows) * (0.8 + min(8, 0.3 * size))),
    )
    numbered = max(map(len, lanes.ranks)) <= _PASSES_AT_ONCE
    for (start, end), panel in zip(windows, axes[:, 0], strict=True):
        # passes drawn in one call: by kind and chunk, each with its rank
        alike = defaultdict[tuple[Op, int], list[tuple[int, Span]]](list)
        for rank, spans in enumerate(lanes.ranks):
            for span in spans:
                if span.end > start and span.start < end:
                    alike[span.instruction.op, span.instruction.stage // size].append((rank, span))
        names = set[str]()
        for (op, chunk), passes in alike.items():
            name, colour = _KINDS[op]
            bars = panel.barh(
                [rank for rank, _ in passes],
                [span.end - span.start for _, span in passes],
                0.9,
                [span.start for _, span in passes],
                color=colour,
                alpha=1 - 0.6 * chunk / chunks,
                edgecolor="white",
                label="" if name in names else name,
            )
            names.add(name)
            if numbered:
                numbers = [span.instruction.micro_batch for _, span in passes]
                panel.bar_label(bars, numbers, label_type="center", fontsize=6)
        panel.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
        panel.set(
            xlim=(start, end),
            ylim=(size - 0.5, -0.5),
            xlabel="time",
            ylabel="pipeline rank",
            facecolor=_IDLE,
        )
        panel.yaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title)
    drawing.save(figure, path, dpi=110, choose="another file for the timeline")


def _windows(lanes: ScheduleTimeline) -> Sequence[tuple[float, float]]:
    """Return (start, end) of the whole step, or of its beginning and of its end."""
    end = lanes.makespan
    window = end * _PASSES_AT_ONCE / 2 / max(map(len, lanes.ranks))
    return [(0.0, end)] if window >= end / 2 else [(0.0, window), (end - window, end)]
