"""examples/local trains here; examples/lumi is Frontier's scripts with another site file."""

import os
import shlex
import sys

import pytest

from megatron.config import parse_args
from tests.examples.stubs import FRONTIER, shell
from tests.helpers.launching import ROOT

pytestmark = pytest.mark.slow

LOCAL = ROOT / "examples" / "local" / "train_local.sh"
LUMI = ROOT / "examples" / "lumi" / "site.env"


def bash(text, *arguments, **variables):
    inherited = {name: os.environ.get(name, "/") for name in ("PATH", "HOME")}
    return shell(
        "bash", "-c", text, "bash", *arguments, env={**inherited, "USER": "ada", **variables}
    )


def local(*arguments, **variables):
    return bash(f'bash {LOCAL} "$@"', *arguments, **{"PYTHON": sys.executable, **variables})


def test_one_process_and_several(tmp_path):
    """The command shown is the one that runs, and it resolves.

    The next start resumes where it ended.
    """
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    for arguments, settings, start, flags in (
        (
            (),
            {"PROCESSES": "1"},
            [],
            "--preset tiny --save /runs/local --load /runs/local --log-interval 10 --mock-data "
            "--train-iters 50 --eval-iters 0",
        ),
        (
            ("--preset", "tiny", "--train-iters", "5", "--data-path", "my corpus"),
            {"PROCESSES": "4", "PRESET": "", "RUN_NAME": "x"},
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"],
            "--save /runs/x --load /runs/x --log-interval 10 --preset tiny --train-iters 5 "
            "--data-path my\\ corpus",
        ),
    ):
        variables = {"SITE_RUNS": "/runs", "PYTHON": str(python), **settings}
        words = [*start, f"{ROOT}/pretrain_gpt.py", *shlex.split(flags)]
        shown = local(*arguments, DRY_RUN="1", **variables).stdout
        assert shlex.split(shown) == ["+", str(python), *words]
        assert local(*arguments, **variables).stdout.splitlines()[-len(words) :] == words
        parse_args(shlex.split(flags), int(settings["PROCESSES"]))


def on_lumi(script, *arguments, **variables):
    text = f'source {LUMI} && env -0 && printf "\\1" && bash {FRONTIER}/{script} "$@"'
    return bash(text, *arguments, DRY_RUN="1", **variables)


def test_lumi_is_the_same_body():
    known = {"SBATCH_ACCOUNT": "project_1", "SITE_ENV": str(LUMI), "SITE_VENV": sys.prefix}
    done = on_lumi("train_22b.sbatch", "--mock-data", **known)
    assert done.returncode == 0, done.stderr
    exported, _, commands = done.stdout.partition("\1")
    environ = dict(entry.split("=", 1) for entry in exported.split("\0") if "=" in entry)
    # Empty values cancel Frontier's settings in the header.
    assert [environ[name] for name in ("SBATCH_CONSTRAINT", "SBATCH_NETWORK", "SITE_NVME")] == [
        "",
        "",
        "",
    ]
    assert (environ["SBATCH_PARTITION"], environ["SITE_CLUSTER"], environ["FI_CXI_RDZV_PROTO"]) == (
        "standard-g",
        "lumi",
        "default",
    )
    assert "sbcast" not in commands  # no drive to send to
    last = commands.splitlines()[-1]
    assert "--gpus-per-node=8" in last and "--gpu-bind" not in last
    assert "--save /scratch/project_1/megatron-runs/" in last


def test_lumis_network_is_another_one(tmp_path):
    """A variable that is empty in LUMI's site file is unset in the job, unless the user sets it."""
    (tmp_path / "hsn0").mkdir()
    text = (
        f"source {LUMI} && source {FRONTIER}/env.sh && source {LUMI} && source "
        f"{FRONTIER}/env.sh && env -0"
    )
    known = {
        "SITE_NET_FOLDER": str(tmp_path),
        "SBATCH_ACCOUNT": "project_1",
        "SLURM_JOB_NUM_NODES": "2",
    }
    for variables in ({}, {"NCCL_NET_GDR_LEVEL": "PHB", "FI_MR_CACHE_MONITOR": "kdreg2"}):
        environ = dict(
            entry.split("=", 1)
            for entry in bash(text, **known, **variables).stdout.split("\0")
            if "=" in entry
        )
        network = {
            name: environ[name]
            for name in ("NCCL_NET_GDR_LEVEL", "FI_MR_CACHE_MONITOR")
            if name in environ
        }
        assert network == (variables or {"FI_MR_CACHE_MONITOR": "userfaultfd"})
        assert environ["NCCL_CROSS_NIC"] == "1"


def test_lumi_asks_for_its_own_account():
    done = bash(f"source {LUMI}")
    assert done.returncode == 2
    assert f"of {LUMI}" in done.stderr
