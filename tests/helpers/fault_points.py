"""Named fault points: a test chooses what a process does at a certain point of the code.

The points are audit events (PEP 578). Python raises its own ("open", "os.rename", ...), and the
library raises "megatron.<subpackage>.<point>" by sys.audit where there is no such event: after a
sync, between two phases of a rendezvous, after a step. Only tests listen to them, so they cost
nothing and need no switch.

    # rank 1 dies after its third step
    launch(2, arguments, arm={1: (strike, "megatron.run.step", 3, "kill")})

A moment is a point of the library or an operation on a file of a folder. Between two moments
nothing on disk changes but the content of open files, so the moments are all the places where a
kill can matter. `record` lists those of a run; `strike_at` strikes at one of them, chosen by number
and name, so that nothing depends on chance or on sleeping.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

FILES = {
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.utime",
    "os.truncate",
    "os.scandir",
    "os.listdir",
}
_FOLDER_ARGUMENT = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.rename": 2}
_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
}


def on(event: str, act: Callable[..., object], nth: int = 1, containing: str = "") -> None:
    """Call act(*arguments of the event) at the nth `event` of this process, counted from 1.

    containing: count only events whose arguments, as text, contain this.
    """
    left = nth

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if (
            name == event
            and left
            and (not containing or containing in " ".join(map(str, arguments)))
        ):
            left -= 1
            if not left:
                act(*arguments)

    sys.addaudithook(hook)


def strike(event: str, nth: int, what: str, containing: str = "") -> None:
    """Arm this process to fail at an event.

    what: "kill", "stop", "terminate" and "interrupt" send it a signal, "fail" raises RuntimeError,
    "full" raises the OSError of a full disk (ENOSPC). For `nth` and `containing` see `on`.
    """
    on(event, lambda *_: _act(what, event), nth, containing)


def strike_once(
    marker: str | os.PathLike[str], event: str, first: object, what: str, nth: int = 1
) -> None:
    """Strike once in a job whose training processes are forked from this one, or started anew.

    The strike comes at the nth `event` of a process whose first argument is `first` (None: any),
    unless the file `marker` exists, which it creates. `what` is as in `strike`; "supervisor" kills
    the parent, with which the kernel ends the training process.
    """
    left = nth

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if name != event or not left or (first is not None and first not in arguments[:1]):
            return
        left -= 1
        if left:
            return
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        if what == "supervisor":
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        _act(what, event)

    sys.addaudithook(hook)


def strike_at(folder: str | os.PathLike[str], nth: int, what: str, name: str = "") -> None:
    """Strike as `strike` does, before the nth moment of this process from now on.

    name: count only moments of that name.
    """
    left = nth

    def look(moment: str) -> None:
        nonlocal left
        if name in ("", moment) and left:
            left -= 1
            if not left:
                _act(what, moment)

    _on_moments(folder, look)


def record(folder: str | os.PathLike[str], log: str | os.PathLike[str]) -> None:
    """Write the name of every moment of this process to a file, one per line."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    _on_moments(folder, lambda moment: os.write(handle, f"{moment}\n".encode()))


def _on_moments(folder: str | os.PathLike[str], call: Callable[[str], object]) -> None:
    prefix = os.path.abspath(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if moment := moment_name(event, arguments, prefix):
            call(moment)

    sys.addaudithook(hook)


def moment_name(event: str, arguments: tuple[Any, ...], prefix: str) -> str:
    """Return the moment's name, with # for every number and digest in the path below `prefix`.

    An event of the library may have the name of a moment as its first argument. Return "" if the
    event is not a moment.
    """
    if event.startswith("megatron."):
        named = arguments and isinstance(arguments[0], str) and arguments[0].isidentifier()
        return f"{event} {arguments[0]}" if named else event
    if event not in FILES:
        return ""
    path = _path(event, arguments)
    if not path.startswith(prefix):
        return ""
    return (
        f"{event} "
        f"{re.sub(r'(?<=[.])[0-9a-f]{8}(?=[.])|[0-9]+', '#', path.removeprefix(prefix).lstrip('/'))}"
    )


def _path(event: str, arguments: tuple[Any, ...]) -> str:
    """Return the path of an event's file, "" if it has none."""
    path = arguments[0]
    try:
        if isinstance(path, int):  # just opened by os.open and passed to a Python object
            return os.readlink(f"/proc/self/fd/{path}")
        if not isinstance(path, str | bytes | os.PathLike):
            return ""
        at = _FOLDER_ARGUMENT.get(event)
        beside = arguments[at] if at is not None and len(arguments) > at else -1
        parent = (
            os.readlink(f"/proc/self/fd/{beside}")
            if isinstance(beside, int) and beside >= 0
            else ""
        )
    except OSError:
        return ""
    return os.path.abspath(os.path.join(parent, os.fsdecode(path)))


def _act(what: str, where: str) -> None:
    if what == "fail":
        raise RuntimeError(f"planted at {where}")
    if what == "full":
        raise OSError(28, "No space left on device")
    os.kill(os.getpid(), _SIGNALS[what])
