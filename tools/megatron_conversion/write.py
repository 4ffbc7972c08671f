"""Writer of checkpoints for processes without a model."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.find import next_generation
from megatron.checkpoint.folder import commit_folder, folder_name, start_folder
from megatron.checkpoint.save import (
    settings_text,
    small_files,
    write_shard_list,
    write_small_files,
)
from megatron.checkpoint.shards import Entries, merged
from megatron.checkpoint.shared_errors import decided_by_first, errors_on_all_ranks
from megatron.checkpoint.writer import ShardWriter
from megatron.config import Config
from megatron.engine.optimizer import Index
from megatron.errors import CheckpointError
from megatron.parallel.collectives import gather_objects
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Topology

SHARD_BYTES = 64 << 20
"""Size above which a tensor is split between rows: a rank that loads a small part of it reads
entire shards.
"""
FILE_BYTES = 2 << 30  # a process begins another file when one has reached this size

TensorShard = tuple[str, tuple[int, ...], Index, torch.Tensor]
"""Shard of a tensor: the tensor's name (megatron/checkpoint/tensors.py) and shape, the shard's
offset in the tensor, and the shard's values in host memory.
"""


def write_offline(
    directory: str | os.PathLike[str],
    iteration: int,
    shards: Iterable[TensorShard],
    *,
    config: Config,
    state: Mapping[str, Any],
    scalars: Mapping[str, Any],
    optimizer: bool,
    provenance: Mapping[str, Any],
    topology: Topology | None = None,
) -> Path:
    """Write the checkpoint DIRECTORY/iter_NNNNNNN, and return its path.

    It becomes the latest one in DIRECTORY, and replaces one of the same iteration. One process or
    several write it without a model, shard by shard, in bounded memory. All of them must call this
    function.

    iteration    number of the checkpoint
    shards       shards that this process writes, consumed one at a time
    config       configuration stored in the checkpoint
    state        counters of the training loop
    scalars      the engine's optimizer_step, skipped_steps and loss_scale
    optimizer    whether the optimizer's state is among the shards
    provenance   provenance of the checkpoint, JSON-ready
    topology     topology of the processes; by default that of a single one

    Raises CheckpointError on every process if the checkpoint cannot be written, or if `shards`
    raises an error on any. No checkpoint has appeared then.
    """
    topology = topology or Topology.from_layout(Layout(), 0)
    folder = Path(directory).absolute() / folder_name(iteration)
    files = small_files(iteration, settings_text(config), state, scalars, optimizer, provenance)
    temporary = decided_by_first(topology, lambda: start_folder(folder))
    try:
        with errors_on_all_ranks(topology, f"writing checkpoint {folder}"):
            written = _write(temporary, topology, iter(shards))
        stored = merged(gather_objects(written, topology.world, everywhere=False))

        def complete() -> None:
            try:
                generation = next_generation(folder.parent)
                group = write_shard_list(temporary, 0, stored, True)
                write_small_files(temporary, [group], files, True, generation)
                commit_folder(temporary, folder, iteration, generation)
            except OSError as error:
                raise CheckpointError(f"writing checkpoint {folder} failed: {error}") from error

        decided_by_first(topology, complete)
    finally:
        if topology.world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)  # if it was not committed
    return folder


def _write(folder: Path, topology: Topology, shards: Iterator[TensorShard]) -> Entries:
    """Write this process's shards into files of its own; return the entries of the shards."""
    written: list[Entries] = []
    for number in itertools.count(topology.rank, topology.world.size):
        with ShardWriter(folder, number) as writer:
            for shard in shards:
                writer.add(*shard)
                del shard  # the variable would keep a tensor while the next one is made
                if writer.bytes >= FILE_BYTES:
                    break
            written.append(writer.finish())
        if not written[-1]:
            break
    return merged(written)


def tensor_shards(name: str, tensor: torch.Tensor) -> Iterator[TensorShard]:
    """Yield the shards of a tensor."""
    for first, rows in rows_of_shards(tuple(tensor.shape)):
        offset = (first, *(0 for _ in tensor.shape[1:]))
        yield name, tuple(tensor.shape), offset, tensor[first : first + rows]


def rows_of_shards(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) of each shard of an fp32 tensor."""
    rows = max(1, SHARD_BYTES // max(math.prod(shape[1:]) * torch.float32.itemsize, 1))
    for first in range(0, shape[0], rows):
        yield first, min(rows, shape[0] - first)
