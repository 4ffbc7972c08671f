"""One program at a time writes to a folder.

The same script submitted twice would otherwise have two runs that overwrite and remove each other's files.
"""
from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.data.file_lock import FileLock
from megatron.errors import ConfigError
from megatron.parallel.environment import job_name

LOCK_NAME, JOB_NAME = ".in_use", ".in_use.job"
STALE_S = 30.0  # without a sign of life for so long, a program on another host counts as dead
_MARGIN_S = 10.0


class FolderClaim:
    """This process's claim on a folder, from `take` to `release`.

    A claim whose process is dead is taken over: at once where the process ran on this host or in an earlier start of
    this Slurm job, otherwise after STALE_S without a sign of life. Where the file system takes no lock, the claim is
    only a note.

    folder  is made where it is not there
    what    how messages call it, such as "--save FOLDER"
    """

    def __init__(
        self, folder: Path, what: str, environ: Mapping[str, str] | None = None, stale_s: float = STALE_S, *,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder, self._what = folder, what
        self._environ = os.environ if environ is None else environ
        self._stale_s, self._clock, self._sleep = stale_s, clock, sleep
        self._lock: FileLock | None = None

    def take(self, say: Callable[[str], object]) -> None:
        """Claim the folder. Raises ConfigError while another program has it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._folder / LOCK_NAME, self._stale_s, self._clock, self._sleep)
            if not lock.acquire():
                self._take_over(lock, say)
            self._lock = lock
            self._write_job()
        except OSError as error:
            say(f" note: {self._what} cannot be locked ({error.strerror}): see that nothing else writes there")

    def release(self) -> None:
        """Leave the folder to the next one. Harmless when called twice, and where nothing was claimed."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                if lock.is_ours():
                    (self._folder / JOB_NAME).unlink(missing_ok=True)
            lock.release()

    def _take_over(self, lock: FileLock, say: Callable[[str], object]) -> None:
        """Wait until the owner is known to be dead, or to be alive, which is an error."""
        if self._is_of_an_earlier_start():
            lock.path.unlink(missing_ok=True)
        wait_s = self._stale_s + _MARGIN_S
        end, told = self._clock() + wait_s, False
        while not lock.acquire():
            owner, left_s = lock.owner(), end - self._clock()
            if (owner is not None and owner.lives_here()) or left_s <= 0:
                raise ConfigError(
                    f"{self._what} is in use by another run: {lock.describe()}. Wait for its end or stop it, or give "
                    f"this run another folder"
                )
            if not told:
                say(f" {self._what} is claimed by {lock.describe()}: waiting {wait_s:.0f} s for a sign of life")
                told = True
            lock.wait(left_s)

    def _is_of_an_earlier_start(self) -> bool:
        """Whether the claim is of this Slurm job, requeued since: then its processes are gone, wherever they ran."""
        job = job_name(self._environ)
        with contextlib.suppress(OSError, ValueError):
            owner, start = (self._folder / JOB_NAME).read_text().split()
            return job is not None and owner == job and int(start) < self._start()
        return False

    def _write_job(self) -> None:
        job = job_name(self._environ)
        if job is None:
            (self._folder / JOB_NAME).unlink(missing_ok=True)
        else:
            (self._folder / JOB_NAME).write_text(f"{job} {self._start()}\n")

    def _start(self) -> int:
        return int(self._environ.get("SLURM_RESTART_COUNT") or 0)
