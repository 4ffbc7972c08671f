"""Training by examples/frontier, unchanged on two virtual nodes, equals one process's.

It survives interruptions.
"""

import re
import tarfile

from benchmarks.faults import history
from benchmarks.faults.frontier import ENDLESS, TINY, submit
from benchmarks.faults.job import run_job
from benchmarks.prove_resume import LOSS
from tests.helpers.processes import run_processes
from tests.slurm.site import CAMPAIGN

pytestmark = CAMPAIGN

NODES = 2
ITERATIONS = 6
SIXTEEN = [
    *TINY,
    *"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1".split(),
    "--train-iters",
    str(ITERATIONS),
]
"""TP 2 x PP 2 x DP 4, two micro-batches a step."""
NEAREST = [4, 5, 2, 3, 6, 7, 0, 1]
"""The device next to each local rank's cores: what the ranks would have without placement."""


def pack(file):
    """Pack an environment as job.sh expects it: bin/python at its top, here this machine's."""
    import sys

    python = file.parent / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with tarfile.open(file, "w") as tar:
        tar.add(python, "bin/python")


def placed(job):
    """Check that ranks follow devices, not the order of tasks.

    A tensor-parallel pair is on devices with a link of 200 GB/s. The line names the device that
    each rank's task was given.
    """
    order = [int(device) for device in re.findall(r"device order (\S+)", job.text())[0].split(",")]
    groups = re.findall(r"(?m)^ +first tensor-parallel group: +(.*)$", job.text())
    pair = [
        (int(rank), node, int(device))
        for rank, node, device in re.findall(r"(\d+) \((node\d\d):cpu \(device (\d)\)\)", groups[0])
    ]
    assert pair == [(0, "node01", order[0]), (1, "node01", order[1])]
    assert sorted(order[:2]) in ([0, 1], [2, 3], [4, 5], [6, 7])
    assert order != NEAREST  # otherwise all of this could be chance


def _train(rank, arguments):
    from megatron.program import run as main

    return main(list(arguments))


def test_two_nodes_train_what_one_process_trains(testbed, tmp_path):
    pack(tmp_path / "environment.tar")
    job = submit(
        testbed,
        tmp_path,
        SIXTEEN,
        options=["-N", "2"],
        name="one",
        PRESET="tiny",
        GPU_VISIBILITY="one",
        SRUN_WAIT="300",
        SITE_ENV=str(tmp_path / "environment.tar"),
    )
    assert job.wait() == "COMPLETED", job.text()
    assert re.search(
        r"(?m)^\+ srun .* /mnt/bb/\S+/environment/bin/python .*pretrain_gpt", job.text()
    ), job.text()
    placed(job)
    one = history.steps(job.checkpoints)
    assert len(one) == ITERATIONS
    # The same layout without Slurm, and without a machine to place ranks on.
    folder = tmp_path / "forked"
    flags = ["--preset", "tiny", "--distributed-backend", "gloo", *SIXTEEN, "--save", str(folder)]
    assert run_processes(16, _train, flags) == [0] * 16
    assert history.steps(folder) == one
    undivided = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1".split()
    flags = [*flags[:-1], str(tmp_path / "alone"), *undivided]
    alone = run_job(1, flags, tmp_path / "alone")
    assert alone.processes[0].returncode == 0, alone.output()
    reference = dict(history.steps(tmp_path / "alone"))
    assert history.largest_difference(one, reference) < LOSS["fp32"]


FOUR = [*ENDLESS, "--walltime", "none"]  # the program does not look at the clock itself


def reached(job):
    return max(int(step) for step in re.findall(r"(?m)^ iteration +(\d+)/", job.text()))


def newest(job):
    return int(history.newest(job.checkpoints).name.removeprefix("iter_"))


def test_time_limit_and_lost_node(testbed, tmp_path):
    """One job gets Slurm's signal before the time limit, then loses a node.

    Its losses are those of an undisturbed run.
    """
    # Few steps until Slurm has checked its clock, which it does every 30 s: one task is held back.
    testbed.control("slow-task", "node02", "1", "15")
    settings = {
        "PRESET": "tiny",
        "TASKS_PER_NODE": "2",
        "GPU_VISIBILITY": "all",
        "SRUN_WAIT": "300",
    }
    job = submit(
        testbed, tmp_path, FOUR, options=["-N", "2", "-t", "60", "--signal=USR1@600"], **settings
    )
    job.wait_for(r"(?m)^ iteration +2/")
    testbed.control("mend")
    testbed.shorten(job.number, 500)  # the signal is due at once, and there is time for a slow save
    assert job.wait("PENDING", "COMPLETED", "FAILED", "TIMEOUT") == "PENDING", job.text()
    at_signal = reached(job)
    assert "receiving SIGUSR1" in job.text()
    assert newest(job) == at_signal

    testbed.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    testbed.control("hurry", job.number)
    job.wait_for(rf"(?m)^ iteration +{at_signal + 101}/")
    testbed.control("lose-node", "node02")
    assert job.wait("PENDING", "COMPLETED", "FAILED", "TIMEOUT") == "PENDING", job.text()
    # The last lines of the output may have been lost with the node.
    at_loss = history.steps(job.checkpoints)[-1][0]
    testbed.control("add-node", "node02")
    testbed.control("hurry", job.number)
    job.wait_for(rf"(?s) start 2 .*\n iteration +{at_loss + 1}/")
    testbed.ask("scancel", job.number)
    job.wait("CANCELLED", "COMPLETED", "FAILED")

    starts = (job.run / "logs" / job.number / "starts").read_text().split("\n")
    assert starts[:2] == ["0 0", f"1 {at_signal}"]
    third = int(starts[2].removeprefix("2 "))
    assert at_loss - 2 * 50 <= third <= at_loss  # a save may be in progress for one interval
    losses = history.steps(job.checkpoints)
    assert [step for step, _ in losses] == [
        *range(1, at_loss + 1),
        *range(third + 1, losses[-1][0] + 1),
    ]
    last = losses[-1][0]
    folder = tmp_path / "undisturbed"
    flags = ["--preset", "tiny", "--distributed-backend", "gloo", *FOUR, "--save", str(folder)]
    assert run_processes(4, _train, [*flags, "--exit-interval", str(last)]) == [0] * 4
    assert history.differing(losses, dict(history.steps(folder))) == []
