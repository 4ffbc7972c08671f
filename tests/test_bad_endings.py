"""Runs of pretrain_gpt.py that end badly: the user's output and the files left on disk."""

import os
import subprocess
import sys

import numpy as np
import pytest

from megatron.data.file_lock import FolderClaim
from megatron.metrics_file import read_records
from tests.helpers.indexed import write_documents
from tests.helpers.launching import ROOT, TINY, launch
from tests.helpers.preprocessing import byte_tokenizer

pytestmark = pytest.mark.slow


def refused(outcome):
    assert outcome is not None and outcome.code == 2 and "Traceback" not in outcome.output, outcome


def test_a_run_at_its_end(tmp_path):
    for _ in range(2):
        (alone,) = launch(1, [*TINY, "--save", str(tmp_path), "--load", str(tmp_path)])
        # One process is no mistake: torch's warning about it must not reach the user.
        assert alone is not None and alone.code == 0 and "UserWarning" not in alone.output, alone
    assert "iteration 4 of 4" in alone.output  # nothing is left to train
    assert [r["iteration"] for r in read_records(tmp_path / "metrics.jsonl", "checkpoint")] == [4]


def test_a_folder_that_another_run_saves_to_is_refused_on_every_rank(tmp_path):
    other = FolderClaim(tmp_path, f"--save {tmp_path}")
    other.take(print)
    for outcome in launch(2, [*TINY, "--save", str(tmp_path)]):
        refused(outcome)
        assert f"--save {tmp_path}" in outcome.output and f"process {os.getpid()}" in outcome.output
    other.release()
    (outcome,) = launch(1, [*TINY, "--save", str(tmp_path), "--train-iters", "1"])
    assert outcome is not None and outcome.code == 0 and not list(tmp_path.glob(".in_use*"))


def test_a_vanished_validation_part_is_said_and_a_changed_index_refused(tmp_path):
    """A vanished validation part is reported and a changed index refused.

    1 % of 8 documents rounds to none. Only a digest reveals that samples come in another order.
    """
    write_documents(tmp_path / "data", [range(60)] * 8)
    data = f"--data-path {tmp_path}/data --split 99,1,0 --data-order megatron --eval-iters 1 --train-iters 1"
    arguments = [*(word for word in TINY if word != "--mock-data"), *data.split()]
    (outcome,) = launch(1, arguments)
    assert outcome is not None and outcome.code == 0 and "valid none" in outcome.output, outcome
    assert "--split" in outcome.output and "--valid-data-path" in outcome.output
    (order,) = (tmp_path / "index-cache").glob("*_shuffle_idx.npy")
    np.save(order, np.load(order)[::-1])
    for outcome in launch(2, arguments):
        refused(outcome)
        assert order.name.partition("_")[0] in outcome.output


def test_what_names_nothing_is_refused_before_the_data_is_opened(tmp_path):
    """Neither the parameters' names nor the tokenizer's tokens are known to the command line."""
    tokens = [
        word
        for name, value in byte_tokenizer(tmp_path).items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    data = [*(word for word in TINY if word != "--mock-data"), "--data-path", "missing"]
    for words, named in (
        (["--freeze", "layers", "embedding", "*norm"], "--freeze layers"),
        (["--num-experts", "2", "--lora-rank", "2", "--lora-target", "experts"], "--lora-target"),
        ([*tokens, "--vocab-size", "257", "--fim-rate", "0.5"], "--fim-suffix-token"),
    ):
        (outcome,) = launch(1, [*data, *words])
        refused(outcome)
        assert named in outcome.output, outcome


def lose_output(kind, *numbers):
    """Lose output as with `> /dev/full` on a full disk, `>&-`, or a pipe whose reader left."""
    for number in numbers:
        if kind == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), number)
        elif kind == "pipe":
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, number)
        else:
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)  # as Python starts then


@pytest.mark.parametrize(
    ("kind", "numbers"), [("full", (1,)), ("closed", (0, 1)), ("pipe", (1, 2))]
)
def test_output_that_cannot_be_written_costs_the_run_nothing(tmp_path, kind, numbers):
    size = 2 if kind == "full" else 1
    arguments = [*TINY, "--train-iters", "2", "--save", str(tmp_path)]
    outcomes = launch(
        size, arguments, arm=dict.fromkeys(range(size), (lose_output, kind, *numbers))
    )
    assert [outcome and outcome.code for outcome in outcomes] == [0] * size, outcomes
    notes = [
        outcome.output.count("standard output cannot be written") for outcome in outcomes if outcome
    ]
    assert notes == [0 if 2 in numbers else 1, 0][:size], outcomes  # only rank 0 prints
    # No file of the run contains the lost output.
    events = [record["event"] for record in read_records(tmp_path / "metrics.jsonl")]
    assert events == ["start", "iteration", "iteration", "timeline", "checkpoint", "data", "end"]


@pytest.mark.parametrize(
    ("arguments", "redirected", "code"),
    [
        ("--seed -1", "2>&-", 2),
        ("--help", ">/dev/full", 1),
        ("--help", ">&-", 1),
        ("--help", "2>&-", 0),
    ],
)
def test_the_exit_code_is_right_without_output(arguments, redirected, code):
    """A lost output of --help is no success, because the output is its result."""
    words = f"{sys.executable} pretrain_gpt.py {arguments} {redirected}"
    ended = subprocess.run(["sh", "-c", words], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == code, ended
    output = ended.stdout + ended.stderr
    assert "Traceback" not in output and output.count("note: standard") == (code > 0)


def test_a_fatal_signal_says_where_it_struck():
    """A fatal signal reports where it struck.

    A mapped file that is truncated while it is read ends in a bus error, for which there is no
    exception.
    """
    code = (
        "import os, signal; from megatron.training.run.process import run_guarded; "
        "run_guarded(lambda: os.kill(os.getpid(), signal.SIGBUS), 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode < 0 and "Bus error" in ended.stderr and "run_guarded" in ended.stderr
