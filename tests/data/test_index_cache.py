"""One process builds, the others wait; locks of the dead are broken; nobody waits for ever."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.data.index_cache import Arrays, CacheEntry, load_or_build
from megatron.errors import DataError
from tests.helpers.processes import run_processes

ENTRY = "some text"
VALUE = {"a": np.arange(5), "b": np.eye(2)}


def never() -> Arrays:
    raise AssertionError("built although it was there")


def build_slowly(rank: int, directory: str) -> tuple[list[int], int]:
    """Counts its calls with a file, so that calls in any process are seen."""

    def build() -> Arrays:
        Path(directory, f"built-{rank}").touch()
        time.sleep(0.3)
        return VALUE

    arrays = load_or_build(ENTRY, ["a", "b"], [Path(directory, "cache")], build)
    return arrays["a"].tolist(), int(arrays["b"].sum())


def test_one_of_several_processes_builds(tmp_path: Path) -> None:
    assert run_processes(4, build_slowly, str(tmp_path)) == [([0, 1, 2, 3, 4], 2)] * 4
    assert len(list(tmp_path.glob("built-*"))) == 1
    # md5 of "some text", by coreutils' md5sum
    key = "552e21cd4cd9918678e3c1a0df491bc3"
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [f"{key}.dsc", f"{key}_a.npy", f"{key}_b.npy"]
    assert (tmp_path / "cache" / f"{key}.dsc").read_text() == ENTRY


def fail(rank: int, directory: str) -> str:
    def build() -> Arrays:
        raise DataError("broken data")

    try:
        load_or_build(ENTRY, ["a"], [directory], build, wait_s=60)
    except DataError as error:
        return str(error)
    return "no error"


def test_a_failed_build_fails_on_every_rank(tmp_path: Path) -> None:
    assert run_processes(3, fail, str(tmp_path), timeout_s=60) == ["broken data"] * 3
    assert list(tmp_path.iterdir()) == []


def lock_of(directory: Path, host: str, pid: int) -> Path:
    directory.mkdir(exist_ok=True)
    path = CacheEntry(directory, ENTRY, ("a", "b")).lock_path
    path.write_text(json.dumps({"host": host, "pid": pid, "time": 0}))
    return path


def test_lock_of_a_dead_process_is_broken(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    lock = lock_of(tmp_path, socket.gethostname(), process.pid)
    arrays = load_or_build(ENTRY, ["a", "b"], [tmp_path], lambda: VALUE, wait_s=60)
    assert arrays["a"].tolist() == [0, 1, 2, 3, 4] and not lock.exists()


@pytest.mark.parametrize("host", [socket.gethostname(), "another-node"])
def test_waiting_ends_with_the_name_of_the_lock(tmp_path: Path, host: str) -> None:
    lock = lock_of(tmp_path, host, os.getpid())
    with pytest.raises(DataError, match=f"{lock}.*process {os.getpid()} on {host}.*delete the lock"):
        load_or_build(ENTRY, ["a", "b"], [tmp_path], never, wait_s=0.05)
    assert lock.exists()


def test_unreadable_lock_is_not_broken(tmp_path: Path) -> None:
    lock = lock_of(tmp_path, "x", 1)
    lock.write_text("")  # its owner has not written yet
    with pytest.raises(DataError, match="an unknown process"):
        load_or_build(ENTRY, ["a", "b"], [tmp_path], never, wait_s=0.05)


def test_directories_in_order(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    load_or_build(ENTRY, ["a", "b"], [near, far], lambda: VALUE)
    assert not near.exists() and len(list(far.iterdir())) == 3
    load_or_build(ENTRY, ["a", "b"], [near, far], never)
    load_or_build(ENTRY, ["a", "b"], [far, near], never)
    other = {"a": np.zeros(1), "b": np.zeros(1)}
    load_or_build(ENTRY, ["a", "b"], [near], lambda: other)
    assert load_or_build(ENTRY, ["a", "b"], [near, far], never)["a"].tolist() == [0]


def test_what_does_not_fit_or_load_is_built_again(tmp_path: Path) -> None:
    load_or_build(ENTRY, ["a"], [tmp_path], lambda: {"a": np.arange(3)})
    arrays = load_or_build(ENTRY, ["a"], [tmp_path], lambda: VALUE, fits=lambda found: len(found["a"]) == 5)
    assert arrays["a"].tolist() == [0, 1, 2, 3, 4]
    path = CacheEntry(tmp_path, ENTRY, ("a",)).part_path("a")
    path.write_bytes(path.read_bytes()[:-8])
    assert load_or_build(ENTRY, ["a"], [tmp_path], lambda: VALUE)["a"].tolist() == [0, 1, 2, 3, 4]


def test_directory_that_cannot_be_written() -> None:
    with pytest.raises(DataError, match=r"/dev/null/cache: .*--data-cache-path"):
        load_or_build(ENTRY, ["a"], ["/dev/null/cache"], lambda: VALUE)
