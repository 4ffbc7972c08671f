"""Slurm testbed of virtual Frontier-like nodes, from Python (tests/helpers/slurm_testbed.sh)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.faults.job import ROOT, Overdue, free_ports

SCRIPT = ROOT / "tests" / "helpers" / "slurm_testbed.sh"
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED", "OUT_OF_MEMORY", "BOOT_FAIL")
"""The states of a job that will not run again."""


def missing() -> str:
    """Return what the testbed lacks; empty if it can run."""
    done = subprocess.run(["bash", str(SCRIPT), "missing"], capture_output=True, text=True)
    return ", ".join(done.stdout.split("\n")).strip(", ") or done.stderr.strip()


class Testbed:
    """Slurm with several nodes (node01, node02, ...), for the duration of a block.

        with Testbed(nodes=2) as testbed:
            job = testbed.sbatch("-N", "2", "job.sh")
            testbed.wait_for_state(job, *ENDED)

    `paper_nodes` additional nodes exist only in the controller's configuration. The files are in a
    separate folder with a short name: the path of a Unix socket has at most 107 bytes.
    """

    __test__ = False  # not a test class, despite its name

    def __init__(self, nodes: int = 2, paper_nodes: int = 0) -> None:
        folder = self._folder = Path(tempfile.mkdtemp(prefix="slurm"))
        self.env = {
            **os.environ,
            "TESTBED_DIR": str(folder),
            "TESTBED_NODES": str(nodes),
            "TESTBED_PAPER_NODES": str(paper_nodes),
            "TESTBED_PORT": str(free_ports(nodes + 1)),
            "SLURM_CONF": str(folder / "etc" / "slurm.conf"),
        }

    def __enter__(self) -> Testbed:
        try:
            self.control("start")
        except subprocess.SubprocessError as error:
            log = self._log.read_text(errors="replace")[-2000:]
            self._end()
            raise RuntimeError(f"the Slurm testbed did not start: {log}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self.control("stop")
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _log(self) -> Path:
        return self._folder / "testbed.log"

    def control(self, *words: str) -> None:
        """Run a command of slurm_testbed.sh."""
        # The daemons that it starts would keep a pipe open.
        with open(self._log, "ab") as log:
            subprocess.run(
                ["bash", str(SCRIPT), *words],
                env=self.env,
                check=True,
                stdout=log,
                stderr=log,
                timeout=900,
            )

    def ask(self, *command: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
        """Run a Slurm command; return its output. Raises RuntimeError with its errors."""
        done = subprocess.run(
            command,
            env={**self.env, **(env or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip() or done.stderr.strip()

    def sbatch(
        self, *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> str:
        """Submit a job with these arguments of sbatch from the folder `cwd`; return its number."""
        return self.ask("sbatch", "--parsable", *map(str, words), env=env, cwd=cwd)

    def show(self, job: str) -> dict[str, str]:
        """Return Slurm's fields of a job: JobState, Restarts, NodeList, ..."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.ask("scontrol", "-o", "show", "job", job)))

    def state(self, job: str) -> str:
        """Return the job's state in Slurm: PENDING, RUNNING, COMPLETED, ..."""
        return self.show(job).get("JobState", "")

    def shorten(self, job: str, least_s: int) -> None:
        """Give a running job a time limit that leaves it `least_s` to `least_s` + 60 seconds.

        Slurm has limits in whole minutes.
        """
        hours, minutes, seconds = map(int, self.show(job)["RunTime"].split(":"))
        limit = -(-(3600 * hours + 60 * minutes + seconds + least_s) // 60)
        self.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")

    def wait_for_log(
        self, log: Path, pattern: str, timeout_s: float = 900.0, job: str = ""
    ) -> None:
        """Wait for a text in the job's output. Raises Overdue, at once if the given job has ended."""
        end = time.monotonic() + timeout_s
        ended = False
        asked = 0.0
        while not (log.exists() and re.search(pattern, log.read_text(errors="replace"))):
            now = time.monotonic()
            if ended or now > end:
                output = log.read_text(errors="replace")[-5000:] if log.exists() else ""
                when = f"before it was {self.state(job)}" if ended else f"within {timeout_s:.0f} s"
                raise Overdue(f"the job did not say {pattern!r} {when}:\n{output}")
            time.sleep(0.05)
            # before the next look at the log, so that no last line is missed
            if job and now > asked + 1:
                ended = self.state(job) in ENDED
                asked = now

    def wait_for_state(
        self, job: str, *states: str, timeout_s: float = 900.0, log: Path | None = None
    ) -> str:
        """Wait for one of these states. Raises Overdue, with the end of the log if given."""
        end = time.monotonic() + timeout_s
        while (state := self.state(job)) not in states:
            if time.monotonic() > end:
                output = (
                    f":\n{log.read_text(errors='replace')[-5000:]}" if log and log.exists() else ""
                )
                raise Overdue(
                    f"job {job} is {state}, not {' or '.join(states)}, after {timeout_s:.0f} "
                    f"s{output}"
                )
            time.sleep(0.2)
        return state


def output_of(testbed: Testbed, folder: Path, script: str, options: Sequence[str] = ()) -> str:
    """Run a batch script to its end; return its output. Raises RuntimeError if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "script.sh"
    log = folder / "script.log"
    path.write_text(f"#!/bin/bash\n{script}")
    job = testbed.sbatch("-o", log, *options, path)
    if testbed.wait_for_state(job, *ENDED, log=log) != "COMPLETED":
        raise RuntimeError(f"job {job} is {testbed.state(job)}:\n{log.read_text()}")
    return log.read_text()
