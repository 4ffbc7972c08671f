"""Errors that a user can cause and a user can mend, and how they are printed.

Each message says what is wrong, where, which value, and what to do instead. Broken invariants of
our own are assertions; these are not.
"""

from __future__ import annotations

import sys


class MegatronError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(MegatronError):
    """A setting, or a combination of settings, that cannot run."""


class LaunchError(MegatronError):
    """Processes that did not come together: a missing rank, contradictory launcher variables, a
    dead peer.
    """


class LostRankError(LaunchError):
    """A rank that died, hung or was cut off while the run went on: nothing to mend, to be started
    again.
    """


class DataError(MegatronError):
    """Data that is missing, truncated or of the wrong kind."""


class CheckpointError(MegatronError):
    """A checkpoint that is missing, incomplete or does not fit the model."""


class KernelError(MegatronError):
    """A fused operator that was given what it cannot take, or a kernel that could not be
    launched.
    """


class TrainingError(MegatronError):
    """A training that cannot go on: losses or gradients that are not finite, or a loss that will
    not come down.
    """


def print_error(error: BaseException | str, rank: int = 0, prefix: str = "error") -> None:
    """Print an error on standard error: rank 0 in full behind the prefix, others in one line behind
    their number.
    """
    text = f"{prefix}: {error}"
    if rank:
        text = f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())}"
    flush_output()
    print(text, file=sys.stderr, flush=True)


def flush_output() -> None:
    """Write out what is buffered of standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # of a program that was started with a closed one
            stream.flush()
