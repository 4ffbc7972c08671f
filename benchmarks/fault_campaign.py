"""Check that faults lose nothing: disturb runs of pretrain_gpt.py in many ways, then resume them.

    python benchmarks/fault_campaign.py [--only kills damage disk hang slurm] [--kills 100] [--flips 3] [--seed N]

kills    SIGKILL of one rank or of all, at listed points of training, saves, loads and removals
damage   flipped bits; truncated, emptied, zeroed and lost files: each file of a checkpoint, and the
         tracker
disk     a full disk, a folder that became read-only (needs root)
hang     SIGSTOP of one rank, which the report has to name
slurm    a lost node, USR1 before the time limit, a time limit without a signal (needs root and
         Slurm)

The run is resumed after each fault. It has to continue from a valid checkpoint, lose at most the
steps since the last save, and be bit-identical to an undisturbed run. Prints a row for each part
and a line of figures; the exit code is 1 if anything failed. Parts that cannot run here are
reported as not proved, with the reason.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.faults import damage, disk, hang, kills, slurm, testbed  # noqa: E402

T = TypeVar("T")
Rows = list[tuple[str, str, list[str]]]
"""What was done, what came of it, what was wrong."""
LEFT_OUT = "not proved"


def do_kills(folder: Path, chance: random.Random, options: argparse.Namespace) -> Rows:
    """Kill runs, the same number of times on each layout."""
    rows: Rows = []
    share, rest = divmod(options.kills, len(kills.CHAINS))
    for number, chain in enumerate(kills.CHAINS):
        count = share + (number < rest) if options.kills else None
        outcome = kills.run_chain(chain, count, folder / str(number), chance, say)
        lost, done = outcome.lost or [0], len(outcome.kills)
        notes = (
            f"lost {sum(lost) / len(lost):.1f} steps on average, {max(lost)} at most, a save "
            f"every {kills.SAVE_INTERVAL}; {outcome.steps_compared} losses compared"
        )
        rows.append(
            (f"{done} kills at {outcome.moments} moments, {chain.name}", notes, outcome.wrong)
        )
    return rows


def do_damage(folder: Path, chance: random.Random, options: argparse.Namespace) -> Rows:
    """Merge the many damages into one row."""
    found = list(
        told(
            damage.campaign(folder, chance, options.flips),
            lambda d: f"{d.file} {d.what}: {d.resumed}",
        )
    )
    taken = ", ".join(
        f"{n} from {i}" for i, n in sorted(Counter(d.resumed for d in found).items(), key=str)
    )
    wrong = [f"{d.file} {d.what}: {fault}" for d in found for fault in d.faults]
    return [
        (
            f"{len(found)} damaged files",
            f"resumed: {taken}; {len({d.file for d in found})} files",
            wrong,
        )
    ]


def do_disk(folder: Path, chance: random.Random, options: argparse.Namespace) -> Rows:
    reason = disk.missing()
    if reason:
        return [("disk", f"{LEFT_OUT}: {reason}", [])]
    return [
        (d.what, d.notes, list(d.faults)) for d in told(disk.campaign(folder), lambda d: d.what)
    ]


def do_hang(folder: Path, chance: random.Random, options: argparse.Namespace) -> Rows:
    found = told(hang.campaign(folder, chance), lambda h: h.what)
    return [(h.what, h.conclusion, list(h.faults)) for h in found]


def do_slurm(folder: Path, chance: random.Random, options: argparse.Namespace) -> Rows:
    reason = testbed.missing()
    if reason:
        return [("slurm", f"{LEFT_OUT}: missing {reason}", [])]
    return [
        (s.what, s.notes, list(s.faults)) for s in told(slurm.campaign(folder), lambda s: s.what)
    ]


PARTS: dict[str, Callable[[Path, random.Random, argparse.Namespace], Rows]] = {
    "kills": do_kills,
    "damage": do_damage,
    "disk": do_disk,
    "hang": do_hang,
    "slurm": do_slurm,
}


def told(items: Iterable[T], text: Callable[[T], str]) -> Iterator[T]:
    """Yield the items, printing each."""
    for item in items:
        say(text(item))
        yield item


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run"
    )
    parser.add_argument(
        "--kills", type=int, default=100, help="total number of kills; 0: at every point"
    )
    parser.add_argument("--flips", type=int, default=3, help="bit flips in each file")
    parser.add_argument(
        "--seed", type=int, default=None, help="random seed; printed (default: random)"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder to keep the runs in (default: a temporary one)"
    )
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    rows: Rows = []
    with tempfile.TemporaryDirectory(prefix="fault_campaign_") as temporary:
        for part in options.only:
            start = time.monotonic()
            # A seed for each part: it does the same alone and with others.
            found = PARTS[part](
                (options.folder or Path(temporary)) / part, random.Random(f"{seed} {part}"), options
            )
            say(f"{part}: {time.monotonic() - start:.0f} s")
            rows += found
    print()
    for what, notes, wrong in rows:
        print(f"{'WRONG' if wrong else 'ok':6}{what}: {notes}")
        for fault in wrong:
            print(f"      - {fault}")
    count = sum(len(wrong) for _, _, wrong in rows)
    missing = [f"{what} {notes}" for what, notes, _ in rows if notes.startswith(LEFT_OUT)]
    print(
        "; ".join(
            [
                f"{len(rows) - len(missing)} cases of faults, {count} things wrong, seed {seed}",
                *missing,
            ]
        )
    )
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
