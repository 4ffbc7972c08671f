#!/usr/bin/env python
"""Read measured runs and compare them: table, CSV, Markdown and plots of throughput and scaling efficiency.

Give folders of runs (examples/frontier/weak_scaling.sh and the like make them), single metrics.jsonl files, or logs of
this program, Megatron-DeepSpeed or Megatron-LM.

    python tools/report_scaling.py runs/weak-175b-paper --out report
    python tools/report_scaling.py old.log --peak-tflops 191.5 --ceiling-tflops 115.3

Exit code 0, 1 when there is nothing to report (no run, or none with a steady step), or when a run is invalid (figures
that contradict each other) and --strict is given, 2 after an error.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser, real, whole
from megatron.errors import ConfigError, print_error
from megatron.planning.scaling.compare import Series, compare
from megatron.planning.scaling.figures import Judge, figures
from megatron.planning.scaling.render import as_csv, as_markdown, as_table, state
from megatron.planning.scaling.runs import NothingToReportError, find_runs
from megatron.training.failures import as_tool
from megatron.untrusted import write_text


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="PATH", help="folder of runs, metrics file or log")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write report.md, report.csv and plots there")
    parser.add_argument("--no-plots", action="store_true", help="with --out: no pictures (needs no matplotlib)")
    parser.add_argument(
        "--warm-up", type=whole(0), metavar="N",
        help="steps from the start that do not count (default: as the experiment's point says, else 1)",
    )
    parser.add_argument(
        "--peak-tflops", type=real(), metavar="T",
        help="peak of a device for MFU and HFU (default: of the device that the metrics file names)",
    )
    parser.add_argument(
        "--ceiling-tflops", type=real(), metavar="T",
        help="TFLOP/s per device beyond which a run is invalid (default: 115.3 for an MI250X GCD, the best matrix "
        "product measured on it; 0.9 of the peak for others)",
    )
    parser.add_argument("--strict", action="store_true", help="exit code 1 when any run is invalid")
    return parser


def show(series: Sequence[Series]) -> None:
    """Print the tables and what there is to say about each run."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 220, highlight=False)
    for each in series:
        console.print(as_table(each))
        for member in each.members:
            for text in each.remarks(member):
                console.print(f"  {state(member)}: {member.run.name}: {text}", markup=False)
        console.print()


def write(series: Sequence[Series], out: Path, plots: bool) -> list[Path]:
    """Write the report into a folder; returns its files. Raises ConfigError where it cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        pictures: list[Path] = []
        if plots:
            from megatron.planning.scaling.plots import draw_all

            pictures = draw_all(series, out)
        report, table = out / "report.md", out / "report.csv"
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}: choose a folder that can be written") from error
    write_text(report, as_markdown(series, [p.name for p in pictures]), choose="another --out folder")
    write_text(table, as_csv(series), choose="another --out folder")
    return [report, table, *pictures]


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run; returns the exit code."""
    args = build_parser().parse_args(argv)
    judge = Judge(args.warm_up, args.peak_tflops, args.ceiling_tflops)
    try:
        found = [figures(run, judge) for run in find_runs(args.runs)]
    except NothingToReportError as error:
        print_error(error)
        return 1
    series = compare(found)
    show(series)
    if args.out is not None:
        for path in write(series, args.out, not args.no_plots):
            print(f"wrote {path}")
    if not any(member.steady for member in found):
        print_error(f"nothing to report: none of {len(found)} run(s) has a steady step; each says why above")
        return 1
    invalid = any(state(member) == "invalid" for each in series for member in each.members)
    return 1 if invalid and args.strict else 0


if __name__ == "__main__":
    sys.exit(main())
