"""Locks between processes that share a file system, and files that appear complete or not at all.

The lock is the kernel's `flock`, through the package `filelock`: the lock ends with the process
that holds it, however that process ends. It works between nodes on NFS, and on Lustre if mounted
with `-o flock` (with `-o localflock` only within a node). On a file system without flock,
`filelock` uses the existence of the file as the lock: a file whose holder has ended on this host is
removed; if the holder was on another host, the user must remove the file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import filelock

from megatron.errors import ConfigError

LOCK_NAME = ".in_use"
# Lustre detects after about 150 s that a node is gone, and only then releases its locks
WAIT_S = 180.0
_POLL_S = 0.2
_MOST_CHARACTERS = 1000


class FileLock:
    """A lock that only one process can hold at a time.

    The file `path` exists while the lock is held; its folder must exist. Taking and releasing the
    lock may raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = filelock.FileLock(path, thread_local=False)

    def acquire(self, wait_s: float = 0.0) -> bool:
        """Try for at most `wait_s` seconds to take the lock; return whether it was taken."""
        try:
            self._lock.acquire(timeout=wait_s, poll_interval=_POLL_S)
        except filelock.Timeout:
            return False
        if not self._is_soft:
            self.path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        return True

    def acquire_from_the_dead(self, say: Callable[[str], object], wait_s: float = WAIT_S) -> bool:
        """Take the lock if it is free, or wait if its holder may have died unnoticed.

        Return whether it was taken. If the holder is on this host, it is alive, and there is no
        wait. Otherwise, report with `say` and wait up to `wait_s` seconds.
        """
        if self.acquire():
            return True
        holder = self.holder()
        if holder is not None and holder[1] == socket.gethostname():
            return False
        say(f"{self.path} is held by {self.describe()}: waiting up to {wait_s:g} s")
        return self.acquire(wait_s)

    @property
    def _is_soft(self) -> bool:
        """Return whether the file itself is the lock; then `filelock` writes and removes it."""
        return isinstance(self._lock, filelock.SoftFileLock)

    def holder(self) -> tuple[int, str] | None:
        """Return the process that holds the lock and its host, if the file names them."""
        try:
            with open(self.path, errors="replace") as file:
                pid, host, *_ = file.read(_MOST_CHARACTERS).split()
            return int(pid), host.split("?")[0]  # the rest is filelock's mark for a container
        except (OSError, ValueError):
            return None

    def describe(self) -> str:
        """Return which process holds the lock and on which host, for messages."""
        holder = self.holder()
        return "an unknown process" if holder is None else f"process {holder[0]} on {holder[1]}"

    def release(self) -> None:
        """Release the lock and remove its file. Harmless if the lock is not held."""
        if self._lock.is_locked:
            if not self._is_soft:
                # Before the release: a process that waits with the old file open detects the
                # removal and tries again.
                self.path.unlink(missing_ok=True)
            self._lock.release()


@dataclass(eq=False)
class FolderClaim:
    """An exclusive claim on a folder, from `take` to `release`.

    It prevents two runs of a script that was submitted twice from both writing to the folder.

    folder  the folder, which `take` creates if it is missing
    what    name of the folder in messages, such as "--save FOLDER"
    wait_s  seconds to wait for a program on another host, whose node may have died unnoticed
    """

    folder: Path
    what: str
    wait_s: float = WAIT_S

    def __post_init__(self) -> None:
        self._lock = FileLock(self.folder / LOCK_NAME)

    def take(self, say: Callable[[str], object]) -> None:
        """Claim the folder; if it cannot be locked, only report that with `say`.

        Raises ConfigError if another program holds it.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._lock.acquire_from_the_dead(lambda text: say(f" {text}"), self.wait_s):
                return
        except OSError as error:
            say(
                f" note: {self.what} cannot be locked ({error.strerror}): make sure that nothing "
                "else writes there"
            )
            return
        raise ConfigError(
            f"{self.what} is in use by another run: {self._lock.describe()}. Wait for it to end, "
            "stop it, or give this run another folder; if it has ended and its host is gone, "
            f"remove {self._lock.path}"
        )

    def release(self) -> None:
        """Give up the claim. Harmless if called twice or without a claim."""
        self._lock.release()


@contextlib.contextmanager
def renamed_into(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file with a temporary name, which is synced and renamed to `path` at the end.

    After an error the temporary file is removed, and `path` is as before. Raises OSError.
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
    """Return a hidden name next to `path` that no other process uses."""
    return path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"


def flush_to_disk(file: BinaryIO) -> None:
    """Sync a file, which could otherwise be full of zeros after a crash of the machine."""
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
