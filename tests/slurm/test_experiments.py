"""Scaling experiments on two virtual nodes: side by side, interrupted, and resumed."""

import json
import sys

from benchmarks.faults.frontier import submit
from tests.slurm.site import CAMPAIGN

pytestmark = CAMPAIGN

NODES = 2
SMALL = {
    "KINDS": "tp",
    "MODEL": "tiny",
    "VALUES": "1 2",
    "TASKS_PER_NODE": "2",
    "CPUS_PER_TASK": "1",
    "WARM_UP": "1",
    "ITERATIONS": "2",
    "REQUEUE": "0",
}


def experiment(testbed, folder, name, **settings):
    return submit(
        testbed,
        folder,
        ["--", "--num-layers", "2"],
        options=["-N", "2", "--time=10"],
        name=name,
        script="sweep_tp_pp_mbs.sh",
        **{**SMALL, **settings},
    )


def test_points_run_side_by_side_on_nodes_of_their_own(testbed, tmp_path):
    job = experiment(testbed, tmp_path, "both")
    assert job.wait() == "COMPLETED", job.text()
    results = [
        json.loads((tmp_path / f"tp-tiny/tp-0000{n}/result.json").read_text()) for n in (1, 2)
    ]
    assert [r["status"] for r in results] == ["done", "done"]
    assert sorted(host for r in results for host in r["hosts"]) == ["node01", "node02"]
    assert max(r["started"] for r in results) < min(r["ended"] for r in results)
    report = "tools/report.py --format json --output -".split()
    printed = testbed.ask(sys.executable, *report, str(tmp_path / "tp-tiny"))
    blocks = json.loads(printed)["sections"][1]["blocks"]
    comparison = next(block for block in blocks if "rows" in block)["rows"]
    assert [(row["run"], row["devices"], row["state"]) for row in comparison] == [
        ("tp-00001", 1, "valid"),
        ("tp-00002", 2, "valid"),
    ]


def test_a_signal_ends_it_and_the_next_job_goes_on(testbed, tmp_path):
    # The second point has to last until Slurm itself gets the request: srun loses a signal that
    # arrives while its tasks start.
    settings = {"SIDE_BY_SIDE": "0", "ITERATIONS": "300"}
    job = experiment(testbed, tmp_path, "first", **settings)
    job.wait_for(r"tp-0000\d: done.*\n(.*\n)*?.*tp-0000\d: \d process")
    testbed.ask("scancel", "--batch", "--signal=USR1", job.number)
    assert job.wait() == "FAILED" and "interrupted by SIGUSR1" in job.text(), job.text()
    assert "1 point(s) done, 0 failed, 1 not run" in job.text()
    resumed = experiment(testbed, tmp_path, "second", **settings)
    assert resumed.wait() == "COMPLETED", resumed.text()
    assert resumed.text().count("done already") == 1
    assert "2 point(s) done, 0 failed, 0 not run" in resumed.text()
