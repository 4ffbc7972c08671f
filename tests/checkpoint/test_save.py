"""Saves: contents of the folder, failures without a trace, background saves, and memory."""

import errno
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from megatron.checkpoint import folder as folder_module
from megatron.checkpoint import writer as writer_module
from megatron.checkpoint.files import file_digest
from megatron.checkpoint.folder import commit_folder
from megatron.checkpoint.writer import ShardWriter
from tests.checkpoint import saver_cases
from tests.engine import toy
from tests.helpers.processes import run_processes


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("save")


@pytest.fixture(scope="module")
def two(root):
    cases = "synchronous consistent waits two_runs keeps wrong_clock another_branch"
    names = [*cases.split(), "fails", "fails_in_the_background"]
    return run_processes(2, saver_cases.on_two, str(root), names)


@pytest.fixture(scope="module")
def folder(root, two):
    return root / "synchronous" / "iter_0000007"


def names(*iterations):
    return [*(f"iter_{iteration:07d}" for iteration in iterations), saver_cases.TRACKER]


@pytest.mark.slow
def test_contents(folder, two):
    small = {*"state.json config.json passport.json boxes.json boxes_00000.json .metadata".split()}
    data = {"__0_0.distcp", "__1_0.distcp"}
    assert {p.name for p in folder.iterdir()} == {"manifest.json", *small, *data}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"] == {name: list(file_digest(folder / name)) for name in small}
    state = json.loads((folder / "state.json").read_text())
    assert (state["format"], state["iteration"], state["state"]) == (3, 7, {"samples": 3})
    assert json.loads((folder / "passport.json").read_text()) == {"who": "rank 0"}


@pytest.mark.slow
def test_a_failure_anywhere_leaves_no_trace(two):
    found, second = (r["fails"] for r in two)
    assert found == second
    assert found.pop("in the end") == (names(2), "2\n")
    reasons = {
        "full": "rank 1: OSError: [Errno 28]",
        "tensors": "rank 1: MemoryError",
        "a part": "iter_0000002",
    }
    for name, (text, *rest) in found.items():
        assert "iter_0000002" in text and reasons.get(name, "[Errno 122]") in text
        assert rest == [names(1), "1\n"]


@pytest.mark.slow
def test_retention(two):
    """10 is named by --load-tag; two are kept, and the multiples of 40."""
    kept = [(10,), (10, 20), (10, 20, 30), (10, 30, 40), (10, 40, 50), (10, 40, 50, 60)]
    for rank in two:
        found, *later = rank["keeps"]
        assert [name for name in found if not name.endswith(".tmp")] == names(10)
        assert later == [names(*iterations) for iterations in kept[1:]]


@pytest.mark.slow
def test_no_clock_is_believed(two):
    for found in (r["wrong_clock"] for r in two):
        assert found["there"] == names(12, 14, 16)
        assert found["instead"] == found["without tracker"] == "iter_0000014"


@pytest.mark.slow
def test_a_run_that_goes_on_from_an_older_checkpoint(two):
    """Resume from an older checkpoint, 4 by --load-tag; later ones are neither loaded nor counted.

    Seven saves precede that of iteration 10.
    """
    for found in (r["another_branch"] for r in two):
        assert (found["of 5"], found["of 9"]) == ("iter_0000005", "iter_0000009")
        assert found["there"] == ["else", *names(4, 7, 9)]
        assert found["generation"] == 8


# -- in the background -----------------------------------------------------------------------------


def assert_same(found, expected):
    a, b = toy.assemble(found), toy.assemble(expected)
    assert a.keys() == b.keys()
    for name in b:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.slow
def test_the_copy_is_of_the_moment_it_was_asked_for(two):
    """A checkpoint of that moment appears with its commit, while training goes on."""
    found = [r["consistent"] for r in two]
    expected = [f["before"]["state"] for f in found]
    assert_same([f["loaded"]["state"] for f in found], expected)
    with pytest.raises(AssertionError):  # training went on meanwhile
        assert_same([f["after"] for f in found], expected)
    for f in found:
        assert f["loaded"]["scalars"] == f["before"]["scalars"]
        assert f["loaded"]["taken"][1] == {"n": 1}
        assert f["same"], "the file is that of a synchronous save, to the byte"
        state, (there,) = f["early"]
        assert state == (None, True, False)
        assert re.fullmatch(r"iter_0000005\.[0-9a-f]{8}\.tmp", there)
        assert (f["then"], f["saved"]) == ((False, names(5)), (5, True, True))


@pytest.mark.slow
def test_one_at_a_time(two):
    found = [r["waits"] for r in two]
    for f in found:
        assert "iter_0000001" in f["after second"] and "iter_0000002" not in f["after second"]
        assert (f["last"], f["there"]) == (2, names(1, 2))
        assert f["in the end"] == (names(1, 2, 3, 4), "4\n")
    assert_same([f["loaded"] for f in found], [f["expected"] for f in found])


@pytest.mark.slow
def test_a_thread_that_fails(two):
    first, second = (r["fails_in_the_background"] for r in two)
    assert first == second
    for text in first["messages"]:
        assert "rank 1: OSError: [Errno 28]" in text and "iter_0000002" in text
    assert first["state"] == (names(1), "1\n", False, False)
    assert first["in the end"] == (names(3), "3\n")


@pytest.mark.slow
def test_two_runs_in_one_folder(two):
    """A job and its requeued copy save in one folder.

    One of them fails, and only the other's files appear.
    """
    found = [r["two_runs"] for r in two]
    for f in found:
        assert "iter_0000003." in f["error"] and ".tmp" in f["error"]
        assert f["there"] == names(3) and f["loaded"]["taken"][1] == {"run": "second"}
    assert_same([f["loaded"]["state"] for f in found], [f["expected"] for f in found])


# -- a commit, a file, memory ----------------------------------------------------------------------


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("stage", ["tracker.tmp", "tracker", "folder"])
def test_a_commit_that_fails_is_undone(tmp_path, monkeypatch, stage, exists):
    """A commit is undone after a file-system error at any of its steps.

    An older checkpoint of that iteration may exist or not.
    """
    final, temporary = tmp_path / "iter_0000005", tmp_path / "iter_0000005.tmp"
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
    whole = (torch.arange(24) % 5).to(getattr(torch, dtype)).view(4, 6)
    views = {
        "rows": whole[1:3],
        "columns": whole[:, 2:4],
        "one": whole[2, 3],
        "turned": whole.t(),
        "none": whole[:0],
    }
    with ShardWriter(tmp_path, 3) as writer:
        for name, view in views.items():
            writer.add(name, (9,) * view.dim(), (1,) * view.dim(), view)
        stored = writer.finish()
    data = (tmp_path / "__3_0.distcp").read_bytes()
    for name, view in views.items():
        ((offset, sizes, _, start, length, _),) = stored[name]["boxes"]
        found = torch.load(io.BytesIO(data[start : start + length]), weights_only=True)
        assert found.dtype == view.dtype and torch.equal(found, view) and view.shape == sizes
        assert found.untyped_storage().nbytes() == found.nbytes
        assert offset == (1,) * view.dim() and stored[name]["dtype"] == dtype


def test_a_disk_that_is_full_before_the_buffer_is_called_so(tmp_path):
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    elements = 1 << 20

    def write():
        with ShardWriter(tmp_path, 0) as writer:
            writer.add("w", (elements,), (0,), torch.zeros(elements))
            writer.finish()

    with pytest.raises(OSError) as error:
        write()
    assert error.value.errno == errno.ENOSPC


def test_no_file_without_boxes_and_several_syncs(tmp_path, monkeypatch):
    with ShardWriter(tmp_path, 0) as writer:
        assert writer.finish() == {}
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(writer_module, "_SYNC", 5000)
    whole = torch.arange(2500.0)  # 10,000 bytes
    with ShardWriter(tmp_path, 1) as writer:
        for start in range(0, 2500, 500):
            writer.add("w", (2500,), (start,), whole[start : start + 500])
        stored = writer.finish()
    data = (tmp_path / "__1_0.distcp").read_bytes()
    for (start,), _, _, at, length, digest in stored["w"]["boxes"]:
        part = data[at : at + length]
        assert xxhash.xxh3_128_hexdigest(part) == digest
        found = torch.load(io.BytesIO(part), weights_only=True)
        assert torch.equal(found, whole[start : start + 500])
    assert at + length == len(data)


@pytest.mark.slow
def test_memory(tmp_path):
    """A synchronous save takes no copy of the state, a background save takes one.

    Buffers, lists and the rest may take a tenth.
    """
    ((at_once, behind),) = run_processes(1, saver_cases.growth_by_saves, str(tmp_path), 100)
    assert abs(at_once) < 0.1 and abs(behind - 1) < 0.1
