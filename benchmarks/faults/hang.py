"""Rank stopped by SIGSTOP: the others have to name it and exit, so that the job can restart."""

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
# The time-out, the same again for the answers of the ranks, and a margin for a loaded machine.
SOON_S = 2 * TIMEOUT_S + 180.0
OTHERS_LEAVE_S = 2 * SOON_S  # --distributed-timeout-minutes, too long to be what ends them
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "DP2": (2, ()),
    "PP2 zero-bubble": (2, ("--pipeline-model-parallel-size", "2", "--enable-zbh1-pipeline")),
    "TP2 DP2": (4, ("--tensor-model-parallel-size", "2")),
}


def stop_one(folder: Path, layout: str, victim: int, step: int) -> JobOutcome:
    """Stop a rank after a step, check the report, resume, compare with an undisturbed run."""
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
                f"some of ranks {other_ranks} still run after {SOON_S:.0f} s, "
                f"exit codes {job.codes}"
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
        faults.append("no hang_report.txt in the folder of the run says so")
    # Resume for more steps than were lost; then take as many in an undisturbed run.
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
    """Stop rank 0, which serves the store, and the last rank, of each layout."""
    for number, layout in enumerate(LAYOUTS):
        for victim in (0, LAYOUTS[layout][0] - 1):
            step = chance.randint(SAVE_INTERVAL + 1, FIRST_STEPS)
            yield stop_one(folder / f"{number}_{victim}", layout, victim, step)
