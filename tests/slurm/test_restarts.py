"""Restarts within jobs of examples/frontier: their losses are those of an undisturbed run."""

import os
import re
import signal
import subprocess
from pathlib import Path

from benchmarks.faults import history
from benchmarks.faults.job import run_well
from tests.slurm.site import CAMPAIGN, FRONTIER, submit, wait_until
from tests.slurm.test_training import FOUR

pytestmark = CAMPAIGN

NODES = 4
SETTINGS = {"PRESET": "tiny", "TASKS_PER_NODE": "2", "GPU_VISIBILITY": "all", "NODES_NEEDED": "2"}


def start(testbed, folder, *options, nodes=4, **settings):
    """Submit a training of four ranks that ends when FOLDER/enough exists."""
    flags = [*FOUR, "--kill-switch-file", str(folder / "enough")]
    options = ["-N", str(nodes), "--time=60", *options]
    return submit(testbed, folder, flags, options=options, **SETTINGS, **settings)


def script_of_an_array(folder):
    """Write train_22b.sbatch for tasks that share one machine, so that each needs its own port."""
    text = (FRONTIER / "train_22b.sbatch").read_text()
    last = '\ntrain_job "$@"\n'
    assert text.endswith(last)
    script = folder / "array.sbatch"
    own_port = "MASTER_PORT=$((MASTER_PORT + SLURM_ARRAY_TASK_ID))"
    script.write_text(f"{text.removesuffix(last)}\n{own_port}{last}")
    return str(script)


def trainings(run):
    """Return the training processes of the ranks, which are children of their supervisors."""
    listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True)
    parents = {}
    for line in listed.stdout.splitlines():
        pid, parent, words = line.split(None, 2)
        if "python" in words.split()[0] and f"--save {run}/" in words:
            parents[int(pid)] = int(parent)
    return sorted(pid for pid, parent in parents.items() if parent in parents)


def later(job, run):
    """Wait until the run is 60 steps further, so that it has saved since."""
    before = history.steps(run / "checkpoints")[-1][0]
    wait_until(lambda: history.steps(run / "checkpoints")[-1][0] >= before + 60, job)


def begun(job, run):
    metrics = run / "checkpoints" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and history.steps(run / "checkpoints"), job)


def restarts(run):
    return history.records(run / "checkpoints", "restart")


def check(runs, folder):
    """Compare every loss, also of repeated steps, with those of a run without faults.

    The last state of the longest run is compared, too.
    """
    losses = [history.steps(run / "checkpoints") for run in runs]
    last = max(some[-1][0] for some in losses)
    flags = ["--preset", "tiny", "--distributed-backend", "gloo", *FOUR, "--save", str(folder)]
    run_well(4, [*flags, "--exit-interval", str(last)], folder / "logs")
    reference = dict(history.steps(folder))
    for run, some in zip(runs, losses, strict=True):
        assert history.differing(some, reference) == []
        if some[-1][0] == last:
            newest = history.newest(run / "checkpoints"), history.newest(folder)
            assert history.tensors_that_differ(*newest) == []


def nothing_left(run):
    left = subprocess.run(["pgrep", "-f", f"--save {run}/"], capture_output=True, text=True)
    return not left.stdout


def controller(testbed, running):
    """Stop or start Slurm's controller."""
    folder = Path(testbed.env["TESTBED_DIR"])
    if not running:
        os.kill(int((folder / "run" / "slurmctld.pid").read_text()), signal.SIGTERM)
        return
    path = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    testbed.ask("slurmctld", "-f", str(folder / "etc" / "slurm.conf"), env=path)


def test_a_job_goes_on_without_its_controller_and_lost_nodes(testbed, tmp_path, mended):
    """A process dies while Slurm's controller is dead, then a node, and then its replacement."""
    job = start(testbed, tmp_path)
    begun(job, job.run)
    later(job, job.run)
    controller(testbed, running=False)
    os.kill(trainings(job.run)[2], signal.SIGKILL)
    while not restarts(job.run):
        assert trainings(job.run), job.text()
    controller(testbed, running=True)
    later(job, job.run)

    testbed.control("lose-node", "node02")
    wait_until(lambda: len(restarts(job.run)) == 2, job)
    testbed.control("add-node", "node02")  # it has left the job for good
    later(job, job.run)
    mended.append("node03")
    testbed.control("lose-node", "node03")
    wait_until(lambda: len(restarts(job.run)) == 3, job)
    later(job, job.run)

    (tmp_path / "enough").touch()
    assert job.wait() == "COMPLETED", job.text()
    assert testbed.show(job.number)["Restarts"] == "0"
    assert nothing_left(job.run)
    assert restarts(job.run)[-1]["ways"]["spare"] == 4
    check([job.run], tmp_path / "undisturbed")


def test_a_task_of_an_array_loses_its_first_node(testbed, tmp_path, mended):
    """It has the script and the store: this task, and not its sister, is requeued, once."""
    job = start(
        testbed, tmp_path, "--array=1-2", nodes=2, RUN_NAME="", script=script_of_an_array(tmp_path)
    )
    runs = {task: tmp_path / f"gpt-22b-mock-{task}" for task in "12"}
    for run in runs.values():
        begun(job, run)
        later(job, run)
    numbers = {task: f"{job.number}_{task}" for task in "12"}
    nodes = testbed.show(numbers["1"])["BatchHost"], testbed.show(numbers["2"])["BatchHost"]
    os.kill(trainings(runs["2"])[1], signal.SIGKILL)
    mended.append(nodes[0])
    testbed.control("lose-node", nodes[0])
    assert testbed.wait_for_state(numbers["1"], "PENDING", "FAILED", "COMPLETED") == "PENDING"
    assert nothing_left(runs["1"])
    testbed.control("add-node", mended.pop())
    lost_at = history.steps(runs["1"] / "checkpoints")[-1][0]
    testbed.control("hurry", numbers["1"])
    for run in runs.values():
        later(job, run)
    (tmp_path / "enough").touch()
    for task, number in numbers.items():
        assert testbed.wait_for_state(number, "COMPLETED", "FAILED", "NODE_FAIL") == "COMPLETED"
        assert testbed.show(number)["Restarts"] == ("1" if task == "1" else "0")
    starts = (runs["1"] / "logs" / numbers["1"] / "starts").read_text().split("\n")
    second = int(re.fullmatch(r"1 (\d+)", starts[1])[1])
    assert 0 < second <= lost_at
    assert (len(restarts(runs["1"])), len(restarts(runs["2"]))) == (0, 1)
    check(list(runs.values()), tmp_path / "undisturbed")
