"""`pretrain_gpt.py --dry-run`: what it prints and how it ends."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.dryrun.command import dry_run
from megatron.dryrun.memory_kinds import CATEGORIES
from megatron.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 250 --bf16 "
         "--pipeline-model-parallel-size 4").split()  # fmt: skip


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *arguments], capture_output=True, text=True, timeout=300,
        env={**os.environ, **env},
    )


def test_a_job_of_any_size_without_launcher_data_or_length() -> None:
    done = run("--dry-run", *SMALL, "--world-size", "3072", "--global-batch-size", "7680", "--cluster", "frontier")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (*CATEGORIES, "pp rank 3", "3072 ranks", "384 nodes of frontier", "It runs, and it fits"):
        assert words in done.stdout
    assert done.stderr == ""


def test_a_model_that_does_not_fit_ends_with_3() -> None:
    """Two layers of 12 h^2 parameters on each rank: 15.7 billion, with 18 bytes each."""
    done = run("--dry-run", *SMALL, "--hidden-size", "25600", "--num-attention-heads", "128", "--world-size", "4",
               "--cluster", "frontier")  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    assert "DOES NOT FIT: rank 0: needs 26" in done.stdout and "What does not fit any more: [" in done.stdout
    assert "--pipeline-model-parallel-size" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--world-size", "6"], "not a multiple"),
        (["--world-size", "4", "--cluster", "atlantis"], "atlantis"),
        (["--world-size", "12", "--cluster", "frontier"], "whole nodes"),
        (["--world-size", "4", "--num-layer", "3"], "unknown flag"),
    ],
)
def test_what_cannot_be_is_an_error_of_the_user(arguments: list[str], named: str) -> None:
    """pretrain_gpt.py ends with 2 for it, as everywhere (tests/training)."""
    with pytest.raises(ConfigError, match=named):
        dry_run(["--dry-run", *SMALL, *arguments])


def test_under_a_launcher_the_first_process_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    done = run("--dry-run", *SMALL, RANK="1", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4",
               MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert dry_run(["--dry-run", *SMALL, "--cluster", "frontier"], launched=4) == 0
    assert "4 ranks = tensor 1 x pipeline 4" in capsys.readouterr().out


def test_what_was_not_read_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--load", "/nowhere", "--use-checkpoint-args", "--tokenizer-type", "HFTokenizer"]
    assert dry_run(["--dry-run", *SMALL, *arguments, "--tokenizer-model", "/nowhere"]) == 0
    printed = capsys.readouterr().out
    assert "the checkpoint was not read" in printed and "so --vocab-size 250 is taken" in printed


def test_help_names_it() -> None:
    done = run("--dry-run", "--help")
    assert done.returncode == 0 and "--dry-run" in done.stdout
