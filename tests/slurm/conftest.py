"""Fixtures: a throw-away Slurm for each module, with its NODES, and its lost nodes."""

import pytest

from benchmarks.faults.testbed import Testbed, missing


@pytest.fixture(scope="module")
def testbed(request):
    if reason := missing():
        pytest.skip(f"the Slurm testbed lacks {reason}")
    nodes = request.module.NODES
    paper_nodes = getattr(request.module, "PAPER_NODES", 0)
    with Testbed(nodes=nodes, paper_nodes=paper_nodes) as started:
        yield started


@pytest.fixture
def mended(testbed):
    """Return a list for names of nodes that a test has lost. They are restored when it ends."""
    lost = []
    yield lost
    for name in lost:
        testbed.control("add-node", name)
