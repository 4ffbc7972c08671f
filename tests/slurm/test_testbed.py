"""The testbed is what the other tests take it for: nodes with eight devices, of which a task sees one or all."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults.testbed import Testbed, output_of
from tests.slurm.site import MARKS

pytestmark = MARKS

SHOW = 'bash -c \'echo "$SLURM_PROCID $SLURMD_NODENAME $SLURM_LOCALID ${ROCR_VISIBLE_DEVICES-none}"\''
NEAREST = "45236701"
"""Frontier's user guide: the device nearest to cores 0-7, 8-15, ..., which are those of local ranks 0, 1, ..."""
TASKS = "srun --ntasks-per-node=8 -c 7"


@pytest.fixture(scope="module")
def testbed() -> Iterator[Testbed]:
    with Testbed(nodes=2) as started:
        yield started


def tasks(text: str) -> list[tuple[int, str, int, str]]:
    """(rank, node, local rank, devices) of each task, in the order of ranks."""
    found = re.findall(r"(?m)^(\d+) (node\d\d) (\d) (\S+)$", text)
    return sorted((int(rank), node, int(local), devices) for rank, node, local, devices in found)


@pytest.mark.timeout(1800)
def test_devices_of_tasks(testbed: Testbed, tmp_path: Path) -> None:
    script = (
        f"{TASKS} --gpus-per-task=1 --gpu-bind=closest {SHOW}; echo next; {TASKS} --gpus-per-node=8 {SHOW}; echo next\n"
        f"bash {Path(__file__).parents[1] / 'helpers' / 'slurm_testbed.sh'} hide-device node02 3\n"
        f"{TASKS} --gpus-per-task=1 --gpu-bind=closest {SHOW}"
    )
    try:
        said = output_of(testbed, tmp_path, script, ["-N", "2", "-C", "nvme", "-q", "debug", "-A", "abc123"])
    finally:
        testbed.control("mend")
    one, every, hidden = (tasks(part) for part in said.split("next"))
    places = [(8 * node + local, f"node0{node + 1}", local) for node in range(2) for local in range(8)]
    assert one == [(*place, NEAREST[place[2]]) for place in places]
    assert every == [(*place, "0,1,2,3,4,5,6,7") for place in places]
    assert hidden == [row if row[1:3] != ("node02", 3) else (*row[:3], "none") for row in one]


@pytest.mark.timeout(3600)
def test_a_slow_task_has_its_share_of_the_time(testbed: Testbed, tmp_path: Path) -> None:
    """A child of the task, too: a launch script may wrap the program into a shell. How often a loop that sleeps between
    its turns comes round depends less on how busy this machine is than the work that it gets done. What slows the task
    down is a process too, which may be paused for longer than all turns take: it has three tries."""
    loop = (  # both begin together, and the other one's turns end it
        "n=0; : >on.$SLURM_LOCALID; until [[ -e on.0 && -e on.1 ]]; do sleep 0.02; done; until [[ -e done ]]; do "
        "sleep 0.02; ((++n != 150 || SLURM_LOCALID)) || : >done; done; echo $SLURM_LOCALID $n"
    )
    shares = list[float]()
    testbed.control("slow-task", "node01", "1", "5")
    try:
        while len(shares) < 3 and min(shares, default=1.0) >= 0.7:
            folder = tmp_path / f"try_{len(shares)}"
            script = f"srun -n 2 bash -c 'bash -c \"$0\"; exit 0' '{loop}'"
            said = output_of(testbed, folder, script, ["-N", "1", "-D", str(folder)])
            turns = {int(task): int(count) for task, count in (line.split() for line in said.splitlines())}
            shares.append(turns[1] / turns[0])
    finally:
        testbed.control("mend")
    assert min(shares) < 0.7, shares


@pytest.mark.parametrize(
    "options, why",
    [
        (["-N", "3"], "Node count"),
        (["-N", "2", "-p", "batch", "-t", "12:01:00"], "time limit"),
        (["-N", "2", "-p", "batch-2h", "-t", "2:01:00"], "time limit"),
        (["-N", "2", "-p", "batch-6h,batch-12h", "-t", "1:00:00"], "Node count"),
        (["-N", "2", "-C", "fast"], "feature"),
        (["-N", "2", "--ntasks-per-node=9", "-c", "14"], "node"),
        (["-N", "2", "--gpus-per-node=9"], "node"),
    ],
)
def test_what_frontier_would_refuse_is_refused(
    testbed: Testbed, tmp_path: Path, options: list[str], why: str
) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\ntrue\n")
    with pytest.raises(RuntimeError, match=why):
        testbed.sbatch(*options, script)


@pytest.mark.timeout(1800)
def test_each_node_has_its_own_folder_where_the_nvme_is(testbed: Testbed, tmp_path: Path) -> None:
    one = "bash -c 'echo $SLURMD_NODENAME >/mnt/bb/$USER/name; sleep 0.3; cat /mnt/bb/$USER/name'"
    (tmp_path / "file").write_text("sent\n")
    script = (
        f"export USER=$(id -un)\nsrun -n 2 --ntasks-per-node=1 {one}\n"
        f"sbcast -p {tmp_path / 'file'} /mnt/bb/$USER/file && srun -n 2 --ntasks-per-node=1 cat /mnt/bb/$USER/file\n"
    )
    said = output_of(testbed, tmp_path, script, ["-N", "2"])
    assert sorted(said.split()) == ["node01", "node02", "sent", "sent"]
    assert not Path("/mnt/bb").exists()
