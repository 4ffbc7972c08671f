"""Run a command that the kernel kills when its starter ends.

    python -I -S tether.py PARENT COMMAND...

PARENT: process id of the starter. A program of its own, so that no Python code runs between a fork and an exec in the
starter, which may have threads.
"""
from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Replace this process by the command, bound to the thread that started it (prctl(2)); an exec keeps that."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
