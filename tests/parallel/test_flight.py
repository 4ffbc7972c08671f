"""The flight record and its file, from the side of another process."""
from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megatron.parallel.device_calls import DeviceCalls
from megatron.parallel.flight import RECORD_BYTES, Call, FlightRecorder, FlightState
from megatron.parallel.flight_file import file_name, open_flight_file
from megatron.parallel.launch import Launch
from megatron.parallel.processes import DEAD, GONE, STOPPED, kill_process, process_start, process_state
from tests.helpers.clock import VirtualClock
from tests.helpers.killing import forked, wait_for, wait_until_stopped


def launch(rank: int, job: str = "a", node: str = "n1") -> Launch:
    return Launch(rank=rank, local_rank=rank, world_size=4, local_world_size=4, master_port=7, node=node, job=job)


def read(recorder: FlightRecorder) -> FlightState:
    state = FlightState.read(bytes(recorder.buffer))
    assert state is not None
    return state


def test_a_record_says_what_its_rank_does() -> None:
    flight = FlightRecorder()
    assert FlightState.read(bytes(flight.buffer)) is None  # nobody has described it
    flight.describe(5, 4711, "n1:cuda:3", 99, (2, 3, 4))
    flight.step(16)
    with flight.phase("saving"):
        inside = read(flight)
    assert (inside.rank, inside.pid, inside.place, inside.process_start) == (5, 4711, "n1:cuda:3", 99)
    assert (inside.sizes, inside.step, inside.phase) == ((2, 3, 4), 16, "saving")
    assert read(flight).phase == "set-up"
    flight.instruction(b"BACKWARD", 3, 7)
    assert all(part in read(flight).instruction for part in ("BACKWARD", "3", "7"))
    flight.schedule_ends()
    assert read(flight).instruction == ""
    assert flight.enter(b"all_reduce", "data", 400) == 1
    assert read(flight).call == Call("all_reduce", "data", -1, 400, 1)
    flight.leave()
    assert read(flight).call is None
    assert flight.enter(b"all_gather", "data", 8) == 2
    flight.leave()
    flight.enter_wait(b"all_reduce", "data", 400, 1)
    assert read(flight).call == Call("all_reduce", "data", -1, 400, 1)
    assert (read(flight).posted_in("data"), read(flight).posted_in("world")) == (2, 0)
    flight.leave()
    flight.enter_message(b"receive", "pipeline", 64, 9)
    assert read(flight).call == Call("receive", "pipeline", 9, 64, 0)


def test_every_write_but_an_answer_is_progress() -> None:
    flight = FlightRecorder()
    flight.describe(0, 1, "n\udcff")  # of a host whose name is no text
    writes = [
        lambda: flight.step(1), flight.alive, lambda: flight.instruction(b"FORWARD", 0, 0),
        lambda: flight.enter(b"reduce", "world", 1), flight.leave, lambda: flight.enter_wait(b"reduce", "world", 1, 1),
    ]  # fmt: skip
    for write in writes:
        before = flight.progress()
        write()
        assert flight.progress() != before
    before = flight.progress()
    flight.answer(3, 1, "x" * 2 * RECORD_BYTES)
    flight.device_is((b"reduce", 0, -1, 8, 2), [1] * 7)
    assert flight.progress() == before
    state = read(flight)
    assert (state.inquiry, state.flags, len(state.text)) == (3, 1, len(state.text.strip("y")))
    assert 2000 < len(state.text) < RECORD_BYTES
    assert state.posted == (1,) * 7 and state.call == Call("reduce", "world", -1, 1, 1)  # the host's own comes first


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    found = VirtualClock()
    monkeypatch.setattr("megatron.parallel.flight._clock", found)
    return found


def test_times_are_ages(clock: VirtualClock) -> None:
    flight = FlightRecorder()
    flight.describe(0, 1, "n")
    clock.advance(30)
    flight.instruction(b"FORWARD", 0, 0)
    clock.advance(10)
    flight.enter(b"reduce", "world", 1)
    clock.advance(100)
    state = read(flight)
    assert (state.instruction_age_s, state.call_age_s, state.quiet_s) == (110, 100, 100)
    flight.alive()
    clock.advance(7)
    assert (read(flight).call_age_s, read(flight).quiet_s) == (107, 7)
    flight.answer(1, 0, "")
    clock.advance(2)
    assert (read(flight).answer_age_s, read(flight).quiet_s) == (2, 9)


def test_computing_time_leaves_out_waiting(clock: VirtualClock) -> None:
    flight = FlightRecorder()
    for seconds in (3.0, 1.0):
        flight.instruction(b"FORWARD", 0, 0)
        clock.advance(0.25)
        flight.enter(b"all_reduce", "tensor", 8)
        clock.advance(0.5)
        flight.leave()
        clock.advance(seconds - 0.75)
        flight.computed()
        clock.advance(1.0)
    assert flight.computed_s == 3.0 + 1.0 - 2 * 0.5


# -- the file of a node ------------------------------------------------------------------------------------------------


def test_ranks_of_a_node_see_each_other_and_the_last_one_removes_the_file(tmp_path: Path) -> None:
    files = [open_flight_file(launch(rank), tmp_path) for rank in (2, 0)]
    assert all(file is not None for file in files)
    for file, rank in zip(files, (2, 0), strict=True):
        assert file is not None
        file.recorder.describe(rank, os.getpid(), "n1:cpu")
    high, low = files
    assert high is not None and low is not None
    assert [state.rank for state in low.states()] == [0, 2]
    path = low.path
    low.close()
    assert [state.rank for state in high.states()] == [2]
    assert path.exists()
    high.recorder.step(3)
    high.close()
    high.recorder.step(4)  # writes on, for nobody
    high.close()
    assert not path.exists()


def test_jobs_and_nodes_have_files_of_their_own() -> None:
    names = {file_name(launch(0)), file_name(launch(0, job="b")), file_name(launch(0, node="n2"))}
    long_names = {file_name(launch(0, job=f"{'x' * 300}{end}")) for end in "ab"}
    assert len(names) == 3 and len(long_names) == 2
    assert file_name(launch(0)) == file_name(launch(3))
    assert all(len(name) < 250 and "/" not in name for name in long_names | {file_name(launch(0, job="a/../b"))})


@pytest.mark.parametrize("job", ["a", "another"])
def test_what_a_killed_job_left_is_used_again_or_removed(tmp_path: Path, job: str) -> None:
    def write_and_die() -> None:
        file = open_flight_file(launch(1, job=job), tmp_path)
        assert file is not None
        file.recorder.describe(1, os.getpid(), "n1:cpu")
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait_for(forked(write_and_die)) == -signal.SIGKILL
    (stale,) = tmp_path.iterdir()
    file = open_flight_file(launch(0), tmp_path)
    assert file is not None
    assert file.states() == [] and [path.name for path in tmp_path.iterdir()] == [file_name(launch(0))]
    assert stale.exists() == (job == "a")
    file.close()


def test_a_file_in_use_is_left_alone(tmp_path: Path) -> None:
    other = open_flight_file(launch(0, job="b"), tmp_path)
    own = open_flight_file(launch(0), tmp_path)
    assert other is not None and own is not None and other.path.exists()
    other.close()
    own.close()


def test_without_a_folder_there_is_no_file(tmp_path: Path) -> None:
    assert open_flight_file(launch(0), tmp_path / "missing") is None


def test_a_process_is_known_by_its_start() -> None:
    """One that is suspended, and one that nobody has waited for: what Linux says of them is never for a moment only."""
    child = forked(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    assert wait_until_stopped(child)
    start = process_start(child)
    assert start and process_state(child, start) == STOPPED
    assert process_state(child, start + 1) == GONE
    assert not kill_process(child, start + 1) and process_state(child, start) == STOPPED
    assert kill_process(child, start)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert process_state(child, start) == DEAD
    assert wait_for(child) == -signal.SIGKILL and process_state(child, start) == GONE


# -- devices -----------------------------------------------------------------------------------------------------------


class Stream:
    """Events of a device that has come to `now`; each event is recorded at the time that is next in the list."""

    def __init__(self, times: list[float]) -> None:
        self.times, self.now = times, 0.0

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, 0.0

    def record(self) -> None:
        self.at = self.stream.times.pop(0)

    def query(self) -> bool:
        return self.at <= self.stream.now

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later.at - self.at)


def test_a_device_computes_between_its_waits() -> None:
    stream = Stream([1.0, 2.0, 2.5, 4.0, 4.0, 4.25, 5.0, 5.5])
    calls = DeviceCalls(stream.event, timed=True)
    calls.begin()
    calls.enter((b"all_reduce", 1, -1, 8, 1))
    calls.leave()
    calls.end()
    calls.enter((b"reduce", 2, -1, 8, 1))  # between instructions: no computing
    calls.leave()
    calls.begin()
    calls.end()
    assert calls.computed_s == 0.0  # nothing of it has happened
    stream.now = 4.5
    calls.settle()
    assert calls.computed_s == 2.5
    stream.now = 6.0
    calls.settle()
    assert calls.computed_s == 3.0
    assert not calls._calls and len(calls._free) == 8  # all events may be used again


def test_where_a_device_is_that_its_host_has_left_behind() -> None:
    stream = Stream([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    calls = DeviceCalls(stream.event, timed=False)
    infos = [(b"all_reduce", 1, -1, 8, 1), (b"receive", 3, 7, 8, 0), (b"all_reduce", 1, -1, 16, 2)]
    for info in infos:
        calls.begin()  # what only a timed one marks
        calls.enter(info)
        calls.leave()
        calls.end()
    host = [0, 2, 0, 0, 0, 0, 0]
    expected = {0.5: (None, 0), 1.5: (infos[0], 1), 2.5: (None, 1), 3.5: (infos[1], 1), 5.5: (infos[2], 2)}
    for now, (call, reached) in expected.items():
        stream.now = now
        assert calls.where(host) == (call, [0, reached, 0, 0, 0, 0, 0])
