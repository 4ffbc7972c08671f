"""The memory file of a rank: host memory that outlives its process.

The file is anonymous (memfd_create(2)): a process that starts the training process holds its
descriptor, so that the next training process finds what the last one wrote, and nothing is left on
the node when all of them have ended.

    two tables   at bytes 0 and _TABLE_BYTES: the newer valid one lists the slots, and has what else
                 later processes must know
    slots        each has room for a copy of a rank's shards, and then for its header

A slot is valid only if its header is, which is written last and erased first: a process that is
killed while it copies leaves the slot empty, and other slots as they were. Tables and headers have
digests. All ranges are multiples of a page; the pages of a removed slot are returned to the system.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from megatron.checkpoint.files import digest
from megatron.checkpoint.shards import Entries, checked_entry
from megatron.checkpoint.tensors import HostMemory
from megatron.errors import CheckpointError
from megatron.untrusted import parse_json

PRIMARY = "primary"
COPY = "copy"

_TABLE_BYTES = 1 << 16
_LENGTH_BYTES = 8
_DIGEST_BYTES = 32
_HASHED_BYTES = 64 << 20  # bytes hashed between two signs of life


class HeaderTooLongError(CheckpointError):
    """A header that needs `size_bytes` is longer than its slot's room."""

    def __init__(self, message: str, size_bytes: int) -> None:
        super().__init__(message)
        self.size_bytes = size_bytes


class Key(NamedTuple):
    """Identity of a local save: its number in the job, its iteration, and the job's attempt.

    Numbers increase with every save of a job. `attempt` tells apart saves of one number whose
    attempts did not know of each other, such as those of a node that was away for a while.
    """

    number: int
    iteration: int
    attempt: str


@dataclass(frozen=True)
class Header:
    """Description of the shards in a slot.

    rank, world  the rank that saved them, and the number of ranks of that save
    elements     number of elements that all ranks of the save hold together
    size_bytes   size of the copy, and `digest` its digest
    state        counters of the training loop, and `engine` those of the engine, as in STATE
    about        settings and provenance of the run, of rank 0 only
    stored       entries of the shards; `start` counts from the beginning of the slot
    """

    key: Key
    rank: int
    world: int
    elements: int
    size_bytes: int
    digest: str
    state: dict[str, Any]
    engine: dict[str, Any]
    about: dict[str, Any]
    stored: Entries

    @classmethod
    def parse(cls, text: bytes) -> Header:
        """Return the header in a text. Raises CheckpointError."""
        content = parse_json(text, "the header", error=CheckpointError)
        try:
            stored = {name: checked_entry(entry) for name, entry in content.pop("stored").items()}
            return cls(key=Key(*content.pop("key")), stored=stored, **content)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"the header is malformed ({error})") from error


@dataclass(eq=False)
class MemorySlot:
    """A slot of a memory file.

    fd            the file
    start         its first byte in the file
    data_bytes    room for the copy
    header_bytes  room for the header, behind it
    role          PRIMARY for the rank's shards, COPY for those of another rank
    key           the save in it; None if it is empty or being written
    """

    fd: int
    start: int
    data_bytes: int
    header_bytes: int
    role: str
    key: Key | None = None
    _memory: HostMemory | None = field(default=None, repr=False)

    @property
    def size_bytes(self) -> int:
        return self.data_bytes + self.header_bytes

    @property
    def memory(self) -> HostMemory:
        """The slot's bytes, mapped at the first use; a message carries them all."""
        if self._memory is None:
            mapping = mmap.mmap(self.fd, self.size_bytes, flags=mmap.MAP_SHARED, offset=self.start)
            self._memory = HostMemory(mapping)
        return self._memory

    @property
    def _header(self) -> memoryview:
        view: memoryview = self.memory.tensor[self.data_bytes :].numpy().data
        return view

    def erase(self) -> None:
        """Make the slot empty."""
        self.key = None
        self._header[: _LENGTH_BYTES + _DIGEST_BYTES] = bytes(_LENGTH_BYTES + _DIGEST_BYTES)

    def complete(self, key: Key, text: bytes) -> None:
        """Write the header of the copy in the slot. Raises HeaderTooLongError."""
        at = _LENGTH_BYTES + _DIGEST_BYTES
        if at + len(text) > self.header_bytes:
            raise HeaderTooLongError(
                f"settings, provenance and state of the training loop take {len(text)} bytes, and "
                f"there is room for {self.header_bytes - at}: the next one has more",
                at + len(text),
            )
        header = self._header
        header[at : at + len(text)] = text
        header[_LENGTH_BYTES:at] = digest(text).encode()
        header[:_LENGTH_BYTES] = len(text).to_bytes(_LENGTH_BYTES, "little")
        self.key = key

    def read(self) -> Header | None:
        """Return the header; None if the slot is empty. Raises CheckpointError if it is damaged."""
        header = self._header
        at = _LENGTH_BYTES + _DIGEST_BYTES
        length = int.from_bytes(header[:_LENGTH_BYTES], "little")
        if length == 0:
            return None
        text = bytes(header[at : at + length])
        if digest(text).encode() != header[_LENGTH_BYTES:at]:
            raise CheckpointError("the header is damaged: its digest does not match its content")
        parsed = Header.parse(text)
        self.key = parsed.key
        return parsed

    def digest(self, size: int, alive: Callable[[], None]) -> str:
        """Return the digest of the first `size` bytes; Python's lock is free most of the time."""
        view = self.memory.tensor[:size].numpy().data
        value = xxhash.xxh3_128()
        for start in range(0, size, _HASHED_BYTES):
            value.update(view[start : start + _HASHED_BYTES])
            alive()
        return value.hexdigest()


class MemoryFile:
    """The slots of a memory file.

    fd        its descriptor, of memfd_create(2); the file may be empty
    compared  the iteration at which copies of weights were last compared; None: unknown, because
              the memory is new
    interval  steps between saves that a job of `world` ranks has chosen; 0: none has been chosen
    saved_s   time.monotonic() at the beginning of the last complete save on disk; 0: unknown

    `rejected` says what is wrong if both tables are damaged; the file then counts as empty.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.slots: list[MemorySlot] = []
        self.compared: int | None = None
        self.interval = 0
        self.world = 0
        self.saved_s = 0.0
        self.rejected = ""
        self._count = 0
        self._end = 2 * _TABLE_BYTES
        if os.fstat(fd).st_size < self._end:
            os.ftruncate(fd, self._end)
        self._tables = mmap.mmap(fd, self._end, flags=mmap.MAP_SHARED)
        tables = list(filter(None, map(self._read_table, range(2))))
        if tables:
            newest = max(tables, key=lambda table: int(table["count"]))
            self._count = newest["count"]
            self.compared = newest["compared"]
            self.interval = newest["interval"]
            self.world = newest["world"]
            self.saved_s = newest["saved_s"]
            self._end = newest["end"]
            self.slots = [MemorySlot(fd, *entry) for entry in newest["slots"]]
        elif self._tables[:].strip(b"\0"):
            self.rejected = "the list of its slots is damaged"
            self._end = max(self._end, os.fstat(fd).st_size)

    def _read_table(self, which: int) -> Mapping[str, Any] | None:
        page = self._tables[which * _TABLE_BYTES : (which + 1) * _TABLE_BYTES].rstrip(b"\0")
        value, text = page[:_DIGEST_BYTES], page[_DIGEST_BYTES:]
        if not text or digest(text).encode() != value:
            return None
        content: Mapping[str, Any] = json.loads(text)
        return content

    def _write_table(self) -> None:
        """Write the table that is not the newest one."""
        self._count += 1
        text = json.dumps(
            {
                "count": self._count,
                "compared": self.compared,
                "interval": self.interval,
                "world": self.world,
                "saved_s": self.saved_s,
                "end": self._end,
                "slots": [[s.start, s.data_bytes, s.header_bytes, s.role] for s in self.slots],
            }
        ).encode()
        page = (digest(text).encode() + text).ljust(_TABLE_BYTES, b"\0")
        at = self._count % 2 * _TABLE_BYTES
        self._tables[at : at + _TABLE_BYTES] = page

    def copies_compared(self, iteration: int) -> None:
        """Note that the copies of the weights were equal after `iteration`."""
        if iteration != self.compared:
            self.compared = iteration
            self._write_table()

    def chosen(self, interval: int, world: int) -> None:
        """Note the steps between saves that `world` ranks have chosen."""
        self.interval = interval
        self.world = world
        self._write_table()

    def saved(self, at_s: float) -> None:
        """Note when the last complete save on disk began."""
        self.saved_s = at_s
        self._write_table()

    def add(self, role: str, data_bytes: int, header_bytes: int) -> MemorySlot:
        """Add an empty slot. Raises OSError if there is no memory for it."""
        start = self._end
        size = data_bytes + header_bytes
        # takes all pages now, so that no copy fails later
        os.posix_fallocate(self.fd, start, size)
        self._end = start + size
        slot = MemorySlot(self.fd, start, data_bytes, header_bytes, role)
        self.slots.append(slot)
        self._write_table()
        return slot

    def remove(self, slot: MemorySlot) -> None:
        """Remove a slot, and return its memory to the system."""
        self.slots.remove(slot)
        self._write_table()
        slot.memory.release()
        slot.memory.mapping.madvise(mmap.MADV_REMOVE)


def pages(size: int) -> int:
    """Return a size in bytes, rounded up to whole pages; at least one page."""
    page = mmap.ALLOCATIONGRANULARITY
    return max(-(-size // page), 1) * page
