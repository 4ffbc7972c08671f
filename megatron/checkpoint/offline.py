"""A checkpoint written by one process that has no model: tensor by tensor, in bounded memory."""
from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.boxes import Stored, check_complete, totals, write_index, write_piece, write_whole
from megatron.checkpoint.find import next_generation
from megatron.checkpoint.folder import (
    CONFIG,
    FORMAT,
    METADATA,
    PASSPORT,
    STATE,
    Written,
    commit_folder,
    folder_name,
    start_folder,
    to_json,
    write_text,
)
from megatron.checkpoint.manifest import write_manifest
from megatron.checkpoint.settings import plain
from megatron.checkpoint.writer import BoxWriter
from megatron.engine.fragments import Index
from megatron.errors import CheckpointError

BOX_BYTES = 64 << 20
"""Largest box: who loads reads whole boxes, and on many ranks each needs little of a tensor."""
FILE_BYTES = 16 << 30
"""After so many bytes another file is begun."""


def write_offline(
    directory: str | os.PathLike[str],
    iteration: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    config: Any,
    state: Mapping[str, Any],
    scalars: Mapping[str, Any],
    optimizer: bool,
    passport: Mapping[str, Any],
) -> Path:
    """Write DIRECTORY/iter_NNNNNNN from whole tensors and make it the last checkpoint; returns its path.

    tensors    (name, whole tensor in host memory), as tensors.py names them: master.NAME and the optimizer's. Taken one
               by one: only one need exist at a time
    state      the training loop's counters
    scalars    the engine's: optimizer_step, skipped_steps, loss_scale
    optimizer  whether its state is among the tensors
    passport   where the checkpoint comes from; JSON-ready

    Raises CheckpointError when it cannot be written, and passes on what `tensors` raises; then nothing has appeared.
    """
    folder = Path(directory).absolute() / folder_name(iteration)
    contents = {"format": FORMAT, "iteration": iteration, "state": dict(state), "engine": dict(scalars)}
    texts = {
        STATE: to_json(contents | {"optimizer": optimizer}, "the state of the training loop"),
        CONFIG: to_json(plain(config), "the configuration"),
        PASSPORT: to_json(dict(passport), "the passport"),
    }
    temporary = None
    try:
        temporary = start_folder(folder)
        generation = next_generation(folder.parent)
        _fill(temporary, tensors, texts, generation)
        commit_folder(temporary, folder, iteration, generation)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # the disk may be full of it
        if isinstance(error, OSError):
            raise CheckpointError(f"writing checkpoint {folder} failed: {error}") from error
        raise
    return folder


def _fill(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], texts: Mapping[str, str], generation: int
) -> None:
    """All files of a checkpoint, the manifest last."""
    stored = _write_tensors(folder, tensors)
    held = totals(stored)
    check_complete([held])
    written: dict[str, Written] = dict([write_piece(folder, 0, stored), write_index(folder, [held])])
    write_whole(folder, stored)
    for name, text in texts.items():
        written[name] = write_text(folder / name, text)
    write_manifest(folder, [METADATA, *written], written, generation)


def _write_tensors(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Stored]:
    """Write tensors one after another, into as many files as they need; their boxes."""
    found: dict[str, Stored] = {}
    iterator, number, more = iter(tensors), 0, True
    while more:
        size, more = 0, False
        with BoxWriter(folder, number) as writer:
            for name, tensor in iterator:
                for offset, view in _boxes(tensor):
                    writer.add(name, tuple(tensor.shape), offset, view)
                size += tensor.numel() * tensor.element_size()
                if size >= FILE_BYTES:
                    more = True
                    break
            stored = writer.finish()
        assert not found.keys() & stored.keys(), "every tensor is given once"
        found |= stored
        number += 1
    return found


def _boxes(tensor: torch.Tensor, outer: Index = ()) -> Iterator[tuple[Index, torch.Tensor]]:
    """(offset, view) of parts along the first dimension, or where one entry of it is too large, along the next.

    The views have as many dimensions as the tensor.
    """
    dim = len(outer)
    rest = math.prod(tensor.shape[dim + 1 :]) * tensor.element_size()
    if rest > BOX_BYTES and dim + 1 < tensor.dim():
        for i in range(tensor.shape[dim]):
            yield from _boxes(tensor.narrow(dim, i, 1), (*outer, i))
        return
    rows = max(1, BOX_BYTES // max(rest, 1))
    for start in range(0, tensor.shape[dim], rows):
        part = tensor.narrow(dim, start, min(rows, tensor.shape[dim] - start))
        yield (*outer, start, *(0 for _ in range(tensor.dim() - dim - 1))), part
