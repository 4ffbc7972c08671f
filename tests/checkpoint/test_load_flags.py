"""Loading flags and their combinations through pretrain_gpt.py: the state after the first step.

The learning rate of the step is lost in rounding, so that the loaded weights are found in the next
checkpoint. The optimizer's step count shows whether its state was loaded.
"""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.find import find_folder, open_checkpoint
from megatron.metrics_file import read_records
from megatron_inspection.checkpoint import contents, read_whole
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.slow

SMALL = (
    "--micro-batch-size 2 --global-batch-size 4 --mock-data --make-vocab-size-divisible-by 8 "
    "--log-interval 1 --eval-iters 0 --num-workers 0"
)
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --tokenizer-type NullTokenizer --vocab-size 30 --num-experts 2"
)
STEP = "--lr 1e-30 --min-lr 0"
# Run length and flags; then iterations, optimizer steps and the iteration that was loaded, or the
# words of a refusal. After "args" the command line has no flags of the model.
RUNS = {
    "plain": ("5", (5, 5, 4)),
    "no rng": ("5 --no-load-rng", (5, 5, 4)),
    "tag": ("3 --load-tag 2", (3, 3, 2)),
    "no optim": ("5 --no-load-optim", (5, 1, 4)),
    "reset": ("1 --reset-iteration", (1, 5, 4)),
    "finetune": ("1 --finetune", (1, 1, 4)),
    "freeze": ("5 --freeze embedding layers.0.mlp", (5, 5, 4)),
    "lora": ("1 --finetune --lora-rank 2", (1, 1, 4)),
    "lora, args": ("5 --no-load-optim --use-checkpoint-args --lora-rank 2", (5, 1, 4)),
    "lora, optim": ("5 --lora-rank 2", "layers.0.self_attention.dense.lora_a | --finetune"),
    "more": ("1 --finetune --qk-layernorm --load-missing ?_layernorm", (1, 1, 4)),
    "more, args": (
        "5 --no-load-optim --use-checkpoint-args --qk-layernorm --load-missing *.[qk]_layernorm",
        (5, 1, 4),
    ),
    "more, not named": (
        "1 --finetune --qk-layernorm --load-missing k_layernorm",
        "q_layernorm.weight | layers.1",
    ),
    "args": ("5 --use-checkpoint-args", (5, 5, 4)),
    "benchmark": (
        "5 --moe-router-force-load-balancing",
        "iter_0000004 | --moe-router-force-load-balancing | --finetune",
    ),
    "benchmark, finetune": ("1 --moe-router-force-load-balancing --finetune", (1, 1, 4)),
    "args, finetune": ("1 --use-checkpoint-args --hidden-size 16 --finetune", (1, 1, 4)),
    "args, other sizes": (
        "5 --use-checkpoint-args --hidden-size 24",
        "--hidden-size 24 | hidden_size 16 | iter_0000004/config.json",
    ),
    "other sizes": (
        "5 --hidden-size 24 --swiglu",
        "--hidden-size | 16 | 24 | --swiglu | --use-checkpoint-args | iter_0000004",
    ),
    "other sizes, finetune": ("1 --num-layers 1 --finetune", "--num-layers"),
}
REFUSED = {name: message for name, (_, message) in RUNS.items() if isinstance(message, str)} | {
    "absent, exit": "absent",
    "empty, exit": "empty",
    "no such tag": "iter_0000003 | iter_0000002 | iter_0000004",
    "broken, tag": "iter_0000004 | __0_0.distcp",
    "all broken": "iter_0000004/state.json | iter_0000002/manifest.json",
}


def started(flags):
    """Run in this process; return the exit code and the output."""
    from megatron import program

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        model = "" if "--use-checkpoint-args" in flags else MODEL
        code = program.run(f"{SMALL} {model} {flags}".split())
    return code, output.getvalue()


def all_runs(rank, directory):
    root = Path(directory)
    base = root / "base"
    broken = root / "broken"
    code, output = started(f"--save {base} --save-interval 2 --train-iters 4 --lr 1e-2")
    assert code == 0, output
    ended = {}

    def resume(name, folder, flags="", length="5"):
        ended[name] = started(f"--load {folder} --train-iters {length} {STEP} {flags}")

    for name, (flags, _) in RUNS.items():
        length, _, flags = flags.partition(" ")
        resume(name, base, f"--save {root / name.replace(' ', '_')} {flags}", length)
    (root / "empty").mkdir()
    resume("empty", root / "empty")
    resume("absent, exit", root / "absent", "--exit-on-missing-checkpoint")
    resume("empty, exit", root / "empty", "--exit-on-missing-checkpoint")
    resume("no such tag", base, "--load-tag 3")
    shutil.copytree(base, broken)
    file = broken / "iter_0000004" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 16
    file.write_bytes(data)
    resume("broken", broken, f"--metrics-file {root}/broken.jsonl")
    resume("broken, args", broken, "--use-checkpoint-args")
    resume("broken, tag", broken, "--load-tag 4")
    (broken / "iter_0000004" / "state.json").write_text("{}")
    (broken / "iter_0000002" / "manifest.json").unlink()
    resume("all broken", broken)
    return ended


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("flags")


@pytest.fixture(scope="module")
def ended(root):
    (outcomes,) = run_processes(1, all_runs, str(root))
    return outcomes


def weights(folder):
    checkpoint = contents(folder)
    return {n: read_whole(checkpoint, n) for n in checkpoint.stored if n.startswith("master.")}


def assert_same(first, second):
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def test_what_is_loaded(root, ended):
    for name in RUNS.keys() - REFUSED.keys():
        iteration, steps, loaded = RUNS[name][1]
        assert ended[name][0] == 0, ended[name]
        folder = find_folder(root / name.replace(" ", "_"))
        state = open_checkpoint(folder).state
        assert state["iteration"] == state["state"]["iteration"] == iteration, name
        assert state["state"]["consumed_samples"] == 4 * iteration, name
        assert state["engine"]["optimizer_step"] == steps, name
        before = weights(root / "base" / f"iter_{loaded:07d}")
        after = weights(folder)
        new = {n: after.pop(n) for n in list(after) if n not in before}
        assert len(new) == (8 if name.startswith(("lora", "more")) else 0), name
        assert all((x.abs().max() > 1e-9) == n.endswith(("a", "weight")) for n, x in new.items())
        assert_same(after, before)
    # The checkpoint's settings are kept in the next one.
    stored = json.loads((find_folder(root / "args") / "config.json").read_text())["model"]
    assert (stored["hidden_size"], stored["num_layers"]) == (16, 2)


def test_what_is_refused(ended):
    for name, words in REFUSED.items():
        code, output = ended[name]
        error = "ConfigError" if name.startswith("args") else "CheckpointError"
        assert code == 2 and error in output and "Traceback" not in output, output
        assert all(word in output for word in words.split(" | ")), output


def test_a_broken_checkpoint_is_told_and_the_one_before_is_taken(root, ended):
    assert ended["empty"][0] == 0 and "iteration        1/       5" in ended["empty"][1]
    for name in ("broken", "broken, args"):
        code, output = ended[name]
        assert code == 0 and "iteration        2/" not in output
        assert "iteration        3/       5" in output
    (record,) = read_records(root / "broken.jsonl", "rejected_checkpoint")
    assert record["folder"].endswith("iter_0000004") and record["instead"].endswith("iter_0000002")
    assert "__0_0.distcp" in record["reason"]
