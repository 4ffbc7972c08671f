"""Loading a checkpoint, on the layout that wrote it or on any other.

Damage and misfit are told apart. Where bytes are missing or are not those that were written, the checkpoint before it
is taken, and the result says so. Where a sound checkpoint does not fit the model, that is an error: an older one of
the same run would not fit either.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.boxes import Stored, gather, read_index, read_stored
from megatron.checkpoint.find import (
    Checkpoint,
    Found,
    Rejected,
    find,
    find_folder,
    iteration_of,
    open_checkpoint,
    required,
)
from megatron.checkpoint.fit import check_names, check_tensors, incomplete, named
from megatron.checkpoint.folder import STATE
from megatron.checkpoint.planner import Shards
from megatron.checkpoint.reader import read_into
from megatron.checkpoint.settings import check_architecture
from megatron.checkpoint.tensors import (
    MASTER,
    clear_padding,
    engine_kinds,
    parameters_of,
    tensors_to_load,
    weights_to_load,
)
from megatron.checkpoint.together import decided_by_first, describe, together
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology

__all__ = ["LoadedState", "load", "load_weights", "read_config"]

Alive = Callable[[], None]


def _nothing() -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class LoadedState:
    """Where training continues.

    iteration   iterations done; 0 when fine-tuning
    state       what the caller gave to `save`; empty when fine-tuning
    optimizer   whether the optimizer's state was loaded
    folder      what was loaded
    rejected    newer checkpoints that are broken, newest first
    notes       what else the user should know of the choice, one sentence each
    """

    iteration: int
    state: dict[str, Any] = field(default_factory=dict)
    optimizer: bool = True
    folder: Path | None = None
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()


def load(
    directory: str | os.PathLike[str], engine: Engine, topology: Topology, config: Any, folder: Path | None = None,
    alive: Alive = _nothing,
) -> LoadedState:
    """Load weights and optimizer from DIRECTORY into an engine of any layout, ZeRO stage and precision.

    All ranks call it.

    config   .checkpoint.load_tag names a checkpoint, which then must be good; without it the newest good one is loaded.
             .checkpoint.no_load_optim and .finetune leave the optimizer as it is; .model is compared with the
             checkpoint's
    folder   the newest good one, where `find` was asked before
    alive    called after every box that was read

    Raises CheckpointError, on every rank, when there is none, when it does not fit, or when none can be read. After an
    error while reading, the engine's weights are undefined.
    """
    settings = config.checkpoint
    optimizer = not (settings.no_load_optim or settings.finetune)
    kinds = engine_kinds(engine, optimizer)
    tensors = tensors_to_load(engine, optimizer)
    parameters = [sharding_of(p).name for p in parameters_of(engine.chunks)]

    def attempt(checkpoint: Checkpoint) -> str | None:
        where = str(checkpoint.folder)
        with together(topology, f"loading checkpoint {where}"):
            check_architecture(checkpoint.config, config, where)
            if optimizer and not checkpoint.state["optimizer"]:
                raise CheckpointError(
                    f"{where} was saved without the optimizer's state: use --no-load-optim or --finetune"
                )
        clear_padding(engine, optimizer)
        reason = _read(checkpoint, tensors, parameters, kinds, topology, alive)
        if reason is None and optimizer:
            try:
                engine.load_scalars(checkpoint.state["engine"])
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                reason = f"{checkpoint.folder / STATE} has no counters of an optimizer ({describe(error)})"
        return reason

    checkpoint, found = _newest_that_loads(directory, topology, settings.load_tag, folder, attempt)
    engine.update_working_weights()
    if settings.finetune:
        return LoadedState(0, {}, False, checkpoint.folder, found.rejected, found.notes)
    state = checkpoint.state["state"]
    return LoadedState(checkpoint.iteration, state, optimizer, checkpoint.folder, found.rejected, found.notes)


def load_weights(
    directory: str | os.PathLike[str], chunks: torch.nn.Module, topology: Topology, tag: str | int | None = None
) -> LoadedState:
    """Load only the weights, into parameters of any dtype, without an Engine: to evaluate or to generate text.

    chunks   the model of this rank; its parameters carry a Sharding each
    tag      an iteration or the name of a folder instead of the newest good checkpoint

    All ranks of the topology call it. Raises CheckpointError as `load` does.
    """
    parameters = parameters_of(chunks)
    tensors = weights_to_load(parameters)
    names = [sharding_of(p).name for p in parameters]

    def attempt(checkpoint: Checkpoint) -> str | None:
        for p in parameters:
            if tuple(p.shape) != sharding_of(p).extent:
                p.detach().zero_()
        return _read(checkpoint, tensors, names, (MASTER,), topology, _nothing)

    checkpoint, found = _newest_that_loads(directory, topology, tag, None, attempt)
    state = checkpoint.state["state"]
    return LoadedState(checkpoint.iteration, state, False, checkpoint.folder, found.rejected, found.notes)


def read_config(directory: str | os.PathLike[str], tag: str | int | None = None) -> dict[str, Any]:
    """The configuration, section by section, with which a checkpoint was written. Raises CheckpointError."""
    return open_checkpoint(find_folder(directory, tag)).config


def _newest_that_loads(
    directory: str | os.PathLike[str],
    topology: Topology,
    tag: str | int | None,
    folder: Path | None,
    attempt: Callable[[Checkpoint], str | None],
) -> tuple[Checkpoint, Found]:
    """Give checkpoints to `attempt`, newest first, until one is not damaged; that one, and what was found before it.

    attempt   loads a checkpoint; returns what is damaged, the same on all ranks, or None

    All ranks call it and get the same. Raises CheckpointError where none is left, or where `tag` names a damaged one.
    """
    found = Found(folder) if folder is not None else decided_by_first(topology, lambda: find(directory, tag))
    rejected, notes = found.rejected, found.notes
    while True:
        at = required(directory, Found(found.folder, rejected))
        opened = decided_by_first(topology, lambda at=at: _opened(at))  # type: ignore[misc]
        if isinstance(opened, str):
            reason: str | None = opened
        elif (reason := attempt(opened)) is None:
            return opened, Found(at, rejected, notes)
        assert reason is not None
        number = iteration_of(at)
        if tag is not None or number is None:
            raise CheckpointError(f"checkpoint {at} is broken: {reason}. Name another one with --load-tag")
        found = decided_by_first(topology, lambda number=number: find(directory, before=number))  # type: ignore[misc]
        rejected = (*rejected, Rejected(at, reason), *found.rejected)


def _opened(folder: Path) -> Checkpoint | str:
    """The small files of a checkpoint, or what is damaged."""
    try:
        return open_checkpoint(folder)
    except CheckpointError as error:
        return str(error)


def _read(
    checkpoint: Checkpoint,
    tensors: dict[str, Shards],
    parameters: Iterable[str],
    kinds: Iterable[str],
    topology: Topology,
    alive: Alive,
) -> str | None:
    """Fill `tensors` on all ranks; what is damaged, or None. Raises CheckpointError where the tensors do not fit.

    Every rank reads for itself what it needs.
    """
    folder, stored, names = checkpoint.folder, dict[str, Stored](), list[str]()

    def read_lists() -> None:
        stored.update(read_stored(checkpoint.manifest, tensors))
        lacking = incomplete(stored)
        if lacking:
            raise CheckpointError(f"parts are missing of {named(lacking)}")
        if topology.world.is_first:
            names.extend(read_index(checkpoint.manifest))

    reason = _damage(topology, f"reading the lists of {folder}", read_lists)
    if reason is not None:
        return reason
    whole = topology.tensor.is_first and topology.data.is_first  # one pipeline's ranks hold every parameter
    listed = gather(list(parameters), topology.pipeline) if whole else []
    with together(topology, f"loading {folder}"):
        check_tensors(tensors, stored, str(folder))
        if topology.world.is_first:
            check_names((name for part in listed for name in part), names, kinds, str(folder))
    return _damage(topology, f"reading {folder}", lambda: read_into(tensors, folder, stored, alive))


def _damage(topology: Topology, what: str, action: Callable[[], None]) -> str | None:
    """Run `action` on all ranks; on all, what its CheckpointErrors say, or None. Other errors become errors of all."""
    mine: str | None = None
    with together(topology, what):
        try:
            action()
        except CheckpointError as error:
            mine = str(error)
    try:
        with together(topology, what):
            if mine is not None:
                raise CheckpointError(mine)
    except CheckpointError as error:
        return str(error)
    return None
