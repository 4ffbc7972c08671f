#!/usr/bin/env python
"""Find the fastest layout or the best learning rate by short training runs, chosen by a search.

    python tools/tune.py --list-spaces
    python tools/tune.py --space two-cores --no-prior --max-trials 20
    python tools/tune.py --space my.toml --cluster machine.toml --walltime 2:00:00 -- --preset gpt-1.4b
    python tools/tune.py --space paper-175b --nodes 16 --dry-run

Runs on this machine, or inside a Slurm allocation (examples/frontier/tune.sbatch), where trials run
side by side on separate nodes. After an interruption the same command resumes without repeating
trials. See docs/tuning.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.command_line import add_preset, split_at_dashes, with_preset
from megatron.config.option import MOST_PROCESSES, Parser, integer, real
from megatron.jobs import tune
from megatron.jobs.runner import add_launch_flags
from megatron.jobs.search import SEARCHES
from megatron.jobs.trial_statistics import OBJECTIVES
from megatron.planner.memory import HEADROOM
from megatron.training.run.process import as_tool

_COUNT, _SECONDS = integer(1, MOST_PROCESSES), real()

EPILOG = """\
searches:
{searches}

Exit codes: 0 all trials are done, and there is a best layout; 1 no layout has valid figures; 2
error in the input; 3 interrupted, or time or nodes ran out before all trials were done: the same
command resumes; 4 out of time before any trial finished."""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    width = max(map(len, SEARCHES))
    searches = "\n".join(f"  {name:{width}}  {text}" for name, text in SEARCHES.items())
    parser = Parser(
        description=__doc__,
        epilog=EPILOG.format(searches=searches),
        usage="%(prog)s --space FILE|NAME [options] [-- flags of pretrain_gpt.py]",
    )
    _add_search(parser.add_argument_group("search"))
    _add_trials(parser.add_argument_group("trials"))
    _add_devices(parser.add_argument_group("devices"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--space",
        metavar="FILE|NAME",
        help="TOML file with the space, or name of a built-in space (--list-spaces)",
    )
    add_preset(group)
    group.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default=OBJECTIVES[0],
        help="what to optimise: tokens per second, node-hours per token, or the validation loss of "
        f"a space with [trial] tokens (default {OBJECTIVES[0]})",
    )
    group.add_argument(
        "--search",
        choices=tuple(SEARCHES),
        default="auto",
        help="search algorithm, see below (default auto)",
    )
    group.add_argument(
        "--no-prior", action="store_true", help="search without the planner's ranking"
    )
    group.add_argument(
        "--seed",
        type=integer(0),
        default=0,
        metavar="S",
        help="seed of the search (default 0)",
    )
    group.add_argument(
        "--max-trials",
        type=_COUNT,
        metavar="N",
        help="maximum number of trials, including those of earlier runs of this command, without "
        "those of --confirm (default: until the space is exhausted)",
    )
    group.add_argument(
        "--confirm",
        type=integer(0),
        default=3,
        metavar="N",
        help="after the search, spend up to N more trials on repeating the best candidates that "
        "differ only within the measured noise; the best median wins (default 3; 0: none)",
    )
    group.add_argument(
        "--walltime",
        metavar="T",
        help="time limit of this run of the command: 90 (minutes), 1:30:00 or 1-00:00:00; "
        "no trial is started that is not expected to finish in time (default: the "
        "allocation's limit, or none)",
    )
    group.add_argument(
        "--retry-failed",
        action="store_true",
        help="repeat trials of earlier runs that gave no valid figures, except those stopped early",
    )


def _add_trials(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--iterations",
        type=_COUNT,
        metavar="N",
        help="measured steps per trial (default: the space's)",
    )
    group.add_argument(
        "--warm-up",
        type=integer(0),
        metavar="N",
        help="steps before the measured ones (default: the space's)",
    )
    group.add_argument(
        "--tokens",
        type=integer(),
        metavar="N",
        help="tokens of a trial, for --objective valid_loss (default: the space's)",
    )
    group.add_argument(
        "--trial-limit",
        type=_SECONDS,
        metavar="SECONDS",
        help="time limit of a trial (default: from the planner's step time, 1800 without it)",
    )
    group.add_argument(
        "--stall",
        type=_SECONDS,
        metavar="SECONDS",
        help="a trial without a new step for this long counts as hanging (default: from the "
        "trial's earlier steps)",
    )


def _add_devices(group: argparse._ArgumentGroup) -> None:
    add_launch_flags(group, None)
    group.add_argument(
        "--processes",
        type=_COUNT,
        metavar="N",
        help="local: number of devices for trials (default: those of --cluster, else the "
        "GPUs, else the number of cores, or of processes in the space if that is larger)",
    )
    group.add_argument(
        "--parallel",
        type=_COUNT,
        metavar="K",
        help="slurm: maximum number of concurrent trials, each on its own nodes (default: "
        "as many as fit)",
    )
    group.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="machine for the planner's ranking, memory and placement; none: no planner "
        "(default: MEGATRON_CLUSTER, else with slurm the cluster that the space names)",
    )
    group.add_argument(
        "--headroom",
        default=f"{HEADROOM:.0%}",
        metavar="GIB|%",
        help="device memory that a layout must leave free, as estimated by the planner (default "
        f"{HEADROOM:.0%}%)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for trials and report (default: runs/tune-<space>)",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="show the layouts, the planner's best and the maximum cost; run nothing",
    )
    group.add_argument(
        "--report-only",
        action="store_true",
        help="write the report of the trials so far; run nothing",
    )
    group.add_argument("--list-spaces", action="store_true", help="list the built-in spaces")


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code."""
    words, flags = split_at_dashes(argv)
    args = build_parser().parse_args(words)
    return tune.run(args, with_preset(args.preset, flags))


if __name__ == "__main__":
    sys.exit(main())
