"""Reading the tensors of a checkpoint: every box is compared with its digest before anything of it is used.

A box lies in a data file as torch.save wrote it. Of the pickle in it torch.load(weights_only=True) takes tensors alone.
"""
from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from megatron.checkpoint.boxes import Box, Stored
from megatron.checkpoint.digest import digest
from megatron.checkpoint.planner import Shards
from megatron.errors import CheckpointError
from megatron.untrusted import open_regular

Place = tuple[slice, ...]


def read_into(
    tensors: Mapping[str, Shards], folder: Path, stored: Mapping[str, Stored], alive: Callable[[], None] = lambda: None
) -> None:
    """Fill the pieces of `tensors` in place from the boxes that hold parts of them, converting to their dtypes.

    alive   called after every box

    Nothing is communicated. Raises CheckpointError naming the file that is damaged; what was filled before that stays.
    """
    wanted: list[tuple[str, Box]] = []
    for name, shards in tensors.items():
        for box in stored[name]["boxes"]:
            if any(overlap(box[0], box[1], offset, tuple(view.shape)) for offset, view in shards.pieces.items()):
                wanted.append((name, box))
    for name, box, values in read_boxes(folder, wanted, stored):
        for offset, view in tensors[name].pieces.items():
            places = overlap(box[0], box[1], offset, tuple(view.shape))
            if places is not None:
                view.detach()[places[1]].copy_(values[places[0]])
        alive()


def read_boxes(
    folder: Path, wanted: Iterable[tuple[str, Box]], stored: Mapping[str, Stored]
) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """(name, box, values) of the boxes of some tensors, in the order in which they lie in the files.

    Raises CheckpointError naming the file that is damaged.
    """
    path, file = None, None
    room = bytearray()  # for the largest box so far: memory that is new for each would cost more than the reading
    try:
        for name, box in sorted(wanted, key=lambda entry: (entry[1][2], entry[1][3])):
            if path != folder / box[2]:
                if file is not None:
                    file.close()
                path, file = folder / box[2], None
                file = open_regular(path, error=CheckpointError)
            assert file is not None and path is not None
            size = os.fstat(file.fileno()).st_size
            if size < box[3] + box[4]:
                raise CheckpointError(
                    f"{path} has {size} bytes where {box[3] + box[4]} or more were written, {name} among them"
                )
            if len(room) < box[4]:
                room = bytearray(box[4])
            yield name, box, _read_box(path, file, name, box, stored[name]["dtype"], memoryview(room)[: box[4]])
    finally:
        if file is not None:
            file.close()


def read_whole(folder: Path, name: str, stored: Mapping[str, Stored]) -> torch.Tensor:
    """A whole tensor, in the dtype it was written in. Raises CheckpointError where a part of it is damaged."""
    entry = stored[name]
    whole = torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]))
    for _, box, values in read_boxes(folder, ((name, box) for box in entry["boxes"]), stored):
        whole[tuple(slice(o, o + n) for o, n in zip(box[0], box[1], strict=True))] = values
    return whole


def overlap(
    offset: tuple[int, ...], sizes: tuple[int, ...], other: tuple[int, ...], other_sizes: tuple[int, ...]
) -> tuple[Place, Place] | None:
    """Where two boxes of one tensor meet, in coordinates of the one and of the other; None where they do not.

    >>> overlap((0, 4), (2, 4), (1, 6), (3, 9))
    ((slice(1, 2, None), slice(2, 4, None)), (slice(0, 1, None), slice(0, 2, None)))
    >>> overlap((0,), (4,), (4,), (4,)) is None
    True
    """
    here: list[slice] = []
    there: list[slice] = []
    for a, n, b, m in zip(offset, sizes, other, other_sizes, strict=True):
        start, stop = max(a, b), min(a + n, b + m)
        if start >= stop:
            return None
        here.append(slice(start - a, stop - a))
        there.append(slice(start - b, stop - b))
    return tuple(here), tuple(there)


def _read_box(path: Path, file: BinaryIO, name: str, box: Box, dtype: str, data: memoryview) -> torch.Tensor:
    """Read a box into `data` and check it; a tensor with memory of its own."""
    _, sizes, _, start, length, expected = box
    try:
        file.seek(start)
        file.readinto(data)  # type: ignore[attr-defined]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}), with {name} in it") from error
    if digest(data) != expected:
        raise CheckpointError(
            f"{path} is damaged: bytes {start} to {start + length}, which hold a part of {name}, are not those written"
        )
    values = _unpacked(path, name, data)
    if values.shape != sizes or values.dtype != getattr(torch, dtype):
        raise CheckpointError(
            f"{path} is damaged: at byte {start} there is {tuple(values.shape)} of {values.dtype} where "
            f"{sizes} of {dtype} of {name} were written"
        )
    return values


class _Bytes(io.RawIOBase):
    """A file over memory, as io.BytesIO is, without a copy of it."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def _unpacked(path: Path, name: str, data: memoryview) -> torch.Tensor:
    try:
        values: Any = torch.load(cast(IO[bytes], _Bytes(data)), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a damaged archive can raise anything
        first = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"{path} is damaged where {name} is ({type(error).__name__}: {first})") from error
    if not isinstance(values, torch.Tensor):
        raise CheckpointError(f"{path} is damaged: it holds a {type(values).__name__} where {name} should be")
    return values
