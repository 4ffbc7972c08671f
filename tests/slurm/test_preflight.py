"""Measuring half of the preflight, as job.sh runs it.

It finds the faults of a node, and the job trains on the others of its allocation.
"""

from benchmarks.faults import history
from benchmarks.faults.frontier import submit
from tests.slurm.site import CAMPAIGN

pytestmark = CAMPAIGN

NODES = 3
TINY = (
    "--mock-data --tokenizer-type NullTokenizer --eval-iters 0 --num-workers 0 --micro-batch-size "
    "1 --train-iters 3"
).split()
SETTINGS = {
    "PREFLIGHT": "1",
    "PREFLIGHT_FLAGS": "--seconds 30",
    "PRESET": "tiny",
    "GPU_VISIBILITY": "one",
    "TASKS_PER_NODE": "4",
    "SRUN_WAIT": "300",
}


def test_a_node_with_faults_is_left_out(testbed, tmp_path):
    """A node with faults is left out: node02 has a task that does not start."""
    testbed.control("slow-task", "node02", "1", "1")
    try:
        job = submit(testbed, tmp_path, TINY, options=["-N", "3"], NODES_NEEDED="2", **SETTINGS)
        job.wait()
    finally:
        testbed.control("mend")
    assert testbed.state(job.number) == "COMPLETED", job.text()
    folder = job.logs() / "preflight"
    hosts = [(folder / name).read_text().split() for name in ("good_hosts", "bad_hosts")]
    assert hosts == [["node01", "node03"], ["node02"]]
    assert "FAULT node02 rank 5:" in job.text()
    assert "--exclude=node02" in job.text()
    # Training has all tasks of the two good nodes.
    assert (
        "layout: 8 ranks" in job.text() and "node02" not in job.text().split("layout: 8 ranks")[1]
    )
    assert history.newest(job.checkpoints).name == "iter_0000003"
