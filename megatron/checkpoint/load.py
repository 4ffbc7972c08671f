"""Loading a checkpoint, on the layout that wrote it or on any other."""
from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron.checkpoint.boxes import read_boxes
from megatron.checkpoint.folder import (
    CONFIG,
    PIECES,
    STATE,
    WHOLE,
    find_folder,
    folder_name,
    latest_iteration,
    read_json,
)
from megatron.checkpoint.planner import Shards, ShardsLoadPlanner, check_tensors
from megatron.checkpoint.settings import check_architecture
from megatron.checkpoint.tensors import clear_padding, parameters_of, tensors_to_load, weights_to_load
from megatron.checkpoint.together import decided_by_first, together
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology

__all__ = ["LoadedState", "find_folder", "folder_name", "latest_iteration", "load", "load_weights", "read_config"]

_NAMED = 3  # so many damaged files are listed


@dataclass(frozen=True)
class LoadedState:
    """Where training continues.

    iteration   iterations done; 0 when fine-tuning
    state       what the caller gave to `save`; empty when fine-tuning
    optimizer   whether the optimizer's state was loaded
    folder      what was loaded
    """

    iteration: int
    state: dict[str, Any] = field(default_factory=dict)
    optimizer: bool = True
    folder: Path | None = None


def load(directory: str | os.PathLike[str], engine: Engine, topology: Topology, config: Any) -> LoadedState:
    """Load weights and optimizer from DIRECTORY into an engine of any layout, ZeRO stage and precision.

    All ranks call it.

    config   .checkpoint.load_tag names a checkpoint instead of the last; .checkpoint.no_load_optim and .finetune leave
             the optimizer as it is; .model is compared with the checkpoint's

    Raises CheckpointError, on every rank, when there is none, when it does not fit, or when it cannot be read. After an
    error while reading, the engine's weights are undefined.
    """
    settings = config.checkpoint
    folder = decided_by_first(topology, lambda: find_folder(directory, settings.load_tag))
    what = f"loading checkpoint {folder}"
    optimizer = not (settings.no_load_optim or settings.finetune)
    with together(topology, what):
        contents = _read_state(folder)
        check_architecture(read_json(folder / CONFIG), config, str(folder))
        if optimizer and not contents["optimizer"]:
            raise CheckpointError(
                f"{folder} was saved without the optimizer's state: use --no-load-optim or --finetune"
            )
        tensors = tensors_to_load(engine, optimizer)
        metadata = read_boxes(folder, tensors)
        check_tensors(tensors, metadata, str(folder))
    with together(topology, what):
        clear_padding(engine, optimizer)
        _read(tensors, folder, metadata)
        if optimizer:
            engine.load_scalars(contents["engine"])
    engine.update_working_weights()
    if settings.finetune:
        return LoadedState(0, {}, False, folder)
    return LoadedState(int(contents["iteration"]), contents["state"], optimizer, folder)


def load_weights(
    directory: str | os.PathLike[str], chunks: torch.nn.Module, topology: Topology, tag: str | int | None = None
) -> LoadedState:
    """Load only the weights, into parameters of any dtype, without an Engine: to evaluate or to generate text.

    chunks   the model of this rank; its parameters carry a Sharding each
    tag      an iteration or the name of a folder instead of the last checkpoint

    All ranks of the topology call it. Raises CheckpointError as `load` does.
    """
    folder = decided_by_first(topology, lambda: find_folder(directory, tag))
    what = f"loading weights from {folder}"
    parameters = parameters_of(chunks)
    with together(topology, what):
        contents = _read_state(folder)
        tensors = weights_to_load(parameters)
        metadata = read_boxes(folder, tensors)
        check_tensors(tensors, metadata, str(folder))
    with together(topology, what):
        for p in parameters:
            if tuple(p.shape) != sharding_of(p).extent:
                p.detach().zero_()
        _read(tensors, folder, metadata)
    return LoadedState(int(contents["iteration"]), contents["state"], False, folder)


def read_config(directory: str | os.PathLike[str], tag: str | int | None = None) -> dict[str, Any]:
    """The configuration, section by section, with which a checkpoint was written. Raises CheckpointError."""
    return read_json(find_folder(directory, tag) / CONFIG)


def _read_state(folder: Path) -> dict[str, Any]:
    contents = read_json(folder / STATE)
    if contents.get("format") not in (WHOLE, PIECES):
        raise CheckpointError(
            f"{folder / STATE} is of format {contents.get('format')!r}, this program reads {WHOLE} and {PIECES}: "
            f"use the version that wrote it"
        )
    return contents


class _Reader(dcp.FileSystemReader):
    """torch's reader, with metadata that were read already."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


def _read(tensors: Mapping[str, Shards], folder: Path, metadata: Metadata) -> None:
    """Every rank reads for itself what it needs; nothing is communicated, so that an error of one is its own."""
    reader = _Reader(folder, metadata)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that ranks do not confer, which is what is meant
            dcp.load(dict(tensors), storage_reader=reader, planner=ShardsLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        damage = _damaged_files(folder, metadata)
        # Without conferring, torch calls every rank 0.
        reasons = damage or [f"{type(e[0]).__name__}: {e[0]}" for e in error.failures.values()]
        raise CheckpointError(f"{'; '.join(reasons)}. Load another checkpoint with --load-tag") from error


def _damaged_files(folder: Path, metadata: Metadata) -> list[str]:
    """The files of a checkpoint that are missing or shorter than what is said to be in them; the first few."""
    ends: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    found = []
    for name, end in sorted(ends.items()):
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            found.append(f"{path} cannot be read ({error.strerror})")
            continue
        if size < end:
            found.append(f"{path} has {size} bytes where {end} were written")
    return found[:_NAMED]
