"""The processes of a run: what they are told, and that they end with their starter."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.parallel.processes import process_state
from megatron.planning.experiments import launch
from megatron.planning.experiments.launch import Step, slurm_command, start_here, start_step, step_environment
from tests.helpers.launching import ROOT
from tests.tuning.test_trial_runner import until

STUB = """
PYTHON=python CODE=/code DEVICE=cpu
launch() { echo "launch $*"; sleep "${NAP:-0}"; return 5; }
launch_training() { launch "$CODE/pretrain_gpt.py" "$@"; }
"""


def stub_site(folder: Path) -> Path:
    """A tree whose job.sh starts nothing."""
    (folder / "examples/frontier").mkdir(parents=True)
    (folder / "examples/frontier/job.sh").write_text(STUB)
    return folder


def test_a_step_is_launched_by_the_jobs_own_functions(tmp_path: Path) -> None:
    environ = {**os.environ, "MEGATRON_ROOT": str(stub_site(tmp_path / "site")), "POINT_CODE": "/nvme"}
    for limit, words in (
        (None, "/nvme/pretrain_gpt.py --a b"),
        (7, "/nvme/megatron/planning/experiments/tether.py 0 7 python -u /nvme/pretrain_gpt.py --distributed-backend "
            "gloo --a b"),
    ):  # fmt: skip
        step = Step("x", ["n1"], 1, 1, 60.0, memory_limit_bytes=limit)
        run_ = start_step(slurm_command(["--a", "b"]), step, tmp_path / "log", tmp_path / "tasks", environ=environ)
        until(run_.poll)
        assert run_.exit_codes == [5] and (tmp_path / "log").read_text() == f"launch {words}\n"


STARTER = (
    "import os, sys, time\nfrom pathlib import Path\n"
    "from megatron.planning.experiments.launch import Step, slurm_command, start_step\n"
    "folder = Path(sys.argv[1])\n"
    "run = start_step(slurm_command([]), Step('x', ['n1'], 1, 1, 60.0), folder / 'log', folder / 'tasks')\n"
    "print(run.processes[0].pid, flush=True)\ntime.sleep(600)\n"
)


def test_a_step_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    environ = {**os.environ, "MEGATRON_ROOT": str(stub_site(tmp_path / "site")), "NAP": "600"}
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path)], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    launcher = int(starter.stdout.readline())
    until(lambda: (tmp_path / "log").read_text().startswith("launch"))
    until(lambda: process_state(launcher) == "sleeping")
    starter.kill()
    starter.wait()
    starter.stdout.close()
    until(lambda: process_state(launcher) in ("gone", "dead"))


def test_what_a_step_is_told() -> None:
    """Slurm's own limit, a name to find it by, and nothing of the starter's own place."""
    step = Step("trial-7", ["n1", "n2"], 8, 7, 100.0, 60, 5)
    found = step_environment({"MASTER_ADDR": "old", "SRUN_FLAGS": "-l", "MASTER_PORT": "5000"}, step, Path("/x"))
    assert found["SRUN_FLAGS"] == "-l --time=3 --job-name=trial-7" and "MASTER_ADDR" not in found
    assert (found["HOSTS"], found["NODES"], found["MASTER_PORT"], found["MEMORY_LIMIT"]) == ("n1,n2", "2", "5007", "5")
    assert found["SRUN_WAIT"] == "60"
    wrapped = step_environment({"MASTER_PORT": "65530"}, step, Path("/x"))["MASTER_PORT"]
    assert wrapped == "1025", "no port is above 65535"
    assert "MEMORY_LIMIT" not in step_environment(found, Step("x", [], 1, 1, 1.0), Path("/x"))


def test_a_wish_to_end_that_was_lost_is_said_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by srun before its tasks have started. Force, which leaves no exit code of its own, is not needed."""
    monkeypatch.setattr(launch, "_ASK_AGAIN_S", 0.2)
    program = (
        "import signal, sys, time\nheard = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: heard.append(1) if len(heard) < 2 else sys.exit(7))\n"
        "print('ready', flush=True)\ntime.sleep(600)\ntime.sleep(600)"
    )
    run_ = start_here([sys.executable, "-c", program], 1, tmp_path / "log", tmp_path / "tasks", grace_s=600.0)
    until(lambda: not run_.poll() and "ready" in (tmp_path / "log").read_text())
    run_.stop()
    until(run_.poll)
    assert run_.exit_codes == [7]


# A Slurm with another step beside it, and a step that ends only when Slurm is told.
SLURM = {
    "squeue": 'echo 7.1 x-1; echo 7.2 x; echo "$*" >"$ASKED"',
    "scancel": 'echo "$*" >"$TOLD.new"; mv "$TOLD.new" "$TOLD"',
}
DEAF = 'launch_training() { trap "" TERM; echo launched; until [[ -e $TOLD ]]; do sleep 0.05; done; return 143; }\n'


@pytest.fixture
def deaf_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What Slurm was told is in this file."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, does in SLURM.items():
        (programs / name).write_text(f"#!/bin/bash\n{does}\n")
        (programs / name).chmod(0o755)
    (stub_site(tmp_path / "site") / "examples/frontier/job.sh").write_text(STUB + DEAF)
    for name, value in {
        "PATH": f"{programs}:{os.environ['PATH']}", "MEGATRON_ROOT": str(tmp_path / "site"), "SLURM_JOB_ID": "7",
        "ASKED": str(tmp_path / "asked"), "TOLD": str(tmp_path / "told"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return tmp_path / "told"


def test_what_srun_does_not_heed_slurm_is_told(
    deaf_step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_ASK_AGAIN_S", 0.2)
    step = Step("x", ["n1"], 1, 1, 60.0)
    run_ = start_step(slurm_command([]), step, tmp_path / "log", tmp_path / "tasks", grace_s=600.0)
    until(lambda: not run_.poll() and "launched" in (tmp_path / "log").read_text())
    run_.stop()
    assert not deaf_step.exists(), "first srun, which ends its tasks itself"
    until(run_.poll)
    assert run_.exit_codes == [143] and deaf_step.read_text() == "-s TERM 7.2\n"
    assert (tmp_path / "asked").read_text().startswith("-h -s -j 7 ")


@pytest.mark.slow
def test_slurm_ends_the_step_of_a_starter_that_was_killed(deaf_step: Path, tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    launcher = int(starter.stdout.readline())
    until(lambda: (tmp_path / "log").read_text().startswith("launched"))
    starter.kill()
    starter.wait()
    starter.stdout.close()
    until(lambda: process_state(launcher) in ("gone", "dead"))
    assert deaf_step.read_text() == "-s KILL 7.2\n"


def test_ranks_know_their_place_and_nothing_of_a_launcher(tmp_path: Path) -> None:
    program = "import os; print({k: os.environ.get(k) for k in ('RANK', 'WORLD_SIZE', 'SLURM_JOB_ID', 'A')})"
    run_ = start_here([sys.executable, "-c", program], 2, tmp_path / "log", tmp_path / "tasks",
                      environ={"SLURM_JOB_ID": "7", "A": "b", "PATH": os.environ["PATH"]})  # fmt: skip
    until(run_.poll)
    assert run_.exit_codes == [0, 0]
    told = [(tmp_path / "log").read_text(), (tmp_path / "tasks/task_1.err").read_text()]
    assert [eval(text) for text in told] == [
        {"RANK": str(rank), "WORLD_SIZE": "2", "SLURM_JOB_ID": None, "A": "b"} for rank in (0, 1)
    ]
