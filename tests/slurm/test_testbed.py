"""Testbed for the other tests: nodes with eight devices, of which a task sees one or all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.faults.testbed import Testbed, output_of
from tests.slurm.site import CAMPAIGN

pytestmark = CAMPAIGN

NODES = 2
SHOW = (
    "bash -c 'echo \"$SLURM_PROCID $SLURMD_NODENAME $SLURM_LOCALID ${ROCR_VISIBLE_DEVICES-none}\"'"
)
NEAREST = "45236701"
"""Frontier's user guide: the device nearest to cores 0-7, 8-15, ..., which are those of local ranks
0, 1, ...
"""
TASKS = "srun --ntasks-per-node=8 -c 7"


def tasks(text: str) -> list[tuple[int, str, int, str]]:
    """Return (rank, node, local rank, devices) of each task, in the order of ranks."""
    found = re.findall(r"(?m)^(\d+) (node\d\d) (\d) (\S+)$", text)
    return sorted((int(rank), node, int(local), devices) for rank, node, local, devices in found)


def test_devices_of_tasks(testbed: Testbed, tmp_path: Path) -> None:
    script = (
        f"{TASKS} --gpus-per-task=1 --gpu-bind=closest {SHOW}; echo next; {TASKS} "
        f"--gpus-per-node=8 {SHOW}"
    )
    said = output_of(
        testbed, tmp_path, script, ["-N", "2", "-C", "nvme", "-q", "debug", "-A", "abc123"]
    )
    one, every = (tasks(part) for part in said.split("next"))
    places = [
        (8 * node + local, f"node0{node + 1}", local) for node in range(2) for local in range(8)
    ]
    assert one == [(*place, NEAREST[place[2]]) for place in places]
    assert every == [(*place, "0,1,2,3,4,5,6,7") for place in places]


def test_what_frontier_would_refuse_is_refused(testbed: Testbed, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\ntrue\n")
    for options in (
        "-N 3",
        "-N 2 -p batch -t 12:01:00",
        "-N 2 -p batch-2h -t 2:01:00",
        "-N 2 -p batch-6h,batch-12h -t 1:00:00",
        "-N 2 -C fast",
        "-N 2 --ntasks-per-node=9 -c 14",
        "-N 2 --gpus-per-node=9",
    ):
        with pytest.raises(RuntimeError, match="Node count|time limit|feature|node"):
            testbed.sbatch(*options.split(), script)
