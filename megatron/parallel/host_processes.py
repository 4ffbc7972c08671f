"""This process and other processes on this host. Needs no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from megatron.errors import LaunchError

T = TypeVar("T")

GONE = "gone"
DEAD = "dead"
STOPPED = "stopped"
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting in the kernel (D), for a disk, a network or a driver",
    "T": STOPPED,
    "t": "stopped by a debugger",
    "Z": DEAD,
    "X": DEAD,
    "I": "idle",
}
_LIBRARY_THREADS = ("bounded", "rendezvous", "watchdog")  # omitted from stacks


# -- time limits, connections and stacks of this process ------------------------------------------------------


def bounded(
    function: Callable[[], T],
    seconds: float,
    failure: str = "the store gave no answer",
    failed: Future[None] | None = None,
) -> T:
    """Return the function's result; raise LaunchError if it takes longer than `seconds`.

    Also raises LaunchError as soon as `failed` is done, which means that another rank has failed.

    For calls into torch that cannot be interrupted: a store whose host lost power never answers,
    and gloo waits five times its timeout for a peer that died before it connected. After a
    LaunchError the call continues in its own thread.
    """
    outcome: Future[T] = Future()

    def body() -> None:
        try:
            outcome.set_result(function())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=body, name="bounded", daemon=True).start()
    waited: set[Future[Any]] = {outcome, failed or outcome}
    wait(waited, seconds, FIRST_COMPLETED)
    if not outcome.done():
        if failed is not None and failed.done():
            raise LaunchError(f"{failure}: another rank failed")
        raise LaunchError(f"{failure} within {seconds:g} s")
    return outcome.result()


def sockets() -> dict[int, int]:
    """Return {inode: descriptor} of this process's sockets."""
    descriptors = dict[int, int]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket":
                descriptors[int(inode.strip("[]"))] = int(name)
    return descriptors


def shut_down(inodes: Set[int]) -> None:
    """Shut down the TCP connections with these inodes, so that reads and writes on them fail."""
    for inode, descriptor in sockets().items():
        if inode in inodes:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if one.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                    one.shutdown(socket.SHUT_RDWR)


def python_stacks(limit: int) -> str:
    """Return the Python stacks of this process in at most about `limit` characters.

    The main thread comes first, one frame per line, innermost last; then, after an empty line, one
    line for each other thread, without those of this library. If the text is too long, other
    threads are left out first, then outer frames.
    """

    def shown(frame: FrameType, line: int) -> str:
        path = os.sep.join(frame.f_code.co_filename.split(os.sep)[-3:])
        return f"{path}:{line} {frame.f_code.co_name}"

    main = threading.main_thread()
    frames = sys._current_frames()
    stack = traceback.walk_stack(frames[main.ident or 0])
    text = "\n".join(reversed([shown(frame, line) for frame, line in stack]))
    if len(text) > limit:
        return f"(outer frames)...{text[-limit:]}"
    other_threads = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread is not main and thread.name not in _LIBRARY_THREADS and frame is not None:
            other_threads.append(f"thread {thread.name}: {shown(frame, frame.f_lineno)}")
    complete = "\n".join([text, "", *other_threads])
    return complete if other_threads and len(complete) <= limit else text


# -- memory of this process ----------------------------------------------------------------------


def release_free_memory() -> None:
    """Return the free pages of glibc's heap to the system; do nothing with another C library.

    A phase leaves gaps that a phase with other tensor sizes cannot use. Call this only between
    phases: each page that is used again afterwards costs a page fault.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


# -- other processes -----------------------------------------------------------------------------


def _stat(pid: int) -> tuple[str, int]:
    """Return the state letter and start time (clock ticks since boot) of a process.

    Return ("", 0) if there is no such process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()  # the name before may contain spaces
    return fields[0], int(fields[19])


def process_start(pid: int) -> int:
    """Return a process's start time (clock ticks since boot); 0 if unknown.

    It distinguishes the process from later ones with the same PID.
    """
    return _stat(pid)[1]


def process_state(pid: int, start: int = 0) -> str:
    """Return "running", "sleeping", "stopped" or another state of a process.

    The state is "dead" if the process has ended but its parent has not collected it yet, and "gone"
    after that. With `start`, it is also "gone" if another process has the PID now.
    """
    state, started = _stat(pid)
    if not state or (start and started != start):
        return GONE
    return _STATES.get(state, f"in state {state}")


def kill_process(pid: int, start: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal to the process that started at `start`; return whether it was sent."""
    if not start or process_start(pid) != start:
        return False
    with contextlib.suppress(OSError):
        os.kill(pid, number)
        return True
    return False
