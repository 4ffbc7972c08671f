"""Processes killed or suspended at a chosen moment (fault_points.py), one after another."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

from tests.helpers.fault_points import strike_at


def signal_at(moment: int, directory: str | os.PathLike[str], sent: int = signal.SIGKILL) -> None:
    """Send this process a signal before its moment number `moment` from now on (0 is the next)."""
    strike_at(
        directory,
        moment + 1,
        {signal.SIGKILL: "kill", signal.SIGSTOP: "stop"}[signal.Signals(sent)],
    )


def forked(fn: Callable[[], Any]) -> int:
    """Call `fn` in a child and return its process id.

    The child ends with code 0, or 1 after an exception, which it prints.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        fn()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait_for(pid: int) -> int:
    """Wait for a forked child; return its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_until_stopped(pid: int) -> bool:
    """Wait until a child has been suspended.

    Return False if it has ended instead; it is then reaped.
    """
    return os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
