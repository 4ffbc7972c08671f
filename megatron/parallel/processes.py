"""Processes of this host: what Linux says of one that does not answer, a port for new ones. Needs no torch."""
from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_LAUNCHERS = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI_", "PALS_", "MV2_", "TORCHELASTIC_")
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
_ROOT = Path(__file__).resolve().parents[2]
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


def kill_process(pid: int, start: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal, which ends the process at once, unless it is another one than the one that started then; whether
    the signal was sent."""
    if not start or process_start(pid) != start:
        return False
    with contextlib.suppress(OSError):
        os.kill(pid, number)
        return True
    return False


def environment(
    environ: Mapping[str, str], rank: int, count: int, port: str, threads: int | None = None
) -> dict[str, str]:
    """Make the variables of a process: this one's without any launcher's variables, with those of one of `count` on
    this node."""
    env = {k: v for k, v in environ.items() if k not in _LAUNCHED and not k.startswith(_LAUNCHERS)}
    env |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    path = env.get("PYTHONPATH", "")
    env["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{path}" if path else str(_ROOT)
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    return env


def gpus_here() -> int:
    """GPUs of this node. Asked in another process: whoever starts workers must not hold a GPU."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    gpus = done.stdout.strip()
    return int(gpus) if gpus.isdigit() else 0
