"""Two programs on one folder: the second is refused, and a dead first one is no obstacle."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data import folder_claim
from megatron.data.file_lock import FileLock
from megatron.data.folder_claim import JOB_NAME, LOCK_NAME, FolderClaim
from megatron.errors import ConfigError
from tests.helpers.launching import ROOT

SHORT_S = 2.0  # a living owner touches its lock six times in it


@pytest.fixture(autouse=True)
def short_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_claim, "_MARGIN_S", 0.5)


def claim(folder: Path, said: list[str] | None = None, **environ: str) -> FolderClaim:
    made = FolderClaim(folder, f"--save {folder}", environ, SHORT_S)
    made.take((said if said is not None else []).append)
    return made


def claim_of_another_host(folder: Path) -> FileLock:
    """A lock whose process cannot be looked up from here."""
    lock = FileLock(folder / LOCK_NAME, SHORT_S)
    assert lock.acquire()
    lock._mine = lock.path.read_text().replace('"machine": "', '"machine": "x')
    lock.path.write_text(lock._mine)
    return lock


def dead_claim_of_another_host(folder: Path) -> None:
    """As after a node is lost: nobody touches it any more."""
    claim_of_another_host(folder)._stop.set()


def test_a_second_run_is_refused_and_told_whose_the_folder_is(tmp_path: Path) -> None:
    first = claim(tmp_path)
    said: list[str] = []
    with pytest.raises(ConfigError, match=rf"--save {tmp_path} is in use by .*: process \d+ on .*another folder"):
        claim(tmp_path, said)
    assert said == []  # it runs on this host: that is known at once
    first.release()
    claim(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_another_host_is_given_time_to_show_that_it_lives(tmp_path: Path) -> None:
    first = claim_of_another_host(tmp_path)
    said: list[str] = []
    with pytest.raises(ConfigError, match="in use by another run"):
        claim(tmp_path, said)
    assert len(said) == 1 and "waiting" in said[0]
    first.release()


def test_a_run_that_was_killed_on_this_host_leaves_the_folder_at_once(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from megatron.data.folder_claim import FolderClaim\n"
        "FolderClaim(Path(sys.argv[1]), 'x', {}).take(print)\n"
        "os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT).returncode == 9
    assert (tmp_path / LOCK_NAME).exists()
    said: list[str] = []
    claim(tmp_path, said).release()
    assert said == []


def test_a_run_of_a_lost_host_is_waited_for_and_taken_over(tmp_path: Path) -> None:
    dead_claim_of_another_host(tmp_path)
    said: list[str] = []
    claim(tmp_path, said).release()
    assert len(said) == 1 and "waiting" in said[0]


def test_a_requeued_job_does_not_wait_for_its_earlier_start(tmp_path: Path) -> None:
    dead_claim_of_another_host(tmp_path)
    (tmp_path / JOB_NAME).write_text("17 0\n")
    said: list[str] = []
    second = claim(tmp_path, said, SLURM_JOB_ID="17", SLURM_RESTART_COUNT="1")
    assert said == [] and (tmp_path / JOB_NAME).read_text() == "17 1\n"
    with pytest.raises(ConfigError, match="in use"):  # another step of the same start lives
        claim(tmp_path, SLURM_JOB_ID="17", SLURM_RESTART_COUNT="1")
    with pytest.raises(ConfigError, match="in use"):  # another job
        claim(tmp_path, SLURM_JOB_ID="18", SLURM_RESTART_COUNT="2")
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_lock_is_used_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    claim(tmp_path / "file" / "run", said).release()
    assert len(said) == 1 and "cannot be locked" in said[0]
