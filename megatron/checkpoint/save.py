"""Saving a checkpoint, while training waits or beside it."""
from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.boxes import (
    Stored,
    Totals,
    check_complete,
    gather,
    in_pieces,
    merged,
    stored_bytes,
    totals,
    write_index,
    write_piece,
    write_whole,
)
from megatron.checkpoint.digest import file_digest
from megatron.checkpoint.find import folders, generations, iteration_of, next_generation, number_of, overtaken
from megatron.checkpoint.folder import (
    CONFIG,
    FORMAT,
    MANIFEST,
    METADATA,
    PASSPORT,
    STATE,
    Written,
    commit_folder,
    folder_name,
    start_folder,
    tagged_name,
    to_json,
    write_text,
)
from megatron.checkpoint.manifest import write_manifest
from megatron.checkpoint.planner import Shards
from megatron.checkpoint.retention import clear, left_over, retire, to_remove
from megatron.checkpoint.settings import plain
from megatron.checkpoint.snapshot import Snapshot
from megatron.checkpoint.tensors import tensors_to_save
from megatron.checkpoint.together import decided_by_first, describe, together
from megatron.checkpoint.writer import Alive, nothing, write_tensors
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.topology import Topology

_LOOK_S = 0.1  # how often a rank that waits for its thread looks for signs of life


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete; the same on every rank but for the times.

    bytes       of all its files
    elapsed_s   from the start of the save to the end of its commit
    stall_s     of these, how long training waited on this rank
    """

    folder: Path
    iteration: int
    bytes: int
    elapsed_s: float
    stall_s: float


class Saver:
    """Writes checkpoints DIRECTORY/iter_NNNNNNN, one at a time. All ranks call each method, in the same order.

    config   .checkpoint.no_save_optim leaves the optimizer's state out; .keep_last and .keep_every, where they are
             there, say which older checkpoints stay; .load_tag, in the same directory, is never removed
    alive    called on the calling thread whenever more has been written

    A checkpoint has its name only when all ranks have written and synced their files and together they hold every
    element once; the tracker file follows. A CheckpointError is raised on every rank when any has failed: then nothing
    has appeared, temporary files are gone, older checkpoints and the tracker are as before, and the next save may be
    started.
    """

    def __init__(
        self, directory: str | os.PathLike[str], topology: Topology, config: Any, alive: Alive = nothing
    ) -> None:
        self._directory = Path(directory).absolute()
        self._topology = topology
        self._config = config
        self._alive = alive
        self._snapshot = Snapshot()
        self._pending: _Pending | None = None
        self._cleaners: list[threading.Thread] = []
        self._generation: int | None = None  # of the last save, on rank 0

    @property
    def pending(self) -> bool:
        """Whether a save in the background waits to be committed: the same on every rank."""
        return self._pending is not None

    @property
    def written(self) -> bool:
        """Whether this rank's thread has written its part of the pending save, or has failed to. No rank is asked."""
        return self._pending is not None and self._pending.writer.done

    @property
    def _optimizer(self) -> bool:
        return not self._config.checkpoint.no_save_optim

    @property
    def snapshot_bytes(self) -> int:
        """Host memory that saves in the background hold on this rank."""
        return self._snapshot.bytes

    def prepare(self, engine: Engine) -> str:
        """Get the host memory that saves in the background take, and pin it, which takes seconds; a note where it could
        not be pinned on this rank. Raises CheckpointError on every rank where one has no memory."""
        with together(self._topology, "getting host memory for --async-save"):
            self._snapshot.reserve(tensors_to_save(engine, self._topology, self._optimizer))
        return self._snapshot.note

    def start(
        self, iteration: int, engine: Engine, state: dict[str, Any], passport: Any = None, background: bool = False
    ) -> Saved | None:
        """Save the engine's state. Without `background` returns when the checkpoint is there.

        state       the caller's own counters, JSON-ready and the same on every rank; `load` gives them back
        passport    what is to be known of the run, JSON-ready; that of rank 0 is written
        background  the state is copied to host memory, which takes as much as a rank's part of it, and a thread writes
                    the copy. Returns None as soon as the copy is made: from then on the engine may change. `commit`
                    makes a checkpoint of what was written.

        An earlier save that is still pending is waited for and committed first; where that fails, its error is raised
        and no new one is started.
        """
        if self._pending is not None:
            self.commit()
        begun = time.perf_counter()
        folder = self._directory / folder_name(iteration)
        pending = _Pending(folder, iteration, begun, self._optimizer)
        try:
            with together(self._topology, pending.what):
                pending.texts = self._texts(pending, engine, state, passport)
                tensors = tensors_to_save(engine, self._topology, pending.optimizer)
                if background:
                    tensors = self._snapshot.take(tensors)
                if self._topology.world.is_first:
                    pending.temporary = start_folder(folder)
                    self._clean(left_over(self._directory, pending.temporary))
            pending.temporary = decided_by_first(self._topology, lambda: pending.temporary)
        except CheckpointError:
            self._remove(pending)
            raise
        texts = pending.texts if self._topology.world.is_first else {}
        pending.writer = _Writer(tensors, texts, pending.temporary, self._topology.rank, self._alive)
        self._pending = pending
        if not background:
            pending.writer.run()
            return self.commit()
        pending.writer.start()
        pending.stall_s = time.perf_counter() - begun
        return None

    def commit(self) -> Saved:
        """Make a checkpoint of the pending save; waits where a rank is still writing."""
        pending, self._pending = self._pending, None
        assert pending is not None, "a save was started in the background before it is committed"
        at = time.perf_counter()
        try:
            with together(self._topology, pending.what), _own_folder(pending):
                mine = pending.writer.result(self._alive)
            size = self._complete(pending, mine)
        except CheckpointError:
            self._remove(pending)
            raise
        now = time.perf_counter()
        stall_s = pending.stall_s + now - at if pending.stall_s else now - pending.begun
        return Saved(pending.folder, pending.iteration, size, now - pending.begun, stall_s)

    def finish(self) -> Saved | None:
        """Wait for what is pending and commit it; also wait until old checkpoints are deleted. None: nothing was."""
        saved = self.commit() if self._pending is not None else None
        for cleaner in self._cleaners:
            while cleaner.is_alive():
                cleaner.join(_LOOK_S)
                self._alive()
        self._cleaners = []
        return saved

    def drop(self) -> None:
        """Give up a pending save: nothing of it stays."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with together(self._topology, f"giving up {pending.what}"):
            pending.writer.stop()
        self._remove(pending)

    # -- what a save consists of -----------------------------------------------------------------------------------

    def _texts(self, pending: _Pending, engine: Engine, state: dict[str, Any], passport: Any) -> dict[str, str]:
        """The small files that are known when a save starts."""
        contents = {
            "format": FORMAT, "iteration": pending.iteration, "state": state, "engine": engine.scalars(),
            "optimizer": pending.optimizer,
        }  # fmt: skip
        return {
            STATE: to_json(contents, "the state of the training loop"),
            CONFIG: to_json(plain(self._config), "the configuration"),
            PASSPORT: to_json({} if passport is None else passport, "the passport"),
        }

    def _complete(self, pending: _Pending, mine: dict[str, Stored]) -> int:
        """Collect the boxes of all ranks, write the lists and small files, give the folder its name; bytes in all."""
        topology = self._topology
        stored = merged(gather(mine, topology.data))
        piece: tuple[str, Written] | None = None
        with together(topology, pending.what), _own_folder(pending):
            if topology.data.is_first:
                piece = write_piece(pending.temporary, topology.model.rank, stored)
                self._alive()
        parts: list[_Part] = []
        if topology.data.is_first:
            assert piece is not None, "it was written above"
            # Up to thousands of ranks the first also makes torch's own list, of all boxes.
            everything = {} if in_pieces(topology) else stored
            parts = gather((piece, totals(stored), stored_bytes(stored), everything), topology.model)

        def complete() -> int:
            try:
                with _own_folder(pending):
                    size = self._write_small(pending, parts)
                    commit_folder(pending.temporary, pending.folder, pending.iteration, pending.generation)
            except Exception as error:
                raise CheckpointError(f"{pending.what} failed: {describe(error)}") from error
            self._retire(pending)
            return size

        return decided_by_first(topology, complete)

    def _write_small(self, pending: _Pending, parts: list[_Part]) -> int:
        """On rank 0: what is known only when all ranks have written; bytes of the whole checkpoint."""
        folder = pending.temporary
        check_complete(part[1] for part in parts)
        known: dict[str, Written] = dict(part[0] for part in parts)
        known.update([write_index(folder, [part[1] for part in parts])])
        if not in_pieces(self._topology):
            write_whole(folder, merged(part[3] for part in parts))
            known[METADATA] = file_digest(folder / METADATA)
        known.update(pending.writer.small)
        pending.generation = self._next_generation()
        known[MANIFEST] = write_manifest(folder, list(known), known, pending.generation)
        return sum(size for size, _ in known.values()) + sum(part[2] for part in parts)

    def _next_generation(self) -> int:
        """One more than the last save's; than all that are there, and where the run was loaded from, for the first."""
        if self._generation is None:
            load = getattr(self._config.checkpoint, "load", None)
            self._generation = next_generation(self._directory, *([load] if load else []))
        else:
            self._generation += 1
        return self._generation

    def _retire(self, pending: _Pending) -> None:
        """On rank 0, after a commit: take older checkpoints out of the list, to be deleted."""
        settings = self._config.checkpoint
        # The checkpoint is there; what is too much goes after the next one.
        with contextlib.suppress(OSError, CheckpointError):
            good = generations(folders(self._directory))
            old = to_remove(
                map(number_of, good), pending.iteration, getattr(settings, "keep_last", None),
                getattr(settings, "keep_every", None), self._named(), list(map(number_of, overtaken(good))),
            )  # fmt: skip
            self._clean(retire(self._directory, old))

    def _clean(self, folders: list[Path]) -> None:
        """Delete folders in a thread, which the process waits for at its end."""
        self._cleaners = [cleaner for cleaner in self._cleaners if cleaner.is_alive()]
        if folders:
            self._cleaners.append(threading.Thread(target=clear, args=(folders,), name="remove-checkpoints"))
            self._cleaners[-1].start()

    def _named(self) -> tuple[int, ...]:
        """The iteration that --load-tag names in this directory."""
        settings = self._config.checkpoint
        load, tag = getattr(settings, "load", None), getattr(settings, "load_tag", None)
        if load is None or tag is None or Path(load).resolve() != self._directory.resolve():
            return ()
        number = iteration_of(Path(tagged_name(str(tag))))
        return () if number is None else (number,)

    def _remove(self, pending: _Pending) -> None:
        """After a failure: the disk may be full of what was written."""
        if self._topology.world.is_first and pending.temporary != Path():
            shutil.rmtree(pending.temporary, ignore_errors=True)


def save(
    directory: str | os.PathLike[str],
    iteration: int,
    engine: Engine,
    topology: Topology,
    config: Any,
    state: dict[str, Any],
    passport: Any = None,
) -> Path:
    """Write DIRECTORY/iter_NNNNNNN and make it the last checkpoint; returns its path. All ranks call it.

    Arguments and errors are those of `Saver`.
    """
    saver = Saver(directory, topology, config)
    saved = saver.start(iteration, engine, state, passport)
    saver.finish()
    assert saved is not None, "it was not written in the background"
    return saved.folder


_Part = tuple[tuple[str, Written], Totals, int, Mapping[str, Stored]]
"""What a data-parallel group tells rank 0: its piece, how much of each tensor it has, bytes of data, boxes."""


class _Pending:
    """A save between its start and its commit."""

    def __init__(self, folder: Path, iteration: int, begun: float, optimizer: bool) -> None:
        self.folder = folder
        self.temporary = Path()  # until rank 0 has made it
        self.iteration = iteration
        self.begun = begun
        self.optimizer = optimizer
        self.what = f"saving checkpoint {folder}"
        self.texts: dict[str, str] = {}
        self.stall_s = 0.0
        self.generation = 0  # known to rank 0 at its commit
        self.writer: _Writer


@contextlib.contextmanager
def _own_folder(pending: _Pending) -> Iterator[None]:
    """Say of a temporary folder that has disappeared what that may mean."""
    try:
        yield
    except FileNotFoundError as error:
        if pending.temporary.exists():
            raise
        raise CheckpointError(
            f"{pending.temporary} was removed while it was written ({error}): is another run saving to the same folder?"
        ) from error


class _Stopped(Exception):
    """Ends a thread whose work nobody wants any more."""


class _Writer:
    """Writes a rank's data file, and the small files `texts`, here or in a thread.

    small   bytes and digest of each small file that was written
    """

    def __init__(
        self, tensors: Mapping[str, Shards], texts: Mapping[str, str], folder: Path, rank: int, alive: Alive
    ) -> None:
        self.small: dict[str, Written] = {}
        self._tensors, self._texts = tensors, texts
        self._folder, self._rank, self._alive = folder, rank, alive
        self._thread: threading.Thread | None = None
        self._stored: dict[str, Stored] = {}
        self._error: BaseException | None = None
        self._progress = 0
        self._stop = False

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def run(self) -> None:
        """Write on this thread. An error is kept for `result`, where all ranks hear of it."""
        self._write(self._alive)

    def start(self) -> None:
        """Write in a thread. It communicates with nobody, and ends with the process rather than to hold it up."""
        self._thread = threading.Thread(target=self._write, args=(self._count,), name="write-checkpoint", daemon=True)
        self._thread.start()
        # A thread that lives into the interpreter's end may take the process down with it.
        atexit.register(self.stop)

    def result(self, alive: Alive) -> dict[str, Stored]:
        """The boxes that were written, when all are; raises what went wrong."""
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
        while not self.done:
            assert self._thread is not None, "without one it is done"
            self._thread.join(_LOOK_S)
            if self._progress != seen:
                seen = self._progress
                alive()
        atexit.unregister(self.stop)

    def _write(self, alive: Alive) -> None:
        try:
            self._stored = write_tensors(self._tensors, self._folder, self._rank, alive)
            for name, text in self._texts.items():
                self.small[name] = write_text(self._folder / name, text)
                alive()
        except BaseException as error:
            self._error = error
        self._tensors = {}

    def _count(self) -> None:
        if self._stop:
            raise _Stopped("the save was given up")
        self._progress += 1
