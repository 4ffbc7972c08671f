"""Jobs of examples/frontier on the Slurm testbed, and what they leave behind.

A job of four ranks on the preset tiny trains until a file tells it to end, with restarts within the
job; each of its losses can be compared with an undisturbed run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.faults import history
from benchmarks.faults.job import ROOT, free_ports, run_well
from benchmarks.faults.testbed import ENDED, Testbed
from benchmarks.prove_resume import LOSS

FRONTIER = ROOT / "examples" / "frontier"
SAVE_INTERVAL = 50
TINY = (
    "--mock-data --tokenizer-type NullTokenizer --eval-iters 0 --num-workers 0 --log-interval 1 "
    "--adam-eps 1e-3"
).split()
"""Beside PRESET=tiny. Adam's epsilon is larger than the default: where a gradient is nearly zero,
Adam divides rounding errors by it."""
ENDLESS = [
    *TINY,
    *"--pipeline-model-parallel-size 2 --micro-batch-size 1 --attention-dropout 0.1".split(),
    *"--hidden-dropout 0.1 --train-iters 1000000 --lr-decay-style constant".split(),
    *f"--save-interval {SAVE_INTERVAL}".split(),
]
"""PP 2, for as long as it may."""
T = TypeVar("T")


@dataclass(frozen=True)
class Submitted:
    """Job of examples/frontier: its number, its output, and its folder below SITE_RUNS."""

    testbed: Testbed
    number: str
    log: Path
    run: Path

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def logs(self, start: int = 0) -> Path:
        """Folder of the tasks' standard error and the preflight's result in the job's nth start."""
        return self.run / "logs" / self.number / str(start)

    def wait_for(self, pattern: str) -> None:
        """Wait until the job's output matches `pattern`.

        Raises Overdue, at once if the job ends without it.
        """
        self.testbed.wait_for_log(self.log, pattern, job=self.number)

    def wait(self, *states: str) -> str:
        """Wait until the job has ended, or is in one of `states`; return its state.

        Raises Overdue.
        """
        return self.testbed.wait_for_state(self.number, *(states or ENDED), log=self.log)


def submit(
    testbed: Testbed,
    folder: Path,
    arguments: Sequence[str] = (),
    *,
    options: Sequence[str] = (),
    name: str = "run",
    script: str = "train_22b.sbatch",
    **settings: str,
) -> Submitted:
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


def settings_of_site(folder: Path, name: str = "run") -> dict[str, str]:
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


def wait_until(condition: Callable[[], T], job: Submitted) -> T:
    """Return what `condition` returns once it is true. Raises AssertionError if the job ends."""
    deadline = time.monotonic() + 900
    while not (result := condition()):
        late = time.monotonic() > deadline
        if late or job.testbed.state(job.number) in ENDED:
            raise AssertionError(job.text()[-5000:])
        time.sleep(0.1)
    return result


def processes(run: Path) -> dict[int, int]:
    """Return the processes of a run's ranks, each with its parent."""
    listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True)
    parents = {}
    for line in listed.stdout.splitlines():
        pid, parent, words = line.split(None, 2)
        if "python" in words.split()[0] and f"--save {run}/" in words:
            parents[int(pid)] = int(parent)
    return parents


def trainings(run: Path) -> list[int]:
    """Return the training processes, which are children of their supervisors."""
    parents = processes(run)
    return sorted(pid for pid, parent in parents.items() if parent in parents)


def supervisors(run: Path) -> list[int]:
    """Return the processes that srun has started, in the order of their start."""
    parents = processes(run)
    return sorted(pid for pid, parent in parents.items() if parent not in parents)


def reached(run: Path) -> int:
    """Return the last step of a run; 0 before the first."""
    metrics = run / "checkpoints" / "metrics.jsonl"
    steps = history.steps(run / "checkpoints") if metrics.exists() else []
    return steps[-1][0] if steps else 0


def restarts(run: Path) -> list[dict[str, Any]]:
    return history.records(run / "checkpoints", "restart")


def differences(runs: Sequence[Path], folder: Path, exact: int | None = None) -> list[str]:
    """Compare runs with one without faults, which writes to FOLDER; return what differs.

    Every loss counts, also of repeated steps, and the last state of the longest run. With `exact`,
    only so many steps must be equal to the bit; later ones may differ by rounding, as with fewer
    replicas.
    """
    losses = [history.steps(run / "checkpoints") for run in runs]
    last = max(some[-1][0] for some in losses)
    flags = ["--preset", "tiny", "--distributed-backend", "gloo", *ENDLESS, "--save", str(folder)]
    run_well(4, [*flags, "--exit-interval", str(last)], folder / "logs")
    reference = dict(history.steps(folder))
    problems = []
    for run, some in zip(runs, losses, strict=True):
        if different := history.differing(some[:exact], reference):
            problems.append(f"{run.name}: losses of steps {different[:8]}")
        if exact is not None:
            if (apart := history.largest_difference(some[exact:], reference)) > LOSS["fp32"]:
                problems.append(f"{run.name}: losses differ by {apart:.1e}")
        elif some[-1][0] == last:
            newest = history.newest(run / "checkpoints"), history.newest(folder)
            if names := history.tensors_that_differ(*newest):
                problems.append(
                    f"{run.name}: {len(names)} tensors of the last state, e.g. {names[0]}"
                )
    return problems
