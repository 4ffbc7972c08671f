"""Saves checkpoints, in the foreground or in the background of training."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import (
    CONFIG,
    FORMAT,
    MANIFEST,
    METADATA,
    PROVENANCE,
    STATE,
    StrPath,
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
    Entries,
    Totals,
    check_complete,
    merged,
    stored_bytes,
    totals,
    write_index,
    write_metadata,
    write_piece,
)
from megatron.checkpoint.shared_errors import decided_by_first, errors_on_all_ranks
from megatron.checkpoint.tensors import Snapshot, Tensors, device_of, tensors_to_save
from megatron.checkpoint.writer import Alive, nothing, write_tensors
from megatron.config import Config
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.collectives import broadcast_object, gather_objects
from megatron.parallel.topology import Topology

METADATA_MAX_RANKS = 4096
"""Largest number of ranks with which a job writes .metadata. With that many ranks and about 10
shards per rank, the file takes 5 MB, and writing it takes rank 0 a second.
"""
_POLL_S = 0.1  # interval at which a rank that waits for a thread checks its progress

Work = Callable[[Alive], Any]
"""Part of a save that needs no communication. It calls its argument whenever more is written."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint; the same on every rank except for the times.

    bytes       size of all its files
    elapsed_s   time from the start of the save to the end of its commit, on this rank
    stall_s     part of that time during which training on this rank waited for the save
    """

    folder: Path
    iteration: int
    bytes: int
    elapsed_s: float
    stall_s: float


class _Task:
    """Task of one rank for a save: runs in a thread, or when the result is asked for.

    It does not communicate.
    """

    def __init__(self, work: Work | None, background: bool) -> None:
        self._work = work
        self._progress = 0
        self.future: Future[Any] | None = None
        if work is not None and background:
            executor = ThreadPoolExecutor(1, "write-checkpoint")
            self.future = executor.submit(work, self._count)
            executor.shutdown(wait=False)

    @property
    def done(self) -> bool:
        """Return whether there is nothing left to do, or it failed."""
        return self._work is None or (self.future is not None and self.future.done())

    def result(self, alive: Alive) -> Any:
        """Return the result of the work, None if there is none, or raise its error."""
        if self._work is None:
            return None
        if self.future is None:
            return self._work(alive)
        seen = self._progress
        while wait([self.future], _POLL_S).not_done:
            if self._progress != seen:
                seen = self._progress
                alive()
        return self.future.result()

    def _count(self) -> None:
        self._progress += 1


@dataclass
class _Pending:
    """A save between its start and the end of its commit.

    folder      the checkpoint's final path
    iteration   completed iterations
    background  whether threads write
    tensors     shards that this rank writes
    texts       small files that rank 0 writes, by name
    temporary   the folder being written; Path() until rank 0 has created it
    tasks       the tasks of this rank, one after another, see `Saver._tasks`
    task        the present one
    begun       time.perf_counter() at the start
    stall_s     time during which training waited so far
    """

    folder: Path
    iteration: int
    background: bool
    tensors: Tensors = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    temporary: Path = Path()
    tasks: Generator[Work | None, Any, int] = field(init=False)
    task: _Task = field(init=False)
    begun: float = field(default_factory=time.perf_counter)
    stall_s: float = 0.0

    @property
    def what(self) -> str:
        return f"saving checkpoint {self.folder}"

    def take(self, work: Work | None) -> None:
        """Begin the next task."""
        self.task = _Task(work, self.background)


class Saver:
    """Writer of checkpoints DIRECTORY/iter_NNNNNNN, one at a time.

    All ranks call each method, in the same order.

    config   .checkpoint.no_save_optim leaves out the optimizer's state; .keep_last and .keep_every
             select the older checkpoints to keep; the one that .load_tag names is never removed
    alive    called on the calling thread whenever more has been written

    A checkpoint gets its final name only when all ranks have written and synced their files and
    their shards have as many elements as the model; the tracker file follows. If any rank fails,
    CheckpointError is raised on all: no checkpoint has appeared (unless only the last sync failed,
    see `commit_folder`), temporary files are gone, older checkpoints and the tracker are unchanged,
    and the next save may start.
    """

    def __init__(
        self,
        directory: StrPath,
        topology: Topology,
        config: Config,
        alive: Alive = nothing,
    ) -> None:
        self._directory = Path(directory).absolute()
        self._topology = topology
        self._config = config
        self._alive = alive
        self._optimizer = not config.checkpoint.no_save_optim
        self._snapshot = Snapshot()
        self._pending: _Pending | None = None
        self._cleaner = ThreadPoolExecutor(1, "remove-checkpoints")
        self._removal: Future[None] | None = None  # the last removal

    @property
    def pending(self) -> bool:
        """Return whether a background save is waiting to be committed: the same on every rank."""
        return self._pending is not None

    @property
    def written(self) -> bool:
        """Return whether this rank's thread has ended its present task for the pending save.

        There is no communication. Once it has on every rank, `advance` does not wait.
        """
        return self._pending is not None and self._pending.task.done

    def prepare(self, engine: Engine) -> str:
        """Allocate and pin the host memory for saves in the background.

        This takes seconds. Returns a note if the memory on this rank could not be pinned, otherwise
        "". Without a GPU nothing is pinned. Raises CheckpointError on every rank if any rank lacks
        the memory.
        """
        with errors_on_all_ranks(self._topology, "getting host memory for --async-save"):
            tensors = tensors_to_save(engine, self._topology, self._optimizer)
            self._snapshot.reserve(tensors)
            if device_of(tensors) is None:
                self._snapshot.take(tensors)  # the first use of memory that is not pinned is slow
        return self._snapshot.note

    @functools.cached_property
    def _settings(self) -> str:
        """Text of config.json, which is the same in every save."""
        return settings_text(self._config)

    def start(
        self,
        iteration: int,
        engine: Engine,
        state: Mapping[str, object],
        provenance: Mapping[str, object] | None = None,
        background: bool = False,
    ) -> Saved | None:
        """Save the engine's state. Without `background`, return when the checkpoint is complete.

        state        the caller's own counters, serializable as JSON and the same on every rank;
                     `load` returns them
        provenance   provenance of the run, serializable as JSON; rank 0's is written
        background   copy this rank's part of the state to host memory, and let a thread write the
                     copy. Returns None as soon as the copy is made: from then on the engine may
                     change. `advance` or `commit` completes the checkpoint

        An earlier save that is still pending is committed first; if that fails, its error is raised
        and no new save is started.
        """
        if self._pending is not None:
            self.commit()
        folder = self._directory / folder_name(iteration)
        pending = _Pending(folder, iteration, background)
        try:
            with errors_on_all_ranks(self._topology, pending.what):
                pending.texts = small_files(
                    iteration, self._settings, state, engine.scalars(), self._optimizer, provenance
                )
                tensors = tensors_to_save(engine, self._topology, self._optimizer)
                pending.tensors = self._snapshot.take(tensors) if background else tensors
                if self._topology.world.is_first:
                    pending.temporary = start_folder(folder)
                    self._clean(left_over(self._directory, pending.temporary))
            pending.temporary = decided_by_first(self._topology, lambda: pending.temporary)
        except CheckpointError:
            self._remove(pending)
            raise
        pending.tasks = self._tasks(pending)
        pending.take(next(pending.tasks))
        self._pending = pending
        pending.stall_s = time.perf_counter() - pending.begun
        return None if background else self.commit()

    def advance(self) -> Saved | None:
        """Continue the pending save by the ranks' next task; return the checkpoint if it is complete.

        Waits while any rank is still busy with the present task.
        """
        pending = self._pending
        self._pending = None
        assert pending is not None, "a save was started before it continues"
        at = time.perf_counter()
        try:
            with errors_on_all_ranks(self._topology, pending.what):
                result = pending.task.result(self._alive)
            pending.take(pending.tasks.send(result))
        except StopIteration as end:
            now = time.perf_counter()
            elapsed_s = now - pending.begun
            stall_s = pending.stall_s + now - at
            return Saved(pending.folder, pending.iteration, end.value, elapsed_s, stall_s)
        except CheckpointError:
            self._remove(pending)
            raise
        self._pending = pending
        pending.stall_s += time.perf_counter() - at
        return None

    def commit(self) -> Saved:
        """Complete the pending save; wait while any rank is still writing."""
        while (saved := self.advance()) is None:
            pass
        return saved

    def finish(self) -> Saved | None:
        """Commit a pending save, if there is one, and wait until old checkpoints are deleted."""
        saved = self.commit() if self._pending is not None else None
        while self._removal is not None and wait([self._removal], _POLL_S).not_done:
            self._alive()
        return saved

    def _tasks(self, pending: _Pending) -> Generator[Work | None, Any, int]:
        """Yield what this rank does by itself, get the result, and exchange it with other ranks.

        Return the checkpoint's size in bytes. The ranks write their shards, the first rank of each
        data-parallel group the group's list, and rank 0 the rest. None: others have something to do.
        """
        topology = self._topology
        with_metadata = topology.world.size <= METADATA_MAX_RANKS
        folder = pending.temporary
        entries = yield partial(write_tensors, pending.tensors, folder, topology.rank)
        stored = merged(gather_objects(entries, topology.data, everywhere=False))
        write_list = partial(write_shard_list, folder, topology.model.rank, stored, with_metadata)
        groups: list[_GroupShards] = []
        if topology.model.size > 1:
            group = yield (lambda alive: write_list()) if topology.data.is_first else None
            if topology.data.is_first:
                groups = gather_objects(group, topology.model, everywhere=False)

        def complete(alive: Alive) -> int:
            return self._complete(pending, groups or [write_list()], with_metadata)

        size: int = yield complete if topology.world.is_first else None
        return broadcast_object(size, topology.world)

    def _complete(self, pending: _Pending, groups: list[_GroupShards], with_metadata: bool) -> int:
        """Write the other small files, commit the folder and remove old checkpoints.

        Return the checkpoint's size in bytes.
        """
        settings = self._config.checkpoint
        generation = next_generation(self._directory, settings.load)
        size = write_small_files(
            pending.temporary, groups, pending.texts, with_metadata, generation
        )
        commit_folder(pending.temporary, pending.folder, pending.iteration, generation)
        tag = settings.load_tag
        keep = set() if tag is None else {iteration_of(Path(tagged_name(tag)))}
        # The checkpoint is complete: old ones that cannot be removed now are removed after the next
        # save.
        with contextlib.suppress(OSError, CheckpointError):
            good = generations(folders(self._directory))
            old = to_remove(
                map(number_of, good),
                pending.iteration,
                settings.keep_last,
                settings.keep_every,
                keep,
                set(map(number_of, overtaken(good))),
            )
            self._clean(retire(self._directory, old))
        return size

    def _clean(self, folders: list[Path]) -> None:
        """Delete folders in a thread, for which the process waits before it exits."""
        self._removal = self._cleaner.submit(clear, folders)

    def _remove(self, pending: _Pending) -> None:
        """Remove the files of a failed save, since they may fill the disk."""
        if self._topology.world.is_first and pending.temporary != Path():
            shutil.rmtree(pending.temporary, ignore_errors=True)


_GroupShards = tuple[tuple[str, Written], Totals, int, Entries]
"""Data that a data-parallel group sends to rank 0: name, size and digest of the group's piece, its
totals for each tensor, the size of its shards in bytes, and the entries of the shards if .metadata
is written.
"""


def settings_text(config: Config) -> str:
    """Return the text of config.json. Raises CheckpointError for a value JSON cannot represent."""
    return to_json(plain(config), "the configuration")


def small_files(
    iteration: int,
    settings: str,
    state: Mapping[str, object],
    scalars: Mapping[str, object],
    optimizer: bool,
    provenance: Mapping[str, object] | None,
) -> dict[str, str]:
    """Return the texts of the small files that are known when a save starts, by name.

    `settings` is the result of `settings_text`. Raises CheckpointError for a value that JSON cannot represent.
    """
    contents = {
        "format": FORMAT,
        "iteration": iteration,
        "state": state,
        "engine": scalars,
        "optimizer": optimizer,
    }
    return {
        STATE: to_json(contents, "the state of the training loop"),
        CONFIG: settings,
        PROVENANCE: to_json(provenance or {}, "the provenance"),
    }


def write_shard_list(
    folder: Path, number: int, stored: Entries, with_metadata: bool
) -> _GroupShards:
    """Write a data-parallel group's shard list; return the data that the group sends to rank 0."""
    piece = write_piece(folder, number, stored)
    return piece, totals(stored), stored_bytes(stored), stored if with_metadata else {}


def write_small_files(
    folder: Path,
    groups: list[_GroupShards],
    texts: Mapping[str, str],
    with_metadata: bool,
    generation: int,
) -> int:
    """Check that no elements are missing or written twice, and write the other small files.

    Return the size of the checkpoint in bytes.

    groups          result of `write_shard_list` for each data-parallel group, in order
    texts           texts from `small_files`
    with_metadata   whether to write .metadata
    """
    check_complete(group[1] for group in groups)
    known = dict(
        [*(group[0] for group in groups), write_index(folder, [group[1] for group in groups])]
    )
    if with_metadata:
        write_metadata(folder, merged(group[3] for group in groups))
        known[METADATA] = file_digest(folder / METADATA)
    for name, text in texts.items():
        known[name] = write_text(folder / name, text)
    known[MANIFEST] = write_manifest(folder, list(known), known, generation)
    return sum(size for size, _ in known.values()) + sum(group[2] for group in groups)
