"""Writes data files: tensors in the format of torch.save, with a digest of each shard.

torch's own checkpoint writer copies every view before it writes it, and has no digests. This module
writes a contiguous view in host memory without a copy; other views are copied first. Thus a save
needs, in addition to the state, at most as much memory as the largest shard that is on a device or
not contiguous.

torch.save is called only once for each shape and dtype: what it writes before and after a tensor's
values (`envelope`) depends on nothing else. It would take about as long as writing a megabyte for
each shard, most of it in Python, where it delays the thread that trains.

The CRC-32 of zip records, which torch.load never compares, is omitted: the digest replaces it at a
tenth of its cost.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
import xxhash

from megatron.checkpoint.shards import Entries, Shard, Stored
from megatron.checkpoint.tensors import Tensors
from megatron.engine.optimizer import Index

_SYNC = 256 << 20  # bytes between two syncs
# bytes that are written and then digested while they are in the processor's cache
BLOCK = 1 << 20

Alive = Callable[[], None]


def nothing() -> None:
    """Do nothing: the default of `alive`, which is called to show progress."""


class SyncedFile:
    """A new file that is synced to disk while more is written.

    At most about 2 * _SYNC bytes wait for the disk, and more only during a larger `write`. Raises
    OSError with the system's own reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self._file = open(path, "wb")  # noqa: SIM115  closed by `close`
        self._thread = ThreadPoolExecutor(1)
        self._syncing: Future[None] | None = None
        self._synced = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._file.write(data)
        self.bytes += memoryview(data).nbytes
        if self.bytes - self._synced >= _SYNC:
            self._sync()

    def _sync(self) -> None:
        self._file.flush()
        self._wait()
        self._syncing = self._thread.submit(os.fsync, self._file.fileno())
        self._synced = self.bytes

    def _wait(self) -> None:
        if self._syncing is not None:
            self._syncing.result()

    def finish(self) -> None:
        """Wait until all bytes are on disk."""
        self._sync()
        self._wait()
        sys.audit("megatron.checkpoint.synced", str(self.path))

    def close(self) -> None:
        """Close the file; after an error not all of it may be on disk, see `finish`."""
        self._thread.shutdown()
        with contextlib.suppress(OSError):
            self._file.close()


class ShardWriter:
    """A data file of a checkpoint, `__RANK_0.distcp`; torch.distributed.checkpoint reads it too.

        with ShardWriter(folder, rank) as writer:
            writer.add("master.w", (4, 2), (0, 0), view)  # for each shard
            stored = writer.finish()

    alive   called after every shard

    If no shard is added, no file remains. Raises OSError with the system's own reason. There is no
    communication.
    """

    def __init__(self, folder: Path, rank: int, alive: Alive = nothing) -> None:
        self._alive = alive
        self._stored: dict[str, Stored] = {}
        self._file = SyncedFile(folder / f"__{rank}_0.distcp")

    @property
    def bytes(self) -> int:
        """Return the size of the file so far."""
        return self._file.bytes

    def add(self, name: str, shape: tuple[int, ...], offset: Index, view: torch.Tensor) -> None:
        """Append a shard: `view` is the part at `offset` of tensor `name` of global `shape`."""
        start = self.bytes
        digest = xxhash.xxh3_128()
        before, after = envelope(view.dtype, tuple(view.shape))
        for data in (memoryview(before), bytes_of(view), memoryview(after)):
            for at in range(0, len(data), BLOCK):
                block = data[at : at + BLOCK]
                self._file.write(block)
                digest.update(block)
        dtype = str(view.dtype).removeprefix("torch.")
        stored = self._stored.setdefault(name, {"shape": tuple(shape), "dtype": dtype, "boxes": []})
        length = self.bytes - start
        value = digest.hexdigest()
        stored["boxes"].append(
            Shard(tuple(offset), tuple(view.shape), self._file.path.name, start, length, value)
        )
        self._alive()

    def finish(self) -> Entries:
        """Sync the file and return the shards in it; remove it if there are none."""
        if self._stored:
            self._file.finish()
        else:
            self._file.path.unlink()
        return self._stored

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def write_tensors(tensors: Tensors, folder: Path, rank: int, alive: Alive = nothing) -> Entries:
    """Write a rank's shards, `tensors`, into its file in `folder`; return the file's entries."""
    with ShardWriter(folder, rank, alive) as writer:
        for name, shards in tensors.items():
            for offset, view in shards.views.items():
                writer.add(name, shards.shape, offset, view)
        return writer.finish()


@functools.lru_cache(maxsize=4096)
def envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return what torch.save writes before and after the values of a contiguous tensor on the CPU.

    The memory of the tensor that is saved here is not read.
    """
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    parts = _Envelope(tensor)
    with _without_checksums():
        torch.save(tensor, cast(IO[bytes], parts))
    assert parts.dropped == tensor.nbytes, "torch.save passes on a tensor's memory without a copy"
    return bytes(parts.before), bytes(parts.after)


class _Envelope:
    """A file for torch.save that drops the values of a tensor and keeps the rest."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._start = tensor.data_ptr()
        self._length = tensor.nbytes
        self.dropped = 0
        self.before = bytearray()
        self.after = bytearray()

    def write(self, data: memoryview) -> int:
        """Keep the bytes, unless they are in the tensor's memory."""
        address = np.frombuffer(data, np.uint8).ctypes.data
        if self._start <= address < self._start + self._length:
            self.dropped += data.nbytes
        elif self.dropped < self._length or not self._length:
            self.before += data
        else:
            self.after += data
        return data.nbytes

    def flush(self) -> None:
        """Do nothing: torch.save calls this after every tensor."""


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Turn off torch.save's CRC-32.

    The setting is global: files that another thread saves at the same time have no checksums
    either, which torch.load accepts.
    """
    usual = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(usual)


def bytes_of(view: torch.Tensor) -> memoryview:
    """Return the values as bytes in host memory.

    They are copied only if they are on a device or not contiguous.
    """
    flat = view.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")
