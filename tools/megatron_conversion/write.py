"""Writing of checkpoints from whole tensors, by processes without a model."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.find import next_generation
from megatron.checkpoint.folder import commit_folder, folder_name, start_folder
from megatron.checkpoint.save import small_files, write_part, write_small_files
from megatron.checkpoint.shards import Stored, merged
from megatron.checkpoint.together import decided_by_first, together
from megatron.checkpoint.writer import ShardWriter
from megatron.config import Config
from megatron.engine.optimizer import Index
from megatron.errors import CheckpointError
from megatron.parallel.collectives import gather_objects
from megatron.parallel.topology import Layout, Topology

SHARD_BYTES = 64 << 20
"""Size above which a tensor is cut between rows: a loading rank reads whole shards, and may need
little of a tensor.
"""


def write_offline(
    directory: str | os.PathLike[str],
    iteration: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    config: Config,
    state: Mapping[str, Any],
    scalars: Mapping[str, Any],
    optimizer: bool,
    provenance: Mapping[str, Any],
    topology: Topology | None = None,
) -> Path:
    """Write DIRECTORY/iter_NNNNNNN from whole tensors, and return its path.

    It becomes the last checkpoint. One process, or several together, write it without a model,
    tensor by tensor, in bounded memory.

    tensors      (name, whole tensor in host memory), with names as in tensors.py. They are taken
                 one at a time. Each process has others
    state        counters of the training loop
    scalars      those of the engine: optimizer_step, skipped_steps, loss_scale
    optimizer    whether its state is among the tensors
    provenance   provenance of the checkpoint, JSON-ready
    topology     by default that of a single process

    Raises CheckpointError, on every process, when it cannot be written or `tensors` raises an
    error; then no checkpoint has appeared.
    """
    topology = topology or Topology.from_layout(Layout(), 0)
    folder = Path(directory).absolute() / folder_name(iteration)
    files = small_files(iteration, config, state, scalars, optimizer, provenance)
    mine: dict[str, Stored] = {}
    temporary = decided_by_first(topology, lambda: start_folder(folder))
    try:
        with together(topology, f"writing checkpoint {folder}"):
            number = topology.rank
            for name, tensor in tensors:  # enumerate would keep one until it has the next
                mine |= _write_whole(temporary, number, name, tensor)
                number += topology.world.size
                del tensor
        stored = merged(gather_objects(mine, topology.world, everywhere=False))

        def complete() -> None:
            try:
                generation = next_generation(folder.parent)
                part = write_part(temporary, 0, stored, True)
                write_small_files(temporary, [part], files, True, generation)
                commit_folder(temporary, folder, iteration, generation)
            except OSError as error:
                raise CheckpointError(f"writing checkpoint {folder} failed: {error}") from error

        decided_by_first(topology, complete)
    finally:
        if topology.world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)  # where it was not committed
    return folder


def _write_whole(folder: Path, number: int, name: str, tensor: torch.Tensor) -> dict[str, Stored]:
    """Write a tensor into a file of its own; return its shards."""
    with ShardWriter(folder, number) as writer:
        for offset, view in _rows(tensor):
            writer.add(name, tuple(tensor.shape), offset, view)
        return writer.finish()


def _rows(tensor: torch.Tensor) -> Iterator[tuple[Index, torch.Tensor]]:
    """Yield (offset, view) of shards of a tensor, cut along its first dimension."""
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    rows = max(1, SHARD_BYTES // max(row_bytes, 1))
    for number, view in enumerate(tensor.split(rows)):
        yield (number * rows, *(0 for _ in tensor.shape[1:])), view
