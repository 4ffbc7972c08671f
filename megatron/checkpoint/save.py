"""Saves checkpoints, in the foreground or in the background of training."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

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
from megatron.checkpoint.shared_errors import decided_by_first, describe, errors_on_all_ranks
from megatron.checkpoint.tensors import Snapshot, Tensors, tensors_to_save
from megatron.checkpoint.writer import Alive, nothing, write_tensors
from megatron.config import Config
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.collectives import gather_objects
from megatron.parallel.topology import Topology

METADATA_MAX_RANKS = 4096
"""Largest number of ranks with which a job writes .metadata. With that many ranks and about 10
shards per rank, the file takes 5 MB, and writing it takes rank 0 a second.
"""
_POLL_S = 0.1  # interval at which a rank that waits for a thread checks its progress


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


@dataclass
class _Pending:
    """This rank's part of a save between its start and its commit.

    The calling thread or another one writes the shards.

    folder      the checkpoint's final path
    iteration   completed iterations
    rank        this process's rank in the job, which names its data file
    tensors     shards that this rank writes
    texts       small files that rank 0 writes, by name
    temporary   the folder being written; Path() until rank 0 has created it
    future      result of the thread; None if the calling thread writes
    progress    number of shards that the thread has written
    begun       time.perf_counter() at the start
    stall_s     time spent in `Saver.start`, during which training waited
    """

    folder: Path
    iteration: int
    rank: int
    tensors: Tensors = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    temporary: Path = Path()
    future: Future[Entries] | None = None
    progress: int = 0
    begun: float = field(default_factory=time.perf_counter)
    stall_s: float = 0.0

    @property
    def what(self) -> str:
        return f"saving checkpoint {self.folder}"

    def start(self) -> None:
        """Start a thread that writes this rank's shards; the thread does not communicate."""
        executor = ThreadPoolExecutor(1, "write-checkpoint")
        self.future = executor.submit(self.write, self._count)
        executor.shutdown(wait=False)

    def write(self, alive: Alive) -> Entries:
        """Write this rank's shards, and return their entries."""
        return write_tensors(self.tensors, self.temporary, self.rank, alive)

    def result(self, alive: Alive) -> Entries:
        """Return the entries once all shards are written, or raise the error of a failed write."""
        if self.future is None:
            return self.write(alive)
        seen = self.progress
        while wait([self.future], _POLL_S).not_done:
            if self.progress != seen:
                seen = self.progress
                alive()
        return self.future.result()

    def _count(self) -> None:
        self.progress += 1


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
        """Return whether this rank's thread has finished its part of the pending save or failed.

        There is no communication.
        """
        future = None if self._pending is None else self._pending.future
        return future is not None and future.done()

    def prepare(self, engine: Engine) -> str:
        """Allocate and pin the host memory for saves in the background.

        This takes seconds. Returns a note if the memory on this rank could not be pinned, otherwise
        "". Without a GPU nothing is pinned. Raises CheckpointError on every rank if any rank lacks
        the memory.
        """
        with errors_on_all_ranks(self._topology, "getting host memory for --async-save"):
            self._snapshot.reserve(tensors_to_save(engine, self._topology, self._optimizer))
        return self._snapshot.note

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
                     change. `commit` completes the checkpoint

        An earlier save that is still pending is committed first; if that fails, its error is raised
        and no new save is started.
        """
        if self._pending is not None:
            self.commit()
        folder = self._directory / folder_name(iteration)
        pending = _Pending(folder, iteration, self._topology.rank)
        try:
            with errors_on_all_ranks(self._topology, pending.what):
                pending.texts = small_files(
                    iteration, self._config, state, engine.scalars(), self._optimizer, provenance
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
        self._pending = pending
        if background:
            pending.start()
        pending.stall_s = time.perf_counter() - pending.begun
        return None if background else self.commit()

    def commit(self) -> Saved:
        """Complete the pending save; wait while any rank is still writing."""
        pending = self._pending
        self._pending = None
        assert pending is not None, "a save was started before it is committed"
        at = time.perf_counter()
        try:
            with errors_on_all_ranks(self._topology, pending.what):
                entries = pending.result(self._alive)
            size = self._complete(pending, entries)
        except CheckpointError:
            self._remove(pending)
            raise
        now = time.perf_counter()
        elapsed_s = now - pending.begun
        stall_s = pending.stall_s + now - at
        return Saved(pending.folder, pending.iteration, size, elapsed_s, stall_s)

    def finish(self) -> Saved | None:
        """Commit a pending save, if there is one, and wait until old checkpoints are deleted."""
        saved = self.commit() if self._pending is not None else None
        while self._removal is not None and wait([self._removal], _POLL_S).not_done:
            self._alive()
        return saved

    def _complete(self, pending: _Pending, entries: Entries) -> int:
        """Collect the shards of all ranks, write the lists and commit the folder.

        Return the checkpoint's size in bytes.
        """
        topology = self._topology
        with_metadata = topology.world.size <= METADATA_MAX_RANKS
        stored = merged(gather_objects(entries, topology.data, everywhere=False))
        group: _GroupShards | None = None
        with errors_on_all_ranks(topology, pending.what):
            if topology.data.is_first:
                group = write_shard_list(
                    pending.temporary, topology.model.rank, stored, with_metadata
                )
                self._alive()
        groups = (
            gather_objects(group, topology.model, everywhere=False) if group is not None else []
        )

        def complete() -> int:
            settings = self._config.checkpoint
            try:
                generation = next_generation(self._directory, settings.load)
                size = write_small_files(
                    pending.temporary, groups, pending.texts, with_metadata, generation
                )
                commit_folder(pending.temporary, pending.folder, pending.iteration, generation)
            except Exception as error:
                raise CheckpointError(f"{pending.what} failed: {describe(error)}") from error
            tag = settings.load_tag
            keep = set() if tag is None else {iteration_of(Path(tagged_name(tag)))}
            # The checkpoint is complete: old ones that cannot be removed now are removed after the
            # next save.
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

        return decided_by_first(topology, complete)

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


def small_files(
    iteration: int,
    config: Config,
    state: Mapping[str, object],
    scalars: Mapping[str, object],
    optimizer: bool,
    provenance: Mapping[str, object] | None,
) -> dict[str, str]:
    """Return the texts of the small files that are known when a save starts, by name.

    Raises CheckpointError for a value that JSON cannot represent.
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
        CONFIG: to_json(plain(config), "the configuration"),
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
