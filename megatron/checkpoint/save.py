"""Saving a checkpoint."""
from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from megatron.checkpoint.folder import (
    CONFIG,
    FORMAT,
    STATE,
    TRACKER,
    finish_folder,
    folder_name,
    start_folder,
    to_json,
    write_text,
)
from megatron.checkpoint.planner import Shards, ShardsSavePlanner
from megatron.checkpoint.settings import plain
from megatron.checkpoint.tensors import tensors_to_save
from megatron.checkpoint.together import together
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.topology import Topology


def save(
    directory: str | os.PathLike[str],
    iteration: int,
    engine: Engine,
    topology: Topology,
    config: Any,
    state: dict[str, Any],
) -> Path:
    """Write DIRECTORY/iter_NNNNNNN and make it the last checkpoint; returns its path. All ranks call it.

    state    the caller's own counters, JSON-ready and the same on every rank; `load` gives them back
    config   .checkpoint.no_save_optim leaves the optimizer's state out

    Raises CheckpointError on every rank when any rank fails; then no checkpoint of this iteration has appeared and
    the last one is still the last one.
    """
    folder = Path(directory).absolute() / folder_name(iteration)
    temporary = folder.with_name(folder.name + ".tmp")
    optimizer = not config.checkpoint.no_save_optim
    what = f"saving checkpoint {folder}"
    try:
        with together(topology, what):
            contents = {"format": FORMAT, "iteration": iteration, "state": state}
            contents |= {"engine": engine.scalars(), "optimizer": optimizer}
            texts = {
                STATE: to_json(contents, "the state of the training loop"),
                CONFIG: to_json(plain(config), "the configuration"),
            }
            tensors = tensors_to_save(engine, topology, optimizer)
            if topology.world.is_first:
                start_folder(folder)
        with together(topology, what):
            _write(tensors, temporary, no_dist=not dist.is_initialized() or topology.world.size == 1)
        with together(topology, what):
            if topology.world.is_first:
                for name, text in texts.items():
                    write_text(temporary / name, text)
                finish_folder(temporary, folder)
                write_text(folder.parent / TRACKER, f"{iteration}\n")
    except CheckpointError:
        if topology.world.is_first:  # the disk may be full of it
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def _write(tensors: dict[str, Shards], folder: Path, *, no_dist: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process: it is meant
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), planner=ShardsSavePlanner(), no_dist=no_dist)
