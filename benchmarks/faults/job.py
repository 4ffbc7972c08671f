"""Training job on this machine for fault tests: N processes of pretrain_gpt.py, without launcher."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.planner.subprocesses import reserve_port
from tests.helpers.launching import ROOT, Script
from tests.helpers.processes import rank_environment

__all__ = [
    "MOCK",
    "ROOT",
    "TINY",
    "Arms",
    "FaultJob",
    "JobOutcome",
    "Overdue",
    "free_ports",
    "run_job",
]

LIMIT_S = 400.0  # reached only by hanging jobs
Arms = Mapping[int, Sequence[tuple[Any, ...]]]
"""Calls to make in a rank's process before its script, by rank: (function, *arguments), such as
(strike, "open", 3, "kill").
"""

TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --adam-eps "
    "1e-3 --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 8 --log-interval 1 "
    "--eval-iters 0 --num-workers 0 --distributed-timeout-minutes 1 --attention-dropout 0.1 "
    "--hidden-dropout 0.1"
).split()
"""A GPT whose step takes milliseconds, with every loss in the metrics file. Adam's epsilon is
larger than the default, with which Adam magnifies rounding errors of gradients near zero."""
MOCK = ["--mock-data", "--vocab-size", "100"]
CONSTANT = ["--lr-decay-style", "constant"]
"""For runs that are compared with others of a different length."""


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of a fault.

    what    the fault
    notes   how the run went on
    faults  problems with that; empty if there are none
    """

    what: str
    notes: str
    faults: tuple[str, ...]


def training(save: Path, iterations: int, save_interval: int, *more: str) -> list[str]:
    """Return the arguments of a run on MOCK that resumes itself."""
    arguments = [
        *TINY,
        *MOCK,
        "--train-iters",
        str(iterations),
        "--save-interval",
        str(save_interval),
    ]
    return [*arguments, "--save", str(save), "--load", str(save), *more]


class Overdue(Exception):
    """A job that did not end in time."""


class Rank(Script):
    """One process of a job."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class FaultJob:
    """Job of N ranks of pretrain_gpt.py, or another script, with output in LOGS/rank_R.log.

        arms = {1: [(strike, "megatron.run.step", 5, "kill")]}
        with FaultJob(2, arguments, logs, arms=arms) as job:
            job.wait_for_end([1])
            codes = job.wait()

    Processes that are still running at the end of the block are killed.
    """

    def __init__(
        self,
        n: int,
        arguments: Sequence[str],
        logs: Path,
        env: Mapping[str, str] | None = None,
        script: str = "pretrain_gpt.py",
        arms: Arms | None = None,
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._port = reserve_port()
        port = self._port.getsockname()[1]
        self.logs = [logs / f"rank_{rank}.log" for rank in range(n)]
        self.processes = [
            Rank(
                script,
                arguments,
                self.logs[rank],
                {**(rank_environment(rank, n, port) if n > 1 else {}), **(env or {})},
                (_arm, [*(arms or {}).get(rank, ())]),
            )
            for rank in range(n)
        ]

    def __enter__(self) -> FaultJob:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)  # if it was stopped
            process.__exit__()
        self._port.close()

    @property
    def codes(self) -> list[int | None]:
        """The exit codes of all ranks, negative for a signal; None for a rank that still runs."""
        return [process.returncode for process in self.processes]

    def output(self, rank: int = 0) -> str:
        """Return a rank's output and errors so far, in one text."""
        return self.processes[rank].output

    def outputs(self) -> str:
        """Return the output of all ranks so far."""
        return "\n".join(self.output(rank) for rank in range(len(self.logs)))

    def signal(self, number: int, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to these ranks, or to all, as far as they still run."""
        for rank in range(len(self.processes)) if ranks is None else ranks:
            self.processes[rank].send_signal(number)

    def kill(self, ranks: Iterable[int] | None = None) -> None:
        """SIGKILL these ranks, or all."""
        self.signal(signal.SIGKILL, ranks)

    def wait_for_end(self, ranks: Iterable[int], timeout_s: float = LIMIT_S) -> bool:
        """Wait until these ranks have ended; return whether they did in time."""
        end = time.monotonic() + timeout_s
        for rank in ranks:
            self.processes[rank].process.join(max(0.0, end - time.monotonic()))
        return all(self.processes[rank].returncode is not None for rank in ranks)

    def wait(self, timeout_s: float = LIMIT_S) -> list[int]:
        """Return the exit codes of all ranks. Kills all and raises Overdue after `timeout_s`."""
        if not self.wait_for_end(range(len(self.processes)), timeout_s):
            left = [rank for rank, code in enumerate(self.codes) if code is None]
            self.__exit__()
            raise Overdue(
                f"ranks {left} did not end within {timeout_s:.0f} s:\n{self.tail(left[0])}"
            )
        return [code for code in self.codes if code is not None]

    def tail(self, rank: int = 0) -> str:
        """Return the last lines of a rank's output, for messages."""
        return "\n".join(self.output(rank).splitlines()[-25:])


def _arm(arms: Sequence[tuple[Any, ...]]) -> None:
    for function, *arguments in arms:
        function(*arguments)


def run_job(
    n: int,
    arguments: Sequence[str],
    logs: Path,
    env: Mapping[str, str] | None = None,
    arms: Arms | None = None,
    limit_s: float = LIMIT_S,
) -> FaultJob:
    """Run a job to its end. Raises Overdue after `limit_s`."""
    with FaultJob(n, arguments, logs, env, arms=arms) as job:
        job.wait(limit_s)
    return job


def run_well(
    n: int,
    arguments: Sequence[str],
    logs: Path,
    arms: Arms | None = None,
    limit_s: float = LIMIT_S,
) -> None:
    """Run an undisturbed job. Raises Overdue after `limit_s`, RuntimeError if the job fails."""
    job = run_job(n, arguments, logs, arms=arms, limit_s=limit_s)
    if any(job.codes):
        raise RuntimeError(f"an undisturbed run failed:\n{job.outputs()}")


# processes that start together try ports that are far apart
_tried = itertools.count(12000 + os.getpid() * 61 % 16000)


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports that were not returned before.

    They are below the range of outgoing connections, which could take one of them before its daemon
    listens.
    """
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
