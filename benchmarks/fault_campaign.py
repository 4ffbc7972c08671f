"""Check that faults lose nothing: disturb runs of pretrain_gpt.py in many ways, then resume them.

    python benchmarks/fault_campaign.py [--only kills restarts damage disk hang slurm month]
        [--kills 100] [--flips 3] [--days 30] [--seed N]

kills    SIGKILL of one rank or of all, at listed points of training, saves, loads and removals
restarts SIGKILL of processes, of supervisors and of nodes of jobs that restart within themselves:
         during training, and in the restart that follows
damage   flipped bits; truncated, emptied, zeroed and lost files: each file of a checkpoint, and the
         tracker
disk     a full disk, a folder that became read-only (needs root)
hang     SIGSTOP of one rank, which the report has to name
slurm    a lost node, USR1 before the time limit, a time limit without a signal (needs root and
         Slurm)
month    faults drawn from published rates for a month of 1,024 nodes, in compressed time, met by a
         job that restarts within itself; prints effective training time and losses by cause. A
         job on Slurm meets those of a scheduler: lost nodes, preemption, a dead controller, signals,
         time limits (needs root and Slurm)

The run is resumed after each fault. It has to continue from a valid checkpoint, lose at most the
steps since the last save, and be bit-identical to an undisturbed run. Prints a row for each case
and a line of counts; the exit code is 1 if anything failed. Kinds that cannot run here are reported
as not proved, with the reason.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.faults import (
    damage,
    disk,
    hang,
    kills,
    month,
    month_slurm,
    restart_kills,
    slurm,
    testbed,
)
from benchmarks.faults.job import JobOutcome
from benchmarks.shared import parser

KINDS = ("kills", "restarts", "damage", "disk", "hang", "slurm", "month")


def campaign(
    kind: str, folder: Path, chance: random.Random, options: argparse.Namespace
) -> Iterator[JobOutcome]:
    """Yield the results of a kind of fault, printing each fault."""
    say = partial(print, flush=True)
    if kind in ("kills", "restarts"):
        kill = kills.campaign if kind == "kills" else restart_kills.campaign
        yield from kill(folder, chance, options.kills, say)
        return
    campaigns = {
        "damage": partial(damage.campaign, folder, chance, options.flips),
        "disk": partial(disk.campaign, folder),
        "hang": partial(hang.campaign, folder, chance),
        "slurm": partial(slurm.campaign, folder),
        "month": partial(month_campaign, folder, chance, options.days),
    }
    for result in campaigns[kind]():
        print(f"  {result.what}: {result.notes}", flush=True)
        yield result


def month_campaign(folder: Path, chance: random.Random, days: float) -> Iterator[JobOutcome]:
    """Yield the outcomes of a month on this machine and, where it can run, on the Slurm testbed."""
    say = partial(print, flush=True)
    yield from month.campaign(folder, chance, days, say)
    if not testbed.missing():
        yield from month_slurm.campaign(folder / "slurm", chance, say)


def merged(results: list[JobOutcome]) -> JobOutcome:
    """Return the outcomes of damaged files as one."""
    counts = Counter(result.notes for result in results)
    notes = ", ".join(f"{count} {note}" for note, count in sorted(counts.items()))
    wrong = tuple(f"{result.what}: {fault}" for result in results for fault in result.faults)
    return JobOutcome(f"{len(results)} damaged files", notes, wrong)


def main() -> int:
    made = parser(__doc__)
    add = made.add_argument
    add("--only", nargs="+", choices=KINDS, default=KINDS, help="kinds of faults to run")
    add("--kills", type=int, default=100, help="total number of kills; 0: at every point")
    add("--flips", type=int, default=3, help="bit flips in each file")
    add("--days", type=float, default=30.0, help="length of the month")
    add("--seed", type=int, help="random seed; printed (default: random)")
    add("--folder", type=Path, help="folder to keep the runs in (default: a temporary one)")
    options = made.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    results: list[JobOutcome] = []
    missing: list[str] = []
    lacks = {"disk": disk.missing, "slurm": testbed.missing}
    if "month" in options.only and (reason := testbed.missing()):
        missing.append(f"month on Slurm not proved: {reason}")
    if "month" in options.only and (reason := disk.missing()):
        missing.append(f"full disks of the month not proved: {reason}")
    with tempfile.TemporaryDirectory(prefix="fault_campaign_") as temporary:
        for kind in options.only:
            if reason := lacks.get(kind, str)():
                missing.append(f"{kind} not proved: {reason}")
                continue
            start = time.monotonic()
            folder = (options.folder or Path(temporary)) / kind
            # Each kind has its own seed, so that it does the same alone and with others.
            outcomes = [*campaign(kind, folder, random.Random(f"{seed} {kind}"), options)]
            print(f"  {kind}: {time.monotonic() - start:.0f} s", flush=True)
            results += [merged(outcomes)] if kind == "damage" else outcomes
    print()
    for result in results:
        print(f"{'WRONG' if result.faults else 'ok':6}{result.what}: {result.notes}")
        for fault in result.faults:
            print(f"      - {fault}")
    count = sum(len(result.faults) for result in results)
    figures = f"{len(results)} cases of faults, {count} things wrong, seed {seed}"
    print("; ".join([figures, *missing]))
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
