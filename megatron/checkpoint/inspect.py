"""What is in a checkpoint, in one process: no process group, no GPU, and never more of it in memory than one tensor."""
from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.boxes import Stored, read_stored
from megatron.checkpoint.find import Checkpoint, find, iteration_of, open_checkpoint, required
from megatron.checkpoint.fit import incomplete, named
from megatron.checkpoint.folder import BOXES, CONFIG, MANIFEST, PASSPORT, STATE
from megatron.checkpoint.reader import read_boxes
from megatron.checkpoint.tensors import MASTER
from megatron.errors import CheckpointError

PART = 1 << 24  # elements that are looked at together, in float64

Count = Callable[[int], None]


def no_count(size_bytes: int) -> None:
    """Nobody wants to know how far it is."""


@dataclass(frozen=True)
class Contents:
    """A checkpoint without the values of its tensors.

    stored     the tensors by name ("master.NAME", "exp_avg.NAME"): shape, dtype, boxes
    files      bytes of all files in the folder
    passport   what wrote it; empty where nothing is known
    """

    checkpoint: Checkpoint
    stored: dict[str, Stored] = field(repr=False)
    files: dict[str, int]
    passport: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def parameters(self) -> dict[str, tuple[str, ...]]:
        """The kinds of tensors that there are of each parameter."""
        found: dict[str, tuple[str, ...]] = {}
        for name in self.stored:
            kind, _, parameter = name.partition(".")
            found[parameter] = (*found.get(parameter, ()), kind)
        return {name: tuple(sorted(kinds, key=lambda kind: (kind != MASTER, kind))) for name, kinds in found.items()}

    @property
    def weights(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(s["shape"]) for name, s in self.stored.items() if name.startswith(f"{MASTER}."))

    @property
    def layout(self) -> dict[str, Any]:
        """Of the job that wrote it: as the passport says, or the configuration."""
        layout = self.passport.get("layout")
        if isinstance(layout, dict):
            return layout
        parallel = self.checkpoint.config.get("parallel", {})
        named = {"tensor": "tensor_model_parallel_size", "pipeline": "pipeline_model_parallel_size",
                 "data": "data_parallel_size", "sequence_parallel": "sequence_parallel"}  # fmt: skip
        return {short: parallel[name] for short, name in named.items() if name in parallel}


@dataclass(frozen=True)
class Norm:
    """Of the finite elements of a tensor, in float64: Euclidean norm and largest absolute value; the others' number."""

    norm: float
    largest: float
    not_finite: int


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, be it damaged, and not a folder of checkpoints."""
    names = (STATE, CONFIG, MANIFEST, BOXES)
    return iteration_of(path) is not None or any((path / name).is_file() for name in names)


def locate(path: Path, tag: str | None = None) -> Path:
    """The checkpoint that a path means: itself, or the newest good one in it, or the one that `tag` names there.

    Raises CheckpointError.
    """
    return path if tag is None and is_checkpoint(path) else required(path, find(path, tag))


def contents(folder: Path) -> Contents:
    """Read the small files of a checkpoint. Raises CheckpointError, naming the file, for damage."""
    checkpoint = open_checkpoint(folder)
    stored = read_stored(checkpoint.manifest)
    if lacking := incomplete(stored):
        raise CheckpointError(f"parts are missing in {folder} of {named(lacking)}")
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    passport: dict[str, Any] = {}
    if PASSPORT in checkpoint.manifest.files:
        passport = checkpoint.manifest.read_json(PASSPORT)
    return Contents(checkpoint, dict(sorted(stored.items())), files, passport)


def matching(found: Contents, pattern: str | None) -> list[str]:
    """Names of tensors, or of the parameters in them, that a shell pattern matches; all where there is none."""
    return [
        name for name in found.stored
        if pattern is None or fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.partition(".")[2], pattern)
    ]  # fmt: skip


def norms(found: Contents, names: list[str], count: Count = no_count) -> Iterator[tuple[str, Norm]]:
    """The norm of each tensor, box by box. `count` hears how many bytes were read.

    Raises CheckpointError naming the file that is damaged.
    """
    for name in names:
        squares, largest, bad = 0.0, 0.0, 0
        wanted = [(name, box) for box in found.stored[name]["boxes"]]
        for _, box, values in read_boxes(found.folder, wanted, found.stored):
            for part in values.reshape(-1).split(PART):
                exact = part.double()
                finite = exact[exact.isfinite()]
                bad += exact.numel() - finite.numel()
                if finite.numel():
                    squares += float(torch.dot(finite, finite))
                    largest = max(largest, float(finite.abs().max()))
            count(box[4])
        yield name, Norm(math.sqrt(squares), largest, bad)
