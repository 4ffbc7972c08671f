"""Restarts within jobs of examples/frontier: their losses are those of an undisturbed run."""

import os
import re
import signal

from benchmarks.faults import history
from benchmarks.faults.frontier import (
    FRONTIER,
    differences,
    processes,
    reached,
    restarts,
    submit,
    supervisors,
    trainings,
    wait_until,
)
from tests.slurm.site import CAMPAIGN
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


def later(job, run):
    """Wait until the run is 60 steps further, so that it has saved since."""
    before = reached(run)
    wait_until(lambda: reached(run) >= before + 60, job)


def test_a_job_goes_on_without_its_controller_and_lost_nodes(testbed, tmp_path, mended):
    """A process dies while Slurm's controller is dead, then a node, and then its replacement.

    The replacement of that one dies, too: a replica less goes on.
    """
    job = start(testbed, tmp_path, MIN_NODES="1")
    later(job, job.run)
    testbed.control("stop-controller")
    os.kill(trainings(job.run)[2], signal.SIGKILL)
    while not restarts(job.run):
        assert trainings(job.run), job.text()
    testbed.control("start-controller")
    later(job, job.run)

    testbed.control("lose-node", "node02")
    wait_until(lambda: len(restarts(job.run)) == 2, job)
    testbed.control("add-node", "node02")  # it has left the job for good
    later(job, job.run)
    mended.append("node03")
    testbed.control("lose-node", "node03")
    wait_until(lambda: len(restarts(job.run)) == 3, job)
    later(job, job.run)

    assert restarts(job.run)[-1]["ways"]["spare"] == 4
    exact = len(history.steps(job.checkpoints))
    mended.append("node04")
    testbed.control("lose-node", "node04")
    wait_until(lambda: len(restarts(job.run)) == 4, job)
    later(job, job.run)

    (tmp_path / "enough").touch()
    assert job.wait() == "COMPLETED", job.text()
    assert testbed.show(job.number)["Restarts"] == "0"
    assert not processes(job.run)
    assert differences([job.run], tmp_path / "undisturbed", exact) == []


def test_a_task_of_an_array_loses_its_first_node(testbed, tmp_path, mended):
    """It has the script and the store: this task, and not its sister, is requeued, once.

    In the end a supervisor of the other hangs, which keeps its nodes for a limited time.
    """
    job = start(
        testbed,
        tmp_path,
        "--array=1-2",
        nodes=2,
        RUN_NAME="",
        SRUN_WAIT="5",
        script=script_of_an_array(tmp_path),
    )
    runs = {task: tmp_path / f"gpt-22b-mock-{task}" for task in "12"}
    for run in runs.values():
        later(job, run)
    numbers = {task: f"{job.number}_{task}" for task in "12"}
    nodes = testbed.show(numbers["1"])["BatchHost"], testbed.show(numbers["2"])["BatchHost"]
    os.kill(trainings(runs["2"])[1], signal.SIGKILL)
    mended.append(nodes[0])
    testbed.control("lose-node", nodes[0])
    assert testbed.wait_for_state(numbers["1"], "PENDING", "FAILED", "COMPLETED") == "PENDING"
    assert not processes(runs["1"])
    testbed.control("add-node", mended.pop())
    lost_at = history.steps(runs["1"] / "checkpoints")[-1][0]
    testbed.control("hurry", numbers["1"])
    for run in runs.values():
        later(job, run)
    os.kill(supervisors(runs["2"])[-1], signal.SIGSTOP)
    (tmp_path / "enough").touch()
    for task, number in numbers.items():
        assert testbed.wait_for_state(number, "COMPLETED", "FAILED", "NODE_FAIL") == "COMPLETED"
        assert testbed.show(number)["Restarts"] == ("1" if task == "1" else "0")
    starts = (runs["1"] / "logs" / numbers["1"] / "starts").read_text().split("\n")
    second = int(re.fullmatch(r"1 (\d+)", starts[1])[1])
    assert 0 < second <= lost_at
    assert (len(restarts(runs["1"])), len(restarts(runs["2"]))) == (0, 1)
    assert differences(list(runs.values()), tmp_path / "undisturbed") == []
