"""Faults of the disk during a run, which has to continue: it is full, or becomes read-only.

Both need root: the folder of the checkpoints is a small tmpfs, which is mounted, filled, remounted
and removed here.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults import history
from benchmarks.faults.job import Arms, FaultJob, JobOutcome, run_job, run_well, training
from tests.helpers.fault_points import on

SAVE_INTERVAL = 5
ITERATIONS = 40


def missing() -> str:
    """Return why this cannot run here; empty if it can."""
    mount = shutil.which("mount")
    if mount is None:
        return "mount is not installed"
    done = subprocess.run(
        ["unshare", "--mount", mount, "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True
    )
    return "" if done.returncode == 0 else "a tmpfs cannot be mounted, which needs root"


@contextlib.contextmanager
def tmpfs(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system of this size in memory, for the duration of a block."""
    folder.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(folder)], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


@dataclass(frozen=True)
class Closing:
    """Makes a folder read-only from within the run, which has a lock file open in it.

    A read-only mount covers the folder: a file system with files open for writing cannot become
    read-only itself.
    """

    folder: str

    def __call__(self, *_: object) -> None:
        subprocess.run(["mount", "--bind", self.folder, self.folder], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", self.folder], check=True)


def arguments(save: Path, metrics: Path, *more: str) -> list[str]:
    """Return arguments with metrics elsewhere: they must be complete even if the disk is full."""
    metrics.mkdir(parents=True, exist_ok=True)
    file = str(metrics / "metrics.jsonl")
    return training(save, ITERATIONS, SAVE_INTERVAL, "--metrics-file", file, *more)


def campaign(folder: Path, ranks: int = 2) -> Iterator[JobOutcome]:
    """Yield the outcome of each fault, with synchronous and with asynchronous saves."""
    undisturbed = folder / "whole"
    run_well(ranks, arguments(undisturbed, undisturbed), folder / "logs_whole")
    reference = dict(history.steps(undisturbed))
    size = sum(file.stat().st_blocks * 512 for file in history.newest(undisturbed).iterdir())
    for flags in ((), ("--async-save",)):
        name = "asynchronous" if flags else "synchronous"
        for fault in (full, read_only):
            faulty = folder / f"{fault.__name__}_{name}"
            yield fault(faulty, ranks, size, reference, flags, name)


def full(
    folder: Path,
    ranks: int,
    size: int,
    reference: dict[int, history.Step],
    flags: tuple[str, ...],
    name: str,
) -> JobOutcome:
    """Run with room for two and a half checkpoints, then resume with room for all."""
    faults: list[str] = []
    metrics = folder / "metrics"
    with tmpfs(folder / "disk", int(2.5 * size)) as disk:
        job = run_job(ranks, arguments(disk, metrics, *flags), folder / "logs")
        faults += after_failed_saves(job, "No space left", disk, metrics)
        stayed = sorted(path.name for path in disk.glob("iter_*"))
        if len(stayed) != 2:
            faults.append(f"2 checkpoints fit, there are {stayed}")
        remount(disk, f"size={50 * size}")
        faults += resumed(ranks, disk, metrics, flags, 2 * SAVE_INTERVAL, reference, folder)
    return JobOutcome(f"full disk, {name} saves", f"{', '.join(stayed)} stayed", tuple(faults))


def read_only(
    folder: Path,
    ranks: int,
    size: int,
    reference: dict[int, history.Step],
    flags: tuple[str, ...],
    name: str,
) -> JobOutcome:
    """Make the folder read-only when rank 0 is about to begin the third save; then resume."""
    faults: list[str] = []
    metrics = folder / "metrics"
    with tmpfs(folder / "disk", 50 * size) as disk:
        close = (on, "os.mkdir", Closing(str(disk)), 1, f"iter_{3 * SAVE_INTERVAL:07d}")
        arms: Arms = {0: [close]}
        job = run_job(ranks, arguments(disk, metrics, *flags), folder / "logs", arms=arms)
        faults += after_failed_saves(job, "Read-only file system", disk, metrics)
        last = int(history.newest(disk).name.removeprefix("iter_"))
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # the read-only mount
        faults += resumed(ranks, disk, metrics, flags, last, reference, folder)
    return JobOutcome(f"read-only folder, {name} saves", f"resumed from {last}", tuple(faults))


def after_failed_saves(job: FaultJob, reason: str, disk: Path, metrics: Path) -> list[str]:
    """Return the problems of a run with failed saves: it must finish, report them, and fail."""
    faults = []
    if history.steps(metrics)[-1][0] != ITERATIONS:
        faults.append(f"training ended at step {history.steps(metrics)[-1][0]}: {job.tail()}")
    if reason not in job.output():
        faults.append(f"the log does not mention {reason!r}")
    codes = [code or 0 for code in job.codes]
    if not all(code > 0 for code in codes):
        faults.append(f"exit codes {codes}, although the last save failed")
    left = [path.name for path in disk.iterdir() if re.search(r"\.tmp|\.old|\.removed", path.name)]
    if left and "Read-only" not in reason:
        faults.append(f"left over: {left}")
    return faults


def resumed(
    ranks: int,
    disk: Path,
    metrics: Path,
    flags: tuple[str, ...],
    expected: int,
    reference: dict[int, history.Step],
    folder: Path,
) -> list[str]:
    """Return the problems of the next start, after the disk is repaired."""
    before = len(history.steps(metrics))
    job = run_job(ranks, arguments(disk, metrics, *flags), folder / "logs_resumed")
    if any(job.codes):
        return [f"could not be resumed, exit codes {job.codes}: {job.tail()}"]
    steps = history.steps(metrics)
    faults = []
    if steps[before][0] != expected + 1:
        faults.append(f"continued with step {steps[before][0]}, not {expected + 1}")
    different = history.differing(steps, reference)
    if different:
        faults.append(f"losses of steps {different} are not those of the undisturbed run")
    if history.newest(disk).name != f"iter_{ITERATIONS:07d}":
        faults.append(f"the newest checkpoint is {history.newest(disk).name}")
    return faults
