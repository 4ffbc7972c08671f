"""Scheduler faults, on a real Slurm on this machine (tests/helpers/slurm_testbed.sh).

These are a lost node with requeueing, USR1 before the time limit, and a time limit without a
signal, for jobs on two nodes.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.faults import history
from benchmarks.faults.job import CONSTANT, ROOT, JobOutcome, run_well, training
from benchmarks.faults.testbed import Testbed

SAVE_INTERVAL = 20


def submit(
    testbed: Testbed, folder: Path, arguments: Sequence[str], *flags: str, more: str = ""
) -> str:
    """Submit a job of one task on each of two nodes; return its number.

    Its output goes to FOLDER/job.log.

    more   additional arguments of pretrain_gpt.py after the job was requeued
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "job.sh"
    command = " ".join(f"'{word}'" for word in [sys.executable, "pretrain_gpt.py", *arguments])
    script.write_text(
        "#!/bin/bash\n"
        f"cd {ROOT}\n"
        f"export OMP_NUM_THREADS=1 COLUMNS=100\n"
        "echo start ${SLURM_RESTART_COUNT:-0}\n"
        f"srun --kill-on-bad-exit=1 {command} ${{SLURM_RESTART_COUNT:+{more}}}\n"
        'code=$?; echo "end with code $code"; exit $code\n'
    )
    return testbed.sbatch(
        "--nodes=2",
        "--ntasks-per-node=1",
        "--open-mode=append",
        *flags,
        f"--output={folder / 'job.log'}",
        script,
    )


def lose_a_node(testbed: Testbed, folder: Path) -> JobOutcome:
    """Lose a node during a long training; Slurm requeues the job, which resumes and ends.

    The requeued job takes more steps than were lost.
    """
    save = folder / "run"
    log = folder / "job.log"
    iterations = 1_000_000
    more = f"--exit-interval {5 * SAVE_INTERVAL}"
    job = submit(
        testbed,
        folder,
        training(save, iterations, SAVE_INTERVAL, *CONSTANT),
        "--requeue",
        "--time=60",
        more=more,
    )
    testbed.wait_for_log(log, rf"(?m)^ iteration +{3 * SAVE_INTERVAL}/")
    testbed.control("lose-node", "node02")
    testbed.control("add-node", "node02")
    testbed.control("hurry", job)
    state = testbed.wait_for_state(job, "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED")
    text = log.read_text(errors="replace")
    faults = [f"the job ended as {state}: {text[-1500:]}"] if state != "COMPLETED" else []
    if "start 1" not in text:
        faults.append("the job was not started again")
    return JobOutcome("a node lost, requeued by Slurm", *judge(folder, save, iterations, faults))


def judge(
    folder: Path, save: Path, iterations: int, faults: list[str]
) -> tuple[str, tuple[str, ...]]:
    """Return notes on the starts and lost steps, and the faults.

    It is a fault if the job was not resumed, lost too many steps, or has other losses than an
    undisturbed run.
    """
    starts = [record["iteration"] for record in history.records(save, "start")]
    steps = history.steps(save)
    restarts = [n for n in range(1, len(steps)) if steps[n][0] != steps[n - 1][0] + 1]
    lost = [steps[n - 1][0] - steps[n][0] + 1 for n in restarts]
    notes = f"started at {', '.join(str(start) for start in starts)}; steps lost: {lost or 0}"
    if len(starts) < 2:
        faults.append("it was not resumed")
    if max(lost, default=0) > SAVE_INTERVAL:
        faults.append(f"lost {lost} steps with a save every {SAVE_INTERVAL}")
    undisturbed = folder / "whole"
    last = steps[-1][0]
    run_well(
        2,
        [
            *training(undisturbed, iterations, SAVE_INTERVAL, *CONSTANT),
            "--exit-interval",
            str(last),
        ],
        folder / "logs_whole",
    )
    different = history.differing(steps, dict(history.steps(undisturbed)))
    if different:
        faults.append(f"losses of steps {different[:8]} are not those of the undisturbed run")
    return notes, tuple(faults)


def near_the_limit(
    testbed: Testbed, folder: Path, *flags: str, clock: bool, reason: str, what: str
) -> JobOutcome:
    """Run a job with a limit of a minute: it has to save, exit, requeue itself and resume.

    clock    whether the program monitors the remaining time
    reason   pattern of the reason that the log must name
    what     name of the fault

    Then the job is cancelled by SIGTERM: it has to save again, without requeueing itself.
    """
    save = folder / "run"
    log = folder / "job.log"
    iterations = 1_000_000
    arguments = [
        *training(save, iterations, SAVE_INTERVAL, *CONSTANT),
        "--requeue",
        *([] if clock else ["--walltime", "none"]),
    ]
    job = submit(testbed, folder, arguments, "--time=1", "--requeue", *flags)
    faults: list[str] = []
    testbed.wait_for_log(log, r"(?m)^ iteration +\d+/")
    state = testbed.wait_for_state(job, "PENDING", "COMPLETED", "FAILED", "TIMEOUT")
    text = log.read_text(errors="replace")
    if state != "PENDING":
        faults.append(f"the job is {state}, not back in the queue: {text[-1500:]}")
        return JobOutcome(what, "", tuple(faults))
    if not re.search(reason, text):
        faults.append(f"the log does not say {reason!r}")
    reached = max(int(i) for i in re.findall(r"(?m)^ iteration +(\d+)/", text))
    if int(history.newest(save).name.removeprefix("iter_")) != reached:
        faults.append(
            f"step {reached} was reached, {history.newest(save).name} is the newest checkpoint"
        )
    testbed.control("hurry", job)
    testbed.wait_for_log(log, rf"(?m)^ iteration +{reached + 1}/")
    testbed.ask("scancel", job)
    testbed.wait_for_state(job, "CANCELLED", "COMPLETED", "PENDING")
    time.sleep(3)
    if testbed.state(job) == "PENDING":
        faults.append("a job that was cancelled went back into the queue")
    reached = history.steps(save)[-1][0]
    if int(history.newest(save).name.removeprefix("iter_")) != reached:
        faults.append(
            f"scancel came at step {reached}, {history.newest(save).name} is the newest checkpoint"
        )
    return JobOutcome(what, *judge(folder, save, iterations, faults))


def usr1(testbed: Testbed, folder: Path) -> JobOutcome:
    """Send every task USR1 by sbatch --signal=USR1@45.

    15 to 45 s remain then, because Slurm checks every 30 s.
    """
    what = "USR1 before the time limit, requeued by the program"
    return near_the_limit(
        testbed, folder, "--signal=USR1@45", clock=False, reason="SIGUSR1", what=what
    )


def no_signal(testbed: Testbed, folder: Path) -> JobOutcome:
    """Let the program ask Slurm how much time is left."""
    what = "time limit without a signal, requeued by the program"
    return near_the_limit(
        testbed, folder, clock=True, reason=r"exiting program .* left in the job", what=what
    )


def campaign(folder: Path) -> Iterator[JobOutcome]:
    """Yield the outcome of each fault, all on one testbed."""
    with Testbed() as testbed:
        for number, fault in enumerate((lose_a_node, usr1, no_signal)):
            yield fault(testbed, folder / f"job_{number}")
