"""tools/preflight.py check, as it is called: exit codes, output for people and programs, our own scripts."""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launching import ROOT
from tests.preflight.check.test_report import SOUND
from tools.preflight import main

EXAMPLES = ROOT / "examples" / "frontier"


Preflight = Callable[..., tuple[int, str, str]]


@pytest.fixture
def preflight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Preflight:
    """The tool, called in a folder and environment of its own: (exit code, output, errors)."""
    for name in [n for n in os.environ if n.startswith(("SBATCH_", "SITE_", "MEGATRON_", "NCCL_", "FI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def call(*words: str, **environ: str) -> tuple[int, str, str]:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sbatch"
    path.write_text(SOUND.replace("RUNS", str(tmp_path)))
    return path


def test_nothing_stands_against_a_sound_job(script: Path, preflight: Preflight) -> None:
    code, output, errors = preflight("check", "--strict", "--cluster", "frontier", str(script))
    assert (code, errors) == (0, "")
    for text in ("TP 2 x PP 4 x DP 2", "node 0", "node 1", "hsn3", "GiB of 64", "0 warnings"):
        assert text in output, text
    # Warnings are errors with --strict.
    script.write_text(script.read_text().replace("#SBATCH -A abc123\n", ""))
    code, output, _ = preflight("check", "--cluster", "frontier", str(script))
    assert code == 0 and "1 warning" in output
    assert preflight("check", "--strict", "--cluster", "frontier", str(script))[0] == 2


def test_json(script: Path, preflight: Preflight) -> None:
    code, output, _ = preflight(
        "check", "--json", "-N", "4", "--cluster=frontier", "-t2:30:00", str(script), "--bf17"
    )
    assert code == 2
    report: dict[str, Any] = json.loads(output)
    assert (report["job"]["nodes"], report["cluster"], report["errors"]) == (4, "frontier", 2)
    errors = {f["about"]: f for f in report["findings"] if f["level"] == "error"}
    assert errors["wall time"]["place"] == "command line" and "--bf17" in errors["configuration"]["text"]
    assert errors["configuration"]["place"] == "command line"


def test_a_command(preflight: Preflight) -> None:
    command = f"srun -n 2 {sys.executable} {ROOT}/pretrain_gpt.py --preset tiny --mock-data --train-iters 3"
    code, output, errors = preflight("check", "--", *command.split(), "--distributed-backend", "gloo")
    assert code == 0 and "DP 2" in output, output + errors


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "check"), (["look"], "look"), (["check", "nothing.sbatch"], "nothing.sbatch"),
        (["check", "--cluster", "moon", "x.sh"], "moon"), (["check", "--help"], "--strict"),
    ],
)  # fmt: skip
def test_mistakes_of_the_user(words: list[str], text: str, tmp_path: Path, preflight: Preflight) -> None:
    (tmp_path / "x.sh").write_text("#!/bin/bash\n")
    code, output, errors = preflight(*words)
    assert text in output + errors and "Traceback" not in errors
    assert code == (0 if not words or "--help" in words else 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "recipe", "words"),
    [
        ("22b", "frontier", ["-N", "9408", "-t", "12:00:00"]), ("175b", "frontier", []), ("1t", "paper", []),
    ],
)  # fmt: skip
def test_our_own_scripts(model: str, recipe: str, words: list[str], tmp_path: Path, preflight: Preflight) -> None:
    """They can be followed to the training, and what stands against them here is the room for checkpoints alone."""
    environ = {
        "SBATCH_ACCOUNT": "abc123", "MEGATRON_ROOT": str(ROOT), "SITE_VENV": sys.prefix,
        "SITE_RUNS": str(tmp_path / "runs"), "SITE_CLUSTER": "frontier", "RECIPE": recipe, "SBATCH_PARTITION": "batch",
    }  # fmt: skip
    batch = ["--global-batch-size", "75264"] if "9408" in words else []
    arguments = ["--train-iters", "1000", "--mock-data", *batch]
    before = sorted(EXAMPLES.iterdir())
    _, output, errors = preflight(
        "check", "--json", *words, str(EXAMPLES / f"train_{model}.sbatch"), *arguments, **environ
    )
    report = json.loads(output or "{}")
    assert report, errors
    here = ("saving", "start-up", "signal")  # room on this disk, and an environment that is not on NVMe
    assert [f for f in report["findings"] if f["level"] != "note" and f["about"] not in here] == []
    assert len(report["trainings"]) == 1 and report["trainings"][0]["layout"]["ranks"]
    assert sorted(EXAMPLES.iterdir()) == before and list(tmp_path.iterdir()) == []
    assert report["trainings"][0]["tasks"] == 8 * report["job"]["nodes"]
    if model == "1t":
        assert report["trainings"][0]["tasks"] == 3072
