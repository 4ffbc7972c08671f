"""Writes data files: tensors in the format of torch.save, with a digest of each shard.

torch's own checkpoint writer copies every view before it writes it, and has no digests. This module
writes a contiguous view in host memory without a copy; other views are copied first. Thus a save
needs, in addition to the state, at most as much memory as the largest shard that is on a device or
not contiguous.

The CRC-32 of zip records, which torch.load never compares, is omitted: the digest replaces it at a
tenth of its cost.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash

from megatron.checkpoint.shards import Entries, Shard, Stored
from megatron.checkpoint.tensors import Tensors
from megatron.engine.optimizer import Index

_SYNC = 256 << 20  # bytes between two syncs

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
        self._digest = xxhash.xxh3_128()  # of the shard that is being written
        self._error: OSError | None = None

    @property
    def bytes(self) -> int:
        """Return the size of the file so far."""
        return self._file.bytes

    def add(self, name: str, shape: tuple[int, ...], offset: Index, view: torch.Tensor) -> None:
        """Append a shard: `view` is the part at `offset` of tensor `name` of global `shape`."""
        start = self.bytes
        self._digest = xxhash.xxh3_128()
        try:
            with _without_checksums():
                torch.save(_with_separate_storage(view), cast(IO[bytes], self))
        except Exception:
            # torch's zip writer replaces an OSError with one that only names a line of its source
            if self._error is not None:
                raise self._error from None
            raise
        dtype = str(view.dtype).removeprefix("torch.")
        stored = self._stored.setdefault(name, {"shape": tuple(shape), "dtype": dtype, "boxes": []})
        length = self.bytes - start
        value = self._digest.hexdigest()
        stored["boxes"].append(
            Shard(tuple(offset), tuple(view.shape), self._file.path.name, start, length, value)
        )
        self._alive()

    def write(self, data: Any) -> int:
        """Append bytes to the file and the digest, for torch.save."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        try:
            self._file.write(view)
        except OSError as error:
            self._error = error
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing: torch.save calls this after every tensor; a sync flushes the file."""

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


def _with_separate_storage(view: torch.Tensor) -> torch.Tensor:
    """Return the values in host memory, in a separate storage.

    torch.save writes whole storages. Values are copied only if they are on a device or not
    contiguous.
    """
    view = view.detach().cpu().contiguous()
    if not view.numel():
        return view.clone()
    flat = torch.from_numpy(view.reshape(-1).view(torch.uint8).numpy())
    return flat.view(view.dtype).view(view.shape)
