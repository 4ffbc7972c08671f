"""Arrays that are built once and read by every process.

One process builds them while the others wait for its lock.

An entry consists of `{md5}.dsc`, with the hashed text and the arrays' digests, and one
`{md5}_{name}.npy` per array: the names that Megatron-DeepSpeed uses, so that its caches are found.
Files are renamed into place after they are synced, so a reader sees a whole file or none. The lock
`{md5}.lock` (file_lock.py) only saves work: two processes that build the same entry rename the same
bytes into place.

`verify` compares arrays with their digests and has to read them completely: gigabytes, of which
each process of a job needs only a few pages. Therefore one process of a job does this for all.
Entries written by Megatron-DeepSpeed have no digests and are not compared.

Entries found, built or waited for are logged at level INFO.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from megatron.data.arrays import IntArray, StrPath
from megatron.data.file_lock import FileLock, flush_directory, renamed_into
from megatron.errors import DataError, NodeError, reading_error
from megatron.untrusted import read_bytes

Arrays = dict[str, IntArray]
WAIT_S = 1800.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheEntry:
    """The file names of one entry in one directory."""

    directory: Path
    description: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        """Return the first lines of the description and the path of its file, for messages."""
        lines = [line for line in self.description.split("\n")[:4] if line]
        return f"{', '.join(lines)}: {self.description_path}"

    @property
    def key(self) -> str:
        """Return the digest with which the file names begin."""
        return hashlib.md5(self.description.encode(), usedforsecurity=False).hexdigest()

    @property
    def description_path(self) -> Path:
        """Return the path of the file with the description."""
        return self.directory / f"{self.key}.dsc"

    def array_path(self, name: str) -> Path:
        """Return the path of the file with an array."""
        return self.directory / f"{self.key}_{name}.npy"

    def load(self) -> Arrays | None:
        """Return the mapped arrays; None if a file is missing or its header is damaged."""
        paths = {name: self.array_path(name) for name in self.names}
        try:
            if not all(path.is_file() for path in paths.values()):  # opening a pipe would block
                return None
            return {name: np.lib.format.open_memmap(path, mode="r") for name, path in paths.items()}
        except Exception:  # a damaged header can cause any exception
            return None

    def verify(self, arrays: Arrays) -> None:
        """Raise DataError for arrays that differ from those stored, if there are digests."""
        # the process that stored the entry was killed before it wrote this file, the last one
        if not os.path.lexists(self.description_path):
            return
        content = read_bytes(self.description_path, 1 << 24, error=DataError)
        stored = content.decode(errors="replace").removeprefix(self.description)
        if stored and stored != _digests(arrays):
            raise DataError(
                f"{self.array_path(self.names[0])}: this index does not match the digests in "
                f"{self.description_path}: it was damaged or changed after it was written; delete "
                f"{self.directory / self.key}* to have it built again"
            )

    def store(self, arrays: Arrays) -> None:
        """Write the arrays, then the description.

        The caller holds the entry's lock. Raises OSError.
        """
        for left in self.directory.glob(f".{self.key}*.tmp"):  # from a process that was killed here
            left.unlink(missing_ok=True)
        # arrays of two builds, from different data, must never appear together
        for path in (*map(self.array_path, self.names), self.description_path):
            path.unlink(missing_ok=True)
        for name in self.names:
            with renamed_into(self.array_path(name)) as file:
                np.save(file, arrays[name])
        with renamed_into(self.description_path) as file:
            file.write((self.description + _digests(arrays)).encode())
        flush_directory(self.directory)


def _digests(arrays: Arrays) -> str:
    """Return a line for each array: its name, type, shape and 128-bit XXH3."""
    return "".join(
        f"{name} {array.dtype.str} {array.shape} "
        f"{xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data)}\n"
        for name, array in sorted(arrays.items())
    )


def load_or_build(
    description: str,
    names: Sequence[str],
    directories: Sequence[StrPath],
    build: Callable[[], Arrays],
    *,
    fits: Callable[[Arrays], bool] = lambda _: True,
    verify: bool = False,
) -> Arrays:
    """Return the arrays of an entry from the first directory that has it, or build it.

    A new entry is written to the last directory. `fits` rejects arrays built from other data under
    the same description; the entry is then built again. With `verify` an existing entry is read
    completely and must match its digests. Waits up to WAIT_S seconds for another process that is
    building the entry. Raises DataError if the entry does not match its digests, if the directory
    cannot be written, if the build fails for lack of memory or because of a file, if the new entry
    reads back differently, or if the wait times out (the message names the lock and its holder).
    Raises NodeError instead if a file cannot be read or written because of the node.
    """
    entries = [CacheEntry(Path(directory), description, tuple(names)) for directory in directories]
    target = entries[-1]
    lock = FileLock(target.directory / f"{target.key}.lock")

    def find() -> Arrays | None:
        for entry in entries:
            arrays = entry.load()
            if arrays is not None and fits(arrays):
                if verify:
                    entry.verify(arrays)
                log.info("found %s", entry)
                return arrays
        return None

    arrays = find()
    if arrays is not None:
        return arrays
    try:
        target.directory.mkdir(parents=True, exist_ok=True)
        if not lock.acquire():
            log.info("waiting for %s, %s", lock.describe(), target)
            if not lock.acquire(WAIT_S):
                raise DataError(
                    f"{lock.path}: waited {WAIT_S:g} s for {lock.describe()} to build this index: "
                    "look at what that process does, and start again when it is done; if it has "
                    "ended and its host is gone, remove the lock"
                )
        try:
            if (arrays := find()) is not None:
                return arrays
            start = time.perf_counter()
            log.info("building %s", target)
            try:
                built = build()
            except (OSError, MemoryError) as error:
                kind = type(error).__name__
                message = f"{target.description_path}: this index cannot be built: {kind}: {error}"
                raise reading_error(error, message, DataError) from error
            target.store(built)
            del built  # the mapped files replace it
            arrays = target.load()
            if arrays is None or not fits(arrays):
                raise DataError(
                    f"{target.array_path(names[0])}: just written, but it reads back differently: "
                    "check the file system or give another directory with --data-cache-path"
                )
            log.info("built in %.1f s %s", time.perf_counter() - start, target)
            return arrays
        finally:
            lock.release()
    except NodeError:
        raise
    except OSError as error:
        message = (
            f"{target.directory}: the index cache cannot be written: {error.strerror or error}"
        )
        remedy = ": give a writable one with --data-cache-path"
        raise reading_error(error, message + remedy, DataError) from error


@contextlib.contextmanager
def forwarded_messages(handle: Callable[[str], object]) -> Iterator[None]:
    """Pass the messages that this module logs during the block to `handle` only."""

    def forward(record: logging.LogRecord) -> bool:
        handle(record.getMessage())
        return False  # no other handler gets it

    level = log.level
    log.addFilter(forward)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeFilter(forward)
        log.setLevel(level)
