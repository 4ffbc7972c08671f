"""Report on one training run, or several side by side, as a page for a browser.

RUN is the folder of a run, its metrics.jsonl, or a folder that contains runs, such as an experiment.

    python tools/report.py runs/a                           # runs/a/report.html
    python tools/report.py runs/a runs/b                    # report.html
    python tools/report.py runs/weak-175b --format md --output -
    python tools/report.py runs/a --picture loss.png        # and the loss curves as an image

The page needs no network. Exit codes: 0; 1 no run has logged a step or an evaluation; 2 error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser, integer, real
from megatron.errors import print_error
from megatron.training.run.process import as_tool
from megatron.untrusted import write_text
from megatron_report.content import sections
from megatron_report.pages import as_json, as_markdown, as_page
from megatron_report.picture import draw
from megatron_report.reading import read_runs

_FORMATS = {"html": as_page, "md": as_markdown, "json": as_json}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of one run or of several, or a metrics file"
    )
    parser.add_argument(
        "--format",
        choices=list(_FORMATS),
        default="html",
        help="html (needs plotly), md, or json with all values unrounded",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="file to write; - writes to standard output (default: report.FORMAT in the run's "
        "folder, or for several runs in the current folder)",
    )
    parser.add_argument("--title", help="title (default: the names of the runs)")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="also draw loss and learning rate: .png, .svg or .pdf (needs matplotlib)",
    )
    parser.add_argument(
        "--warm-up",
        type=integer(0),
        metavar="N",
        help="steps after the start that speeds exclude (default: as in the experiment, else 1)",
    )
    parser.add_argument(
        "--peak-tflops",
        type=real(),
        metavar="T",
        help="peak TFLOP/s of a device, for MFU and HFU (default: that of the device in the "
        "metrics file)",
    )
    return parser


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code."""
    args = build_parser().parse_args(argv)
    runs = read_runs(args.runs, args.warm_up, args.peak_tflops)
    for run in runs:
        if remark := run.measured.run.remark:
            print_error(remark, prefix="note")
    names = [run.name for run in runs]
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    title = args.title or f"{', '.join(names[:4])}{rest}"
    text = _FORMATS[args.format](title, list(sections(runs)))
    folder = runs[0].measured.run.path.parent if len(runs) == 1 else Path()
    if args.output == "-":
        sys.stdout.write(text)
    else:
        path = Path(args.output) if args.output else folder / f"report.{args.format}"
        print(f"wrote {write_text(path, text, choose='another --output')}")
    if not any(run.of("iteration") or run.of("validation") for run in runs):
        print_error(f"none of {len(runs)} run(s) has logged a step or an evaluation")
        return 1
    if args.picture is not None:
        written = draw(runs, args.picture, args.title or "")
        print(f"wrote {written}", file=sys.stderr if args.output == "-" else sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
