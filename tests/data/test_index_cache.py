"""One process builds and the others wait.

If one dies or is suspended, none waits for ever or reads wrong data.
"""

import os
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest

from megatron.data.index_cache import forwarded_messages, load_or_build
from megatron.errors import DataError
from tests.data.forks import MOMENTS, at_once, context, killed_at_each
from tests.data.implementations import names
from tests.helpers.killing import forked, signal_at, wait_for
from tests.helpers.processes import run_processes_raw

ENTRY = "some text"
KEY = "552e21cd4cd9918678e3c1a0df491bc3"  # md5 of "some text", by coreutils' md5sum
FILES = sorted([f"{KEY}.dsc", f"{KEY}_a.npy", f"{KEY}_b.npy"])
VALUE = {"a": np.arange(50), "b": np.arange(60).reshape(-1, 2) * 3}
OLD = {name: array + 1 for name, array in VALUE.items()}


def load(directory, build, **options):
    """Load the entry from one folder."""
    return load_or_build(ENTRY, ["a", "b"], [directory], build, **options)


def never():
    raise AssertionError("built although it was there")


def same(arrays, expected):
    return arrays.keys() == expected.keys() and all(
        np.array_equal(arrays[name], expected[name]) for name in expected
    )


def waiting(call):
    """Run `call` whenever this process reports that it waits for another, inside the block."""
    return forwarded_messages(lambda message: call() if message.startswith("waiting") else None)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_one_of_four_builds_and_all_get_what_came_of_it(tmp_path, fails):
    """One of four processes builds, and all get its result.

    It builds until all others wait for it; if it fails, each of them fails on its own.
    """
    waits = context.Semaphore(0)

    def run(_):
        def build():
            if fails:
                raise DataError("broken data")
            for _ in range(3):
                waits.acquire()
            return VALUE

        with waiting(waits.release):
            try:
                return str(same(load_or_build(ENTRY, ["a", "b"], [tmp_path], build), VALUE))
            except DataError as error:
                return str(error)

    outcomes = at_once(4, run)
    assert outcomes == ["broken data" if fails else "True"] * 4
    assert names(tmp_path) == ([] if fails else FILES)
    if not fails:
        assert (tmp_path / f"{KEY}.dsc").read_text().startswith(ENTRY)


def test_what_does_not_fit_is_built_again(tmp_path):
    load(tmp_path, lambda: OLD)
    assert same(load(tmp_path, lambda: VALUE, fits=lambda cached: cached["a"][0] == 0), VALUE)
    # The file on disk differs from what was just written.
    with pytest.raises(DataError, match=str(tmp_path)):
        load(tmp_path, lambda: OLD, fits=lambda cached: cached["a"][0] == 2)
    assert names(tmp_path) == FILES


DAMAGE = {
    "missing": Path.unlink,
    "cut in the header": lambda path: os.truncate(path, 60),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "header of rubbish": lambda path: path.write_bytes(
        path.read_bytes().replace(b"{'descr'", b"{'de\xff(]'")
    ),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


def test_damaged_caches_are_built_again(tmp_path):
    for number, damage in enumerate(DAMAGE):
        path = tmp_path / f"{KEY}_{'ab'[number % 2]}.npy"
        load(tmp_path, lambda: VALUE)
        DAMAGE[damage](path)
        builds = []
        assert same(load(tmp_path, lambda: builds.append("") or VALUE), VALUE) and builds, damage  # noqa: B023
        assert same(load(tmp_path, never), VALUE), damage
    path.unlink()
    path.mkdir()  # which no file can replace
    with pytest.raises(DataError, match=f"{tmp_path}: .*--data-cache-path"):
        load(tmp_path, lambda: VALUE)


def test_a_cache_that_was_changed_is_found_by_its_digest(tmp_path):
    """A modified cache is found by its digest.

    A permutation of the stored values would pass all other checks. One process of a job reads all
    of it and reports.
    """
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


def test_files_are_those_of_numpy_save(tmp_path):
    """Files equal numpy.save's, so that Megatron-DeepSpeed and this package share their caches."""
    array = np.arange(8, dtype=np.uint32).reshape(4, 2)
    assert same(
        load_or_build(ENTRY, ["a"], [tmp_path / "ours"], lambda: {"a": array}), {"a": array}
    )
    np.save(tmp_path / f"{KEY}_a.npy", array, allow_pickle=True)
    assert same(load_or_build(ENTRY, ["a"], [tmp_path], never), {"a": array})
    assert (tmp_path / f"{KEY}_a.npy").read_bytes() == (
        tmp_path / "ours" / f"{KEY}_a.npy"
    ).read_bytes()


@pytest.fixture
def open_path():
    """Provide a folder that other users can reach."""
    if os.getuid() != 0:
        pytest.skip("root is needed to become another user")
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@pytest.mark.slow
def test_folders_that_cannot_be_written(open_path):
    near = open_path / "index-cache"
    far = open_path / "far"
    near.mkdir(0o555)
    far.mkdir()
    os.chown(far, 65534, 65534)

    def nobody():
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
def test_killed_at_any_moment(tmp_path, every):
    """The next process reads correct data, and builds again only if it must."""
    for folder in killed_at_each(tmp_path, lambda here: load(here, lambda: VALUE), every):
        complete = set(FILES[1:]) <= set(names(folder))
        builds = []
        arrays = load(folder, lambda: builds.append(1) or VALUE)  # noqa: B023
        assert same(arrays, VALUE) and len(builds) == (not complete), folder
        assert complete or names(folder) == FILES, folder


@pytest.mark.slow
@MOMENTS
def test_killed_while_it_replaces_what_did_not_fit(tmp_path, every):
    """Old and new parts together are never read. They have the right shape and wrong contents."""

    def replace(folder):
        load(folder, lambda: VALUE, fits=lambda cached: cached["a"][0] == 0)

    for folder in killed_at_each(tmp_path, replace, every, lambda here: load(here, lambda: OLD)):
        # A reader without checks finds all old or all new files, or none and builds.
        arrays = load(folder, lambda: VALUE)
        assert same(arrays, VALUE) or same(arrays, OLD), folder


def build_or_die(rank, directory, deaths):
    """Build in one of several processes; `deaths` says at which file operations some are killed."""
    cache = Path(directory, "cache")

    def build():
        Path(directory, f"built-{rank}").touch()
        return VALUE

    if rank in deaths:
        signal_at(deaths[rank], cache)
    return same(load_or_build(ENTRY, ["a", "b"], [cache], build), VALUE)


@pytest.mark.campaign("kills")
@pytest.mark.parametrize("seed", range(8))
def test_six_of_eight_are_killed(tmp_path, seed):
    chance = random.Random(seed)
    deaths = {rank: chance.randrange(50) for rank in chance.sample(range(8), 6)}
    died = 0
    for rank, outcome in enumerate(run_processes_raw(8, build_or_die, str(tmp_path), deaths)):
        if outcome != (True, True):
            assert rank in deaths and "exit code -9" in str(outcome[1]), outcome
            died += 1
    assert 1 <= len(list(tmp_path.glob("built-*"))) <= died + 1
    assert same(load(tmp_path / "cache", never), VALUE)
