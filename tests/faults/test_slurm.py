"""A real Slurm of two nodes: a node is lost, and a signal comes before the time limit; the job goes on from there."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults import slurm
from benchmarks.faults.testbed import Testbed, missing

REASON = missing()

pytestmark = [
    pytest.mark.slow, pytest.mark.slurm,
    pytest.mark.skipif(bool(REASON), reason=f"the Slurm testbed lacks {REASON}"),
]  # fmt: skip


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("fault", [slurm.lose_a_node, slurm.usr1_at_once])
def test_a_job_goes_on_after(fault: Callable[..., slurm.Scheduled], tmp_path: Path) -> None:
    with Testbed() as testbed:
        assert fault(testbed, tmp_path / "job").faults == ()
