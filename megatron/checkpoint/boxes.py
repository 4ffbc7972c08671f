"""Which file of a checkpoint holds which box of which tensor: collected from the ranks, written, and read back.

A large job has hundreds of thousands of boxes. Were they all in one place, the rank that plans for everybody and each
rank that reads the plan would spend minutes and gigabytes on it. So they are collected in two steps, from the ranks of
a data-parallel group to its first, and from those to rank 0, and there are two forms:

    .metadata            up to WHOLE_UP_TO ranks: all boxes, in torch's own form, which its tools read
    boxes.json           above: the pieces in which each tensor's boxes are listed
    boxes_00017.json     a piece: the boxes written by the data-parallel group of model-parallel rank 17

A rank that loads reads the pieces of the tensors that it holds, and no others.
"""
from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
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

from megatron.checkpoint.folder import BOXES, METADATA, read_json, write_text
from megatron.errors import CheckpointError
from megatron.parallel.topology import Group, Topology

WHOLE_UP_TO = 4096
"""Ranks of the largest job that writes .metadata: about 10 boxes per rank, 5 MB and a second of rank 0's time."""

T = TypeVar("T")
Box = tuple[tuple[int, ...], tuple[int, ...], str, int, int]
"""Global offset, sizes; file, first byte and number of bytes in it."""
Stored = dict[str, Any]
"""A tensor by name: {"shape": [...], "dtype": "float32", "boxes": [Box, ...]}; plain values, ready for JSON."""
Totals = dict[str, tuple[tuple[int, ...], int]]
"""Shape and number of stored elements of a tensor, by name."""


def gather(value: T, group: Group) -> list[T]:
    """The values of all ranks of a group, on its first rank; empty on the others. All ranks call it."""
    if group.size == 1:
        return [value]
    found: list[Any] = [None] * group.size if group.is_first else []
    dist.gather_object(value, found if group.is_first else None, dst=group.ranks[0], group=group.handle)
    return found


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


def write_piece(folder: Path, number: int, stored: Mapping[str, Stored]) -> None:
    """The boxes of one data-parallel group."""
    write_text(folder / _piece_name(number), json.dumps(stored, separators=(",", ":")) + "\n")


def write_index(folder: Path, parts: list[Totals]) -> None:
    """Which pieces list each tensor; `parts` is what each of them holds, in order of their numbers."""
    pieces: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        for name in part:
            pieces.setdefault(name, []).append(number)
    write_text(folder / BOXES, json.dumps({"pieces": pieces}, separators=(",", ":")) + "\n")


def write_whole(folder: Path, stored: Mapping[str, Stored]) -> None:
    """All boxes in torch's form, by torch's own writer."""
    metadata = to_metadata(stored)
    results = [WriteResult(index, info.length, info) for index, info in metadata.storage_data.items()]
    dcp.FileSystemWriter(folder).finish(metadata, [results])


def read_boxes(folder: Path, names: Iterable[str]) -> Metadata:
    """Where at least the tensors `names` are, as far as the checkpoint has them. Raises CheckpointError."""
    if not (folder / METADATA).is_file():
        return _read_pieces(folder, names)
    try:
        return dcp.FileSystemReader(folder).read_metadata()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"the metadata of {folder} cannot be read ({error}): load another checkpoint") from error


def _read_pieces(folder: Path, names: Iterable[str]) -> Metadata:
    wanted = set(names)
    try:
        listed = read_json(folder / BOXES)["pieces"]
        numbers = sorted({number for name in wanted for number in listed.get(name, ())})
        pieces = [read_json(folder / _piece_name(number)) for number in numbers]
        return to_metadata(merged({name: piece[name] for name in wanted if name in piece} for piece in pieces))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"the list of boxes in {folder} is damaged ({type(error).__name__}: {error}): load another checkpoint"
        ) from error


def to_metadata(stored: Mapping[str, Stored]) -> Metadata:
    """torch's form. Boxes of the same place and size are one object: half of the memory, and of a pickle's bytes."""
    tensors: dict[str, Any] = {}
    files: dict[MetadataIndex, _StorageInfo] = {}
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], ChunkStorageMetadata] = {}
    for name, s in stored.items():
        dtype = getattr(torch, s["dtype"])
        tensor = TensorStorageMetadata(TensorProperties(dtype), torch.Size(s["shape"]), [])
        tensors[name] = tensor
        for offset, sizes, file, start, length in s["boxes"]:
            key = (tuple(offset), tuple(sizes))
            chunk = chunks.get(key)
            if chunk is None:
                chunk = chunks[key] = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
            files[MetadataIndex(name, offset, len(tensor.chunks))] = _StorageInfo(file, start, length)
            tensor.chunks.append(chunk)
    return Metadata(tensors, storage_data=files)


def _piece_name(number: int) -> str:
    return f"boxes_{number:05d}.json"
