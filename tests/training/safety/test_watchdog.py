"""Watchdog: when a rank without progress is given up, and real jobs that hang.

The culprit is named, and all ranks end with the exit code of a hang.
"""

import dataclasses
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from megatron.errors import EXIT_LOST_RANK
from megatron.parallel import flight
from megatron.parallel.host_processes import GONE, process_start
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Topology
from megatron.training.safety.watchdog import REPORT_NAME, Watchdog, nccl_error
from tests.helpers.clock import VirtualClock
from tests.helpers.killing import forked, wait_for
from tests.helpers.processes import run_processes_raw
from tests.training.safety.hanging_ranks import train

ENDED = f"ended with exit code {EXIT_LOST_RANK} and no result"
KILLED = "ended with exit code -9 and no result"


# -- one rank, whose seconds are counted -----------------------------------------------------------


def note_the_end(folder, clock):
    """Write the seconds from now to the end of this process to a file."""
    begin = clock.now
    exit_ = os._exit

    def leave(code):
        (folder / "at").write_text(str(clock.now - begin))
        exit_(code)

    os._exit = leave


def watchdog(folder, clock, layout, recorder, states, store=None, **more):
    """Return the watchdog of rank 0 with a limit of 30 s, 300 s for first-time operations."""
    meeting = SimpleNamespace(
        on_inquiry=None,
        judged=threading.Event(),
        flight_file=SimpleNamespace(states=states),
        server=layout.data - 1,
        store=store,
    )
    topology = Topology.from_layout(layout, 0, device=torch.device("cpu"), flight=recorder)
    timing = dict(first_s=300.0, clock=clock, sleep=clock.sleep)
    dog = Watchdog(meeting, topology, 30.0, folder, **timing, **more)
    dog.patient = False
    return dog


def watch(folder, clock, changes):
    """Watch a rank for 30 s, 300 s of first-time operations, with `changes` after some seconds."""
    flight._clock = clock
    recorder = flight.FlightRecorder()
    recorder.describe(0, os.getpid(), "n:cpu")

    def states():
        return [flight.FlightState.read(recorder.buffer)]

    dog = watchdog(folder, clock, Layout(), recorder, states, trace=lambda: b"NCCL")
    acts = {
        "alive": recorder.alive,
        "first": lambda: setattr(dog, "patient", True),
        "suspended": lambda: setattr(clock, "now", clock.now + 3600.0),
        "end": lambda: os._exit(0),
    }
    for seconds, what in changes.items():
        clock.at(seconds, acts[what])
    dog.start()
    threading.Event().wait()  # the watchdog ends this process, or `end` does


@pytest.mark.parametrize(
    ("changes", "at"),
    [
        ({}, 30.0),
        ({20.0: "alive", 40.0: "alive"}, 70.0),
        ({0.0: "first"}, 300.0),
        ({10.0: "suspended"}, 3630.0),  # the job as a whole: an hour in which no rank could work
        ({29.0 * i: "alive" for i in range(1, 30)} | {870.0: "end"}, None),
    ],
)
def test_a_rank_is_given_up_after_its_time_without_a_sign_of_life(
    tmp_path, monkeypatch, changes, at
):
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "traces" / "rank_"))
    clock = VirtualClock()

    def body():
        note_the_end(tmp_path, clock)
        watch(tmp_path, clock, changes)

    code = wait_for(forked(body))
    if at is None:
        assert code == 0 and not (tmp_path / REPORT_NAME).exists()
        return
    assert code == EXIT_LOST_RANK and "rank 0" in (tmp_path / REPORT_NAME).read_text()
    assert (tmp_path / "traces" / "rank_0").read_bytes() == b"NCCL", "torch's flight recorder"
    # It looks once a second, and takes its time to report.
    assert at <= float((tmp_path / "at").read_text()) <= at + 6


def test_an_error_of_nccl_is_looked_into_at_once_and_the_flight_recorder_is_written(
    tmp_path, monkeypatch
):
    """An error of NCCL is examined at once, and the flight recorder is written.

    Rank 1 is gone. Without the error rank 0 would ask for it after 30 s. The store is gone with it.
    """
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "traces" / "rank_"))
    clock, gone = VirtualClock(), forked(lambda: None)
    wait_for(gone)

    def body():
        flight._clock = clock
        here = flight.FlightRecorder()
        there = flight.FlightRecorder()
        here.describe(0, os.getpid(), "n:0", process_start(os.getpid()))
        there.describe(1, gone, "n:1", 1)

        def claim(*_):
            raise RuntimeError("Connection reset by peer")

        def states():
            snapshots = [flight.FlightState.read(each.buffer) for each in (here, there)]
            return [
                dataclasses.replace(state, process=GONE if state.rank else "running")
                for state in snapshots
                if state
            ]

        errors = [""]
        nccl = dict(broken=lambda: errors[0], trace=lambda: b"what NCCL did")
        store = SimpleNamespace(compare_set=claim)
        dog = watchdog(tmp_path, clock, Layout(data=2), here, states, store, **nccl)
        clock.at(10.0, lambda: errors.__setitem__(0, "NCCL reports COMM_ERROR"))
        note_the_end(tmp_path, clock)
        dog.start()
        threading.Event().wait()

    assert wait_for(forked(body)) == EXIT_LOST_RANK
    assert 10.0 <= float((tmp_path / "at").read_text()) <= 16.0
    assert "rank 1" in (tmp_path / REPORT_NAME).read_text()
    assert (tmp_path / "traces" / "rank_0").read_bytes() == b"what NCCL did"


def test_what_nccl_reports_of_a_group_is_named():
    def handle(error):
        backend = SimpleNamespace(get_error=lambda: SimpleNamespace(name=error))
        return SimpleNamespace(_get_backend=lambda device: backend)

    def error_of(**errors):
        # in the order of Topology's groups
        made = iter(["world", "tensor", "data", "pipeline", "model", "embedding"])
        return nccl_error(
            Topology.from_layout(
                Layout(tensor=2, data=2, pipeline=3),
                0,
                device=torch.device("cpu"),
                new_group=lambda ranks: handle(errors.get(next(made, "pair"), "SUCCESS")),
            )
        )

    assert error_of() == ""
    assert "REMOTE_ERROR in the data group of 2 ranks" in error_of(data="REMOTE_ERROR")
    assert "TIMEOUT in the world group" in error_of(world="TIMEOUT")
    assert "TIMEOUT in the pipeline group of 2 ranks" in error_of(pair="TIMEOUT")
    # of a torch that cannot be asked
    old = SimpleNamespace(_get_backend=lambda device: object())
    assert nccl_error(Topology.from_layout(Layout(data=2), 0, new_group=lambda ranks: old)) == ""


# -- several ranks ---------------------------------------------------------------------------------


def hang(
    folder,
    size,
    victims,
    fault,
    tensor=1,
    pipeline=1,
    nodes=1,
    real=False,
):
    """Return the conclusions, the whole report, and how each rank ended."""
    arguments = (size, tensor, pipeline, nodes, victims, fault, str(folder), real)
    ends = [str(value) for _, value in run_processes_raw(size, train, *arguments)]
    path = folder / REPORT_NAME
    text = path.read_text() if path.exists() else ""
    return [line for line in text.splitlines() if "the job hangs" in line], text, ends


@pytest.mark.slow
def test_a_stopped_rank_is_named(tmp_path):
    (conclusion,), text, ends = hang(tmp_path, 2, [1], "stop", pipeline=2)
    assert all(words in conclusion for words in ("rank 1 (", "SIGSTOP", "step 4, in FORWARD"))
    assert "receive of 32 bytes from rank 1" in text
    assert "executor.py" in text.split("Python stacks of rank 0")[1]
    assert ends == [ENDED, KILLED]


@pytest.mark.slow
def test_an_endless_loop_is_named_with_its_place(tmp_path):
    (conclusion,), _, ends = hang(tmp_path, 2, [1], "loop")
    assert (
        "rank 1 (" in conclusion
        and "hanging_ranks.py" in conclusion
        and "endless_loop" in conclusion
    )
    assert ends == [ENDED, ENDED]


@pytest.mark.slow
def test_a_collective_that_was_left_out_is_named(tmp_path):
    (conclusion,), _, ends = hang(tmp_path, 4, [3], "skip", tensor=2)
    assert (
        "rank 1 waits in all_reduce of 64 bytes over its data group (number 4) for rank 3"
        in conclusion
    )
    assert (
        "rank 3 waits in all_reduce of 16 bytes over its world group (number 4) for rank 1"
        in conclusion
    )
    assert ends == [ENDED] * 4


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_node_that_is_silent_as_a_whole_is_named(tmp_path, victim):
    """A node that is silent as a whole is named.

    Rank 0 serves the store: without it the other node cannot tell more.
    """
    (conclusion,), _, ends = hang(tmp_path, 2, [victim], "stop", nodes=2)
    expected = ["rank 1 (", "node1", "rank 0 waits for it"] if victim else ["store", "rank 0"]
    assert all(words in conclusion for words in expected), conclusion
    assert ends == [KILLED if rank == victim else ENDED for rank in range(2)]


@pytest.mark.slow
def test_a_rank_that_is_slow_but_alive_is_no_hang(tmp_path):
    assert hang(tmp_path, 2, [1], "slow") == ([], "", ["done"] * 2)


@pytest.mark.slow
@pytest.mark.campaign("real-time")
@pytest.mark.parametrize(
    ("size", "victims", "fault", "groups", "expected"),
    [
        (3, [1], "stop", dict(pipeline=3), ["rank 1 (", "SIGSTOP", "ranks 0, 2 wait for it"]),
        (4, [3], "stop", dict(tensor=2), ["rank 3 (", "SIGSTOP", "ranks 0-2 wait for it"]),
        (2, [1], "hold", {}, ["rank 1 (", "interpreter"]),
        (4, [2, 3], "stop", dict(nodes=2), ["ranks 2-3 (node1:", "ranks 0-1 wait for them"]),
        (3, [1], "slow", {}, []),
    ],
)
def test_hangs_by_the_real_clock(tmp_path, size, victims, fault, groups, expected):
    conclusions, text, ends = hang(tmp_path, size, victims, fault, **groups, real=True)
    if fault == "slow":
        assert (text, ends) == ("", ["done"] * size)
        return
    (conclusion,) = conclusions
    assert all(words in conclusion for words in expected), conclusion
    assert fault != "hold" or "hold_interpreter" in (tmp_path / "output_1").read_text()
    assert ends == [KILLED if rank in victims else ENDED for rank in range(size)]
