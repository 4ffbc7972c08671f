"""tools/preflight.py check, as it is called: exit codes, output for people and programs, our own scripts."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fresh_python import assert_tool_loads_none
from tests.helpers.launching import ROOT
from tests.preflight.check.test_report import SOUND

EXAMPLES = ROOT / "examples" / "frontier"


def preflight(*words: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    known = {n: v for n, v in os.environ.items() if not n.startswith(("SBATCH_", "SITE_", "MEGATRON_", "NCCL_", "FI_"))}
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "preflight.py"), *words], capture_output=True, text=True, cwd=folder,
        env={**known, **environ}, timeout=120,
    )  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sbatch"
    path.write_text(SOUND.replace("RUNS", str(tmp_path)))
    return path


def test_nothing_stands_against_a_sound_job(script: Path) -> None:
    done = preflight("check", "--strict", "--cluster", "frontier", str(script), folder=script.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "nothing stands against submitting it: 0 warnings"
    for text in ("TP 2 x PP 4 x DP 2", "node 0", "node 1", "hsn3", "GiB of 64", "from initial weights"):
        assert text in done.stdout, text


def test_json(script: Path) -> None:
    words = ("check", "--json", "-N", "4", "--cluster=frontier", "-t2:30:00", str(script), "--bf17")
    done = preflight(*words, folder=script.parent)
    assert done.returncode == 2
    report: dict[str, Any] = json.loads(done.stdout)
    assert (report["job"]["nodes"], report["cluster"], report["errors"]) == (4, "frontier", 2)
    errors = {f["about"]: f for f in report["findings"] if f["level"] == "error"}
    assert errors["wall time"]["place"] == "command line" and "--bf17" in errors["configuration"]["text"]
    assert errors["configuration"]["place"] == "command line"


def test_warnings_are_errors_with_strict(script: Path) -> None:
    script.write_text(script.read_text().replace("#SBATCH -A abc123\n", ""))
    words = ("--cluster", "frontier", str(script))
    done = preflight("check", *words, folder=script.parent)
    assert done.returncode == 0 and "submitting it: 1 warning" in done.stdout
    assert preflight("check", "--strict", *words, folder=script.parent).returncode == 2


def test_a_command(tmp_path: Path) -> None:
    command = f"srun -n 2 {sys.executable} {ROOT}/pretrain_gpt.py --preset tiny --mock-data --train-iters 3"
    done = preflight("check", "--", *command.split(), "--distributed-backend", "gloo", folder=tmp_path)
    assert done.returncode == 0 and "DP 2" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "preflight.py check"), (["look"], "neither check nor measure"), (["check"], "no script"),
        (["check", "nothing.sbatch"], "nothing.sbatch cannot be read"), (["check", "--"], "no command"),
        (["check", "--cluster", "moon", "x.sh"], "neither a known machine"), (["check", "--help"], "--strict"),
    ],
)  # fmt: skip
def test_mistakes_of_the_user(words: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text("#!/bin/bash\n")
    done = preflight(*words, folder=tmp_path)
    assert text in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert done.returncode == (0 if not words or "--help" in words else 2)


def test_it_needs_no_torch(script: Path) -> None:
    assert_tool_loads_none("preflight", ["check", "--cluster", "frontier", str(script)])


@pytest.mark.parametrize(
    ("model", "recipe", "words"),
    [
        ("1.4b", "frontier", []), ("22b", "frontier", ["-N", "9408", "-t", "12:00:00"]), ("175b", "frontier", []),
        ("1t", "frontier", []), ("1t", "paper", []),
    ],
)  # fmt: skip
def test_our_own_scripts(model: str, recipe: str, words: list[str], tmp_path: Path) -> None:
    """They can be followed to the training, and what stands against them here is the room for checkpoints alone."""
    environ = {
        "SBATCH_ACCOUNT": "abc123", "MEGATRON_ROOT": str(ROOT), "SITE_VENV": sys.prefix,
        "SITE_RUNS": str(tmp_path / "runs"), "SITE_CLUSTER": "frontier", "RECIPE": recipe, "SBATCH_PARTITION": "batch",
    }  # fmt: skip
    batch = ["--global-batch-size", "75264"] if "9408" in words else []
    arguments = ["--train-iters", "1000", "--mock-data", *batch]
    before = sorted(EXAMPLES.iterdir())
    done = preflight(
        "check", "--json", *words, str(EXAMPLES / f"train_{model}.sbatch"), *arguments, folder=tmp_path, **environ
    )
    report = json.loads(done.stdout or "{}")
    assert report, done.stderr
    here = ("saving", "start-up", "signal")  # room on this disk, and an environment that is not on NVMe
    assert [f for f in report["findings"] if f["level"] != "note" and f["about"] not in here] == []
    assert len(report["trainings"]) == 1 and report["trainings"][0]["layout"]["ranks"]
    assert sorted(EXAMPLES.iterdir()) == before and list(tmp_path.iterdir()) == []
    assert report["trainings"][0]["tasks"] == 8 * report["job"]["nodes"]
    if model == "1t":
        assert report["trainings"][0]["tasks"] == 3072
