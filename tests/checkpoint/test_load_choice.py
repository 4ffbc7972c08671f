"""Which of the checkpoints in a folder is loaded, whatever the tracker file says or has become."""
from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from megatron.checkpoint.find import Found, find, find_folder, open_checkpoint, required
from megatron.checkpoint.folder import write_text
from megatron.checkpoint.manifest import write_manifest
from megatron.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
HOUR = 3600 * 10**9


def checkpoint(root: Path, iteration: int, form: int = 3, hours_ago: float = 0.0) -> Path:
    """The small files of a checkpoint; which tensors it has is of no matter here."""
    folder = root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    state = {"format": form, "iteration": iteration, "optimizer": True, "state": {}, "engine": {}}
    files = {"state.json": json.dumps(state), "config.json": '{"model": {}}', "boxes.json": '{"pieces": {}}'}
    if form == 1:
        del files["boxes.json"]
        (folder / ".metadata").write_bytes(b"a pickle")
    for name, text in files.items():
        write_text(folder / name, text)
    if form == 3:
        write_manifest(folder, files)
    at = time.time_ns() - int(hours_ago * HOUR)
    for path in folder.iterdir():
        os.utime(path, ns=(at, at))
    return folder


def saved_at(folder: Path, seconds: float) -> Path:
    """The same checkpoint with the time of its save within it."""
    state = json.loads((folder / "state.json").read_text()) | {"saved_at_s": seconds}
    write_text(folder / "state.json", json.dumps(state))
    write_manifest(folder, ["state.json", "config.json", "boxes.json"])
    return folder


def track(root: Path, text: str, hours_ago: float = 0.0) -> None:
    (root / TRACKER).write_text(text)
    at = time.time_ns() - int(hours_ago * HOUR)
    os.utime(root / TRACKER, ns=(at, at))


@pytest.mark.parametrize("form", [1, 2, 3])
def test_the_tracker_names_it(tmp_path: Path, form: int) -> None:
    checkpoint(tmp_path, 100, form, hours_ago=2)
    expected = checkpoint(tmp_path, 200, form, hours_ago=1)
    track(tmp_path, "200\n")
    assert find(tmp_path) == Found(expected)
    assert open_checkpoint(expected).iteration == 200


def test_a_lost_tracker_is_said_and_the_newest_is_found(tmp_path: Path) -> None:
    checkpoint(tmp_path, 100)
    expected = checkpoint(tmp_path, 200)
    for text in (None, "", "  \n", "two hundred", "-1", "²", "1" * 40, "release", "a folder"):
        (tmp_path / TRACKER).unlink(missing_ok=True)
        if text == "a folder":
            (tmp_path / TRACKER).mkdir()
        elif text is not None:
            track(tmp_path, text)
        found = find(tmp_path)
        assert found.folder == expected and not found.rejected
        (note,) = found.notes
        assert TRACKER in note


def test_a_save_that_died_before_the_tracker_counts(tmp_path: Path) -> None:
    checkpoint(tmp_path, 100, hours_ago=2)
    track(tmp_path, "100", hours_ago=2)
    expected = checkpoint(tmp_path, 200, hours_ago=1)
    found = find(tmp_path)
    assert found.folder == expected and not found.rejected
    assert "100" in found.notes[0] and "iter_0000200" in found.notes[0]


def test_one_that_was_about_to_be_replaced_is_as_good(tmp_path: Path) -> None:
    # Saved again, and killed between the two renames of the commit.
    checkpoint(tmp_path, 100)
    folder = checkpoint(tmp_path, 200)
    track(tmp_path, "200\n")
    old = folder.rename(f"{folder}.old")
    assert find(tmp_path) == Found(old)
    new = checkpoint(tmp_path, 200)  # killed after them
    assert find(tmp_path) == Found(new)


def test_a_tracker_that_was_written_later_leaves_newer_ones_aside(tmp_path: Path) -> None:
    """Somebody went back by writing the tracker, or another run began in the folder."""
    expected = checkpoint(tmp_path, 100, hours_ago=3)
    for iteration in (200, 300):
        checkpoint(tmp_path, iteration, hours_ago=2)
    track(tmp_path, "100", hours_ago=1)
    found = find(tmp_path)
    assert found.folder == expected and not found.rejected
    assert all(name in found.notes[0] for name in ("iter_0000300", "iter_0000200", "--load-tag"))
    assert find(tmp_path, "300").folder == tmp_path / "iter_0000300"
    assert find(tmp_path, before=200).folder == expected


def test_broken_ones_are_named_and_passed_over(tmp_path: Path) -> None:
    expected = checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 50)
    for iteration in (200, 300, 400):
        checkpoint(tmp_path, iteration)
    track(tmp_path, "400")
    (tmp_path / "iter_0000400" / "state.json").unlink()
    (tmp_path / "iter_0000300" / "config.json").write_text('{"model": {} }')
    (tmp_path / "iter_0000200" / "manifest.json").write_text("{}")
    found = find(tmp_path)
    assert found.folder == expected
    assert [r.folder.name for r in found.rejected] == ["iter_0000400", "iter_0000300", "iter_0000200"]
    for rejected, name in zip(found.rejected, ("state.json", "config.json", "manifest.json"), strict=True):
        assert name in rejected.reason
    assert find(tmp_path, before=100) == Found(tmp_path / "iter_0000050")


def test_the_folder_that_the_tracker_names_is_missed(tmp_path: Path) -> None:
    expected = checkpoint(tmp_path, 100)
    track(tmp_path, "200")
    found = find(tmp_path)
    assert found.folder == expected
    assert found.rejected[0].folder == tmp_path / "iter_0000200"
    shutil.rmtree(expected)
    with pytest.raises(CheckpointError, match="iter_0000200"):
        find_folder(tmp_path)


@pytest.mark.parametrize(
    "names", [(), ("iter_0000100.tmp",), ("iter_0000100x.old", "iter_100", "iter_0000100.removed")]
)
def test_nothing_there_is_no_error_yet(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Only what a killed first save left: the run starts from the beginning."""
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    assert find(tmp_path) == Found()
    assert find(tmp_path / "absent") == Found()
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        required(tmp_path, find(tmp_path))


def test_broken_ones_alone_are_an_error(tmp_path: Path) -> None:
    """Something was here, be it a tracker: a run is not started anew in silence."""
    for text in ("", "rubbish"):
        track(tmp_path, text)
        with pytest.raises(CheckpointError, match=TRACKER):
            find_folder(tmp_path)
    (tmp_path / TRACKER).unlink()
    (tmp_path / "iter_0000100").mkdir()
    found = find(tmp_path)
    assert found.folder is None and "state.json" in found.rejected[0].reason
    with pytest.raises(CheckpointError, match="iter_0000100"):
        required(tmp_path, found)


@pytest.mark.parametrize(("names", "named"), [
    (("latest", "global_step100"), "convert_checkpoint"), (("release", TRACKER), "convert_checkpoint"),
    (("state.json", "config.json"), "--load-tag"),
])  # fmt: skip
def test_what_others_wrote_is_no_reason_to_start_anew(tmp_path: Path, names: tuple[str, ...], named: str) -> None:
    for name in names:
        (tmp_path / name).write_text("release")
    with pytest.raises(CheckpointError, match=named):
        find(tmp_path)


def test_megatrons_own_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    track(tmp_path, "100")
    with pytest.raises(CheckpointError, match="convert_checkpoint"):
        find_folder(tmp_path)


def test_a_tag_is_taken_exactly(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path, 100), checkpoint(tmp_path, 200)
    shutil.copytree(first, tmp_path / "best")
    track(tmp_path, "200")
    assert [find(tmp_path, tag).folder for tag in ("100", 100, "iter_0000100")] == [first] * 3
    assert find(tmp_path, "best").folder == tmp_path / "best"
    with pytest.raises(CheckpointError, match="iter_0000150.*iter_0000100.*iter_0000200"):
        find(tmp_path, 150)
    (second / "state.json").write_text("")
    with pytest.raises(CheckpointError, match=r"iter_0000200.*--load-tag.*state.json"):
        find(tmp_path, 200)


def test_a_state_of_the_wrong_kind_is_damage(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 100, form=2)
    for text in ("{}", '{"format": 2, "iteration": "x", "optimizer": true, "state": {}, "engine": {}}', "[]", "\xff"):
        (folder / "state.json").write_text(text, encoding="latin-1")
        with pytest.raises(CheckpointError, match=r"state\.json"):
            open_checkpoint(folder)
    (folder / "state.json").write_text('{"format": 9}')
    with pytest.raises(CheckpointError, match=r"\b9\b"):
        open_checkpoint(folder)


def test_what_a_run_went_back_from_does_not_stand_in_for_a_broken_one(tmp_path: Path) -> None:
    """2, 4, 6; then from 2 again, 3 and 6 anew: 4 is of before. Files' times are of no matter: a copy changes them."""
    times = {2: 100.0, 3: 500.0, 4: 200.0, 6: 600.0}
    made = {i: saved_at(checkpoint(tmp_path, i, hours_ago=i), at) for i, at in times.items()}
    track(tmp_path, "6\n")
    assert find(tmp_path).folder == made[6]
    (made[6] / "config.json").write_text("{}")
    found = find(tmp_path)
    assert found.folder == made[3] and [r.folder for r in found.rejected] == [made[6]]
    assert any("iter_0000004" in note and "--load-tag" in note for note in found.notes)
    assert find(tmp_path, before=6).folder == made[3]
    assert find(tmp_path, tag=4).folder == made[4]
    track(tmp_path, "4\n")  # who writes the tracker by hand wants that one
    assert find(tmp_path).folder == made[4]


def test_without_times_nothing_is_left_behind(tmp_path: Path) -> None:
    saved_at(checkpoint(tmp_path, 2), 300.0)
    expected = checkpoint(tmp_path, 4)
    saved_at(checkpoint(tmp_path, 6), 400.0)
    (tmp_path / "iter_0000006/config.json").write_text("{}")
    assert find(tmp_path).folder == expected
