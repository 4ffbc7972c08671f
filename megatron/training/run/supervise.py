"""The supervisor of a training process: what it imports beforehand, and when the job may shrink."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from megatron.config import Config
from megatron.engine.deepspeed_engine import import_deepspeed
from megatron.errors import ConfigError
from megatron.parallel.launch import Launch
from megatron.parallel.membership import Membership
from megatron.parallel.supervisor import RestartLimits, Supervisor
from megatron.training.run.process import run_guarded
from megatron.training.run.stopping import requeue

END_VARIABLE = "MEGATRON_JOB_END"
"""Variable with the name of a file for the exit code of the job."""
_DEVICES = ("/dev/kfd", "/dev/nvidia0")  # of ROCm's and of CUDA's driver


def supervise(
    config: Config,
    launch: Launch,
    generations: Callable[[Membership], object],
    started: float,
    received: Sequence[int],
    resized: Callable[[int], Config] | None = None,
) -> int:
    """Supervise a training process until the job ends; return the exit code.

    generations  trains in the forked process, in all generations of the job
    started      time.monotonic() when the program started
    received     signals that came before, which the training process will get
    resized      returns the configuration for another number of ranks, or raises ConfigError

    Raises ConfigError if the job could not continue with fewer ranks, as --min-ranks asks.
    """
    smaller = partial(smaller_world, config, resized)
    least, world = config.training.min_ranks, config.parallel.world_size
    if least is not None and least < world and not smaller(world - 1):
        raise ConfigError(
            f"--min-ranks {least} has no effect: the job needs all its {world} ranks. Ranks leave in "
            f"whole data-parallel replicas ({config.parallel.data_parallel_size} of "
            f"{world // config.parallel.data_parallel_size} ranks), and the others must be able to "
            "take the same global batch: give a smaller number, or leave it out"
        )
    training = config.training
    ranks = [launch.rank]

    def work(membership: Membership) -> int:
        return run_guarded(lambda: generations(membership), lambda: ranks[-1])

    def on_end(saved: bool) -> None:
        say = partial(print, file=sys.stderr, flush=True)
        if training.requeue and saved:
            requeue(os.environ, say)
        elif training.requeue:
            say(" note: the job is not requeued: it has not saved a checkpoint since it began")

    def prepare() -> None:
        import_for_training(config)
        gc.collect()
        gc.freeze()  # collections in forked processes leave the pages of these objects shared

    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    limits = RestartLimits(training.max_restarts, training.spare_ranks, smaller)
    return Supervisor(
        launch, timeout, limits, work, started, received, prepare, on_end, note_end
    ).run()


def note_end(code: int) -> None:
    """Write the exit code of the job into the file that its script has named, if it has.

    From then on the script waits only for a limited time for supervisors that hang.
    """
    path = os.environ.get(END_VARIABLE)
    if not path:
        return
    try:
        with open(path, "x") as file:
            file.write(f"{code}\n")
    except FileExistsError:
        pass  # another supervisor was faster
    except OSError as error:
        print(f" note: {END_VARIABLE}: {error}", file=sys.stderr, flush=True)


def import_for_training(config: Config) -> None:
    """Import what a training process needs, so that one that is forked later starts at once.

    No device is opened: a forked process could not use it.
    """
    gloo = config.parallel.distributed_backend == "gloo"
    on_cpu = gloo or not any(Path(path).exists() for path in _DEVICES)
    if not on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cuda")  # DeepSpeed would look for devices
    import_deepspeed("cpu" if on_cpu else "cuda")
    import numpy.random  # noqa: F401
    import rich.progress  # noqa: F401

    import megatron.checkpoint.load
    import megatron.checkpoint.save
    import megatron.training.run.setup  # noqa: F401


def smaller_world(config: Config, resized: Callable[[int], Config] | None, available: int) -> int:
    """Return the largest number of ranks, at most `available`, that keeps the global batch.

    Ranks leave in whole data-parallel replicas. Returns 0 if there is no such number, or if
    --min-ranks does not allow it.
    """
    world = config.parallel.world_size
    least = config.training.min_ranks or world
    replica = world // config.parallel.data_parallel_size
    if resized is None:
        return 0
    for size in range(available - available % replica, max(least, 1) - 1, -replica):
        try:
            if resized(size).batch.global_batch_size == config.batch.global_batch_size:
                return size
        except ConfigError:
            continue
    return 0
