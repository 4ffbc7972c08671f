"""Loads a checkpoint on the layout that wrote it or on any other.

A state is read from a StateSource: the files of a checkpoint, or host memory (local.py).

A damaged checkpoint is handled differently from one that does not fit. If bytes are missing or
differ from those written, the previous checkpoint is loaded, and the result reports this; if
--load-tag names the damaged checkpoint, an error is raised. A good checkpoint that does not fit the
model is always an error: an older one from the same run would not fit either.

reader.py reads the shards of files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron.checkpoint.files import STATE, StrPath, read_manifest
from megatron.checkpoint.find import (
    Checkpoint,
    CheckpointChoice,
    RejectedCheckpoint,
    find,
    iteration_of,
    open_checkpoint,
    required,
)
from megatron.checkpoint.reader import Targets, read_shards
from megatron.checkpoint.settings import check_architecture, check_benchmark, check_optimizer
from megatron.checkpoint.shards import (
    Entries,
    Shard,
    incomplete,
    named,
    overlap,
    read_index,
    read_stored,
)
from megatron.checkpoint.shared_errors import decided_by_first, describe, errors_on_all_ranks
from megatron.checkpoint.tensors import (
    KEPT,
    MASTER,
    LocalShards,
    clear_padding,
    tensors_to_load,
    weights_to_load,
)
from megatron.checkpoint.upcycle import dense, dense_name, from_dense, scale_outputs
from megatron.checkpoint.writer import Alive, nothing
from megatron.config import Config
from megatron.config.model import may_be_missing
from megatron.engine.engine import Engine
from megatron.engine.optimizer import unique_parameters
from megatron.engine.optimizer_state import AVERAGE
from megatron.errors import CheckpointError
from megatron.parallel.collectives import gather_objects
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology


@dataclass(frozen=True)
class LoadedState:
    """State from which training resumes.

    iteration   completed iterations; 0 when fine-tuning
    state       counters that the caller gave when saving; empty when fine-tuning
    optimizer   whether the optimizer's state was loaded
    folder      the checkpoint that was loaded
    rejected    newer checkpoints that are broken or missing, as in CheckpointChoice
    dense       whether experts were made from the checkpoint's MLPs; iteration and state are then
                the same as when fine-tuning
    notes       further information for the user, one sentence each
    """

    iteration: int
    state: dict[str, Any]
    optimizer: bool
    folder: Path
    rejected: tuple[RejectedCheckpoint, ...]
    notes: tuple[str, ...]
    dense: bool = False


class Damage(CheckpointError):
    """Bytes of a checkpoint that are missing or differ from those written."""


class StateSource(Protocol):
    """A saved state whose shards are read: files of a checkpoint, or host memory of the ranks.

    The methods are local to a rank, except that all ranks iterate over `read` together.
    """

    @property
    def where(self) -> str:
        """Return what is read, for messages."""

    def entries(self, names: Set[str]) -> Entries:
        """Return the entries of those tensors that the state has.

        They may omit shards that this rank does not need. Raises CheckpointError if they lack others.
        """

    def names(self) -> Set[str] | None:
        """Return the names of all tensors; None if they are known to be those of the model.

        Called on the first rank.
        """

    def read(
        self, shards: Iterable[tuple[str, Shard]], stored: Entries, targets: Targets
    ) -> Iterator[tuple[str, Shard, torch.Tensor]]:
        """Yield (name, shard, values) for these shards of `entries`; values last until the next.

        They may be read into those `targets` that are suitable, and are then this tensor.
        """


@dataclass(frozen=True)
class FileSource:
    """A checkpoint's files."""

    checkpoint: Checkpoint

    @property
    def where(self) -> str:
        return str(self.checkpoint.folder)

    def entries(self, names: Set[str]) -> Entries:
        stored = read_stored(self.checkpoint.manifest, names)
        if problems := incomplete(stored):
            raise CheckpointError(f"the shard lists have errors: {named(problems)}")
        return stored

    def names(self) -> Set[str] | None:
        return read_index(self.checkpoint.manifest).keys()

    def read(
        self, shards: Iterable[tuple[str, Shard]], stored: Entries, targets: Targets
    ) -> Iterator[tuple[str, Shard, torch.Tensor]]:
        return read_shards(self.checkpoint.folder, shards, stored, targets)


def load(
    directory: StrPath,
    engine: Engine,
    topology: Topology,
    config: Config,
    folder: Path | None = None,
    alive: Alive = nothing,
) -> LoadedState:
    """Load weights and optimizer into an engine of any layout, ZeRO stage and precision.

    All ranks call it.

    config   .checkpoint.load_tag names a checkpoint, which must be good; without it the newest good
             one is loaded. .checkpoint.no_load_optim and .finetune leave the optimizer as it is.
             .model is compared with the checkpoint's model, which may be dense if
             .model.moe_use_upcycling is set
    folder   the checkpoint to load, if `find` has been called before
    alive    called after every shard that is read

    Raises CheckpointError on every rank if there is no checkpoint, if the newest good one does not
    fit, or if none can be read. After an error while reading, the engine's weights are undefined.
    """
    settings = config.checkpoint
    optimizer = not (settings.no_load_optim or settings.finetune)
    averaged = upcycled = False
    dropped: list[str] = []
    fresh: list[str] = []
    may_lack = partial(may_be_missing, patterns=settings.load_missing)

    def attempt(checkpoint: Checkpoint) -> None:
        nonlocal averaged, dropped, fresh, optimizer, upcycled
        where = str(checkpoint.folder)
        stored = checkpoint.config.get("model", {})
        upcycled = config.model.moe_use_upcycling and stored.get("num_experts") is None
        optimizer = optimizer and not upcycled
        with errors_on_all_ranks(topology, f"loading checkpoint {where}"):
            check_architecture(checkpoint.config, dense(config) if upcycled else config, where)
            if not (settings.finetune or upcycled):
                check_benchmark(checkpoint.config, config, where)
            if optimizer:
                check_optimizer(checkpoint.config, config, where)
                if not checkpoint.state["optimizer"]:
                    raise CheckpointError(
                        f"{where} was saved without the optimizer's state: use --no-load-optim or "
                        "--finetune"
                    )
        averaged = optimizer and decided_by_first(
            topology, partial(has_kind, checkpoint, AVERAGE), Damage
        )
        clear_padding(engine, optimizer)
        tensors = tensors_to_load(engine, optimizer, averaged)
        pairs = from_dense(tensors, config.model) if upcycled else list(tensors.items())
        rename = dense_name if upcycled else str
        source = FileSource(checkpoint)
        dropped, fresh = read_state(source, pairs, engine.chunks, topology, alive, rename, may_lack)
        if upcycled:
            scale_outputs(tensors, config.model)
        if optimizer:
            load_counters(engine, checkpoint.state["engine"], str(checkpoint.folder / STATE))

    loaded = _newest_that_loads(directory, topology, settings.load_tag, folder, attempt)
    use_loaded(engine, averaged)
    notes = list(loaded.notes)
    what = "the average of the weights"
    if averaged and config.optimizer.ema_decay is None:
        notes.append(f"{what} in {loaded.folder} is dropped: pass --ema-decay to continue it")
    elif not averaged and config.optimizer.ema_decay is not None:
        notes.append(f"{what} begins with the weights of {loaded.folder}")
    if fresh:
        notes.append(starts_anew(fresh, loaded.folder))
    if optimizer and dropped:
        notes.append(
            f"the optimizer's state of {len(dropped)} parameters in {loaded.folder} is dropped, "
            f"because they are frozen now: {named(dropped)}"
        )
    loaded = replace(loaded, notes=tuple(notes))
    if settings.finetune or upcycled:
        return replace(loaded, iteration=0, state={}, dense=upcycled)
    return replace(loaded, optimizer=optimizer)


def load_counters(engine: Engine, scalars: dict[str, Any], where: str) -> None:
    """Restore the engine's counters. Raises Damage if they are not those of an engine."""
    try:
        engine.load_scalars(scalars)
    except Exception as error:  # a forged file can cause any exception
        raise Damage(f"{where} has no valid optimizer counters ({describe(error)})") from error


def use_loaded(engine: Engine, averaged: bool) -> None:
    """Let the engine compute with the state that was loaded; `averaged`: with an average.

    All ranks call it.
    """
    engine.update_working_weights()
    if not averaged:
        engine.start_average()


def starts_anew(names: Sequence[str], folder: Path) -> str:
    """Return a note about parameters that a loaded model lacks."""
    return f"{len(names)} parameters, which {folder} lacks, start anew: {named(list(names))}"


def load_weights(
    directory: StrPath,
    chunks: torch.nn.Module,
    topology: Topology,
    tag: str | int | None = None,
    allow_older: bool = True,
    kind: str = MASTER,
) -> LoadedState:
    """Load weights and persistent tensors into a model without an engine, with any dtype.

    For evaluation and text generation.

    chunks       the model of this rank; each parameter carries a Sharding
    tag          iteration or folder name of the checkpoint to load, instead of the newest good one
    allow_older  if the newest checkpoint is broken: load the previous one instead of raising
    kind         MASTER loads the weights, AVERAGE their average (--ema-decay)

    All ranks of the topology call it. Raises CheckpointError like `load`.
    """
    parameters = unique_parameters(chunks)
    tensors = weights_to_load(chunks, kind)

    def attempt(checkpoint: Checkpoint) -> None:
        decided_by_first(topology, partial(require_kind, checkpoint, kind))
        for p in parameters:
            if tuple(p.shape) != sharding_of(p).extent:
                p.detach().zero_()
        read_state(FileSource(checkpoint), list(tensors.items()), chunks, topology, nothing)

    return _newest_that_loads(directory, topology, tag, None, attempt, allow_older)


def has_kind(checkpoint: Checkpoint, kind: str) -> bool:
    """Return whether a checkpoint has tensors of this kind. Raises CheckpointError."""
    return any(name.partition(".")[0] == kind for name in read_index(checkpoint.manifest))


def require_kind(checkpoint: Checkpoint, kind: str) -> None:
    """Raise CheckpointError if `kind` is AVERAGE, but a checkpoint has no average of the weights.

    Every checkpoint has the weights themselves.
    """
    if kind == AVERAGE and not has_kind(checkpoint, kind):
        raise CheckpointError(
            f"{checkpoint.folder} has no average of the weights: it was saved without --ema-decay, "
            "or without the optimizer's state. Use its weights, without --ema"
        )


def _newest_that_loads(
    directory: StrPath,
    topology: Topology,
    tag: str | int | None,
    folder: Path | None,
    attempt: Callable[[Checkpoint], None],
    allow_older: bool = True,
) -> LoadedState:
    """Pass checkpoints to `attempt`, newest first, until one is not damaged.

    Return the LoadedState, in which `optimizer` is still False.

    folder    the checkpoint to try first; None: search `directory`
    attempt   loads a checkpoint; raises the same Damage on all ranks if it is damaged

    All ranks call it and get the same result. Raises CheckpointError if none is left, and for
    the first damaged one if `tag` names it or `allow_older` is False. Other errors of `attempt` are
    passed on.
    """
    choice = CheckpointChoice(folder)
    if folder is None:
        choice = decided_by_first(topology, partial(find, directory, tag))
    rejected = choice.rejected
    notes = choice.notes
    while True:
        at = required(directory, CheckpointChoice(choice.folder, rejected))
        if rejected and not allow_older:
            raise CheckpointError(
                f"the newest checkpoint is broken: {rejected[0]}. Restore it, or load the previous "
                f"one, {at}, with --allow-older (allow_older=True) or --load-tag {at.name}"
            )
        try:
            opened = decided_by_first(topology, partial(open_checkpoint, at), Damage)
            with errors_on_all_ranks(topology, f"comparing {at} on all ranks"):
                manifest = opened.manifest
                # damage in this rank's copy is found when its files are read
                with contextlib.suppress(CheckpointError):
                    manifest = read_manifest(at)
                if manifest != opened.manifest:
                    raise CheckpointError(
                        "rank 0 has another checkpoint of this name: give every node the "
                        "same --load folder"
                    )
            attempt(opened)
            return LoadedState(opened.iteration, opened.state["state"], False, at, rejected, notes)
        except Damage as damage:
            reason = str(damage)
        number = iteration_of(at)
        if tag is not None or number is None:
            raise CheckpointError(
                f"checkpoint {at} is broken: {reason}. Name another one with --load-tag"
            )
        choice = decided_by_first(topology, partial(find, directory, before=number))
        rejected = (*rejected, RejectedCheckpoint(at, reason), *choice.rejected)


def read_state(
    source: StateSource,
    tensors: Sequence[tuple[str, LocalShards]],
    chunks: torch.nn.Module,
    topology: Topology,
    alive: Alive,
    rename: Callable[[str], str | None] = lambda name: name,
    may_lack: Callable[[str], bool] = lambda name: False,
) -> tuple[list[str], list[str]]:
    """Fill `tensors`, by name, on all ranks; each rank reads only the shards it needs.

    Return on rank 0 the names of frozen parameters for which the source has optimizer state, and of
    parameters that it lacks; other ranks get ([], []).

    rename    maps a parameter's name to its name in the source; to None if it has none there
    may_lack  tells whether the source may lack a parameter, which then stays as it is

    Raises on every rank Damage, or CheckpointError if the tensors do not fit the model.
    """
    where = source.where
    with errors_on_all_ranks(topology, f"reading the lists of {where}", Damage):
        stored = source.entries({name for name, _ in tensors})
        names = source.names() if topology.world.is_first else None
    tensors = [(n, t) for n, t in tensors if n in stored or n.partition(".")[0] != KEPT]
    # The ranks of one pipeline together hold every parameter.
    one_pipeline = topology.tensor.is_first and topology.data.is_first
    local = {rename(sharding_of(p).name): p.requires_grad for p in unique_parameters(chunks)}
    listed = gather_objects(local, topology.pipeline, everywhere=False) if one_pipeline else []
    trains = {name: value for stage in listed for name, value in stage.items()}
    with errors_on_all_ranks(topology, f"loading {where}"):
        problems = []
        stateless = dict[str, None]()
        for name, shards in tensors:
            stored_shape = stored[name]["shape"] if name in stored else "missing"
            kind, _, parameter = name.partition(".")
            lacks = f"{MASTER}.{parameter}" not in stored and may_lack(parameter)
            if (
                stored_shape == "missing"
                and kind != MASTER
                and (lacks or f"{MASTER}.{parameter}" in stored)
            ):
                stateless[parameter] = None
            elif not lacks and stored_shape != shards.shape:
                problems.append(
                    f"{name} is {stored_shape} in the checkpoint and {shards.shape} here"
                )
        if stateless:
            problems.append(
                f"it has no optimizer state for {named(list(stateless))}, which were frozen, missing "
                "or trained by another optimizer: --no-load-optim and --finetune load the weights "
                "alone"
            )
        if names is not None:
            weights = {name for name in names if name.partition(".")[0] == MASTER}
            if more := sorted(weights - {f"{MASTER}.{name}" for name in trains}):
                problems.append(f"it also has {named(more)}")
        if problems:
            raise CheckpointError(
                f"{where} does not fit this model: {named(problems)}. A checkpoint of another "
                "architecture is not loaded in part: see --use-checkpoint-args, and --pieces for a "
                "layer or model of your own"
            )
    with errors_on_all_ranks(topology, f"reading {where}", Damage):
        _fill([(n, t) for n, t in tensors if n in stored], source, stored, alive)
    if names is None:
        return [], []
    kinds_and_names = (name.partition(".")[::2] for name in names)
    of_optimizer = {name for kind, name in kinds_and_names if kind not in (MASTER, KEPT, AVERAGE)}
    dropped = sorted(name for name in of_optimizer if not trains.get(name, True))
    return dropped, [n for n in trains if n and f"{MASTER}.{n}" not in names]


def _fill(
    tensors: Iterable[tuple[str, LocalShards]],
    source: StateSource,
    stored: Entries,
    alive: Alive,
) -> None:
    """Fill the views of `tensors` in place from the shards that overlap them.

    Values are converted to the dtypes of the views. Raises CheckpointError naming what is damaged;
    some views may then have new values, and the damaged one wrong ones.
    """
    copies: dict[tuple[str, Shard], list[tuple[torch.Tensor, tuple[slice, ...]]]] = {}
    for name, shards in tensors:
        for shard in stored[name]["boxes"]:
            for offset, view in shards.views.items():
                regions = overlap(shard.offset, shard.sizes, offset, tuple(view.shape))
                if regions is not None:
                    target = view.detach()[regions[1]]
                    copies.setdefault((name, shard), []).append((target, regions[0]))
    targets = {key: uses[0][0] for key, uses in copies.items() if len(uses) == 1}
    for name, shard, values in source.read(copies, stored, targets):
        if values is not targets.get((name, shard)):
            for target, region in copies[name, shard]:
                target.copy_(values[region])
        alive()
