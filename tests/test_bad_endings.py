"""Runs that end badly through pretrain_gpt.py itself: what the user reads and what is left on disk."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data.folder_claim import FolderClaim
from megatron.training.metrics import read_metrics
from tests.helpers.launching import ROOT, TINY, launch
from tests.helpers.processes import free_port


def test_damaged_checkpoint_files_are_named_on_every_rank(tmp_path: Path) -> None:
    (alone,) = launch(1, [*TINY, "--save", str(tmp_path)])
    assert alone.code == 0
    # One process is no mistake: torch's warning about it must not reach the user.
    assert "UserWarning" not in alone.output
    file = next((tmp_path / "iter_0000004").glob("*.distcp"))
    assert file.stat().st_size > 1000
    os.truncate(file, 1000)
    for rank, outcome in enumerate(launch(2, [*TINY, "--load", str(tmp_path), "--train-iters", "5"])):
        assert outcome.code == 2 and "Traceback" not in outcome.output, outcome.output
        assert f"{file} has 1000 bytes" in outcome.output, f"rank {rank}: {outcome.output}"
    file.unlink()
    (outcome,) = launch(1, [*TINY, "--load", str(tmp_path), "--train-iters", "5"])
    assert outcome.code == 2 and f"{file} cannot be read (No such file" in outcome.output


def test_places_that_cannot_be_written_are_named_by_their_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (outcome,) = launch(1, [*TINY, "--save", str(tmp_path / "file" / "x")])
    assert outcome.code == 2 and f"ConfigError: --save {tmp_path}/file/x" in outcome.output


def test_a_folder_that_another_run_saves_to_is_refused_on_every_rank(tmp_path: Path) -> None:
    other = FolderClaim(tmp_path, f"--save {tmp_path}")
    other.take(print)
    for outcome in launch(2, [*TINY, "--save", str(tmp_path)]):
        assert outcome.code == 2 and "Traceback" not in outcome.output, outcome.output
        assert f"--save {tmp_path} is in use by another run: process {os.getpid()} on" in outcome.output
    other.release()
    (outcome,) = launch(1, [*TINY, "--save", str(tmp_path)])
    assert outcome.code == 0
    assert not list(tmp_path.glob(".in_use*"))


def test_resuming_at_the_end_says_that_nothing_is_left(tmp_path: Path) -> None:
    for _ in range(2):
        (outcome,) = launch(1, [*TINY, "--save", str(tmp_path), "--load", str(tmp_path)])
        assert outcome.code == 0
    assert "nothing left to train: iteration 4 of 4" in outcome.output
    assert [r["iteration"] for r in read_metrics(tmp_path / "metrics.jsonl", "checkpoint")] == [4]


def test_a_vanished_validation_part_is_said(tmp_path: Path) -> None:
    """1 % of 8 documents rounds to none."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(f'{{"text": "{" ".join(str(i) for i in range(60))}"}}\n' for _ in range(8)))
    prefix = str(tmp_path / "data")
    subprocess.run(
        [sys.executable, "tools/preprocess_data.py", "--input", str(lines), "--output-prefix", prefix, "--workers", "1",
         "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--append-eod"],
        cwd=ROOT, check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    real = [a for a in TINY if a != "--mock-data"]
    data = ["--data-path", f"{prefix}_text_document", "--split", "99,1,0", "--eval-iters", "1", "--train-iters", "1"]
    (outcome,) = launch(1, [*real, *data])
    assert outcome.code == 0 and "note: no validation data" in outcome.output
    assert "valid none" in outcome.output


def start(rank: int, port: int, arguments: list[str]) -> subprocess.Popen[str]:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "pretrain_gpt.py", *arguments], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_in_one_line(victim: int) -> None:
    """Rank 0 serves the store: when it dies, torch has a page of C++ frames to say, which must not be seen."""
    port = free_port()
    long = [*TINY, "--train-iters", "100000", "--distributed-timeout-minutes", "3"]
    processes = [start(rank, port, long) for rank in range(2)]
    try:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            if "iteration        5/" in line:
                break
        processes[victim].kill()
        other = processes[1 - victim]
        output, _ = other.communicate(timeout=240)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert other.returncode == 75
    error = output[output.index("LostRankError") :]
    assert f"rank {victim}" in error and len(error.splitlines()) == 1
    for noise in ("frame #", "Traceback", "/gloo/transport"):
        assert noise not in output



def test_a_fatal_signal_says_where_it_struck() -> None:
    """A mapped file that is cut short while it is read ends in a bus error, which no exception tells of."""
    code = (
        "import os, signal; from megatron.training.failures import run_guarded; "
        "run_guarded(lambda: os.kill(os.getpid(), signal.SIGBUS), 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode < 0 and "Bus error" in ended.stderr and "in run_guarded" in ended.stderr
