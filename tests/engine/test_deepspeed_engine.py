"""DeepSpeed's start-up (no compilation, output or side effects), its arguments and its engine."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron.engine import deepspeed_engine
from megatron.engine.deepspeed_engine import deepspeed_json
from megatron.metrics_file import read_records
from tests.engine import toy
from tests.helpers.launching import ROOT, TINY, launch

PROGRAM = """
import contextlib, io, json, logging, os, sys
import torch
compile_before = torch.compile
from megatron import parse_args, pretrain
for implementation in ("torch", "fused"):
    with contextlib.redirect_stdout(io.StringIO()):
        pretrain(parse_args([*sys.argv[1:], "--optimizer-implementation", implementation]))
imported = [name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy") if name in sys.modules]
from megatron.engine.engine import Engine
from megatron.parallel.topology import Topology
from tests.engine import toy
from tests.helpers.launching import ROOT, TINY
topology = Topology.create()
engine = Engine(toy.config("bf16"), topology, toy.build(topology))
toy.backward(engine, topology, 0)
engine.step(0.1)
code = [m for m in sys.modules if m.startswith("torch._inductor.codegen")]
function = torch.compile(lambda x: x + 1, backend="eager")
print(json.dumps({
    "compile": torch.compile is compile_before and type(function).__name__,
    "compiled": int(function(torch.ones(()))),
    "disabled": os.environ.get("TORCH_COMPILE_DISABLE"),
    "dynamo disabled": torch._dynamo.config.disable,
    "imported": [*imported, *(name for name in ("mpi4py",) if name in sys.modules)],
    "deepspeed": [int(n) for n in sys.modules["deepspeed"].__version__.split("+")[0].split(".")],
    "logging": logging.root.manager.disable,
    "extensions": os.environ["TORCH_EXTENSIONS_DIR"],
    "inductor code": code,
    "variables": [v for v in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if v in os.environ],
}))
"""


@pytest.mark.slow
def test_one_process_without_launcher(tmp_path):
    """Start-up does not import torch's compiler or its distributed tensors.

    Each costs a start 0.4 s and more (with sympy, for checkpoints).
    """
    set_by_others = (
        "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT DS_ACCELERATOR TORCH_EXTENSIONS_DIR"
    ).split()
    env = {k: v for k, v in os.environ.items() if k not in set_by_others}
    env |= {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, *TINY, "--train-iters", "1"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert len(lines) == 1, "DeepSpeed's own messages are kept away"
    assert "deepspeed" not in done.stderr.lower()
    report = json.loads(lines[0])
    assert report["extensions"] == str(tmp_path / f"torch_extensions_{os.getuid()}")
    assert not Path(report["extensions"]).exists(), "nothing was compiled"
    assert report["compile"] == "function" and report["compiled"] == 2
    assert report["disabled"] is None and report["dynamo disabled"] is False
    assert report["variables"] == [], "a later launch in this process must not read them"
    assert report["logging"] == 0
    if report["deepspeed"] >= [0, 19, 8]:  # older ones import torch's compiler themselves
        assert (report["imported"], report["inductor code"]) == ([], [])


@pytest.mark.slow
def test_what_mpirun_says_beside_another_launcher():
    """DeepSpeed asserts that mpirun's local rank equals that of the launcher.

    Here the launcher that counts was chosen before.
    """
    (outcome,) = launch(
        1, [*TINY, "--train-iters", "1"], env={"LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    )
    assert outcome is not None and outcome.code == 0, outcome


def test_settings_win_over_what_is_passed_through():
    extra = {
        "zero_optimization": {"stage": 3, "round_robin_gradients": True, "sub_group_size": 5},
        "tensorboard": {"enabled": False},
    }
    translated = deepspeed_json(toy.config("bf16", extra=extra))
    assert translated["tensorboard"] == {"enabled": False}
    zero = translated["zero_optimization"]
    assert (zero["stage"], zero["round_robin_gradients"], zero["sub_group_size"]) == (0, True, 5)
    assert not translated["bf16"]["enabled"] and translated["gradient_clipping"] == 0
    assert extra["zero_optimization"]["stage"] == 3, "the user's settings are not changed"


def test_the_versions_are_those_of_the_project():
    """They are not read from the installed package: after `git pull` it states the older ones."""
    tested = (ROOT / "requirements/constraints.txt").read_text().split()
    assert f"deepspeed=={deepspeed_engine.NEWEST_TESTED}" in tested
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"deepspeed>={deepspeed_engine.OLDEST_TESTED}" in lines
    assert f"pydantic>={deepspeed_engine.OLDEST_PYDANTIC}" in lines


def read_csv(file):
    rows = [line.split(",") for line in file.read_text().split()]
    return [(int(step), float(value)) for step, value in rows if step != "step"]


@pytest.mark.slow
def test_deepspeed_reports_what_its_json_asks_for(tmp_path):
    """Its reports, over a resume, are those of the run, written once for all ranks."""
    asked = {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"},
        "comms_logger": {"enabled": True, "prof_all": True},
        "flops_profiler": {"enabled": True, "profile_step": 3, "output_file": f"{tmp_path}/flops"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(asked))
    words = [*TINY, "--pipeline-model-parallel-size", "2"]
    reports = ["--deepspeed_config", f"{tmp_path}/ds.json", "--save", f"{tmp_path}/saved"]
    steps = []
    for name, more in (
        ("first", ["--exit-interval", "2"]),
        ("second", ["--load", f"{tmp_path}/saved"]),
    ):
        file = tmp_path / f"{name}.jsonl"
        outcomes = launch(2, [*words, *reports, *more, "--metrics-file", str(file)])
        assert all(outcome is not None and outcome.code == 0 for outcome in outcomes), outcomes
        steps += read_records(file, "iteration")
    assert len(steps) == 4
    for name, key in (("train_loss", "lm_loss"), ("lr", "learning_rate")):
        written = read_csv(tmp_path / f"csv/Train_Samples_{name}.csv")
        assert written == [(s["consumed_samples"], s[key]) for s in steps]
    # two layers of rank 0 with 64 tokens: linear layers, and attention of all pairs, twice
    expected = 2 * (64 * 12 * 32**2 + 2 * 2 * 32**3)
    (macs,) = re.findall(r"fwd MACs per GPU: +([\d.]+) MMACs", (tmp_path / "flops").read_text())
    assert float(macs) * 1e6 == pytest.approx(expected, abs=5e3)
    # each of two steps sums a loss over all ranks: three numbers of fp64
    (rows,) = (o.output for o in outcomes if o is not None and "Comm. Op" in o.output)
    assert re.search(r"^ +24\.0 B +2 ", rows, re.M), rows
