"""Commands started by the scripts equal those of the check before submitting.

A stub of Python records them.
"""

import json
import re
import shlex
import sys

import pytest

from benchmarks.faults.frontier import FRONTIER, settings_of_site, submit
from benchmarks.faults.job import ROOT
from megatron.jobs.check_job import check
from tests.slurm.site import MARKS, write_python

pytestmark = MARKS

NODES = 2
# Each task writes its arguments and its environment; the check of the configuration before them
# writes nothing.
PYTHON = f"""#!{sys.executable} -S
import json, os, sys
if "SLURM_STEP_ID" in os.environ and sys.argv[1:2] == ["-u"]:
    with open(f"{{os.environ['CALLS']}}/{{os.environ['SLURM_PROCID']}}.json", "w") as file:
        json.dump({{"arguments": sys.argv[2:], "environ": dict(os.environ)}}, file)
"""
NEAREST = [4, 5, 2, 3, 6, 7, 0, 1]
"""Frontier's user guide: the device nearest to the cores of local ranks 0, 1, ..."""


def foretold(monkeypatch, words, settings):
    """Run tools/preflight.py check on a script; return the job and its findings by subject."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    job = check(words)
    return job, {about: (level, text) for level, about, text in job.findings}


campaign = pytest.mark.campaign("slurm")


# Slurm's start and a job beside other work; only a guard against a hang
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "script, recipe",
    [
        ("train_22b.sbatch", "frontier"),
        pytest.param("train_1.4b.sbatch", "paper", marks=campaign),
        pytest.param("train_175b.sbatch", "paper", marks=campaign),
        pytest.param("train_1t.sbatch", "frontier", marks=campaign),
    ],
)
def test_srun_starts_what_the_check_foretold(testbed, tmp_path, monkeypatch, script, recipe):
    (tmp_path / "net" / "hsn0").mkdir(parents=True)
    (tmp_path / "calls").mkdir()
    settings = write_python(tmp_path, PYTHON) | {
        "DEVICE": "gpu",
        "SITE_MODULES": "",
        "SITE_NET_FOLDER": str(tmp_path / "net"),
        "RECIPE": recipe,
        "CALLS": str(tmp_path / "calls"),
        "MASTER_PORT": "3442",
    }
    # A word with blanks, and one that a shell would expand.
    arguments = ["--mock-data", "--train-iters", "7", "--wandb-project", "a  b $HOME *"]
    job = submit(testbed, tmp_path, arguments, options=["-N", "2"], script=script, **settings)
    assert job.wait() == "COMPLETED", job.text()

    calls = [json.loads((tmp_path / "calls" / f"{task}.json").read_text()) for task in range(16)]
    words = ["-N", "2", str(FRONTIER / script), *arguments]
    site = {**settings_of_site(tmp_path), **settings, "SLURM_CONF": testbed.env["SLURM_CONF"]}
    training, findings = foretold(monkeypatch, words, site)
    assert findings["sbatch --test-only"][0] == "note", findings
    level, text = foretold(monkeypatch, ["-t", "13:00:00", *words], site)[1]["sbatch --test-only"]
    assert level == "error" and "time limit" in text
    assert all(call["arguments"] == calls[0]["arguments"] for call in calls)
    program, *flags = calls[0]["arguments"]
    assert program == str(ROOT / "pretrain_gpt.py")
    assert (training.words, training.nodes, training.tasks) == (flags, 2, 16)
    assert flags[-len(arguments) :] == arguments
    assert f"gpt-{script[6:-7]}{'-frontier' if recipe == 'frontier' else ''}" in flags
    # A shell would read the command in the job's log the same.
    (line,) = re.findall(r"(?m)^\+ srun .*pretrain_gpt\.py.*$", job.text())
    assert shlex.split(line)[-len(flags) :] == flags

    seen = [call["environ"] for call in calls]
    assert [int(env["ROCR_VISIBLE_DEVICES"]) for env in seen] == NEAREST * 2
    variables = {
        "MASTER_ADDR": "127.0.0.101",
        "MASTER_PORT": "3442",
        "MEGATRON_CLUSTER": "frontier",
        "NCCL_NET": "OFI",
        "FI_MR_CACHE_MONITOR": "kdreg2",
        "NCCL_SOCKET_IFNAME": "hsn0,hsn1,hsn2,hsn3",
        "FI_CXI_RDZV_PROTO": "alt_read",
    }
    assert all(variables.items() <= env.items() for env in seen)
