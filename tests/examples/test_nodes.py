"""examples/frontier/job.sh: environment on each node's drive, preflight, training on good nodes."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.examples.stubs import FRONTIER, run_script
from tests.helpers.launching import ROOT

pytestmark = pytest.mark.slow

TRAIN = FRONTIER / "train_22b.sbatch"
FLAGS = ("--mock-data", "--train-iters", "3")
MEASURE = "preflight.py"
PROGRAM = "pretrain_gpt.py"


def measured(good, bad="", code=0):
    """Return a stub of srun whose preflight gives these verdicts and this exit code."""
    return f"""[[ $* != *preflight.py* ]] || {{
        while [[ $1 != --out ]]; do shift; done
        printf '%s\\n' {good} >"$2/good_hosts"; printf '%s' '{bad}' | tr ' ' '\\n' >"$2/bad_hosts"; exit {code}; }}"""


def train(folder, **variables):
    return run_script(folder, TRAIN, *FLAGS, **variables)


def trained(ended):
    (call,) = ended.named("srun", PROGRAM)
    return call


def test_all_nodes_are_good(tmp_path):
    ended = train(tmp_path, PREFLIGHT="1", STUB_srun=measured("a1 a2"))
    (call,) = ended.named("srun", MEASURE)
    folder = tmp_path / "runs/gpt/logs/77/0/preflight"
    asked = [call.value(flag) for flag in ("--out", "--backend", "--cluster", "-N", "-n")]
    assert asked == [str(folder), "gloo", "frontier", "2", "16"]
    assert int(call.value("--time")) > 0  # a preflight that hangs is ended
    assert (ended.code, trained(ended).value("-N"), "-w" in trained(ended).words) == (0, "2", False)


@pytest.mark.parametrize(
    ("restarts", "used"), [("100", ["3", "24", "a2,a3,a4"]), ("0", ["2", "16", "a2,a3"])]
)
def test_spare_nodes_take_the_place_of_bad_ones(tmp_path, restarts, used):
    """Two nodes train; the third good one waits, if the job can restart."""
    stub = measured("a2 a3 a4", "a1", code=137)  # the task of a dead node spoils srun's exit code
    ended = train(
        tmp_path,
        nodes="a1,a2,a3,a4",
        PREFLIGHT="1",
        NODES_NEEDED="2",
        MAX_RESTARTS=restarts,
        STUB_srun=f"[[ $* != *'hostname -i'* ]] || {{ echo fe80::1 10.1.2.3; exit; }}; {stub}",
    )
    assert ended.code == 0, ended.log
    assert ended.named("srun", MEASURE)[0].value("-N") == "4"
    call = trained(ended)
    assert [call.value(flag) for flag in ("-N", "-n", "-w")] == used
    assert ("--spare-ranks" in call.words) == (restarts != "0")
    assert restarts == "0" or call.value("--spare-ranks") == "8"
    assert call.environ["MASTER_ADDR"] == "10.1.2.3"  # that of a2, which now has rank 0
    tokens = {
        step.environ["MEGATRON_JOB_TOKEN"] for step in (call, ended.named("srun", MEASURE)[0])
    }
    assert len(tokens) == 2 and all(re.fullmatch("[0-9a-f]{32}", token) for token in tokens)
    (python,) = ended.named("python")
    assert python.value("--world-size") == "16"


def test_too_few_good_nodes(tmp_path):
    """A job for which too few nodes are good is requeued without the bad ones.

    Nodes that were excluded stay so. Slurm sends SIGTERM to all processes of a job that it
    requeues, including the scontrol that asked for it.
    """
    verdict = "echo 'srun: error: a1: task 0: Exited with exit code 4' >&2; "
    slurm = """case $1-$2 in requeue-*) kill -TERM $$ $BASHPID ;; show-hostnames) echo a1 ;;
        show-hostlist) echo "$3" ;; show-job) echo '   ReqNodeList=(null) ExcNodeList=b[1-2]' ;; esac"""
    ended = train(
        tmp_path,
        PREFLIGHT="1",
        STUB_srun=verdict + measured("a2", "a1", code=4),
        STUB_scontrol=slurm,
    )
    assert ended.named("srun", PROGRAM) == []
    assert "ERROR: task" not in ended.log  # the code is a verdict
    assert "--exclude=a1" in ended.log
    asked = [call.words[1:] for call in ended.named("scontrol")]
    update = ["update", "JobId=77", "ExcNodeList=b[1-2],a1"]
    assert asked.index(["requeue", "77"]) < asked.index(update)


@pytest.mark.parametrize(("code", "answer"), [(2, 2), (143, 4)])
def test_a_preflight_without_a_verdict(tmp_path, code, answer):
    ended = train(tmp_path, PREFLIGHT="1", STUB_srun=f"exit {code}")
    assert (ended.code, ended.named("srun", PROGRAM)) == (answer, [])
    # no source names the bad nodes
    assert not ended.requeued


def test_variables_of_somebodys_shell_are_not_the_jobs(tmp_path):
    user_set = dict(
        NODES="9", HOSTS="b1", LOGS="/mine", MASTER_ADDR="login", CODE="/c", PYTHON="/p"
    )
    call = trained(train(tmp_path, **user_set))
    assert (call.value("-N"), "-w" in call.words) == ("2", False)
    assert call.environ["MASTER_ADDR"] != "login"
    assert call.value("--error") == f"{tmp_path}/runs/gpt/logs/77/0/task_%t.err"
    assert f"{ROOT}/{PROGRAM}" in call.words and "/p" not in call.words


# Shell of a node: srun runs the command here, sbcast copies.
_RUNS_HERE = """if [[ $* == *"bash -c"* ]]; then
    while [[ $1 == -* ]]; do case $1 in -N | -n | -c) shift 2 ;; *) shift ;; esac; done; "$@"; fi"""


def pack(folder, python):
    """Return a tar file of an environment whose Python is this program."""
    home = folder / "made" / "bin"
    file = str(folder / "env.tar.gz")
    home.mkdir(parents=True, exist_ok=True)
    (home / "python").write_text(f"#!/bin/bash\n{python}\n")
    (home / "python").chmod(0o755)
    subprocess.run(["tar", "-C", str(home.parent), "-czf", file, "."], check=True)
    return file


@pytest.fixture
def packed(tmp_path):
    """Provide a packed environment and a drive to unpack it on."""
    (tmp_path / "nvme").mkdir()
    return {
        "SITE_ENV": pack(tmp_path, "exit 0"),
        "SITE_NVME": str(tmp_path / "nvme"),
        "STUB_sbcast": 'cp "$2" "$3"',
        "STUB_srun": _RUNS_HERE,
    }


def test_environment_and_code_go_to_the_nodes(tmp_path, packed):
    ended = train(tmp_path, **packed)
    assert ended.code == 0, ended.log
    nvme = tmp_path / "nvme"
    assert [Path(call.words[-1]).name for call in ended.named("sbcast")] == [
        "environment.tar",
        "code.77.0.tar",
    ]
    call = trained(ended)
    assert f"{nvme}/environment/bin/python" in call.words
    assert f"{nvme}/code.77.0/{PROGRAM}" in call.words
    assert (nvme / "code.77.0" / "megatron" / "config" / "presets.py").read_bytes() == (
        ROOT / "megatron" / "config" / "presets.py"
    ).read_bytes()
    assert not list(nvme.glob("*.tar")) + list(nvme.glob("*.part"))
    unpacked = [call for call in ended.named("srun") if "bash" in call.words]
    for call in unpacked:
        assert [call.value(flag) for flag in ("-N", "-n", "--ntasks-per-node")] == ["2", "2", "1"]


@pytest.mark.parametrize(
    "broken",
    [
        {"STUB_sbcast": 'cp "$2" "$3"; exit 1'},  # whole here, but not on every node
        # Part of the file, as after an unnoticed failure.
        {"STUB_sbcast": 'head -c 100 "$2" >"$3"'},
        {"SITE_NVME": "/dev/null/nowhere"},
    ],
)
def test_a_broken_broadcast_falls_back(tmp_path, packed, broken):
    ended = train(tmp_path, **{**packed, **broken})
    assert ended.code == 0, ended.log
    assert f"{tmp_path}/venv/bin/python" in trained(ended).words
    assert not (tmp_path / "nvme" / "environment").exists()


def test_an_environment_that_does_not_import_falls_back(tmp_path, packed):
    pack(tmp_path, "exit 1")
    ended = train(tmp_path, **packed)
    assert f"{tmp_path}/venv/bin/python" in trained(ended).words


def test_nodes_beyond_those_needed(tmp_path):
    """They wait for a restart within the job, or do nothing without one."""
    nodes = {"nodes": "a1,a2,a3", "NODES_NEEDED": "2"}
    call = trained(train(tmp_path, **nodes, MIN_NODES="1"))
    asked = [call.value(flag) for flag in ("-N", "-n", "--spare-ranks", "--min-ranks")]
    assert asked == ["3", "24", "8", "8"]
    call = trained(train(tmp_path, **nodes, MAX_RESTARTS="0"))
    assert (call.value("-N"), "--spare-ranks" in call.words) == ("2", False)
    ended = train(tmp_path, **nodes, MIN_NODES="1", MAX_RESTARTS="0")
    assert (ended.code, "MIN_NODES=1" in ended.log) == (2, True)
