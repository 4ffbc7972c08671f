"""Arrays that are built once and read by every process: one builds while the others wait, by the file system alone.

An entry is `{md5}.dsc`, the text that was hashed and digests of the arrays, and one `{md5}_{part}.npy` for each array:
the names that Megatron-DeepSpeed uses, so that its caches are found. Files appear by a rename after their content is on
the disk, so a reader sees a whole file or none. The lock `{md5}.lock` (see file_lock.py) only saves work: if two
processes did build the same entry, both would rename the same bytes into place. A build that fails leaves its reason in
`{md5}.lock.note` for those who waited for it.

With `verify` arrays are compared with their digests, which reads them whole: gigabytes, of which the processes of a job
read a few pages each. One process does it for all. An entry that Megatron-DeepSpeed wrote has no digests.

What was found, built or waited for is logged at level INFO, with the entry in the record (`entry`, `seconds`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from megatron.data.file_lock import STALE_S, FileLock, flush_directory, flush_to_disk, remove_remains, temporary_name
from megatron.errors import DataError, MegatronError
from megatron.untrusted import read_bytes

Arrays = dict[str, npt.NDArray[Any]]
DEFAULT_WAIT_S = 1800.0
log = logging.getLogger(__name__)

# A reader of a network file system can see the lock go before it sees the files that were renamed earlier.
_SETTLING_PAUSES_S = (0.0, 0.1, 0.4, 1.0)


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
        paths = {part: self.part_path(part) for part in self.parts}
        try:
            if not all(path.is_file() for path in paths.values()):  # a pipe would be waited at
                return None
            return {part: np.lib.format.open_memmap(path, mode="r") for part, path in paths.items()}
        except Exception:  # a damaged header can raise anything, down to errors of Python's parser
            return None

    def verify(self, arrays: Arrays) -> None:
        """Raise DataError for arrays that are not those that were stored, as far as there are digests of those."""
        if not os.path.lexists(self.description_path):  # the one who stored it was killed before this last file
            return
        content = read_bytes(self.description_path, 1 << 24, error=DataError)
        told = content.decode(errors="replace").removeprefix(self.description)
        if told and told != _digests(arrays):
            raise DataError(
                f"{self.part_path(self.parts[0])}: this index is not what was written, by the digests in "
                f"{self.description_path}: it was damaged or changed since; delete {self.directory / self.key}* to "
                f"have it built anew"
            )

    def store(self, arrays: Arrays, still_ours: Callable[[], bool] = lambda: True) -> bool:
        """Write the arrays, then the description. Raises OSError.

        `still_ours` is asked when all is written, before the files get their names; after a no they do not get them.
        """
        contents: dict[Path, npt.NDArray[Any] | None] = {self.part_path(part): arrays[part] for part in self.parts}
        contents[self.description_path] = None
        temporaries = {path: temporary_name(path) for path in contents}
        try:
            for path, array in contents.items():
                with open(temporaries[path], "wb") as file:
                    if array is None:
                        file.write((self.description + _digests(arrays)).encode())
                    else:
                        _save(file, array)
                    flush_to_disk(file)
            if not still_ours():
                return False
            for path in contents:  # parts of two builds, from other data, must never be seen together
                path.unlink(missing_ok=True)
            for path, temporary in temporaries.items():
                os.replace(temporary, path)
        finally:
            for temporary in temporaries.values():
                temporary.unlink(missing_ok=True)
        flush_directory(self.directory)
        return True


def _digests(arrays: Arrays) -> str:
    """A line for each array: its name, type, shape and XXH3 of 128 bits."""
    return "".join(
        f"{part} {array.dtype.str} {array.shape} {xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data)}\n"
        for part, array in sorted(arrays.items())
    )


def _save(file: BinaryIO, array: npt.NDArray[Any]) -> None:
    """numpy.save's bytes; a full disk is the system's error, where numpy's own would be one of no kind."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def load_or_build(
    description: str,
    parts: Sequence[str],
    directories: Sequence[str | os.PathLike[str]],
    build: Callable[[], Arrays],
    *,
    fits: Callable[[Arrays], bool] = lambda _: True,
    wait_s: float = DEFAULT_WAIT_S,
    verify: bool = False,
    stale_s: float = STALE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Arrays:
    """The arrays of an entry: from the first directory that has it, otherwise built and written to the last one.

    `fits` refuses arrays that were built from other data under the same description; they are built anew. With `verify`
    an entry that is found is read whole, and DataError raised where it is not what was stored. Waits up to
    `wait_s` seconds for another process that is building, and takes over from one that is gone or has given no sign of
    life for `stale_s`. Raises DataError when the directory cannot be written, when the build that was waited for
    failed, or when the wait is over; the message names the lock and its owner.
    """
    entries = [CacheEntry(Path(directory), description, tuple(parts)) for directory in directories]
    target, deadline = entries[-1], clock() + wait_s

    def find() -> Arrays | None:
        for entry in entries:
            arrays = entry.load()
            if arrays is not None and fits(arrays):
                if verify:
                    entry.verify(arrays)
                log.info("found %s", entry.description_path, extra={"entry": entry})
                return arrays
        return None

    arrays = find()
    if arrays is not None:
        return arrays
    try:
        target.directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.lock_path, stale_s, clock, sleep)
        while arrays is None:
            if lock.acquire():
                arrays = _find_or_build(lock, target, find, build, fits)
                continue
            if log.isEnabledFor(logging.INFO):  # who it is must be read from the file
                log.info("waiting for %s: %s", target.description_path, lock.describe(), extra={"entry": target})
            if lock.wait(deadline - clock()):
                arrays = _after_waiting(lock, target, find)
            else:
                raise DataError(
                    f"{lock.path}: waited {wait_s:g} s for {lock.describe()} to build this index: if that process is "
                    f"gone, delete the lock and start again"
                )
    except OSError as error:
        raise _unwritable(target, error) from error
    return arrays


def _find_or_build(
    lock: FileLock,
    entry: CacheEntry,
    find: Callable[[], Arrays | None],
    build: Callable[[], Arrays],
    fits: Callable[[Arrays], bool],
) -> Arrays | None:
    """Under the lock: what another process finished just before, or else a new build. Releases the lock, with the
    reason for those who wait when the build failed.

    None when the lock was taken over meanwhile, as this process had been suspended: then the entry is another's work.
    """
    try:
        return find() or _build(lock, entry, build, fits)
    except OSError as error:
        if not lock.is_ours():
            return None  # our temporary files were removed with the lock
        failure = _unwritable(entry, error)
        lock.release(note=str(failure))
        raise failure from error
    except Exception as error:
        lock.release(note=str(error) if isinstance(error, MegatronError) else f"{type(error).__name__}: {error}")
        raise
    finally:
        lock.release()


def _build(
    lock: FileLock, entry: CacheEntry, build: Callable[[], Arrays], fits: Callable[[Arrays], bool]
) -> Arrays | None:
    start = time.perf_counter()
    remove_remains(lock, entry.key)
    log.info("building %s", entry.description_path, extra={"entry": entry})
    try:
        arrays = build()
    except (OSError, MemoryError) as error:
        kind = type(error).__name__
        raise DataError(f"{entry.description_path}: this index cannot be built: {kind}: {error}") from error
    if not lock.is_ours() or not entry.store(arrays, lock.is_ours):
        return None
    del arrays  # the files take their place in memory
    lock.note_path.unlink(missing_ok=True)  # of an earlier failure
    stored = entry.load()
    if stored is None or not fits(stored):
        if not lock.is_ours():
            return None
        raise DataError(
            f"{entry.part_path(entry.parts[0])}: just written and not readable as it was written: check the file "
            f"system, or give another directory with --data-cache-path"
        )
    seconds = time.perf_counter() - start
    log.info("built %s in %.1f s", entry.description_path, seconds, extra={"entry": entry, "seconds": seconds})
    return stored


def _after_waiting(lock: FileLock, entry: CacheEntry, find: Callable[[], Arrays | None]) -> Arrays | None:
    """What the lock's owner built; None when it is our turn to try. Raises DataError when the owner failed."""
    for pause_s in _SETTLING_PAUSES_S:
        lock.sleep(pause_s)
        os.close(os.open(entry.directory, os.O_RDONLY))  # makes an NFS client forget which files were not there
        arrays = find()
        if arrays is not None:
            return arrays
        note = lock.note()
        if note is not None:
            reason = note.text or "it left no reason, as if the disk were full: see its own message"
            raise DataError(f"{entry.description_path}: {note.owner}, which was to build this index, failed: {reason}")
        if lock.path.exists():
            return None  # its owner is gone, or somebody else is at it
    return None


def _unwritable(entry: CacheEntry, error: OSError) -> DataError:
    return DataError(
        f"{entry.directory}: the index cache cannot be written: {error.strerror or error}: give a directory that can "
        f"with --data-cache-path"
    )
