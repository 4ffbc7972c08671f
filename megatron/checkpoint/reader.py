"""Reads data files: the shards of tensors that writer.py wrote, and those of torch.save.

Every shard is compared with its digest before it is used, and nothing in it is executed. What
torch.save puts around the values is known from dtype and shape (writer.envelope): if these bytes are
in the file, no pickle is read. Otherwise, as in a file that another version of torch wrote, its
pickle is checked and read by torch.load(weights_only=True).
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
import xxhash

from megatron.checkpoint.shards import Entries, Shard, overlap
from megatron.checkpoint.writer import BLOCK, bytes_of, envelope
from megatron.errors import CheckpointError
from megatron.untrusted import open_regular
from megatron.untrusted_pickle import check_torch_file

_READERS = 2  # threads; each takes up to half of what a core can copy from the page cache

ShardKey = tuple[str, Shard]
"""A tensor's name, and a shard of it."""
Targets = Mapping[ShardKey, torch.Tensor]
"""For some shards a tensor that is filled with the values."""
_NO_TARGETS: Targets = MappingProxyType({})


def read_shards(
    folder: Path, shards: Iterable[ShardKey], stored: Entries, targets: Targets = _NO_TARGETS
) -> Iterator[tuple[str, Shard, torch.Tensor]]:
    """Yield (name, shard, values) for `shards`, in their order in the files.

    Values are read into a shard's target, if it has one that is in host memory, contiguous and of
    the shard's dtype and sizes: they are then this tensor. Others are in a buffer, which is valid
    until the next shard is asked for: allocating memory for each shard would take longer than
    reading it. Threads read the next shards in the meantime.

    Raises CheckpointError naming the file that is damaged; some targets may then have been filled
    with what it holds.
    """
    buffers = [_Buffer() for _ in range(_READERS + 1)]
    ordered = sorted(shards, key=lambda key: (key[1].file, key[1].start))
    reading: deque[tuple[ShardKey, Future[torch.Tensor], BinaryIO | None]] = deque()

    def oldest() -> tuple[str, Shard, torch.Tensor]:
        key, future, ended = reading.popleft()
        values = future.result()
        if ended is not None:
            ended.close()
        return *key, values

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(_READERS, "read-checkpoint") as pool:
        number = itertools.count()
        for file, keys in itertools.groupby(ordered, key=lambda key: key[1].file):
            opened = stack.enter_context(open_regular(folder / file, error=CheckpointError))
            of_file = list(keys)
            for key in of_file:
                buffer = buffers[next(number) % len(buffers)]
                place = _Place(opened, folder / file, *key, stored[key[0]]["dtype"])
                future = pool.submit(place.read, buffer, targets.get(key))
                reading.append((key, future, opened if key is of_file[-1] else None))
                if len(reading) > _READERS:
                    yield oldest()
        while reading:
            yield oldest()


class _Buffer:
    """Memory that grows as needed and is used again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def first(self, length: int) -> torch.Tensor:
        """Return the first bytes."""
        if len(self._memory) < length:
            self._memory = torch.empty(length, dtype=torch.uint8)
        return self._memory[:length]


@dataclass(frozen=True)
class _Place:
    """Place of a shard in a file that is open, from which several threads read at a time."""

    opened: BinaryIO
    path: Path
    name: str
    shard: Shard
    stored_dtype: str

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.stored_dtype)
        return dtype

    def read(self, buffer: _Buffer, target: torch.Tensor | None) -> torch.Tensor:
        """Return the values, in `target` if this is possible, or in `buffer`.

        Raises CheckpointError naming the file if it is damaged.
        """
        before, after = envelope(self.dtype, self.shard.sizes)
        values_bytes = math.prod(self.shard.sizes) * self.dtype.itemsize
        usual = len(before) + values_bytes + len(after) == self.shard.length
        if usual and target is not None and self._fits(target):
            found = bytearray(len(before)), bytearray(len(after))
            self._fill([memoryview(found[0]), bytes_of(target), memoryview(found[1])])
            if found[0] == before and found[1] == after:
                return target
        data = buffer.first(self.shard.length)
        self._fill([data.numpy().data])
        if usual:
            stop = len(before) + values_bytes
            if (
                data[: len(before)].numpy().tobytes() == before
                and data[stop:].numpy().tobytes() == after
            ):
                return data[len(before) : stop].view(self.dtype).view(self.shard.sizes)
        return self._parsed(data)

    def _fits(self, target: torch.Tensor) -> bool:
        return (
            target.device.type == "cpu"
            and target.dtype == self.dtype
            and tuple(target.shape) == self.shard.sizes
            and target.is_contiguous()
        )

    def _fill(self, parts: Sequence[memoryview]) -> None:
        """Fill `parts`, one after another, with the bytes of the shard.

        Each block is digested while it is in the processor's cache.
        """
        start = self.shard.start
        end = start + self.shard.length
        handle = self.opened.fileno()
        value = xxhash.xxh3_128()
        try:
            size = os.fstat(handle).st_size
            at = start
            for part in parts if end <= size else ():
                done = 0
                while done < len(part):
                    block = part[done : done + BLOCK]
                    read = os.preadv(handle, [block], at)
                    if not read:
                        size = at  # the file has just become shorter
                        break
                    value.update(block[:read])
                    done += read
                    at += read
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read ({error.strerror or error}); {self.name} is in it"
            ) from error
        if end > size:
            raise CheckpointError(
                f"{self.path} has {size} bytes, but at least {end} were written; it contains "
                f"{self.name}"
            )
        if self.shard.digest not in (None, value.hexdigest()):
            raise CheckpointError(
                f"{self.path} is damaged: bytes {start} to {end}, a part of {self.name}, are not "
                "those that were written"
            )

    def _parsed(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor that torch.save wrote into `data`, the bytes of the shard.

        It is a view of `data` if it is contiguous and starts at the beginning of its storage.
        """
        stream: Any = _Stream(data.numpy().data)
        check_torch_file(stream, f"{self.path}, where {self.name} is,", CheckpointError)
        try:
            values: torch.Tensor = torch.load(stream, map_location="meta", weights_only=True)
            stream.seek(0)
            whole = type(values) is torch.Tensor and values.is_contiguous()
            if whole and not values.storage_offset():
                reader: Any = torch._C.PyTorchFileReader(stream)
                at = reader.get_record_offset("data/0")
                values = data[at : at + values.nbytes].view(values.dtype).view(values.shape)
            else:
                values = torch.load(stream, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except Exception as error:  # a damaged archive can cause any exception
            first = (str(error).splitlines() or [""])[0]
            raise CheckpointError(
                f"{self.path} is damaged where {self.name} is ({type(error).__name__}: {first})"
            ) from error
        actual = getattr(values, "shape", None), getattr(values, "dtype", None)
        if actual != (self.shard.sizes, self.dtype):
            raise CheckpointError(
                f"{self.path} is damaged: at byte {self.shard.start} it has {actual}, but a shard "
                f"{self.shard.sizes} in {self.stored_dtype} of {self.name} was written"
            )
        return values


def read_tensor(
    folder: Path,
    stored: Entries,
    name: str,
    row: int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a full tensor, or only element `row` of its first dimension.

    dtype   type of the result; by default the stored one

    Raises CheckpointError naming the file that is damaged.
    """
    entry = stored[name]
    shape = entry["shape"]
    offset = (row or 0, *[0] * (len(shape) - 1))
    sizes = shape if row is None else (1, *shape[1:])
    values = torch.empty(sizes, dtype=dtype or getattr(torch, entry["dtype"]))
    common = {shard: overlap(offset, sizes, shard.offset, shard.sizes) for shard in entry["boxes"]}
    shards = [(name, shard) for shard, regions in common.items() if regions]
    for _, shard, data in read_shards(folder, shards, stored):
        target, source = common[shard] or ((), ())
        values[target] = data[source]
    return values if row is None else values[0]


class _Stream(io.RawIOBase):
    """A file object that reads from bytes, without the copy that io.BytesIO makes."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at

    def readinto(self, target: Any) -> int:
        chunk = self._data[self._at : self._at + len(target)]
        target[: len(chunk)] = chunk
        self._at += len(chunk)
        return len(chunk)
