"""Saves: contents of the folder, failures without a trace, background saves, and memory."""

import io
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import folder as folder_module
from megatron.checkpoint.folder import commit_folder
from megatron.checkpoint.writer import ShardWriter
from tests.checkpoint import saver_cases
from tests.helpers.processes import run_processes


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("save")


@pytest.fixture(scope="module")
def two(root):
    return run_processes(2, saver_cases.on_two, str(root), saver_cases.CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", saver_cases.CASES)
def test_on_two_ranks(two, case):
    assert [rank[case] for rank in two] == ["", ""]


# -- a commit, a file, memory ----------------------------------------------------------------------


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("stage", ["tracker.tmp", "tracker", "folder"])
def test_a_commit_that_fails_is_undone(tmp_path, monkeypatch, stage, exists):
    """A commit is undone after a file-system error at any of its steps.

    An older checkpoint of that iteration may exist or not.
    """
    final = tmp_path / "iter_0000005"
    temporary = tmp_path / "iter_0000005.tmp"
    temporary.mkdir()
    (temporary / "new").touch()
    if exists:
        final.mkdir()
        (final / "old").touch()
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("4\n")
    rename = Path.rename

    def failing(what, to):
        raise OSError(28, "No space left on device")

    def failing_rename(self, to):
        if stage == "folder" and to == final and self == temporary:
            raise OSError(13, "Permission denied")
        return rename(self, to)

    if stage == "tracker.tmp":
        monkeypatch.setattr(folder_module, "write_text", failing)
    elif stage == "tracker":
        monkeypatch.setattr(folder_module.os, "replace", failing)
    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(OSError):
        commit_folder(temporary, final, 5, 2)
    monkeypatch.undo()
    assert tracker.read_text() == "4\n" and (temporary / "new").exists()
    assert (final / "old").exists() == exists and final.exists() == exists
    assert not final.with_name(final.name + ".old").exists()
    commit_folder(temporary, final, 5, 2)
    assert tracker.read_text() == "5\n" and [p.name for p in final.iterdir()] == ["new"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [final.name, tracker.name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "complex64"])
def test_any_tensor(tmp_path, dtype):
    base = (torch.arange(24) % 5).to(getattr(torch, dtype)).view(4, 6)
    views = {
        "rows": base[1:3],
        "columns": base[:, 2:4],
        "one": base[2, 3],
        "turned": base.t(),
        "none": base[:0],
    }
    with ShardWriter(tmp_path, 3) as writer:
        for name, view in views.items():
            writer.add(name, (9,) * view.dim(), (1,) * view.dim(), view)
        stored = writer.finish()
    data = (tmp_path / "__3_0.distcp").read_bytes()
    for name, view in views.items():
        ((offset, sizes, _, start, length, _),) = stored[name]["boxes"]
        restored = torch.load(io.BytesIO(data[start : start + length]), weights_only=True)
        assert restored.dtype == view.dtype and torch.equal(restored, view) and view.shape == sizes
        assert restored.untyped_storage().nbytes() == restored.nbytes
        assert offset == (1,) * view.dim() and stored[name]["dtype"] == dtype


@pytest.mark.slow
def test_memory(tmp_path):
    """A synchronous save takes no copy of the state, a background save takes one.

    Buffers, lists and the rest may take a tenth.
    """
    ((at_once, behind),) = run_processes(1, saver_cases.growth_by_saves, str(tmp_path), 100)
    assert abs(at_once) < 0.1 and abs(behind - 1) < 0.1
