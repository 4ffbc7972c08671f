"""The data of a run: copies on the nodes' disks, index files, and the micro-batches of this rank.

Ranks with nothing to do wait for a key in the store, not in a collective: a copy or an index can
take longer than the timeout of collectives.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch.distributed as dist

from megatron.config import Config
from megatron.data import index_cache
from megatron.data.datasets import Datasets, data_prefixes
from megatron.data.file_lock import flush_to_disk, temporary_name
from megatron.data.fill_in_the_middle import FillInTheMiddle
from megatron.data.gpt_dataset import TokenDataset
from megatron.data.indexed_dataset import data_files
from megatron.data.order import sample_order
from megatron.data.sampler import MicroBatchStream, Separation, Share
from megatron.data.tokenizer import Tokenizer
from megatron.errors import DataError, LaunchError, LostRankError, NodeError
from megatron.parallel.topology import Topology
from megatron.training.run.schedules import BatchSchedule, LengthSchedule

WAIT_S = 4 * 3600.0


def reads_data(config: Config, topology: Topology) -> bool:
    """Return whether this rank's stages read micro-batches.

    The first stage needs tokens, the last one labels, and all stages need data if positions or
    attention depend on the ends of documents, as they may with a user's own data sets.
    """
    ends = topology.has_first_stage or topology.has_last_stage
    ends |= config.pieces.datasets is not None
    return ends or config.data.reset_position_ids or config.data.reset_attention_mask


def open_stream(
    config: Config,
    topology: Topology,
    dataset: TokenDataset | None,
    consumed_samples: int,
    tokenizer: Tokenizer | None,
    left_out: Iterable[Sequence[int]] = (),
    *,
    cyclic: bool = False,
    iteration: int | None = None,
) -> MicroBatchStream:
    """Return this rank's micro-batches of `dataset` after the first `consumed_samples`.

    `left_out` has ranges [start, stop) of positions that are skipped. `cyclic` has the effect of
    --dataloader-type cyclic. `iteration` is the number of steps taken before, in training; None for
    evaluation, in which documents are not rearranged, sequences have their full length, and the
    goldfish loss leaves out no tokens. The micro-batches have no content if this rank reads no
    data. Close the stream when done. Raises ConfigError for a token of --fim-rate that the
    tokenizer lacks.
    """
    data = config.data
    rearrange = None if iteration is None else FillInTheMiddle.of(config, tokenizer)
    batches = BatchSchedule.from_config(config)
    lengths = LengthSchedule.from_config(config)

    def length_at(position: int) -> int:
        if iteration is None:
            return config.model.seq_length
        before = batches.iterations_until(position, consumed_samples, full_steps=True)
        return lengths.at(iteration + before + 1)

    if not reads_data(config, topology):
        dataset = None
    kind = "cyclic" if cyclic else data.dataloader_type
    return MicroBatchStream(
        dataset,
        Share(config.batch.micro_batch_size, topology.replica, topology.layout.replicas),
        consumed_samples,
        order=sample_order(kind, 0 if dataset is None else dataset.available, left_out),
        separation=Separation.of(data, tokenizer, iteration is not None),
        device=topology.device,
        num_workers=data.num_workers,
        vocab_size=config.model.vocab_size,
        rearrange=rearrange,
        length_at=length_at,
    )


def staged_locations(
    config: Config, topology: Topology, say: Callable[[str], None], store: dist.Store | None = None
) -> dict[str, str]:
    """Copy the data to --stage-data-to, once per node; return where to read each prefix.

    On each node, one process that reads the data makes the copy. The result is empty on ranks that
    stage nothing or read no data. All ranks call this if any stages data, and return when all
    copies are complete. Data that cannot be copied is read from its original place. Raises
    LaunchError if any rank is not done after WAIT_S.
    """
    prefixes = data_prefixes(config)
    if not prefixes:
        return {}
    target = config.data.stage_data_to
    store = store or job_store(topology)
    locations: dict[str, str] = {}
    if target is not None and reads_data(config, topology):
        folder = Path(os.path.expandvars(os.path.expanduser(target)))
        key = f"staging/{socket.gethostname()}"
        if "$" in str(folder):
            store.set("staging/why", f"{target}: a variable is not set on {socket.gethostname()}")
        elif store.add(f"{key}/readers", 1) == 1:
            for prefix in prefixes:
                try:
                    locations[prefix] = copy_to_node(prefix, folder)
                    say(f" {prefix} is read from {locations[prefix]}")
                except OSError as error:
                    locations[prefix] = prefix
                    store.set("staging/why", f"{prefix} to {folder}: {error}")
            store.set(key, json.dumps(locations))
        else:
            _wait(store, key, topology)
            locations = json.loads(store.get(key))
    # Ranks that stage nothing are counted, too: the setting and its variables may differ.
    if store.add("staging/ranks", 1) == topology.world.size:
        store.set("staging/all", "")
    _wait(store, "staging/all", topology)
    if store.check(["staging/why"]):
        why = store.get("staging/why").decode()
        say(f" note: --stage-data-to: some data is read from its original place: {why}")
    return locations


def copy_to_node(prefix: str, folder: Path) -> str:
    """Copy the files of a data set into `folder`, unless a copy exists; return the copy's prefix.

    The copy's name depends on the paths, sizes and modification times of the originals, so that
    changed data is copied again. The copy appears only once it is complete. Raises OSError if the
    files cannot be copied, do not fit, or change while they are copied.
    """
    files = _identity(prefix)
    mark = hashlib.md5(repr(files).encode(), usedforsecurity=False).hexdigest()[:16]
    name = os.path.basename(prefix)
    copy = folder / f"staged-{name[:100]}-{mark}"
    if not copy.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        if sum(size for _, size, _ in files) > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        temporary = temporary_name(copy)
        temporary.mkdir()
        try:
            for path in data_files(prefix):
                shutil.copyfile(path, temporary / path.name)
                with open(temporary / path.name, "rb+") as file:
                    flush_to_disk(file)
            if _identity(prefix) != files:
                raise OSError(errno.EAGAIN, "changed while it was copied", prefix)
            if not copy.is_dir():  # another job may have been faster
                temporary.rename(copy)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return str(copy / name)


def _identity(prefix: str) -> list[tuple[str, int, int]]:
    """Return path, size in bytes and modification time of each file of a data set."""
    paths = [os.path.realpath(path) for path in data_files(prefix)]
    return [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]


def first_builds(
    config: Config,
    topology: Topology,
    build: Callable[[int, int, int], Datasets],
    say: Callable[[str], None],
    store: dist.Store | None = None,
    *,
    check: Callable[[], None] = lambda: None,
) -> Callable[[int, int, int], Datasets]:
    """Wrap `build` for all ranks to call: rank 0 builds the index files, then the others read them.

    If rank 0 fails, all other ranks raise a DataError with the same message, or a LostRankError if
    the reason is rank 0's node. `say` gets a line about each build and each wait. Rank 0 calls
    `check` before its first build. If the run has no data files, `build` itself is returned and
    `check` is not called.
    """
    if not data_prefixes(config):
        return build
    turns = itertools.count()
    shared = store or job_store(topology)

    def report(message: str) -> None:
        if message.startswith(("building", "waiting")):
            say(f" index files: {message}")

    def build_in_turn(train: int, valid: int, test: int) -> Datasets:
        turn = next(turns)
        key = f"index files/{turn}"
        if not topology.world.is_first:
            _wait(shared, key, topology)
            if failure := shared.get(key).decode():
                of_node = shared.check([f"{key}/node"])
                raise (LostRankError if of_node else DataError)(failure)
            return build(train, valid, test)
        try:
            if turn == 0:
                check()
            with index_cache.forwarded_messages(report):
                datasets = build(train, valid, test)
        except BaseException as error:
            if isinstance(error, NodeError):
                shared.set(f"{key}/node", "")
            shared.set(key, str(error) or type(error).__name__)
            raise
        shared.set(key, "")
        return datasets

    return build_in_turn


def job_store(topology: Topology) -> dist.Store:
    """Return the store that all ranks of the job share."""
    return (
        dist.HashStore() if topology.world.size == 1 else dist.distributed_c10d._get_default_store()
    )


def _wait(store: dist.Store, key: str, topology: Topology) -> None:
    """Wait until `key` is set by some rank. Raises LaunchError after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    pause_s = max(0.05, topology.world.size / 4000)
    while not store.check([key]):  # polling, so that a signal can interrupt it
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{key}: not done after {WAIT_S / 3600:g} hours: check the file systems of the "
                "nodes"
            )
        time.sleep(pause_s)
