"""Lists of the shards in a checkpoint's data files.

The lists are collected from the ranks, written, and read back. A shard is a rectangular part of a
tensor. A large job has hundreds of thousands of shards. A single list would cost the rank that
writes it, and each rank that reads it, minutes and gigabytes. Therefore the first rank of each
data-parallel group collects and writes the list of its group, and rank 0 only an index of these
lists:

    boxes.json           the pieces in which each tensor's shards are listed
    boxes_00017.json     a piece: the shards written by the data-parallel group of model-parallel
                         rank 17
    .metadata            all shards in torch's own format, for its tools; only up to
                         save.METADATA_MAX_RANKS ranks

A loading rank parses only the pieces of the tensors that it holds; only rank 0 compares all pieces
with the manifest. .metadata, a pickle, is never unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.checkpoint.files import SHARD_INDEX, Manifest, Written, write_text
from megatron.engine.optimizer import Index
from megatron.errors import CheckpointError
from megatron.untrusted import is_count, is_file_name

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}

_OVERHEAD_BYTES = 1 << 16  # upper bound for the bytes that torch.save adds to a tensor's data
_NAMED = 8

Stored = dict[str, Any]
"""A tensor's entry: {"shape": (...), "dtype": "float32", "boxes": [Shard, ...]}, of plain values
that JSON can represent.
"""
Entries = Mapping[str, Stored]
"""Entries of tensors, by name."""
Totals = dict[str, tuple[Index, int]]
"""Shape and number of stored elements of each tensor, by name."""


class Shard(NamedTuple):
    """A rectangular part of a tensor: global offset and sizes.

    It takes `length` bytes of `file`, from byte `start` on. `digest` is None only in a checkpoint
    of another program.
    """

    offset: Index
    sizes: Index
    file: str
    start: int
    length: int
    digest: str | None


def merged(lists: Iterable[Entries]) -> Entries:
    """Merge the shards from several ranks, tensor by tensor."""
    result: dict[str, Stored] = {}
    for entries in lists:
        for name, stored in entries.items():
            entry = result.setdefault(name, {**stored, "boxes": []})
            entry["boxes"] += stored["boxes"]
    return result


def totals(stored: Entries) -> Totals:
    """Return the shape and the number of stored elements of each tensor, for `check_complete`."""
    return {name: (tuple(s["shape"]), _elements(s)) for name, s in stored.items()}


def _elements(stored: Stored) -> int:
    return sum(math.prod(shard.sizes) for shard in stored["boxes"])


def stored_bytes(stored: Entries) -> int:
    """Return the size of the shards in the data files, in bytes."""
    return sum(shard.length for s in stored.values() for shard in s["boxes"])


def check_complete(groups: Iterable[Totals]) -> None:
    """Raise CheckpointError unless the groups together have all elements of every tensor.

    Only the numbers of elements are compared.
    """
    lacking: dict[str, int] = {}
    for group in groups:
        for name, (shape, count) in group.items():
            lacking[name] = lacking.get(name, math.prod(shape)) - count
    wrong = [name for name, count in lacking.items() if count]
    if wrong:
        raise CheckpointError(f"no rank, or more than one, holds parts of {named(wrong)}")


def incomplete(stored: Entries) -> list[str]:
    """Return a message for each tensor whose shards omit elements, overlap or exceed its shape."""
    problems = []
    for name, entry in stored.items():
        shape = tuple(entry["shape"])
        boxes = entry["boxes"]
        count = _elements(entry)
        if any(
            o + n > d
            for shard in boxes
            for o, n, d in zip(shard.offset, shard.sizes, shape, strict=True)
        ):
            problems.append(f"{name} has shards outside of its shape {shape}")
        elif count != math.prod(shape):
            problems.append(f"{name} has {count} of its {math.prod(shape)} elements")
        elif _intersect(sorted(boxes)):
            problems.append(f"{name} has elements that are stored twice")
    return problems


def _intersect(boxes: list[Shard]) -> bool:
    """Return whether two of the sorted shards have elements in common.

    A sweep along the first dimension finds them.
    """
    running: list[Shard] = []
    for shard in boxes:
        running = [other for other in running if other.offset[0] + other.sizes[0] > shard.offset[0]]
        if any(overlap(shard.offset, shard.sizes, other.offset, other.sizes) for other in running):
            return True
        running.append(shard)
    return False


def overlap(
    offset: Index, sizes: Index, other: Index, other_sizes: Index
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the intersection of two rectangular parts of a tensor.

    It is given as slices of the first part and as slices of the second; None if it is empty.

    >>> overlap((0, 4), (2, 4), (1, 6), (3, 9))
    ((slice(1, 2, None), slice(2, 4, None)), (slice(0, 1, None), slice(0, 2, None)))
    >>> overlap((0,), (4,), (4,), (4,)) is None
    True
    """
    in_first: list[slice] = []
    in_second: list[slice] = []
    for a, n, b, m in zip(offset, sizes, other, other_sizes, strict=True):
        start = max(a, b)
        stop = min(a + n, b + m)
        if start >= stop:
            return None
        in_first.append(slice(start - a, stop - a))
        in_second.append(slice(start - b, stop - b))
    return tuple(in_first), tuple(in_second)


def write_piece(folder: Path, number: int, stored: Entries) -> tuple[str, Written]:
    """Write the shards of one data-parallel group; return the file's name, size and digest."""
    return _write(folder, piece_name(number), stored)


def _write(folder: Path, name: str, content: Mapping[str, object]) -> tuple[str, Written]:
    return name, write_text(folder / name, json.dumps(content, separators=(",", ":")) + "\n")


def write_index(folder: Path, groups: list[Totals]) -> tuple[str, Written]:
    """Write the index of the pieces that list each tensor; return its name, size and digest.

    groups   totals of each piece, in the order of the pieces' numbers
    """
    pieces: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        for name in group:
            pieces.setdefault(name, []).append(number)
    return _write(folder, SHARD_INDEX, {"pieces": pieces})


def write_metadata(folder: Path, stored: Entries) -> None:
    """Write .metadata, the list of all shards in torch's format, with torch's own writer."""
    # These imports take half a second, and reading does not need them.
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    tensors: dict[str, Any] = {}
    files: list[WriteResult] = []
    for name, s in stored.items():
        properties = TensorProperties(getattr(torch, s["dtype"]))
        tensor = tensors[name] = TensorStorageMetadata(properties, torch.Size(s["shape"]), [])
        for offset, sizes, file, start, length, _ in s["boxes"]:
            index = MetadataIndex(name, offset, len(tensor.chunks))
            files.append(WriteResult(index, length, _StorageInfo(file, start, length)))
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
    dcp.FileSystemWriter(folder).finish(Metadata(tensors), [files])


def read_index(manifest: Manifest) -> dict[str, list[int]]:
    """Return the numbers of the pieces that list each tensor, by name. Raises CheckpointError."""
    listed = manifest.read_json(SHARD_INDEX).get("pieces")
    if not isinstance(listed, dict) or not all(
        isinstance(n, list) and all(map(is_count, n)) for n in listed.values()
    ):
        raise _damaged(manifest, SHARD_INDEX)
    return listed


def read_stored(manifest: Manifest, names: Iterable[str] | None = None) -> Entries:
    """Return the entries of the tensors `names` (None: all) that the checkpoint has.

    Raises CheckpointError.
    """
    listed = read_index(manifest)
    requested = set(listed if names is None else names)
    stored: dict[str, Stored] = {}
    for number in sorted({number for name in requested for number in listed.get(name, ())}):
        piece = manifest.read_json(piece_name(number))
        try:
            for name in requested & piece.keys():
                listed_entry = checked_entry(piece[name])
                entry = stored.setdefault(name, {**listed_entry, "boxes": []})
                if (listed_entry["shape"], listed_entry["dtype"]) != (
                    entry["shape"],
                    entry["dtype"],
                ):
                    raise ValueError("another piece has the tensor with another shape or dtype")
                if any(shard.digest is None for shard in listed_entry["boxes"]):
                    raise ValueError("a shard without a digest")
                entry["boxes"] += listed_entry["boxes"]
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(manifest, piece_name(number)) from error
    return stored


def checked_entry(stored: Any) -> Stored:
    """Return a tensor's entry from a file, with the types that `Stored` describes.

    Raises KeyError, TypeError or ValueError if the entry is malformed.
    """
    shape = tuple(stored["shape"])
    dtype = stored["dtype"]
    boxes = []
    if not all(map(is_count, shape)):
        raise ValueError("not a shape")
    itemsize = _DTYPES[dtype].itemsize
    for offset, sizes, file, start, length, value in stored["boxes"]:
        elements = math.prod(sizes)
        sound = (
            all(map(is_count, (*offset, *sizes, start, length)))
            and len(shape) == len(offset) == len(sizes)
            and is_file_name(file)
            and elements <= math.prod(shape)
            and 0 <= length - elements * itemsize <= _OVERHEAD_BYTES
        )
        if not sound:
            raise ValueError(f"{file}: not a shard of a tensor of shape {shape}")
        boxes.append(Shard(tuple(offset), tuple(sizes), file, start, length, value))
    return {"shape": shape, "dtype": dtype, "boxes": boxes}


def _damaged(manifest: Manifest, name: str) -> CheckpointError:
    return CheckpointError(
        f"{manifest.folder / name} is not a list of shards: load another checkpoint"
    )


def piece_name(number: int) -> str:
    """Return the file name of a piece.

    >>> piece_name(17)
    'boxes_00017.json'
    """
    return f"boxes_{number:05d}.json"


def named(names: list[str]) -> str:
    """Return the first few of many names as text."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
