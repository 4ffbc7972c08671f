"""Fixture of a throw-away Slurm for each module, with its NODES."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.faults.testbed import Testbed, missing


@pytest.fixture(scope="module")
def testbed(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    if reason := missing():
        pytest.skip(f"the Slurm testbed lacks {reason}")
    nodes, paper_nodes = request.module.NODES, getattr(request.module, "PAPER_NODES", 0)
    with Testbed(nodes=nodes, paper_nodes=paper_nodes) as started:
        yield started
