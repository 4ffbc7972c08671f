"""Saving a checkpoint."""
from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StoragePrefix

from megatron.checkpoint.boxes import (
    Stored,
    check_complete,
    gather,
    in_pieces,
    merged,
    totals,
    write_index,
    write_piece,
    write_whole,
)
from megatron.checkpoint.folder import (
    CONFIG,
    PIECES,
    STATE,
    TRACKER,
    WHOLE,
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
            contents = {"format": PIECES if in_pieces(topology) else WHOLE, "iteration": iteration, "state": state}
            contents |= {"engine": engine.scalars(), "optimizer": optimizer}
            texts = {
                STATE: to_json(contents, "the state of the training loop"),
                CONFIG: to_json(plain(config), "the configuration"),
            }
            tensors = tensors_to_save(engine, topology, optimizer)
            if topology.world.is_first:
                start_folder(folder)
        with together(topology, what):
            mine = _write(tensors, temporary, topology.rank)
        stored = merged(gather(mine, topology.data))
        if in_pieces(topology):
            with together(topology, what):
                if topology.data.is_first:
                    write_piece(temporary, topology.model.rank, stored)
        everywhere = gather(totals(stored), topology.model) if topology.data.is_first else []
        whole = gather(stored, topology.model) if topology.data.is_first and not in_pieces(topology) else []
        with together(topology, what):
            if topology.world.is_first:
                check_complete(everywhere)
                if in_pieces(topology):
                    write_index(temporary, everywhere)
                else:
                    write_whole(temporary, merged(whole))
                for name, text in texts.items():
                    write_text(temporary / name, text)
                finish_folder(temporary, folder)
                write_text(folder.parent / TRACKER, f"{iteration}\n")
    except CheckpointError:
        if topology.world.is_first:  # the disk may be full of it
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def _write(tensors: Mapping[str, Shards], folder: Path, rank: int) -> dict[str, Stored]:
    """Write this rank's file; the boxes that are now in it. Nothing is communicated."""
    writer, planner = dcp.FileSystemWriter(folder), ShardsSavePlanner()
    planner.set_up_planner(tensors)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # What torch's coordinator would say to this rank.
    plan = dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))
    found: dict[str, Stored] = {}
    for result in writer.write_data(plan, planner).wait():
        name, offset, info = result.index.fqn, tuple(result.index.offset or ()), result.storage_data
        view = tensors[name].pieces[offset]
        dtype = str(view.dtype).removeprefix("torch.")
        stored = found.setdefault(name, {"shape": tensors[name].shape, "dtype": dtype, "boxes": []})
        stored["boxes"].append((offset, tuple(view.shape), info.relative_path, info.offset, info.length))
    return found
