"""One process of a node copies; a copy is whole or not there; and whatever happens, the data can be read."""
from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from megatron.data import staging
from megatron.data.file_lock import FileLock
from megatron.data.staging import stage
from tests.data.forks import MOMENTS, at_once, killed_at_each, stopped_at_each
from tests.helpers.clock import VirtualClock
from tests.helpers.killing import wait_for

CHUNK = 1000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_pair(tmp_path / "lustre")


def write_pair(folder: Path, name: str = "corpus", size: int = 10_500, seed: int = 0) -> str:
    """Two files of random bytes; staging does not look into them."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.RandomState(seed)
    for suffix, count in ((".bin", size), (".idx", size // 10)):
        (folder / f"{name}{suffix}").write_bytes(random.bytes(count))
    return str(folder / name)


def contents(prefix: str) -> list[bytes]:
    return [Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")]


def names(target: Path) -> list[str]:
    return sorted(path.name for path in target.iterdir())


class Staged(NamedTuple):
    locations: dict[str, str]
    lines: list[str]


def stage_to(target: Path, *prefixes: str, clock: VirtualClock | None = None, **options: Any) -> Staged:
    """By a clock that stands still."""
    lines: list[str] = []
    clock = clock or VirtualClock()
    options = {"reserve_bytes": 0, "clock": clock, "sleep": clock.sleep} | options
    return Staged(stage(prefixes, str(target), say=lines.append, **options), lines)


def never_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(*_: object) -> None:
        raise AssertionError("copied although it was there")

    monkeypatch.setattr(staging, "_copy_file", copy)


@pytest.mark.parametrize("size", [0, 10, CHUNK, 10_500])
def test_copies_are_what_was_copied_and_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    prefix, target = write_pair(tmp_path / "lustre", size=size), tmp_path / "disk" / "me"
    staged = stage_to(target, prefix)
    location = staged.locations[prefix]
    assert location.startswith(str(target)) and os.path.basename(location) == "corpus"
    assert contents(location) == contents(prefix)
    assert len(staged.lines) == 2 and prefix in staged.lines[0]
    assert names(target) == [Path(location).parent.name, "staged.lock.note"]
    never_copying(monkeypatch)
    again = stage_to(target, prefix)
    assert again.locations == staged.locations and len(again.lines) == 1


def test_changed_data_is_staged_apart(tmp_path: Path, prefix: str) -> None:
    target = tmp_path / "disk"
    old = stage_to(target, prefix).locations[prefix]
    before, changed = contents(prefix), os.stat(f"{prefix}.bin").st_mtime_ns + 1
    write_pair(tmp_path / "lustre", seed=1)  # as large as before
    for suffix in (".bin", ".idx"):
        os.utime(prefix + suffix, ns=(changed, changed))
    new = stage_to(target, prefix).locations[prefix]
    assert new != old and contents(new) == contents(prefix) and contents(old) == before
    # One name in two folders, and the same files by another name.
    other = write_pair(tmp_path / "elsewhere", seed=2)
    (tmp_path / "link").symlink_to(tmp_path / "lustre")
    linked = str(tmp_path / "link" / "corpus")
    both = stage_to(target, other, linked, prefix).locations
    assert contents(both[other]) == contents(other) and both[linked] == both[prefix] == new


@pytest.mark.parametrize("damage", ["short", "unmarked", "marked for another"])
def test_a_copy_that_was_damaged_later_is_not_read(tmp_path: Path, prefix: str, damage: str) -> None:
    location = stage_to(tmp_path / "disk", prefix).locations[prefix]
    folder = Path(location).parent
    if damage == "short":
        os.truncate(f"{location}.bin", 100)
    elif damage == "unmarked":
        (folder / "complete.json").unlink()
    else:
        (folder / "complete.json").write_text('{"bytes": [1, 2]}')
    staged = stage_to(tmp_path / "disk", prefix)
    assert staged.locations == {prefix: prefix} and str(folder) in staged.lines[0]
    shutil.rmtree(folder)
    assert stage_to(tmp_path / "disk", prefix).locations == {prefix: location}


# Falling back


def test_what_fits_is_staged_in_the_given_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """11 + 22 + 5.5 KB on a disk of 20 KB of which 2 stay free: the second does not fit, the third does."""
    sizes = {"a": 10_000, "b": 20_000, "c": 5_000}
    a, b, c = (write_pair(tmp_path / "lustre", name, size) for name, size in sizes.items())
    target = tmp_path / "disk"

    def disk(total: int, free: Callable[[], int]) -> None:
        usage = shutil._ntuple_diskusage  # type: ignore[attr-defined]
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(total, total - free(), free()))

    def free() -> int:
        copies = (path for path in target.rglob("staged-*/*") if path.suffix in (".bin", ".idx"))
        return 20_000 - sum(path.stat().st_size for path in copies)

    disk(20_000, free)
    staged = stage_to(target, a, b, c, reserve_bytes=2_000)
    assert staged.locations[b] == b and a != staged.locations[a] and c != staged.locations[c]
    (note,) = (line for line in staged.lines[:-1] if b in line and "0.02" in line)
    # 22,000 needed, 20,000 - 11,000 free, 2,000 of them to stay: 15,000 too few.
    assert "0.01" in note
    for spare, fits in ((22_000, True), (21_999, False)):  # by default 2 % of the disk stays free
        disk(10**12, lambda spare=spare: 2 * 10**10 + spare)  # type: ignore[misc]
        assert (stage_to(tmp_path / str(spare), b, reserve_bytes=None).locations[b] != b) == fits


def test_data_or_a_target_that_is_not_there(tmp_path: Path, prefix: str) -> None:
    absent = str(tmp_path / "absent")  # whoever reads it says so
    assert stage_to(tmp_path / "disk", absent).locations == {absent: absent}
    staged = stage_to(Path("/dev/null/me"), prefix)
    assert staged.locations == {prefix: prefix} and prefix in staged.lines[0] and "/dev/null/me" in staged.lines[0]


@pytest.mark.parametrize(
    ("function", "after", "number"),
    [("pwrite", 5, errno.ENOSPC), ("preadv", 5, errno.EIO), ("preadv", 20, errno.EIO), ("fsync", 0, errno.EIO)],
)
def test_a_disk_that_fails_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, function: str, after: int, number: int
) -> None:
    real, calls = getattr(os, function), itertools.count()

    def failing(*arguments: Any) -> Any:
        if next(calls) >= after:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(staging.os, function, failing)
        staged = stage_to(tmp_path / "disk", prefix)
    assert staged.locations == {prefix: prefix} and prefix in staged.lines[0]
    assert function == "fsync" or os.strerror(number) in staged.lines[0]
    assert [name for name in names(tmp_path / "disk") if "corpus" in name] == []
    assert stage_to(tmp_path / "disk", prefix).locations != {prefix: prefix}  # a later run tries again


def test_a_disk_that_changes_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    real = os.pwrite

    def write(descriptor: int, data: Any, at: int) -> int:
        data = bytearray(data)
        if at == 3 * CHUNK:
            data[17] ^= 4
        return real(descriptor, data, at)

    monkeypatch.setattr(staging.os, "pwrite", write)
    staged = stage_to(tmp_path / "disk", prefix)
    assert staged.locations == {prefix: prefix} and "3000..4000" in staged.lines[0]
    assert names(tmp_path / "disk") == ["staged.lock.note"]


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(staging.os, "pwrite", lambda d, data, at: pwrite(d, data[:300], at))
    monkeypatch.setattr(staging.os, "preadv", lambda d, buffers, at: preadv(d, [buffers[0][:170]], at))
    location = stage_to(tmp_path / "disk", prefix).locations[prefix]
    assert location != prefix and contents(location) == contents(prefix)


@pytest.mark.parametrize(
    "change",
    [
        lambda source: source.write_bytes(source.read_bytes() + b"more"), lambda source: os.truncate(source, 100),
        lambda source: os.utime(source, (1, 1)), lambda source: source.unlink(),
    ],
    ids=["grown", "shrunk", "touched", "removed"],
)  # fmt: skip
def test_a_source_that_changes_while_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, change: Callable[[Path], object]
) -> None:
    real, calls = os.pwrite, itertools.count()

    def write(descriptor: int, data: Any, at: int) -> int:
        if next(calls) == 0:
            change(Path(f"{prefix}.bin"))
        return real(descriptor, data, at)

    monkeypatch.setattr(staging.os, "pwrite", write)
    staged = stage_to(tmp_path / "disk", prefix)
    assert staged.locations == {prefix: prefix} and prefix in staged.lines[0]
    assert names(tmp_path / "disk") == ["staged.lock.note"]


# Several processes


@pytest.mark.slow
def test_one_of_four_copies(tmp_path: Path) -> None:
    prefixes = [write_pair(tmp_path / "lustre", name, seed=i) for i, name in enumerate("abc")]

    def run(_: int) -> Staged:
        lines: list[str] = []
        return Staged(stage(prefixes, str(tmp_path / "disk"), say=lines.append, reserve_bytes=0), lines)

    results = at_once(4, run)
    locations = results[0].locations
    assert all(found == locations for found, _ in results)
    assert all(contents(locations[prefix]) == contents(prefix) for prefix in prefixes)
    # Each process ends with a line of its own; one copied, and said so of each data set.
    assert sorted(len(lines) for _, lines in results) == [1, 1, 1, 4]


def test_those_who_waited_get_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    """Another process has the lock, finds no room, and says so; the waiter does not try again."""
    target, clock = tmp_path / "disk", VirtualClock()
    target.mkdir()
    lock = FileLock(target / "staged.lock")
    assert lock.acquire()
    never_copying(monkeypatch)
    others: list[str] = []

    def refuse() -> None:
        lock.release()
        others.extend(stage_to(target, prefix, reserve_bytes=2**62).lines)

    clock.at(30, refuse)
    staged = stage_to(target, prefix, clock=clock)
    assert staged.locations == {prefix: prefix} and staged.lines == others and prefix in others[0]


def test_waiting_ends(tmp_path: Path, prefix: str) -> None:
    """With the lines of the one who copies, every ten seconds and none twice, and then with who that is."""
    target, clock = tmp_path / "disk", VirtualClock()
    target.mkdir()
    lock = FileLock(target / "staged.lock", stale_s=1e9)
    assert lock.acquire()
    for second, line in ((5, "begun"), (100, "halfway")):
        clock.at(second, lambda line=line: (target / "staged.progress").write_text(line))
    staged = stage_to(target, prefix, wait_s=200, stale_s=1e9, clock=clock)
    lock.release()
    assert staged.locations == {prefix: prefix} and staged.lines[:2] == ["begun", "halfway"]
    assert prefix in staged.lines[2] and str(os.getpid()) in staged.lines[2] and len(staged.lines) == 4
    assert clock.now - VirtualClock().now == pytest.approx(200)


def test_progress_is_told_every_ten_seconds(tmp_path: Path, prefix: str) -> None:
    target, said = tmp_path / "disk", list[str]()
    seconds = itertools.count(0.0, 2)  # so many pass from one look at the clock to the next
    stage([prefix], str(target), say=said.append, reserve_bytes=0, clock=seconds.__next__)
    # Chunks of 1,000 bytes in 10,500 and 1,050, each copied and then read back: 2 x (11 + 2) looks, and a line on them.
    assert len(said) == 5 + 2 and not (target / "staged.progress").exists()


@pytest.mark.slow
@MOMENTS
def test_killed_at_any_moment(tmp_path: Path, every: bool) -> None:
    """The next process removes what was left and reads a whole copy."""
    prefix, kept = write_pair(tmp_path / "lustre", size=2_500), 0
    for target in killed_at_each(tmp_path, lambda here: stage_to(here, prefix), every):
        staged = stage_to(target, prefix)
        location = staged.locations[prefix]
        assert location != prefix and contents(location) == contents(prefix), target
        if len(staged.lines) == 1:
            kept += 1  # the kill came after the copy had its name
        else:
            assert names(target) == [Path(location).parent.name, "staged.lock.note"], target
    assert kept > 0


@pytest.mark.slow
@MOMENTS
def test_suspended_at_any_moment(tmp_path: Path, every: bool) -> None:
    """Another takes over; the one that comes back reads the copy or the data."""
    prefix = write_pair(tmp_path / "lustre", size=2_500)

    def run(target: Path) -> None:
        location = stage_to(target, prefix).locations[prefix]
        assert location == prefix or contents(location) == contents(prefix)

    for target, pid in stopped_at_each(tmp_path, run, every):
        location = stage_to(target, prefix).locations[prefix]
        os.kill(pid, signal.SIGCONT)
        assert wait_for(pid) == 0, target
        assert location != prefix and contents(location) == contents(prefix), target
