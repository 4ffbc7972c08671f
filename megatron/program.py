"""The command line of training: pretrain_gpt.py, or a script of one's own that calls main() with
pieces of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron.config import Config, parse_args
from megatron.config.pieces import Pieces
from megatron.errors import MegatronError
from megatron.parallel.environment import job_environment
from megatron.parallel.launch import Launch, detect_launch, variables_with_flags
from megatron.training.run.process import Signals, guard_output, leave, run_guarded


def main(arguments: Sequence[str] | None = None, **pieces: Any) -> NoReturn:
    """Train, or dry-run, as the `arguments` say (default: those of this process), and end the
    process.

    `pieces` are those of one's own, as megatron.pretrain takes them.
    """
    guard_output()
    # When a rank dies, torch would print a page of C++ frames before our line that names the rank.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    leave(run(list(sys.argv[1:] if arguments is None else arguments), **pieces))


def pretrain(
    config: Config,
    launch: Launch | None = None,
    renumbered: Callable[[int], object] | None = None,
    **pieces: Any,
) -> None:
    """Train as `config` says, in this process and its peers, until the end or until an exit
    condition.

    `pieces` are those of one's own, which take the place of the project's: layer, model, datasets,
    optimizer, schedule, callbacks (megatron.config.pieces.Pieces).
    `launch` says which process this is (default: read from the environment). Raises MegatronError
    for what a user can mend; the peers of a process that fails hear of it through the rendezvous.
    `renumbered` is called with this process's rank once that is known: it may be another than the
    launcher's, see megatron.parallel.placing.
    """
    started, config, launch = (
        time.monotonic(),
        config.with_pieces(**pieces),
        launch or detect_launch(),
    )
    # Both before torch is imported, which takes seconds and may start HIP.
    with (
        Signals(config.training.exit_signal_handler) as signals,
        job_environment(config) as environment,
    ):
        from megatron.training.run.setup import run_training

        ranks = None
        if config.parallel.cluster is not None and launch.world_size > 1:
            from megatron.planner.placement import plan_ranks

            ranks = plan_ranks(config, launch)
        run_training(config, launch, signals, started, renumbered, environment, ranks)


def launched(arguments: list[str]) -> tuple[Launch, MegatronError | None]:
    """Which process this is; contradictory launcher variables are reported where other errors
    are.
    """
    try:
        return detect_launch(variables_with_flags(arguments)), None
    except MegatronError as error:
        return Launch(), error


def run(arguments: list[str], **pieces: Any) -> int:
    """Run as `main` does, and return the exit code instead of ending the process."""
    launch, problem = launched(arguments)
    ranks = [launch.rank]  # the launcher's number, then the rank where that is another

    def body() -> None:
        if problem is not None:
            raise problem
        own = Pieces(**pieces)
        if "--dry-run" in arguments and not {"--help", "-h", "--print-config"} & set(arguments):
            from megatron.planner.dryrun.rehearsal import dry_run

            raise SystemExit(dry_run(arguments, launch.world_size, own) if launch.rank == 0 else 0)
        # which may look at any world size
        alone = launch.launcher == "none" and "--print-config" in arguments
        config = parse_args(arguments, None if alone else launch.world_size, own)
        pretrain(config, launch, ranks.append)

    return run_guarded(body, lambda: ranks[-1])
