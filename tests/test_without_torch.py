"""What a login node without torch can do: one process that cannot import torch or DeepSpeed does all of it."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.fresh_python import run_python

CODE = '''
import contextlib, importlib, io, pkgutil, sys

def forbid(*names):
    """Whoever imports one of these gets an ImportError."""
    for name in names:
        assert name not in sys.modules, f"{{name}} was loaded"
        sys.modules[name] = None

forbid("torch", "deepspeed", "transformers", "numpy")
for name in {light!r}:
    importlib.import_module(name)
from megatron.config import parse_args
parse_args("--preset tiny --mock-data --train-iters 1".split())
del sys.modules["numpy"]

forbid("optuna", "sklearn", "scipy", "deephyper", "matplotlib")  # what learns or draws is imported when it is asked for
learning = ("kernels", "surrogate", "optuna_search", "deephyper_search")
for room in ("config", "planning", "tuning", "preflight.check"):
    package = importlib.import_module(f"megatron.{{room}}")
    for found in pkgutil.walk_packages(package.__path__, f"{{package.__name__}}."):
        if found.name.split(".")[-1] not in learning and not found.name.endswith(("tether", "copies", "plots")):
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
# Need nothing but Python itself.
LIGHT = (
    "megatron megatron.errors megatron.drawing megatron.config megatron.parallel.launch megatron.parallel.topology "
    "megatron.parallel.placing megatron.model.formulas "
    "megatron.model.stages megatron.kernels.availability megatron.kernels.choose megatron.training "
    "megatron.planning.cluster megatron.planning.links megatron.planning.placement megatron.planning.rates "
    "megatron.planning.channels megatron.planning.experiments.runner megatron.planning.scaling.plots "
    "megatron.preflight.measure.command megatron.tuning.types megatron.tuning.space_file "
    "megatron.tuning.search.optimizer"
).split()
HELPS = (
    "plan tune preflight show_recipe show_placement show_schedule report_scaling run_experiment "
    "preprocess_data merge_datasets build_corpus train_tokenizer"
).split()


@pytest.mark.slow
def test_a_login_node(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH -A a -N 1 -t 1:00:00\nsrun -n 8 -c 7 --gpus-per-task=1 "
        "python pretrain_gpt.py --preset tiny --mock-data --global-batch-size 16 --train-iters 3\n"
    )
    (tmp_path / "pretrain_gpt.py").touch()
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 500"
    flags = f"{sizes} --max-position-embeddings 64 --tokenizer-type NullTokenizer --lr 1e-3"
    space = tmp_path / "space.toml"
    space.write_text(f"""
title = "two layouts"
flags = {flags.split()}
[parameters]
pp = [1, 2]
[derived]
gbs = "8"
[trial]
iterations = 3
warm_up = 1
""")
    plan = f"--nodes 1 --processes 1 --global-batch 16 --fix tp=2 mbs=1 -- {sizes}"
    tools = [
        ("tools.plan", plan.split()),
        ("tools.tune", f"--space {space} --processes 2 --cluster examples/local/two-cores.toml --dry-run".split()),
        ("tools.preflight", ["check", "--cluster", "frontier", str(script)]),
        ("tools.preflight", ["measure", "--help"]),
        ("tools.run_experiment", "weak --model 175b --dry-run".split()),
        ("tools.show_recipe", "--preset gpt-22b-frontier --world-size 128".split()),
        ("tools.show_placement", "--preset gpt-22b-frontier --world-size 16 --cluster frontier".split()),
        ("pretrain_gpt", "--preset gpt-22b --world-size 8 --print-config".split()),
        ("pretrain_gpt", ["--help"]),
    ]
    run_python(CODE.format(light=LIGHT, tools=tools, helps=HELPS))
