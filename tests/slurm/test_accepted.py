"""Slurm takes each script of examples/frontier as it is: on a controller that believes in all 9,472 nodes."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults.testbed import Testbed
from tests.slurm.site import FRONTIER, MARKS

pytestmark = MARKS

NODES = 9472
RANGES = "batch-2h,batch-6h,batch-12h"
"""The three ranges of nodes of Frontier's batch partition, each with its longest time. A job may name several
partitions; with EnforcePartLimits=ANY it is refused where none of them would take it."""
SCRIPTS = sorted(path for path in FRONTIER.iterdir() if path.is_file() and "\n#SBATCH -N " in path.read_text())


@pytest.fixture(scope="module")
def frontier() -> Iterator[Testbed]:
    with Testbed(nodes=0, paper_nodes=NODES) as started:
        yield started


def submit(testbed: Testbed, script: Path, *options: str) -> str:
    """What `sbatch --test-only` says, after site.env as a user would source it."""
    command = f'source {FRONTIER}/site.env && exec sbatch --test-only "$@"'
    site = {"SBATCH_ACCOUNT": "abc123", "SBATCH_PARTITION": RANGES}
    return testbed.ask("bash", "-c", command, "bash", *options, str(script), env=site)


def nodes(testbed: Testbed, said: str) -> int:
    """On how many nodes the job would start."""
    found = re.search(r"to start at .* on nodes? (\S+)", said)
    assert found, said
    return len(testbed.ask("scontrol", "show", "hostnames", found[1]).split())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_sbatch_takes(frontier: Testbed, script: Path) -> None:
    wanted = re.search(r"(?m)^#SBATCH .*?(?:-N\s*|--nodes[= ])(\d+)", script.read_text())
    assert wanted, "no number of nodes in the script's head"
    assert nodes(frontier, submit(frontier, script)) == int(wanted[1])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_same_is_refused_where_it_asks_for_too_much(frontier: Testbed, script: Path) -> None:
    with pytest.raises(RuntimeError, match="time limit|Node count"):
        submit(frontier, script, "--time=12:01:00")
    with pytest.raises(RuntimeError, match="time limit|Node count"):
        submit(frontier, script, "--nodes=91", "--time=02:01:00")
    with pytest.raises(RuntimeError, match="Node count"):
        submit(frontier, script, f"--nodes={NODES + 1}")


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 4
