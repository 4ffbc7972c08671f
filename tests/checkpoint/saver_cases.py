"""Cases that the processes of the tests of saving run."""

import contextlib
import dataclasses
import os
import re
import threading
import time
import traceback
from concurrent.futures import wait
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from megatron.checkpoint import save as save_module
from megatron.checkpoint.files import read_manifest
from megatron.checkpoint.find import find_folder
from megatron.checkpoint.load import load
from megatron.checkpoint.save import Saver
from megatron.checkpoint.tensors import LocalShards
from megatron.checkpoint.writer import write_tensors
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology
from tests.engine import toy
from tests.helpers.groups import join

TRACKER = "latest_checkpointed_iteration.txt"


def save(
    directory,
    iteration,
    engine,
    topology,
    config,
    state,
):
    """Save while training waits, and return the checkpoint's folder."""
    saver = Saver(directory, topology, config)
    saved = saver.start(iteration, engine, state)
    saver.finish()
    assert saved is not None
    return saved.folder


def spoil(engine):
    """Fill weights, moments and padding with values that no checkpoint has."""
    for f in engine.fragments():
        for flat in (f.master, *f.moments.values()):
            flat.fill_(77.0)
    for tensor in engine.persistent_tensors.values():
        tensor.fill_(77.0)
    return engine


def loaded(directory, topology):
    """Load into an engine that holds other values."""
    config = toy.config()
    engine = spoil(Engine(config, topology, toy.build(topology)))
    result = load(directory, engine, topology, config)
    return {
        "state": toy.state_pieces(engine),
        "scalars": engine.scalars(),
        "weights": toy.weight_pieces(engine),
        "padding": _padding(engine),
        "elements": sum(f.numel for f in engine.fragments()),
        "taken": (result.iteration, result.state, result.optimizer),
    }


def _padding(engine):
    """Return the largest weight, master or working, in padding."""
    values = [torch.zeros(1)]
    for p in engine.chunks.parameters():
        padded = torch.ones(p.shape, dtype=torch.bool)
        padded[tuple(slice(0, n) for n in sharding_of(p).extent)] = False
        values.append(p.detach()[padded])
        for f in engine.fragments():
            if f.parameter is p:
                flat = padded.view(-1)[f.start : f.start + f.numel]
                values += [buffer[flat] for buffer in (f.master, *f.moments.values())]
    return float(torch.cat(values).abs().max())


@contextlib.contextmanager
def gate():
    """Hold writers, in their threads, until the event is set."""
    opened = threading.Event()

    def write_once_opened(tensors, folder, rank, alive):
        while not opened.wait(0.01):
            alive()
        return write_tensors(tensors, folder, rank, alive)

    with mock.patch.object(save_module, "write_tensors", write_once_opened):
        try:
            yield opened
        finally:
            opened.set()


def instead(here, name, other):
    """Replace a function of the save on a rank; an exception is raised in its place."""
    if not here:
        return contextlib.nullcontext()
    if isinstance(other, Exception):
        other = mock.Mock(side_effect=other)
    return mock.patch.object(save_module, name, other)


def full_disk(here):
    """Write the data file of a rank to a full disk, with the system's own error."""

    def write(tensors, folder, rank, alive):
        (folder / f"__{rank}_0.distcp").symlink_to("/dev/full")
        return write_tensors(tensors, folder, rank, alive)

    return instead(here, "write_tensors", write)


def message(action):
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return "no error"


def listed(root):
    """List the names in a folder on all ranks, while none changes them."""
    dist.barrier()
    names = sorted(p.name for p in root.iterdir())
    dist.barrier()
    return names


def tracker(root):
    return (root / TRACKER).read_text()


class Training:
    """Toy engine that takes steps."""

    def __init__(self, topology):
        self.topology = topology
        self.config = toy.config()
        self.steps = 0
        self.engine = Engine(self.config, topology, toy.build(topology))

    def step(self):
        toy.backward(self.engine, self.topology, self.steps)
        self.engine.step(toy.LR)
        self.steps += 1

    def saver(self, root, alive=lambda: None, **checkpoint):
        config = dataclasses.replace(self.config, checkpoint=toy.ToyCheckpoint(**checkpoint))
        return Saver(root, self.topology, config, alive)

    def save(self, saver, *iterations, background=False):
        for iteration in iterations:
            saver.start(iteration, self.engine, {}, {}, background=background)


def names(*iterations):
    return [*(f"iter_{iteration:07d}" for iteration in iterations), TRACKER]


def expect(actual, expected):
    assert actual == expected, f"{actual} is not {expected}"


def expect_there(root, *iterations):
    """Check the checkpoints in a folder, of which the tracker names the last."""
    expect((listed(root), tracker(root)), (names(*iterations), f"{iterations[-1]}\n"))


def on_two(rank, root, cases):
    """Run the cases of these names, one after another, on two data-parallel ranks.

    Return the error of each.
    """
    training = Training(join())
    errors = {}
    training.step()
    for name in cases:
        errors[name] = ""
        try:
            globals()[name](Path(root) / name, training)
        except AssertionError:
            errors[name] = traceback.format_exc()
    return errors


def copy_of_the_moment_it_was_asked_for(root, training):
    """Continue training while the copy waits to be written, and appears with its commit.

    A synchronous save of the same moment gives the expected state, and the same file to the byte.
    """
    state = toy.state_by_place(training.engine)
    scalars = training.engine.scalars()
    save(root / "sync", 5, training.engine, training.topology, training.config, {"n": 1})
    saver = training.saver(root / "async")
    with gate() as opened:
        none = saver.start(5, training.engine, {"n": 1}, {}, background=True)
        expect((none, saver.pending, saver.written), (None, True, False))
        (there,) = listed(root / "async")
        assert re.fullmatch(r"iter_0000005\.[0-9a-f]{8}\.tmp", there), there
        for _ in range(3):
            training.step()
        opened.set()
        saved = saver.commit()
    later = toy.state_by_place(training.engine)
    assert any((later[key] != values).any() for key, values in state.items())
    file = f"iter_0000005/__{training.topology.rank}_0.distcp"
    assert (root / "sync" / file).read_bytes() == (root / "async" / file).read_bytes()
    size = sum(p.stat().st_size for p in saved.folder.iterdir())
    expect((saved.iteration, saved.bytes, saver.pending), (5, size, False))
    assert 0 < saved.stall_s <= saved.elapsed_s
    expect_there(root / "async", 5)
    reloaded = loaded(root / "async", training.topology)
    toy.assert_same(toy.by_location(reloaded["state"]), state)
    expect((reloaded["scalars"], reloaded["taken"][1]), (scalars, {"n": 1}))


def one_at_a_time(root, training):
    """Start a second save while the first is being written, and end the run with one pending."""
    with gate() as opened:
        # A rank that waits for a thread checks that it is alive; none does before.
        saver = training.saver(root, opened.set)
        training.save(saver, 1, background=True)
        training.step()
        expected = toy.state_by_place(training.engine)
        training.save(saver, 2, background=True)
        there = listed(root)
        assert "iter_0000001" in there and "iter_0000002" not in there, there
    expect(saver.finish().iteration, 2)
    toy.assert_same(toy.by_location(loaded(root, training.topology)["state"]), expected)
    expect_there(root, 1, 2)
    # A save in the foreground waits for the pending one.
    training.save(saver, 3, background=True)
    training.save(saver, 4)
    expect_there(root, 1, 2, 3, 4)


def two_runs_in_one_folder(root, training):
    """Save the same iteration from a second run between the first one's start and its commit.

    As of a job and its requeued copy: one of them fails, and only the other's files appear.
    """
    first = training.saver(root)
    second = training.saver(root, keep_last=1)
    first.start(3, training.engine, {"run": "first"}, {}, background=True)
    wait([first._pending.task.future])
    assert first.written
    training.step()
    expected = toy.state_by_place(training.engine)
    second.start(3, training.engine, {"run": "second"}, {})
    error = message(first.commit)
    second.finish()
    assert "iter_0000003." in error and ".tmp" in error, error
    expect_there(root, 3)
    reloaded = loaded(root, training.topology)
    expect(reloaded["taken"][1], {"run": "second"})
    toy.assert_same(toy.by_location(reloaded["state"]), expected)


def retention(root, training):
    """Keep by --keep-last and --keep-every beside one of --load-tag and a killed save's files.

    10 is named by --load-tag; two are kept, and the multiples of 40.
    """
    saver = training.saver(
        root, keep_last=2, keep_every=40, load=str(root), load_tag="iter_0000010"
    )
    if training.topology.rank == 0:
        (root / "iter_0000099.tmp").mkdir(parents=True)
    retained = [(10,), (10, 20), (10, 20, 30), (10, 30, 40), (10, 40, 50), (10, 40, 50, 60)]
    for iterations in retained:
        training.save(saver, iterations[-1], background=iterations[-1] % 20 == 0)
        saver.finish()
        there = [name for name in listed(root) if len(iterations) > 1 or ".tmp" not in name]
        expect(there, names(*iterations))


def found_without_tracker(root, training):
    """Find the checkpoint to load when the tracker is lost."""
    dist.barrier()
    if training.topology.rank == 0:
        (root / TRACKER).unlink()
    dist.barrier()
    return find_folder(root).name


def no_clock_is_believed(root, training):
    """Keep checkpoints by --keep-last 3 after the clock was a day fast at the first two saves.

    Their files have the wrong time too. Then the last one breaks, and the tracker is lost.
    """
    real_time, saver = time.time, training.saver(root, keep_last=3)
    for iteration in range(2, 18, 2):
        fast_s = 86400.0 if iteration <= 4 else 0.0
        with mock.patch.object(time, "time", lambda: real_time() + fast_s):  # noqa: B023
            training.save(saver, iteration)
            saver.finish()
        if fast_s and training.topology.rank == 0:
            for path in root.rglob("*"):
                os.utime(path, (real_time() + fast_s,) * 2)
    expect_there(root, 12, 14, 16)
    if training.topology.rank == 0:
        (root / "iter_0000016" / "config.json").unlink()
    dist.barrier()
    expect(find_folder(root).name, "iter_0000014")
    expect(found_without_tracker(root, training), "iter_0000014")


def another_branch(root, training):
    """Run to 8; resume another job from 4 to 5, and then to 9; a third job saves elsewhere.

    Checkpoints after 4 are neither loaded nor counted. Seven saves precede that of iteration 10.
    """
    training.save(training.saver(root), 2, 4, 6, 8)
    saver = training.saver(root, keep_last=2, load=str(root), load_tag="4")
    training.save(saver, 5)
    expect(found_without_tracker(root, training), "iter_0000005")
    training.save(saver, 7, 9)
    saver.finish()
    training.save(training.saver(root / "else", load=str(root)), 10)
    expect(read_manifest(root / "else" / "iter_0000010").generation, 8)
    unlistable = root / "else" / "iter_0000010" / "config.json"
    training.save(training.saver(root / "else", load=str(unlistable)), 12)
    expect(read_manifest(root / "else" / "iter_0000012").generation, 9)
    expect(listed(root), ["else", *names(4, 7, 9)])
    expect(found_without_tracker(root, training), "iter_0000009")


def failure_anywhere_leaves_no_trace(root, training):
    """Fail one rank at each stage of a save, each time with a good earlier checkpoint."""
    first, second = (training.topology.rank == rank for rank in range(2))
    saver = training.saver(root, keep_last=1)
    training.save(saver, 1)
    quota = OSError(122, "Disk quota exceeded")
    faults = {
        full_disk(second): "rank 1: OSError: [Errno 28]",
        **{
            instead(first, name, quota): "[Errno 122]"
            for name in ("write_piece", "write_index", "write_manifest", "commit_folder")
        },
        instead(second, "tensors_to_save", MemoryError("no memory")): "rank 1: MemoryError",
        instead(second, "tensors_to_save", lambda *_: {}): "iter_0000002",
    }
    for fault, reason in faults.items():
        with fault:
            text = message(lambda: training.save(saver, 2))
        assert "iter_0000002" in text and reason in text, text
        expect_there(root, 1)
    training.save(saver, 2)
    saver.finish()
    expect_there(root, 2)


def failure_in_the_background(root, training):
    rank = training.topology.rank
    saver = training.saver(root, keep_last=1)
    training.save(saver, 1)
    for action in (saver.commit, lambda: training.save(saver, 3, background=True)):
        with full_disk(rank == 1):
            training.save(saver, 2, background=True)
            text = message(action)
        assert "rank 1: OSError: [Errno 28]" in text and "iter_0000002" in text, text
        expect_there(root, 1)
        assert not saver.pending
    training.save(saver, 3, background=True)
    saver.finish()
    expect_there(root, 3)


CASES = """
    copy_of_the_moment_it_was_asked_for one_at_a_time two_runs_in_one_folder retention
    no_clock_is_believed another_branch failure_anywhere_leaves_no_trace failure_in_the_background
""".split()


def growth_by_saves(rank, root, megabytes):
    """Return by how many times its state a save at once and one behind grow resident memory."""
    state = torch.ones(megabytes << 18)
    rows = state.view(4, -1)
    tensors = {f"w{i}": LocalShards((rows.shape[1],), {(0,): rows[i]}) for i in range(4)}
    engine = mock.Mock(scalars=dict)
    saver = Saver(root, Topology.create(), toy.config())
    with mock.patch.object(save_module, "tensors_to_save", lambda *_: tensors):
        saver.start(1, engine, {}, {})  # what is imported late is not counted
        growth = []
        for background in (False, True):
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            before = resident("VmRSS")
            saver.start(2, engine, {}, {}, background=background)
            saver.finish()
            growth.append((resident("VmHWM") - before) / state.nbytes)
    return growth


def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
