"""Writing data files: tensors one after another, each as torch.save makes it, with a digest on the way.

torch's own file writer copies every view before it writes it, and takes no digests. Here a contiguous view in host
memory goes to the file as it lies; anything else is copied one box at a time. So a save needs, beside the state, at
most as much memory as the largest box that is on a device or not contiguous.

The checksums of zip records, which torch.load never compares, are left out: the digest stands for them, at a tenth of
their time.
"""
from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, cast

import torch

from megatron.checkpoint.boxes import Stored
from megatron.checkpoint.digest import running_digest
from megatron.checkpoint.planner import Shards
from megatron.engine.fragments import Index

_BUFFER = 1 << 20  # bytes: what is smaller is collected before it goes to the file
_CHUNK = 64 << 20  # bytes between two signs of life
_SYNC = 4 << 30  # bytes after which the disk has to catch up, so that the last fsync is a short one

Alive = Callable[[], None]


def nothing() -> None:
    """What is called where nobody wants a sign of life."""


class BoxWriter:
    """A data file of a checkpoint, `__RANK_0.distcp`; torch.distributed.checkpoint reads it too.

        with BoxWriter(folder, rank) as writer:
            writer.add("master.w", (4, 2), (0, 0), view)  # as often as there are boxes
            stored = writer.finish()

    alive   called after every box, and within large ones; what it raises ends the writing

    No file appears where there is no box. Raises OSError as the system says it. Nothing is communicated.
    """

    def __init__(self, folder: Path, rank: int, alive: Alive = nothing) -> None:
        self._path = folder / f"__{rank}_0.distcp"
        self._alive = alive
        self._sink: _Sink | None = None
        self._stored: dict[str, Stored] = {}

    def add(self, name: str, shape: tuple[int, ...], offset: Index, view: torch.Tensor) -> None:
        """Append a box: `view` is the part at `offset` of tensor `name` of global `shape`."""
        if self._sink is None:
            self._sink = _Sink(self._path, self._alive)
        start = self._sink.start_box()
        try:
            with _without_checksums():
                torch.save(_with_own_storage(view), cast(IO[bytes], self._sink))  # it calls write and flush
        except Exception:
            # torch's writer of zip files hides the system's error behind a position of its own.
            if self._sink.error is not None:
                raise self._sink.error from None
            raise
        dtype = str(view.dtype).removeprefix("torch.")
        stored = self._stored.setdefault(name, {"shape": tuple(shape), "dtype": dtype, "boxes": []})
        box = (tuple(offset), tuple(view.shape), self._path.name, start, self._sink.at - start, self._sink.box_digest())
        stored["boxes"].append(box)
        self._alive()

    def finish(self) -> dict[str, Stored]:
        """Return when all is on the disk: the boxes of this file."""
        if self._sink is not None:
            self._sink.finish()
        return self._stored

    def __enter__(self) -> BoxWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        if self._sink is not None:
            self._sink.close(quietly=kind is not None)


def write_tensors(tensors: Mapping[str, Shards], folder: Path, rank: int, alive: Alive = nothing) -> dict[str, Stored]:
    """Write what a rank holds of {name: Shards} into its file of `folder`; the boxes that are now in it."""
    with BoxWriter(folder, rank, alive) as writer:
        for name, shards in tensors.items():
            for offset, view in shards.pieces.items():
                writer.add(name, shards.shape, offset, view)
        return writer.finish()


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """torch.save takes no CRC-32. The setting is the process's: what another thread saves meanwhile has none either,
    which torch.load does not mind."""
    usual = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(usual)


def _with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same values in host memory as a tensor of a storage that holds nothing else: torch.save writes storages.

    No copy of what is contiguous and in host memory already.
    """
    view = view.detach()
    if view.device.type != "cpu" or not view.is_contiguous():
        return view.cpu().contiguous()
    if not view.numel():
        return view.clone()
    return torch.from_numpy(view.reshape(-1).view(torch.uint8).numpy()).view(view.dtype).view(view.shape)


class _Sink:
    """The file as torch.save sees it: takes digests, passes large pieces on uncopied and keeps the system's error."""

    def __init__(self, path: Path, alive: Alive) -> None:
        self._file: BinaryIO = open(path, "wb", buffering=_BUFFER)  # noqa: SIM115  it is closed by `close`
        self._alive = alive
        self._digest = running_digest()
        self._synced = self._sent = 0
        self.at = 0
        self.error: BaseException | None = None

    def start_box(self) -> int:
        """Begin a digest anew; where in the file the box begins."""
        self._digest = running_digest()
        return self.at

    def box_digest(self) -> str:
        """The digest of what was written since `start_box`."""
        found: str = self._digest.hexdigest()
        return found

    def write(self, data: Any) -> int:
        try:
            view = memoryview(data).cast("B")
            for start in range(0, len(view), _CHUNK):
                part = view[start : start + _CHUNK]
                self._digest.update(part)
                self._file.write(part)
                self.at += len(part)
                if len(part) == _CHUNK:
                    self._alive()
                if self.at - self._sent >= _CHUNK:
                    self._send()
                if self.at - self._synced >= _SYNC:
                    self._sync()
        except BaseException as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        """torch.save calls this after every tensor; the file is flushed when it is complete."""

    def finish(self) -> None:
        self._sync()
        size = os.fstat(self._file.fileno()).st_size
        if size != self.at:
            raise OSError(f"{self._file.name} has {size} bytes after {self.at} were written")
        self._file.close()

    def close(self, quietly: bool) -> None:
        try:
            self._file.close()
        except OSError:  # again what made the writing fail
            if not quietly:
                raise

    def _send(self) -> None:
        """Have the system begin to write to the disk what it was given, while more comes."""
        start, self._sent = self._sent, self.at
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), start, self.at - start, os.POSIX_FADV_DONTNEED)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        sys.audit("megatron.checkpoint.synced", str(self._file.name))
        self._synced = self.at
        self._alive()
