"""A lock that is a file, for processes of many nodes that share nothing but a file system.

The file says who owns the lock, and its owner touches it every few seconds. A lock is taken over from an owner that is
surely gone (a process of this machine that ended) or that has not touched it for `stale_s` seconds of the waiter's own
clock; clocks of two machines are never compared. An owner that was only suspended can come back and find its lock in
other hands (`is_ours`): what is done under a lock must do no harm when two do it, the lock saves work and no more.

Besides the lock `NAME` there can be, for moments, `NAME.XXXXXXXX`, the lock under which a dead lock is replaced, and
`NAME.note`, what the last owner left for those who waited.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import random
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

STALE_S = 60.0
_UNWRITTEN_S = 5.0  # a lock file without content: its owner was stopped between creating and writing it
_BEATS = 6  # touches per stale_s
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_LONGEST_GAP_S = 10.0  # what one pause counts at most: a waiter that was suspended itself has seen nothing meanwhile
_SURELY_OLD_S = 24 * 3600.0
_MOST_BYTES = 1 << 16  # of a lock or a note
_STAMP = re.compile(r"\.([0-9a-f]{8}-\d+-\d+)-[0-9a-f]{4}\.tmp$")


@functools.cache
def _machine() -> str:
    """Names what process numbers refer to: this host, since it was started, in this container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.md5("\n".join(parts).encode(), usedforsecurity=False).hexdigest()[:8]


def process_start(pid: int) -> int | None:
    """When a process of this machine was started, in clock ticks since boot; None when it has ended, 0 when the system
    does not tell. With the number it names a process for good, as numbers are used again."""
    try:
        if pid <= 0:
            return None
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except OSError:
        pass  # another user's
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # no /proc, or one that hides other users' processes
        return 0
    state, *fields = status.rpartition(")")[2].split()  # the name in parentheses may hold anything; see proc(5)
    return None if state in "ZX" else int(fields[18])


@dataclass(frozen=True)
class Owner:
    """The process that made a lock. `token` differs between two locks of one process; `time` is for people."""

    host: str
    machine: str
    pid: int
    start: int
    time: float
    token: str

    @classmethod
    def this_process(cls) -> Owner:
        pid = os.getpid()
        return cls(socket.gethostname(), _machine(), pid, process_start(pid) or 0, time.time(), secrets.token_hex(8))

    @classmethod
    def read(cls, text: str) -> Owner | None:
        """The owner that a lock or a note names; None for anything else."""
        try:
            values = json.loads(text)
            owner = cls(**{name: kind(values[name]) for name, kind in _OWNER_FIELDS.items()})
            str(owner)  # a time that no calendar has is not ours
        except (ValueError, TypeError, KeyError, OverflowError, OSError, RecursionError):
            return None
        return owner

    @property
    def stamp(self) -> str:
        """Names the process in the names of its temporary files."""
        return f"{self.machine}-{self.pid}-{self.start}"

    def is_gone(self) -> bool:
        """Whether the process has surely ended; of another machine's that cannot be said."""
        if self.machine != _machine():
            return False
        start = process_start(self.pid)
        return start is None or (start != self.start and 0 not in (start, self.start))

    def lives_here(self) -> bool:
        """Whether it is a process of this machine that has not ended: nobody need wait for a sign of life."""
        return self.machine == _machine() and not self.is_gone()

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        return f"process {self.pid} on {self.host} (since {since})"


_OWNER_FIELDS: dict[str, Callable[[Any], Any]] = {
    "host": str, "machine": str, "pid": int, "start": int, "time": float, "token": str,
}  # fmt: skip


@dataclass(frozen=True)
class Note:
    """What an owner left: its words, or None when there was no room on the disk to write them."""

    owner: str
    text: str | None


@dataclass(frozen=True)
class _Seen:
    """A file as it was found. It differs after every touch."""

    text: str
    inode: int
    changed_ns: int


def _without_waiting(path: str, flags: int) -> int:
    """Open a file, also one that is a pipe to which nobody writes."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _look(path: Path) -> _Seen | None:
    """The file, read through a fresh open: NFS asks the server then, where a mere stat may be answered from memory."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            return _Seen(file.read(_MOST_BYTES).decode(errors="replace"), status.st_ino, status.st_mtime_ns)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise


@dataclass
class FileLock:
    """See the head of this file. One object is one wait for the lock, or one hold of it; threads do not share it.

    Every method raises OSError where the file system refuses. `clock` and `sleep` are what a waiter goes by; `pause` is
    what the owner's heartbeat goes by: it waits for the event or so many seconds, and says whether the event came.
    """

    path: Path
    stale_s: float = STALE_S
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    pause: Callable[[threading.Event, float], bool] = threading.Event.wait
    taken_from: Owner | None = field(default=None, init=False)  # the owner that a dead lock was taken over from

    def __post_init__(self) -> None:
        self._mine: str | None = None
        self._stop = threading.Event()
        self._seen: _Seen | None = None
        self._made = self._looked = self.clock()
        self._unchanged_s = 0.0
        self._chance = random.Random()
        self._guard: FileLock | None = None
        self._old_note = _look(self.note_path)

    @property
    def note_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.note")

    def acquire(self) -> bool:
        """Take the lock if it is free or its owner gone. Never waits."""
        if not self._enter():
            return False
        threading.Thread(target=self._beat, args=(self._stop,), daemon=True).start()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until another attempt is worth while: the lock is free, its owner gone, or another one its owner.

        False after `timeout_s`. A look opens one file; the pauses grow with the time waited and are random, so that
        thousands of waiters are gentle on the file system.
        """
        end, before = self.clock() + timeout_s, self._seen
        while (left_s := end - self.clock()) > 0:
            self.sleep(min(self._pause_s(), left_s))
            seen = _look(self.path)
            if seen is None or (before and before.text != seen.text) or self._is_abandoned(seen):
                return True
            before = seen
        return False

    def is_ours(self) -> bool:
        """Whether this object holds the lock and nobody has taken it over."""
        seen = _look(self.path)
        return self._mine is not None and seen is not None and seen.text == self._mine

    def release(self, note: str | None = None) -> None:
        """Give the lock back if it is still ours; `note` is for those who wait now. Never raises OSError."""
        self._stop.set()
        with contextlib.suppress(OSError):
            if self.is_ours() and (note is None or self._leave(note)):
                self.path.unlink(missing_ok=True)
        self._mine = None

    def note(self) -> Note | None:
        """The note that an owner left since this object was made."""
        seen = _look(self.note_path)
        if seen is None or seen == self._old_note:
            return None
        try:
            text = json.loads(seen.text).get("note")
        except (ValueError, AttributeError, RecursionError):
            text = None
        return Note(str(Owner.read(seen.text) or "an unknown process"), text)

    def owner(self) -> Owner | None:
        """Who has the lock; None where nobody has, and where that cannot be read."""
        with contextlib.suppress(OSError):
            seen = _look(self.path)
            return Owner.read(seen.text) if seen else None
        return None

    def describe(self) -> str:
        """Who has the lock, for messages."""
        return str(self.owner() or "an unknown process")

    def _enter(self) -> bool:
        assert self._mine is None, "the lock is held already"
        mine = json.dumps(asdict(Owner.this_process()))
        seen = _look(self.path)
        entered = self._create(mine) if seen is None else self._is_abandoned(seen) and self._replace(seen, mine)
        if entered:
            self._mine = mine
            self._stop = threading.Event()
        return entered

    def _create(self, mine: str) -> bool:
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with open(descriptor, "w") as file:
                file.write(mine)
        except OSError:  # no room: whoever comes next must not wait for an owner that never was
            self.path.unlink(missing_ok=True)
            raise
        return True

    def _replace(self, dead: _Seen, mine: str) -> bool:
        """Put our lock in a dead one's place, in one step.

        Of all who find it dead only one may, or the second would replace the first's lock. A lock that bears the dead
        one's mark in its name decides; should its owner die too, it is replaced in the same way.
        """
        mark = hashlib.md5(dead.text.encode(), usedforsecurity=False).hexdigest()[:8]
        path = self.path.with_name(f"{self.path.name}.{mark}")
        if self._guard is None or self._guard.path != path:  # kept between attempts: it remembers what it saw
            self._guard = FileLock(path, self.stale_s, self.clock, self.sleep)
        guard = self._guard
        if not guard._enter():
            return False
        try:
            if _look(self.path) != dead:
                return False
            with renamed_into(self.path) as file:
                file.write(mine.encode())
            self.taken_from = Owner.read(dead.text)
            return True
        finally:
            guard.release()

    def _is_abandoned(self, seen: _Seen) -> bool:
        owner = Owner.read(seen.text)
        if owner is not None and owner.is_gone():
            return True
        now = self.clock()
        if seen != self._seen:
            self._seen, self._unchanged_s = seen, 0.0
        else:
            self._unchanged_s += min(now - self._looked, _LONGEST_GAP_S)
        self._looked = now
        return self._unchanged_s >= (self.stale_s if seen.text else min(self.stale_s, _UNWRITTEN_S))

    def _beat(self, stop: threading.Event) -> None:
        while not self.pause(stop, self.stale_s / _BEATS):
            with contextlib.suppress(OSError):  # a file system that is away for a moment: the next beat tries again
                if not self.is_ours():
                    return
                os.utime(self.path)

    def _leave(self, note: str) -> bool:
        """Write the note; False when the lock itself had to become the note."""
        assert self._mine is not None, "only an owner leaves notes"
        try:
            with renamed_into(self.note_path) as file:
                file.write(json.dumps({**json.loads(self._mine), "note": note}).encode())
        except OSError:  # the disk is full; a rename needs no room, and a note without words is one too
            os.replace(self.path, self.note_path)
            return False
        return True

    def _pause_s(self) -> float:
        """About a quarter of the time since this object was made: some 35 looks in the first minute, then 12."""
        waited_s = self.clock() - self._made
        return self._chance.uniform(0.5, 1.5) * min(max(waited_s / 4, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)


def temporary_name(path: Path) -> Path:
    """A hidden name beside `path` that says which process uses it, so that others know when it is of no more use."""
    return path.parent / f".{path.name}.{Owner.this_process().stamp}-{secrets.token_hex(2)}.tmp"


@contextlib.contextmanager
def renamed_into(path: Path) -> Iterator[BinaryIO]:
    """A binary file under a temporary name that takes `path`'s name at the end, its content being on the disk then.
    Removed after an error."""
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            yield file
            flush_to_disk(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def flush_to_disk(file: BinaryIO) -> None:
    """Without this a crash of the machine can leave a file of the right size full of zeros."""
    file.flush()
    os.fsync(file.fileno())


def flush_directory(directory: Path) -> None:
    """Make renames in a directory last, where the file system knows how to."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_remains(lock: FileLock, prefix: str) -> None:
    """Remove what killed owners of `lock`, which is ours, left beside it: files and folders with a temporary_name of
    something that begins with `prefix`, and the locks under which a dead lock was to be replaced.

    Only what surely nobody uses: of ended processes of this machine, of the owner whose lock was taken over, and what
    is a day older than our lock by the file system's own clock.
    """
    guards = re.compile(re.escape(lock.path.name) + r"(\.[0-9a-f]{8})+$")
    with contextlib.suppress(OSError):
        now = lock.path.stat().st_mtime
        for path in list(lock.path.parent.iterdir()):
            temporary = path.name.startswith(f".{prefix}") and path.name.endswith(".tmp")
            with contextlib.suppress(OSError):
                if (temporary or guards.match(path.name)) and _is_left_over(path, lock, now):
                    _remove(path)


def _is_left_over(path: Path, lock: FileLock, now: float) -> bool:
    found = _STAMP.search(path.name)
    if found:
        machine, pid, start = found[1].split("-")
        owner: Owner | None = Owner("", machine, int(pid), int(start), 0.0, "")
    else:
        seen = None if path.is_dir() else _look(path)
        owner = Owner.read(seen.text) if seen else None
    if owner is not None:
        if owner.is_gone():
            return True
        if lock.taken_from is not None and owner.stamp == lock.taken_from.stamp:
            return True
    return path.stat().st_mtime < now - _SURELY_OLD_S


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
