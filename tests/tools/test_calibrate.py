"""tools/calibrate.py: a small real calibration, and what it refuses."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.calibration.processes import environment
from megatron.config.command_line import parse_plan
from megatron.planning.cluster_file import read_cluster
from megatron.planning.timing import estimate
from tests.helpers.launching import ROOT

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 500 --global-batch-size 2 "
    "--attention-dropout 0 --hidden-dropout 0"
).split()


def calibrate(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/calibrate.py", *words], cwd=ROOT, text=True, capture_output=True, timeout=300,
        env=environment(os.environ, 0, 1, "0"),
    )  # fmt: skip


@pytest.mark.slow
def test_a_calibration_of_seconds_plans(tmp_path: Path) -> None:
    """Two processes measure together; the file loads, all figures but one are measured, and a step can be estimated."""
    path = tmp_path / "here.toml"
    done = calibrate("-o", str(path), "--processes", "2", "--minutes", "0.02", *MODEL)
    assert done.returncode == 0, done.stderr
    assert "1 node(s) of 2 x" in done.stdout
    cluster = read_cluster(path)
    assert cluster.devices_per_node == 2 and cluster.device_type == "cpu" and cluster.name == "here"
    figures = cluster.compute.figures
    assert {f.name for f in figures.values() if f.basis != "measured"} == {"kernel_s"}
    wanted = {"products.float32", "collectives.all_reduce", "collectives.reduce", "messages", "step_overhead_s"}
    assert wanted <= {*figures}
    assert all(point[-1] > 0 for name in figures if "overhead" not in name for point in figures[name].points)
    found = estimate(parse_plan([*MODEL, "--world-size", "2", "--tensor-model-parallel-size", "2"]), cluster)
    assert 0 < found.seconds < 60 and found.confidence.worst == "assumed"


@pytest.mark.parametrize(("words", "says"), [
    (("--minutes", "0"), "--minutes 0: give more than 0"),
    (("--processes", "0", *MODEL), "--processes 0: give 1 to 64"),
    (("--num-layers", "2"), "hidden-size"),
    (("--refine", "x.jsonl"), "--refine needs --cluster"),
    (("--refine", "x.jsonl", "--cluster", "frontier"), "x.jsonl: No such file"),
    (("--refine", "x.jsonl", "--cluster", "frontier", "--bf16"), "--bf16 means nothing beside --refine"),
])  # fmt: skip
def test_what_is_refused(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = calibrate("-o", str(tmp_path / "x.toml"), *words)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "x.toml").exists()
