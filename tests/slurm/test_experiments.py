"""Scaling experiments on two virtual nodes: side by side, interrupted, and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.faults.testbed import Testbed
from megatron.jobs.run_processes import SlurmStep, slurm_command, start_step
from tests.helpers.launching import ROOT
from tests.slurm.site import CAMPAIGN, FRONTIER, Submitted, settings_of_site, submit

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


def experiment(testbed: Testbed, folder: Path, name: str, **settings: str) -> Submitted:
    return submit(
        testbed,
        folder,
        ["--", "--num-layers", "2"],
        options=["-N", "2", "--time=10"],
        name=name,
        script="sweep_tp_pp_mbs.sh",
        **{**SMALL, **settings},
    )


def test_points_run_side_by_side_on_nodes_of_their_own(testbed: Testbed, tmp_path: Path) -> None:
    job = experiment(testbed, tmp_path, "both")
    assert job.wait() == "COMPLETED", job.text()
    results = [
        json.loads((tmp_path / f"tp-tiny/tp-0000{n}/result.json").read_text()) for n in (1, 2)
    ]
    assert [r["status"] for r in results] == ["done", "done"]
    assert sorted(host for r in results for host in r["hosts"]) == ["node01", "node02"]
    assert max(r["started"] for r in results) < min(r["ended"] for r in results)
    done = subprocess.run(
        [
            sys.executable,
            "tools/report.py",
            str(tmp_path / "tp-tiny"),
            "--format",
            "json",
            "--output",
            "-",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    blocks = json.loads(done.stdout)["sections"][1]["blocks"]
    comparison = next(block for block in blocks if "rows" in block)["rows"]
    assert [(row["run"], row["devices"], row["state"]) for row in comparison] == [
        ("tp-00001", 1, "valid"),
        ("tp-00002", 2, "valid"),
    ]


def test_a_signal_ends_it_and_the_next_job_goes_on(testbed: Testbed, tmp_path: Path) -> None:
    # The second point has to last until Slurm itself gets the request: srun loses a signal that
    # arrives while its tasks start.
    settings = {"SIDE_BY_SIDE": "0", "ITERATIONS": "300"}
    job = experiment(testbed, tmp_path, "first", **settings)
    job.wait_for(r"tp-0000\d: done.*\n(.*\n)*?.*tp-0000\d: \d process")
    testbed.ask("scancel", "--batch", "--signal=USR1", job.number)
    assert job.wait() == "FAILED" and "interrupted by SIGUSR1" in job.text(), job.text()
    assert "1 point(s) done, 0 failed, 1 not run" in job.text()
    again = experiment(testbed, tmp_path, "second", **settings)
    assert again.wait() == "COMPLETED", again.text()
    assert (
        again.text().count("done already") == 1
        and "2 point(s) done, 0 failed, 0 not run" in again.text()
    )


def test_a_step_that_is_to_end_while_its_tasks_start_ends_without_force(
    testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step asked to end while its tasks start ends without force.

    srun asks Slurm once to end such a step; a slow node daemon may get that before the tasks.
    """
    script = tmp_path / "hold.sh"
    script.write_text("#!/bin/bash\nsleep 3600\n")
    job = testbed.sbatch("-N", "2", "-D", tmp_path, script)
    testbed.wait_for_state(job, "RUNNING")
    (tmp_path / "pretrain_gpt.py").write_text("import time; time.sleep(3600)")
    nodes = testbed.show(job)["NodeList"]
    for name, value in {
        **settings_of_site(tmp_path),
        "SLURM_CONF": testbed.env["SLURM_CONF"],
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": "2",
        "SLURMD_NODENAME": "node02",
        "SITE_FILE": str(FRONTIER / "site.env"),
        "POINT_PYTHON": sys.executable,
        "POINT_CODE": str(tmp_path),
        "DEVICE": "cpu",
        "CPUS_PER_TASK": "1",
    }.items():
        monkeypatch.setenv(name, value)
    slurmd = int(
        testbed.ask("bash", "-c", 'pgrep -P "$(<"$TESTBED_DIR/run/node02.pid")"').split()[0]
    )
    for number in range(6):
        os.kill(slurmd, signal.SIGSTOP)
        try:
            step, log = (
                SlurmStep(f"told-{number}", ["node02"], 1, number, 3600.0),
                tmp_path / f"told-{number}/train.log",
            )
            log.parent.mkdir()
            run = start_step(slurm_command([]), step, log.parent)
            while "+ srun" not in log.read_text():
                time.sleep(0.05)
            time.sleep(0.5)  # it asks the node for its task
            run.stop()
            time.sleep(0.2 * number)
        finally:
            os.kill(slurmd, signal.SIGCONT)
        begun = time.monotonic()
        while not run.poll():
            assert time.monotonic() - begun < 60, log.read_text()
            time.sleep(0.05)
        print(f"ended after {time.monotonic() - begun:.1f} s, with {run.exit_codes}")
    left = testbed.ask("squeue", "-h", "-s", "-j", job, "-o", "%j").split()
    testbed.ask("scancel", job)
    assert not [name for name in left if name.startswith("told")]
