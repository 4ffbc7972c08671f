"""Common parts of these tests: a user's settings of site.env, and the jobs of examples/frontier."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.faults.job import ROOT, free_ports
from benchmarks.faults.testbed import ENDED, Testbed

FRONTIER = ROOT / "examples" / "frontier"
MARKS = [pytest.mark.slow, pytest.mark.slurm]
CAMPAIGN = [*MARKS, pytest.mark.campaign("slurm")]


@dataclass(frozen=True)
class Submitted:
    """Job of examples/frontier: its number, its output, and its folder below SITE_RUNS."""

    testbed: Testbed
    number: str
    log: Path
    run: Path

    @property
    def checkpoints(self):
        return self.run / "checkpoints"

    def text(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def logs(self, start=0):
        """Folder of the tasks' standard error and the preflight's result in the job's nth start."""
        return self.run / "logs" / self.number / str(start)

    def wait_for(self, pattern):
        """Wait until the job's output matches `pattern`.

        Raises Overdue, at once if the job ends without it.
        """
        self.testbed.wait_for_log(self.log, pattern, job=self.number)

    def wait(self, *states):
        """Wait until the job has ended, or is in one of `states`; return its state.

        Raises Overdue.
        """
        return self.testbed.wait_for_state(self.number, *(states or ENDED), log=self.log)


def write_python(folder, text):
    """Write a program that the scripts take for Python, in FOLDER/venv; return its settings."""
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(text)
    python.chmod(0o755)
    return {"SITE_VENV": str(folder / "venv")}


def wait_until(condition, job):
    """Return what `condition` returns once it is true. Raises AssertionError if the job ends."""
    deadline = time.monotonic() + 900
    while not (result := condition()):
        assert time.monotonic() < deadline and job.testbed.state(job.number) not in ENDED, (
            job.text()
        )
        time.sleep(0.1)
    return result


def submit(
    testbed,
    folder,
    arguments=(),
    *,
    options=(),
    name="run",
    script="train_22b.sbatch",
    **settings,
):
    """Submit a script as a user would.

    site.env is sourced, its settings and those of job.sh come from the environment, `options` go to
    sbatch and `arguments` to the script. Files go to FOLDER/NAME and FOLDER/NAME.log.
    """
    log = folder / f"{name}.log"
    env = {**settings_of_site(folder, name), "DEVICE": "cpu", **settings}
    command = f'source {FRONTIER}/site.env && exec sbatch --parsable "$@"'
    words = [*options, f"--output={log}", str(FRONTIER / script), *arguments]
    number = testbed.ask("bash", "-c", command, "bash", *words, env=env)
    return Submitted(testbed, number, log, folder / name)


def settings_of_site(folder, name="run"):
    """Return the environment of a user with a site.env, and a port that no other test has."""
    return {
        **os.environ,
        "SBATCH_ACCOUNT": "abc123",
        "SITE_RUNS": str(folder),
        "SITE_VENV": sys.prefix,
        "RUN_NAME": name,
        "SITE_ENV": str(folder / "no_packed_environment"),
        "MASTER_PORT": str(free_ports(1)),
        "COLUMNS": "100",
        "USER": os.environ.get("USER", "root"),
        "PREFLIGHT": "0",
    }
