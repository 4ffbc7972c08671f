"""The command line of training: pretrain_gpt.py, or a script of one's own that calls main() with pieces of its own."""
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron.config import parse_args
from megatron.config.pieces import Pieces
from megatron.errors import MegatronError
from megatron.parallel.launch import Launch, detect_launch, variables_with_flags
from megatron.training.failures import guard_output, leave, run_guarded


def main(arguments: Sequence[str] | None = None, **pieces: Any) -> NoReturn:
    """Train, or dry-run, as the `arguments` say (default: those of this process), and end the process.

    `pieces` are those of one's own, as megatron.pretrain takes them.
    """
    guard_output()
    # When a rank dies, torch would print a page of C++ frames before our line that names the rank.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    leave(run(list(sys.argv[1:] if arguments is None else arguments), **pieces))


def launched(arguments: list[str]) -> tuple[Launch, MegatronError | None]:
    """Which process this is; contradictory launcher variables are reported where other errors are."""
    try:
        return detect_launch(variables_with_flags(arguments)), None
    except MegatronError as error:
        return Launch(), error


def run(arguments: list[str], **pieces: Any) -> int:
    """What `main` does before it ends the process; the exit code."""
    launch, problem = launched(arguments)
    ranks = [launch.rank]  # the launcher's number, then the rank where that is another

    def body() -> None:
        if problem is not None:
            raise problem
        own = Pieces(**pieces)
        if "--dry-run" in arguments and not {"--help", "-h", "--print-config"} & set(arguments):
            from megatron.dryrun.command import dry_run

            raise SystemExit(dry_run(arguments, launch.world_size, own) if launch.rank == 0 else 0)
        alone = launch.launcher == "none" and "--print-config" in arguments  # which may look at any world size
        config = parse_args(arguments, None if alone else launch.world_size, own)
        from megatron.training import pretrain  # after the arguments are known to be right: this imports torch

        pretrain(config, launch, ranks.append)

    return run_guarded(body, lambda: ranks[-1])
