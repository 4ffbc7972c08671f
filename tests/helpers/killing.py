"""Stop a process at a chosen moment: before the n-th time that it opens, renames or removes a file in a folder.

Between two such moments nothing changes on disk but the content of files that are open, so all n together are all
moments at which a kill can matter, tried without luck and without sleeping.
"""
from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_EVENTS = {
    "open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.utime", "os.truncate", "os.scandir", "os.listdir",
}  # fmt: skip


def signal_at(moment: int, directory: str | os.PathLike[str], sent: int = signal.SIGKILL) -> None:
    """From now on this process sends itself a signal before its file operation number `moment` (0 is the next)."""
    folder, left = os.path.abspath(directory), moment

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in _EVENTS:
            return
        path = arguments[0]
        # A number is a file that was opened just now, by os.open, and is given a Python object.
        if isinstance(path, int) or (isinstance(path, str | Path) and os.path.abspath(path).startswith(folder)):
            left -= 1
            if left == -1:
                os.kill(os.getpid(), sent)

    sys.addaudithook(hook)


def forked(fn: Callable[[], Any]) -> int:
    """Call `fn` in a child; its process id. The child ends with code 0, or 1 after an exception, which it prints."""
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
    """Wait for a forked child: its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_until_stopped(pid: int) -> bool:
    """Wait until a child has been suspended; False when it has ended instead, and is then gone."""
    return os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
