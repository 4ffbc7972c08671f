"""Peak anonymous memory of every process of a small training run on this machine's CPU.

The processes are pretrain_gpt.py's own, with the environment of a launcher. What each holds in
anonymous and shared pages (proc(5), RssAnon and RssShmem) is read every 5 ms: tensors and heap, in
passes of tens of milliseconds and more. The peak that the system counts (ru_maxrss) has the pages
of program files too, some 140 MiB that the page cache gives and takes. Interpreter and libraries
have a heap as well, so that two runs are to be compared.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
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


class RunFailed(RuntimeError):
    """A process ended with an error or not in time; the message has its last lines."""


def peak_bytes(
    flags: Sequence[str],
    processes: int,
    timeout_s: float = 300.0,
    malloc: Mapping[str, str] = BARE,
) -> list[int]:
    """Return the peak of each rank of `pretrain_gpt.py FLAGS`, in order. Raises RunFailed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{rank}.log") for rank in range(processes)]
        started = [
            _start(flags, rank, processes, port, log, malloc) for rank, log in enumerate(logs)
        ]
        peaks = _peaks(started, time.monotonic() + timeout_s)
        for rank, process in enumerate(started):
            if code := process.returncode:
                text = logs[rank].read_text(errors="replace")[-2000:]
                raise RunFailed(f"rank {rank} ended with code {code}: {text}")
        return peaks


def _start(
    flags: Sequence[str],
    rank: int,
    processes: int,
    port: int,
    log: Path,
    malloc: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    launcher = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    environment = {**os.environ, **malloc, **{name: str(value) for name, value in launcher.items()}}
    with open(log, "wb") as out:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _peaks(started: Sequence[subprocess.Popen[bytes]], end_s: float) -> list[int]:
    """Wait for the processes and return the peak of each.

    Those that are left at the end of the time are ended, and their children.
    """
    peaks = [0] * len(started)
    while any(process.poll() is None for process in started):
        peaks = [max(peak, _held(p.pid)) for peak, p in zip(peaks, started, strict=True)]
        if time.monotonic() > end_s:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.005)
    return peaks


def _held(pid: int) -> int:
    """Return the bytes that a process holds in anonymous and shared pages; 0 once it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * sum(map(int, re.findall(r"^Rss(?:Anon|Shmem):\s*(\d+) kB$", text, re.M)))
