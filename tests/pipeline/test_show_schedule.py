"""The command line that shows schedules."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def show(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "show_schedule.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_text_and_plot(tmp_path: Path) -> None:
    picture = tmp_path / "schedule.png"
    done = show("--schedule", "interleaved", "--pipeline-size", "2", "--micro-batches", "2", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    # Two ranks, two chunks: 3 * 2 * 2 of computing per rank and a bubble of 3 * (2 - 1); 3 boundaries there and back.
    assert "makespan 15, bubble 20.0%, 12 messages" in done.stdout
    assert done.stdout.startswith("rank  0 |F0.0 F1.0 F0.1 ")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_error() -> None:
    done = show("--schedule", "1f1b", "--chunks", "3")
    assert done.returncode == 2
    assert done.stderr == "error: pipeline schedule '1f1b' has 1 chunk per rank, got 3: use 'interleaved'\n"
