"""The whole example from corpus to text on a tiny model, and its command line."""

import signal
import sys

import pytest

from megatron.metrics_file import read_records
from tests.helpers.launching import Script, launch
from tools import train_example


@pytest.mark.slow
@pytest.mark.timeout(180)  # two runs
def test_the_example_trains_and_keeps_what_it_made(tmp_path, monkeypatch):
    """The example trains, goes on after an interruption, and keeps its outputs.

    Its parts run in forked processes.
    """
    interrupted = []

    def execute(command, env=None):
        with Script(command[1], command[2:], tmp_path / "log") as script:
            outcome = script.wait()
        assert outcome.code == 0, outcome.output

    def train(arguments, machine):
        stop = [] if interrupted else ["--exit-interval", "10"]
        for outcome in launch(machine.processes, [*arguments, *stop]):
            assert outcome.code == 0, outcome
        if stop:
            interrupted.append(1)
            raise train_example.Interrupted(signal.SIGINT)

    monkeypatch.setattr(train_example, "execute", execute)
    monkeypatch.setattr(train_example, "train", train)
    monkeypatch.setattr(
        train_example, "choose_machine", lambda: train_example.LocalMachine("cpu", 2, 1, False, "")
    )
    words = ["--quick", "--folder", str(tmp_path)]
    assert train_example.main(words) == 128 + signal.SIGINT
    made = (corpus := tmp_path / "corpus.jsonl").stat().st_mtime_ns
    assert train_example.main(words) == 0
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [r["iteration"] for r in records if r["event"] == "iteration"] == [10, 20]
    valid = [r["lm_loss"] for r in records if r["event"] == "validation"]
    assert valid[-1] < valid[0] - 0.5  # from about log(512) towards the entropy of single tokens
    assert [r for r in records if r["event"] == "generate" and r["tokens"] > 0]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert corpus.stat().st_mtime_ns == made


def test_a_signal_reaches_the_processes_of_the_example_and_they_end_first(tmp_path):
    code = (
        "import os, pathlib, signal, sys\n"
        "def save(*_):\n"
        "    pathlib.Path(sys.argv[1]).write_text('saved')\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGINT, save)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "signal.pause()\n"
    )
    with pytest.raises(train_example.Interrupted):
        train_example.execute([sys.executable, "-c", code, str(tmp_path / "file")])
    assert (tmp_path / "file").read_text() == "saved"
