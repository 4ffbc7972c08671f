"""Contents, norms of tensors and verification of a checkpoint, and comparison of two checkpoints.

At most one tensor of each checkpoint is in memory at a time.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.files import (
    CONFIG,
    MANIFEST,
    PROVENANCE,
    SHARD_INDEX,
    STATE,
    Manifest,
    read_manifest,
)
from megatron.checkpoint.find import (
    Checkpoint,
    find,
    folders,
    iteration_of,
    open_checkpoint,
    read_tracker,
    required,
)
from megatron.checkpoint.folder import folder_name
from megatron.checkpoint.reader import read_shards
from megatron.checkpoint.shards import Shard, Stored, incomplete, named, read_stored
from megatron.checkpoint.tensors import MASTER
from megatron.errors import CheckpointError

CHUNK_ELEMENTS = 1 << 24  # elements that are processed together, in float64
_PER_FILE = 3  # damaged shards per file that are reported individually

Count = Callable[[int], object]
"""Called with the number of bytes that were read since the last call."""
Change = tuple[str, Any, Any]
"""Name, value in the first checkpoint, value in the second; ABSENT if missing."""
ABSENT = "(absent)"


@dataclass(frozen=True)
class Contents:
    """Contents of a checkpoint, without the values of its tensors.

    checkpoint   its folder, manifest, state and configuration
    stored       the tensors' entries by name ("master.NAME", "exp_avg.NAME", ...), sorted
    files        {name: size in bytes} of the files in the folder
    provenance   provenance of the checkpoint; empty if unknown
    """

    checkpoint: Checkpoint
    stored: dict[str, Stored] = field(repr=False)
    files: dict[str, int]
    provenance: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def parameters(self) -> dict[str, tuple[str, ...]]:
        """Kinds of stored tensors of each parameter."""
        by_parameter: dict[str, tuple[str, ...]] = {}
        for name in self.stored:
            kind, _, parameter = name.partition(".")
            by_parameter[parameter] = (*by_parameter.get(parameter, ()), kind)
        return {
            name: tuple(sorted(kinds, key=lambda kind: (kind != MASTER, kind)))
            for name, kinds in by_parameter.items()
        }

    @property
    def weights(self) -> int:
        """Number of elements of all parameters."""
        return sum(
            math.prod(s["shape"])
            for name, s in self.stored.items()
            if name.startswith(f"{MASTER}.")
        )

    @property
    def layout(self) -> dict[str, Any]:
        """Layout of the job that wrote it: from the provenance, or else from the configuration."""
        parallel = self.checkpoint.config.get("parallel", {})
        fields = {
            "tensor": "tensor_model_parallel_size",
            "pipeline": "pipeline_model_parallel_size",
            "data": "data_parallel_size",
            "sequence_parallel": "sequence_parallel",
        }
        configured = {short: parallel[name] for short, name in fields.items() if name in parallel}
        layout: dict[str, Any] = self.provenance.get("layout") or configured
        return layout


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a (possibly damaged) checkpoint, not a folder of checkpoints."""
    return iteration_of(path) is not None or any(
        (path / name).is_file() for name in (STATE, CONFIG, MANIFEST, SHARD_INDEX)
    )


def locate(path: Path, tag: str | None = None) -> Path:
    """Return the checkpoint to read.

    It is the one that `tag` names in the folder `path`. Without `tag` it is `path` itself, if that
    is a checkpoint, otherwise the newest valid one in `path`. Raises CheckpointError if there is
    none, or if the one that `tag` names is damaged.
    """
    return path if tag is None and is_checkpoint(path) else required(path, find(path, tag))


def contents(folder: Path) -> Contents:
    """Read the small files of a checkpoint. Raises CheckpointError, naming a damaged file."""
    checkpoint = open_checkpoint(folder)
    manifest = checkpoint.manifest
    stored = read_stored(manifest)
    if problems := incomplete(stored):
        raise CheckpointError(f"the shard lists of {folder} are wrong: {named(problems)}")
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    provenance = manifest.read_json(PROVENANCE) if PROVENANCE in manifest.files else {}
    return Contents(checkpoint, dict(sorted(stored.items())), files, provenance)


def matching(contents: Contents, pattern: str | None) -> list[str]:
    """Return the tensors whose name, or parameter's name, matches a shell pattern; None: all."""
    return [
        name
        for name in contents.stored
        if pattern is None
        or any(fnmatch.fnmatchcase(text, pattern) for text in (name, name.partition(".")[2]))
    ]


def read_whole(contents: Contents, name: str) -> torch.Tensor:
    """Return a full tensor. Raises CheckpointError if a shard of it is damaged."""
    entry = contents.stored[name]
    tensor = torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]))
    shards = [(name, shard) for shard in entry["boxes"]]
    for _, shard, values in read_shards(contents.folder, shards, contents.stored):
        view = tensor
        for dim, (start, size) in enumerate(zip(shard.offset, shard.sizes, strict=True)):
            view = view.narrow(dim, start, size)
        view.copy_(values)
    return tensor


# --- norms


@dataclass(frozen=True)
class TensorNorm:
    """Euclidean norm and largest absolute value of a tensor's finite elements, in float64.

    not_finite   number of elements that are infinite or NaN
    """

    norm: float
    largest: float
    not_finite: int


def norms(
    contents: Contents, names: list[str], count: Count = bool
) -> Iterator[tuple[str, TensorNorm]]:
    """Yield (name, norm) of each tensor. Raises CheckpointError, naming a damaged file."""
    for name in names:
        squares = 0.0
        largest = 0.0
        bad = 0
        shards = [(name, shard) for shard in contents.stored[name]["boxes"]]
        for _, shard, values in read_shards(contents.folder, shards, contents.stored):
            for chunk in values.reshape(-1).split(CHUNK_ELEMENTS):
                exact = chunk.double()
                finite = exact[exact.isfinite()]
                bad += exact.numel() - finite.numel()
                if finite.numel():
                    squares += float(torch.dot(finite, finite))
                    largest = max(largest, float(finite.abs().max()))
            count(shard.length)
        yield name, TensorNorm(math.sqrt(squares), largest, bad)


# --- verification


def verify(folder: Path, count: Count = bool) -> list[str]:
    """List the problems of a checkpoint, each with the file or the tensor.

    The manifest and the small files are checked, every shard of the data files, stray bytes and
    files, and that the shards cover each tensor exactly once. If the small files lack something
    that every checkpoint has, or if the shard lists cannot be read, the data files are not checked.
    """
    problems: list[str] = []
    try:
        manifest = read_manifest(folder)
        for name in manifest.files:
            try:
                manifest.read_bytes(name)
            except CheckpointError as error:
                problems.append(str(error))
        if not problems:
            open_checkpoint(folder)
        stored = read_stored(manifest)
    except (CheckpointError, OSError) as error:
        return list(dict.fromkeys([*problems, str(error)]))
    problems += _data_files(folder, stored, manifest, count)
    return problems + incomplete(stored)


def _data_files(
    folder: Path, stored: Mapping[str, Stored], manifest: Manifest, count: Count
) -> Iterator[str]:
    """Yield missing data files, damaged shards, stray bytes in data files, and stray files."""
    files: dict[str, list[tuple[int, str, Shard]]] = {}
    for name, entry in stored.items():
        for shard in entry["boxes"]:
            files.setdefault(shard.file, []).append((shard.start, name, shard))
    for file in sorted(files):
        path = folder / file
        at = 0
        damaged = 0
        if not path.is_file():
            yield f"{path} is missing"
            continue
        for start, name, shard in sorted(files[file]):
            if start > at:
                yield f"{path} has bytes {at} to {start} that belong to no tensor"
            elif start < at:
                yield f"{path} has {name} at byte {start}, before the end of another tensor"
            at = max(at, start + shard.length)
            try:
                for _ in read_shards(folder, [(name, shard)], stored):
                    pass
            except CheckpointError as error:
                damaged += 1
                if damaged <= _PER_FILE:
                    yield str(error)
            count(shard.length)
        if damaged > _PER_FILE:
            yield f"{path} has {damaged} damaged shards of {len(files[file])}"
        size = path.stat().st_size
        if size > at:
            yield f"{path} has bytes {at} to {size} that belong to no tensor"
    known = {MANIFEST} | files.keys() | manifest.files.keys()
    if extra := sorted(path.name for path in folder.iterdir() if path.name not in known):
        yield f"{folder} has files that do not belong to the checkpoint: {named(extra)}"


def verify_tracker(directory: Path) -> list[str]:
    """List the problems of the tracker file in a folder of checkpoints."""
    tracker = read_tracker(directory)
    names = [folder.name for folder in folders(directory)]
    if tracker.problem is not None:
        return [f"{tracker.path} {tracker.problem}"]
    if tracker.iteration is None:
        return [f"{tracker.path} is missing"] if names else []
    if folder_name(tracker.iteration) not in names:
        return [f"{tracker.path} names iteration {tracker.iteration}, whose folder is missing"]
    return []


# --- comparison


@dataclass(frozen=True)
class TensorDifference:
    """Difference of one tensor between two checkpoints.

    elements     number of elements whose bits differ
    of           number of elements of the tensor
    largest      largest absolute difference; inf if a difference is not finite
    relative     Euclidean norm of the difference over the norm of the first tensor; inf if this
                 norm is 0 or not finite
    """

    elements: int
    of: int
    largest: float
    relative: float


@dataclass(frozen=True)
class Difference:
    """Differences between two checkpoints.

    only_first, only_second    tensors that only the first, or only the second, checkpoint has
    kinds                      tensors that differ in shape or dtype
    tensors                    tensors that differ in values
    equal                      number of bitwise equal tensors
    settings, state            differences in the configuration, and in the state of the run
    """

    only_first: list[str]
    only_second: list[str]
    kinds: list[Change]
    tensors: dict[str, TensorDifference]
    equal: int
    settings: list[Change]
    state: list[Change]

    @property
    def same(self) -> bool:
        """Return whether tensors and state are the same; settings may differ."""
        return not (self.only_first or self.only_second or self.kinds or self.tensors or self.state)


def compare(
    first: Contents, second: Contents, pattern: str | None = None, count: Count = bool
) -> Difference:
    """Compare two checkpoints of any layouts, restricted to tensors that `pattern` matches.

    Raises CheckpointError, naming a damaged file.
    """
    names = matching(first, pattern)
    second_names = set(matching(second, pattern))
    kinds: list[Change] = []
    tensors: dict[str, TensorDifference] = {}
    equal = 0
    for name in names:
        if name not in second_names:
            continue
        left = first.stored[name]
        right = second.stored[name]
        if (left["shape"], left["dtype"]) != (right["shape"], right["dtype"]):
            kinds.append(
                (name, f"{left['shape']} {left['dtype']}", f"{right['shape']} {right['dtype']}")
            )
            continue
        a = read_whole(first, name)
        b = read_whole(second, name)
        count(sum(shard.length for entry in (left, right) for shard in entry["boxes"]))
        difference = tensor_difference(a, b)
        if difference is None:
            equal += 1
        else:
            tensors[name] = difference
    return Difference(
        [name for name in names if name not in second_names],
        sorted(second_names - set(names)),
        kinds,
        tensors,
        equal,
        _changes(first.checkpoint.config, second.checkpoint.config),
        # Older versions stored the time of the save in the state.
        _changes(*({**c.checkpoint.state, "saved_at_s": None} for c in (first, second))),
    )


def tensor_difference(a: torch.Tensor, b: torch.Tensor) -> TensorDifference | None:
    """Return how two tensors of equal shape and dtype differ; None if they are bitwise equal."""
    elements = 0
    largest = 0.0
    squares = 0.0
    norm = 0.0
    for x, y in zip(
        a.reshape(-1).split(CHUNK_ELEMENTS), b.reshape(-1).split(CHUNK_ELEMENTS), strict=True
    ):
        byte_shape = (x.numel(), x.element_size())
        different = (
            x.view(torch.uint8).view(byte_shape) != y.view(torch.uint8).view(byte_shape)
        ).any(dim=1)
        elements += int(different.sum())
        exact = x.double()
        other = y.double()
        norm += float(torch.dot(exact, exact))
        distance = torch.where(different, (exact - other).abs(), 0.0).nan_to_num(nan=math.inf)
        largest = max(largest, float(distance.max())) if distance.numel() else largest
        squares += float(torch.dot(distance, distance))
    if not elements:
        return None
    relative = math.sqrt(squares) / math.sqrt(norm) if norm and math.isfinite(norm) else math.inf
    return TensorDifference(elements, a.numel(), largest, relative)


def _changes(first: Any, second: Any) -> list[Change]:
    """Return the values in which two nested dicts differ, under names joined by dots.

    >>> _changes({"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "y": 3}, "b": 4})
    [('a.y', 2, 3), ('b', '(absent)', 4)]
    """
    first_values = dict(_flat(first))
    second_values = dict(_flat(second))
    return [
        (name, first_values.get(name, ABSENT), second_values.get(name, ABSENT))
        for name in sorted(first_values.keys() | second_values.keys())
        if name not in first_values
        or name not in second_values
        or first_values[name] != second_values[name]
    ]


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
