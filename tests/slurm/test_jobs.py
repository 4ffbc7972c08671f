"""Job arrays, of which one task is requeued, and ranks on other nodes than the first of a list."""

import re
import sys

from benchmarks.faults.frontier import FRONTIER, settings_of_site
from benchmarks.faults.job import ROOT
from benchmarks.faults.testbed import ENDED
from tests.slurm.site import CAMPAIGN, write_python

pytestmark = CAMPAIGN

NODES = 3
# The last task, which has the array's number, first gets a bad node from the preflight and then
# loses a rank; the second waits for the release; the first ends at once.
PYTHON = f"""#!{sys.executable} -S
import os, sys, time
task, start = os.environ["SLURM_ARRAY_TASK_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
folder, words = os.environ["MEETING"], " ".join(sys.argv)
if "--print-config" in words:
    sys.exit(0)
if "preflight.py" in words:
    out = sys.argv[sys.argv.index("--out") + 1]
    bad = (task, start) == ("3", "0")
    for name in ("good_hosts", "bad_hosts"):
        with open(f"{{out}}/{{name}}", "w") as file:
            file.write(os.environ["SLURMD_NODENAME"] * (bad == (name == "bad_hosts")))
    sys.exit(4 * bad)
open(f"{{folder}}/{{task}}.{{start}}", "w").close()
if task == "3":
    sys.exit(75 * (start == "1"))
while task == "2" and not os.path.exists(f"{{folder}}/release"):
    time.sleep(0.1)
"""


def test_a_task_that_is_requeued_leaves_its_sisters_alone(testbed, tmp_path):
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    settings = (
        settings_of_site(tmp_path)
        | write_python(tmp_path, PYTHON)
        | {
            "DEVICE": "cpu",
            "PREFLIGHT": "1",
            "MEETING": str(meeting),
            "TASKS_PER_NODE": "1",
            "RUN_NAME": "",
        }
    )
    words = ["--parsable", "--array=1-3", "-N", "1", f"--output={tmp_path}/%A_%a.log"]
    submit = f'source {FRONTIER}/site.env && exec sbatch "$@"'
    script = [str(FRONTIER / "train_22b.sbatch"), "--mock-data", "--train-iters", "3"]
    array = testbed.ask("bash", "-c", submit, "bash", *words, *script, env=settings)
    tasks = {task: f"{array}_{task}" for task in "123"}

    def log(task):
        return tmp_path / f"{array}_{task}.log"

    assert testbed.wait_for_state(tasks["1"], *ENDED, log=log("1")) == "COMPLETED"
    for message in ("back into the queue, without", "back into the queue, to resume"):
        testbed.wait_for_log(log("3"), message)
        testbed.wait_for_state(tasks["3"], "PENDING", log=log("3"))
        testbed.control("hurry", tasks["3"])
    assert testbed.wait_for_state(tasks["3"], *ENDED, log=log("3")) == "COMPLETED"
    assert testbed.state(tasks["2"]) == "RUNNING"
    (meeting / "release").touch()
    assert testbed.wait_for_state(tasks["2"], *ENDED, log=log("2")) == "COMPLETED"
    shown = [testbed.show(job) for job in tasks.values()]
    assert [job["Restarts"] for job in shown] == ["0", "0", "2"]
    # it went to another node than the bad one, which the others may have again
    assert [job["ExcNodeList"] == "(null)" for job in shown] == [True, True, False]
    assert sorted(file.name for file in meeting.glob("*.*")) == ["1.0", "2.0", "3.1", "3.2"]
    runs = [tmp_path / f"gpt-22b-mock-{task}" / "logs" / job for task, job in tasks.items()]
    assert all(run.is_dir() for run in runs)


PLACE = """
import os
from megatron.parallel.launch import detect_launch

launch = detect_launch()
print(f"rank {launch.rank} on {os.environ['SLURMD_NODENAME']} meets at {launch.master_addr}")
"""
STEPS = f"""#!/bin/bash
printf '%s\\n' node03 node01 node01 node02 >"$0.hosts"
python=({sys.executable} "$1")
export PYTHONPATH={ROOT}
SLURM_HOSTFILE=$0.hosts srun -n 4 --distribution=arbitrary "${{python[@]}}"
export MASTER_ADDR=node01
SLURM_HOSTFILE=$0.hosts srun -n 4 --distribution=arbitrary "${{python[@]}}"
srun -n 2 -N 2 --relative=1 "${{python[@]}}"
"""


def test_all_ranks_meet_on_the_node_of_rank_0(testbed, tmp_path):
    for name, text in (("place.py", PLACE), ("job.sh", STEPS)):
        (tmp_path / name).write_text(text)
    log = tmp_path / "log"
    words = [tmp_path / "job.sh", tmp_path / "place.py"]
    job = testbed.sbatch("-N", "3", "-n", "6", f"--output={log}", *words)
    assert testbed.wait_for_state(job, *ENDED, log=log) == "COMPLETED", log.read_text()
    places = re.findall(r"rank (\d) on (\S+) meets at (\S+)", log.read_text())
    assert len(places) == 4 + 4 + 2
    # in their order: two steps whose rank 0 is on the last node, one on the second and third
    for step, first in ((places[:4], "node03"), (places[4:8], "node03"), (places[8:], "node02")):
        assert {(node, at) for rank, node, at in step if rank == "0"} == {(first, first)}
        assert {at for _, _, at in step} == {first}
