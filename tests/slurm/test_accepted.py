"""Slurm accepts each script of examples/frontier unchanged, with all 9,472 nodes configured."""

import re

import pytest

from benchmarks.faults.frontier import FRONTIER
from tests.slurm.site import CAMPAIGN

pytestmark = CAMPAIGN

NODES = 0
PAPER_NODES = 9472
RANGES = "batch-2h,batch-6h,batch-12h"
"""The three ranges of nodes of Frontier's batch partition, each with its longest time. A job may
name several partitions; with EnforcePartLimits=ANY it is refused where none of them would take
it."""


def submit(testbed, script, *options):
    """Return the answer of `sbatch --test-only`, after sourcing site.env as a user would."""
    command = f'source {FRONTIER}/site.env && exec sbatch --test-only "$@"'
    site = {"SBATCH_ACCOUNT": "abc123", "SBATCH_PARTITION": RANGES}
    return testbed.ask("bash", "-c", command, "bash", *options, str(script), env=site)


def nodes(testbed, output):
    """Count the nodes on which the job would start."""
    match = re.search(r"to start at .* on nodes? (\S+)", output)
    assert match, output
    return len(testbed.ask("scontrol", "show", "hostnames", match[1]).split())


def test_sbatch_takes_the_scripts_and_refuses_more_than_the_machine_has(testbed):
    scripts = sorted(
        path
        for path in FRONTIER.iterdir()
        if path.is_file() and "\n#SBATCH -N " in path.read_text()
    )
    assert FRONTIER / "train_1t.sbatch" in scripts
    for script in scripts:
        directive = re.search(r"(?m)^#SBATCH .*?(?:-N\s*|--nodes[= ])(\d+)", script.read_text())
        assert directive and nodes(testbed, submit(testbed, script)) == int(directive[1])
        for too_much in (
            ["--time=12:01:00"],
            ["--nodes=91", "--time=02:01:00"],
            [f"--nodes={PAPER_NODES + 1}"],
        ):
            with pytest.raises(RuntimeError, match="time limit|Node count"):
                submit(testbed, script, *too_much)
