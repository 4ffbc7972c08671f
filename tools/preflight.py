#!/usr/bin/env python
"""Look before node-hours are spent.

    python tools/preflight.py check -N 16 examples/frontier/train_175b.sbatch --train-iters 1000
    srun ... python tools/preflight.py measure --cluster frontier --out folder

check, on a login node: what stands against the job that would be submitted, what it costs, and what was not checked.
measure, in the allocation: every device and node, and which nodes to leave out. `check --help` and `measure --help` say
more.
"""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser, real
from megatron.errors import ConfigError
from megatron.training.run.process import as_tool, leave, run_guarded

MEASURE = """\
Test every device and node of an allocation, with one process for each device, as the training has it:

    srun -N $N -n $((8 * N)) -c 7 --gpus-per-task=1 --gpu-bind=closest --kill-on-bad-exit=0 --wait=30 \\
        python tools/preflight.py measure --out logs/preflight

Slow, broken and absent nodes are named, and a line --exclude=... is printed. Exit code of rank 0: 0 all nodes are good,
4 some are not, 2 a wrong setting. srun's own code may differ when another process died or was ended after --wait:
good_hosts is what a script should look at."""


def build_parser() -> argparse.ArgumentParser:
    """The options of `measure`; those of `check`, which stand between sbatch's, are in megatron/jobs/check_job.py."""
    parser = Parser("preflight.py measure", description=MEASURE)
    parser.add_argument(
        "--cluster", metavar="NAME|FILE", default=os.environ.get("MEGATRON_CLUSTER") or "none",
        help="machine whose bands a measurement has to lie in; default: MEGATRON_CLUSTER. Without one, and on a CPU, "
             "ranks are compared with each other",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for good_hosts and bad_hosts")
    parser.add_argument(
        "--seconds", type=real(least=5), default=60.0, metavar="S",
        help="that each measurement may take; processes that have not come after twice as long are given up "
             "(default 60)",
    )  # fmt: skip
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl (RCCL) where there are devices")
    return parser


def run(half: str, argv: Sequence[str]) -> int:
    """One half; only its modules are imported. Returns the exit code."""
    if half == "check":
        from megatron.jobs import check_job

        return check_job.run(argv)
    args = build_parser().parse_args(argv)
    from megatron.jobs import check_nodes

    return check_nodes.run(args)


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if argv[0] not in ("check", "measure"):
        raise ConfigError(f"'{argv[0]}' is neither check nor measure")
    codes: list[int] = []
    failed = run_guarded(lambda: codes.append(run(argv[0], argv[1:])), 0, "error")
    return codes[0] if codes else failed


if __name__ == "__main__":
    leave(main())
