"""User-defined pieces of examples/extend train as in one process, and are dry-run and planned.

Tolerances are those of the parity grid (tests/parity/test_grid.py). The optimizer takes the sign of
the momentum of vectors, which rounding flips where it is as small as a rounding error: there a
weight may be off by two steps.
"""

import contextlib
import gc
import io
import json
from functools import cache

import numpy as np
import pytest
import torch

import megatron
from megatron import program
from megatron.config import Config
from megatron.data.datasets import build_datasets
from megatron.data.sampler import make_micro_batch
from megatron.engine.optimizer_state import optimizer_state
from megatron.errors import ConfigError, DataError
from tests.helpers.launching import ROOT, launch
from tests.helpers.processes import run_processes
from tests.helpers.tiny import MODEL, one_stage, records, values
from tests.helpers.training import STEPS, assemble, train_plainly
from tests.parity.cases import layout, train
from tools import plan

FOLDER = "examples/extend"
# Without biases: softmax is invariant under that of the keys, whose gradient is therefore pure
# rounding.
SIGNS = dict(lr=1e-3, adam_beta1=0.9, add_bias_linear=False)
RUNS = {
    "layer": layout(tp=2, cp=2, sp=True, window_size=(5, 0))[2],
    "schedule": layout(pp=2, dp=2)[2],
    "optimizer": layout(tp=2, dp=2, **SIGNS)[2],
}
FILES = {name: str(ROOT / FOLDER / f"{name}.py") for name in (*RUNS, "data")}
TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --vocab-size 256 --micro-batch-size 1 --global-batch-size 8 "
    "--train-iters 3 --lr 1e-3 --log-interval 1 --eval-iters 0 --num-workers 0"
).split()
CUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel".split()
TEXT = ["--data-path", str(ROOT / "docs/frontier.md")]
# Three micro-batches: more than a stage would hold of them in the usual order.
DRY = (
    "--num-layers 2 --pipeline-model-parallel-size 2 --global-batch-size 3 --world-size 2 --dry-run"
).split()
PLAN = (
    "--cluster frontier --nodes 1 --layout tp=2,pp=2,chunks=1,mbs=1 --explain --global-batch 16 --processes 1 "
    "--fix tp=2 pp=2 mbs=1 recompute=none zero=1 sp=on chunks=1 -- "
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--vocab-size 50257"
).split()


def words(name):
    return [*TINY, *(TEXT if name == "data" else ["--mock-data"]), "--pieces", FILES[name]]


@cache
def on_four():
    try:
        return run_processes(
            4, train, [{**fields, "pieces": FILES[name]} for name, fields in RUNS.items()]
        )
    except Exception as error:  # of all their tests, without another try
        return error


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_one_process(name):
    outcomes = on_four()
    if isinstance(outcomes, Exception):
        raise outcomes
    ranks = [runs[list(RUNS).index(name)] for runs in outcomes]
    expected = train_plainly({**RUNS[name], "pieces": FILES[name]})
    for rank in ranks:
        for (loss, norm, *_), (loss_1, norm_1) in zip(
            rank["history"], expected["history"], strict=True
        ):
            assert loss == pytest.approx(loss_1, rel=5e-6)
            assert norm == pytest.approx(norm_1, rel=2e-5)
    parameters = assemble([rank["parameters"] for rank in ranks])
    assert parameters.keys() == expected["parameters"].keys()
    differences = [np.abs(parameters[n] - values) for n, values in expected["parameters"].items()]
    turned, most = (1e-4, 2 * STEPS * SIGNS["lr"]) if name == "optimizer" else (0.0, 5e-6)
    assert max(d.max() for d in differences) <= most
    assert sum((d > 5e-6).sum() for d in differences) <= turned * sum(d.size for d in differences)


def good(outcomes):
    for outcome in outcomes:
        assert outcome is not None and outcome.code == 0, outcome


@pytest.mark.slow
def test_data_of_ones_own_train_as_in_one_process_and_go_on_from_a_checkpoint(
    tmp_path,
):
    flags = words("data")
    one = tmp_path / "one"
    cut = tmp_path / "cut"
    good(launch(1, [*flags, "--save", str(one)]))
    good(launch(4, [*flags, *CUT, "--save", str(cut), "--exit-interval", "2"]))
    good(launch(1, [*flags, "--save", str(cut), "--load", str(cut)]))
    losses = [np.ravel(values(records(run)["iteration"], "lm_loss")) for run in (cut, one)]
    assert len(losses[1]) == 3 and losses[0] == pytest.approx(losses[1], rel=5e-6)


@pytest.mark.slow
def test_distillation_from_a_teacher_equal_to_the_student_is_half_its_cross_entropy(tmp_path):
    """The second step of a run, and the first of a student that begins with its weights.

    The student is divided; its teacher is not. Evaluation measures the same loss.
    """
    teacher, plain, student = (tmp_path / name for name in ("teacher", "plain", "student"))
    flags = [*TINY, "--mock-data", "--eval-iters", "1", "--eval-interval", "2"]
    flags += "--hidden-dropout 0 --attention-dropout 0 --calculate-per-token-loss".split()
    good(launch(1, [*flags, "--save", str(teacher), "--exit-interval", "1"]))
    flags += ["--load", str(teacher), "--save"]
    good(launch(1, [*flags, str(plain)]))
    pieces = ["--pieces", str(ROOT / FOLDER / "distill.py")]
    outcomes = launch(4, [*flags, str(student), *CUT, *pieces], env={"TEACHER": str(teacher)})
    good(outcomes)
    assert outcomes[0] is not None and "lm loss" not in outcomes[0].output
    runs = records(plain), records(student)
    expected, distilled = (run["iteration"][0] for run in runs)
    parts = distilled["components"]
    assert distilled["iteration"] == expected["iteration"] == 2
    assert parts["cross entropy"] == pytest.approx(expected["lm_loss"], rel=1e-5)
    assert abs(parts["distillation kl"]) < 1e-6
    for record in (*runs[1]["iteration"], *runs[1]["validation"]):
        assert record["lm_loss"] == pytest.approx(
            0.5 * sum(record["components"].values()), rel=1e-5
        )
        assert record["loss_name"] == "loss" and "perplexity" not in record
    assert runs[1]["validation"][0]["components"]["distillation kl"] > 1e-6


def shown(rank):
    """Return the memory of a dry run, and a plan, with each file of pieces and with none."""

    def printed(command, arguments):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert command(arguments) == 0
        return out.getvalue()

    gc.freeze()  # a dry run collects its garbage often: not that of the imports too
    texts = {}
    for name in ("", *FILES):
        run = words(name) if name else [*TINY, "--mock-data"]
        dry = printed(program.run, [*run, *DRY])
        option = ["--pieces", FILES[name]] if name else []
        texts[name] = dry.split("MiB on each device")[1], printed(plan.main, [*PLAN, *option])
    return texts


@pytest.fixture(scope="module")
def planned():
    (texts,) = run_processes(1, shown)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_each_is_dry_run_and_planned(name, planned):
    """Memory and plan differ from those of the project's own pieces, except for data.

    The examples have other parameters, passes that wait, or less state.
    """
    for extended, plain in zip(planned[name], planned[""], strict=True):
        assert (extended == plain) == (name == "data")


@pytest.mark.slow
def test_a_model_with_a_layer_of_ones_own_is_opened_by_every_tool(tmp_path):
    """The loss of tools/evaluate.py on two ranks is that of the model in this process."""
    saved = str(tmp_path / "saved")
    pieces = ["--pieces", FILES["layer"]]
    tokenizer = ["--mock-data", "--tokenizer-type", "NullTokenizer"]
    good(launch(1, [*TINY, *tokenizer, *pieces, "--save", saved]))
    with pytest.raises(ConfigError, match="ParallelLayer"):
        megatron.load_model(saved)
    trained = megatron.load_model(saved, pieces=FILES["layer"])
    ids = [256, *range(40, 60)]  # the first separates documents
    batch = make_micro_batch(np.array([ids]))
    with torch.no_grad():
        logits = trained.chunks["0"].logits(batch, None)[:, 0, :257]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).item()
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, ids[1:])))
    load = ["--load", saved, *pieces]
    flags = [*load, "--text", str(text), "--format", "json", "--tensor-model-parallel-size", "2"]
    good(outcomes := launch(2, flags, script="tools/evaluate.py"))
    result = next(line for line in outcomes[0].output.splitlines() if line.startswith("{"))
    assert json.loads(result)["loss"] == pytest.approx(expected, rel=1e-5)
    words = ["--prompt", "40 41", "--tokens", "3"]
    good(launch(1, [*load, *words], script="tools/generate_text.py"))
    (outcome,) = launch(1, ["--load", saved, *words], script="tools/generate_text.py")
    assert outcome.code == 2 and "ParallelLayer" in outcome.output
    words = [saved, str(tmp_path / "hf"), "--to", "hf", *pieces]
    (outcome,) = launch(1, words, script="tools/convert_checkpoint.py")
    assert outcome.code == 2 and "layers.0.dense.weight" in outcome.output


TOLD = """
import megatron

class Tell(megatron.Callback):
    def on_start(self, run):
        self.seen = ["start"]
    def figures(self, run):
        return {"scalars": {"seen": len(self.seen)}}
    def on_step(self, run, step):
        self.seen.append(f"step {step.iteration}")
    def on_log(self, run, figures):
        self.seen.append(f"log {figures.iteration}")
    def on_save(self, run):
        self.seen.append(f"save {run.saves.saved_iteration}")
    def on_end(self, run):
        self.seen.append("end")
    def close(self):
        print("told:", ", ".join(self.seen))

class Second(megatron.Callback):
    def figures(self, run):
        return {"scalars": {"second": 2.5}}

def rate(iterations, samples, tokens, settings):
    assert (samples, tokens) == (8 * iterations, 256 * iterations)
    return settings.lr / (1 + iterations)

if __name__ == "__main__":
    megatron.main(callbacks=[Tell(), Second()], learning_rate=rate)
"""


@pytest.mark.slow
def test_callbacks_of_a_script_of_ones_own_hear_of_a_run_on_every_rank(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TOLD)
    flags = [*TINY, "--mock-data", "--save", str(tmp_path / "saved"), "--log-interval", "2"]
    outcomes = launch(2, flags, script=str(script))
    good(outcomes)
    for outcome in outcomes:
        assert outcome is not None
        (events,) = [line for line in outcome.output.splitlines() if line.startswith("told:")]
        assert events == "told: start, step 1, step 2, log 2, step 3, log 3, save 3, end"
    shown = values(records(tmp_path / "saved")["iteration"], "scalars", "learning_rate")
    assert shown == [({"seen": 3, "second": 2.5}, 5e-4), ({"seen": 5, "second": 2.5}, 1e-3 / 3)]
    assert outcomes[0] is not None and "your own callback 2: __main__.Second" in outcomes[0].output


def test_pieces_that_cannot_serve_are_refused():
    config = Config.create(**MODEL)

    class Factored(torch.optim.Optimizer):
        def __init__(self, groups, settings):
            super().__init__(groups, {"lr": settings.lr})

        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p]["rows"] = torch.zeros(2)

    with pytest.raises(ConfigError, match="'rows'"):
        optimizer_state(config.with_pieces(optimizer=Factored))

    def plain(context, config, index):
        return torch.nn.Linear(16, 16)

    with pytest.raises(ConfigError, match=r"layers\.0\.weight"):
        one_stage(config.with_pieces(layer=plain))
    short = config.with_pieces(
        datasets=lambda config, *counts: ([np.arange(4)] * counts[0], None, None)
    )
    with pytest.raises(DataError, match="4"):
        build_datasets(short, 3, 0, 0).train[0]
