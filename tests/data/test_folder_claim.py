"""Two programs on one folder: the second is refused; a dead first one is no obstacle."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megatron.data.file_lock import LOCK_NAME, FolderClaim
from megatron.errors import ConfigError
from tests.data.test_file_lock import held_by_another
from tests.helpers.killing import wait_for


def test_a_second_run_is_refused_and_told_whose_the_folder_is(tmp_path: Path) -> None:
    first, said = FolderClaim(tmp_path, f"--save {tmp_path}"), list[str]()
    first.take(said.append)
    second = FolderClaim(tmp_path, f"--save {tmp_path}")
    with pytest.raises(ConfigError, match=rf"--save {tmp_path} .*\b{os.getpid()}\b"):
        second.take(said.append)
    second.release()
    first.release()
    first.release()
    second.take(said.append)
    second.release()
    assert said == [] and list(tmp_path.iterdir()) == []


def test_a_run_of_another_host_is_waited_for(tmp_path: Path) -> None:
    """A run of another host is waited for.

    Its node may have died without the file system's knowledge.
    """
    first, said = FolderClaim(tmp_path, "--save x"), list[str]()
    first.take(said.append)
    (tmp_path / LOCK_NAME).write_text("17\nanother-node\n")
    with pytest.raises(ConfigError, match=r"--save x .*\b17 on another-node"):
        FolderClaim(tmp_path, "--save x", wait_s=0.1).take(said.append)
    assert len(said) == 1 and "17 on another-node" in said[0]
    first.release()


@pytest.mark.slow
def test_a_run_that_was_killed_leaves_the_folder_at_once(tmp_path: Path) -> None:
    pid = held_by_another(tmp_path / LOCK_NAME, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert wait_for(pid) == -signal.SIGKILL and (tmp_path / LOCK_NAME).exists()
    claim, said = FolderClaim(tmp_path, "--save x"), list[str]()
    claim.take(said.append)
    claim.release()
    assert said == []


def test_a_folder_that_takes_no_lock_is_used_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    claim, said = FolderClaim(tmp_path / "file" / "run", "--save x"), list[str]()
    claim.take(said.append)
    claim.release()
    assert len(said) == 1 and "--save x" in said[0]
