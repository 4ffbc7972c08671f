"""Commands of a login node without torch, in one process that cannot import torch or DeepSpeed."""

import pytest

from tests.helpers.fresh_python import run_python
from tests.helpers.processes import run_processes

CODE = '''
import contextlib, importlib, io, pkgutil, sys

def forbid(*names):
    """Whoever imports one of these gets an ImportError."""
    for name in names:
        assert name not in sys.modules, f"{{name}} was loaded"
        sys.modules[name] = None

forbid("torch", "deepspeed", "transformers")
for name in {light!r}:
    importlib.import_module(name)
from megatron.config import parse_args
parse_args("--preset tiny --mock-data --train-iters 1".split())

forbid("optuna", "sklearn", "scipy", "deephyper", "matplotlib")  # what learns or draws is imported when it is asked for
for room in ("config", "planner", "jobs"):
    package = importlib.import_module(f"megatron.{{room}}")
    for found in pkgutil.walk_packages(package.__path__, f"{{package.__name__}}."):
        follows = found.name.startswith(("megatron.planner.dryrun.", "megatron.planner.calibration."))
        if not follows and not found.name.endswith(("recorder", "tensors", "parent_watch", "plots", "check_nodes")):
            importlib.import_module(found.name)

def run(name, words, code=0):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            ended = importlib.import_module(name).main(words)
        except SystemExit as end:
            ended = end.code
    assert (ended or 0) == code and said.getvalue(), (name, words, ended, said.getvalue())

for name, words in {tools!r}:
    run(name, words)
for name in {helps!r}:
    run(f"tools.{{name}}", ["--help"])
'''
# These need only Python itself.
LIGHT = (
    "megatron megatron.errors megatron.drawing megatron.config megatron.parallel.launch "
    "megatron.parallel.topology megatron.parallel.rank_mapping megatron.model.formulas "
    "megatron.model.stages megatron.kernels.choose megatron.training megatron.planner.cluster "
    "megatron.planner.placement megatron.planner.rates megatron.planner.channels "
    "megatron.jobs.scaling megatron.jobs.runner megatron.jobs.space"
).split()
HELPS = (
    "plan tune preflight show_placement show_schedule report run_experiment "
    "preprocess_data merge_datasets build_corpus train_tokenizer"
).split()


def write_traces(rank, check, placement):
    from tools import preflight, show_placement

    assert (preflight.main(check) or 0, show_placement.main(placement)) == (0, 0)


@pytest.mark.slow
def test_a_login_node(tmp_path, monkeypatch):
    """Tools run from cached traces, as on a login node beside an environment that has torch."""
    monkeypatch.setenv("MEGATRON_TRACE_CACHE", str(tmp_path / "traces"))
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH -A a -N 1 -t 1:00:00\n")
    command = (
        "srun -n 8 python pretrain_gpt.py --preset tiny --mock-data --global-batch-size 16 "
        "--train-iters 3"
    )
    tools = [
        (
            "tools.preflight",
            ["check", "--cluster", "frontier", str(script), "--", *command.split()],
        ),
        ("tools.preflight", ["measure", "--help"]),
        (
            "tools.show_placement",
            "--preset gpt-22b-frontier --world-size 16 --cluster frontier".split(),
        ),
        ("pretrain_gpt", "--preset gpt-22b --world-size 8 --print-config".split()),
        ("pretrain_gpt", ["--help"]),
    ]
    cache = {"MEGATRON_TRACE_CACHE": str(tmp_path / "traces")}
    run_processes(1, write_traces, tools[0][1], tools[2][1], env=cache)
    run_python(CODE.format(light=LIGHT, tools=tools, helps=HELPS))
