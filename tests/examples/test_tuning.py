"""tune.sbatch: its calls in a job and on a login node, with stubs of Slurm and Python."""

import itertools
import math
import os
import re
import sys

import pytest

from megatron.jobs.space import load_space
from tests.examples.stubs import FRONTIER, own_environment, run_script, shell
from tests.helpers.launching import ROOT
from tests.helpers.preflight import checked

pytestmark = pytest.mark.slow

TUNE = FRONTIER / "tune.sbatch"
# The stub of Python notes its hosts and ends as told.
HOSTS = (
    'while (($#)); do [[ $1 != --hosts-file ]] || cp "$2" "$STUB_CALLS.hosts"; shift; done; '
    "exit ${ENDS:-0}"
)


def tune(folder, *arguments, **variables):
    return run_script(
        folder, TUNE, *arguments, **{"STUB_python": HOSTS, "SITE_CLUSTER": "frontier", **variables}
    )


def planner(ended):
    """Return the words of the only call of tools/tune.py."""
    (call,) = ended.named("python", "tune.py")
    return call.words


def test_the_tuner_gets_the_nodes_and_the_settings(tmp_path):
    more = "--search optuna -- --seq-length 4096".split()
    ended = tune(
        tmp_path,
        *more,
        SPACE="mine/wide.toml",
        MAX_TRIALS="40",
        OBJECTIVE="node_hours",
        PRIOR="0",
        nodes="a1,a2,a3",
    )
    assert ended.code == 0, ended.log
    words = planner(ended)
    options = dict(itertools.pairwise(words))
    assert words[1] == f"{ROOT}/tools/tune.py" and words[-5:] == more
    expected = {
        "--space": "mine/wide.toml",
        "--launcher": "slurm",
        "--out": f"{tmp_path}/runs/tune-wide",
        "--max-trials": "40",
        "--objective": "node_hours",
        "--cluster": "frontier",
        "--tasks-per-node": "8",
    }
    assert {name: options[name] for name in expected} == expected and "--no-prior" in words
    assert (tmp_path / "calls.hosts").read_text().split() == ["a1", "a2", "a3"]


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (3, True), (4, True)])
def test_only_a_search_with_trials_left_goes_back_into_the_queue(tmp_path, code, requeued):
    ended = tune(tmp_path, ENDS=str(code))
    assert ended.code == code
    assert ended.requeued == ["77"] * requeued
    if code == 4:
        without = tune(tmp_path, ENDS="4", REQUEUE="0", SLURM_JOB_ID="78")
        assert without.code == 4 and not without.requeued


@pytest.mark.parametrize(
    ("state", "requeued"),
    [("PENDING BeginTime", False), ("COMPLETING TimeLimit", True), ("", True)],
)
def test_a_job_that_somebody_ends_stays_out_of_the_queue(tmp_path, state, requeued):
    ended = tune(tmp_path, ENDS="3", STUB_squeue=f"echo {state}")
    assert ended.code == 3
    assert ended.requeued == ["77"] * requeued


def test_a_job_that_is_requeued_does_not_run_failed_trials_again_and_again(tmp_path):
    def start(number, job="77"):
        words = planner(
            tune(tmp_path, RETRY_FAILED="1", SLURM_RESTART_COUNT=str(number), SLURM_JOB_ID=job)
        )
        return "--retry-failed" in words

    assert [start(0), start(1)] == [True, False]
    assert start(1, "78"), (
        "the tuner has not run in a start that ended before, such as for want of good nodes"
    )


def test_starts_without_a_new_trial_are_bounded(tmp_path):
    result = tmp_path / "runs/tune-paper-175b/trials/0001/result.json"
    result.parent.mkdir(parents=True)
    started, requeued = [], []
    for restart in range(4):
        if restart == 1:
            result.write_text("{}")
        ended = tune(tmp_path, ENDS="3", MAX_STARTS="2", SLURM_RESTART_COUNT=str(restart))
        assert ended.code == 3
        started.append(bool(ended.named("python", "tune.py")))
        requeued.append(any("requeue" in call.words for call in ended.named("scontrol")))
    assert started == [True, True, True, False]
    assert requeued == [True, True, False, False], "a start that would end at once is not asked for"


def guards(ended):
    return [call.words for call in ended.calls if "--job-name=guard" in call.words]


@pytest.mark.parametrize(("requeue", "does"), [("1", ["scontrol", "requeue"]), ("0", ["scancel"])])
def test_a_task_on_another_node_looks_after_the_script(tmp_path, requeue, does):
    """A task on another node watches the script from the start of the tuner to its end.

    Both stubs wait for each other at a FIFO.
    """
    meeting = tmp_path / "meeting"
    os.mkfifo(meeting)
    assert "#SBATCH --no-kill" in TUNE.read_text().splitlines()
    ended = tune(
        tmp_path,
        nodes="a1,a2",
        REQUEUE=requeue,
        STUB_python=f"read -r _ <{meeting}",
        STUB_srun=f"echo here >{meeting}; exec sleep 1000",
    )
    (words,) = guards(ended)
    assert words[words.index("-w") + 1] == "a2" and words[-2 - len(does) :] == ["a1", "77", *does]
    assert not guards(tune(tmp_path, nodes="a1"))


def guard(answers, turns, *does):
    """Return what the guard prints within `turns` turns, given stubs of squeue and scontrol."""
    (code,) = re.findall(r"(?ms)^GUARD='(.*?)'$", (FRONTIER / "job.sh").read_text())
    program = f"{answers}\nturns=0; sleep() {{ ((turns++ < {turns})); }}\n{code}"
    return shell("bash", "-c", program, "guard", "a1", "7", *does).stdout.split()


def test_the_guard_acts_when_the_scripts_node_has_left_the_job():
    for answer, names, acts in (
        ("a[1-2]", "a1 a2", 0),
        ("a2", "a2", 2),
        ("a11", "a11", 2),
        ("", "", 0),
        ("a2", "", 0),
    ):
        slurm = f"squeue() {{ echo '{answer}'; }}; scontrol() {{ tr ' ' '\n' <<<'{names}'; }}"
        assert guard(slurm, 2, "echo", "acts") == ["acts", "7"] * acts, answer
    # Slurm refuses: the nodes would idle to the time limit.
    refuses = (
        "squeue() { echo a2; }; scontrol() { [[ $1 == show ]] && echo a2; }; scancel() { "
        "echo ended $1; }"
    )
    for turns, ends in ((4, []), (5, ["ended", "7"])):
        assert guard(refuses, turns, "scontrol", "requeue") == ends


@pytest.mark.parametrize(("left", "requeued"), [(2, True), (3, False)])
def test_a_node_that_dies_before_the_first_trial_sends_the_job_back(tmp_path, left, requeued):
    """A node that dies before the first trial sends the job back.

    The preflight asks for all nodes of the job, so it cannot even start.
    """
    squeue = f'case "$*" in *%D*) echo {left} ;; *) echo RUNNING None ;; esac'
    ended = tune(tmp_path, nodes="a1,a2,a3", PREFLIGHT="1", STUB_squeue=squeue, STUB_srun="exit 1")
    assert ended.code == 4 and not ended.named("python", "tune.py")
    assert ended.requeued == ["77"] * requeued


def on_a_login_node(*arguments, **variables):
    return shell("bash", str(TUNE), *arguments, env={**own_environment(), **variables})


def test_nothing_is_started_by_accident():
    done = on_a_login_node(PYTHON=sys.executable)
    assert done.returncode == 2 and done.stderr
    shown = on_a_login_node("--help").stdout
    assert "SPACE" in shown and "#SBATCH" not in shown


@pytest.mark.parametrize(
    ("script", "planner"), [("tune.sbatch", "tune.py"), ("weak_scaling.sh", "run_experiment.py")]
)
def test_the_check_before_submitting_accepts_it(tmp_path, script, planner):
    """The check before submitting accepts it.

    It reports that the trainings, which the tool chooses, were not checked.
    """
    job = checked([FRONTIER / script], tmp_path)
    assert job.findings == [] and any(planner in text for text in job.unchecked), job.findings


def test_the_space_in_the_documentation_is_one(tmp_path):
    (text,) = re.findall(
        r"```toml\n(.*?)```", (ROOT / "docs/tuning-spaces.md").read_text(), re.DOTALL
    )
    path = tmp_path / "mine.toml"
    path.write_text(text)
    sizes = {
        parameter.name: len(parameter.values) for parameter in load_space(str(path)).parameters
    }
    assert len(sizes) >= 6 and math.prod(sizes.values()) >= 16 * 3 * 3 * 2 * 3
