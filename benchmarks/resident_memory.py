"""Peak anonymous memory of every process of a small training run on this machine's CPU.

The processes are pretrain_gpt.py's own, with the environment of a launcher. A small process starts
each and reads every 5 ms what it holds in anonymous and shared pages (proc(5), RssAnon and
RssShmem): tensors and heap, in passes of tens of milliseconds and more. The peak that the system
counts (ru_maxrss) has the pages of program files too, some 140 MiB that the page cache gives and
takes. Interpreter and libraries have a heap as well, so that two runs are to be compared.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

BARE = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_MMAP_MAX_": str(1 << 20),
    "THP_MEM_ALLOC_ENABLE": "0",
}
"""With these every tensor of 64 KiB and more is a mapping of its own, which goes back to the system
when it is freed: resident memory is that of the tensors. As a run sets malloc up for speed, it
keeps freed blocks, and holes between them. One thread: what each further one brings for itself is
not what is to be compared."""


_WATCH = """
import os, sys, time
process = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
peak = 0
while not (ended := os.waitpid(process, os.WNOHANG))[0]:
    with open(f"/proc/{process}/status", "rb") as file:
        fields = dict(line.split(b":", 1) for line in file)
    held = (fields.get(name, b"0 kB") for name in (b"RssAnon", b"RssShmem"))
    peak = max(peak, sum(int(value.split()[0]) for value in held))
    time.sleep(0.005)
with open(sys.argv[1], "w") as file:
    file.write(str(peak))
sys.exit(os.waitstatus_to_exitcode(ended[1]) and 1)
"""


class RunFailed(RuntimeError):
    """A process ended with an error or not in time; the message has its last lines."""


def peak_bytes(flags: Sequence[str], processes: int, timeout_s: float = 300.0) -> list[int]:
    """Return the peak of each rank of `pretrain_gpt.py FLAGS`, in order. Raises RunFailed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{rank}.log") for rank in range(processes)]
        started = [_start(flags, rank, processes, port, log) for rank, log in enumerate(logs)]
        for rank, code in enumerate(_wait(started, time.monotonic() + timeout_s)):
            if code:
                text = logs[rank].read_text(errors="replace")[-2000:]
                raise RunFailed(f"rank {rank} ended with code {code}: {text}")
        return [int(log.with_suffix(".peak").read_text()) * 1024 for log in logs]  # KiB on Linux


def _start(
    flags: Sequence[str], rank: int, processes: int, port: int, log: Path
) -> subprocess.Popen[bytes]:
    launcher = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    environment = {**os.environ, **BARE, **{name: str(value) for name, value in launcher.items()}}
    with open(log, "wb") as out:
        return subprocess.Popen(
            [
                sys.executable,
                "-S",
                "-c",
                _WATCH,
                str(log.with_suffix(".peak")),
                sys.executable,
                str(ROOT / "pretrain_gpt.py"),
                *flags,
            ],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(started: Sequence[subprocess.Popen[bytes]], end_s: float) -> list[int]:
    """Exit codes; those that are left at the end of the time are ended, and their children."""
    try:
        return [process.wait(max(0.1, end_s - time.monotonic())) for process in started]
    except subprocess.TimeoutExpired:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return [process.wait() for process in started]
