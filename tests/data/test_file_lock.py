"""Who has a lock, when it is taken over, and that never two take over the same one."""
from __future__ import annotations

import json
import os
import queue
import resource
import signal
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data import file_lock
from megatron.data.file_lock import FileLock, Owner, process_start, remove_remains, temporary_name
from tests.data.forks import at_once, context, killed_at_each
from tests.data.locks import REMOTE, ended_process, write_lock
from tests.helpers.clock import VirtualClock
from tests.helpers.killing import forked, wait_for


def waiter(path: Path, clock: VirtualClock, stale_s: float = 60.0) -> FileLock:
    return FileLock(path, stale_s, clock, clock.sleep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_has_it_at_a_time(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "x.lock"), FileLock(tmp_path / "x.lock")
    assert first.acquire() and first.is_ours() and not second.acquire() and not second.is_ours()
    owner = second.owner()
    assert owner is not None and (owner.pid, owner.lives_here()) == (os.getpid(), True)
    second.release()  # which it does not have
    assert first.is_ours()
    first.release()
    assert names(tmp_path) == [] and not first.is_ours() and second.acquire()
    first.release()  # for the second time
    assert second.is_ours()


@pytest.mark.slow
def test_an_ended_process_loses_its_lock_at_once(tmp_path: Path) -> None:
    owner = ended_process()
    lock = waiter(write_lock(tmp_path / "x.lock", owner), VirtualClock())
    assert lock.acquire() and lock.taken_from == owner and names(tmp_path) == ["x.lock"]
    lock.release()
    # One that was killed and that nobody waited for is gone too, though the system still lists it.
    reader, writer = os.pipe()

    def hold() -> None:
        assert FileLock(tmp_path / "x.lock").acquire()
        os.write(writer, b"x")
        os.kill(os.getpid(), signal.SIGKILL)

    pid = forked(hold)
    os.read(reader, 1)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{pid}/stat").exists() and process_start(pid) is None
    assert waiter(tmp_path / "x.lock", VirtualClock()).acquire()
    assert wait_for(pid) == -signal.SIGKILL


def test_number_used_again_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = Owner.this_process()
    assert me.start == process_start(os.getpid()) and process_start(0) is None and process_start(2**40) is None
    lock = write_lock(tmp_path / "x.lock", replace(me, token="another thread"))
    assert not FileLock(lock).acquire()
    with monkeypatch.context() as patch:  # /proc with hidepid: one that cannot be read about is not gone
        patch.setattr(Path, "read_text", lambda *_, **__: os.stat("/nowhere/at/all"))
        assert process_start(os.getpid()) == 0 and not FileLock(lock).acquire()
    assert FileLock(write_lock(lock, replace(me, start=me.start - 1))).acquire()


@pytest.mark.parametrize(
    ("content", "patience_s"),
    [(json.dumps(asdict(REMOTE)), 60), ("", 5), ("rubbish", 60), ('{"host": 3}', 60), ("\x00" * 90, 60)],
)
def test_lock_that_is_not_touched_is_taken_when_patience_ends(tmp_path: Path, content: str, patience_s: int) -> None:
    path, clock = tmp_path / "x.lock", VirtualClock()
    path.write_text(content)
    lock = waiter(path, clock)
    for _ in range(patience_s):
        assert not lock.acquire()
        clock.advance(1)
    assert lock.acquire()


def test_touches_keep_it_and_long_gaps_count_little(tmp_path: Path) -> None:
    path, clock = write_lock(tmp_path / "x.lock", REMOTE), VirtualClock()
    os.utime(path, (1, 1))  # decades behind: another machine's clock decides nothing
    lock = waiter(path, clock)
    for touch in range(5):
        for _ in range(59):
            assert not lock.acquire()
            clock.advance(1)
        os.utime(path, (2 + touch, 2 + touch))
    assert not lock.acquire()
    clock.advance(1000)  # we ourselves were suspended, and have seen nothing meanwhile
    assert not lock.acquire()
    clock.advance(50)
    assert not lock.acquire()


def test_the_owner_touches_its_lock_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    asked: queue.Queue[tuple[threading.Event, float, threading.Thread]] = queue.Queue()
    answers: queue.Queue[bool] = queue.Queue()

    def pause(stop: threading.Event, seconds: float) -> bool:
        asked.put((stop, seconds, threading.current_thread()))
        return answers.get()

    owner, other = FileLock(path, stale_s=60, pause=pause), FileLock(path)
    assert owner.acquire()
    stop, seconds, heart = asked.get()
    for _ in range(3):
        assert seconds <= 60 / 3  # one touch may be lost, and a slow file system takes its time
        os.utime(path, (1, 1))
        answers.put(False)
        stop, seconds, heart = asked.get()
        assert path.stat().st_mtime > 1 and not stop.is_set()
    owner.release()
    assert stop.is_set() and other.acquire()
    os.utime(path, (1, 1))
    answers.put(False)  # a beat that comes late leaves the next owner's lock alone, and is the last
    heart.join()
    assert path.stat().st_mtime == 1 and other.is_ours()
    other.release()


def test_an_owner_that_comes_back_finds_its_lock_taken(tmp_path: Path) -> None:
    path, clock = tmp_path / "x.lock", VirtualClock()
    suspended, other = FileLock(path, stale_s=1e9), waiter(path, clock, 5)
    assert suspended.acquire() and not other.acquire()
    clock.advance(6)
    assert other.acquire() and other.is_ours() and not suspended.is_ours()
    suspended.release(note="not mine to leave")
    assert other.is_ours() and names(tmp_path) == ["x.lock"]


def test_waiting(tmp_path: Path) -> None:
    path, clock = write_lock(tmp_path / "x.lock", REMOTE), VirtualClock()
    lock = waiter(path, clock, stale_s=1e9)
    start = clock.now
    assert not lock.wait(600) and clock.now == pytest.approx(start + 600)
    assert len(clock.slept) < 300 and max(clock.slept) <= 7.5  # gentle on the file system, and no news is older
    for news in (lambda: write_lock(path, replace(REMOTE, token="another")), path.unlink):
        clock.at(100, news)
        start = clock.now
        assert not lock.acquire() and lock.wait(600) and 100 <= clock.now - start < 110
    write_lock(path, REMOTE)
    start = clock.now
    assert waiter(path, clock).wait(600) and 60 <= clock.now - start < 75  # nobody touches it


def test_notes_reach_those_who_waited_and_nobody_later(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    early, owner = FileLock(path), FileLock(path)
    assert early.note() is None and owner.acquire()
    owner.release(note="no luck")
    note, late = early.note(), FileLock(path)
    assert note is not None and note.text == "no luck" and str(os.getpid()) in note.owner
    assert late.note() is None and not path.exists()
    owner = FileLock(path)
    assert owner.acquire()
    owner.release(note="no luck")
    assert late.note() is not None  # the same words, and news


def test_a_full_disk_still_leaves_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.lock"
    waiting, owner = FileLock(path), FileLock(path)
    assert owner.acquire()

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_lock, "flush_to_disk", full)
    owner.release(note="no luck")
    note = waiting.note()
    assert note is not None and note.text is None and str(os.getpid()) in note.owner
    assert names(tmp_path) == ["x.lock.note"]


@pytest.mark.slow
def test_a_lock_that_cannot_be_written_is_not_left_behind(tmp_path: Path) -> None:
    """A limit on file sizes fails the write as a full disk does, after the file was created."""

    def child() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        with pytest.raises(OSError):
            FileLock(tmp_path / "x.lock").acquire()

    assert wait_for(forked(child)) == 0 and names(tmp_path) == []


@pytest.mark.slow
def test_of_four_one_takes_over(tmp_path: Path) -> None:
    rounds, owner, end = 50, ended_process(), context.Barrier(4)
    for i in range(rounds):
        write_lock(tmp_path / f"{i}.lock", owner)

    def take_over(_: int) -> list[int]:
        taken = [i for i in range(rounds) if FileLock(tmp_path / f"{i}.lock").acquire()]
        end.wait()  # or the locks of those who end first would be taken over, as they should
        return taken

    assert sorted(i for taken in at_once(4, take_over) for i in taken) == list(range(rounds))


@pytest.mark.slow
def test_killed_at_any_moment_of_a_takeover(tmp_path: Path) -> None:
    """Whoever dies while it replaces a dead lock leaves something that the next can replace."""
    owner = ended_process()

    def take(folder: Path) -> None:
        lock = FileLock(folder / "x.lock")
        assert lock.acquire()
        lock.release()

    for folder in killed_at_each(tmp_path, take, True, lambda here: write_lock(here / "x.lock", owner)):
        clock = VirtualClock()
        lock = waiter(folder / "x.lock", clock)  # has to wait only where an empty file was left
        while not lock.acquire():
            assert lock.wait(10)
        remove_remains(lock, "x.lock")
        assert names(folder) == ["x.lock"], folder


def test_remains_of_the_dead_are_removed_and_nothing_else(tmp_path: Path) -> None:
    dead = replace(Owner.this_process(), start=1)  # its number is in use again

    def temporary(name: str, owner: Owner) -> str:
        return f".{name}.{owner.stamp}-1234.tmp"

    goes = [temporary("x_a.npy", dead), temporary("x_b.npy", REMOTE), ".x_old.tmp", "x.lock.01234567", ".x_folder.tmp"]
    stays = [
        temporary_name(tmp_path / "x_mine.npy").name, temporary("x_c.npy", replace(REMOTE, pid=1)),
        temporary("y_a.npy", dead), ".x_young.tmp", "x_a.npy", "x.lock.note", ".y_old.tmp",
    ]  # fmt: skip
    for name in goes + stays:
        path = tmp_path / name
        (path / "inside").mkdir(parents=True) if "folder" in name else path.touch()
    write_lock(tmp_path / "x.lock.01234567", dead)
    for name in (".x_old.tmp", ".x_folder.tmp", ".y_old.tmp"):
        os.utime(tmp_path / name, (1, 1))
    clock = VirtualClock()
    lock = waiter(write_lock(tmp_path / "x.lock", REMOTE), clock)
    assert lock.wait(100) and lock.acquire() and lock.taken_from == REMOTE
    remove_remains(lock, "x")
    assert names(tmp_path) == sorted([*stays, "x.lock"])


_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just([])


_OWNERS = st.fixed_dictionaries(dict.fromkeys(asdict(REMOTE), _VALUES))


@given(st.text() | _VALUES.map(json.dumps) | _OWNERS.map(json.dumps))
def test_any_text_is_an_owner_or_none(text: str) -> None:
    owner = Owner.read(text)
    assert owner is None or (str(owner) and owner.is_gone() in (True, False))
    assert Owner.read(json.dumps(asdict(REMOTE))) == REMOTE and not REMOTE.is_gone()


@pytest.mark.campaign("real-time")
def test_a_living_owner_keeps_its_lock_by_the_real_clock(tmp_path: Path) -> None:
    """For ten times as long as a dead one would; then it is stopped, and loses it."""
    path = tmp_path / "x.lock"
    reader, writer = os.pipe()

    def hold() -> None:
        assert FileLock(path, stale_s=1.5).acquire()
        os.write(writer, b"x")
        threading.Event().wait()

    pid = forked(hold)
    os.read(reader, 1)
    lock = FileLock(path, stale_s=1.5)
    assert not lock.acquire() and not lock.wait(15)
    os.kill(pid, signal.SIGSTOP)
    assert lock.wait(60) and lock.acquire()
    os.kill(pid, signal.SIGKILL)
    assert wait_for(pid) == -signal.SIGKILL


def test_a_pipe_in_the_place_of_a_lock_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    assert FileLock(tmp_path / "lock").owner() is None
    assert Owner.read("[" * 5000) is None
