"""Plot training loss, validation loss and learning rate from metrics files.

Example:

    python tools/plot_metrics.py runs/example/run/metrics.jsonl --output loss.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import drawing
from megatron.config.option import Parser
from megatron.errors import DataError
from megatron.metrics_file import read_records
from megatron.training.run.process import as_tool


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "metrics",
        nargs="+",
        metavar="FILE",
        help="metrics.jsonl of one run, or of several to compare",
    )
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="plot to write: .png, .svg or .pdf"
    )
    parser.add_argument("--title", default="", help="title of the plot")
    return parser


def series(records: Sequence[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the points with both values; a resumed run overrides later points of earlier ones."""
    points: dict[float, float] = {}
    for record in records:
        if record["event"] == "start":
            points = {at: value for at, value in points.items() if at <= record["iteration"]}
        elif record.get(x) is not None and record.get(y) is not None:
            points[record[x]] = record[y]
    return list(points), list(points.values())


def draw(paths: Sequence[Path], output: Path, title: str = "") -> Path:
    """Write the plot and return its path.

    Raises DataError for a file that is missing or has nothing to plot, ConfigError if the plot
    cannot be written.
    """
    pyplot = drawing.pyplot()
    from matplotlib.ticker import MaxNLocator

    figure, (upper, lower) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 5.5), height_ratios=(4, 1), layout="constrained"
    )
    for path in paths:
        if not path.is_file():
            raise DataError(
                f"{path}: no such file: give the metrics.jsonl that a run writes into its --save "
                "folder"
            )
        records = read_records(path)
        starts = [r for r in records if r["event"] == "start"]
        steps = starts + [r for r in records if r["event"] == "iteration"]
        valid = starts + [
            r for r in records if r["event"] == "validation" and r.get("dataset") == "valid"
        ]
        order = {id(r): i for i, r in enumerate(records)}
        steps.sort(key=lambda r: order[id(r)])
        valid.sort(key=lambda r: order[id(r)])
        losses, points = (
            series(steps, "iteration", "lm_loss"),
            series(valid, "iteration", "lm_loss"),
        )
        if not losses[0] and not points[0]:
            raise DataError(f"{path}: has no iteration or validation records yet")
        name = f"{path.parent.name}: " if len(paths) > 1 else ""
        (line,) = upper.plot(*losses, linewidth=1.3, label=f"{name}training")
        color = line.get_color() if len(paths) > 1 else "tab:orange"
        upper.plot(
            *points, "o--", color=color, markersize=5, linewidth=0.8, label=f"{name}validation"
        )
        lower.plot(
            *series(steps, "iteration", "learning_rate"), linewidth=1.3, color=line.get_color()
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
    return drawing.save(figure, output, dpi=120, choose="another file for --output")


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code: 0, or 2 after an error."""
    args = build_parser().parse_args(argv)
    written = draw([Path(path) for path in args.metrics], Path(args.output), args.title)
    print(f"wrote {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
