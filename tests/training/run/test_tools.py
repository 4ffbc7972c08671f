"""Picture of a run, and the whole example from corpus to text on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.metrics_file import read_records
from tests.helpers.launching import ROOT, Script, launch
from tools import plot_metrics, train_example


def write_metrics(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def iteration(at: int, loss: float | None) -> dict[str, Any]:
    return {"event": "iteration", "iteration": at, "lm_loss": loss, "learning_rate": 0.1}


def test_a_resumed_run_replaces_what_it_does_again() -> None:
    start = {"event": "start", "iteration": 0}
    first = [start, iteration(10, 3.0), iteration(20, 2.0), iteration(30, None), iteration(40, 9.0)]
    again = [{"event": "start", "iteration": 20}, iteration(30, 1.5)]
    assert plot_metrics.series(first, "iteration", "lm_loss") == ([10, 20, 40], [3.0, 2.0, 9.0])
    assert plot_metrics.series(first + again, "iteration", "lm_loss") == (
        [10, 20, 30],
        [3.0, 2.0, 1.5],
    )


def test_a_picture_of_nothing_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = write_metrics(tmp_path / "m.jsonl", [{"event": "start", "iteration": 0}])
    for path in (metrics, tmp_path / "absent"):
        assert plot_metrics.main([str(path), "--output", str(tmp_path / "loss.png")]) == 2
        assert str(path) in capsys.readouterr().err and not (tmp_path / "loss.png").exists()


def what_was_made(folder: Path) -> int:
    """Check that the example's outputs are complete, and return when its corpus was made."""
    records = read_records(folder / "run" / "metrics.jsonl")
    valid = [r["lm_loss"] for r in records if r["event"] == "validation"]
    assert valid[-1] < valid[0] - 0.5  # from about log(512) towards the entropy of single tokens
    assert [r for r in records if r["event"] == "generate" and r["tokens"] > 0]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    return (folder / "corpus.jsonl").stat().st_mtime_ns


@pytest.mark.slow
def test_the_example_trains_and_keeps_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example trains and keeps its outputs. Its parts run in forked processes."""

    def execute(command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        with Script(command[1], command[2:], tmp_path / "log") as script:
            outcome = script.wait()
        assert outcome.code == 0, outcome.output

    def train(arguments: Sequence[str], machine: train_example.Machine) -> None:
        for outcome in launch(machine.processes, arguments):
            assert outcome is not None and outcome.code == 0, outcome

    monkeypatch.setattr(train_example, "execute", execute)
    monkeypatch.setattr(train_example, "train", train)
    monkeypatch.setattr(
        train_example, "choose_machine", lambda: train_example.Machine("cpu", 2, 1, False, "")
    )
    assert train_example.main(["--quick", "--folder", str(tmp_path)]) == 0
    made = what_was_made(tmp_path)
    again = train_example.main(["--quick", "--folder", str(tmp_path), "--iterations", "2"])
    assert again in (0, 1)  # two iterations may not bring the loss down
    assert (tmp_path / "corpus.jsonl").stat().st_mtime_ns == made


def test_arguments_are_checked_before_torch_is_imported() -> None:
    code = (
        "import sys, megatron.program; print(megatron.program.run(['--nmu-layers', '3']), "
        "'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stdout.split() == ["2", "False"] and "--num-layers" in done.stderr
