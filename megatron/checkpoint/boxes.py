"""Which file of a checkpoint holds which box of which tensor: collected from the ranks, written, and read back.

A large job has hundreds of thousands of boxes. Were they all in one place, the rank that plans for everybody and each
rank that reads the plan would spend minutes and gigabytes on it. So they are collected in two steps, from the ranks of
a data-parallel group to its first, and from those to rank 0:

    boxes.json           the pieces in which each tensor's boxes are listed
    boxes_00017.json     a piece: the boxes written by the data-parallel group of model-parallel rank 17
    .metadata            up to WHOLE_UP_TO ranks also all boxes, in torch's own form, for its tools

A rank that loads reads the pieces of the tensors that it holds, and no others. .metadata, a pickle, is never read.
"""
from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
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

from megatron.checkpoint.folder import BOXES, Written, write_text
from megatron.checkpoint.manifest import Manifest
from megatron.errors import CheckpointError
from megatron.parallel.collectives import gather_objects
from megatron.parallel.topology import Group, Topology
from megatron.untrusted import is_count, is_file_name

WHOLE_UP_TO = 4096
"""Ranks of the largest job that writes .metadata: about 10 boxes per rank, 5 MB and a second of rank 0's time."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip

_AROUND = 1 << 16  # bytes: more than torch.save puts around a tensor's numbers

T = TypeVar("T")
Box = tuple[tuple[int, ...], tuple[int, ...], str, int, int, str]
"""Global offset, sizes; file, first byte and number of bytes in it; digest of these bytes."""
Stored = dict[str, Any]
"""A tensor by name: {"shape": [...], "dtype": "float32", "boxes": [Box, ...]}; plain values, ready for JSON."""
Totals = dict[str, tuple[tuple[int, ...], int]]
"""Shape and number of stored elements of a tensor, by name."""


def gather(value: T, group: Group) -> list[T]:
    """The values of all ranks of a group, on its first rank; empty on the others. All ranks call it."""
    return gather_objects(value, group, everywhere=False)


def merged(parts: Iterable[Mapping[str, Stored]]) -> dict[str, Stored]:
    """The boxes of several ranks, tensor by tensor."""
    found: dict[str, Stored] = {}
    for part in parts:
        for name, stored in part.items():
            if name in found:
                found[name]["boxes"] += stored["boxes"]
            else:
                found[name] = {**stored, "boxes": list(stored["boxes"])}
    return found


def totals(stored: Mapping[str, Stored]) -> Totals:
    """What there is of each tensor, to find out whether that is all of it."""
    return {name: (tuple(s["shape"]), sum(math.prod(box[1]) for box in s["boxes"])) for name, s in stored.items()}


def stored_bytes(stored: Mapping[str, Stored]) -> int:
    """Bytes of the data files that the boxes are in: these follow one another without gaps."""
    return sum(box[4] for s in stored.values() for box in s["boxes"])


def check_complete(parts: Iterable[Totals]) -> None:
    """Raise CheckpointError unless the parts together have as many elements of every tensor as it has."""
    held: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        for name, (shape, count) in part.items():
            shapes[name] = shape
            held[name] = held.get(name, 0) + count
    wrong = [name for name, shape in shapes.items() if held[name] != math.prod(shape)]
    if wrong:
        shown = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise CheckpointError(f"no rank, or more than one, holds parts of {shown}")


def in_pieces(topology: Topology) -> bool:
    """Whether a job of this size lists its boxes in pieces."""
    return topology.world.size > WHOLE_UP_TO


def write_piece(folder: Path, number: int, stored: Mapping[str, Stored]) -> tuple[str, Written]:
    """Write the boxes of one data-parallel group; name of the file, its bytes and digest."""
    name = piece_name(number)
    return name, write_text(folder / name, json.dumps(stored, separators=(",", ":")) + "\n")


def write_index(folder: Path, parts: list[Totals]) -> tuple[str, Written]:
    """Write which pieces list each tensor; `parts` is what each of them holds, in order of their numbers."""
    pieces: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        for name in part:
            pieces.setdefault(name, []).append(number)
    return BOXES, write_text(folder / BOXES, json.dumps({"pieces": pieces}, separators=(",", ":")) + "\n")


def write_whole(folder: Path, stored: Mapping[str, Stored]) -> None:
    """All boxes in torch's form, by torch's own writer."""
    metadata = to_metadata(stored)
    results = [WriteResult(index, info.length, info) for index, info in metadata.storage_data.items()]
    dcp.FileSystemWriter(folder).finish(metadata, [results])


def read_index(manifest: Manifest) -> dict[str, list[int]]:
    """The pieces that list each tensor of a checkpoint, by name. Raises CheckpointError."""
    listed = manifest.read_json(BOXES).get("pieces")
    if not isinstance(listed, dict) or not all(isinstance(n, list) and all(map(is_count, n)) for n in listed.values()):
        raise _damaged(manifest, BOXES)
    return listed


def read_stored(manifest: Manifest, names: Iterable[str] | None = None) -> dict[str, Stored]:
    """Find the tensors `names` (None: all), as far as the checkpoint has them. Raises CheckpointError."""
    listed = read_index(manifest)
    wanted = set(listed if names is None else names)
    parts = []
    for number in sorted({number for name in wanted for number in listed.get(name, ())}):
        piece = manifest.read_json(piece_name(number))
        try:
            parts.append({name: _checked(piece[name]) for name in wanted if name in piece})
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(manifest, piece_name(number)) from error
    stored = merged(parts)
    if any((s["shape"], s["dtype"]) != (stored[n]["shape"], stored[n]["dtype"]) for p in parts for n, s in p.items()):
        raise _damaged(manifest, BOXES)
    return stored


def _checked(stored: Any) -> Stored:
    """A tensor's entry as JSON gave it, with tuples where `Stored` has them; raises where it is none."""
    shape, dtype, boxes = tuple(stored["shape"]), stored["dtype"], []
    size = _DTYPES[dtype].itemsize
    if not all(map(is_count, shape)):
        raise ValueError("it has no shape")
    for offset, sizes, file, start, length, value in stored["boxes"]:
        if not all(map(is_count, (*offset, *sizes, start, length))) or not len(shape) == len(offset) == len(sizes):
            raise ValueError("a box is no place in its tensor")
        if not is_file_name(file) or not isinstance(value, str):
            raise ValueError("a box is in no file")
        if math.prod(sizes) > math.prod(shape) or not 0 <= length - math.prod(sizes) * size <= _AROUND:
            raise ValueError("a box has more or fewer bytes than numbers")
        boxes.append((tuple(offset), tuple(sizes), file, start, length, value))
    return {"shape": shape, "dtype": dtype, "boxes": boxes}


def _damaged(manifest: Manifest, name: str) -> CheckpointError:
    return CheckpointError(f"{manifest.folder / name} is no list of boxes: load another checkpoint")


def to_metadata(stored: Mapping[str, Stored]) -> Metadata:
    """torch's form. Boxes of the same place and size are one object: half of the memory, and of a pickle's bytes."""
    tensors: dict[str, Any] = {}
    files: dict[MetadataIndex, _StorageInfo] = {}
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], ChunkStorageMetadata] = {}
    for name, s in stored.items():
        dtype = getattr(torch, s["dtype"])
        tensor = TensorStorageMetadata(TensorProperties(dtype), torch.Size(s["shape"]), [])
        tensors[name] = tensor
        for offset, sizes, file, start, length, _ in s["boxes"]:
            key = (tuple(offset), tuple(sizes))
            chunk = chunks.get(key)
            if chunk is None:
                chunk = chunks[key] = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
            files[MetadataIndex(name, offset, len(tensor.chunks))] = _StorageInfo(file, start, length)
            tensor.chunks.append(chunk)
    return Metadata(tensors, storage_data=files)


def piece_name(number: int) -> str:
    """The file of a piece.

    >>> piece_name(17)
    'boxes_00017.json'
    """
    return f"boxes_{number:05d}.json"
