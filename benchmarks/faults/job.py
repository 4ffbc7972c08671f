"""A training job on this machine as a launcher would start it: N processes of pretrain_gpt.py, to hurt and to watch."""
from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
FAULTY = ROOT / "benchmarks" / "faults" / "faulty_rank.py"
POLL_S = 0.002
_LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")

TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --adam-eps 1e-3 --tokenizer-type NullTokenizer "
    "--make-vocab-size-divisible-by 8 --log-interval 1 --eval-iters 0 --num-workers 0 "
    "--distributed-timeout-minutes 1 --attention-dropout 0.1 --hidden-dropout 0.1"
).split()
"""A GPT whose step takes milliseconds, with every loss in the metrics file. Adam's epsilon is larger than the default:
where a gradient is nearly zero, Adam divides rounding errors by it."""
MOCK = ["--mock-data", "--vocab-size", "100"]


class Overdue(Exception):
    """A job that did not end, or did not say something, in time."""


class Job:
    """N ranks of pretrain_gpt.py, or of another script, each with its output in LOGS/rank_R.log.

        with Job(2, arguments, logs) as job:
            job.wait_for(r"iteration +5/")
            job.kill([1])
            codes = job.wait()

    What is still running at the end of the block is killed.
    """

    def __init__(
        self, n: int, arguments: Sequence[str], logs: Path, env: Mapping[str, str] | None = None,
        script: str | Path = "pretrain_gpt.py",
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        port = str(free_ports(1))
        base = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
        self.logs = [logs / f"rank_{rank}.log" for rank in range(n)]
        self.started = time.monotonic()
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(n):
            place = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            variables = {**base, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **(place if n > 1 else {}), **(env or {})}
            with open(self.logs[rank], "wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(script), *arguments], cwd=ROOT, env=variables, stdin=subprocess.DEVNULL,
                        stdout=log, stderr=subprocess.STDOUT,
                    )
                )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)  # one that was stopped
                process.kill()
            process.wait()

    def output(self, rank: int = 0) -> str:
        """What a rank has written so far, errors and output in one text."""
        return self.logs[rank].read_text(errors="replace")

    def outputs(self) -> str:
        """What all ranks have written so far."""
        return "\n".join(self.output(rank) for rank in range(len(self.logs)))

    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def wait_for(self, pattern: str, rank: int = 0, timeout_s: float = 400.0) -> bool:
        """Wait until a rank's output matches; False when the job has ended without. Raises Overdue."""
        end, wanted = time.monotonic() + timeout_s, re.compile(pattern)
        while True:
            ended = not self.running()  # before the look, so that the last lines are not missed
            if wanted.search(self.output(rank)):
                return True
            if ended:
                return False
            if time.monotonic() > end:
                raise Overdue(f"rank {rank} said nothing like {pattern!r} in {timeout_s:.0f} s:\n{self.tail(rank)}")
            time.sleep(POLL_S)

    def signal(self, number: int, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to these ranks, or to all, as far as they still run."""
        for rank in range(len(self.processes)) if ranks is None else ranks:
            self.processes[rank].send_signal(number)

    def kill(self, ranks: Iterable[int] | None = None) -> None:
        """SIGKILL these ranks, or all."""
        self.signal(signal.SIGKILL, ranks)

    def wait(self, timeout_s: float = 400.0) -> list[int]:
        """The exit codes of all ranks, negative for a signal. Raises Overdue, after which nothing runs any more."""
        end = time.monotonic() + timeout_s
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                left = self.running()
                self.__exit__(None, None, None)
                raise Overdue(f"ranks {left} did not end within {timeout_s:.0f} s:\n{self.tail(rank)}") from None
        return [process.returncode for process in self.processes]

    def tail(self, rank: int = 0) -> str:
        """The last lines of a rank's output, for messages."""
        return "\n".join(self.output(rank).splitlines()[-25:])


def run_job(
    n: int, arguments: Sequence[str], logs: Path, env: Mapping[str, str] | None = None, timeout_s: float = 400.0
) -> Job:
    """A job from start to end. Raises Overdue."""
    with Job(n, arguments, logs, env) as job:
        job.wait(timeout_s)
    return job


_tried = itertools.count(12000 + os.getpid() * 61 % 16000)  # processes that begin together begin far apart


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens at, none of which this process was told before. Below the
    range of outgoing connections, from which one of them could be taken before its daemon listens."""
    free: list[int] = []
    while len(free) < count:
        port = 12000 + (next(_tried) - 12000) % 20000
        if free and port != free[-1] + 1:
            free = []
        free = [*free, port] if _is_free(port) else []
    return free[0]


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True
