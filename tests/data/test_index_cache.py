"""One process builds, the others wait; whoever dies or is suspended, nobody waits for ever and nobody reads wrong."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from megatron.data.file_lock import Owner, process_start
from megatron.data.index_cache import Arrays, CacheEntry, load_or_build
from megatron.errors import DataError
from tests.helpers.killing import forked, signal_at, wait_for, wait_until_stopped
from tests.helpers.processes import run_processes, run_processes_raw

ENTRY = "some text"
KEY = "552e21cd4cd9918678e3c1a0df491bc3"  # md5 of "some text", by coreutils' md5sum
FILES = sorted([f"{KEY}.dsc", f"{KEY}_a.npy", f"{KEY}_b.npy"])
VALUE = {"a": np.arange(5), "b": np.eye(2)}
LARGE = {"a": np.arange(40_000), "b": np.arange(60_000).reshape(-1, 2) * 3}
REMOTE = replace(Owner.this_process(), host="another-node", machine="00000000")


def never() -> Arrays:
    raise AssertionError("built although it was there")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def same(arrays: Arrays, wanted: Arrays) -> bool:
    return arrays.keys() == wanted.keys() and all(np.array_equal(arrays[part], wanted[part]) for part in wanted)


def lock_of(directory: Path, owner: Owner) -> Path:
    directory.mkdir(exist_ok=True)
    path = CacheEntry(directory, ENTRY, ("a", "b")).lock_path
    path.write_text(json.dumps(asdict(owner)))
    return path


def meet(directory: str, rank: int, n: int) -> None:
    """All of n processes start at once."""
    Path(directory, f"here-{rank}").touch()
    while len(list(Path(directory).glob("here-*"))) < n:
        time.sleep(0.001)


def build_at_once(rank: int, directory: str, n: int) -> tuple[list[int], int]:
    """Counts its calls with a file, so that calls in any process are seen."""

    def build() -> Arrays:
        Path(directory, f"built-{rank}").touch()
        time.sleep(0.3)  # let the others come to wait; nothing depends on it
        return VALUE

    meet(directory, rank, n)
    arrays = load_or_build(ENTRY, ["a", "b"], [Path(directory, "cache")], build)
    return arrays["a"].tolist(), int(arrays["b"].sum())


def test_one_of_eight_processes_builds(tmp_path: Path) -> None:
    assert run_processes(8, build_at_once, str(tmp_path), 8) == [([0, 1, 2, 3, 4], 2)] * 8
    assert len(list(tmp_path.glob("built-*"))) == 1
    assert names(tmp_path / "cache") == FILES
    assert (tmp_path / "cache" / f"{KEY}.dsc").read_text() == ENTRY


def fail_at_once(rank: int, directory: str, n: int) -> str:
    def build() -> Arrays:
        Path(directory, f"built-{rank}").touch()
        time.sleep(0.5)
        raise DataError("broken data")

    meet(directory, rank, n)
    try:
        load_or_build(ENTRY, ["a"], [Path(directory, "cache")], build, wait_s=200)
    except DataError as error:
        return str(error)
    return "no error"


def test_a_failed_build_fails_on_every_rank_with_its_reason(tmp_path: Path) -> None:
    errors = run_processes(4, fail_at_once, str(tmp_path), 4)
    builders = len(list(tmp_path.glob("built-*")))
    assert errors.count("broken data") == builders
    waited = [error for error in errors if error != "broken data"]
    assert all("which was to build this index, failed: broken data" in error for error in waited)
    assert names(tmp_path / "cache") == [f"{KEY}.lock.note"]


def test_a_waiter_does_not_repeat_what_failed(tmp_path: Path) -> None:
    """The waiter is at the lock before the builder fails, and must never build."""
    start, failing = os.pipe(), os.pipe()

    def build() -> Arrays:
        os.write(start[1], b"x")
        os.read(failing[0], 1)
        raise MemoryError("12 GiB")

    child = forked(lambda: load_or_build(ENTRY, ["a"], [tmp_path], build))
    os.read(start[0], 1)

    class Releasing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            os.write(failing[1], b"x")

    log = logging.getLogger("megatron.data.index_cache")
    handler = Releasing()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with pytest.raises(DataError, match=f"process {child} on .* failed: MemoryError: 12 GiB"):
            load_or_build(ENTRY, ["a"], [tmp_path], never)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    assert wait_for(child) == 1
    # A later run tries again, and a success takes the note away.
    assert same(load_or_build(ENTRY, ["a", "b"], [tmp_path], lambda: VALUE), VALUE)
    assert names(tmp_path) == FILES


def ended_process() -> Owner:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(Owner.this_process(), pid=process.pid, start=process_start(process.pid) or 0)
    process.communicate(b"\n")
    return owner


def test_lock_of_a_dead_process_is_taken_over_and_its_remains_removed(tmp_path: Path) -> None:
    dead = ended_process()
    lock_of(tmp_path, dead)
    (tmp_path / f".{KEY}_a.npy.{dead.stamp}-0000.tmp").write_bytes(b"half")
    assert same(load_or_build(ENTRY, ["a", "b"], [tmp_path], lambda: VALUE), VALUE)
    assert names(tmp_path) == FILES


def test_lock_of_a_dead_node_is_taken_over_when_it_is_stale(tmp_path: Path) -> None:
    lock_of(tmp_path, REMOTE)
    assert same(load_or_build(ENTRY, ["a", "b"], [tmp_path], lambda: VALUE, stale_s=0.2), VALUE)
    assert names(tmp_path) == FILES


@pytest.mark.parametrize("owner", [Owner.this_process(), REMOTE], ids=["here", "elsewhere"])
def test_waiting_ends_with_the_name_of_the_lock(tmp_path: Path, owner: Owner) -> None:
    lock = lock_of(tmp_path, owner)
    with pytest.raises(DataError, match=f"{lock}.*process {owner.pid} on {owner.host}.*delete the lock"):
        load_or_build(ENTRY, ["a", "b"], [tmp_path], never, wait_s=0.05)
    assert lock.exists()
    lock.write_text("")
    with pytest.raises(DataError, match="an unknown process"):
        load_or_build(ENTRY, ["a", "b"], [tmp_path], never, wait_s=0.05)


def test_files_that_a_network_file_system_shows_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is gone and the files are not seen yet: the waiter looks again before it builds."""
    lock = lock_of(tmp_path, REMOTE)
    real, looks = CacheEntry.load, 0

    def load(entry: CacheEntry) -> Arrays | None:
        nonlocal looks
        looks += 1
        if looks == 1:
            lock.unlink()
            entry.store(VALUE)
            lock_of(tmp_path, REMOTE)
        elif looks == 2:
            lock.unlink(missing_ok=True)
        return real(entry) if looks > 4 else None

    monkeypatch.setattr(CacheEntry, "load", load)
    assert same(load_or_build(ENTRY, ["a", "b"], [tmp_path], never, stale_s=0.1), VALUE)


def test_directories_in_order(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    load_or_build(ENTRY, ["a", "b"], [near, far], lambda: VALUE)
    assert not near.exists() and len(list(far.iterdir())) == 3
    load_or_build(ENTRY, ["a", "b"], [near, far], never)
    load_or_build(ENTRY, ["a", "b"], [far, near], never)
    other = {"a": np.zeros(1), "b": np.zeros(1)}
    load_or_build(ENTRY, ["a", "b"], [near], lambda: other)
    assert load_or_build(ENTRY, ["a", "b"], [near, far], never)["a"].tolist() == [0]


def test_what_does_not_fit_is_built_again(tmp_path: Path) -> None:
    load_or_build(ENTRY, ["a"], [tmp_path], lambda: {"a": np.arange(3)})
    arrays = load_or_build(ENTRY, ["a"], [tmp_path], lambda: VALUE, fits=lambda found: len(found["a"]) == 5)
    assert arrays["a"].tolist() == [0, 1, 2, 3, 4]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut in the header": lambda path: os.truncate(path, 60),
    "cut in the data": lambda path: os.truncate(path, path.stat().st_size - 8),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "header of rubbish": lambda path: path.write_bytes(path.read_bytes().replace(b"{'descr'", b"{'de\xff(]'")),
    "an archive": lambda path: path.write_bytes(b"PK\x03\x04" + path.read_bytes()[4:]),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "a folder"])
@pytest.mark.parametrize("part", ["a", "b"])
def test_half_written_caches_are_built_again(tmp_path: Path, damage: str, part: str) -> None:
    load_or_build(ENTRY, ["a", "b"], [tmp_path], lambda: VALUE)
    DAMAGE[damage](CacheEntry(tmp_path, ENTRY, ("a", "b")).part_path(part))
    assert same(load_or_build(ENTRY, ["a", "b"], [tmp_path], lambda: VALUE), VALUE)
    assert same(load_or_build(ENTRY, ["a", "b"], [tmp_path], never), VALUE)


def test_what_cannot_be_replaced_is_an_error(tmp_path: Path) -> None:
    load_or_build(ENTRY, ["a", "b"], [tmp_path], lambda: VALUE)
    DAMAGE["a folder"](CacheEntry(tmp_path, ENTRY, ("a", "b")).part_path("a"))
    with pytest.raises(DataError, match=f"{tmp_path}: the index cache cannot be written: Is a directory"):
        load_or_build(ENTRY, ["a", "b"], [tmp_path], lambda: VALUE)


def test_caches_of_megatron_deepspeed_are_found(tmp_path: Path) -> None:
    """Written as its code writes them: numpy.save under the final name, the description beside."""
    for part, array in VALUE.items():
        np.save(tmp_path / f"{KEY}_{part}.npy", array, allow_pickle=True)
    assert same(load_or_build(ENTRY, ["a", "b"], [tmp_path], never), VALUE)


@pytest.mark.parametrize("shape", [(0,), (3,), (4, 2)])
def test_files_are_those_of_numpy_save(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    assert same(load_or_build(ENTRY, ["a"], [tmp_path], lambda: {"a": array}), {"a": array})
    np.save(tmp_path / "by-numpy.npy", array)
    assert (tmp_path / "by-numpy.npy").read_bytes() == (tmp_path / f"{KEY}_a.npy").read_bytes()


# Places that cannot be written


def as_nobody(fn: Callable[[], object]) -> int:
    """Exit code of a child that calls `fn` without root's rights."""

    def child() -> None:
        os.setgid(65534)
        os.setuid(65534)
        fn()

    return wait_for(forked(child))


def expect_error(match: str, directories: list[Path], build: Callable[[], Arrays]) -> None:
    with pytest.raises(DataError, match=match):
        load_or_build(ENTRY, ["a", "b"], directories, build, wait_s=200)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that other users reach."""
    if os.getuid() != 0:
        pytest.skip("root is needed to become another user")
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def test_read_only_data_folder(open_path: Path) -> None:
    near, far = open_path / "index-cache", open_path / "far"
    near.mkdir()
    near.chmod(0o555)
    far.mkdir()
    far.chmod(0o777)
    for directories in ([near], [near, near / "below"]):
        match = f"{directories[-1]}: the index cache cannot be written: Permission denied: .*--data-cache-path"
        assert as_nobody(lambda: expect_error(match, directories, never)) == 0  # noqa: B023
    assert as_nobody(lambda: load_or_build(ENTRY, ["a", "b"], [near, far], lambda: VALUE)) == 0
    assert names(near) == [] and names(far) == FILES
    far.chmod(0o555)
    assert as_nobody(lambda: load_or_build(ENTRY, ["a", "b"], [near, far], never)) == 0


def test_folder_that_is_no_folder() -> None:
    expect_error(r"/dev/null/cache: .*--data-cache-path", [Path("/dev/null/cache")], never)


def mount_small_disk(directory: Path, kilobytes: int) -> bool:
    directory.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.mount(b"none", os.fsencode(directory), b"tmpfs", 0, f"size={kilobytes}k".encode()) == 0


def fill_at_once(rank: int, directory: str, n: int) -> str:
    def build() -> Arrays:
        Path(directory, f"built-{rank}").touch()
        time.sleep(0.3)
        return LARGE

    meet(directory, rank, n)
    try:
        load_or_build(ENTRY, ["a", "b"], [Path(directory, "disk")], build, wait_s=200)
    except DataError as error:
        return str(error)
    return "no error"


def test_full_disk_is_an_error_on_every_rank(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    if os.getuid() != 0 or not mount_small_disk(disk, 500):
        pytest.skip("a small file system cannot be mounted here")
    try:
        errors = run_processes(4, fill_at_once, str(tmp_path), 4)
        left = names(disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    text = f"{disk}: the index cache cannot be written: No space left on device: give a directory"
    assert all(text in error for error in errors), errors
    assert left == [f"{KEY}.lock.note"]


def test_full_disk_without_a_mount(tmp_path: Path) -> None:
    """A limit on the size of files fails writes in the same place."""

    def child() -> None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        expect_error("cannot be written: .*--data-cache-path", [tmp_path], lambda: LARGE)

    assert wait_for(forked(child)) == 0
    assert names(tmp_path) == [f"{KEY}.lock.note"]


# Kills and suspensions


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Before each file operation of a build in turn: the next process reads right, and builds again only if it must."""
    moment, kept = 0, 0
    while True:
        folder = tmp_path / str(moment)
        folder.mkdir()

        def build() -> Arrays:
            signal_at(moment, folder)  # noqa: B023
            load_or_build(ENTRY, ["a", "b"], [folder], lambda: LARGE)  # noqa: B023
            return {}

        if wait_for(forked(build)) == 0:
            break
        complete = all((folder / name).exists() for name in FILES[1:])
        builds: list[int] = []
        arrays = load_or_build(ENTRY, ["a", "b"], [folder], lambda: builds.append(1) or LARGE, stale_s=0.2)  # type: ignore[func-returns-value]  # noqa: B023
        assert same(arrays, LARGE) and len(builds) == (not complete), moment
        if complete:
            kept += 1
        else:
            assert names(folder) == FILES, moment
        moment += 1
    assert moment > 20 and kept > 2


def test_killed_while_it_replaces_what_did_not_fit(tmp_path: Path) -> None:
    """Old and new parts together are of the right shape and wrong: they must never be read."""
    old = {part: array + 1 for part, array in LARGE.items()}
    moment = 0
    while True:
        folder = tmp_path / str(moment)
        load_or_build(ENTRY, ["a", "b"], [folder], lambda: old)

        def child() -> None:
            signal_at(moment, folder)  # noqa: B023
            load_or_build(ENTRY, ["a", "b"], [folder], lambda: LARGE, fits=lambda found: found["a"][0] == 0)  # noqa: B023

        if wait_for(forked(child)) == 0:
            break
        # Whoever checks nothing finds all old or all new, or nothing and builds.
        arrays = load_or_build(ENTRY, ["a", "b"], [folder], lambda: LARGE, stale_s=0.2)
        assert same(arrays, LARGE) or same(arrays, old), moment
        moment += 1
    assert moment > 20


@pytest.mark.slow
def test_suspended_at_any_moment(tmp_path: Path) -> None:
    """Its lock is taken over; when it comes back it notices, and reads what is there."""
    moment, took_over, renamed_again = 0, 0, 0
    while True:
        folder = tmp_path / str(moment)
        folder.mkdir()

        def child() -> None:
            signal_at(moment, folder, signal.SIGSTOP)  # noqa: B023
            assert same(load_or_build(ENTRY, ["a", "b"], [folder], lambda: LARGE, stale_s=0.15), LARGE)  # noqa: B023

        pid = forked(child)
        if not wait_until_stopped(pid):
            break
        builds: list[int] = []
        arrays = load_or_build(ENTRY, ["a", "b"], [folder], lambda: builds.append(1) or LARGE, stale_s=0.15)  # type: ignore[func-returns-value]  # noqa: B023
        inode = (folder / FILES[1]).stat().st_ino
        os.kill(pid, signal.SIGCONT)
        assert wait_for(pid) == 0, moment
        assert same(arrays, LARGE), moment
        renamed_again += bool(builds) and (folder / FILES[1]).stat().st_ino != inode
        assert same(load_or_build(ENTRY, ["a", "b"], [folder], never), LARGE), moment
        took_over += len(builds)
        moment += 1
    # Only between its last look at the lock and this rename can it no longer notice: there are three removals before.
    assert moment > 20 and took_over > 15 and renamed_again <= 4


def build_or_die(rank: int, directory: str, n: int, deaths: dict[int, int]) -> bool:
    """One of n processes; `deaths` says at which of their file operations some of them are killed."""

    def build() -> Arrays:
        Path(directory, f"built-{rank}").touch()
        return LARGE

    meet(directory, rank, n)
    if rank in deaths:
        signal_at(deaths[rank], Path(directory, "cache"))
    return same(load_or_build(ENTRY, ["a", "b"], [Path(directory, "cache")], build, stale_s=2, wait_s=200), LARGE)


def round_of_kills(folder: Path, chance: random.Random, killed: int) -> int:
    """Eight processes start at once and `killed` of them are to die; how many did."""
    folder.mkdir()
    deaths = {rank: chance.randrange(50) for rank in chance.sample(range(8), killed)}
    outcomes = run_processes_raw(8, build_or_die, str(folder), 8, deaths)
    died = 0
    for rank, outcome in enumerate(outcomes):
        if outcome != (True, True):
            assert rank in deaths and "exit code -9" in str(outcome[1]), outcome
            died += 1
    assert 1 <= len(list(folder.glob("built-*"))) <= died + 1
    assert same(load_or_build(ENTRY, ["a", "b"], [folder / "cache"], never), LARGE)
    return died


def test_some_of_eight_are_killed(tmp_path: Path) -> None:
    assert round_of_kills(tmp_path / "round", random.Random(1), 4) > 0


@pytest.mark.slow
def test_fifty_kills(tmp_path: Path) -> None:
    """Two kinds: at a drawn file operation, and from outside after a drawn time."""
    chance, deaths = random.Random(2), 0
    rounds = 0
    while deaths < 25:
        deaths += round_of_kills(tmp_path / f"round-{rounds}", chance, 6)
        rounds += 1
    folder = tmp_path / "outside"
    span_s, ended = 0.01, 0
    while deaths < 50 or ended < 10:
        pids = [
            forked(lambda: load_or_build(ENTRY, ["a", "b"], [folder], lambda: LARGE, stale_s=2)) for _ in range(4)
        ]
        for pid in pids:
            time.sleep(chance.uniform(0, span_s))
            os.kill(pid, signal.SIGKILL)
        codes = [wait_for(pid) for pid in pids]
        assert set(codes) <= {0, -9}
        killed = codes.count(-9)
        deaths, ended = deaths + killed, ended + 4 - killed
        # How long a build takes is the machine's affair and changes: the kills follow it, so that half of them hit.
        span_s *= 1.4 if killed > 1 else 0.7
        assert same(load_or_build(ENTRY, ["a", "b"], [folder], lambda: LARGE, stale_s=2), LARGE)
        for name in names(folder):
            if name.endswith((".npy", ".dsc")):
                (folder / name).unlink()
