"""Starts the processes of a calibration on this node, as a launcher would, and collects what they found."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import LaunchError
from megatron.parallel.processes import environment, reserve_port

ROOT = Path(__file__).resolve().parents[2]
_SPARE_S = 180.0
"""Beyond the time of the measurements: importing torch and DeepSpeed on a busy file system, a first GPU kernel."""


def run_workers(what: str, argv: Sequence[str], count: int, seconds: float, threads: int | None = None) -> Any:
    """The JSON that the first of `count` processes of worker.py writes.

    what  "machine" or "host"; argv: flags of pretrain_gpt.py; threads: of each process, None: its part of the cores.
    Raises LaunchError, with the last lines of a process that failed.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-calibration-") as folder, reserve_port() as held:
        out, logs = Path(folder, "found.json"), [Path(folder, f"{rank}.log") for rank in range(count)]
        job = json.dumps({"what": what, "argv": list(argv), "seconds": seconds, "out": str(out)})
        command = [sys.executable, "-m", "megatron.calibration.worker", job]
        port, processes = str(held.getsockname()[1]), list[subprocess.Popen[bytes]]()
        try:
            for rank, log in enumerate(logs):
                env = environment(os.environ, rank, count, port, threads)
                with log.open("wb") as file:
                    started = subprocess.Popen(
                        command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                    )
                processes.append(started)
            wait_for_all(processes, logs, seconds * 2 + _SPARE_S)
        finally:
            for process in processes:
                _end(process)
        try:
            return json.loads(out.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise LaunchError(f"the measuring processes ended without a result: {_last_words(logs[0])}") from error


def devices_here() -> int:
    """GPUs of this node, or cores."""
    return gpus_here() or len(os.sched_getaffinity(0))


def gpus_here() -> int:
    """GPUs of this node. Asked in another process: whoever starts workers must not hold a GPU."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    gpus = done.stdout.strip()
    return int(gpus) if gpus.isdigit() else 0


def wait_for_all(
    processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], limit_s: float,
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until all have ended well. Raises LaunchError for the first one that fails, and after `limit_s`."""
    deadline = clock() + limit_s
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise LaunchError(f"measuring process {rank} ended with exit code {code}: {_last_words(logs[rank])}")
        if all(code == 0 for code in codes):
            return
        if clock() > deadline:
            raise LaunchError(f"the measuring processes did not end within {limit_s:.0f} s: is the machine busy?")
        sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "it said nothing"
