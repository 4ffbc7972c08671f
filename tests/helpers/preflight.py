"""What tools/preflight.py says of a job script that a tool wrote for Frontier."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.launching import ROOT


def accepted(script: Path, folder: Path) -> list[dict[str, Any]]:
    """The trainings of a script, of which nothing but what is missing here, such as data, is said."""
    known = {n: v for n, v in os.environ.items() if not n.startswith(("SBATCH_", "SITE_", "MEGATRON_", "NCCL_", "FI_"))}
    environ = {
        **known, "SBATCH_ACCOUNT": "abc123", "MEGATRON_ROOT": str(ROOT), "SITE_VENV": sys.prefix,
        "SITE_RUNS": str(folder / "runs"), "SITE_CLUSTER": "frontier", "SBATCH_PARTITION": "batch",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "preflight.py"), "check", "--json", str(script), "--mock-data"],
        capture_output=True, text=True, cwd=folder, env=environ, timeout=300,
    )  # fmt: skip
    report = json.loads(done.stdout or "{}")
    assert report, done.stderr
    here = ("saving", "start-up", "signal")
    assert [f for f in report["findings"] if f["level"] != "note" and f["about"] not in here] == []
    trainings: list[dict[str, Any]] = report["trainings"]
    return trainings
