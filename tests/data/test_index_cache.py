"""One process builds, the others wait; whoever dies or is suspended, nobody waits for ever and nobody reads wrong."""
from __future__ import annotations

import itertools
import logging
import os
import random
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import index_cache
from megatron.data.file_lock import Owner
from megatron.data.index_cache import Arrays, CacheEntry, load_or_build
from megatron.errors import DataError
from tests.data.forks import MOMENTS, at_once, context, killed_at_each, stopped_at_each
from tests.data.locks import REMOTE, ended_process, write_lock
from tests.helpers.clock import VirtualClock
from tests.helpers.killing import forked, signal_at, wait_for
from tests.helpers.processes import run_processes_raw

ENTRY = "some text"
KEY = "552e21cd4cd9918678e3c1a0df491bc3"  # md5 of "some text", by coreutils' md5sum
FILES = sorted([f"{KEY}.dsc", f"{KEY}_a.npy", f"{KEY}_b.npy"])
NOTE = f"{KEY}.lock.note"
VALUE = {"a": np.arange(50), "b": np.arange(60).reshape(-1, 2) * 3}
OLD = {part: array + 1 for part, array in VALUE.items()}


def load(directory: Path, build: Callable[[], Arrays], clock: VirtualClock | None = None, **options: Any) -> Arrays:
    """The entry from one folder, by a clock that stands still."""
    clock = clock or VirtualClock()
    return load_or_build(ENTRY, ["a", "b"], [directory], build, clock=clock, sleep=clock.sleep, **options)


def never() -> Arrays:
    raise AssertionError("built although it was there")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def same(arrays: Arrays, wanted: Arrays) -> bool:
    return arrays.keys() == wanted.keys() and all(np.array_equal(arrays[part], wanted[part]) for part in wanted)


class Waiting(logging.Handler):
    """Calls a function whenever this process says that it waits for another."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("waiting"):
            self.call()

    def __enter__(self) -> Waiting:
        index_cache.log.addHandler(self)
        index_cache.log.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        index_cache.log.removeHandler(self)
        index_cache.log.setLevel(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_one_of_four_builds_and_all_get_what_came_of_it(tmp_path: Path, fails: bool) -> None:
    """Whoever builds does so until all others wait for it."""
    waits = context.Semaphore(0)

    def run(_: int) -> str:
        def build() -> Arrays:
            for _ in range(3):
                waits.acquire()
            if fails:
                raise DataError("broken data")
            return VALUE

        waiting = itertools.count()
        with Waiting(lambda: next(waiting) or waits.release()):
            try:
                return str(same(load_or_build(ENTRY, ["a", "b"], [tmp_path], build), VALUE))
            except DataError as error:
                return str(error)

    outcomes = at_once(4, run)
    if fails:
        assert sorted(text == "broken data" for text in outcomes) == [False] * 3 + [True]
        assert all("broken data" in text for text in outcomes) and names(tmp_path) == [NOTE]
    else:
        assert outcomes == ["True"] * 4 and names(tmp_path) == FILES
        assert (tmp_path / f"{KEY}.dsc").read_text().startswith(ENTRY)


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
def test_a_waiter_does_not_repeat_what_failed(tmp_path: Path, full: bool) -> None:
    """The waiter is at the lock before the builder fails, and must never build; nor when not even the reason could be
    written. A limit on the size of files stands for a full disk."""
    started, go_on = os.pipe(), os.pipe()

    def build() -> Arrays:
        os.write(started[1], b"x")
        os.read(go_on[0], 1)
        if not full:
            raise MemoryError("12 GiB")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        return VALUE

    child = forked(lambda: load(tmp_path, build))
    os.read(started[0], 1)
    with Waiting(lambda: os.write(go_on[1], b"x")), pytest.raises(DataError) as failure:
        load_or_build(ENTRY, ["a", "b"], [tmp_path], never)
    assert str(child) in str(failure.value) and ("MemoryError: 12 GiB" in str(failure.value)) == (not full)
    assert wait_for(child) == 1 and names(tmp_path) == [NOTE]
    # A later run tries again, and a success takes the note away.
    assert same(load(tmp_path, lambda: VALUE), VALUE) and names(tmp_path) == FILES


@pytest.mark.slow
@pytest.mark.parametrize("here", [True, False])
def test_lock_of_the_dead_is_taken_over_and_their_remains_removed(tmp_path: Path, here: bool) -> None:
    dead, clock = ended_process() if here else REMOTE, VirtualClock()
    write_lock(tmp_path / f"{KEY}.lock", dead)
    (tmp_path / f".{KEY}_a.npy.{dead.stamp}-0000.tmp").write_bytes(b"half")
    assert same(load(tmp_path, lambda: VALUE, clock), VALUE) and names(tmp_path) == FILES
    waited = clock.now - VirtualClock().now
    assert waited == 0 if here else 60 <= waited < 75


@pytest.mark.parametrize("owner", [Owner.this_process(), REMOTE], ids=["here", "elsewhere"])
def test_waiting_ends_with_the_name_of_the_lock(tmp_path: Path, owner: Owner) -> None:
    clock, lock = VirtualClock(), write_lock(tmp_path / f"{KEY}.lock", owner)
    with pytest.raises(DataError, match=rf"{lock}.* {owner.pid}\b.*{owner.host}"):
        load(tmp_path, never, clock, wait_s=1000, stale_s=1e9)
    assert lock.exists() and clock.now - VirtualClock().now == pytest.approx(1000)


def test_files_that_a_network_file_system_shows_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is gone and the files are not seen yet: the waiter looks again before it builds."""
    clock, real, looks = VirtualClock(), CacheEntry.load, list[int]()
    lock = write_lock(tmp_path / f"{KEY}.lock", REMOTE)

    def late(entry: CacheEntry) -> Arrays | None:
        looks.extend([1] * (not lock.exists()))
        return real(entry) if len(looks) > 3 else None

    def finish() -> None:
        CacheEntry(tmp_path, ENTRY, ("a", "b")).store(VALUE)
        lock.unlink()

    monkeypatch.setattr(CacheEntry, "load", late)
    clock.at(10, finish)
    assert same(load(tmp_path, never, clock), VALUE)


def test_directories_in_order(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    load_or_build(ENTRY, ["a", "b"], [near, far], lambda: VALUE)
    assert not near.exists() and names(far) == FILES
    load_or_build(ENTRY, ["a", "b"], [near, far], never)
    load_or_build(ENTRY, ["a", "b"], [far, near], never)
    load(near, lambda: OLD)
    assert same(load_or_build(ENTRY, ["a", "b"], [near, far], never), OLD)


def test_what_does_not_fit_is_built_again(tmp_path: Path) -> None:
    load(tmp_path, lambda: OLD)
    assert same(load(tmp_path, lambda: VALUE, fits=lambda found: found["a"][0] == 0), VALUE)
    with pytest.raises(DataError, match=str(tmp_path)):  # what was just written is not what is there
        load(tmp_path, lambda: OLD, fits=lambda found: found["a"][0] == 2)
    assert names(tmp_path) == sorted([*FILES, NOTE])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut in the header": lambda path: os.truncate(path, 60),
    "cut in the data": lambda path: os.truncate(path, path.stat().st_size - 8),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "header of rubbish": lambda path: path.write_bytes(path.read_bytes().replace(b"{'descr'", b"{'de\xff(]'")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "an archive": lambda path: path.write_bytes(b"PK\x03\x04" + path.read_bytes()[4:]),
}


def test_damaged_caches_are_built_again(tmp_path: Path) -> None:
    for number, damage in enumerate(DAMAGE):
        part = tmp_path / f"{KEY}_{'ab'[number % 2]}.npy"
        load(tmp_path, lambda: VALUE)
        DAMAGE[damage](part)
        builds: list[str] = []
        assert same(load(tmp_path, lambda: builds.append("") or VALUE), VALUE) and builds, damage  # type: ignore[func-returns-value]  # noqa: B023
        assert same(load(tmp_path, never), VALUE), damage
    part.unlink()
    part.mkdir()  # which no file can replace
    with pytest.raises(DataError, match=f"{tmp_path}: .*--data-cache-path"):
        load(tmp_path, lambda: VALUE)


def test_a_cache_that_was_changed_is_found_by_its_digest(tmp_path: Path) -> None:
    """A permutation of what was stored fits as well as that; one process of a job reads all of it and tells."""
    load(tmp_path, lambda: VALUE)
    assert same(load(tmp_path, never, verify=True), VALUE)
    np.save(tmp_path / f"{KEY}_b.npy", VALUE["b"][::-1])
    load(tmp_path, never)
    with pytest.raises(DataError, match=f"{tmp_path}/{KEY}"):
        load(tmp_path, never, verify=True)
    (tmp_path / f"{KEY}.dsc").write_text(ENTRY)  # as Megatron-DeepSpeed writes it
    load(tmp_path, never, verify=True)
    os.truncate(tmp_path / f"{KEY}.dsc", 1 << 40)
    with pytest.raises(DataError, match=rf"{KEY}\.dsc"):
        load(tmp_path, never, verify=True)


@pytest.mark.parametrize("shape", [(0,), (3,), (4, 2)])
def test_files_are_those_of_numpy_save(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """So that caches which Megatron-DeepSpeed wrote are found, and it finds ours."""
    array = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    assert same(load_or_build(ENTRY, ["a"], [tmp_path / "ours"], lambda: {"a": array}), {"a": array})
    np.save(tmp_path / f"{KEY}_a.npy", array, allow_pickle=True)
    assert same(load_or_build(ENTRY, ["a"], [tmp_path], never), {"a": array})
    assert (tmp_path / f"{KEY}_a.npy").read_bytes() == (tmp_path / "ours" / f"{KEY}_a.npy").read_bytes()


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that other users reach."""
    if os.getuid() != 0:
        pytest.skip("root is needed to become another user")
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@pytest.mark.slow
def test_folders_that_cannot_be_written(open_path: Path) -> None:
    near, far = open_path / "index-cache", open_path / "far"
    near.mkdir(0o555)
    far.mkdir()
    os.chown(far, 65534, 65534)

    def nobody() -> None:
        os.setgid(65534)
        os.setuid(65534)
        for directories in ([near], [near, near / "below"], [Path("/dev/null/cache")]):
            with pytest.raises(DataError, match=f"{directories[-1]}: .*--data-cache-path"):
                load_or_build(ENTRY, ["a", "b"], directories, never)
        load_or_build(ENTRY, ["a", "b"], [near, far], lambda: VALUE)
        far.chmod(0o555)
        load_or_build(ENTRY, ["a", "b"], [near, far], never)

    assert wait_for(forked(nobody)) == 0 and names(near) == [] and names(far) == FILES


# Kills and suspensions


@pytest.mark.slow
@MOMENTS
def test_killed_at_any_moment(tmp_path: Path, every: bool) -> None:
    """The next process reads right, and builds again only if it must."""
    for folder in killed_at_each(tmp_path, lambda here: load(here, lambda: VALUE), every):
        complete, builds = set(FILES[1:]) <= set(names(folder)), list[int]()
        arrays = load(folder, lambda: builds.append(1) or VALUE)  # type: ignore[func-returns-value]  # noqa: B023
        assert same(arrays, VALUE) and len(builds) == (not complete), folder
        assert complete or names(folder) == FILES, folder


@pytest.mark.slow
@MOMENTS
def test_killed_while_it_replaces_what_did_not_fit(tmp_path: Path, every: bool) -> None:
    """Old and new parts together are of the right shape and wrong: they must never be read."""

    def replace(folder: Path) -> None:
        load(folder, lambda: VALUE, fits=lambda found: found["a"][0] == 0)

    for folder in killed_at_each(tmp_path, replace, every, lambda here: load(here, lambda: OLD)):
        # Whoever checks nothing finds all old or all new, or nothing and builds.
        arrays = load(folder, lambda: VALUE)
        assert same(arrays, VALUE) or same(arrays, OLD), folder


@pytest.mark.slow
@MOMENTS
def test_suspended_at_any_moment(tmp_path: Path, every: bool) -> None:
    """Its lock is taken over; when it comes back it notices, and reads what is there."""
    took_over, renamed_again = 0, 0

    def run(folder: Path) -> None:
        assert same(load(folder, lambda: VALUE), VALUE)

    for folder, pid in stopped_at_each(tmp_path, run, every):
        builds: list[int] = []
        arrays = load(folder, lambda: builds.append(1) or VALUE)  # type: ignore[func-returns-value]  # noqa: B023
        inode = (folder / FILES[1]).stat().st_ino
        os.kill(pid, signal.SIGCONT)
        assert wait_for(pid) == 0 and same(arrays, VALUE), folder
        renamed_again += bool(builds) and (folder / FILES[1]).stat().st_ino != inode
        assert same(load(folder, never), VALUE), folder
        took_over += len(builds)
    # Only between its last look at the lock and this rename can it no longer notice: there are three removals before.
    assert took_over > 4 and renamed_again <= 4


def build_or_die(rank: int, directory: str, deaths: dict[int, int]) -> bool:
    """One of several processes; `deaths` says at which of their file operations some of them are killed."""
    cache = Path(directory, "cache")

    def build() -> Arrays:
        Path(directory, f"built-{rank}").touch()
        return VALUE

    if rank in deaths:
        signal_at(deaths[rank], cache)
    return same(load_or_build(ENTRY, ["a", "b"], [cache], build), VALUE)


@pytest.mark.campaign("kills")
@pytest.mark.parametrize("seed", range(8))
def test_six_of_eight_are_killed(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    deaths = {rank: chance.randrange(50) for rank in chance.sample(range(8), 6)}
    died = 0
    for rank, outcome in enumerate(run_processes_raw(8, build_or_die, str(tmp_path), deaths)):
        if outcome != (True, True):
            assert rank in deaths and "exit code -9" in str(outcome[1]), outcome
            died += 1
    assert 1 <= len(list(tmp_path.glob("built-*"))) <= died + 1
    assert same(load(tmp_path / "cache", never), VALUE)
