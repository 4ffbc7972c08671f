#!/usr/bin/env python
"""Compare throughput and scaling efficiency of runs, in a table, a CSV file and a plot.

Reads folders of runs, such as those of examples/frontier/weak_scaling.sh, or single metrics.jsonl
files.

    python tools/report_scaling.py runs/weak-175b-paper --out report
    python tools/report_scaling.py runs/a/metrics.jsonl runs/b/metrics.jsonl --peak-tflops 191.5

Exit codes: 0; 1 no run has a step to measure; 2 error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser, real, whole
from megatron.errors import ConfigError, print_error
from megatron.jobs.scaling import Series, as_csv, compare, draw, figures, find_runs, state, table
from megatron.planner.table import print_table
from megatron.training.run.process import as_tool
from megatron.untrusted import write_text


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="PATH", help="folder of runs, or metrics file")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder for report.csv and scaling.png"
    )
    parser.add_argument(
        "--no-plots",
        action="store_true",
        help="with --out: write no plot (then matplotlib is not needed)",
    )
    parser.add_argument(
        "--warm-up",
        type=whole(0),
        metavar="N",
        help="number of first steps to leave out (default: that of the experiment, else 1)",
    )
    parser.add_argument(
        "--peak-tflops",
        type=real(),
        metavar="T",
        help="peak of a device for MFU and HFU (default: of the device that the "
        "metrics file names)",
    )
    return parser


def write(series: Sequence[Series], out: Path, plots: bool) -> list[Path]:
    """Write the report into a folder; return its files. Raises ConfigError if not writable."""
    rows, picture = out / "report.csv", out / "scaling.png"
    try:
        out.mkdir(parents=True, exist_ok=True)
        drawn = [picture] if plots and draw(series, picture) else []
    except OSError as error:
        raise ConfigError(
            f"--out {out}: {error.strerror or error}: choose a writable folder"
        ) from error
    write_text(rows, as_csv(series), choose="another --out folder")
    return [rows, *drawn]


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code."""
    args = build_parser().parse_args(argv)
    found = [figures(run, args.warm_up, args.peak_tflops) for run in find_runs(args.runs)]
    series = compare(found)
    for each in series:
        print_table(table(each))
        for member in each.members:
            for text in each.remarks(member):
                print(f"  {state(member)}: {member.run.name}: {text}")
        print()
    if args.out is not None:
        for path in write(series, args.out, not args.no_plots):
            print(f"wrote {path}")
    if not any(member.steady for member in found):
        print_error(
            f"nothing to report: none of {len(found)} run(s) has a steady step; reasons are above"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
