"""Two programs on one folder: the second is refused, and a dead first one is no obstacle."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.data.folder_claim import JOB_NAME, LOCK_NAME, STALE_S, FolderClaim
from megatron.errors import ConfigError
from tests.data.locks import REMOTE, write_lock
from tests.helpers.clock import VirtualClock
from tests.helpers.killing import forked, wait_for


class Claims:
    """Claims on one folder, by a clock that stands still."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.said = folder, VirtualClock(), list[str]()

    def take(self, **environ: str) -> FolderClaim:
        clock = self.clock
        made = FolderClaim(self.folder, f"--save {self.folder}", environ, clock=clock, sleep=clock.sleep)
        made.take(self.said.append)
        return made

    def refused(self, pid: int, **environ: str) -> None:
        with pytest.raises(ConfigError, match=rf"--save {self.folder} .*\b{pid}\b"):
            self.take(**environ)


@pytest.fixture
def claims(tmp_path: Path) -> Claims:
    return Claims(tmp_path)


def test_a_second_run_is_refused_and_told_whose_the_folder_is(claims: Claims) -> None:
    first = claims.take()
    claims.refused(os.getpid())
    assert claims.said == [] == claims.clock.slept  # it runs on this host: that is known at once
    first.release()
    first.release()
    claims.take().release()
    assert list(claims.folder.iterdir()) == []


@pytest.mark.parametrize("touches_s", [(), (15,), (5, 10, 15, 20, 25, 30, 35)], ids=str)
def test_a_run_of_another_host_is_given_time_to_show_that_it_lives(claims: Claims, touches_s: tuple[int, ...]) -> None:
    lock = write_lock(claims.folder / LOCK_NAME, REMOTE)
    start = claims.clock.now
    for second in touches_s:
        claims.clock.at(second, lambda second=second: lock.exists() and os.utime(lock, (second, second)))
    if touches_s:
        claims.refused(REMOTE.pid)
        assert lock.exists()
    else:  # a lost host
        claims.take().release()
        assert list(claims.folder.iterdir()) == []
    assert claims.clock.now - start >= STALE_S and len(claims.said) == 1 and str(REMOTE.pid) in claims.said[0]


@pytest.mark.slow
def test_a_run_that_was_killed_on_this_host_leaves_the_folder_at_once(claims: Claims) -> None:
    assert wait_for(forked(lambda: claims.take() and os._exit(9))) == 9
    assert (claims.folder / LOCK_NAME).exists()
    claims.take().release()
    assert claims.said == [] == claims.clock.slept


def test_a_requeued_job_does_not_wait_for_its_earlier_start(claims: Claims) -> None:
    write_lock(claims.folder / LOCK_NAME, REMOTE)
    (claims.folder / JOB_NAME).write_text("17 0\n")
    second = claims.take(SLURM_JOB_ID="17", SLURM_RESTART_COUNT="1")
    assert claims.said == [] == claims.clock.slept and (claims.folder / JOB_NAME).read_text() == "17 1\n"
    claims.refused(os.getpid(), SLURM_JOB_ID="17", SLURM_RESTART_COUNT="1")  # another step of the same start lives
    claims.refused(os.getpid(), SLURM_JOB_ID="18", SLURM_RESTART_COUNT="2")  # another job
    second.release()
    assert list(claims.folder.iterdir()) == []


def test_a_folder_that_takes_no_lock_is_used_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    claims = Claims(tmp_path / "file" / "run")
    claims.take().release()
    assert len(claims.said) == 1 and str(claims.folder) in claims.said[0]
