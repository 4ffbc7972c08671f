"""What tools/preflight.py says of a job script, as on a login node of Frontier without Slurm."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.launching import ROOT


def checked(words: Sequence[str | Path], folder: Path, **environ: str) -> dict[str, Any]:
    """The report of `preflight.py check --json WORDS`, run in `folder` with the settings of a site."""
    known = {n: v for n, v in os.environ.items() if not n.startswith(("SBATCH_", "SITE_", "MEGATRON_", "NCCL_", "FI_"))}
    site = {
        "SBATCH_ACCOUNT": "abc123", "MEGATRON_ROOT": str(ROOT), "SITE_VENV": sys.prefix,
        "SITE_RUNS": str(folder / "runs"), "SITE_CLUSTER": "frontier", "SBATCH_PARTITION": "batch",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "preflight.py"), "check", "--json", *map(str, words)],
        capture_output=True, text=True, cwd=folder, env={**known, **site, **environ}, timeout=300,
    )  # fmt: skip
    report: dict[str, Any] = json.loads(done.stdout or "{}")
    assert report, done.stderr
    assert done.returncode == 2 * any(found["level"] == "error" for found in report["findings"])
    return report


def accepted(script: Path, folder: Path, *words: str) -> dict[str, Any]:
    """The same of a script of which nothing but what is missing here, such as room for checkpoints, is said."""
    report = checked([script, "--mock-data", *words], folder)
    # Room on this disk, an environment that is not packed, and a length that is the caller's business.
    here = {("error", "saving"), ("warning", "script"), ("warning", "signal"), ("warning", "cost")}
    said = {(found["level"], found["about"]) for found in report["findings"] if found["level"] != "note"}
    assert said <= here, report
    return report
