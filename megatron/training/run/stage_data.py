"""What the ranks do together before they read data: copies on the nodes' disks, and index files.

Whoever has nothing to do waits at the store, in no collective: a copy or an index can take longer than the timeout of
collectives.
"""
from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megatron.config import Config
from megatron.data import index_cache
from megatron.data.datasets import Datasets, data_prefixes
from megatron.data.file_lock import flush_to_disk, temporary_name
from megatron.errors import DataError, LaunchError
from megatron.parallel.topology import Topology
from megatron.training.run.data import reads_data

WAIT_S = 4 * 3600.0
_SUFFIXES = (".bin", ".idx")


def staged_locations(
    config: Config, topology: Topology, say: Callable[[str], None], store: dist.Store | None = None
) -> dict[str, str]:
    """Copy the data to --stage-data-to, by one process of each node that reads them; returns where to read each prefix.

    {} where nothing is staged. All ranks call it, and go on when all copies are made. What cannot be copied is read
    from where it lies. Raises LaunchError when some rank is not done after WAIT_S.
    """
    target = config.data.stage_data_to
    prefixes = [] if target is None else data_prefixes(config)
    if target is None or not prefixes:
        return {}
    folder = Path(os.path.expandvars(os.path.expanduser(target)))
    if "$" in str(folder):
        say(f" note: --stage-data-to {target} names a variable that is not set: data are read where they are")
        return {}
    store = store or _store(topology)
    locations: dict[str, str] = {}
    if reads_data(config, topology):
        key = f"staging/{socket.gethostname()}"
        if store.add(f"{key}/readers", 1) == 1:
            for prefix in prefixes:
                try:
                    locations[prefix] = copy_to_node(prefix, folder)
                    say(f" {prefix} is read from {locations[prefix]}")
                except OSError as error:
                    locations[prefix] = prefix
                    store.set("staging/why", f"{prefix}: {error}")
            store.set(key, json.dumps(locations))
        _wait(store, key, topology)
        locations = json.loads(store.get(key))
    if store.add("staging/ranks", 1) == topology.world.size:
        store.set("staging/all", "")
    _wait(store, "staging/all", topology)
    if store.check(["staging/why"]):
        why = store.get("staging/why").decode()
        say(f" note: --stage-data-to {folder}: some data are read from where they lie: {why}")
    return locations


def copy_to_node(prefix: str, folder: Path) -> str:
    """Copy the two files of a data set into `folder`, unless an earlier copy is there; returns the copy's prefix.

    The name of the copy depends on the paths, sizes and times of the originals, so changed data are copied anew. It
    appears when it is complete. Raises OSError, also when the files do not fit or change meanwhile.
    """
    files = _identity(prefix)
    mark = hashlib.md5(repr(files).encode(), usedforsecurity=False).hexdigest()[:16]
    name = os.path.basename(prefix)
    copy = folder / f"staged-{name[:100]}-{mark}"
    if not copy.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        if sum(size for _, size, _ in files) > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        part = temporary_name(copy)
        part.mkdir()
        try:
            for suffix in _SUFFIXES:
                shutil.copyfile(f"{prefix}{suffix}", part / f"{name}{suffix}")
                with open(part / f"{name}{suffix}", "rb+") as file:
                    flush_to_disk(file)
            if _identity(prefix) != files:
                raise OSError(errno.EAGAIN, "changed while it was copied", prefix)
            if not copy.is_dir():  # another job may have been quicker
                part.rename(copy)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return str(copy / name)


def _identity(prefix: str) -> list[tuple[str, int, int]]:
    """Path, bytes and time of change of the files of a data set."""
    paths = [os.path.realpath(f"{prefix}{suffix}") for suffix in _SUFFIXES]
    return [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]


def first_builds(
    config: Config, topology: Topology, build: Callable[[int, int, int], Datasets], say: Callable[[str], None],
    store: dist.Store | None = None,
) -> Callable[[int, int, int], Datasets]:
    """`build` as all ranks are to call it: rank 0 builds the index files, then the others find them.

    An error of rank 0 becomes a DataError of all. `say` hears what is built and who is waited for.
    """
    if not data_prefixes(config):
        return build
    turns = itertools.count()
    shared = store or _store(topology)

    def listen(record: logging.LogRecord) -> None:
        if record.msg.startswith(("building", "waiting")):
            say(f" index files: {record.getMessage()}")

    def build_in_turn(train: int, valid: int, test: int) -> Datasets:
        key = f"index files/{next(turns)}"
        if not topology.world.is_first:
            _wait(shared, key, topology)
            if failure := shared.get(key).decode():
                raise DataError(failure)
            return build(train, valid, test)
        try:
            with index_cache.heard(listen):
                datasets = build(train, valid, test)
        except BaseException as error:
            shared.set(key, str(error) or type(error).__name__)
            raise
        shared.set(key, "")
        return datasets

    return build_in_turn


def _store(topology: Topology) -> dist.Store:
    return dist.HashStore() if topology.world.size == 1 else dist.distributed_c10d._get_default_store()


def _wait(store: dist.Store, key: str, topology: Topology) -> None:
    """Wait until some rank has set `key`. Raises LaunchError after WAIT_S."""
    deadline, pause_s = time.monotonic() + WAIT_S, 0.01
    while not store.check([key]):  # in steps, so that a signal can end it
        if time.monotonic() > deadline:
            raise LaunchError(f"{key}: not done after {WAIT_S / 3600:g} hours: look at the file systems of the nodes")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, max(1.0, topology.world.size / 4000))
