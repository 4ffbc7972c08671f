"""What `--complete --print-config` refuses, compared with runs of the same command lines."""

import pytest

from megatron import program
from tests.helpers.launching import Script

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 2"
).split()
SOUND = "--vocab-size 64 --mock-data --lr 1e-3 --train-iters 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--vocab-size 64 --mock-data --train-iters 1", "--lr"),
        ("--vocab-size 64 --mock-data --lr 1e-3", "--train-iters"),
        ("--vocab-size 64 --lr 1e-3 --train-iters 1", "--data-path"),
        ("--vocab-size 64 --lr 1e-3 --train-iters 1 --data-path gone", "gone.idx"),
        (
            "--mock-data --lr 1e-3 --train-iters 1 --tokenizer-type GPT2BPETokenizer "
            "--vocab-file gone.json --merge-file gone.txt",
            "gone.json",
        ),
        (SOUND + " --load {here}/gone --exit-on-missing-checkpoint", "no checkpoint in"),
        (SOUND + " --load {here}/broken", "iter_0000007"),
        (SOUND + " --callback gone:Callback", "--callback gone:Callback"),
        (SOUND + " --save-hf {here}/there", "/there"),
        (SOUND + " --freeze gone", "--freeze gone"),
        (SOUND + " --eval-tasks gone.jsonl", "gone.jsonl"),
        (SOUND + " --save {here}/file/folder", "/file/folder"),
        (SOUND, ""),
    ],
)
def test_a_check_refuses_what_a_run_would_refuse(flags, named, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "broken" / "iter_0000007").mkdir(parents=True)
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    words = [*MODEL, *flags.replace("{here}", str(tmp_path)).split()]
    checked = program.run([*words, "--complete", "--print-config"])
    said = capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    with Script("pretrain_gpt.py", words, tmp_path / "log") as script:
        code, output = script.wait()
    assert checked == code == (2 if named else 0), said + output
    assert named in said and named in output


def test_the_order_of_devices_is_checked_without_torch(capsys):
    """A node of Frontier has eight devices; on part of a node the order has no effect."""
    words = [*MODEL, *SOUND.split(), "--cluster", "frontier", "--device-order", "0,1"]
    check = ["--complete", "--print-config"]
    for ranks, code in (("16", 2), ("2", 0)):
        batch = ["--world-size", ranks, "--global-batch-size", ranks]
        assert program.run([*words, *batch, *check]) == code
    assert "0,1" in capsys.readouterr().err


def test_data_on_disks_of_compute_nodes_are_not_looked_for_elsewhere(capsys):
    words = "--vocab-size 64 --lr 1e-3 --train-iters 1 --cluster frontier".split()
    data = ["--data-path", "/mnt/bb/somebody/corpus"]
    assert program.run([*MODEL, *words, *data, "--complete", "--print-config"]) == 0
    assert "/mnt/bb/somebody/corpus" in capsys.readouterr().err


def test_without_complete_missing_settings_are_named(capsys):
    assert program.run([*MODEL, "--vocab-size", "64", "--print-config"]) == 0
    said = capsys.readouterr().err
    assert all(flag in said for flag in ("--lr", "--train-iters", "--data-path"))
