"""Copies of data sets on the disk of the node (`--stage-data-to`): one process of a node copies, the others wait.

A pair `corpus.bin`, `corpus.idx` becomes the folder `staged-corpus-ID` in the target, where ID is made of the paths,
sizes and times of the originals: changed data is staged anew, and two runs with the same data share a copy. A folder
gets its name when all in it is on the disk and checked, so what is there is whole; it stays for later runs.

The check reads the copy back, past the page cache, and compares CRC-32 sums of its chunks with those taken of the bytes
as they were read from the original. It costs one more reading of the node's disk, which is the fast side.

Nothing here fails a run: what cannot be staged is read from where it lies, and a line says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.data.file_lock import (
    STALE_S,
    FileLock,
    flush_directory,
    flush_to_disk,
    remove_remains,
    renamed_into,
    temporary_name,
)

DEFAULT_WAIT_S = 3600.0
CHUNK_BYTES = 32 * 2**20
_THREADS = 4
_SUFFIXES = (".bin", ".idx")
_MARKER = "complete.json"
_LOCK = "staged.lock"
_PROGRESS = "staged.progress"
_PROGRESS_S = 10.0
_SHOWN = 6  # so many data sets have a line of their own; of a blend of hundreds the rest share one
_RESERVED_SHARE, _RESERVED_AT_LEAST = 0.02, 2**30

Say = Callable[[str], None]


class _NotStaged(Exception):
    """Why a pair is read from where it lies."""


def stage(
    prefixes: Sequence[str],
    target: str,
    *,
    say: Say,
    wait_s: float = DEFAULT_WAIT_S,
    reserve_bytes: int | None = None,
    stale_s: float = STALE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, str]:
    """prefix -> where to read its pair of files: a copy under the folder `target`, or the prefix itself.

    Every process of every node calls this; none waits longer than `wait_s`, and no collective is needed. Pairs are
    taken in the given order as long as they leave `reserve_bytes` of the disk free (2 % of it and at least 1 GiB when
    None). `say` gets lines for the log: progress every ten seconds, what was staged, and why the rest was not.
    """
    pairs = {prefix: pair for prefix in prefixes if (pair := _Pair.of(prefix, Path(target))) is not None}
    reasons: Mapping[str, str] = {}
    if not all(pair.is_staged() for pair in pairs.values()):
        make_lock = partial(FileLock, stale_s=stale_s, clock=clock, sleep=sleep)
        reasons = _with_one_copying(make_lock, list(pairs.values()), Path(target), say, wait_s, reserve_bytes)
    locations = {prefix: prefix for prefix in prefixes}
    staged_bytes, left = 0, list[str]()
    for prefix, pair in pairs.items():
        if pair.is_staged():
            locations[prefix] = str(pair.location)
            staged_bytes += pair.size
        else:
            reason = reasons.get(pair.folder.name, "its copy is not there")
            left.append(f"{prefix} is read from where it lies: {reason}")
    for line in left[:_SHOWN]:
        say(f"note: {line}")
    if left[_SHOWN:]:
        say(f"note: and {len(left) - _SHOWN} more are read from where they lie")
    staged = sum(location != prefix for prefix, location in locations.items())
    say(f"{staged} of {len(locations)} data sets are read from {target} ({_size(staged_bytes)})")
    return locations


@dataclass(frozen=True)
class _Pair:
    """The two files of a data set, as they were when we looked, and the folder of their copy."""

    prefix: str
    files: tuple[tuple[str, int, int], ...]  # path, bytes, time of change in ns
    folder: Path

    @classmethod
    def of(cls, prefix: str, target: Path) -> _Pair | None:
        """None when a file is missing: whoever reads the data says so best."""
        try:
            files = _identity(prefix)
        except OSError:
            return None
        name = os.path.basename(prefix)[:100]
        mark = hashlib.md5(repr(files).encode(), usedforsecurity=False).hexdigest()[:16]
        return cls(prefix, files, target / f"staged-{name}-{mark}")

    @property
    def location(self) -> Path:
        return self.folder / os.path.basename(self.prefix)

    @property
    def size(self) -> int:
        return sum(size for _, size, _ in self.files)

    def is_staged(self) -> bool:
        """Whether the copy is there, and as large as it was when it was checked."""
        try:
            marker = json.loads((self.folder / _MARKER).read_text())
            sizes = [os.path.getsize(f"{self.location}{suffix}") for suffix in _SUFFIXES]
        except (OSError, ValueError):
            return False
        return isinstance(marker, dict) and marker.get("bytes") == sizes == [size for _, size, _ in self.files]

    def is_unchanged(self) -> bool:
        return _identity(self.prefix) == self.files


def _identity(prefix: str) -> tuple[tuple[str, int, int], ...]:
    files = []
    for suffix in _SUFFIXES:
        path = os.path.realpath(f"{prefix}{suffix}")
        status = os.stat(path)
        files.append((path, status.st_size, status.st_mtime_ns))
    return tuple(files)


def _with_one_copying(
    make_lock: Callable[[Path], FileLock], pairs: Sequence[_Pair], target: Path, say: Say, wait_s: float,
    reserve_bytes: int | None,
) -> Mapping[str, str]:
    """Copy the pairs, or wait for the process that does: folder name -> reason for those that were not staged."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        lock, told = make_lock(target / _LOCK), ""
        deadline = lock.clock() + wait_s
        while True:
            if lock.acquire():
                return _copy_all(lock, pairs, target, say, reserve_bytes)
            left_s = deadline - lock.clock()
            if left_s <= 0:
                reason = f"waited {wait_s:g} s for {lock.describe()}, which copies"
                return {pair.folder.name: reason for pair in pairs}
            if not lock.wait(min(left_s, _PROGRESS_S)):
                told = _tell_progress(target, told, say)
                continue
            if all(pair.is_staged() for pair in pairs):
                return {}
            reasons = _reasons_of(lock)
            if all(pair.is_staged() or pair.folder.name in reasons for pair in pairs):
                return reasons
    except OSError as error:
        reason = f"{target} cannot be written: {error.strerror or error}"
        return {pair.folder.name: reason for pair in pairs}


def _tell_progress(target: Path, told: str, say: Say) -> str:
    """Pass on the copying process's progress, for the log of this one."""
    with contextlib.suppress(OSError):
        line = (target / _PROGRESS).read_text()
        if line != told:
            say(line)
        return line
    return told


def _reasons_of(lock: FileLock) -> dict[str, str]:
    note = lock.note()
    try:
        reasons = json.loads(note.text or "") if note else {}
    except ValueError:
        return {}
    return reasons if isinstance(reasons, dict) else {}


def _copy_all(
    lock: FileLock, pairs: Iterable[_Pair], target: Path, say: Say, reserve_bytes: int | None
) -> dict[str, str]:
    """Under the lock; the reasons for what was not staged are left for those who wait."""
    reasons: dict[str, str] = {}
    try:
        remove_remains(lock, "staged")
        missing = list({pair.folder: pair for pair in pairs if not pair.is_staged()}.values())
        progress = _Progress(sum(pair.size for pair in missing), target / _PROGRESS, say, lock.clock)
        staged = 0
        for pair in missing:
            try:
                if pair.folder.exists():  # never removed by us: it may be another process's work of just now
                    raise _NotStaged(f"its copy is not what it was when it was checked: delete {pair.folder}")
                _check_room(pair, target, reserve_bytes)
                line = _copy_pair(pair, progress)
                staged += 1
                if staged <= _SHOWN:
                    say(line)
            except _NotStaged as reason:
                reasons[pair.folder.name] = str(reason)
            except OSError as error:
                reasons[pair.folder.name] = f"copying failed: {error.filename or target}: {error.strerror or error}"
        if staged > _SHOWN:
            say(f"staged {staged - _SHOWN} more, checked")
        (target / _PROGRESS).unlink(missing_ok=True)
        lock.release(note=json.dumps(reasons))
    finally:
        lock.release()
    return reasons


def _check_room(pair: _Pair, target: Path, reserve_bytes: int | None) -> None:
    disk = shutil.disk_usage(target)
    reserve = max(_RESERVED_AT_LEAST, int(_RESERVED_SHARE * disk.total)) if reserve_bytes is None else reserve_bytes
    lacking = pair.size + reserve - disk.free
    if lacking > 0:
        raise _NotStaged(
            f"it needs {_size(pair.size)}, and {target} has {_size(disk.free)} free of which {_size(reserve)} stay so: "
            f"{_size(lacking)} too few"
        )


def _copy_pair(pair: _Pair, progress: _Progress) -> str:
    """Copy, check, mark, and give the folder its name; returns a line about it. Raises OSError or _NotStaged, leaving
    nothing."""
    start = time.perf_counter()
    part = temporary_name(pair.folder)
    try:
        part.mkdir()
        for suffix, (path, size, _) in zip(_SUFFIXES, pair.files, strict=True):
            _copy_file(path, part / f"{pair.location.name}{suffix}", size, progress)
        if not pair.is_unchanged():
            raise _NotStaged("it changed while it was copied")
        with open(part / _MARKER, "wb") as file:
            marker = {"source": [path for path, _, _ in pair.files], "bytes": [size for _, size, _ in pair.files]}
            file.write(json.dumps(marker).encode())
            flush_to_disk(file)
        flush_directory(part)
        try:
            part.rename(pair.folder)
        except OSError:
            if not pair.is_staged():  # or another has done the same after we had been suspended
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    flush_directory(pair.folder.parent)
    seconds = time.perf_counter() - start
    rate = pair.size / 1e6 / max(seconds, 1e-9)
    return f"staged {pair.prefix}: {_size(pair.size)} in {seconds:.1f} s ({rate:.0f} MB/s), checked"


def _copy_file(source: str, copy: Path, size: int, progress: _Progress) -> None:
    """Copy a file of `size` bytes in chunks, several at once, and check the copy.

    Raises OSError, and _NotStaged when the source ends early or what is read back is not what was written.
    """
    chunks = [(at, min(CHUNK_BYTES, size - at)) for at in range(0, size, CHUNK_BYTES)]
    mine = threading.local()  # one buffer for each thread: fresh memory would cost more than the copying

    def read(descriptor: int, at: int, count: int) -> memoryview:
        if not hasattr(mine, "buffer"):
            mine.buffer = memoryview(bytearray(CHUNK_BYTES))
        chunk, filled = mine.buffer[:count], 0
        while filled < count:
            got = os.preadv(descriptor, [chunk[filled:]], at + filled)
            if got == 0:
                raise _NotStaged("it became shorter while it was copied")
            filled += got
        _forget(descriptor, at, count)
        return chunk

    def transfer(place: tuple[int, int]) -> int:
        at, count = place
        chunk, written = read(reader, at, count), 0
        while written < count:
            written += os.pwrite(writer, chunk[written:], at + written)
        progress.add(copied=count)
        return zlib.crc32(chunk)

    def read_back(place: tuple[int, int]) -> int:
        total = zlib.crc32(read(writer, *place))
        progress.add(checked=place[1])
        return total

    with contextlib.ExitStack() as files:
        reader = os.open(source, os.O_RDONLY)
        files.callback(os.close, reader)
        writer = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        files.callback(os.close, writer)
        with ThreadPoolExecutor(_THREADS) as pool:
            sums = list(pool.map(transfer, chunks))
            os.fsync(writer)
            _forget(writer, 0, 0)  # or the check would read memory and not the disk
            for place, wanted, found in zip(chunks, sums, pool.map(read_back, chunks), strict=True):
                if wanted != found:
                    raise _NotStaged(f"its copy differs in bytes {place[0]}..{sum(place)}: the disk is at fault")


def _forget(descriptor: int, at: int, count: int) -> None:
    """Let the page cache go: hundreds of gigabytes that are read once would push out everything else."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, at, count, os.POSIX_FADV_DONTNEED)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10**9 else f"{count / 1e6:.2f} MB"


class _Progress:
    """Counts bytes of all threads and says how far they are, at most every _PROGRESS_S; the line also goes to a file
    for the processes that wait."""

    def __init__(self, total_bytes: int, path: Path, say: Say, clock: Callable[[], float]) -> None:
        self.say, self._clock, self._total, self._path = say, clock, total_bytes, path
        self._copied = self._checked = self._said_bytes = 0
        self._said = clock()
        self._guard = threading.Lock()

    def add(self, copied: int = 0, checked: int = 0) -> None:
        with self._guard:
            self._copied += copied
            self._checked += checked
            now, done = self._clock(), self._copied + self._checked
            if now - self._said < _PROGRESS_S:
                return
            rate = (done - self._said_bytes) / (now - self._said)
            self._said, self._said_bytes = now, done
            line = (
                f"staging in {self._path.parent}: {_size(self._copied)} of {_size(self._total)} copied, "
                f"{_size(self._checked)} checked, {rate / 1e6:.0f} MB/s"
            )
        self.say(line)
        with contextlib.suppress(OSError), renamed_into(self._path) as file:
            file.write(line.encode())
