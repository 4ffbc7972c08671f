"""Processes of this host: what Linux says of one that does not answer, a port for new ones. Needs no torch."""
from __future__ import annotations

import contextlib
import os
import signal
import socket

GONE, DEAD, STOPPED = "gone", "dead", "stopped"
_STATES = {
    "R": "running", "S": "sleeping", "D": "waiting in the kernel (D), for a disk, a network or a driver",
    "T": STOPPED, "t": "stopped by a debugger", "Z": DEAD, "X": DEAD, "I": "idle",
}  # fmt: skip


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold blanks; empty without such a process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def process_start(pid: int) -> int:
    """When a process started, in clock ticks since boot, which tells it from a later one of the same number; 0 where
    that is not known."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def process_state(pid: int, start: int = 0) -> str:
    """"running", "sleeping", "stopped", ..., or "gone" where the process ended, also when its number was used again."""
    fields = _stat(pid)
    if not fields or (start and int(fields[19]) != start):
        return GONE
    return _STATES.get(fields[0], f"in state {fields[0]}")


def reserve_port() -> socket.socket:
    """A socket whose port (getsockname()[1]) nobody else is given until it is closed.

    Bound with SO_REUSEADDR and not listening, it keeps the port from whoever asks for any port and from outgoing
    connections; a server that sets SO_REUSEADDR too, as torch's store does, may listen there all the same.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def kill_process(pid: int, start: int) -> bool:
    """End a process at once, unless it is another one than the one that started then; whether a signal was sent."""
    if not start or process_start(pid) != start:
        return False
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False
