"""Search in an allocation of four virtual nodes, with two trials at a time on nodes of their own.

One trial hangs and one runs out of memory; the search is killed and resumed, and nodes die during
it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

from benchmarks.faults.frontier import FRONTIER, submit, wait_until
from benchmarks.faults.testbed import ENDED, output_of
from megatron.jobs.result import HANG, OUT_OF_MEMORY
from tests.helpers.launching import ROOT
from tests.slurm.site import CAMPAIGN, write_python

pytestmark = CAMPAIGN

NODES = 4
# Two processes of a trial, one on each of two nodes. A micro-batch of 3 hangs. The activation of
# one MLP needs a gibibyte (of sequences of 256 tokens with 4 * 128 features of 4 bytes) with the
# largest micro-batch, more than a process may have; one of 1 to 3 needs 0.35 GiB for everything.
LIMIT_KIB = 900 << 10
LARGEST = (1 << 30) // (256 * 4 * 128 * 4)
SPACE = f"""
title = "two pipeline sizes and some micro-batches"
flags = [
    "--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "4", "--seq-length", "256",
    "--max-position-embeddings", "256", "--vocab-size", "500", "--tokenizer-type", "NullTokenizer",
    "--num-workers", "0", "--lr", "1e-3", "--distributed-timeout-minutes", "10",
]
[parameters]
pp = [1, 2]
mbs = [1, 2, 3, {LARGEST}]
[derived]
gbs = "2 * mbs * dp"
nodes = "2"
[constraints]
"left out here" = "pp == 1 or mbs < 3"
[trial]
iterations = 3
warm_up = 1
"""
HANGS = "pp=1,mbs=3"
TOO_BIG = f"pp=1,mbs={LARGEST}"
_LIMIT = f"ulimit -d {LIMIT_KIB}"
# Stops itself after the first step, in every rank, so that no other can report it. It has more
# steps, so that it does not end before.
PYTHON = f"""#!/bin/bash
{_LIMIT}
if [[ " $* " == *" --micro-batch-size 3 "* && $* =~ --metrics-file[=\\ ]([^ ]+) ]]; then
    metrics=${{BASH_REMATCH[1]}}
    (until grep -qs '"event": *"iteration"' "$metrics"; do sleep 0.1; done; kill -STOP $$) &
    set -- "$@" --train-iters 10000
fi
exec {sys.executable} "$@"
"""
# Reports its place, and does not begin before a file exists.
HELD = f"""#!/bin/bash
{_LIMIT}
: >"${{0%/*}}/on.$SLURMD_NODENAME"
until [[ -e ${{0%/*}}/go ]]; do sleep 0.1; done
exec {sys.executable} "$@"
"""


def tune(testbed, folder, name, space=SPACE, program=PYTHON, **settings):
    (folder / "space.toml").write_text(space)
    arguments = ["--search", "optuna", "--confirm", "0", "--stall", "30"]
    return submit(
        testbed,
        folder,
        arguments,
        options=["-N", "4", "--time=120"],
        name=name,
        script="tune.sbatch",
        SPACE=str(folder / "space.toml"),
        PRIOR="0",
        SITE_CLUSTER="",
        TASKS_PER_NODE="1",
        CPUS_PER_TASK="1",
        PYTHON=sys.executable,
        **{"REQUEUE": "0", **write_python(folder, program), **settings},
    )


def journal(folder):
    """Return (point, result or None) of each trial that was started, by its number."""
    trials = {}
    for path in sorted((folder / "tune-space/trials").glob("*/point.json")):
        result = path.with_name("result.json")
        trials[int(path.parent.name)] = (
            json.loads(path.read_text()),
            json.loads(result.read_text()) if result.exists() else None,
        )
    return trials


def restarted(folder):
    """Return the trials that were started more than once."""
    return {int(path.parent.name) for path in (folder / "tune-space/trials").glob("*/attempt-1")}


def ended(trials):
    return {number: trial for number, trial in trials.items() if trial[1]}


def mid_way(folder, job):
    """Wait until one more trial has ended and another runs; return the ended ones."""
    before = len(ended(journal(folder)))

    def one_more():
        trials = journal(folder)
        return len(trials) > len(ended(trials)) > before and set(ended(trials))

    return wait_until(one_more, job)


def kill_the_tuner(folder):
    pgrep = subprocess.run(
        ["pgrep", "-f", f"tools/tune.py .*--out {folder}/"],
        capture_output=True,
        text=True,
        check=True,
    )
    for pid in pgrep.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


def left_behind(testbed, folder):
    """Return the journal of a job that has ended, once no step, trial process or tuner is left."""
    deadline = time.monotonic() + 600
    while True:
        steps = testbed.ask("squeue", "--steps", "-h")
        programs = f"(pretrain_gpt|tools/tune)[.]py .*{folder}/"
        processes = subprocess.run(["pgrep", "-fa", programs], capture_output=True, text=True)
        if not steps and not processes.stdout:
            return journal(folder)
        assert time.monotonic() < deadline, f"{steps}\n{processes.stdout}"
        time.sleep(0.2)


def test_a_search_with_a_hang_and_too_little_memory_killed_and_gone_on_with(testbed, tmp_path):
    # Killed, which no program can prevent.
    job = tune(testbed, tmp_path, "first")
    done = [mid_way(tmp_path, job)]
    kill_the_tuner(tmp_path)
    assert job.wait() == "FAILED", job.text()
    starts = [left_behind(testbed, tmp_path)]

    # Cancelled, as by a user: Slurm signals the trials together with the script. The script must
    # not undo that.
    job = tune(testbed, tmp_path, "second", REQUEUE="1")
    done.append(mid_way(tmp_path, job))
    testbed.ask("scancel", job.number)
    assert job.wait() == "CANCELLED", job.text()
    starts.append(left_behind(testbed, tmp_path))
    cancelled = job

    # Warned before its time is over: it is requeued, and continues to the end.
    job = tune(testbed, tmp_path, "third", REQUEUE="1")
    done.append(mid_way(tmp_path, job))
    testbed.ask("scancel", "--batch", "--signal=USR1", job.number)
    assert job.wait("PENDING", *ENDED) == "PENDING", job.text()
    assert "interrupted by SIGUSR1" in job.text() and "back into the queue" in job.text()
    starts.append(left_behind(testbed, tmp_path))
    testbed.control("hurry", job.number)
    assert job.wait() == "COMPLETED", job.text()
    trials = left_behind(testbed, tmp_path)
    assert testbed.state(cancelled.number) == "CANCELLED"
    assert "back into the queue" not in cancelled.text()

    # Ended trials did not run again; interrupted ones did, under their number.
    for numbers, before in zip(done, starts, strict=True):
        assert numbers <= ended(before).keys() and ended(before).items() <= trials.items()
        assert before.keys() - ended(before).keys() <= restarted(tmp_path)
    results = {point["key"]: result for point, result in ended(trials).values()}
    assert len(results) == len(trials) == 6
    check_trials(results, tmp_path / "tune-space/report")


def check_trials(results, report):
    kinds = {key: (r["status"], r["kind"]) for key, r in results.items()}
    assert kinds.pop(HANGS) == ("failed", HANG)
    assert kinds.pop(TOO_BIG) == ("failed", OUT_OF_MEMORY)
    assert set(kinds.values()) == {("done", None)} and len(kinds) == 4

    ran = [(r["started"], r["ended"], set(r["hosts"])) for r in results.values()]
    assert all(len(hosts) == 2 for _, _, hosts in ran)
    both = [(a, b) for i, a in enumerate(ran) for b in ran[:i] if a[0] < b[1] and b[0] < a[1]]
    assert both and all(not a[2] & b[2] for a, b in both)

    best = max(kinds, key=lambda key: results[key]["tokens_per_s"])
    command = (report / "best.txt").read_text()
    sizes = [
        re.search(rf"--{name}[= ](\d+)", command)
        for name in ("pipeline-model-parallel-size", "micro-batch-size")
    ]
    assert best == "pp={},mbs={}".format(*(size[1] for size in sizes if size)), command
    assert {"trials.md", "trajectory.png"} <= {path.name for path in report.iterdir()}


def blocked_search(testbed, folder):
    """Start a search whose first two trials wait for a file on their nodes; return the file."""
    few = SPACE.replace("pp == 1 or mbs < 3", "pp == 1 and mbs < 3")
    job = tune(testbed, folder, "run", few, HELD, REQUEUE="1", GUARD_S="1")
    wait_until(lambda: len(list((folder / "venv/bin").glob("on.node0*"))) == 4, job)
    wait_until(lambda: "guard" in testbed.ask("squeue", "--steps", "-h", "-o", "%j").split(), job)
    wait_until(lambda: len(journal(folder)) == 2, job)
    hosts = [point["hosts"] for point, _ in journal(folder).values()]
    assert hosts == [["node01", "node02"], ["node03", "node04"]], job.text()
    return job, folder / "venv/bin/go"


def test_a_node_dies_and_the_search_goes_on_without_it(testbed, tmp_path, mended):
    job, go = blocked_search(testbed, tmp_path)
    mended.append("node03")
    testbed.control("lose-node", "node03")
    go.touch()
    assert job.wait() == "COMPLETED", job.text()
    trials = left_behind(testbed, tmp_path)
    text = job.text()
    assert "node03 does not respond and is left out from now on; 3 of 4 node(s) remain" in text
    assert [*trials] == [1, 2] and restarted(tmp_path) == {2}, "one was run again"
    hosts = set(trials[2][0]["hosts"])
    assert "node03" not in hosts and len(hosts) == 2
    assert "node03 did not respond: it will run again" in text
    assert [result["status"] for _, result in trials.values()] == ["done", "done"], text
    assert (tmp_path / "tune-space/report/best.txt").exists() and "Node failure" in (
        tmp_path / "tune-space/trials/0002/attempt-1/train.log"
    ).read_text()
    assert testbed.show(job.number)["Restarts"] == "0"


def test_a_job_whose_script_died_with_its_node_goes_back_into_the_queue(testbed, tmp_path, mended):
    """A job whose script died with its node is requeued.

    With --no-kill Slurm itself would let the other nodes idle to the time limit.
    """
    job, _ = blocked_search(testbed, tmp_path)
    mended.append("node01")
    testbed.control("lose-node", "node01")
    assert job.wait("PENDING", *ENDED) == "PENDING", job.text()
    assert testbed.show(job.number)["Restarts"] == "1"
    left_behind(testbed, tmp_path)
    testbed.ask("scancel", job.number)
    job.wait()


# The guard, a step with all cores and devices of its nodes, and beside it an inquiry that reports
# its answers.
FULL = f"""
export MEGATRON_ROOT={ROOT} SITE_FILE={FRONTIER}/site.env GUARD_S=1 REQUEUE=1
source {FRONTIER}/job.sh
until_true() {{ until "$@"; do sleep 0.1; done; }}
guarded() {{ squeue --steps -h -j "$SLURM_JOB_ID" -o %j | grep -qx guard; }}
guard_script &
guard=$!
until_true guarded
srun -N 3 -n 24 --ntasks-per-node=8 -c 14 --gpus-per-task=1 --gpu-bind=closest bash -c \
    ': >"$0/on.$SLURM_PROCID"; until [[ -e $0/go ]]; do sleep 0.1; done; echo "ran beside it"' "$PWD" &
trial=$!
all_on() {{ [[ $(ls on.* 2>/dev/null | wc -l) == 24 ]]; }}
until_true all_on
{sys.executable} - <<'PY'
import sys, time
sys.path.insert(0, "{ROOT}")
from megatron.jobs import runner
class Told(runner.Inquiry):
    def answers(self, hosts):
        told = super().answers(hosts)
        print(*("answers " + host for host in told))
        return told
asked = Told(["node02", "node03"])
while asked.dead is None: time.sleep(0.1)
print("dead:", asked.dead)
PY
touch go
wait "$trial"
kill "$guard"
"""


def test_nodes_with_a_trial_on_all_their_cores_and_devices_answer(testbed, tmp_path):
    output = output_of(
        testbed, tmp_path, FULL, ["-w", "node0[1-3]", "-D", str(tmp_path), "--time=20"]
    )
    assert sorted(re.findall("answers node0.", output)) == [
        f"answers node0{n}" for n in (1, 2, 3)
    ], output
    assert "dead: []" in output and output.count("ran beside it") == 24, output
