"""A save killed at any moment leaves a whole checkpoint and a true tracker.

The next save cleans up.
"""

import dataclasses
import itertools
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.checkpoint import save as save_module
from megatron.checkpoint.find import find_folder, open_checkpoint
from megatron.checkpoint.save import Saver
from megatron.checkpoint.tensors import LocalShards
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Topology
from megatron_inspection.checkpoint import contents, read_whole, verify, verify_tracker
from tests.engine import toy
from tests.helpers.killing import forked, signal_at, wait_for

TRACKER = "latest_checkpointed_iteration.txt"
KEPT = {"keep_last": 2}


def save(root, iteration, value, **checkpoint):
    config = dataclasses.replace(toy.config(), checkpoint=toy.ToyCheckpoint(**checkpoint))
    saver = Saver(root, Topology.from_layout(Layout(), 0, device=torch.device("cpu")), config)
    engine = SimpleNamespace(value=value, scalars=lambda: {"value": value})
    saver.start(iteration, engine, {}, {})
    saver.finish()


def loaded(root):
    """Return iteration and number of the checkpoint to be loaded, after verifying every byte."""
    folder = find_folder(root)
    assert verify(folder) == []
    value = float(read_whole(contents(folder), "master.w")[0])
    assert open_checkpoint(folder).state["engine"] == {"value": value}
    return open_checkpoint(folder).iteration, value


@pytest.fixture(autouse=True)
def _one_tensor(monkeypatch):
    monkeypatch.setattr(
        save_module,
        "tensors_to_save",
        lambda engine, *_: {"master.w": LocalShards((3,), {(0,): torch.full((3,), engine.value)})},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("same_iteration", "every"),
    [
        pytest.param(False, 3, id="every third moment of the next iteration"),
        pytest.param(False, 1, id="the next iteration", marks=pytest.mark.campaign("kills")),
        pytest.param(True, 1, id="the same iteration again", marks=pytest.mark.campaign("kills")),
    ],
)
def test_a_save_that_is_killed_at_any_moment(tmp_path, same_iteration, every):
    """A killed save leaves a valid checkpoint.

    Two checkpoints are kept, so that a third save also removes the first one.
    """
    before = tmp_path / "before"
    for iteration in (1, 2):
        save(before, iteration, float(iteration))
    number = 2 if same_iteration else 3
    seen = set()
    for moment in itertools.count(step=every):
        root = tmp_path / f"killed_{moment}"
        shutil.copytree(before, root)

        def victim():
            signal_at(moment, root)  # noqa: B023
            save(root, number, 9.0, **KEPT)  # noqa: B023

        code = wait_for(forked(victim))
        latest = loaded(root)
        seen.add(latest)
        assert latest in ((2, 2.0), (number, 9.0)), moment
        assert verify_tracker(root) == [] or same_iteration, (
            "between the two renames of a replacement its folder is .old"
        )
        if int((root / TRACKER).read_text()) == 3:
            assert latest == (3, 9.0)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        save(root, 4, 4.0, **KEPT)
        assert loaded(root) == (4, 4.0)
        assert {p.name for p in root.iterdir()} == {
            f"iter_000000{latest[0]}",
            "iter_0000004",
            TRACKER,
        }
        shutil.rmtree(root)
    assert moment > 30 and seen == {(2, 2.0), (number, 9.0)}


def test_what_is_named_is_on_the_disk(tmp_path):
    """Files are synced before their folder is renamed, and names before the tracker is written."""
    events = []
    armed = True

    def hook(event, arguments):
        if armed and event in ("megatron.checkpoint.synced", "os.rename"):
            at = arguments[event == "os.rename"]  # of a rename, the new name
            events.append((event.rpartition(".")[2], str(at)))

    sys.addaudithook(hook)
    save(tmp_path, 5, 5.0)
    armed = False
    final = str(tmp_path / "iter_0000005")
    tracker = str(tmp_path / TRACKER)
    named = events.index(("rename", final))
    swap = events.index(("rename", tracker))
    synced = [Path(path) for event, path in events[:named] if event == "synced"]
    temporary = {path.parent for path in synced if path.suffix == ".distcp"}.pop()
    # torch itself writes and syncs that one.
    files = {path.name for path in Path(final).iterdir()} - {".metadata"}
    assert {path.name for path in synced if path.parent == temporary} == files
    assert temporary in synced and Path(f"{tracker}.1.tmp") in synced
    assert ("synced", str(tmp_path)) in events[named:swap] and ("synced", str(tmp_path)) in events[
        swap:
    ]
