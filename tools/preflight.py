#!/usr/bin/env python
"""Check a job, or the nodes of an allocation, before node-hours are spent.

    python tools/preflight.py check -N 16 examples/frontier/train_175b.sbatch --train-iters 1000
    srun ... python tools/preflight.py measure --cluster frontier --out folder

check     on a login node, before a job is submitted: show its errors, cost and unchecked parts
measure   in an allocation: test every device and node, and list the nodes to exclude

Each has its own --help.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser, real
from megatron.errors import ConfigError
from megatron.training.run.process import as_tool, leave, run_guarded

MEASURE = """\
Test every device and node of an allocation. Start one process per device, as for the training:

    srun -N $N -n $((8 * N)) -c 7 --gpus-per-task=1 --gpu-bind=closest --kill-on-bad-exit=0 --wait=30 \\
        python tools/preflight.py measure --out logs/preflight

Times and checks a matrix product, an all-reduce within each node, and an all-reduce with each neighbouring node. Names
slow, broken and missing nodes, and prints a line --exclude=... for them. srun may return another exit code than rank 0
if a process died, so a script should read good_hosts.

Exit codes of rank 0: 0 all nodes are good; 4 some are not; 2 error in the input."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `measure`; check_job.py has the parser of `check`."""
    parser = Parser("preflight.py measure", description=MEASURE)
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        default=os.environ.get("MEGATRON_CLUSTER") or "none",
        help="machine whose [bands] devices and links must reach; none: compare ranks with "
        "each other only (default: MEGATRON_CLUSTER, else none). On a CPU, speed is not judged",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder for good_hosts and bad_hosts"
    )
    parser.add_argument(
        "--seconds",
        type=real(least=5),
        default=60.0,
        metavar="S",
        help="time limit of each measurement; processes that have not reported on their device "
        "after twice this time count as missing (default 60)",
    )
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), help="default: nccl (RCCL) with devices, else gloo"
    )
    return parser


def run(half: str, argv: Sequence[str]) -> int:
    """Run check or measure, importing only its modules. Return the exit code."""
    if half == "check":
        from megatron.jobs import check_job

        return check_job.run(argv)
    args = build_parser().parse_args(argv)
    from megatron.jobs import check_nodes

    return check_nodes.run(args)


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if argv[0] not in ("check", "measure"):
        raise ConfigError(f"'{argv[0]}' is neither check nor measure")
    codes: list[int] = []
    failed = run_guarded(lambda: codes.append(run(argv[0], argv[1:])), 0, "error")
    return codes[0] if codes else failed


def command() -> None:
    """Run as a program that exits without waiting for threads of libraries."""
    leave(main())


if __name__ == "__main__":
    command()
