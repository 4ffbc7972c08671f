"""The run: set-up, loop, evaluation, batch ramp-up, metrics and logs, text generation.

Importing this package does not import torch: a mistake on the command line is reported before that second is spent.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.parallel.environment import job_environment
from megatron.training.signals import Signals

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.parallel.launch import Launch


def pretrain(
    config: Config, launch: Launch | None = None, renumbered: Callable[[int], object] | None = None, **pieces: Any
) -> None:
    """Train as `config` says, in this process and its peers, until the end or until an exit condition.

    `pieces` are those of one's own, which take the place of the project's: layer, model, datasets, optimizer, schedule,
    callbacks (megatron.config.pieces.Pieces).
    `launch` says which process this is (default: read from the environment). Raises MegatronError for what a user can
    mend; the peers of a process that fails hear of it through the rendezvous. `renumbered` is called with this
    process's rank once that is known: it may be another than the launcher's, see megatron.parallel.placing.
    """
    started, config = time.monotonic(), config.with_pieces(**pieces)
    # Both before torch is imported, which takes seconds and may start HIP.
    with Signals(config.training.exit_signal_handler) as signals, job_environment(config) as environment:
        from megatron.training.setup import run_training

        run_training(config, launch, signals, started, renumbered, environment)


__all__ = ["pretrain"]
