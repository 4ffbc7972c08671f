"""One process of a node copies; a copy is whole or not there; and whatever happens, the data can be read."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from megatron.data import staging
from megatron.data.staging import stage
from tests.helpers.killing import forked, signal_at, wait_for, wait_until_stopped
from tests.helpers.processes import run_processes

CHUNK = 1000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", CHUNK)


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


def stage_to(target: Path, *prefixes: str, **options: Any) -> Staged:
    lines: list[str] = []
    options = {"reserve_bytes": 0, "wait_s": 100} | options
    return Staged(stage(prefixes, str(target), say=lines.append, **options), lines)


def never_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(*_: object) -> None:
        raise AssertionError("copied although it was there")

    monkeypatch.setattr(staging, "_copy_file", copy)


@pytest.mark.parametrize("size", [0, 10, CHUNK, 10_500])
def test_copies_are_what_was_copied_and_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    prefix = write_pair(tmp_path / "lustre", size=size)
    staged = stage_to(tmp_path / "disk" / "me", prefix)
    location = staged.locations[prefix]
    assert location.startswith(str(tmp_path / "disk" / "me")) and os.path.basename(location) == "corpus"
    assert contents(location) == contents(prefix)
    assert "(" in staged.lines[0] and "MB/s), checked" in staged.lines[0]
    assert staged.lines[1].startswith("1 of 1 data sets are read from")
    assert names(tmp_path / "disk" / "me") == [Path(location).parent.name, "staged.lock.note"]
    never_copying(monkeypatch)
    again = stage_to(tmp_path / "disk" / "me", prefix)
    assert again.locations == staged.locations and len(again.lines) == 1


def test_changed_data_is_staged_apart(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "lustre")
    old = stage_to(tmp_path / "disk", prefix).locations[prefix]
    before = contents(prefix)
    write_pair(tmp_path / "lustre", seed=1)  # as large as before
    new = stage_to(tmp_path / "disk", prefix).locations[prefix]
    assert new != old and contents(new) == contents(prefix) and contents(old) == before
    # One name in two folders, and the same files by another name.
    other = write_pair(tmp_path / "elsewhere", seed=2)
    (tmp_path / "link").symlink_to(tmp_path / "lustre")
    linked = str(tmp_path / "link" / "corpus")
    both = stage_to(tmp_path / "disk", other, linked, prefix).locations
    assert contents(both[other]) == contents(other) and both[linked] == both[prefix] == new


@pytest.mark.parametrize("damage", ["short", "unmarked", "marked for another"])
def test_a_copy_that_was_damaged_later_is_not_read(tmp_path: Path, damage: str) -> None:
    prefix = write_pair(tmp_path / "lustre")
    location = stage_to(tmp_path / "disk", prefix).locations[prefix]
    marker = Path(location).parent / "complete.json"
    if damage == "short":
        os.truncate(f"{location}.bin", 100)
    elif damage == "unmarked":
        marker.unlink()
    else:
        marker.write_text('{"bytes": [1, 2]}')
    staged = stage_to(tmp_path / "disk", prefix)
    assert staged.locations == {prefix: prefix} and f"delete {Path(location).parent}" in staged.lines[0]
    shutil.rmtree(Path(location).parent)
    assert stage_to(tmp_path / "disk", prefix).locations == {prefix: location}


def test_missing_data_is_left_to_the_reader(tmp_path: Path) -> None:
    assert stage_to(tmp_path / "disk", str(tmp_path / "absent")).locations == {
        str(tmp_path / "absent"): str(tmp_path / "absent")
    }


# Falling back


def test_what_fits_is_staged_in_the_given_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """11 + 22 + 5.5 KB on a disk of 20 KB of which 2 stay free: the second does not fit, the third does."""
    sizes = {"a": 10_000, "b": 20_000, "c": 5_000}
    prefixes = [write_pair(tmp_path / "lustre", name, size) for name, size in sizes.items()]
    target = tmp_path / "disk"

    def usage(_: object) -> Any:
        used = sum(path.stat().st_size for path in target.rglob("staged-*/*") if path.suffix in (".bin", ".idx"))
        return shutil._ntuple_diskusage(20_000, used, 20_000 - used)  # type: ignore[attr-defined]

    monkeypatch.setattr(shutil, "disk_usage", usage)
    a, b, c = prefixes
    staged = stage_to(target, *prefixes, reserve_bytes=2_000)
    assert staged.locations[b] == b and a != staged.locations[a] and c != staged.locations[c]
    (note,) = (line for line in staged.lines if "note" in line)
    # 22,000 needed, 20,000 - 11,000 free, 2,000 of them to stay: 15,000 too few.
    assert f"{b} is read from where it lies: it needs 0.02 MB" in note and "0.01 MB too few" in note
    assert staged.lines[-1].startswith("2 of 3 data sets are read from")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 0, 10**12))  # type: ignore[attr-defined]
    assert stage_to(tmp_path / "large", b, reserve_bytes=None).locations[b] != b
    # By default 2 % of the disk stays free.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 0, 2 * 10**10 + 21_999))  # type: ignore[attr-defined]
    assert stage_to(tmp_path / "small", b, reserve_bytes=None).locations[b] == b


def test_a_target_that_is_no_folder(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "lustre")
    staged = stage_to(Path("/dev/null/me"), prefix)
    assert staged.locations == {prefix: prefix}
    assert f"note: {prefix} is read from where it lies: /dev/null/me cannot be written: Not a directory" in staged.lines


def failing(real: Callable[..., int], after: int, number: int) -> Callable[..., int]:
    calls = 0

    def call(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    return call


@pytest.mark.parametrize(
    ("function", "number", "words"),
    [("pwrite", errno.ENOSPC, "No space left"), ("preadv", errno.EIO, "Input/output error"), ("fsync", errno.EIO, "")],
)
def test_a_disk_that_fails_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int, words: str
) -> None:
    prefix = write_pair(tmp_path / "lustre")
    after = 0 if function == "fsync" else 5
    with monkeypatch.context() as patch:
        patch.setattr(staging.os, function, failing(getattr(os, function), after, number))
        staged = stage_to(tmp_path / "disk", prefix)
    assert staged.locations == {prefix: prefix}
    assert "copying failed: " in staged.lines[0] and words in staged.lines[0]
    assert [name for name in names(tmp_path / "disk") if "corpus" in name] == []
    assert stage_to(tmp_path / "disk", prefix).locations != {prefix: prefix}  # a later run tries again


def test_a_disk_that_changes_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_pair(tmp_path / "lustre")
    real = os.pwrite

    def write(descriptor: int, data: Any, at: int) -> int:
        data = bytearray(data)
        if at == 3 * CHUNK:
            data[17] ^= 4
        return real(descriptor, data, at)

    monkeypatch.setattr(staging.os, "pwrite", write)
    staged = stage_to(tmp_path / "disk", prefix)
    assert staged.locations == {prefix: prefix}
    assert "its copy differs in bytes 3000..4000: the disk is at fault" in staged.lines[0]
    assert names(tmp_path / "disk") == ["staged.lock.note"]


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_pair(tmp_path / "lustre")
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(staging.os, "pwrite", lambda d, data, at: pwrite(d, data[:300], at))
    monkeypatch.setattr(staging.os, "preadv", lambda d, buffers, at: preadv(d, [buffers[0][:170]], at))
    location = stage_to(tmp_path / "disk", prefix).locations[prefix]
    assert location != prefix and contents(location) == contents(prefix)


@pytest.mark.parametrize("change", ["grown", "shrunk", "touched", "removed"])
def test_a_source_that_changes_while_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    prefix = write_pair(tmp_path / "lustre")
    source = Path(f"{prefix}.bin")
    real, calls = os.pwrite, 0

    def write(descriptor: int, data: Any, at: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            if change == "grown":
                source.write_bytes(source.read_bytes() + b"more")
            elif change == "shrunk":
                os.truncate(source, 100)
            elif change == "touched":
                os.utime(source, (1, 1))
            else:
                source.unlink()
        return real(descriptor, data, at)

    monkeypatch.setattr(staging.os, "pwrite", write)
    staged = stage_to(tmp_path / "disk", prefix)
    assert staged.locations == {prefix: prefix} and "note: " in staged.lines[0]
    assert names(tmp_path / "disk") == ["staged.lock.note"]


# Several processes


def stage_in_process(rank: int, folder: str, prefixes: list[str], target: str) -> tuple[dict[str, str], list[str]]:
    staging.CHUNK_BYTES = CHUNK
    Path(folder, f"here-{rank}").touch()
    while len(list(Path(folder).glob("here-*"))) < 8:
        time.sleep(0.001)
    lines: list[str] = []
    return stage(prefixes, target, say=lines.append, wait_s=200, reserve_bytes=0), lines


def test_one_of_eight_copies(tmp_path: Path) -> None:
    prefixes = [write_pair(tmp_path / "lustre", name, seed=i) for i, name in enumerate("abc")]
    target = tmp_path / "disk"
    results = run_processes(8, stage_in_process, str(tmp_path), prefixes, str(target))
    locations = results[0][0]
    assert all(found == locations for found, _ in results)
    assert all(contents(locations[prefix]) == contents(prefix) for prefix in prefixes)
    copied = [line for _, lines in results for line in lines if "checked" in line]
    assert len(copied) == 3


def test_those_who_waited_get_the_reason(tmp_path: Path) -> None:
    """Another process has the lock, finds no room, and says so; the waiter does not try again."""
    prefix = write_pair(tmp_path / "lustre")
    target = tmp_path / "disk"
    target.mkdir()
    waiting = os.pipe()
    lock = staging.FileLock(target / "staged.lock")
    assert lock.acquire()

    def wait() -> None:
        real = staging.FileLock.wait

        def tell(lock: staging.FileLock, timeout_s: float) -> bool:
            os.write(waiting[1], b"x")
            return real(lock, timeout_s)

        staging.FileLock.wait = tell  # type: ignore[method-assign]
        staging._copy_all = None  # type: ignore[assignment]  # to be called would be an error
        staged = stage_to(target, prefix)
        assert staged.locations == {prefix: prefix} and "is read from where it lies: no room" in staged.lines[0]

    child = forked(wait)
    os.read(waiting[0], 1)
    pair = staging._Pair.of(prefix, target)
    assert pair is not None
    lock.release(note=f'{{"{pair.folder.name}": "no room"}}')
    assert wait_for(child) == 0


def test_progress_is_told_by_those_who_copy_and_who_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_pair(tmp_path / "lustre")
    target = tmp_path / "disk"
    monkeypatch.setattr(staging, "_PROGRESS_S", 0.0)
    lines = stage_to(target, prefix).lines
    told = [line for line in lines if line.startswith(f"staging in {target}: ")]
    assert len(told) == 2 * (11 + 2)  # chunks of 1,000 bytes in 10,500 and 1,050, each copied and then read back
    assert any("0.01 MB of 0.01 MB copied, 0.01 MB checked" in line for line in told)
    assert not (target / "staged.progress").exists()


def test_waiting_ends(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "lustre")
    target = tmp_path / "disk"
    target.mkdir()
    lock = staging.FileLock(target / "staged.lock")
    assert lock.acquire()
    (target / "staged.progress").write_text("halfway")
    staged = stage_to(target, prefix, wait_s=0.1)
    lock.release()
    assert staged.locations == {prefix: prefix} and staged.lines[0] == "halfway"
    assert f"waited 0.1 s for process {os.getpid()} on" in staged.lines[1]


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """The next process removes what was left and reads a whole copy."""
    prefix, moment, kept = write_pair(tmp_path / "lustre", size=2_500), 0, 0
    while True:
        target = tmp_path / f"disk-{moment}"
        target.mkdir()

        def child() -> None:
            signal_at(moment, target)  # noqa: B023
            stage_to(target, prefix)  # noqa: B023

        if wait_for(forked(child)) == 0:
            break
        staged = stage_to(target, prefix, stale_s=0.1)
        location = staged.locations[prefix]
        assert location != prefix and contents(location) == contents(prefix), moment
        if len(staged.lines) == 1:
            kept += 1  # the kill came after the copy had its name
        else:
            assert names(target) == [Path(location).parent.name, "staged.lock.note"], moment
        moment += 1
    assert moment > 12 and kept > 1


@pytest.mark.slow
def test_suspended_at_any_moment(tmp_path: Path) -> None:
    prefix, moment = write_pair(tmp_path / "lustre", size=2_500), 0
    while True:
        target = tmp_path / f"disk-{moment}"
        target.mkdir()

        def child() -> None:
            signal_at(moment, target, signal.SIGSTOP)  # noqa: B023
            location = stage_to(target, prefix, stale_s=0.1).locations[prefix]  # noqa: B023
            assert location == prefix or contents(location) == contents(prefix)

        pid = forked(child)
        if not wait_until_stopped(pid):
            break
        location = stage_to(target, prefix, stale_s=0.1).locations[prefix]
        os.kill(pid, signal.SIGCONT)
        assert wait_for(pid) == 0, moment
        assert location != prefix and contents(location) == contents(prefix), moment
        moment += 1
    assert moment > 12


def test_a_large_blend_has_few_lines(tmp_path: Path) -> None:
    prefixes = [write_pair(tmp_path / "lustre", f"part{i}", 100, seed=i) for i in range(40)]
    staged = stage_to(tmp_path / "disk", *prefixes)
    assert len(staged.lines) == 8 and staged.lines[6] == "staged 34 more, checked"
    assert staged.lines[7].startswith("40 of 40 data sets are read from")
    refused = stage_to(tmp_path / "full", *prefixes, reserve_bytes=2**62)
    assert len(refused.lines) == 8 and refused.lines[6] == "note: and 34 more are read from where they lie"
    assert refused.lines[7].startswith("0 of 40 data sets are read from")
