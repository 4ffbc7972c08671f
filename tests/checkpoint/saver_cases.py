"""Cases that the processes of the tests of saving run."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint import save as save_module
from megatron.checkpoint.files import read_manifest
from megatron.checkpoint.find import find_folder
from megatron.checkpoint.load import load
from megatron.checkpoint.save import Saver
from megatron.checkpoint.tensors import tensors_to_save
from megatron.checkpoint.writer import write_tensors
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.topology import Topology
from tests.engine import toy
from tests.helpers.groups import join


def save(
    directory: str | os.PathLike[str],
    iteration: int,
    engine: Engine,
    topology: Topology,
    config: Any,
    state: dict[str, Any],
) -> Path:
    """Save while training waits, and return the checkpoint's folder."""
    saver = Saver(directory, topology, config)
    saved = saver.start(iteration, engine, state)
    saver.finish()
    assert saved is not None
    return saved.folder


class Gate:
    """Gate that holds writers, in their threads, until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def __enter__(self) -> Gate:
        save_module.write_tensors = self._write
        return self

    def __exit__(self, *_: Any) -> None:
        self._open.set()
        save_module.write_tensors = write_tensors

    def open(self) -> None:
        self._open.set()

    def _write(self, tensors: Any, folder: Path, rank: int, alive: Callable[[], None]) -> Any:
        while not self._open.wait(0.01):
            alive()
        return write_tensors(tensors, folder, rank, alive)


class FullDisk:
    """Write the data file of one rank to a full disk, with the system's own error."""

    def __init__(self, here: bool) -> None:
        self._here = here

    def __enter__(self) -> None:
        if self._here:
            save_module.write_tensors = self._write

    def __exit__(self, *_: Any) -> None:
        save_module.write_tensors = write_tensors

    @staticmethod
    def _write(tensors: Any, folder: Path, rank: int, alive: Callable[[], None]) -> Any:
        (folder / f"__{rank}_0.distcp").symlink_to("/dev/full")
        return write_tensors(tensors, folder, rank, alive)


def message(action: Callable[[], Any]) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return "no error"


def listed(root: Path) -> list[str]:
    """List the names in a folder on all ranks, while none changes them."""
    dist.barrier()
    found = sorted(p.name for p in root.iterdir())
    dist.barrier()
    return found


def tracker(root: Path) -> str:
    return (root / "latest_checkpointed_iteration.txt").read_text()


class Training:
    """Toy engine that takes steps."""

    def __init__(self, topology: Topology) -> None:
        self.topology, self.config, self.steps = topology, toy.config(), 0
        self.engine = Engine(self.config, topology, toy.build(topology))

    def step(self) -> None:
        toy.backward(self.engine, self.topology, self.steps)
        self.engine.step(toy.LR)
        self.steps += 1

    def saver(
        self, root: Path, alive: Callable[[], None] = lambda: None, **checkpoint: Any
    ) -> Saver:
        config = dataclasses.replace(self.config, checkpoint=toy.ToyCheckpoint(**checkpoint))
        return Saver(root, self.topology, config, alive)

    def loaded(self, root: Path) -> dict[str, Any]:
        """Return the state that another engine loads."""
        engine = Engine(self.config, self.topology, toy.build(self.topology))
        found = load(root, engine, self.topology, self.config)
        return {
            "state": toy.state_pieces(engine),
            "scalars": engine.scalars(),
            "client": found.state,
        }


def on_two(rank: int, root: str, names: list[str]) -> dict[str, Any]:
    """Run the cases of these names, one after another, on two data-parallel ranks."""
    training = Training(join())
    training.step()
    return {name: globals()[name](Path(root) / name, training) for name in names}


def synchronous(root: Path, training: Training) -> None:
    saver = training.saver(root)
    saved = saver.start(
        7, training.engine, {"samples": 3}, {"who": f"rank {training.topology.rank}"}
    )
    assert saved is not None and not saver.pending and saver.finish() is None


def consistent(root: Path, training: Training) -> dict[str, Any]:
    """Continue training while the copy waits to be written.

    A synchronous save of the same moment gives the expected state.
    """
    before = {"state": toy.state_pieces(training.engine), "scalars": training.engine.scalars()}
    save(root / "sync", 5, training.engine, training.topology, training.config, {"n": 1})
    saver = training.saver(root / "async")
    with Gate() as gate:
        none = saver.start(5, training.engine, {"n": 1}, {}, background=True)
        early = {
            "none": none,
            "pending": saver.pending,
            "written": saver.written,
            "there": listed(root / "async"),
        }
        for _ in range(3):
            training.step()
        gate.open()
        saved = saver.commit()
    file = f"__{training.topology.rank}_0.distcp"
    same = (root / "sync/iter_0000005" / file).read_bytes() == (
        root / "async/iter_0000005" / file
    ).read_bytes()
    size = sum(p.stat().st_size for p in saved.folder.iterdir())
    return {
        "saved": (saved.iteration, saved.bytes == size, 0 < saved.stall_s <= saved.elapsed_s),
        "before": before,
        "after": toy.state_pieces(training.engine),
        "loaded": training.loaded(root / "async"),
        "early": early,
        "same": same,
        "pending": saver.pending,
        "there": listed(root / "async"),
    }


def waits(root: Path, training: Training) -> dict[str, Any]:
    """Start a second save while the first is being written, and end the run with one pending."""
    gate = Gate()
    # A rank that waits for a thread checks that it is alive; none does before.
    saver = training.saver(root, gate.open)
    with gate:
        saver.start(1, training.engine, {}, {}, background=True)
        states = [toy.state_pieces(training.engine)]
        training.step()
        states.append(toy.state_pieces(training.engine))
        saver.start(2, training.engine, {}, {}, background=True)
        after_second = listed(root)
    last = saver.finish()
    assert last is not None
    out: dict[str, Any] = {"after second": after_second, "last": last.iteration, "states": states}
    out |= {"there": listed(root), "loaded": training.loaded(root)}
    # A save in the foreground waits for the pending one.
    saver.start(3, training.engine, {}, {}, background=True)
    saver.start(4, training.engine, {}, {})
    return out | {"in the end": listed(root), "tracker": tracker(root)}


def two_runs(root: Path, training: Training) -> dict[str, Any]:
    """Save the same iteration from a second run between the first one's start and its commit."""
    first, second = training.saver(root), training.saver(root, keep_last=1)
    first.start(3, training.engine, {"run": "first"}, {}, background=True)
    writing = first._pending.future  # type: ignore[union-attr]
    assert writing is not None
    wait([writing])
    assert first.written
    training.step()
    expected = toy.state_pieces(training.engine)
    second.start(3, training.engine, {"run": "second"}, {})
    error = message(first.commit)
    second.finish()
    return {
        "error": error,
        "there": listed(root),
        "expected": expected,
        "loaded": training.loaded(root),
    }


def keeps(root: Path, training: Training) -> dict[str, Any]:
    """Keep by --keep-last and --keep-every beside one of --load-tag and a killed save's files."""
    saver = training.saver(
        root, keep_last=2, keep_every=40, load=str(root), load_tag="iter_0000010"
    )
    if training.topology.rank == 0:
        (root / "iter_0000099.tmp").mkdir(parents=True)
    found = []
    for iteration in (10, 20, 30, 40, 50):
        saver.start(iteration, training.engine, {}, {}, background=iteration % 20 == 0)
        saver.finish()
        found.append(listed(root))
    saver.start(60, training.engine, {}, {})
    saver.finish()
    return {"found": found, "in the end": listed(root)}


def goes_back(root: Path, training: Training) -> dict[str, Any]:
    """Keep by --keep-last after the run went back from 20 to 10 and reached 15 to 30."""
    saver = training.saver(root, keep_last=2)
    for iteration in (10, 20, 15, 30):
        saver.start(iteration, training.engine, {}, {})
    saver.finish()
    return {"there": listed(root)}


def found_without_tracker(root: Path, training: Training) -> str:
    """Find the checkpoint to load when the tracker is lost."""
    dist.barrier()
    if training.topology.rank == 0:
        (root / "latest_checkpointed_iteration.txt").unlink()
    dist.barrier()
    return find_folder(root).name


def wrong_clock(root: Path, training: Training) -> dict[str, Any]:
    """Keep checkpoints by --keep-last 3 after the clock was a day fast at the first two saves.

    Their files have the wrong time too. Then the last one breaks, and the tracker is lost.
    """
    usual, saver = time.time, training.saver(root, keep_last=3)
    for iteration in range(2, 18, 2):
        fast_s = 86400.0 if iteration <= 4 else 0.0
        time.time = lambda: usual() + fast_s  # noqa: B023
        saver.start(iteration, training.engine, {}, {})
        saver.finish()
        time.time = usual
        if fast_s and training.topology.rank == 0:
            for path in root.rglob("*"):
                os.utime(path, (usual() + fast_s,) * 2)
    out: dict[str, Any] = {"there": listed(root)}
    if training.topology.rank == 0:
        (root / "iter_0000016" / "config.json").unlink()
    dist.barrier()
    out["instead"] = find_folder(root).name
    return out | {"without tracker": found_without_tracker(root, training)}


def another_branch(root: Path, training: Training) -> dict[str, Any]:
    """Run to 8; resume another job from 4 to 5, and then to 9; a third job saves elsewhere."""
    saver = training.saver(root)
    for iteration in (2, 4, 6, 8):
        saver.start(iteration, training.engine, {}, {})
    saver = training.saver(root, keep_last=2, load=str(root), load_tag="4")
    saver.start(5, training.engine, {}, {})
    out: dict[str, Any] = {"of 5": found_without_tracker(root, training)}
    for iteration in (7, 9):
        saver.start(iteration, training.engine, {}, {})
    saver.finish()
    training.saver(root / "else", load=str(root)).start(10, training.engine, {}, {})
    out["generation"] = read_manifest(root / "else" / "iter_0000010").generation
    return out | {"there": listed(root), "of 9": found_without_tracker(root, training)}


def fails(root: Path, training: Training) -> dict[str, Any]:
    """Fail one rank at each stage of a save, each time with a good earlier checkpoint."""
    rank, saver = training.topology.rank, training.saver(root, keep_last=1)
    saver.start(1, training.engine, {"good": 1}, {})
    out: dict[str, Any] = {}

    def attempt(name: str, here: bool, attribute: str, error: Exception) -> None:
        usual = getattr(save_module, attribute)

        def fail(*_: Any, **__: Any) -> Any:
            raise error

        if here:
            setattr(save_module, attribute, fail)
        try:
            out[name] = message(lambda: saver.start(2, training.engine, {}, {}))
        finally:
            setattr(save_module, attribute, usual)
        out[f"{name}: there"], out[f"{name}: tracker"] = listed(root), tracker(root)

    with FullDisk(here=rank == 1):
        out["full"] = message(lambda: saver.start(2, training.engine, {}, {}))
    out["full: there"], out["full: tracker"] = listed(root), tracker(root)
    quota = OSError(122, "Disk quota exceeded")
    attempt("piece", rank == 0, "write_piece", quota)
    attempt("index", rank == 0, "write_index", quota)
    attempt("manifest", rank == 0, "write_manifest", quota)
    attempt("commit", rank == 0, "commit_folder", quota)
    attempt("tensors", rank == 1, "tensors_to_save", MemoryError("no memory"))
    save_module.tensors_to_save = (lambda *_: {}) if rank == 1 else tensors_to_save
    out["parts"] = message(lambda: saver.start(2, training.engine, {}, {}))
    save_module.tensors_to_save = tensors_to_save
    out["parts: there"], out["parts: tracker"] = listed(root), tracker(root)
    saver.start(2, training.engine, {}, {})
    saver.finish()
    return out | {"in the end": listed(root), "at last": tracker(root)}


def fails_in_the_background(root: Path, training: Training) -> dict[str, Any]:
    rank, saver = training.topology.rank, training.saver(root, keep_last=1)
    saver.start(1, training.engine, {}, {})
    with FullDisk(here=rank == 1):
        saver.start(2, training.engine, {}, {}, background=True)
        found = message(saver.commit)
    out = {
        "message": found,
        "there": listed(root),
        "tracker": tracker(root),
        "pending": saver.pending,
    }
    with FullDisk(here=rank == 1):
        saver.start(2, training.engine, {}, {}, background=True)
        out["second"] = message(lambda: saver.start(3, training.engine, {}, {}, background=True))
    out["then pending"] = saver.pending
    saver.start(3, training.engine, {}, {}, background=True)
    saver.finish()
    return out | {"in the end": listed(root), "at last": tracker(root)}


def peak_of_a_save(rank: int, root: str, megabytes: int, background: bool) -> tuple[int, int]:
    """Return the bytes by which a save grows a process's resident memory, and its state's."""
    from megatron.checkpoint.tensors import Shards

    topology = Topology.create()
    state = torch.ones(megabytes << 18)
    parts = state.view(4, -1)
    tensors = {f"w{i}": Shards((parts.shape[1],), {(0,): parts[i]}) for i in range(4)}
    save_module.tensors_to_save = lambda *_: tensors  # type: ignore[assignment]

    class Scalars:
        def scalars(self) -> dict[str, Any]:
            return {}

    saver = Saver(root, topology, toy.config())
    saver.start(1, Scalars(), {}, {})  # type: ignore[arg-type]  # what is imported late is not counted
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    saver.start(2, Scalars(), {}, {}, background=background)  # type: ignore[arg-type]
    saver.finish()
    return resident("VmHWM") - before, state.nbytes


def resident(name: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) * 1024
