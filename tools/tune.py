#!/usr/bin/env python
"""Find the fastest layout of a model by trying: short real runs of pretrain_gpt.py, each chosen by
what is known.

    python tools/tune.py --list-spaces
    python tools/tune.py --space two-cores --no-prior --max-trials 20
    python tools/tune.py --space my.toml --cluster machine.toml --walltime 2:00:00 -- --preset gpt-1.4b
    python tools/tune.py --space paper-175b --nodes 16 --dry-run

On this machine, or inside a Slurm allocation (examples/frontier/tune.sbatch), where trials run side
by side on nodes of their own. Killed and called again with the same words it goes on and repeats
nothing. docs/tuning.md has the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.command_line import add_preset, split_at_dashes, with_preset
from megatron.config.option import MOST_PROCESSES, Parser, real, whole
from megatron.jobs import tune
from megatron.jobs.measured import OBJECTIVES
from megatron.jobs.search import SEARCHES
from megatron.training.run.process import as_tool

_COUNT, _SECONDS = whole(1, MOST_PROCESSES), real()

EPILOG = """\
searches:
{searches}

Exit code 0: a best layout was found and confirmed, and the trials are used up or nothing is left to try. 1: no layout
has valid figures. 2: a mistake. 3: interrupted, or out of time or of nodes with trials left, also of --confirm, and the
same command goes on. 4: out of time before any trial ended."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    width = max(map(len, SEARCHES))
    searches = "\n".join(f"  {name:{width}}  {text}" for name, text in SEARCHES.items())
    parser = Parser(
        description=__doc__,
        epilog=EPILOG.format(searches=searches),
        usage="%(prog)s --space FILE|NAME [options] [-- flags of pretrain_gpt.py]",
    )
    _add_search(parser.add_argument_group("what is searched"))
    _add_trials(parser.add_argument_group("trials"))
    _add_place(parser.add_argument_group("where trials run"))
    _add_output(parser.add_argument_group("what is shown and written"))
    return parser


def _add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--space", metavar="FILE|NAME", help="a TOML file, or the name of a ready space"
    )
    add_preset(group)
    group.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default=OBJECTIVES[0],
        help="what the best has most of, or least: tokens a second, or node-hours for each token "
        f"(default {OBJECTIVES[0]})",
    )
    group.add_argument(
        "--search",
        choices=tuple(SEARCHES),
        default="auto",
        help="how layouts are chosen: below (default auto)",
    )
    group.add_argument(
        "--no-prior", action="store_true", help="search without the planner's ranking"
    )
    group.add_argument(
        "--seed",
        type=whole(0),
        default=0,
        metavar="S",
        help="of what is random in a search (default 0)",
    )
    group.add_argument(
        "--max-trials",
        type=_COUNT,
        metavar="N",
        help="of the whole search, in however many starts (default: until nothing is left)",
    )
    group.add_argument(
        "--confirm",
        type=whole(0),
        default=3,
        metavar="N",
        help="when the search has ended, up to so many trials more than --max-trials measure again "
        "what may be the best by the noise that was seen; what is named is the best of all "
        "measurements (default 3; 0: none)",
    )
    group.add_argument(
        "--walltime",
        metavar="T",
        help="of this start: 90 (minutes), 1:30:00, 1-00:00:00; no trial begins that would not end "
        "in it (default: the allocation's, or none)",
    )
    group.add_argument(
        "--retry-failed",
        action="store_true",
        help="run trials of an earlier start that gave no valid figures again",
    )


def _add_trials(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--iterations",
        type=_COUNT,
        metavar="N",
        help="measured steps of a trial (default: the space's)",
    )
    group.add_argument(
        "--warm-up", type=whole(0), metavar="N", help="steps before them (default: the space's)"
    )
    group.add_argument(
        "--trial-limit",
        type=_SECONDS,
        metavar="SECONDS",
        help="longest time of a trial (default: by the planner's step time, or 1800)",
    )
    group.add_argument(
        "--stall",
        type=_SECONDS,
        metavar="SECONDS",
        help="without a new step, after which a trial counts as hanging (default: by its steps "
        "before)",
    )


def _add_place(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--launcher", choices=("local", "slurm"), help="default: slurm in an allocation, else local"
    )
    group.add_argument(
        "--processes",
        type=_COUNT,
        metavar="N",
        help="local: devices that trials may use (default: those of --cluster, else GPUs, else "
        "cores, or as many processes as the space names)",
    )
    group.add_argument(
        "--hosts-file", type=Path, metavar="FILE", help="slurm: nodes to run on, one a line"
    )
    group.add_argument(
        "--tasks-per-node",
        type=_COUNT,
        metavar="N",
        help="slurm: default: as the cluster has devices",
    )
    group.add_argument(
        "--parallel",
        type=_COUNT,
        metavar="K",
        help="slurm: most trials at once, on nodes of their own (default: as many as there is room "
        "for)",
    )
    group.add_argument(
        "--nodes",
        type=_COUNT,
        metavar="N",
        help="slurm: of the allocation, for --dry-run without hosts",
    )
    group.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="described machine, for the planner's ranking, memory and placement (default: "
        "MEGATRON_CLUSTER, else on Slurm the space's); none",
    )
    group.add_argument(
        "--headroom",
        default="10%",
        metavar="GIB|%",
        help="of a device's memory that a layout must leave free by the planner's figures (default "
        "10%%)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="of the trials and the report (default: runs/tune-<space>)",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="show the layouts, the planner's best and the most that it may cost; run nothing",
    )
    group.add_argument(
        "--report-only", action="store_true", help="write the report of what was tried; run nothing"
    )
    group.add_argument("--list-spaces", action="store_true", help="show the ready spaces")


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run; returns the exit code."""
    words, flags = split_at_dashes(argv)
    args = build_parser().parse_args(words)
    return tune.run(args, with_preset(args.preset, flags))


if __name__ == "__main__":
    sys.exit(main())
