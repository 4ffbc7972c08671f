"""Damage to every file of the newest checkpoint and to the tracker: flips, truncation, loss.

After each, pretrain_gpt.py is started as after a crash. It has to name the damaged file, load the
previous checkpoint, and continue with the losses of an undisturbed run. If only the tracker is
damaged, it has to report that and load the newest checkpoint, which is valid.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.faults import history
from benchmarks.faults.job import CONSTANT, JobOutcome, run_job, run_well, training

TRACKER = "latest_checkpointed_iteration.txt"
SAVES = 3
SAVE_INTERVAL = 4
MORE = 3


def flip(file: Path, chance: random.Random) -> str:
    """Change one bit."""
    content = bytearray(file.read_bytes())
    at = chance.randrange(len(content))
    bit = chance.randrange(8)
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {at} flipped"


def cut(file: Path, chance: random.Random) -> str:
    """Truncate the file."""
    left = chance.randrange(1, max(2, file.stat().st_size))
    file.write_bytes(file.read_bytes()[:left])
    return f"cut to {left} bytes"


def empty(file: Path, chance: random.Random) -> str:
    file.write_bytes(b"")
    return "emptied"


def lose(file: Path, chance: random.Random) -> str:
    file.unlink()
    return "removed"


def zero(file: Path, chance: random.Random) -> str:
    """Fill the file with zeros, the state in which some file systems leave it after a crash."""
    file.write_bytes(bytes(file.stat().st_size))
    return "zeroed"


KINDS: dict[str, Callable[[Path, random.Random], str]] = {
    kind.__name__: kind for kind in (flip, cut, empty, lose, zero)
}


@dataclass(frozen=True)
class UndisturbedRun:
    """Undisturbed run, with which resumed runs are compared.

    folder      its "before" holds the checkpoints from which other runs resume
    reference   figures of its steps
    ranks       number of processes
    """

    folder: Path
    reference: dict[int, history.Step]
    ranks: int

    def arguments(self, save: Path, iterations: int) -> list[str]:
        return training(save, iterations, SAVE_INTERVAL, *CONSTANT)


def train(folder: Path, ranks: int = 2) -> UndisturbedRun:
    """Train the undisturbed run: three checkpoints, and some steps after them in a copy."""
    trained = UndisturbedRun(folder, {}, ranks)
    last = SAVES * SAVE_INTERVAL
    for name, iterations in (("before", last), ("whole", last + MORE)):
        if name == "whole":
            shutil.copytree(folder / "before", folder / name)
        run_well(ranks, trained.arguments(folder / name, iterations), folder / f"logs_{name}")
    return UndisturbedRun(folder, dict(history.steps(folder / "whole")), ranks)


def files_of(trained: UndisturbedRun) -> list[str]:
    """Return the names of the files in the newest checkpoint, and the tracker's."""
    return [
        *sorted(path.name for path in history.newest(trained.folder / "before").iterdir()),
        TRACKER,
    ]


def hurt(trained: UndisturbedRun, name: str, kind: str, number: int, seed: int) -> JobOutcome:
    """Damage a copy, resume from it, and check what the run loads and computes."""
    copy = trained.folder / f"damage_{number}"
    shutil.copytree(trained.folder / "before", copy)
    newest = history.newest(copy)
    last = SAVES * SAVE_INTERVAL
    file = copy / name if name == TRACKER else newest / name
    what = KINDS[kind](file, random.Random(seed))
    # White space around the number in the tracker is irrelevant: a newline may become a tab.
    says_the_same = (
        name == TRACKER and file.exists() and file.read_bytes().strip() == str(last).encode()
    )
    (copy / "metrics.jsonl").unlink()
    job = run_job(
        trained.ranks, trained.arguments(copy, last + MORE), trained.folder / f"logs_{number}"
    )
    output = job.outputs()
    codes = job.codes
    faults = []
    resumed = None
    if any(codes):
        faults.append(f"ended with exit codes {codes}: {job.tail()}")
    else:
        steps = history.steps(copy)
        resumed = steps[0][0] - 1
        different = history.differing(steps, trained.reference)
        if different:
            faults.append(f"silently wrong: losses of steps {different} differ")
        # A tracker that is damaged may name an older checkpoint, which is whole, but no newer one.
        if name == TRACKER and resumed != last and str(resumed) not in file_text(output):
            faults.append(f"loaded iteration {resumed} although {last} is whole")
        if name != TRACKER and resumed != last - SAVE_INTERVAL:
            faults.append(f"loaded iteration {resumed}, not {last - SAVE_INTERVAL}")
    if name not in output and not says_the_same:
        faults.append(f"the log does not name {name}")
    shutil.rmtree(copy)
    notes = "not resumed" if resumed is None else f"resumed from {resumed}"
    return JobOutcome(f"{name} {what}", notes, tuple(faults))


def file_text(output: str) -> str:
    """Return the lines of a log that mention checkpoints."""
    return "\n".join(line for line in output.splitlines() if "checkpoint" in line)


def campaign(
    folder: Path, chance: random.Random, flips: int = 1, jobs: int = 2
) -> Iterator[JobOutcome]:
    """Yield the outcome of every kind of damage to every file, with `flips` bit flips each."""
    trained = train(folder)
    damages = [
        (name, kind)
        for name in files_of(trained)
        for kind in KINDS
        for _ in range(flips if kind == "flip" else 1)
    ]
    names, kinds = zip(*damages, strict=True)
    seeds = [chance.randrange(2**32) for _ in damages]
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(partial(hurt, trained), names, kinds, range(len(damages)), seeds)
