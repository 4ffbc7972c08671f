#!/usr/bin/env python
"""Train a GPT. `python pretrain_gpt.py --help` lists the settings; docs/architecture.md shows the path of a run."""
import os
import sys

from megatron.config import parse_args
from megatron.errors import MegatronError
from megatron.parallel.launch import Launch, detect_launch, variables_with_flags
from megatron.training.failures import guard_output, leave, run_guarded


def launched(arguments: list[str]) -> tuple[Launch, MegatronError | None]:
    """Which process this is; contradictory launcher variables are reported where other errors are."""
    try:
        return detect_launch(variables_with_flags(arguments)), None
    except MegatronError as error:
        return Launch(), error


def main(arguments: list[str]) -> int:
    launch, problem = launched(arguments)
    ranks = [launch.rank]  # the launcher's number, then the rank where that is another

    def body() -> None:
        if problem is not None:
            raise problem
        if "--dry-run" in arguments and not {"--help", "-h", "--print-config"} & set(arguments):
            from megatron.dryrun.command import dry_run

            raise SystemExit(dry_run(arguments, launch.world_size) if launch.rank == 0 else 0)
        alone = launch.launcher == "none" and "--print-config" in arguments  # which may look at any world size
        config = parse_args(arguments, None if alone else launch.world_size)
        from megatron.training import pretrain  # after the arguments are known to be right: this imports torch

        pretrain(config, launch, ranks.append)

    return run_guarded(body, lambda: ranks[-1])


if __name__ == "__main__":
    guard_output()
    # When a rank dies, torch would print a page of C++ frames before our line that names the rank.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    leave(main(sys.argv[1:]))
