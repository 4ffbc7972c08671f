"""Locks between processes that share a file system, and files that appear complete or not at all.

The lock is the kernel's `flock`, by the `filelock` package: it ends with the process that holds it, however that ends.
NFS carries it between nodes, Lustre where it is mounted with `-o flock` (with `-o localflock` only within a node). On a
file system without flock the lock is a file that its holder touches every ten seconds; it is taken over from a holder
that has ended on this host or has not touched it for LEASE_S.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import filelock

LEASE_S = 30.0
WAIT_S = 180.0  # Lustre notices after about 150 s that a node is gone, and only then frees its locks
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_MOST_CHARACTERS = 1000


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    pid: int
    host: str

    @property
    def is_here(self) -> bool:
        """Whether it runs on this host."""
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class FileLock:
    """A lock that one process of all that name the same path can hold. Every method may raise OSError.

    path     exists while the lock is held; its folder must exist
    lease_s  seconds without a sign of life after which a holder counts as dead, where there is no flock
    """

    def __init__(self, path: Path, lease_s: float = LEASE_S) -> None:
        self.path, self._lease_s = path, lease_s
        self._lock: filelock.BaseFileLock | None = None

    def acquire(self, wait_s: float = 0.0, poll_s: float = 1.0) -> bool:
        """Take the lock, looking every `poll_s` seconds for at most `wait_s`; whether it was taken."""
        if self._lock is None:
            self._lock = self._make()
        before = self._last_sign()
        if self._try(wait_s, poll_s):
            return True
        # filelock leaves the lock of a dead holder alone where two names cannot be exchanged in one step, as on Lustre.
        if self._needs_signs and wait_s > self._lease_s and self._last_sign() == before:
            self.path.unlink(missing_ok=True)
            return self._try(0.0, poll_s)
        return False

    def acquire_from_the_dead(self, say: Callable[[str], object], wait_s: float = WAIT_S) -> bool:
        """Take the lock if it is free, or wait where its holder may have died unnoticed; whether it was taken.

        A holder on this host is known to live. For one on another host it waits, after telling so with `say`.
        """
        if self.acquire():
            return True
        owner = self.owner()
        if owner is not None and owner.is_here and not self._needs_signs:
            return False
        say(f"{self.path} is held by {self.describe()}: waiting {wait_s:g} s for its end")
        return self.acquire(wait_s)

    @property
    def _needs_signs(self) -> bool:
        """Whether there is no flock here, so that only waiting tells a dead holder from a living one."""
        return isinstance(self._lock, filelock.SoftFileLease)

    def _try(self, wait_s: float, poll_s: float) -> bool:
        assert self._lock is not None, "made before"
        with contextlib.suppress(filelock.Timeout):
            self._lock.acquire(timeout=wait_s, poll_interval=poll_s)
            if not self._needs_signs:
                self.path.write_text(f"{socket.gethostname()} {os.getpid()}\n")
            return True
        return False

    def _last_sign(self) -> tuple[int, int] | None:
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(self.path)
            return status.st_ino, status.st_mtime_ns
        return None

    def owner(self) -> Owner | None:
        """The process that holds the lock, as far as its file says."""
        if isinstance(self._lock, filelock.SoftFileLease):
            record = self._lock.owner
            return None if record is None else Owner(record.pid, record.hostname)
        try:
            with open(self.path, errors="replace") as file:
                host, pid = file.read(_MOST_CHARACTERS).split()
            return Owner(int(pid), host)
        except (OSError, ValueError):
            return None

    def describe(self) -> str:
        """Name the holder, for messages."""
        return str(self.owner() or "an unknown process")

    def release(self) -> None:
        """Give the lock back and remove its file. Harmless when the lock is not held."""
        if self._lock is not None and self._lock.is_locked:
            if not self._needs_signs:
                self.path.unlink(missing_ok=True)  # first: a waiter that has the old file open notices and looks again
            self._lock.release()

    def _make(self) -> filelock.BaseFileLock:
        with tempfile.TemporaryFile(dir=self.path.parent) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_FLOCK:
                    raise
                return filelock.SoftFileLease(self.path, lease_duration=self._lease_s, thread_local=False)
        return filelock.FileLock(self.path, thread_local=False)


@contextlib.contextmanager
def renamed_into(path: Path) -> Iterator[BinaryIO]:
    """Give a binary file under a temporary name that takes `path`'s name at the end, its content being on the disk.

    The file is removed after an error.
    """
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            yield file
            flush_to_disk(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_name(path: Path) -> Path:
    """A hidden name beside `path` that no other process uses."""
    return path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"


def flush_to_disk(file: BinaryIO) -> None:
    """Without this a crash of the machine can leave a file of the right size full of zeros."""
    file.flush()
    os.fsync(file.fileno())


def flush_directory(directory: Path) -> None:
    """Make renames in a directory last, where the file system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
