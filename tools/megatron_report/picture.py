"""Picture of training loss, validation loss and learning rate, as an image file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron import drawing
from megatron.errors import DataError
from megatron_report.reading import Run


def draw(runs: Sequence[Run], output: Path, title: str = "") -> Path:
    """Write the picture and return its path.

    Raises DataError for a run with nothing to plot, ConfigError if the picture cannot be written.
    """
    pyplot = drawing.pyplot()
    from matplotlib.ticker import MaxNLocator

    figure, (upper, lower) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 5.5), height_ratios=(4, 1), layout="constrained"
    )
    for run in runs:
        steps = run.of("iteration")
        losses = [r for r in steps if r.get("lm_loss") is not None]
        checks = [
            r
            for r in run.of("validation")
            if r.get("dataset") == "valid" and r.get("lm_loss") is not None
        ]
        if not losses and not checks:
            raise DataError(f"{run.measured.run.path}: has no loss yet")
        name = f"{run.name}: " if len(runs) > 1 else ""
        (line,) = upper.plot(
            [r["iteration"] for r in losses],
            [r["lm_loss"] for r in losses],
            linewidth=1.3,
            label=f"{name}training",
        )
        color = line.get_color() if len(runs) > 1 else "tab:orange"
        for corpus in dict.fromkeys(r.get("corpus") or "" for r in checks):
            own = [r for r in checks if (r.get("corpus") or "") == corpus]
            upper.plot(
                [r["iteration"] for r in own],
                [r["lm_loss"] for r in own],
                "o--",
                color=None if corpus else color,
                markersize=5,
                linewidth=0.8,
                label=f"{name}validation {corpus}".rstrip(),
            )
        rates = [r for r in steps if r.get("learning_rate") is not None]
        lower.plot(
            [r["iteration"] for r in rates],
            [r["learning_rate"] for r in rates],
            linewidth=1.3,
            color=line.get_color(),
        )
    upper.set_ylabel("loss (nats per token)")
    upper.legend(frameon=False)
    upper.set_title(title)
    lower.set_ylabel("learning rate")
    lower.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    lower.set_xlabel("iteration")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        drawing.tidy(axes)
    return drawing.save(figure, output, dpi=120, choose="another file for --picture")
