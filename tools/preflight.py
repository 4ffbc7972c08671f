#!/usr/bin/env python
"""Look before node-hours are spent.

    python tools/preflight.py check -N 16 examples/frontier/train_175b.sbatch --train-iters 1000
    srun ... python tools/preflight.py measure --cluster frontier --out folder

check, on a login node: reads the very script or command that will be submitted, without running anything of it, and
says how it would be laid out and what stands against it. measure, in the allocation: every device and link, and which
hosts to leave out. `check --help` and `measure --help` say more.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser
from megatron.errors import ConfigError
from megatron.training.failures import as_tool, leave, run_guarded


def run(half: str, argv: Sequence[str]) -> int:
    """One half; only its modules are imported. Returns the exit code."""
    if half == "check":
        from megatron.jobs import check_job as check

        return check.run(check.parse(argv))
    from megatron.jobs import check_nodes as measure

    parser = Parser("preflight.py measure")
    measure.add_arguments(parser)
    return measure.run(parser.parse_args(argv))


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
