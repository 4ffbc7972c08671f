"""Locks and claims of folders: their end with the holder, and file systems without flock."""

import errno
import fcntl
import os
import signal
import socket

import pytest

from megatron.data.file_lock import LOCK_NAME, FileLock, FolderClaim, renamed_into
from megatron.errors import ConfigError
from tests.data.forks import at_once
from tests.data.implementations import names
from tests.helpers.killing import forked, wait_for

pytestmark = pytest.mark.filterwarnings("ignore:flock not supported")


def without_flock(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.fixture(params=["flock", "soft"])
def kind(request, monkeypatch):
    """Provide a file system with flock, and one without.

    The latter is like Lustre mounted with neither `flock` nor `localflock`.
    """
    if request.param == "soft":
        monkeypatch.setattr(fcntl, "flock", without_flock)
    return str(request.param)


def held_by_another(path, then):
    """Start a process that takes the lock and then acts; it has the lock when this returns."""
    reader, writer = os.pipe()

    def hold():
        lock = FileLock(path)
        assert lock.acquire()
        os.write(writer, b"x")
        then()

    pid = forked(hold)
    os.read(reader, 1)
    return pid


def test_one_has_it_at_a_time(tmp_path, kind):
    first = FileLock(tmp_path / "x.lock")
    second = FileLock(tmp_path / "x.lock")
    assert first.acquire() and not second.acquire()
    assert second.holder() == (os.getpid(), socket.gethostname())
    assert str(os.getpid()) in second.describe()
    second.release()  # which it does not have
    assert not second.acquire()
    first.release()
    assert names(tmp_path) == [] and second.acquire()
    first.release()  # a second time
    assert not first.acquire()
    second.release()


@pytest.mark.slow
def test_a_process_that_is_killed_loses_it_at_once(tmp_path, kind):
    path = tmp_path / "x.lock"
    pid = held_by_another(path, signal.pause)
    lock = FileLock(path)
    assert not lock.acquire()
    os.kill(pid, signal.SIGKILL)
    assert wait_for(pid) == -signal.SIGKILL
    assert lock.acquire()
    lock.release()


@pytest.mark.slow
def test_of_many_processes_one_has_it(tmp_path, kind):
    """Only one of many processes has the lock. Each adds one to a number by a read and a write."""
    count = tmp_path / "count"
    count.write_text("0")

    def add(_):
        lock = FileLock(tmp_path / "x.lock")
        assert lock.acquire(wait_s=60)
        count.write_text(str(int(count.read_text()) + 1))
        lock.release()

    at_once(6, add)
    assert count.read_text() == "6" and names(tmp_path) == ["count"]


def test_a_holder_here_is_not_waited_for_and_one_elsewhere_is(tmp_path, kind):
    path = tmp_path / "x.lock"
    messages = []
    holder = FileLock(path)
    lock = FileLock(path)
    assert holder.acquire()
    assert not lock.acquire_from_the_dead(messages.append, wait_s=1e9) and messages == []
    path.write_text("17\nelsewhere\n")
    assert not lock.acquire_from_the_dead(messages.append, wait_s=0.1)
    assert len(messages) == 1 and "17 on elsewhere" in messages[0]


def test_a_folder_belongs_to_one_run(tmp_path):
    """A second run is refused; one of another host is waited for, as its node may have died."""
    first = FolderClaim(tmp_path, "--save x")
    second = FolderClaim(tmp_path, "--save x", wait_s=0.1)
    messages = []
    first.take(messages.append)
    with pytest.raises(ConfigError, match=rf"--save x .*\b{os.getpid()}\b"):
        second.take(messages.append)
    second.release()
    assert messages == []
    (tmp_path / LOCK_NAME).write_text("17\nanother-node\n")
    with pytest.raises(ConfigError, match=r"--save x .*\b17 on another-node"):
        second.take(messages.append)
    assert "17 on another-node" in messages.pop()
    first.release()
    first.release()
    second.take(messages.append)
    second.release()
    assert messages == [] and names(tmp_path) == []
    (tmp_path / "file").touch()
    unlockable = FolderClaim(tmp_path / "file" / "run", "--save x")
    unlockable.take(messages.append)
    unlockable.release()
    assert "--save x" in messages.pop()


def test_a_file_appears_complete_or_not_at_all(tmp_path):
    path = tmp_path / "x"
    with renamed_into(path) as file:
        file.write(b"1")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), renamed_into(path) as file:
        file.write(b"2")
        raise ZeroDivisionError
    assert path.read_bytes() == b"1" and names(tmp_path) == ["x"]
