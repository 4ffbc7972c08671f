"""Saving a checkpoint: of a run, while training waits or continues, and of whole tensors in one
process.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.files import (
    CONFIG,
    FORMAT,
    MANIFEST,
    METADATA,
    PROVENANCE,
    STATE,
    Written,
    file_digest,
    to_json,
    write_manifest,
    write_text,
)
from megatron.checkpoint.find import (
    folders,
    generations,
    iteration_of,
    next_generation,
    number_of,
    overtaken,
)
from megatron.checkpoint.folder import (
    clear,
    commit_folder,
    folder_name,
    left_over,
    retire,
    start_folder,
    tagged_name,
    to_remove,
)
from megatron.checkpoint.settings import plain
from megatron.checkpoint.shards import (
    Index,
    Stored,
    Totals,
    check_complete,
    merged,
    stored_bytes,
    totals,
    write_index,
    write_piece,
    write_whole,
)
from megatron.checkpoint.tensors import Shards, Snapshot, tensors_to_save
from megatron.checkpoint.together import decided_by_first, describe, together
from megatron.checkpoint.writer import Alive, ShardWriter, nothing, write_tensors
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.collectives import gather_objects
from megatron.parallel.topology import Topology

WHOLE_UP_TO = 4096
"""Ranks of the largest job that writes .metadata: about 10 shards per rank, 5 MB and a second of
rank 0's time.
"""
SHARD_BYTES = 64 << 20
"""Largest shard of `write_offline`: a loading rank reads whole shards, and may need little of a
tensor.
"""
FILE_BYTES = 16 << 30
"""Size after which `write_offline` begins another data file."""
_POLL_S = 0.1  # how often a rank that waits for its thread looks for progress


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint; the same on every rank except for the times.

    bytes       of all its files
    elapsed_s   from the start of the save to the end of its commit
    stall_s     how long of that training waited on this rank
    """

    folder: Path
    iteration: int
    bytes: int
    elapsed_s: float
    stall_s: float


class Saver:
    """Writes checkpoints DIRECTORY/iter_NNNNNNN, one at a time. All ranks call each method, in the
    same order.

    config   .checkpoint.no_save_optim leaves the optimizer's state out; .keep_last and .keep_every
             select the older checkpoints to keep; the one that .load_tag names in the same
             directory is never removed
    alive    called on the calling thread whenever more has been written

    A checkpoint gets its name only when all ranks have written and synced their files and together
    they hold every element once; the tracker file follows. When any rank fails, a CheckpointError
    is raised on all: no checkpoint has appeared, temporary files are gone, older checkpoints and
    the tracker are as before, and the next save may start.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        topology: Topology,
        config: Any,
        alive: Alive = nothing,
    ) -> None:
        self._directory = Path(directory).absolute()
        self._topology = topology
        self._config = config
        self._alive = alive
        self._optimizer = not config.checkpoint.no_save_optim
        self._snapshot = Snapshot()
        self._pending: _Pending | None = None
        self._cleaners: list[threading.Thread] = []
        self._generation: int | None = None  # of the last save, on rank 0

    @property
    def pending(self) -> bool:
        """Return whether a save in the background waits to be committed: the same on every rank."""
        return self._pending is not None

    @property
    def written(self) -> bool:
        """Return whether this rank's thread has finished its part of the pending save or failed.
        Nothing is communicated.
        """
        return self._pending is not None and self._pending.done

    @property
    def snapshot_bytes(self) -> int:
        """Host memory that saves in the background hold on this rank."""
        return self._snapshot.bytes

    def prepare(self, engine: Engine) -> str:
        """Get the host memory for saves in the background and pin it, which takes seconds; return a
        note where it could not be pinned on this rank. Raises CheckpointError on every rank where
        one has no memory."""
        with together(self._topology, "getting host memory for --async-save"):
            self._snapshot.reserve(tensors_to_save(engine, self._topology, self._optimizer))
        return self._snapshot.note

    def start(
        self,
        iteration: int,
        engine: Engine,
        state: dict[str, Any],
        provenance: Any = None,
        background: bool = False,
    ) -> Saved | None:
        """Save the engine's state. Without `background`, return when the checkpoint is complete.

        state       the caller's own counters, JSON-ready and the same on every rank; `load` returns
                    them
        provenance    provenance of the run, JSON-ready; that of rank 0 is written
        background  copy the state to host memory, which takes as much as a rank's part of it, and
                    let a thread write the copy. Returns None as soon as the copy is made: from then
                    on the engine may change. `commit` completes the checkpoint.

        An earlier save that is still pending is committed first; if that fails, its error is raised
        and no new save is started.
        """
        if self._pending is not None:
            self.commit()
        folder = self._directory / folder_name(iteration)
        pending = _Pending(folder, iteration, self._topology.rank)
        try:
            with together(self._topology, pending.what):
                texts = _texts(
                    iteration, self._config, state, engine.scalars(), self._optimizer, provenance
                )
                tensors = tensors_to_save(engine, self._topology, self._optimizer)
                pending.tensors = self._snapshot.take(tensors) if background else tensors
                if self._topology.world.is_first:
                    pending.texts = texts
                    pending.temporary = start_folder(folder)
                    self._clean(left_over(self._directory, pending.temporary))
            pending.temporary = decided_by_first(self._topology, lambda: pending.temporary)
        except CheckpointError:
            self._remove(pending)
            raise
        self._pending = pending
        if not background:
            pending.write(self._alive)
            return self.commit()
        pending.start()
        pending.stall_s = time.perf_counter() - pending.begun
        return None

    def commit(self) -> Saved:
        """Complete the pending save; waits where a rank is still writing."""
        pending, self._pending = self._pending, None
        assert pending is not None, "a save was started in the background before it is committed"
        at = time.perf_counter()
        try:
            with together(self._topology, pending.what), _own_folder(pending):
                mine = pending.result(self._alive)
            size = self._complete(pending, mine)
        except CheckpointError:
            self._remove(pending)
            raise
        now = time.perf_counter()
        stall_s = pending.stall_s + now - at if pending.stall_s else now - pending.begun
        return Saved(pending.folder, pending.iteration, size, now - pending.begun, stall_s)

    def finish(self) -> Saved | None:
        """Commit a pending save, if there is one, and wait until old checkpoints are deleted."""
        saved = self.commit() if self._pending is not None else None
        for cleaner in self._cleaners:
            while cleaner.is_alive():
                cleaner.join(_POLL_S)
                self._alive()
        self._cleaners = []
        return saved

    def drop(self) -> None:
        """Abandon a pending save and remove what was written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with together(self._topology, f"giving up {pending.what}"):
            pending.stop()
        self._remove(pending)

    def _complete(self, pending: _Pending, mine: dict[str, Stored]) -> int:
        """Collect the shards of all ranks, write the lists and commit the folder; return its
        bytes.
        """
        topology = self._topology
        whole = topology.world.size <= WHOLE_UP_TO
        stored = merged(gather_objects(mine, topology.data, everywhere=False))
        part: _Part | None = None
        with together(topology, pending.what), _own_folder(pending):
            if topology.data.is_first:
                piece = write_piece(pending.temporary, topology.model.rank, stored)
                part = piece, totals(stored), stored_bytes(stored), stored if whole else {}
                self._alive()
        parts = gather_objects(part, topology.model, everywhere=False) if part is not None else []

        def complete() -> int:
            try:
                with _own_folder(pending):
                    generation = self._next_generation()
                    size = _write_lists(pending.temporary, parts, pending.small, whole, generation)
                    commit_folder(pending.temporary, pending.folder, pending.iteration, generation)
            except Exception as error:
                raise CheckpointError(f"{pending.what} failed: {describe(error)}") from error
            self._generation = generation
            self._retire(pending.iteration)
            return size

        return decided_by_first(topology, complete)

    def _next_generation(self) -> int:
        """Count up from the last save; the first one from all in the directory and in that of
        --load.
        """
        if self._generation is not None:
            return self._generation + 1
        load = self._config.checkpoint.load
        return next_generation(self._directory, *([load] if load else []))

    def _retire(self, iteration: int) -> None:
        """On rank 0, after the commit of `iteration`: remove older checkpoints."""
        settings = self._config.checkpoint
        keep = set()
        if (
            settings.load
            and settings.load_tag
            and Path(settings.load).resolve() == self._directory.resolve()
        ):
            keep = {iteration_of(Path(tagged_name(str(settings.load_tag))))}
        # The checkpoint is complete: what could not be removed is removed after the next one.
        with contextlib.suppress(OSError, CheckpointError):
            good = generations(folders(self._directory))
            left_behind = set(map(number_of, overtaken(good)))
            old = to_remove(
                map(number_of, good),
                iteration,
                settings.keep_last,
                settings.keep_every,
                keep,
                left_behind,
            )
            self._clean(retire(self._directory, old))

    def _clean(self, folders: list[Path]) -> None:
        """Delete folders in a thread, which the process waits for at its end."""
        self._cleaners = [cleaner for cleaner in self._cleaners if cleaner.is_alive()]
        if folders:
            self._cleaners.append(
                threading.Thread(target=clear, args=(folders,), name="remove-checkpoints")
            )
            self._cleaners[-1].start()

    def _remove(self, pending: _Pending) -> None:
        """Remove what a failed save has written, as the disk may be full of it."""
        if self._topology.world.is_first and pending.temporary != Path():
            shutil.rmtree(pending.temporary, ignore_errors=True)


def save(
    directory: str | os.PathLike[str],
    iteration: int,
    engine: Engine,
    topology: Topology,
    config: Any,
    state: dict[str, Any],
    provenance: Any = None,
) -> Path:
    """Write DIRECTORY/iter_NNNNNNN, make it the last checkpoint, and return its path. All ranks
    call it.

    Arguments and errors are those of `Saver`.
    """
    saver = Saver(directory, topology, config)
    saved = saver.start(iteration, engine, state, provenance)
    saver.finish()
    assert saved is not None, "it was not written in the background"
    return saved.folder


_Part = tuple[tuple[str, Written], Totals, int, Mapping[str, Stored]]
"""What rank 0 gets from a data-parallel group: its piece, how much of each tensor it has, bytes of
data, shards.
"""


def _texts(
    iteration: int,
    config: Any,
    state: Mapping[str, Any],
    scalars: Mapping[str, Any],
    optimizer: bool,
    provenance: Any,
) -> dict[str, str]:
    """Return the small files that are known when a save starts, by name."""
    contents = {
        "format": FORMAT,
        "iteration": iteration,
        "state": state,
        "engine": scalars,
        "optimizer": optimizer,
    }
    return {
        STATE: to_json(contents, "the state of the training loop"),
        CONFIG: to_json(plain(config), "the configuration"),
        PROVENANCE: to_json({} if provenance is None else provenance, "the provenance"),
    }


def _write_lists(
    folder: Path, parts: list[_Part], small: Mapping[str, Written], whole: bool, generation: int
) -> int:
    """Check that all elements are there and write the shard lists and the manifest; return the
    checkpoint's bytes.

    small   the small files that were written before
    whole   whether to write .metadata
    """
    check_complete(part[1] for part in parts)
    known: dict[str, Written] = dict(part[0] for part in parts)
    known.update([write_index(folder, [part[1] for part in parts])])
    if whole:
        write_whole(folder, merged(part[3] for part in parts))
        known[METADATA] = file_digest(folder / METADATA)
    known.update(small)
    known[MANIFEST] = write_manifest(folder, list(known), known, generation)
    return sum(size for size, _ in known.values()) + sum(part[2] for part in parts)


@contextlib.contextmanager
def _own_folder(pending: _Pending) -> Iterator[None]:
    """Explain an error that comes from the removal of the temporary folder."""
    try:
        yield
    except FileNotFoundError as error:
        if pending.temporary.exists():
            raise
        raise CheckpointError(
            f"{pending.temporary} was removed while it was written ({error}): is another run "
            "saving to the same folder?"
        ) from error


class _Stopped(Exception):
    """Ends the thread of an abandoned save."""


class _Pending:
    """A save between its start and its commit; writes this rank's part of it, here or in a thread.

    temporary   the folder that is written; Path() until rank 0 has created it
    texts       small files to write; none but on rank 0
    small       size and digest of each small file that was written
    """

    def __init__(self, folder: Path, iteration: int, rank: int) -> None:
        self.folder, self.iteration, self.rank = folder, iteration, rank
        self.what = f"saving checkpoint {folder}"
        self.temporary = Path()
        self.tensors: Mapping[str, Shards] = {}
        self.texts: dict[str, str] = {}
        self.small: dict[str, Written] = {}
        self.begun, self.stall_s = time.perf_counter(), 0.0
        self._thread: threading.Thread | None = None
        self._stored: dict[str, Stored] = {}
        self._error: BaseException | None = None
        self._progress = 0
        self._stop = False

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def write(self, alive: Alive) -> None:
        """Write on this thread. An error is kept for `result`, which shares it with all ranks."""
        try:
            self._stored = write_tensors(self.tensors, self.temporary, self.rank, alive)
            for name, text in self.texts.items():
                self.small[name] = write_text(self.temporary / name, text)
                alive()
        except BaseException as error:
            self._error = error
        self.tensors = {}

    def start(self) -> None:
        """Write in a thread, which communicates with no rank and does not keep the process from
        ending.
        """
        self._thread = threading.Thread(
            target=self.write, args=(self._count,), name="write-checkpoint", daemon=True
        )
        self._thread.start()
        atexit.register(self.stop)  # a thread that outlives the interpreter may crash the process

    def result(self, alive: Alive) -> dict[str, Stored]:
        """Wait until all is written and return the shards; raises what went wrong."""
        self._wait(alive)
        if self._error is not None:
            raise self._error
        return self._stored

    def stop(self) -> None:
        """End the thread early."""
        self._stop = True
        self._wait(nothing)

    def _wait(self, alive: Alive) -> None:
        seen = self._progress
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_POLL_S)
            if self._progress != seen:
                seen = self._progress
                alive()
        atexit.unregister(self.stop)

    def _count(self) -> None:
        if self._stop:
            raise _Stopped("the save was abandoned")
        self._progress += 1


def write_offline(
    directory: str | os.PathLike[str],
    iteration: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    config: Any,
    state: Mapping[str, Any],
    scalars: Mapping[str, Any],
    optimizer: bool,
    provenance: Mapping[str, Any],
) -> Path:
    """Write DIRECTORY/iter_NNNNNNN from whole tensors, make it the last checkpoint, and return its
    path.

    One process without a model writes it, tensor by tensor, in bounded memory.

    tensors    (name, whole tensor in host memory), with names as in tensors.py. They are taken one
               at a time
    state      counters of the training loop
    scalars    those of the engine: optimizer_step, skipped_steps, loss_scale
    optimizer  whether its state is among the tensors
    provenance   provenance of the checkpoint, JSON-ready

    Raises CheckpointError when it cannot be written, and passes on what `tensors` raises; then no
    checkpoint has appeared.
    """
    folder = Path(directory).absolute() / folder_name(iteration)
    texts = _texts(iteration, config, dict(state), dict(scalars), optimizer, dict(provenance))
    temporary = None
    try:
        temporary = start_folder(folder)
        generation = next_generation(folder.parent)
        stored = _write_whole_tensors(temporary, tensors)
        part = write_piece(temporary, 0, stored), totals(stored), stored_bytes(stored), stored
        small = {name: write_text(temporary / name, text) for name, text in texts.items()}
        _write_lists(temporary, [part], small, True, generation)
        commit_folder(temporary, folder, iteration, generation)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # the disk may be full of it
        if isinstance(error, OSError):
            raise CheckpointError(f"writing checkpoint {folder} failed: {error}") from error
        raise
    return folder


def _write_whole_tensors(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, Stored]:
    """Write tensors one after another, into as many files as needed; return their shards."""
    found: dict[str, Stored] = {}
    iterator, number, more = iter(tensors), 0, True
    while more:
        size, more = 0, False
        with ShardWriter(folder, number) as writer:
            for name, tensor in iterator:
                for offset, view in _cut(tensor):
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


def _cut(tensor: torch.Tensor, outer: Index = ()) -> Iterator[tuple[Index, torch.Tensor]]:
    """Yield (offset, view) of shards of at most SHARD_BYTES, of as many dimensions as the tensor.

    They are cut along the first dimension or, where one entry of it is too large, along the next.
    """
    dim = len(outer)
    rest = math.prod(tensor.shape[dim + 1 :]) * tensor.element_size()
    if rest > SHARD_BYTES and dim + 1 < tensor.dim():
        for i in range(tensor.shape[dim]):
            yield from _cut(tensor.narrow(dim, i, 1), (*outer, i))
        return
    rows = max(1, SHARD_BYTES // max(rest, 1))
    for start in range(0, tensor.shape[dim], rows):
        part = tensor.narrow(dim, start, min(rows, tensor.shape[dim] - start))
        yield (*outer, start, *(0 for _ in range(tensor.dim() - dim - 1))), part
