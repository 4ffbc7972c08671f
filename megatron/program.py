"""The command line for training: pretrain_gpt.py and user scripts that call main()."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.checkpoint.export import export_problem
from megatron.checkpoint.settings import settings_to_take
from megatron.config import Config, parse_args
from megatron.config.pieces import Pieces, load_callbacks
from megatron.errors import EXIT_LOST_RANK, LostRankError, MegatronError
from megatron.parallel.environment import job_environment
from megatron.parallel.launch import Launch, detect_launch, variables_with_flags
from megatron.training.run.process import Signals, guard_output, leave, run_guarded, signals_noted

if TYPE_CHECKING:  # both import torch
    from megatron.parallel.membership import Membership


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
    resized: Callable[[int], Config] | None = None,
    **pieces: Any,
) -> None:
    """Train according to `config`, with the peer processes, until the end or an exit condition.

    launch       identity of this process; by default read from the environment
    renumbered   called with this process's rank once that is known: it may differ from the
                 launcher's rank (megatron.parallel.rank_mapping)
    resized      returns the configuration for another number of ranks, with which a restart within
                 the job may continue; raises ConfigError if there is none. By default the number of
                 ranks stays as it is
    pieces       the user's layer, model, datasets, optimizer, schedule or callbacks, instead of
                 the project's (megatron.config.pieces.Pieces)

    Raises MegatronError if the user can fix the cause; the peers of a failed process are informed
    through the rendezvous. With --max-restarts this process supervises another one, which trains:
    raises SystemExit if that one fails.
    """
    started = time.monotonic()
    config = config.with_pieces(**pieces)
    launch = launch or detect_launch()
    if launch.rank == 0:
        print(" starting: importing torch and DeepSpeed", flush=True)
    if not config.training.max_restarts:
        with Signals(config.training.exit_signal_handler, prints=launch.rank == 0) as signals:
            train(config, launch, signals, started, renumbered)
        return
    from megatron.parallel.membership import started_by_supervisor

    def generations(membership: Membership) -> None:
        now = config
        with Signals(config.training.exit_signal_handler, prints=launch.rank == 0) as signals:
            while (generation := membership.next()) is not None:
                identity = generation.launch
                if identity.world_size != now.parallel.world_size and resized is not None:
                    now = resized(identity.world_size).with_pieces(**pieces)
                if renumbered is not None:
                    renumbered(identity.rank)
                if train(now, identity, signals, membership.started, renumbered, membership):
                    return
                from megatron.training.run.callbacks import keep_state

                if keep_state(now.pieces.callbacks):
                    raise SystemExit(EXIT_LOST_RANK)  # the supervisor forks a process in its place
        raise LostRankError(f"{membership.cause}: the job has ended")

    if (membership := started_by_supervisor()) is not None:
        generations(membership)
        return
    with job_environment(config), signals_noted() as received:
        from megatron.training.run.supervise import supervise

        code = supervise(config, launch, generations, started, received, resized)
    if code:
        raise SystemExit(code)


def train(
    config: Config,
    launch: Launch,
    signals: Signals,
    started: float,
    renumbered: Callable[[int], object] | None,
    membership: Membership | None = None,
) -> bool:
    """Train as `pretrain` does; return False if a fault ended it and the job will restart."""
    # The variables are set before the import of torch, which takes seconds and may start HIP.
    with job_environment(config) as environment:
        from megatron.training.run.setup import run_training

        all_callbacks = [*config.pieces.callbacks, *load_callbacks(config.logging.callback or ())]
        config = config.with_pieces(callbacks=all_callbacks)
        ranks = None
        if config.parallel.cluster is not None and launch.world_size > 1:
            from megatron.planner.placement import plan_ranks

            ranks = plan_ranks(config, launch)
        return run_training(
            config, launch, signals, started, renumbered, environment, ranks, membership
        )


def check_all(config: Config) -> list[str]:
    """Check what a run with this configuration checks before its first step; return notices.

    Raises MegatronError.
    """
    from megatron.planner.run_checks import check_run

    return [f"not checked: {text}" for text in check_run(config)]


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
            from megatron.planner.trace import check_torch

            check_torch()
            from megatron.planner.dryrun.rehearsal import dry_run

            raise SystemExit(
                dry_run(arguments, launch.world_size, user_pieces) if launch.rank == 0 else 0
            )
        # a single process may print the configuration of any world size
        alone = launch.launcher == "none" and "--print-config" in arguments
        size = None if alone else launch.world_size

        def settings(started: int | None) -> Config:
            return parse_args(
                arguments, started, user_pieces, settings_to_take, export_problem, check_all
            )

        config = settings(size)
        spares = config.training.spare_ranks
        pretrain(config, launch, ranks.append, lambda ranks: settings(ranks + spares))

    return run_guarded(body, lambda: ranks[-1])
