"""Errors that a user sees without a traceback, and how they are printed.

Each message says what is wrong, where, which value, and what to do instead. Violated internal
invariants are assertions.
"""

from __future__ import annotations

import errno
import sys

# a rank died or hung: nothing to fix, start the job again (EX_TEMPFAIL in sysexits.h)
EXIT_LOST_RANK = 75

BUILD = (
    "run `python setup.py build_ext --inplace` in the repository, which needs a C++ compiler and "
    "pybind11, or `pip install .`"
)
"""Command that builds the extensions in csrc/, for messages."""


class MegatronError(Exception):
    """Base class of all errors that are meant for the user."""


class ConfigError(MegatronError):
    """A setting, or a combination of settings, that cannot run."""


class LaunchError(MegatronError):
    """Processes that cannot start together, or that lose each other.

    Causes are missing or dead ranks, contradictory launcher variables, a device order that does not
    fit the nodes, or a network that moves wrong data.
    """


class LostRankError(LaunchError):
    """A rank that died, hung or was cut off during the run.

    There is nothing for the user to fix: the job can be restarted.
    """


class DataError(MegatronError):
    """Data that is missing, truncated or of the wrong type."""


class CheckpointError(MegatronError):
    """A checkpoint that is missing, incomplete, does not fit the model or cannot be written."""


class KernelError(MegatronError):
    """A fused operator with unsupported arguments, or a kernel or kernel library that fails.

    Also a damaged file of measured times.
    """


class TrainingError(MegatronError):
    """A training run that cannot continue.

    Its losses or gradients are not finite, its loss stays too high, no token is in its loss, or
    copies of its weights differ.
    """


class DifferingCopiesError(TrainingError):
    """Copies of the weights differ between ranks; an earlier state may be good."""


class NodeError(OSError):
    """An error of a device, a file system or the network, which another node may not have.

    There is nothing for the user to fix. It is no MegatronError: the process ends with exit code 1,
    after which it may be started anew.
    """

    def __str__(self) -> str:
        return self.strerror or super().__str__()


# EBADMSG: the checksum of a block is wrong; EUCLEAN: the file system is damaged
_OF_NODE = set(
    "EIO ENXIO ENODEV EPROTO EBADMSG EUCLEAN EREMOTEIO ENOLINK ECOMM ESTALE ENOTCONN ESHUTDOWN "
    "ENETDOWN ENETUNREACH ENETRESET ECONNABORTED ECONNRESET ECONNREFUSED ETIMEDOUT EHOSTDOWN "
    "EHOSTUNREACH".split()
)


def reading_error(
    cause: BaseException, message: str, kind: type[MegatronError]
) -> NodeError | MegatronError:
    """Return the error with `message` for a file that cannot be read because of `cause`.

    It is a NodeError if the node is the reason, otherwise one of `kind`: the file is wrong.
    """
    if isinstance(cause, OSError) and errno.errorcode.get(cause.errno or 0) in _OF_NODE:
        return NodeError(cause.errno, message)
    return kind(message)


def print_error(error: BaseException | str, rank: int = 0, prefix: str = "error") -> None:
    """Print an error on standard error.

    Rank 0 prints it in full after the prefix; other ranks print one line that begins with the rank.
    """
    text = f"{prefix}: {error}"
    if rank:
        text = f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())}"
    flush_output()
    print(text, file=sys.stderr, flush=True)


def flush_output() -> None:
    """Flush standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # the standard streams may be closed at start
            stream.flush()
