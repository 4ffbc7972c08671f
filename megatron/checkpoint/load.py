"""Loading a checkpoint, on the layout that wrote it or on any other.

Damage and misfit are different errors. Where bytes are missing or are not those that were written,
the checkpoint before it is loaded, and the result reports it. A good checkpoint that does not fit
the model is an error: an older one of the same run would not fit either.

Every shard is compared with its digest before it is used. It is stored as torch.save wrote it; of
the pickle in it torch.load(weights_only=True) takes tensors alone.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from megatron.checkpoint.files import STATE, digest
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
from megatron.checkpoint.settings import check_architecture
from megatron.checkpoint.shards import (
    Shard,
    Stored,
    incomplete,
    named,
    overlap,
    read_index,
    read_stored,
)
from megatron.checkpoint.tensors import (
    MASTER,
    Shards,
    clear_padding,
    engine_kinds,
    tensors_to_load,
    weights_to_load,
)
from megatron.checkpoint.together import decided_by_first, describe, failures, together
from megatron.checkpoint.writer import Alive, nothing
from megatron.engine.engine import Engine
from megatron.engine.optimizer import unique_parameters
from megatron.errors import CheckpointError
from megatron.parallel.collectives import gather_objects
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology
from megatron.untrusted import open_regular

__all__ = ["LoadedState", "load", "load_weights", "read_config"]

_PROBLEMS = 8  # that an error lists


@dataclass(frozen=True)
class LoadedState:
    """Where training resumes.

    iteration   iterations done; 0 when fine-tuning
    state       the caller's state that was saved; empty when fine-tuning
    optimizer   whether the optimizer's state was loaded
    folder      the checkpoint
    rejected    newer checkpoints that are broken, newest first
    notes       what else the user should know of the choice, one sentence each
    """

    iteration: int
    state: dict[str, Any] = field(default_factory=dict)
    optimizer: bool = False
    folder: Path | None = None
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()


def load(
    directory: str | os.PathLike[str],
    engine: Engine,
    topology: Topology,
    config: Any,
    folder: Path | None = None,
    alive: Alive = nothing,
) -> LoadedState:
    """Load weights and optimizer from DIRECTORY into an engine of any layout, ZeRO stage and
    precision.

    All ranks call it.

    config   .checkpoint.load_tag names a checkpoint, which then must be good; without it the newest
             good one is loaded. .checkpoint.no_load_optim and .finetune leave the optimizer as it
             is; .model is compared with the checkpoint's
    folder   the newest good one, where `find` was called before
    alive    called after every shard that was read

    Raises CheckpointError, on every rank, when there is none, when it does not fit, or when none
    can be read. After an error while reading, the engine's weights are undefined.
    """
    settings = config.checkpoint
    optimizer = not (settings.no_load_optim or settings.finetune)
    tensors = tensors_to_load(engine, optimizer)

    def attempt(checkpoint: Checkpoint) -> str | None:
        where = str(checkpoint.folder)
        with together(topology, f"loading checkpoint {where}"):
            check_architecture(checkpoint.config, config, where)
            if optimizer and not checkpoint.state["optimizer"]:
                raise CheckpointError(
                    f"{where} was saved without the optimizer's state: use --no-load-optim or "
                    "--finetune"
                )
        clear_padding(engine, optimizer)
        reason = _read(
            checkpoint, tensors, engine.chunks, engine_kinds(engine, optimizer), topology, alive
        )
        if reason is None and optimizer:
            try:
                engine.load_scalars(checkpoint.state["engine"])
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                reason = (
                    f"{checkpoint.folder / STATE} has no optimizer counters ({describe(error)})"
                )
        return reason

    loaded = _newest_that_loads(directory, topology, settings.load_tag, folder, attempt)
    engine.update_working_weights()
    return (
        replace(loaded, iteration=0, state={})
        if settings.finetune
        else replace(loaded, optimizer=optimizer)
    )


def load_weights(
    directory: str | os.PathLike[str],
    chunks: torch.nn.Module,
    topology: Topology,
    tag: str | int | None = None,
) -> LoadedState:
    """Load only the weights, into parameters of any dtype, without an Engine: to evaluate or to
    generate text.

    chunks   the model of this rank; each parameter carries a Sharding
    tag      an iteration or the name of a folder instead of the newest good checkpoint

    All ranks of the topology call it. Raises CheckpointError as `load` does.
    """
    parameters = unique_parameters(chunks)
    tensors = weights_to_load(parameters)

    def attempt(checkpoint: Checkpoint) -> str | None:
        for p in parameters:
            if tuple(p.shape) != sharding_of(p).extent:
                p.detach().zero_()
        return _read(checkpoint, tensors, chunks, (MASTER,), topology, nothing)

    return _newest_that_loads(directory, topology, tag, None, attempt)


def read_config(directory: str | os.PathLike[str], tag: str | int | None = None) -> dict[str, Any]:
    """Return the configuration, section by section, with which a checkpoint was written. Raises
    CheckpointError.
    """
    return open_checkpoint(find_folder(directory, tag)).config


def _newest_that_loads(
    directory: str | os.PathLike[str],
    topology: Topology,
    tag: str | int | None,
    folder: Path | None,
    attempt: Callable[[Checkpoint], str | None],
) -> LoadedState:
    """Give checkpoints to `attempt`, newest first, until one is not damaged; return what was
    loaded.

    attempt   loads a checkpoint; returns what is damaged, the same on all ranks, or None

    All ranks call it and get the same. Raises CheckpointError where none is left, or where `tag`
    names a damaged one.
    """
    found = (
        Found(folder)
        if folder is not None
        else decided_by_first(topology, lambda: find(directory, tag))
    )
    rejected, notes = found.rejected, found.notes
    while True:
        at = required(directory, Found(found.folder, rejected))
        opened = decided_by_first(topology, lambda at=at: _opened(at))  # type: ignore[misc]
        if isinstance(opened, str):
            reason: str | None = opened
        elif (reason := attempt(opened)) is None:
            return LoadedState(opened.iteration, opened.state["state"], False, at, rejected, notes)
        assert reason is not None
        number = iteration_of(at)
        if tag is not None or number is None:
            raise CheckpointError(
                f"checkpoint {at} is broken: {reason}. Name another one with --load-tag"
            )
        found = decided_by_first(topology, lambda number=number: find(directory, before=number))  # type: ignore[misc]
        rejected = (*rejected, Rejected(at, reason), *found.rejected)


def _opened(folder: Path) -> Checkpoint | str:
    """Return the small files of a checkpoint, or what is damaged."""
    try:
        return open_checkpoint(folder)
    except CheckpointError as error:
        return str(error)


def _read(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Shards],
    chunks: torch.nn.Module,
    kinds: Iterable[str],
    topology: Topology,
    alive: Alive,
) -> str | None:
    """Fill `tensors` on all ranks; return what is damaged, or None. Every rank reads what it needs.

    Raises CheckpointError where the tensors do not fit the model.
    """
    folder, stored, names = checkpoint.folder, dict[str, Stored](), list[str]()

    def read_lists() -> None:
        stored.update(read_stored(checkpoint.manifest, tensors))
        if problems := incomplete(stored):
            raise CheckpointError(f"the shard lists are wrong: {named(problems)}")
        if topology.world.is_first:
            names.extend(read_index(checkpoint.manifest))

    reason = _damage(topology, f"reading the lists of {folder}", read_lists)
    if reason is not None:
        return reason
    # its ranks hold every parameter
    one_pipeline = topology.tensor.is_first and topology.data.is_first
    mine = [sharding_of(p).name for p in unique_parameters(chunks)]
    listed = gather_objects(mine, topology.pipeline, everywhere=False) if one_pipeline else []
    with together(topology, f"loading {folder}"):
        _check_fit(tensors, stored, str(folder))
        if topology.world.is_first:
            parameters = {name for part in listed for name in part}
            more = [
                n
                for n in sorted(names)
                if n.partition(".")[0] in kinds and n.partition(".")[2] not in parameters
            ]
            if more:
                raise CheckpointError(
                    f"{folder} does not fit this model: it also has {named(more)}. A checkpoint of "
                    "another architecture is not loaded in parts: see --use-checkpoint-args"
                )
    return _damage(topology, f"reading {folder}", lambda: _fill(tensors, folder, stored, alive))


def _damage(topology: Topology, what: str, action: Callable[[], None]) -> str | None:
    """Run `action` on all ranks; return on all the CheckpointErrors of any, or None. Other errors
    are raised on all.
    """
    mine: CheckpointError | None = None
    with together(topology, what):
        try:
            action()
        except CheckpointError as error:
            mine = error
    return failures(topology, what, mine)


def _check_fit(tensors: Mapping[str, Shards], stored: Mapping[str, Stored], where: str) -> None:
    """Raise CheckpointError, naming tensors, unless all that a rank needs are stored, in the same
    shape.
    """
    missing = [name for name in tensors if name not in stored]
    problems = [f"it has no {named(missing)}"] if missing else []
    for name, shards in tensors.items():
        if name in stored and tuple(stored[name]["shape"]) != tuple(shards.shape):
            problems.append(
                f"{name} is {tuple(stored[name]['shape'])} there and {shards.shape} in this model"
            )
    if problems:
        more = f"; and {len(problems) - _PROBLEMS} more" if len(problems) > _PROBLEMS else ""
        raise CheckpointError(
            f"{where} does not fit this model: {'; '.join(problems[:_PROBLEMS])}{more}"
        )


def _fill(
    tensors: Mapping[str, Shards],
    folder: Path,
    stored: Mapping[str, Stored],
    alive: Alive = nothing,
) -> None:
    """Fill the pieces of `tensors` in place from the shards that overlap with them, converting to
    their dtypes.

    Nothing is communicated. Raises CheckpointError naming the file that is damaged; what was filled
    before stays.
    """
    wanted = [
        (name, shard)
        for name, shards in tensors.items()
        for shard in stored[name]["boxes"]
        if any(
            overlap(shard.offset, shard.sizes, offset, tuple(view.shape))
            for offset, view in shards.pieces.items()
        )
    ]
    for name, shard, values in read_shards(folder, wanted, stored):
        for offset, view in tensors[name].pieces.items():
            places = overlap(shard.offset, shard.sizes, offset, tuple(view.shape))
            if places is not None:
                view.detach()[places[1]].copy_(values[places[0]])
        alive()


def read_whole(folder: Path, name: str, stored: Mapping[str, Stored]) -> torch.Tensor:
    """Return a whole tensor, in the dtype it was written in. Raises CheckpointError where a part of
    it is damaged.
    """
    shape = tuple(stored[name]["shape"])
    whole = torch.zeros(shape, dtype=getattr(torch, stored[name]["dtype"]))
    _fill({name: Shards(shape, {(0,) * len(shape): whole})}, folder, stored)
    return whole


def read_shards(
    folder: Path, wanted: Iterable[tuple[str, Shard]], stored: Mapping[str, Stored]
) -> Iterator[tuple[str, Shard, torch.Tensor]]:
    """Yield (name, shard, values) of shards of some tensors, in their order in the files.

    Raises CheckpointError naming the file that is damaged.
    """
    # as large as the largest shard so far: new memory for each would cost more than the reading
    buffer = bytearray()
    ordered = sorted(wanted, key=lambda entry: (entry[1].file, entry[1].start))
    for file, entries in itertools.groupby(ordered, key=lambda entry: entry[1].file):
        path = folder / file
        with open_regular(path, error=CheckpointError) as opened:
            for name, shard in entries:
                size, end = os.fstat(opened.fileno()).st_size, shard.start + shard.length
                if size < end:
                    raise CheckpointError(
                        f"{path} has {size} bytes where at least {end} were written, also of {name}"
                    )
                if len(buffer) < shard.length:
                    buffer = bytearray(shard.length)
                data = memoryview(buffer)[: shard.length]
                yield (
                    name,
                    shard,
                    _read_shard(path, opened, name, shard, stored[name]["dtype"], data),
                )


def _read_shard(
    path: Path, file: BinaryIO, name: str, shard: Shard, dtype: str, data: memoryview
) -> torch.Tensor:
    """Read a shard into `data` and check it; return a tensor with memory of its own."""
    _, sizes, _, start, length, expected = shard
    try:
        file.seek(start)
        file.readinto(data)  # type: ignore[attr-defined]
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror or error}), with {name} in it"
        ) from error
    if digest(data) != expected:
        raise CheckpointError(
            f"{path} is damaged: bytes {start} to {start + length}, a part of {name}, are not "
            "those that were written"
        )
    try:
        values: Any = torch.load(
            cast(IO[bytes], _Bytes(data)), map_location="cpu", weights_only=True
        )
    except MemoryError:
        raise
    except Exception as error:  # a damaged archive can raise anything
        first = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"{path} is damaged where {name} is ({type(error).__name__}: {first})"
        ) from error
    if not isinstance(values, torch.Tensor):
        raise CheckpointError(
            f"{path} is damaged: it holds a {type(values).__name__} where {name} should be"
        )
    if values.shape != sizes or values.dtype != getattr(torch, dtype):
        raise CheckpointError(
            f"{path} is damaged: at byte {start} there is {tuple(values.shape)} of {values.dtype} "
            f"where {sizes} of {dtype} of {name} were written"
        )
    return values


class _Bytes(io.RawIOBase):
    """A file over memory, as io.BytesIO is, without a copy of it."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)
