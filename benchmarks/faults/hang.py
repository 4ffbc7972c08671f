"""Rank stopped by SIGSTOP: the others have to name it and exit, so that a scheduler restarts."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults import history
from benchmarks.faults.job import CONSTANT, FaultJob, JobOutcome, run_job, run_well, training
from tests.helpers.fault_points import strike

SAVE_INTERVAL = 5
FIRST_STEPS = 30
TIMEOUT_S = 4.0
# The time-out, as much again for the answers of the ranks, and what a loaded machine adds.
SOON_S = 2 * TIMEOUT_S + 180.0
OTHERS_LEAVE_S = 2 * SOON_S  # their --distributed-timeout-minutes: it is not what ends them
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "DP2": (2, ()),
    "PP2 zero-bubble": (2, ("--pipeline-model-parallel-size", "2", "--enable-zbh1-pipeline")),
    "TP2 DP2": (4, ("--tensor-model-parallel-size", "2")),
}


def stop_one(folder: Path, layout: str, victim: int, step: int) -> JobOutcome:
    """Stop a rank after some step, read the report, resume."""
    ranks, flags = LAYOUTS[layout]
    save = folder / "run"
    arguments = training(save, 1_000_000, SAVE_INTERVAL, *CONSTANT, *flags)
    watched = ["--hang-timeout", str(TIMEOUT_S)]
    watched += ["--distributed-timeout-minutes", str(OTHERS_LEAVE_S / 60)]
    faults: list[str] = []
    stop = {victim: [(strike, "megatron.run.step", step, "stop")]}
    with FaultJob(ranks, [*arguments, *watched], folder / "logs", arms=stop) as job:
        other_ranks = [rank for rank in range(ranks) if rank != victim]
        if not job.wait_for_end(other_ranks, SOON_S):
            faults.append(
                f"of ranks {other_ranks} some still run after {SOON_S:.0f} s: exit codes {job.codes}"
            )
        elif not all(job.codes[rank] for rank in other_ranks):
            faults.append(f"exit codes {job.codes}")
    output = job.outputs()
    conclusion = next(
        (line for line in output.splitlines() if re.search(rf"rank {victim}\b.*stopped", line)), ""
    )
    if not conclusion:
        faults.append(f"no rank reports that rank {victim} is stopped")
    elif output.count(conclusion) > 1:
        faults.append("the report is printed more than once")
    reports = list(save.glob("hang_report*.txt"))
    if not reports or not re.search(rf"rank {victim}\b.*stopped", reports[0].read_text()):
        faults.append("no hang_report.txt in the folder of the run says it")
    # More steps than were lost, then the same number in an undisturbed run.
    reached = history.steps(save)[-1][0]
    restarted = run_job(
        ranks, [*arguments, "--exit-interval", str(4 * SAVE_INTERVAL)], folder / "logs_again"
    )
    steps = history.steps(save)
    undisturbed_run = folder / "whole"
    last = steps[-1][0]
    if any(restarted.codes) or last < reached:
        faults.append(f"could not be resumed: {restarted.tail()}")
    else:
        undisturbed = [a if a != str(save) else str(undisturbed_run) for a in arguments]
        run_well(ranks, [*undisturbed, "--exit-interval", str(last)], folder / "logs_whole")
        if history.differing(steps, dict(history.steps(undisturbed_run))):
            faults.append("losses are not those of the undisturbed run")
    return JobOutcome(
        f"SIGSTOP on rank {victim} of {layout} after step {step}", conclusion.strip(), tuple(faults)
    )


def campaign(folder: Path, chance: random.Random) -> Iterator[JobOutcome]:
    """Each layout with rank 0, which serves the store, and with another."""
    for number, layout in enumerate(LAYOUTS):
        for victim in (0, LAYOUTS[layout][0] - 1):
            step = chance.randint(SAVE_INTERVAL + 1, FIRST_STEPS)
            yield stop_one(folder / f"{number}_{victim}", layout, victim, step)
