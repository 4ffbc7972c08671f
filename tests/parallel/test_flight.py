"""Flight record and its file, as seen by another process."""

import errno
import os
import signal

from megatron.parallel import flight as flight_module
from megatron.parallel.flight import (
    KINDS,
    RECORD_BYTES,
    CallRecord,
    DeviceCalls,
    FlightFile,
    FlightRecorder,
    FlightState,
    PendingCall,
    file_path,
)
from megatron.parallel.host_processes import (
    DEAD,
    GONE,
    STOPPED,
    kill_process,
    process_start,
    process_state,
)
from megatron.parallel.launch import Launch
from tests.helpers.clock import VirtualClock
from tests.helpers.killing import forked, wait_for, wait_until_stopped


def launch(rank, job="a", node="n1"):
    return Launch(
        rank=rank,
        local_rank=rank,
        world_size=4,
        local_world_size=4,
        master_port=7,
        node=node,
        job=job,
    )


def read(recorder):
    state = FlightState.read(recorder.buffer)
    assert state is not None
    return state


def test_a_record_says_what_its_rank_does():
    flight = FlightRecorder()
    assert FlightState.read(flight.buffer) is None  # not yet described
    flight.describe(5, 4711, "n1:cuda:3", 99)
    flight.step(16)
    with flight.phase("saving"):
        inside = read(flight)
    assert (inside.rank, inside.pid, inside.location, inside.process_start) == (
        5,
        4711,
        "n1:cuda:3",
        99,
    )
    assert (inside.step, inside.phase) == (16, "saving")
    assert read(flight).phase == "set-up"
    flight.instruction(b"BACKWARD", 3, 7)
    assert all(word in read(flight).instruction for word in ("BACKWARD", "3", "7"))
    flight.schedule_ends()
    assert read(flight).instruction == ""
    assert flight.enter(b"all_reduce", "data", 400) == 1
    assert read(flight).call == PendingCall("all_reduce", "data", -1, 400, 1)
    flight.leave()
    assert read(flight).call is None
    assert flight.enter(b"all_gather", "data", 8) == 2
    flight.leave()
    flight.enter(b"all_reduce", "data", 400, sequence=1)
    assert read(flight).call == PendingCall("all_reduce", "data", -1, 400, 1)
    assert (read(flight).posted_in("data"), read(flight).posted_in("world")) == (2, 0)
    flight.leave()
    flight.enter(b"receive", "pipeline", 64, peer=9)
    assert read(flight).call == PendingCall("receive", "pipeline", 9, 64, 0)


def test_every_write_but_an_answer_is_progress():
    flight = FlightRecorder()
    flight.describe(0, 1, "n\udcff")  # of a host whose name is not valid text
    writes = [
        lambda: flight.step(1),
        flight.alive,
        lambda: flight.instruction(b"FORWARD", 0, 0),
        lambda: flight.enter(b"reduce", "world", 1),
        flight.leave,
        lambda: flight.enter(b"reduce", "world", 1, sequence=1),
    ]
    for write in writes:
        before = flight.progress()
        write()
        assert flight.progress() != before
    before = flight.progress()
    flight.answer(3, "x" * 2 * RECORD_BYTES)
    flight.device_is(CallRecord(b"reduce", 0, -1, 8, 2), [1] * len(KINDS))
    assert flight.progress() == before
    state = read(flight)
    assert state.inquiry == 3 and 2000 < len(state.stack) < RECORD_BYTES
    # The host's own comes first.
    assert state.posted == [1] * len(KINDS) and state.call == PendingCall(
        "reduce", "world", -1, 1, 1
    )
    flight.leave()
    assert read(flight).call == PendingCall("reduce", "world", -1, 8, 2)


def test_a_sign_of_life_ends_the_quiet(monkeypatch):
    clock = VirtualClock()
    monkeypatch.setattr(flight_module, "_clock", clock)
    flight = FlightRecorder()
    flight.describe(0, 1, "n")
    clock.advance(30)
    flight.enter(b"reduce", "world", 1)
    clock.advance(100)
    assert read(flight).quiet_s == 100
    flight.alive()
    clock.advance(7)
    flight.answer(1)
    clock.advance(2)
    assert read(flight).quiet_s == 9


# -- the file of a node ----------------------------------------------------------------------------


def test_ranks_of_a_node_see_each_other_and_leave_no_file(tmp_path):
    files = [FlightFile(launch(rank), tmp_path) for rank in (2, 0)]
    for file, rank in zip(files, (2, 0), strict=True):
        file.recorder.describe(rank, os.getpid(), "n1:cpu", process_start(os.getpid()))
    high, low = files
    low.unlink()
    assert not list(tmp_path.iterdir())
    high.unlink()
    assert [state.rank for state in low.states()] == [0, 2]
    assert low.states()[1].process == "running"
    low.close()
    assert [state.rank for state in high.states()] == [2]
    high.recorder.step(3)
    high.close()
    high.recorder.step(4)  # writes on, with no reader
    high.close()


def test_jobs_and_nodes_have_files_of_their_own():
    names = {file_path(launch(0)), file_path(launch(0, job="b")), file_path(launch(0, node="n2"))}
    assert len(names) == 3 and file_path(launch(0)) == file_path(launch(3))
    assert file_path(launch(0, job=f"a/../{'b' * 300}")).parent == file_path(launch(0)).parent


def test_a_file_of_a_job_that_was_killed_is_used_again(tmp_path):
    def write_and_die():
        file = FlightFile(launch(1), tmp_path)
        file.recorder.describe(1, os.getpid(), "n1:cpu")
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait_for(forked(write_and_die)) == -signal.SIGKILL
    file = FlightFile(launch(1), tmp_path)
    assert file.states() == []
    file.close()
    assert not list(tmp_path.iterdir())


def test_a_file_closes_its_own_descriptors_and_no_others(tmp_path, monkeypatch):
    def full(fd, *args):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return allocate(fd, *args)

    allocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    file = FlightFile(launch(0), tmp_path)
    written = memoryview(file._memory)  # by another thread
    file.close()
    with open(os.devnull) as other:
        file.close()
        assert other.read() == ""
    written.release()
    del file
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_is_known_by_its_start():
    """A process is known by its start, if suspended or if never waited for.

    Linux reports a lasting state for both.
    """
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


# -- devices ---------------------------------------------------------------------------------------


class Stream:
    """Events of a device whose time is `now`.

    Each event is recorded at the next time in the list.
    """

    def __init__(self, times):
        self.times = times
        self.now = 0.0

    def event(self):
        return Event(self)


class Event:
    def __init__(self, stream):
        self.stream = stream
        self.at = 0.0

    def record(self):
        self.at = self.stream.times.pop(0)

    def query(self):
        return self.at <= self.stream.now

    def elapsed_time(self, later):
        return 1000 * (later.at - self.at)


def call(kind, peer, size_bytes, sequence):
    return CallRecord(b"call", kind, peer, size_bytes, sequence)


def test_where_a_device_is_that_its_host_has_left_behind():
    stream = Stream([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    calls = DeviceCalls(stream.event)
    infos = [call(1, -1, 8, 1), call(3, 7, 8, 0), call(1, -1, 16, 2)]
    for info in infos:
        calls.begin()  # what only a timed one marks
        calls.enter(info)
        calls.leave()
        calls.end()
    host = [0, 2, 0, 0, 0, 0, 0]
    expected = {
        0.5: (None, 0),
        1.5: (infos[0], 1),
        2.5: (None, 1),
        3.5: (infos[1], 1),
        5.5: (infos[2], 2),
    }
    for now, (current, reached) in expected.items():
        stream.now = now
        assert calls.where(host) == (current, [0, reached, 0, 0, 0, 0, 0])


def test_a_device_has_reached_a_collective_that_it_has_yet_to_wait_for():
    stream = Stream([1.0, 2.0, 3.0, 4.0])
    recorder = FlightRecorder()
    recorder.meter = DeviceCalls(stream.event)
    number = recorder.enter(b"all_gather", "data", 8)
    recorder.leave()
    recorder.enter(b"all_gather", "data", 8, sequence=number)
    recorder.leave()
    stream.now = 2.5
    assert recorder.meter.where(recorder.posted) == (None, recorder.posted)
