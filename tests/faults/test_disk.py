"""A disk that is full and one that is read-only: training goes on, says so, and can be resumed when there is room."""
from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults import disk, history
from benchmarks.faults.job import run_job

REASON = disk.missing()


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_disk_that_fails_costs_no_training(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    job = run_job(1, disk.arguments(whole, whole), tmp_path / "logs")
    assert job.processes[0].returncode == 0, job.outputs()
    size = sum(file.stat().st_blocks * 512 for file in history.newest(whole).iterdir())
    reference = dict(history.steps(whole))
    assert disk.full(tmp_path / "full", 1, size, reference, ("--async-save",), "asynchronous").faults == ()
    assert disk.read_only(tmp_path / "read_only", 1, size, reference, (), "synchronous").faults == ()
