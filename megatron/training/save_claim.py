"""One run at a time writes to a --save folder.

The same script submitted twice would otherwise have two runs that overwrite and remove each other's checkpoints.
"""
from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.data.file_lock import FileLock
from megatron.errors import CheckpointError
from megatron.parallel.topology import Topology
from megatron.training.requeue import job_name

LOCK_NAME, JOB_NAME = ".in_use", ".in_use.job"
STALE_S = 30.0  # without a sign of life for so long, a run on another host counts as dead
_MARGIN_S = 10.0


class SaveClaim:
    """This run's claim on its --save folder, from `take` to `release`. Rank 0 holds it for all.

    A claim whose process is dead is taken over: at once where the process ran on this host or in an earlier start of
    this Slurm job, otherwise after STALE_S without a sign of life. Where the file system takes no lock, the run goes on
    without.
    """

    def __init__(self, folder: str | None, environ: Mapping[str, str] | None = None, stale_s: float = STALE_S) -> None:
        self._folder = Path(folder) if folder else None
        self._environ = os.environ if environ is None else environ
        self._stale_s = stale_s
        self._lock: FileLock | None = None

    def take(self, topology: Topology, say: Callable[[str], object]) -> None:
        """Claim the folder; all ranks call it. Raises CheckpointError on all of them while another run has it."""
        if self._folder is None:
            return
        from megatron.checkpoint.together import decided_by_first  # with torch's checkpoints, which import slowly

        decided_by_first(topology, lambda: self._take(say))

    def release(self) -> None:
        """Leave the folder to the next run. Harmless when called twice, and where nothing was claimed."""
        lock, self._lock = self._lock, None
        if lock is not None and self._folder is not None:
            if lock.is_ours():
                (self._folder / JOB_NAME).unlink(missing_ok=True)
            lock.release()

    def _take(self, say: Callable[[str], object]) -> None:
        assert self._folder is not None, "there is a folder to claim"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._folder / LOCK_NAME, self._stale_s)
            if not lock.acquire():
                self._take_over(lock, say)
            self._lock = lock
            self._write_job()
        except OSError as error:
            say(f" note: {self._folder} cannot be locked ({error.strerror}): see that no other run saves there")

    def _take_over(self, lock: FileLock, say: Callable[[str], object]) -> None:
        """Wait until the owner is known to be dead, or to be alive, which is an error."""
        if self._is_of_an_earlier_start():
            lock.path.unlink(missing_ok=True)
        wait_s = self._stale_s + _MARGIN_S
        end, told = time.monotonic() + wait_s, False
        while not lock.acquire():
            owner, left_s = lock.owner(), end - time.monotonic()
            if (owner is not None and owner.lives_here()) or left_s <= 0:
                raise CheckpointError(
                    f"--save {self._folder} is in use by another run: {lock.describe()}. Wait for its end or stop it, "
                    f"or give this run another --save"
                )
            if not told:
                say(f" {self._folder} is claimed by {lock.describe()}: waiting {wait_s:.0f} s for a sign of life")
                told = True
            lock.wait(left_s)

    def _is_of_an_earlier_start(self) -> bool:
        """Whether the claim is of this Slurm job, requeued since: then its processes are gone, wherever they ran."""
        assert self._folder is not None
        job = job_name(self._environ)
        with contextlib.suppress(OSError, ValueError):
            owner, start = (self._folder / JOB_NAME).read_text().split()
            return job is not None and owner == job and int(start) < self._start()
        return False

    def _write_job(self) -> None:
        assert self._folder is not None
        job = job_name(self._environ)
        if job is None:
            (self._folder / JOB_NAME).unlink(missing_ok=True)
        else:
            (self._folder / JOB_NAME).write_text(f"{job} {self._start()}\n")

    def _start(self) -> int:
        return int(self._environ.get("SLURM_RESTART_COUNT") or 0)
