#!/usr/bin/env python
"""Find the fastest layout of a model on a machine before anything is queued: by estimates, nothing is run.

    python tools/plan.py --preset gpt-175b --cluster frontier --nodes 128 --global-batch 640:8000 --tokens 300e9
    python tools/plan.py --preset gpt-22b --cluster frontier --nodes 16 --fix tp=2 mbs=1,2 --output plans/22b
    python tools/plan.py --cluster dgx-h100 --nodes 4 --global-batch 256 -- --num-layers 48 --hidden-size 6144 ...
    python tools/plan.py --preset gpt-175b --cluster frontier --nodes 128 --layout tp=4,pp=16,mbs=1,recompute=full
    python tools/plan.py --preset gpt-175b --cluster frontier --nodes 128 --layout tp=4,pp=16,mbs=1 --explain
"""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.command_line import add_preset, split_at_dashes
from megatron.config.option import MOST_TOKENS, Parser, real, whole
from megatron.planner.cluster import known_clusters
from megatron.planner.search import command
from megatron.training.run.process import as_tool

EPILOG = """\
A layout is written tp=4,pp=16,chunks=2,mbs=1,recompute=selective, of any of

  nodes, gbs (global batch), tp, pp, chunks, schedule (1f1b, interleaved, zb-h1), mbs (micro-batch), sp (on, off),
  overlap (of tensor-parallel messages: on, off), zero (0, 1), recompute (none, selective[:MODULE+MODULE],
  full[:uniform|block[:LAYERS]]), order (of directions over ranks), devices (0-1-6-7-2-3-4-5)

Of a preset the model counts, not its layout; flags of pretrain_gpt.py after -- change it. What a layout does not name
is chosen as fastest; recompute=full is full:uniform:1, as in a run. --fix and --allow take several values, tp=4,8, and
there recompute=full is all that begin so. All layouts that can fit are ranked by a formula; the best of them, and of
those with each value, are estimated on the schedule's clock.

Exit code 0; 2 for a mistake; 3 where nothing fits, or a layout is rejected."""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description=__doc__, epilog=EPILOG,
        usage="%(prog)s --preset NAME --cluster NAME|FILE --nodes N [options] [-- flags of pretrain_gpt.py]",
    )  # fmt: skip
    what = parser.add_argument_group("what is planned")
    add_preset(what)
    what.add_argument("--cluster", default="frontier", metavar="NAME|FILE",
                      help=f"{', '.join(known_clusters())} or a cluster file (default frontier)")  # fmt: skip
    what.add_argument("--nodes", metavar="N", help="128, several 64,128, or 16:128, doubled from one to the other "
                      "(default: that of a machine of one node)")  # fmt: skip
    what.add_argument("--devices", metavar="N", help="devices in all instead of nodes, for a part of a node")
    what.add_argument("--global-batch", metavar="B", help="samples of a step: 640, several 640,1280, or 640:8000, "
                      "doubled from one to the other (default: the preset's)")  # fmt: skip
    what.add_argument("--tokens", type=real(MOST_TOKENS), metavar="T", help="length of the run in tokens: 300e9")
    how = parser.add_argument_group("what is searched")
    several: dict[str, Any] = dict(nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    how.add_argument("--fix", help="allow these values only", **several)
    how.add_argument("--allow", help="also try these, which the search leaves out by itself: tp beyond a node, mbs "
                     "that is no power of two, recompute=..., devices=...", **several)  # fmt: skip
    how.add_argument("--headroom", default="10%", metavar="GIB|%", help="of a device's memory that stays free for the "
                     "runtime, the communication library and what the allocator cannot use (default 10%%)")  # fmt: skip
    how.add_argument("--processes", type=whole(1, 512), metavar="N", help="that search (default: cores, at most 8)")
    out = parser.add_argument_group("what is shown")
    out.add_argument("--top", type=whole(), default=10, metavar="N", help="layouts in the tables (default 10)")
    out.add_argument("--layout", action="append", default=[], metavar="LAYOUT", help="no search: this layout, or why "
                     "it is rejected; may be repeated")  # fmt: skip
    out.add_argument("--explain", nargs="?", type=whole(), const=1, metavar="N", help="walk through the arithmetic of "
                     "number N of the table, or of --layout (default 1)")  # fmt: skip
    out.add_argument("--bounds", action="store_true", help="how far the seconds of the layouts may be off, and what "
                     "they would be at the device's peak")  # fmt: skip
    out.add_argument("--paper-flops", action="store_true", help="TFLOP/s of a device by the formula of Dash et al. "
                     "(arXiv 2312.12705)")  # fmt: skip
    out.add_argument("--output", type=Path, metavar="DIR", help="write table.csv, table.json, pareto.png, "
                     "timeline.png, trace.json and the job script into it")  # fmt: skip
    out.add_argument("--markdown", action="store_true", help="tables for a document")
    return parser


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run the tool; return the exit code."""
    words, flags = split_at_dashes(argv)
    args = build_parser().parse_args(words)
    if args.processes is None:
        args.processes = min(8, len(os.sched_getaffinity(0)))
    return command.run(args, flags)


if __name__ == "__main__":
    sys.exit(main())
