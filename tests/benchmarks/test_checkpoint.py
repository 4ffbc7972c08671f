"""benchmarks/checkpoint.py runs to its end on a tiny model and prints all that it promises."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.campaign("benchmarks")
ROOT = Path(__file__).resolve().parents[2]


def test_all_rows(tmp_path: Path) -> None:
    small = (
        "--layers 1 --hidden 64 --vocabulary 128 --sequence 16 --micro-batch 1 --repeat 1".split()
    )
    command = [sys.executable, "benchmarks/checkpoint.py", *small, "--folder", str(tmp_path)]
    out = tmp_path / "rows.json"
    env = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, "--json", str(out)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["name"]: row for row in json.loads(out.read_text())}
    assert {
        "torch.save",
        "torch.save, fsync",
        "save",
        "torch.load",
        "load",
        "background: stall",
    } <= rows.keys()
    assert all(math.isfinite(row["median"]) for row in rows.values())
    assert [p.name for p in tmp_path.iterdir()] == ["rows.json"], "it leaves nothing behind"
