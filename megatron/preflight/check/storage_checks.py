"""What the run writes: folders, room for checkpoints, how long a save takes."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.planning.checkpoint_size import checkpoint_bytes
from megatron.preflight.check.findings import Finding, error, note, warning
from megatron.preflight.check.subject import Subject
from megatron.training.walltime import Unwatched, WallTime

_LFS_S = 20.0


@dataclass
class Storage:
    """Bytes of a checkpoint, how many are on the disk at once, and seconds of a save at an assumed bandwidth.

    `free` are the bytes that the folder still takes, and `limit` what says so.
    """

    folder: str
    checkpoint: int
    at_once: int | None
    save_s: float
    gb_per_s: float
    free: int
    limit: str


def measure_storage(s: Subject) -> Storage | None:
    """None without --save."""
    if s.config is None or not s.config.checkpoint.save:
        return None
    size, ranks = checkpoint_bytes(s.config), s.config.parallel.world_size
    save_s = WallTime(Unwatched(), size / ranks).guess_s
    keep = s.config.checkpoint.keep_last
    free, limit = free_bytes(Path(s.config.checkpoint.save))
    at_once = None if keep is None else keep + 1  # the next one is written before the oldest goes
    return Storage(s.config.checkpoint.save, size, at_once, save_s, size / save_s / 1e9 if save_s else 0.0, free, limit)


def free_bytes(path: Path) -> tuple[int, str]:
    """The bytes that can still be written below a path, and what limits them: the file system, or a quota on Lustre."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    system = os.statvfs(folder)
    free, limit = system.f_bavail * system.f_frsize, f"free on the file system of {folder}"
    if shutil.which("lfs"):
        for kind, name in _quota_owners(folder):
            left = quota_left(_lfs("quota", "-q", kind, name, str(folder)))
            if left is not None and left < free:
                free, limit = left, f"left of the quota (lfs quota {kind} {name} {folder})"
    return free, limit


def _lfs(*words: str) -> str:
    try:
        done = subprocess.run(["lfs", *words], capture_output=True, text=True, timeout=_LFS_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _quota_owners(folder: Path) -> Iterator[tuple[str, str]]:
    """Whose quotas may hold: the user's, and that of the project that the folder belongs to."""
    yield "-u", str(os.getuid())
    match = re.match(r"\s*(\d+)", _lfs("project", "-d", str(folder)))
    if match and match[1] != "0":
        yield "-p", match[1]


def quota_left(answer: str) -> int | None:
    """Bytes left by `lfs quota -q`; None where there is no limit.

    Its line is the file system, KiB used (a star behind them where they are too many), quota, limit, grace, and the
    same of files; a long name of the file system has a line of its own. The limit cannot be crossed; the quota, which
    is lower, can for some days.

    >>> quota_left("/lustre/orion  1000  0  5000  -  10  0  0  -")
    4096000
    """
    words = answer.split()
    numbers = [word.rstrip("*") for word in words[1:4]]
    if len(numbers) < 3 or not all(number.isdigit() for number in numbers):
        return None
    used, quota, limit = map(int, numbers)
    most = limit or quota
    return max(0, most - used) * 1024 if most else None


def check_saving(s: Subject, storage: Storage | None) -> Iterator[Finding]:
    """--save, --load and what lies behind them."""
    config = s.config
    if config is None:
        return
    save, load = config.checkpoint.save, config.checkpoint.load
    if storage is None:
        yield warning("saving", "no --save: all is lost at the end of the job. Give --save FOLDER --load "
            "FOLDER", s.flag("--save"))
        return
    again = config.training.requeue or "requeue" in s.job.options
    if load != save:
        text = f"--load is {load or 'absent'}, --save is {save}: a job that starts again begins "
        text += f"at {load} again" if load else "at iteration 0"
        found = error if config.training.requeue else warning
        yield found("saving", f"{text}. Give --load {save}", s.flag("--load", "--save"))
    if config.checkpoint.save_interval is None and config.checkpoint.save_interval_minutes is None:
        yield warning(
            "saving", f"no --save-interval: the run saves at its end{' and at signals' if again else ''} alone. Give "
            "--save-interval-minutes 30", s.flag("--save"),
        )  # fmt: skip
    yield from _check_room(s, storage)
    if s.is_local(storage.folder):
        yield error("saving", f"--save {save} is on the nodes' own disks, which are gone with the "
            f"job", s.flag("--save"))
    elif not os.access(_existing(Path(storage.folder)), os.W_OK):
        yield error("saving", f"--save {save} cannot be written", s.flag("--save"))


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _check_room(s: Subject, storage: Storage) -> Iterator[Finding]:
    gb, free = storage.checkpoint / 1e9, storage.free / 1e9
    place = s.flag("--keep-last", "--save")
    if storage.at_once is None:
        enough = int(storage.free // storage.checkpoint)
        text = (
            f"without --keep-last nothing is removed: {free:.0f} GB ({storage.limit}) hold {enough} checkpoints of "
            f"{gb:.1f} GB"
        )
        yield (error if enough < 1 else warning if enough < 20 else note)("saving", text, place)
    elif storage.at_once * storage.checkpoint > storage.free:
        yield error(
            "saving", f"{storage.at_once} checkpoints of {gb:.1f} GB (--keep-last {storage.at_once - 1}, and "
            f"the one that is "
            f"written) need {storage.at_once * gb:.0f} GB, but {free:.0f} GB are {storage.limit}", place,
        )  # fmt: skip
