"""Run a command that the kernel kills when its parent process ends.

    python -I -S parent_watch.py PARENT COMMAND...

PARENT: process ID of the parent. This is a program rather than a preexec_fn, so that no Python code
runs between fork and exec: the parent may have threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends.

    The request (prctl) survives exec.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl was called
        os.kill(os.getpid(), signal.SIGKILL)


def main(parent: int, command: list[str]) -> None:
    """Run the command, which ends with its parent."""
    die_with(parent)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
