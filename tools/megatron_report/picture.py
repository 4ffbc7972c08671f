"""Picture of training loss, validation loss and learning rate, as an image file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron import drawing
from megatron.errors import DataError
from megatron_report.content import Plot, loss, rates
from megatron_report.reading import RecordedRun


def draw(runs: Sequence[RecordedRun], output: Path, title: str = "") -> Path:
    """Write the picture and return its path.

    Raises DataError if no run has a loss. Raises ConfigError if matplotlib cannot be imported, or
    if the picture cannot be written.
    """
    pyplot = drawing.pyplot()
    from matplotlib.ticker import MaxNLocator

    figure, both = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 5.5), height_ratios=(4, 1), layout="constrained"
    )
    for axes, blocks_of, label in zip(
        both, (loss, rates), ("loss (nats per token)", "learning rate"), strict=True
    ):
        plot = next((block for block in blocks_of(runs) if isinstance(block, Plot)), None)
        for trace in plot.traces if plot else ():
            axes.plot(
                trace["axes"]["iteration"],
                trace["y"],
                {"lines": "-", "markers": "x"}.get(trace["mode"], "o--"),
                color=trace["line"]["color"],
                markersize=5,
                linewidth=trace["line"]["width"],
                label=trace["name"] if trace.get("showlegend", True) else None,
            )
        axes.set_ylabel(label)
        drawing.tidy(axes)
    upper, lower = both
    if not upper.lines:
        raise DataError(f"{runs[0].measured.run.path}: has no loss yet")
    upper.legend(frameon=False)
    upper.set_title(title)
    lower.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    lower.set_xlabel("iteration")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    return drawing.save(figure, output, dpi=120, choose="another file for --picture")
