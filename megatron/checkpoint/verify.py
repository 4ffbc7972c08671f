"""Whether every byte of a checkpoint is what was written, and whether it is all of one and nothing more."""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.checkpoint.boxes import Stored, read_stored
from megatron.checkpoint.find import folders, open_checkpoint, read_tracker
from megatron.checkpoint.fit import named
from megatron.checkpoint.folder import MANIFEST, folder_name
from megatron.checkpoint.inspect import Count, no_count
from megatron.checkpoint.manifest import Manifest, read_manifest
from megatron.checkpoint.reader import overlap, read_boxes
from megatron.errors import CheckpointError

_PER_FILE = 3  # so many damaged boxes of a file are told one by one


def verify(folder: Path, count: Count = no_count) -> list[str]:
    """What is wrong with a checkpoint, each problem with the file or tensor it is in; empty where it is sound.

    Everything is looked at, also after a problem was found: the manifest, the small files, every box of the data files,
    bytes and files that belong to nothing, and that the boxes make up each tensor exactly once.

    count   hears how many bytes of the data files were read
    """
    problems: list[str] = []
    try:
        manifest = read_manifest(folder)
        problems += _small_files(manifest)
        if not problems:
            open_checkpoint(folder)
        stored = read_stored(manifest)
    except (CheckpointError, OSError) as error:
        return list(dict.fromkeys([*problems, str(error)]))
    problems += _data_files(folder, stored, count)
    problems += _superfluous(folder, stored, manifest)
    problems += incomplete_or_double(stored)
    return problems


def verify_tracker(directory: Path) -> list[str]:
    """What is wrong with the tracker file of a folder of checkpoints."""
    tracker, there = read_tracker(directory), [folder.name for folder in folders(directory)]
    if tracker.problem is not None:
        return [f"{tracker.path} {tracker.problem}"]
    if tracker.iteration is None:
        return [f"{tracker.path} is missing"] if there else []
    if folder_name(tracker.iteration) not in there:
        return [f"{tracker.path} names iteration {tracker.iteration}, whose folder is missing"]
    return []


def incomplete_or_double(stored: Mapping[str, Stored]) -> Iterator[str]:
    """Tensors whose boxes leave elements out, meet, or lie outside of the tensor."""
    for name, entry in stored.items():
        shape, boxes = tuple(entry["shape"]), entry["boxes"]
        held = sum(math.prod(box[1]) for box in boxes)
        if any(o < 0 or o + n > d for box in boxes for o, n, d in zip(box[0], box[1], shape, strict=True)):
            yield f"{name} has boxes outside of its shape {shape}"
        elif _meet([(box[0], box[1]) for box in boxes]):
            yield f"{name} has elements that are stored twice"
        elif held != math.prod(shape):
            yield f"{name} has {held} of its {math.prod(shape)} elements"


def _meet(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether two of the boxes have elements in common: a sweep along the first dimension."""
    running: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offset, sizes in sorted(boxes):
        running = [(o, n) for o, n in running if o[0] + n[0] > offset[0]]
        if any(overlap(offset, sizes, o, n) is not None for o, n in running):
            return True
        running.append((offset, sizes))
    return False


def _small_files(manifest: Manifest) -> list[str]:
    problems = []
    for name in manifest.files:
        try:
            manifest.read_bytes(name)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _data_files(folder: Path, stored: Mapping[str, Stored], count: Count) -> Iterator[str]:
    """Damaged boxes, and bytes of the data files that no box accounts for."""
    files: dict[str, list[tuple[int, int, str, int]]] = {}
    for name, entry in stored.items():
        for number, box in enumerate(entry["boxes"]):
            files.setdefault(box[2], []).append((box[3], box[4], name, number))
    for file in sorted(files):
        path, at, bad, damaged = folder / file, 0, list[str](), 0
        if not path.is_file():
            yield f"{path} is missing"
            continue
        for start, length, name, number in sorted(files[file]):
            if start > at:
                bad.append(f"{path} has bytes {at} to {start} that belong to no tensor")
            elif start < at:
                bad.append(f"{path} has {name} at byte {start}, before the end of another tensor")
            at = max(at, start + length)
            try:
                for _ in read_boxes(folder, [(name, stored[name]["boxes"][number])], stored):
                    pass
            except CheckpointError as error:
                damaged += 1
                if damaged <= _PER_FILE:
                    bad.append(str(error))
            count(length)
        if damaged > _PER_FILE:
            bad.append(f"{path} has {damaged} damaged boxes of {len(files[file])}")
        size = path.stat().st_size
        if size > at:
            bad.append(f"{path} has bytes {at} to {size} that belong to no tensor")
        yield from bad


def _superfluous(folder: Path, stored: Mapping[str, Stored], manifest: Manifest) -> Iterator[str]:
    known = {box[2] for entry in stored.values() for box in entry["boxes"]} | {MANIFEST} | manifest.files.keys()
    extra = sorted(path.name for path in folder.iterdir() if path.name not in known)
    if extra:
        yield f"{folder} has files that belong to no checkpoint: {named(extra)}"
