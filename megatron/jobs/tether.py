"""Run a command that ends when its starter ends, and that gets no more memory than it may.

    python -I -S tether.py PARENT BYTES COMMAND...

PARENT: the process that must live, which started this one; 0: any. BYTES: of private writable memory that each process
of the command may map (RLIMIT_DATA, Linux 4.7 and later); 0: any. A program of its own that imports nothing of this
package: a node has to run it before anything else is there, and no Python code then runs between a fork and an exec in
the starter, which may have threads.
"""
from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """From now on Linux kills this process when the thread that started it ends (prctl(2)); an exec keeps that."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def take_at_most(n_bytes: int) -> None:
    """Limit this process and those that it starts. A lower limit that holds already stays."""
    limits = [n for n in (n_bytes, *resource.getrlimit(resource.RLIMIT_DATA)) if n != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), min(limits)))


def main(words: Sequence[str]) -> None:
    parent, n_bytes = int(words[0]), int(words[1])
    if n_bytes:
        take_at_most(n_bytes)
    if parent:
        end_with(parent)
    os.execvp(words[2], list(words[2:]))


if __name__ == "__main__":
    main(sys.argv[1:])
