"""examples/local trains here; examples/lumi is Frontier's scripts with another site file."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.examples.stubs import FRONTIER
from tests.helpers.launching import ROOT

LOCAL = ROOT / "examples" / "local" / "train_local.sh"
LUMI = ROOT / "examples" / "lumi" / "site.env"


def bash(text: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", text, "bash", *arguments], capture_output=True, text=True, timeout=120, check=False,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "USER": "ada", **variables},
    )  # fmt: skip


def local(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return bash(f'bash {LOCAL} "$@"', *arguments, PYTHON=sys.executable, **variables)


def test_one_process_and_several():
    done = local(PROCESSES="1", DRY_RUN="1", SITE_RUNS="/runs")
    assert done.stdout == (
        f"+ {sys.executable} {ROOT}/pretrain_gpt.py --preset tiny --save /runs/local --load /runs/local "
        "--log-interval 10 --mock-data --train-iters 50 --eval-iters 0\n"
    )
    done = local("--data-path", "my corpus", PROCESSES="4", DRY_RUN="1", SITE_RUNS="/runs", PRESET="", RUN_NAME="x")
    assert done.stdout == (
        f"+ {sys.executable} -m torch.distributed.run --standalone --nproc-per-node 4 {ROOT}/pretrain_gpt.py "
        "--save /runs/x --load /runs/x --log-interval 10 --data-path my\\ corpus\n"
    )


def test_local_mistakes():
    done = local(PROCESSES="two", DRY_RUN="1")
    assert (done.returncode, "PROCESSES=two" in done.stderr) == (2, True)
    done = bash(f"bash {LOCAL}", PYTHON="/nowhere/python")
    assert (done.returncode, "no Python at PYTHON=/nowhere/python" in done.stderr) == (2, True)


@pytest.mark.slow
def test_local_trains_and_goes_on(tmp_path):
    flags = ("--mock-data", "--train-iters", "4", "--eval-iters", "0", "--log-interval", "1")
    first = local(*flags, "--exit-interval", "2", PROCESSES="1", SITE_RUNS=str(tmp_path))
    assert first.returncode == 0, first.stderr
    second = local(*flags, PROCESSES="1", SITE_RUNS=str(tmp_path))
    assert second.returncode == 0, second.stderr
    assert "iteration        3/       4" in second.stdout and "iteration        2/" not in second.stdout


def on_lumi(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    text = f'source {LUMI} && env -0 && printf "\\1" && bash {FRONTIER}/{script} "$@"'
    return bash(text, *arguments, DRY_RUN="1", **variables)


def test_lumi_is_the_same_body():
    done = on_lumi("train_22b.sbatch", "--mock-data", SBATCH_ACCOUNT="project_1", SITE_ENV=str(LUMI))
    assert done.returncode == 0, done.stderr
    exported, _, commands = done.stdout.partition("\1")
    environ = dict(entry.split("=", 1) for entry in exported.split("\0") if "=" in entry)
    # Empty values take back what the header asks of Frontier.
    assert [environ[name] for name in ("SBATCH_CONSTRAINT", "SBATCH_NETWORK", "SITE_NVME")] == ["", "", ""]
    assert (environ["SBATCH_PARTITION"], environ["SITE_CLUSTER"], environ["FI_CXI_RDZV_PROTO"]) == (
        "standard-g", "lumi", "default",
    )  # fmt: skip
    assert "sbcast" not in commands  # no drive to send to
    last = commands.splitlines()[-1]
    assert "--gpus-per-node=8" in last and "--gpu-bind" not in last
    assert "--save /scratch/project_1/megatron-runs/" in last


def test_lumi_asks_for_its_own_account():
    done = bash(f"source {LUMI}")
    assert done.returncode == 2
    assert f"of {LUMI}" in done.stderr
