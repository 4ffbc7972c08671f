"""Choice of the checkpoint to load, whatever the tracker file contains."""

import json
import os
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint.files import digest, write_manifest, write_text
from megatron.checkpoint.find import CheckpointChoice, find, find_folder, required
from megatron.checkpoint.settings import check_architecture, plain
from megatron.config import Config
from megatron.errors import CheckpointError
from tests.checkpoint.written import signed

TRACKER = "latest_checkpointed_iteration.txt"
STATE = {"format": 3, "iteration": 1, "optimizer": True, "state": {}, "engine": {}}


def checkpoint(root, iteration, generation=0, **files):
    """Write the small files of a checkpoint; its tensors do not matter here."""
    folder = root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    texts = {
        "state": json.dumps({**STATE, "iteration": iteration}),
        "config": "{}",
        "boxes": '{"pieces": {}}',
        **files,
    }
    for name, text in texts.items():
        write_text(folder / f"{name}.json", text)
    write_manifest(folder, [f"{name}.json" for name in texts], generation=generation)
    return folder


def track(root, text):
    (root / TRACKER).write_text(text)


NO_FILES = {
    "fifo": os.mkfifo,
    "no end": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}


def test_a_lost_tracker_is_said_and_the_newest_is_found(tmp_path):
    checkpoint(tmp_path, 100)
    expected = checkpoint(tmp_path, 200)
    texts = ("", "  \n", "two hundred", "-1", "²", "1" * 5000, "release")
    for put in (
        lambda path: None,
        *(lambda path, text=text: path.write_text(text) for text in texts),
        *NO_FILES.values(),
    ):
        (tmp_path / TRACKER).unlink(missing_ok=True)
        put(tmp_path / TRACKER)
        choice = find(tmp_path)
        assert choice.folder == expected and not choice.rejected
        (note,) = choice.notes
        assert TRACKER in note


def test_a_save_that_died_before_the_tracker_counts(tmp_path):
    checkpoint(tmp_path, 100, generation=1)
    track(tmp_path, "100")
    expected = checkpoint(tmp_path, 200, generation=2)
    (tmp_path / f"{TRACKER}.2.tmp").write_text("200\n")
    choice = find(tmp_path)
    assert choice.folder == expected and not choice.rejected
    assert "100" in choice.notes[0] and "iter_0000200" in choice.notes[0]
    # of another save, killed even earlier
    (tmp_path / f"{TRACKER}.2.tmp").rename(tmp_path / f"{TRACKER}.3.tmp")
    assert find(tmp_path).folder == tmp_path / "iter_0000100"


def test_one_that_was_about_to_be_replaced_is_as_good(tmp_path):
    # Saved again, and killed between the two renames of the commit.
    checkpoint(tmp_path, 100)
    folder = checkpoint(tmp_path, 200)
    track(tmp_path, "200\n")
    old = folder.rename(f"{folder}.old")
    assert find(tmp_path) == CheckpointChoice(old)
    new = checkpoint(tmp_path, 200)  # killed after them
    assert find(tmp_path) == CheckpointChoice(new)


def test_a_tracker_leaves_newer_ones_aside(tmp_path):
    """Newer checkpoints are ignored if the tracker names an older one.

    The tracker was edited, or another run started in the folder.
    """
    expected = checkpoint(tmp_path, 100, generation=1)
    for iteration in (200, 300):
        checkpoint(tmp_path, iteration, generation=iteration // 100)
    track(tmp_path, "100")
    choice = find(tmp_path)
    assert choice.folder == expected and not choice.rejected
    assert all(name in choice.notes[0] for name in ("iter_0000300", "iter_0000200", "--load-tag"))
    assert find(tmp_path, "300").folder == tmp_path / "iter_0000300"
    assert find(tmp_path, before=200).folder == expected


def test_broken_ones_are_named_and_passed_over(tmp_path):
    expected = checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 50)
    for iteration in (200, 300, 400):
        checkpoint(tmp_path, iteration)
    track(tmp_path, "400")
    (tmp_path / "iter_0000400" / "state.json").unlink()
    (tmp_path / "iter_0000300" / "config.json").write_text('{"model": {} }')
    (tmp_path / "iter_0000200" / "manifest.json").write_text("{}")
    choice = find(tmp_path)
    assert choice.folder == expected
    broken = {400: "state.json", 300: "config.json", 200: "manifest.json"}
    for rejected, (iteration, name) in zip(choice.rejected, broken.items(), strict=True):
        assert rejected.folder.name == f"iter_0000{iteration}" and name in rejected.reason
    assert find(tmp_path, before=100) == CheckpointChoice(tmp_path / "iter_0000050")


def test_the_folder_that_the_tracker_names_is_missed(tmp_path):
    expected = checkpoint(tmp_path, 100)
    track(tmp_path, "200")
    choice = find(tmp_path)
    assert choice.folder == expected
    assert choice.rejected[0].folder == tmp_path / "iter_0000200"
    shutil.rmtree(expected)
    with pytest.raises(CheckpointError, match="iter_0000200"):
        find_folder(tmp_path)


@pytest.mark.parametrize(
    "names", [(), ("iter_0000100.tmp",), ("iter_0000100x.old", "iter_100", "iter_0000100.removed")]
)
def test_nothing_there_is_no_error_yet(tmp_path, names):
    """A folder with only a killed first save is no error: the run starts from the beginning."""
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    assert find(tmp_path) == CheckpointChoice()
    assert find(tmp_path / "absent") == CheckpointChoice()
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        required(tmp_path, find(tmp_path))


def test_broken_ones_alone_are_an_error(tmp_path):
    """A folder with nothing but broken checkpoints, or just a tracker, is an error.

    A run must not restart silently.
    """
    for text in ("", "rubbish"):
        track(tmp_path, text)
        with pytest.raises(CheckpointError, match=TRACKER):
            find_folder(tmp_path)
    (tmp_path / TRACKER).unlink()
    (tmp_path / "iter_0000100").mkdir()
    choice = find(tmp_path)
    assert choice.folder is None and "manifest.json" in choice.rejected[0].reason
    with pytest.raises(CheckpointError, match="iter_0000100"):
        required(tmp_path, choice)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        ("latest global_step100", "convert_checkpoint"),
        (f"release {TRACKER}", "convert_checkpoint"),
        ("iter_0000100/mp_rank_00/x", "convert_checkpoint"),
        ("iter_0000100/metadata.json", "convert_checkpoint"),
        ("state.json config.json manifest.json", "--load-tag"),
    ],
)
def test_what_others_wrote_is_no_reason_to_start_anew(tmp_path, names, named):
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("release")
    with pytest.raises(CheckpointError, match=named):
        find_folder(tmp_path)


def test_a_tag_is_taken_exactly(tmp_path):
    first = checkpoint(tmp_path, 100)
    second = checkpoint(tmp_path, 200)
    shutil.copytree(first, tmp_path / "best")
    track(tmp_path, "200")
    assert [find(tmp_path, tag).folder for tag in ("100", 100, "iter_0000100")] == [first] * 3
    assert find(tmp_path, "best").folder == tmp_path / "best"
    with pytest.raises(CheckpointError, match="iter_0000150.*iter_0000100.*iter_0000200"):
        find(tmp_path, 150)
    (second / "state.json").write_text("")
    with pytest.raises(CheckpointError, match=r"iter_0000200.*--load-tag.*state.json"):
        find(tmp_path, 200)


DEEP = "[" * 3000 + "]" * 3000


def manifest(**changed):
    """Write a manifest that is valid in itself."""
    files = {"state.json": [2, digest(b"{}")]}
    return signed({"format": 3, "generation": 1, "files": files, **changed})


SMALL = {
    "deep": f'{{"format": {DEEP}}}',
    "many digits": f'{{"iteration": {"1" * 5000}}}',
    "no object": "[]",
    "no text": "\xff",
    "half a character": '{"format": "\\ud800"}',
}
FORGED = {
    "manifest": {
        **SMALL,
        "files": manifest(files=[]),
        "negative": manifest(files={"state.json": [-1, ""]}),
        "elsewhere": manifest(files={"/dev/zero": [1 << 29, ""]}),
        "huge": manifest(files={"state.json": [1 << 60, ""]}),
        "generation": manifest(generation="1"),
    },
    "state": {
        **SMALL,
        "iteration": json.dumps({**STATE, "iteration": "1"}),
        "negative": json.dumps({**STATE, "iteration": -1}),
        "optimizer": json.dumps({**STATE, "optimizer": 1}),
        "engine": json.dumps({**STATE, "engine": None}),
    },
    "config": {**SMALL, "sections": '{"model": 3}'},
}


@pytest.mark.parametrize(
    ("name", "how"), [(name, how) for name, texts in FORGED.items() for how in texts]
)
def test_what_was_forged_is_passed_over(tmp_path, name, how):
    """A forged checkpoint is skipped although its digests are valid.

    The one before it is found, and the forged file is named.
    """
    expected = checkpoint(tmp_path, 1)
    text = FORGED[name][how]
    newest = checkpoint(tmp_path, 2, generation=1)
    (newest / f"{name}.json").write_bytes(text.encode("latin-1"))
    if name != "manifest":
        write_manifest(newest, ["state.json", "config.json", "boxes.json"])
    choice = find(tmp_path)
    assert choice.folder == expected
    ((folder, reason),) = [(r.folder, r.reason) for r in choice.rejected]
    assert folder == newest and f"{name}.json" in reason


@pytest.mark.parametrize("name", ["manifest", "state", "config", "boxes"])
@pytest.mark.parametrize("how", NO_FILES)
def test_what_is_no_regular_file_is_not_read(tmp_path, name, how):
    expected = checkpoint(tmp_path, 1)
    newest = checkpoint(tmp_path, 2)
    path = newest / f"{name}.json"
    path.unlink()
    NO_FILES[how](path)
    choice = find(tmp_path)
    assert choice.folder == expected and [r.folder for r in choice.rejected] == [newest]


def test_what_a_run_went_back_from_does_not_stand_in_for_a_broken_one(tmp_path):
    """Checkpoints of an abandoned branch do not replace a broken one.

    The run saved 2, 4, 6, went back to 2, and saved 3 and 6 again: 4 is from before.
    """
    saves = {2: 1, 3: 4, 4: 2, 6: 5}
    made = {i: checkpoint(tmp_path, i, generation) for i, generation in saves.items()}
    track(tmp_path, "6\n")
    assert find(tmp_path).folder == made[6]
    (made[6] / "config.json").write_text("")
    choice = find(tmp_path)
    assert choice.folder == made[3] and [r.folder for r in choice.rejected] == [made[6]]
    assert any("iter_0000004" in note and "--load-tag" in note for note in choice.notes)
    assert find(tmp_path, before=6).folder == made[3]
    assert find(tmp_path, tag=4).folder == made[4]
    track(tmp_path, "4\n")  # a tracker written by hand asks for that one
    assert find(tmp_path).folder == made[4]


def test_those_from_before_saves_were_counted_are_the_oldest(tmp_path):
    """Checkpoints from before saves were counted are the oldest.

    The exception is a counted one of an earlier iteration.
    """
    made = {
        i: checkpoint(tmp_path, i, generation) for i, generation in {2: 0, 4: 0, 6: 0, 8: 1}.items()
    }
    for folder in list(made.values())[:3]:
        content = json.loads((folder / "manifest.json").read_text())
        del content["generation"], content["digest"]
        (folder / "manifest.json").write_text(signed(content))
    (made[8] / "config.json").write_text("")
    assert find(tmp_path).folder == made[6]
    expected = checkpoint(tmp_path, 3, generation=2)
    assert find(tmp_path).folder == expected


SIZES = dict(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=8)


def test_a_setting_that_is_newer_than_the_checkpoint():
    """A checkpoint from before a setting existed was written with its default."""
    config = Config.create(**SIZES)
    stored = plain(config)
    for name in ("qk_layernorm", "parallel_residual", "norm_position", "moe_layer_freq"):
        del stored["model"][name]
    check_architecture(stored, config, "iter_0000001")
    changed = dict(qk_layernorm=True, parallel_residual="one_norm")
    with pytest.raises(CheckpointError) as raised:
        check_architecture(stored, Config.create(**SIZES, **changed), "iter_0000001")
    text = str(raised.value)
    assert "--qk-layernorm" in text and "--parallel-residual" in text and "one_norm" in text
    assert "--norm-position" not in text


def test_mup_belongs_to_a_checkpoint():
    mup = Config.create(**SIZES, use_mup=True, mup_base_hidden_size=8)
    check_architecture(plain(mup), mup, "iter_0000001")
    for other in (dict(), dict(use_mup=True, mup_base_hidden_size=8, mup_output_mult=1.0)):
        with pytest.raises(CheckpointError) as raised:
            check_architecture(plain(mup), Config.create(**SIZES, **other), "iter_0000001")
        assert "--mup-output-mult" in str(raised.value)
        assert ("--use-mup" in str(raised.value)) != bool(other)
