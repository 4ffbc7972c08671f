"""Findings of tools/preflight.py on a job script, as on a login node of Frontier without Slurm."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from megatron.jobs.check_job import CheckedJob, check
from tests.helpers.launching import ROOT


def problems_of(job: CheckedJob) -> set[tuple[str, str]]:
    """Return (level, subject) of all errors and warnings."""
    return {(level, about) for level, about, _ in job.findings if level != "note"}


def cost(job: CheckedJob) -> tuple[float, float]:
    """Return the days and the node-hours that a job costs."""
    match = re.match(r"([\d.,]+) days and ([\d,]+) node-hours", job.known["it costs"])
    assert match, job.known
    return float(match[1].replace(",", "")), float(match[2].replace(",", ""))


def checked(words: Sequence[str | Path], folder: Path, **environ: str) -> CheckedJob:
    """Check as `preflight.py check WORDS` does, in `folder` with the settings of a site."""
    known = {
        n: v
        for n, v in os.environ.items()
        if not n.startswith(("SBATCH_", "SITE_", "MEGATRON_", "NCCL_", "FI_"))
    }
    site = {
        "SBATCH_ACCOUNT": "abc123",
        "MEGATRON_ROOT": str(ROOT),
        "SITE_VENV": sys.prefix,
        "SITE_RUNS": str(folder / "runs"),
        "SITE_CLUSTER": "frontier",
        "SBATCH_PARTITION": "batch",
    }
    before = os.getcwd()
    os.chdir(folder)
    try:
        with mock.patch.dict(os.environ, {**known, **site, **environ}, clear=True):
            return check([str(word) for word in words])
    finally:
        os.chdir(before)
