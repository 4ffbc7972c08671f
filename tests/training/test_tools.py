"""The picture of a run, and the whole example from corpus to text on a tiny model."""
from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]


def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def plot_metrics() -> Any:
    specification = importlib.util.spec_from_file_location("plot_metrics", ROOT / "tools" / "plot_metrics.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def write_metrics(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def iteration(at: int, loss: float | None) -> dict[str, Any]:
    return {"event": "iteration", "iteration": at, "lm_loss": loss, "learning_rate": 0.1}


def test_a_resumed_run_replaces_what_it_does_again() -> None:
    series = plot_metrics().series
    start = {"event": "start", "iteration": 0}
    first = [start, iteration(10, 3.0), iteration(20, 2.0), iteration(30, None), iteration(40, 9.0)]
    again = [{"event": "start", "iteration": 20}, iteration(30, 1.5)]
    assert series(first, "iteration", "lm_loss") == ([10, 20, 40], [3.0, 2.0, 9.0])
    assert series(first + again, "iteration", "lm_loss") == ([10, 20, 30], [3.0, 2.0, 1.5])


def test_the_picture_is_written(tmp_path: Path) -> None:
    validation = {"event": "validation", "dataset": "valid", "iteration": 0, "lm_loss": 4.0}
    metrics = write_metrics(tmp_path / "m.jsonl", [validation, iteration(1, 3.0), iteration(2, 2.0)])
    assert plot_metrics().main([str(metrics), "--output", str(tmp_path / "out" / "loss.png")]) == 0
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = write_metrics(tmp_path / "m.jsonl", [{"event": "start", "iteration": 0}])
    for path, words in ((metrics, "no iteration"), (tmp_path / "absent", "no such file")):
        assert plot_metrics().main([str(path), "--output", str(tmp_path / "loss.png")]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_the_example_trains_and_keeps_what_it_made(tmp_path: Path) -> None:
    first = run_tool("train_example.py", "--quick", "--folder", tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    valid = [r["lm_loss"] for r in records if r["event"] == "validation"]
    assert valid[-1] < valid[0] - 0.5  # from about log(512) towards the entropy of single tokens
    assert [r for r in records if r["event"] == "generate" and r["tokens"] > 0]
    assert (tmp_path / "loss.png").exists() and "kept from last time" not in first.stdout
    made = (tmp_path / "corpus.jsonl").stat().st_mtime_ns
    again = run_tool("train_example.py", "--quick", "--folder", tmp_path, "--iterations", 2)
    assert again.returncode in (0, 1), again.stderr  # two iterations may not bring the loss down
    assert again.stdout.count("kept from last time") == 3
    assert (tmp_path / "corpus.jsonl").stat().st_mtime_ns == made


def test_arguments_are_checked_before_torch_is_imported() -> None:
    code = "import sys, pretrain_gpt; print(pretrain_gpt.main(['--nmu-layers', '3']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.split() == ["2", "False"] and "did you mean --num-layers" in done.stderr
