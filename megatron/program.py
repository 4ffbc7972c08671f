"""The command line for training: pretrain_gpt.py and user scripts that call main()."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron.checkpoint.export import export_problem
from megatron.checkpoint.settings import settings_to_take
from megatron.config import Config, parse_args
from megatron.config.pieces import Pieces, load_callbacks
from megatron.errors import MegatronError
from megatron.parallel.environment import job_environment
from megatron.parallel.launch import Launch, detect_launch, variables_with_flags
from megatron.training.run.process import Signals, guard_output, leave, run_guarded


def main(arguments: Sequence[str] | None = None, **pieces: Any) -> NoReturn:
    """Train, or dry-run, according to `arguments` (default: sys.argv[1:]), and exit.

    `pieces` are the user's own, as in `pretrain`.
    """
    guard_output()
    # Otherwise, when a rank dies, torch prints a page of C++ frames before our line that names it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    leave(run(list(sys.argv[1:] if arguments is None else arguments), **pieces))


def pretrain(
    config: Config,
    launch: Launch | None = None,
    renumbered: Callable[[int], object] | None = None,
    **pieces: Any,
) -> None:
    """Train according to `config`, with the peer processes, until the end or an exit condition.

    launch       identity of this process; by default read from the environment
    renumbered   called with this process's rank once that is known: it may differ from the
                 launcher's rank (megatron.parallel.rank_mapping)
    pieces       the user's layer, model, datasets, optimizer, schedule or callbacks, instead of
                 the project's (megatron.config.pieces.Pieces)

    Raises MegatronError if the user can fix the cause; the peers of a failed process are informed
    through the rendezvous.
    """
    started = time.monotonic()
    config = config.with_pieces(**pieces)
    launch = launch or detect_launch()
    if launch.rank == 0:
        print(" starting: importing torch and DeepSpeed", flush=True)
    # Both come before the import of torch, which takes seconds and may start HIP.
    with (
        Signals(config.training.exit_signal_handler, prints=launch.rank == 0) as signals,
        job_environment(config) as environment,
    ):
        from megatron.training.run.setup import run_training

        all_callbacks = [*config.pieces.callbacks, *load_callbacks(config.logging.callback or ())]
        config = config.with_pieces(callbacks=all_callbacks)
        ranks = None
        if config.parallel.cluster is not None and launch.world_size > 1:
            from megatron.planner.placement import plan_ranks

            ranks = plan_ranks(config, launch)
        run_training(config, launch, signals, started, renumbered, environment, ranks)


def run(arguments: list[str], **pieces: Any) -> int:
    """Run like `main`, but return the exit code instead of ending the process."""
    launch = Launch()
    problem = None
    try:
        launch = detect_launch(variables_with_flags(arguments))
    except MegatronError as error:
        problem = error  # raised in `body`, where all errors are reported
    ranks = [launch.rank]  # the launcher's rank, later the actual one if it differs

    def body() -> None:
        if problem is not None:
            raise problem
        user_pieces = Pieces(**pieces)
        if "--dry-run" in arguments and not {"--help", "-h", "--print-config"} & set(arguments):
            from megatron.planner.dryrun.rehearsal import dry_run

            raise SystemExit(
                dry_run(arguments, launch.world_size, user_pieces) if launch.rank == 0 else 0
            )
        # a single process may print the configuration of any world size
        alone = launch.launcher == "none" and "--print-config" in arguments
        size = None if alone else launch.world_size
        config = parse_args(arguments, size, user_pieces, settings_to_take, export_problem)
        pretrain(config, launch, ranks.append)

    return run_guarded(body, lambda: ranks[-1])
