"""Locks between processes that share a file system, and files that appear complete or not at all.

The lock is the kernel's `flock`, through the package `filelock`: it ends with the process that
holds it, however that ends. NFS carries it between nodes, Lustre if mounted with `-o flock` (with
`-o localflock` only within a node). On a file system without flock the lock is a file that its
holder touches every ten seconds; another process takes it over if the holder has ended on this host
or has not touched it for LEASE_S.
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

from megatron.errors import ConfigError

LOCK_NAME = ".in_use"
LEASE_S = 30.0
# Lustre notices after about 150 s that a node is gone, and only then frees its locks
WAIT_S = 180.0
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_MOST_CHARACTERS = 1000


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    pid: int
    host: str

    @property
    def is_here(self) -> bool:
        """Return whether it runs on this host."""
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class FileLock:
    """A lock that only one process can hold at a time. Every method may raise OSError.

    path     a file that exists while the lock is held; its folder must exist
    lease_s  seconds without a sign of life after which a holder counts as dead, on file systems
             without flock
    """

    def __init__(self, path: Path, lease_s: float = LEASE_S) -> None:
        self.path, self._lease_s = path, lease_s
        self._lock: filelock.BaseFileLock | None = None

    def acquire(self, wait_s: float = 0.0, poll_s: float = 1.0) -> bool:
        """Try every `poll_s` seconds, for at most `wait_s`, to take the lock; return whether it was
        taken.
        """
        if self._lock is None:
            self._lock = self._make()
        before = self._last_sign()
        if self._try(wait_s, poll_s):
            return True
        # filelock does not take over from a dead holder if two names cannot be exchanged
        # atomically, as on Lustre.
        if self._needs_signs and wait_s > self._lease_s and self._last_sign() == before:
            self.path.unlink(missing_ok=True)
            return self._try(0.0, poll_s)
        return False

    def acquire_from_the_dead(self, say: Callable[[str], object], wait_s: float = WAIT_S) -> bool:
        """Take the lock if it is free, or wait if its holder may have died unnoticed; return
        whether it was taken.

        A holder on this host is alive. For one on another host, report with `say` and wait up to
        `wait_s` seconds.
        """
        if self.acquire():
            return True
        owner = self.owner()
        if owner is not None and owner.is_here and not self._needs_signs:
            return False
        say(f"{self.path} is held by {self.describe()}: waiting up to {wait_s:g} s")
        return self.acquire(wait_s)

    @property
    def _needs_signs(self) -> bool:
        """Return whether the file system lacks flock, so that only waiting tells a dead holder from
        a living one.
        """
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
        """Return the process that holds the lock, if its file says so."""
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
        """Return the name of the holder, for messages."""
        return str(self.owner() or "an unknown process")

    def release(self) -> None:
        """Release the lock and remove its file. Harmless if the lock is not held."""
        if self._lock is not None and self._lock.is_locked:
            if not self._needs_signs:
                # first: a waiter with the old file open notices and tries again
                self.path.unlink(missing_ok=True)
            self._lock.release()

    def _make(self) -> filelock.BaseFileLock:
        with tempfile.TemporaryFile(dir=self.path.parent) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_FLOCK:
                    raise
                return filelock.SoftFileLease(
                    self.path, lease_duration=self._lease_s, thread_local=False
                )
        return filelock.FileLock(self.path, thread_local=False)


class FolderClaim:
    """An exclusive claim on a folder, from `take` to `release`: a script submitted twice must not
    write to it twice.

    folder  is created if missing
    what    its name in messages, such as "--save FOLDER"
    wait_s  seconds to wait for a program on another host, whose node may have died unnoticed
    """

    def __init__(self, folder: Path, what: str, wait_s: float = WAIT_S) -> None:
        self._folder, self._what, self._wait_s = folder, what, wait_s
        self._lock = FileLock(folder / LOCK_NAME)

    def take(self, say: Callable[[str], object]) -> None:
        """Claim the folder; if it cannot be locked, only note that. Raises ConfigError while
        another program has it.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._lock.acquire_from_the_dead(lambda text: say(f" {text}"), self._wait_s):
                return
        except OSError as error:
            say(
                f" note: {self._what} cannot be locked ({error.strerror}): make sure that nothing "
                "else writes there"
            )
            return
        raise ConfigError(
            f"{self._what} is in use by another run: {self._lock.describe()}. Wait for it to end, "
            "stop it, or give this run another folder"
        )

    def release(self) -> None:
        """Give up the claim. Harmless if called twice or without a claim."""
        self._lock.release()


@contextlib.contextmanager
def renamed_into(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file with a temporary name, which is synced and renamed to `path` at the end.

    It is removed after an error.
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
    """Return a hidden name beside `path` that no other process uses."""
    return path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"


def flush_to_disk(file: BinaryIO) -> None:
    """Sync a file: after a crash of the machine it could otherwise be full of zeros."""
    file.flush()
    os.fsync(file.fileno())


def flush_directory(directory: Path) -> None:
    """Sync the renames in a directory, if the file system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
