"""Choice of the checkpoints to remove; nothing else is removed."""

import json

from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.files import write_manifest
from megatron.checkpoint.find import folders, generations, number_of
from megatron.checkpoint.folder import clear, folder_name, left_over, retire, to_remove


def test_what_a_run_went_back_from_does_not_count_among_the_last():
    """40 is from before the run went back to 20: 30 is the one to fall back to."""
    assert to_remove([20, 30, 40, 60], 60, 2, None, left_behind=[40]) == [20, 40]


NUMBERS = st.integers(0, 60)


@given(
    st.sets(NUMBERS, min_size=1),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 10),
    st.sets(NUMBERS),
    st.data(),
)
def test_what_must_stay_stays(there, last, every, keep, data):
    newest = data.draw(st.sampled_from(sorted(there)))
    gone = to_remove(there, newest, last, every, keep)
    stays = there - set(gone)
    assert gone == sorted(set(gone)) and set(gone) < there
    assert newest in stays and keep & there <= stays and {i for i in there if i > newest} <= stays
    if last is None:
        assert not gone
        return
    older = sorted(i for i in there if i <= newest)
    assert set(older[-last:]) <= stays
    assert every is None or {i for i in there if i % every == 0} <= stays
    # Nothing more is removed.
    reasons = set(older[-last:]) | keep | {i for i in there if i > newest}
    assert stays <= reasons | {i for i in there if every and i % every == 0}


def checkpoint(root, iteration):
    folder = root / folder_name(iteration)
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"format": 3}))
    write_manifest(folder, ["state.json"])
    return folder


def good_iterations(root):
    """Return the iterations that count, as a save determines them."""
    return sorted(map(number_of, generations(folders(root))))


def test_only_good_checkpoints_are_counted(tmp_path):
    for iteration in (10, 20, 30, 40):
        checkpoint(tmp_path, iteration)
    (tmp_path / "iter_0000020" / "manifest.json").write_text("rubbish")
    (tmp_path / "iter_0000030" / "manifest.json").unlink()
    for other in ("iter_0000050.tmp", "iter_60", "iter_0000070x", "release"):
        (tmp_path / other).mkdir()
    assert good_iterations(tmp_path) == [10, 40]


def test_removal_is_a_renaming_first(tmp_path):
    for iteration in (10, 20, 30):
        checkpoint(tmp_path, iteration)
    (tmp_path / "iter_0000010.removed").mkdir()  # of a killed removal
    renamed = retire(tmp_path, [10, 20, 99])
    assert [p.name for p in renamed] == ["iter_0000010.removed", "iter_0000020.removed"]
    assert good_iterations(tmp_path) == [30]
    assert all((p / "manifest.json").exists() for p in renamed)
    clear(renamed)
    assert [p.name for p in tmp_path.iterdir()] == ["iter_0000030"]


def test_left_overs(tmp_path):
    for iteration in (10, 20):
        checkpoint(tmp_path, iteration)
    (tmp_path / "iter_0000020").rename(tmp_path / "iter_0000020.old")
    stale = (
        "iter_0000010.old",
        "iter_0000030.tmp",
        "iter_0000035.0123abcd.tmp",
        "iter_0000005.removed",
    )
    foreign = (
        "iter_0000040.tmp",
        "iter_3.tmp",
        "notes.tmp",
        "latest_checkpointed_iteration.txt.tmp",
    )
    for name in (*stale, *foreign):
        (tmp_path / name).mkdir()
    leftovers = left_over(tmp_path, current=tmp_path / "iter_0000040.tmp")
    # Another run may be writing in them: without names they do not become half a checkpoint.
    assert sorted(p.name for p in leftovers) == sorted(
        name.replace(".tmp", ".removed") for name in stale
    )
    assert all(p.is_dir() for p in leftovers) and not (tmp_path / stale[2]).exists()
    # Killed between the two renames of a replacement: only the old one exists.
    assert good_iterations(tmp_path) == [10, 20]
