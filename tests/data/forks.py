"""Forked processes: several at once, and one killed at every relevant moment."""

import contextlib
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.fault_points import record
from tests.helpers.killing import forked, signal_at, wait_for

context = multiprocessing.get_context("fork")  # for semaphores and barriers of processes
Run = Callable[[Path], object]  # writes into the new folder that it is given
# Kills before each renaming and removal; in the campaign, before each operation on a file.
MOMENTS = pytest.mark.parametrize(
    "every",
    [
        pytest.param(False, id="names"),
        pytest.param(True, id="all", marks=pytest.mark.campaign("kills")),
    ],
)


def killed_at_each(folder, run, every, prepare=lambda _: None):
    """Yield the folders that `run` leaves when killed, one for each moment."""
    complete = folder / "whole"
    log = folder / "moments"
    complete.mkdir()
    prepare(complete)
    assert wait_for(forked(lambda: (record(complete, log), run(complete)))) == 0
    for moment, name in enumerate(log.read_text().splitlines()):
        if every or name.startswith(("os.rename", "os.remove")):
            here = folder / f"{moment} {name.replace('/', ' ')}"[:100]
            here.mkdir()
            prepare(here)
            pid = forked(lambda: (signal_at(moment, here), run(here)))  # noqa: B023
            assert wait_for(pid) == -signal.SIGKILL, here
            yield here


def at_once(number, fn):
    """Call `fn` in several processes, after all have started, and return the results."""
    barrier = context.Barrier(number)
    readers = []
    pids = []
    try:
        for rank in range(number):
            reader, writer = os.pipe()
            readers.append(open(reader, "rb"))  # noqa: SIM115

            def child(rank=rank, writer=writer):
                barrier.wait()
                os.write(writer, pickle.dumps(fn(rank)))

            pids.append(forked(child))
            os.close(writer)
        results = [reader.read() for reader in readers]
        assert [wait_for(pids.pop(0)) for _ in range(number)] == [0] * number
        return [pickle.loads(result) for result in results]
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_for(pid)
        for reader in readers:
            reader.close()
