"""Who has a lock, when it is taken over, and that never two take over the same one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data import file_lock
from megatron.data.file_lock import FileLock, Owner, process_start, remove_remains, renamed_into, temporary_name
from tests.helpers.killing import forked, signal_at, wait_for
from tests.helpers.processes import run_processes

REMOTE = replace(Owner.this_process(), host="another-node", machine="00000000")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, owner: Owner) -> Path:
    path.write_text(json.dumps(asdict(owner)))
    return path


def ended_process() -> Owner:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(Owner.this_process(), pid=process.pid, start=process_start(process.pid) or 0)
    process.communicate(b"\n")
    return owner


def test_one_has_it_at_a_time(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "x.lock"), FileLock(tmp_path / "x.lock")
    assert first.acquire() and first.is_ours() and not second.acquire() and not second.is_ours()
    assert f"process {os.getpid()} on " in second.describe()
    second.release()  # which it does not have
    assert first.is_ours()
    first.release()
    assert list(tmp_path.iterdir()) == [] and not first.is_ours() and second.acquire()


def test_start_of_a_process_is_what_the_system_says() -> None:
    ticks = process_start(os.getpid())

    def age_s() -> float:
        return float(Path("/proc/uptime").read_text().split()[0]) - (ticks or 0) / os.sysconf("SC_CLK_TCK")

    before_s = age_s()
    said = subprocess.run(["ps", "-o", "etimes=", "-p", str(os.getpid())], capture_output=True, text=True)
    if said.returncode == 0:
        assert before_s - 2 <= int(said.stdout) <= age_s() + 2
    assert process_start(0) is None and process_start(2**40) is None and process_start(ended_process().pid) is None


def test_lock_of_an_ended_process_is_taken_at_once(tmp_path: Path) -> None:
    owner = ended_process()
    lock = FileLock(write(tmp_path / "x.lock", owner), clock=Clock())
    assert lock.acquire() and lock.taken_from == owner
    assert [path.name for path in tmp_path.iterdir()] == ["x.lock"]


def test_a_killed_process_that_nobody_waited_for_is_gone(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def hold() -> None:
        assert FileLock(tmp_path / "x.lock").acquire()
        os.write(writer, b"x")
        os.kill(os.getpid(), 9)

    pid = forked(hold)
    os.read(reader, 1)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    assert Path(f"/proc/{pid}/stat").exists()
    assert FileLock(tmp_path / "x.lock", clock=Clock()).acquire()
    assert wait_for(pid) == -9


def test_number_used_again_by_another_process(tmp_path: Path) -> None:
    me = Owner.this_process()
    assert not FileLock(write(tmp_path / "x.lock", replace(me, token="other thread"))).acquire()
    assert FileLock(write(tmp_path / "x.lock", replace(me, start=me.start - 1))).acquire()


def test_other_users_processes_may_be_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc mounted with hidepid: a process that can be signalled but not read about is not gone."""
    lock = write(tmp_path / "x.lock", Owner.this_process())

    def hidden(*_: object, **__: object) -> str:
        raise FileNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", hidden)
        assert process_start(os.getpid()) == 0
        assert not FileLock(lock, clock=Clock()).acquire()


@pytest.mark.parametrize(
    ("content", "patience_s"),
    [(json.dumps(asdict(REMOTE)), 60.0), ("", 5.0), ("rubbish", 60.0), ('{"host": 3}', 60.0), ("\x00" * 90, 60.0)],
)
def test_lock_that_is_not_touched_is_taken_when_patience_ends(tmp_path: Path, content: str, patience_s: float) -> None:
    path, clock = tmp_path / "x.lock", Clock()
    path.write_text(content)
    lock = FileLock(path, clock=clock)
    for _ in range(int(patience_s)):
        assert not lock.acquire()
        clock.now += 1
    assert lock.acquire()


def test_touches_keep_it_and_long_gaps_count_little(tmp_path: Path) -> None:
    path, clock = write(tmp_path / "x.lock", REMOTE), Clock()
    os.utime(path, (1, 1))  # decades behind: another machine's clock decides nothing
    lock = FileLock(path, stale_s=60, clock=clock)
    for touch in range(5):
        for _ in range(59):
            assert not lock.acquire()
            clock.now += 1
        os.utime(path, (2 + touch, 2 + touch))
    assert not lock.acquire()
    clock.now += 1000  # we ourselves were suspended, and have seen nothing meanwhile
    assert not lock.acquire()
    clock.now += 50
    assert not lock.acquire()


def test_the_owner_touches_its_lock_until_it_is_released(tmp_path: Path) -> None:
    """A watcher whose clock runs as slow as the touches come never gets it, however long it takes."""
    path, clock = tmp_path / "x.lock", Clock()
    owner, watcher = FileLock(path, stale_s=0.6), FileLock(path, stale_s=0.6, clock=clock)
    assert owner.acquire()
    for _ in range(4):
        before = path.stat().st_mtime_ns
        assert not watcher.acquire()
        while path.stat().st_mtime_ns == before:
            time.sleep(0.01)
        clock.now += 0.5
    assert not watcher.acquire() and owner.is_ours()
    owner.release()
    assert watcher.acquire()


def test_an_owner_that_comes_back_finds_its_lock_taken(tmp_path: Path) -> None:
    path, clock = tmp_path / "x.lock", Clock()
    suspended, other = FileLock(path, stale_s=1e9), FileLock(path, stale_s=5, clock=clock)
    assert suspended.acquire() and not other.acquire()
    clock.now += 6
    assert other.acquire() and other.is_ours() and not suspended.is_ours()
    suspended.release(note="not mine to leave")
    assert other.is_ours() and [p.name for p in tmp_path.iterdir()] == ["x.lock"]


def test_waiting(tmp_path: Path) -> None:
    path = write(tmp_path / "x.lock", REMOTE)
    assert not FileLock(path).wait(0.05)
    assert FileLock(path, stale_s=0.1).wait(60)  # not touched
    lock = FileLock(path)
    assert not lock.acquire()
    write(path, replace(REMOTE, token="another"))
    assert lock.wait(60)  # another owner: there may be news
    path.unlink()
    assert lock.wait(60)


def test_notes_reach_those_who_waited_and_nobody_later(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    early, owner = FileLock(path), FileLock(path)
    assert early.note() is None and owner.acquire()
    owner.release(note="no luck")
    note, late = early.note(), FileLock(path)
    assert note is not None and note.text == "no luck" and f"process {os.getpid()}" in note.owner
    assert late.note() is None and not path.exists()
    owner = FileLock(path)
    assert owner.acquire()
    owner.release(note="no luck")
    assert late.note() is not None  # the same words, and news


def test_a_full_disk_still_leaves_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.lock"
    waiter, owner = FileLock(path), FileLock(path)
    assert owner.acquire()

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_lock, "flush_to_disk", full)
    owner.release(note="no luck")
    note = waiter.note()
    assert note is not None and note.text is None and f"process {os.getpid()}" in note.owner
    assert [p.name for p in tmp_path.iterdir()] == ["x.lock.note"]


def test_a_lock_that_cannot_be_written_is_not_left_behind(tmp_path: Path) -> None:
    """A limit on file sizes fails the write as a full disk does, after the file was created."""

    def child() -> None:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        with pytest.raises(OSError, match="too large"):
            FileLock(tmp_path / "x.lock").acquire()

    assert wait_for(forked(child)) == 0
    assert list(tmp_path.iterdir()) == []


def take_over(rank: int, directory: str, rounds: int) -> list[int]:
    """The rounds whose dead lock this process got."""
    meet(rank, directory, "start")
    taken = [i for i in range(rounds) if FileLock(Path(directory, f"{i}.lock")).acquire()]
    meet(rank, directory, "end")  # or the locks of those who end first would be taken over, as they should
    return taken


def meet(rank: int, directory: str, where: str) -> None:
    Path(directory, f"{where}-{rank}").touch()
    while not all(Path(directory, f"{where}-{i}").exists() for i in range(8)):
        time.sleep(0.001)


def test_of_eight_one_takes_over(tmp_path: Path) -> None:
    rounds, owner = 100, ended_process()
    for i in range(rounds):
        write(tmp_path / f"{i}.lock", owner)
    got = [i for taken in run_processes(8, take_over, str(tmp_path), rounds) for i in taken]
    assert sorted(got) == list(range(rounds))


def test_killed_at_any_moment_of_a_takeover(tmp_path: Path) -> None:
    """Whoever dies while it replaces a dead lock leaves something that the next can replace."""
    owner, moment = ended_process(), 0
    while True:
        folder = tmp_path / str(moment)
        folder.mkdir()
        path = write(folder / "x.lock", owner)

        def take() -> None:
            signal_at(moment, folder)  # noqa: B023
            lock = FileLock(path)  # noqa: B023
            assert lock.acquire()
            lock.release()

        if wait_for(forked(take)) == 0:
            break
        lock = FileLock(path, stale_s=0.1)  # waited for only where an empty file was left
        while not lock.acquire():
            assert lock.wait(60)
        remove_remains(lock, "x.lock")
        assert [p.name for p in folder.iterdir()] == ["x.lock"], moment
        moment += 1
    assert moment > 8


def test_remains_of_the_dead_are_removed_and_nothing_else(tmp_path: Path) -> None:
    dead = ended_process()

    def temporary(name: str, owner: Owner) -> str:
        return f".{name}.{owner.stamp}-1234.tmp"

    write(tmp_path / "x.lock", REMOTE)
    goes = [temporary("x_a.npy", dead), temporary("x_b.npy", REMOTE), ".x_old.tmp", "x.lock.01234567", ".x_folder.tmp"]
    stays = [
        temporary_name(tmp_path / "x_mine.npy").name, temporary("x_c.npy", replace(REMOTE, pid=1)),
        temporary("y_a.npy", dead), ".x_young.tmp", "x_a.npy", "x.lock.note", ".y_old.tmp",
    ]  # fmt: skip
    for name in goes + stays:
        if "folder" in name:
            (tmp_path / name).mkdir()
            (tmp_path / name / "inside").touch()
        else:
            (tmp_path / name).touch()
    write(tmp_path / "x.lock.01234567", dead)
    for name in (".x_old.tmp", ".x_folder.tmp", ".y_old.tmp"):
        os.utime(tmp_path / name, (1, 1))
    clock = Clock()
    lock = FileLock(tmp_path / "x.lock", stale_s=5, clock=clock)
    assert not lock.acquire()
    clock.now += 6
    assert lock.acquire() and lock.taken_from == REMOTE
    remove_remains(lock, "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*stays, "x.lock"])


def test_renamed_into_keeps_what_was_there_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(ZeroDivisionError), renamed_into(tmp_path / "a") as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "old")]
    with renamed_into(tmp_path / "a") as file:
        file.write(b"new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "new")]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*asdict(REMOTE), "x"]), inner),
)


@given(st.text() | _JSON.map(json.dumps) | st.fixed_dictionaries(dict.fromkeys(asdict(REMOTE), _JSON)).map(json.dumps))
def test_any_text_is_an_owner_or_none(text: str) -> None:
    owner = Owner.read(text)
    assert owner is None or (str(owner) and owner.is_gone() in (True, False))


def test_an_owner_reads_what_it_wrote() -> None:
    assert Owner.read(json.dumps(asdict(REMOTE))) == REMOTE and not REMOTE.is_gone()
