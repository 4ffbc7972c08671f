"""--stage-data-to in a run, and building in turn: which ranks work and which wait.

No rank is left behind.
"""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.data.datasets import Reading, build_datasets
from megatron.errors import DataError, LaunchError, LostRankError, NodeError
from megatron.training.run import data
from megatron.training.run.data import copy_to_node, first_builds, staged_locations
from tests.helpers.processes import run_processes
from tests.helpers.tiny import rank_topology, tiny
from tests.training.run.test_run import run_and_listen, write_numbers

DATA = dict(vocab_size=80, train_iters=4, split="1")


def staging(prefix, disk, **fields):
    """Return a configuration that copies the data of this prefix to `disk`."""
    return tiny(**DATA, **fields, data_path=(prefix,), stage_data_to=disk and str(disk))


def side_by_side(number, run):
    """Run each of several ranks in a thread; return results or exceptions."""
    outcomes = [None] * number

    def call(rank):
        try:
            outcomes[rank] = run(rank)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_the_copy_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "disk"))
    prefix = write_numbers(tmp_path / "x", 80)
    messages = []
    asked = staging(prefix, "$NODE_DISK/me")
    locations = staged_locations(asked, rank_topology(), messages.append)
    assert Path(locations[prefix]).is_relative_to(tmp_path / "disk" / "me")
    assert len(messages) == 1 and locations[prefix] in messages[0]
    before = build_datasets(asked, 4, 0, 0).train
    (tmp_path / "x.bin").write_bytes(bytes(160))  # the same size, all zeros
    built = build_datasets(asked, 4, 0, 0, reading=Reading(locations)).train
    assert all(
        built[i][:-1].tolist() == list(range(built[i][0], built[i][0] + 8)) for i in range(4)
    )
    assert all(not before[i].any() for i in range(len(before)))
    assert locations[prefix] in built.where(0) and built.sources[0].name == prefix


def test_a_copy_is_kept_and_changed_data_are_copied_anew(tmp_path, monkeypatch):
    prefix = write_numbers(tmp_path / "x", 80)
    disk = tmp_path / "disk"
    first = copy_to_node(prefix, disk)
    assert copy_to_node(prefix, disk) == first
    os.utime(f"{prefix}.bin", (1, 1))  # written again, with the same size
    assert copy_to_node(prefix, disk) != first and len(list(disk.iterdir())) == 2

    def copy_and_change(source, target):
        Path(target).write_bytes(b"")
        os.utime(f"{prefix}.bin", (3, 3))

    os.utime(f"{prefix}.bin", (2, 2))
    monkeypatch.setattr(shutil, "copyfile", copy_and_change)
    with pytest.raises(OSError, match="changed"):
        copy_to_node(prefix, disk)
    assert len(list(disk.iterdir())) == 2


def test_a_disk_that_takes_no_copy_is_no_reason_to_stop(tmp_path):
    (tmp_path / "disk").write_text("")
    prefix = write_numbers(tmp_path / "x", 80)
    messages = []
    asked = staging(prefix, tmp_path / "disk")
    assert staged_locations(asked, rank_topology(), messages.append) == {prefix: prefix}
    assert len(messages) == 1 and prefix in messages[0]


def test_one_process_of_a_node_copies_and_only_stages_that_read_data(tmp_path):
    """One process of a node copies, only stages that read data need it, and all leave together.

    The middle one of three pipeline stages on a node reads nothing.
    """
    prefix = write_numbers(tmp_path / "x", 80)
    store = dist.HashStore()
    messages = []
    fields = dict(num_layers=3, pipeline_model_parallel_size=3, world_size=3)
    asked = staging(prefix, tmp_path / "disk", **fields)
    staged = side_by_side(
        3,
        lambda rank: staged_locations(
            asked, rank_topology(rank, pipeline=3), messages.append, store
        ),
    )
    assert (
        staged[0] == staged[2]
        and Path(staged[0][prefix]).is_relative_to(tmp_path / "disk")
        and staged[1] == {}
    )
    assert len(messages) == 1 and len(list((tmp_path / "disk").iterdir())) == 1


def test_no_rank_waits_for_one_that_stages_nothing(tmp_path):
    """One rank does not ask for copies, and a variable is not set on the node of another."""
    prefix = write_numbers(tmp_path / "x", 80)
    store = dist.HashStore()
    messages = []
    targets = (None, str(tmp_path / "disk"), "$NO_SUCH_VARIABLE/disk")
    asked = staging(prefix, None, world_size=3, global_batch_size=3)

    def run(rank):
        config = asked.replace(stage_data_to=targets[rank])
        said = messages.append if rank == 0 else lambda _: None
        return staged_locations(config, rank_topology(rank, data=3), said, store)

    staged = side_by_side(3, run)
    assert [list(locations) for locations in staged] == [[], [prefix], []]
    assert len(messages) == 1 and targets[2] in messages[0]


def test_the_wait_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "WAIT_S", 0.0)
    asked = staging(write_numbers(tmp_path / "x", 80), tmp_path / "disk", world_size=2)
    with pytest.raises(LaunchError, match="staging"):
        staged_locations(asked, rank_topology(data=2), lambda _: None, dist.HashStore())


@pytest.mark.parametrize("fails", [None, DataError, NodeError])
def test_the_first_rank_builds_and_what_it_fails_by_is_told_to_all(tmp_path, fails):
    store = dist.HashStore()
    begun = []
    asked = tiny(
        **DATA, data_path=(write_numbers(tmp_path / "x", 80),), world_size=3, global_batch_size=3
    )

    def run(rank):
        def build(*samples):
            begun.append(rank)
            if fails is not None:
                raise fails(*([errno.EIO] if fails is NodeError else []), "the disk is bad")
            return build_datasets(asked, *samples)

        in_turn = first_builds(asked, rank_topology(rank, data=3), build, lambda _: None, store)
        return [in_turn(4, 0, 0), in_turn(8, 0, 0)]

    outcomes = side_by_side(3, run)
    assert begun[0] == 0
    if fails is not None:
        assert all("the disk is bad" in str(error) for error in outcomes)
        on_others = LostRankError if fails is NodeError else DataError
        assert [type(error) for error in outcomes] == [fails, on_others, on_others]
        assert begun == [0]
    else:
        assert all(len(built) == 2 and built[0].train is not None for built in outcomes)


def run_from_copies_on_one(rank, fields):
    return run_and_listen(rank, dict(fields, stage_data_to=None) if rank == 0 else fields)


@pytest.mark.slow
def test_a_whole_run_of_which_one_rank_reads_copies(tmp_path):
    prefix = write_numbers(tmp_path / "x", 80)
    target = tmp_path / "disk"
    fields = dict(data_path=(prefix,), split="1", vocab_size=80, stage_data_to=str(target))
    printed = run_processes(2, run_from_copies_on_one, fields)
    assert all(
        f"{24 * 8} tokens" in lines[-1] and f"x {24 * 8 / 80:.3f}" in lines[-1] for lines in printed
    )
    assert len(list(target.glob("**/*.bin"))) == 1
