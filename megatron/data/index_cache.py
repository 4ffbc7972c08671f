"""Arrays that are built once and read by every process: one builds while the others wait, by the file system alone.

An entry is `{md5}.dsc`, the text that was hashed, and one `{md5}_{part}.npy` for each array. Files appear by a rename,
so a reader sees a whole file or none. The lock `{md5}.lock` only saves work: if two processes did build the same entry,
both would rename the same bytes into place. So a lock may be broken without danger.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.errors import DataError

Arrays = dict[str, npt.NDArray[Any]]
DEFAULT_WAIT_S = 1800.0


@dataclass(frozen=True)
class CacheEntry:
    """Names of one entry in one directory."""

    directory: Path
    description: str
    parts: tuple[str, ...]

    @property
    def key(self) -> str:
        return hashlib.md5(self.description.encode(), usedforsecurity=False).hexdigest()

    @property
    def description_path(self) -> Path:
        return self.directory / f"{self.key}.dsc"

    @property
    def lock_path(self) -> Path:
        return self.directory / f"{self.key}.lock"

    def part_path(self, part: str) -> Path:
        return self.directory / f"{self.key}_{part}.npy"

    def load(self) -> Arrays | None:
        """The arrays, mapped; None when one is missing or damaged."""
        try:
            return {part: np.load(self.part_path(part), mmap_mode="r", allow_pickle=False) for part in self.parts}
        except (OSError, ValueError, EOFError):
            return None

    def store(self, arrays: Arrays) -> None:
        """Write the arrays, then the description. Raises OSError."""
        for part in self.parts:
            with _renamed_into(self.part_path(part)) as file:
                np.save(file, arrays[part], allow_pickle=False)
        with _renamed_into(self.description_path) as file:
            file.write(self.description.encode())


def load_or_build(
    description: str,
    parts: Sequence[str],
    directories: Sequence[str | os.PathLike[str]],
    build: Callable[[], Arrays],
    *,
    fits: Callable[[Arrays], bool] = lambda _: True,
    wait_s: float = DEFAULT_WAIT_S,
) -> Arrays:
    """The arrays of an entry: from the first directory that has it, otherwise built and written to the last one.

    `fits` refuses arrays that were built from other data under the same description; they are built anew. Waits up to
    `wait_s` seconds for another process that is building. Raises DataError when the directory cannot be written, or
    when the wait is over; the message names the lock and its owner.
    """
    entries = [CacheEntry(Path(directory), description, tuple(parts)) for directory in directories]
    target = entries[-1]

    def find() -> Arrays | None:
        for entry in entries:
            arrays = entry.load()
            if arrays is not None and fits(arrays):
                return arrays
        return None

    deadline, pause_s = time.monotonic() + wait_s, 0.02
    while True:
        arrays = find()
        if arrays is not None:
            return arrays
        try:
            target.directory.mkdir(parents=True, exist_ok=True)
            lock = _Lock.acquire(target.lock_path)
            if lock is not None:
                try:
                    if find() is None:  # another process may have finished between our look and our lock
                        target.store(build())
                finally:
                    lock.release()
                arrays = target.load()
                return arrays if arrays is not None and fits(arrays) else _unreadable(target)
        except OSError as error:
            raise DataError(
                f"{target.directory}: the index cache cannot be written: {error.strerror or error}: give a directory "
                f"that can with --data-cache-path"
            ) from error
        if _Lock.break_dead(target.lock_path):
            continue
        if time.monotonic() > deadline:
            raise DataError(
                f"{target.lock_path}: waited {wait_s:g} s for {_Lock.describe(target.lock_path)} to build this index: "
                f"if that process is gone, delete the lock and start again"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 2.0)


def _unreadable(entry: CacheEntry) -> Arrays:
    raise DataError(
        f"{entry.part_path(entry.parts[0])}: just written and not readable as it was written: check the file system, "
        f"or give another directory with --data-cache-path"
    )


@dataclass(frozen=True)
class _Lock:
    """A file whose existence is the lock; it says who made it."""

    path: Path
    content: str

    @classmethod
    def acquire(cls, path: Path) -> _Lock | None:
        """The lock, or None when somebody has it."""
        content = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()})
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return None
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        return cls(path, content)

    def release(self) -> None:
        """Remove the lock if it is still ours."""
        with contextlib.suppress(OSError):
            if self.path.read_text() == self.content:
                self.path.unlink()

    @staticmethod
    def owner(path: Path) -> dict[str, Any] | None:
        try:
            owner = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        return owner if isinstance(owner, dict) and {"host", "pid", "time"} <= owner.keys() else None

    @classmethod
    def break_dead(cls, path: Path) -> bool:
        """Remove the lock of a process of this host that no longer exists. True when it was removed."""
        owner = cls.owner(path)
        if owner is None or owner["host"] != socket.gethostname():
            return False
        try:
            os.kill(int(owner["pid"]), 0)
        except ProcessLookupError:
            with contextlib.suppress(OSError):
                path.unlink()
            return True
        except (OSError, ValueError, OverflowError):
            return False
        return False

    @classmethod
    def describe(cls, path: Path) -> str:
        owner = cls.owner(path)
        if owner is None:
            return "an unknown process"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(owner["time"])))
        return f"process {owner['pid']} on {owner['host']} (since {since})"


@contextlib.contextmanager
def _renamed_into(path: Path) -> Iterator[Any]:
    """A binary file under a temporary name that takes `path`'s name at the end, and is removed after an error."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
