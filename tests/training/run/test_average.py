"""--ema-decay: evaluated, exported, loaded by tools, and begun by a run whose checkpoint has none."""

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.faults.history import tensors
from megatron.errors import CheckpointError
from megatron.parallel.sharding import sharding_of
from megatron.training.run.load_model import load_model
from tests.helpers.launching import TINY, launch
from tests.helpers.tiny import records, values

pytestmark = pytest.mark.slow
FLAGS = [*TINY, "--lr", "1e-2", "--eval-iters", "2", "--log-interval", "1"]
AVERAGED = ["--ema-decay", "0.6"]


def run(*words, processes=1, script="pretrain_gpt.py"):
    outcomes = launch(processes, words, script=script)
    assert [outcome.code for outcome in outcomes] == [0] * processes, outcomes[0].output
    return outcomes[0].output


def newest(folder, iteration):
    return tensors(folder / f"iter_{iteration:07d}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train with an average on two ranks, and export it."""
    folder = tmp_path_factory.mktemp("average")
    words = [*FLAGS, *AVERAGED, "--train-iters", "4", "--save", str(folder / "run"), "--eval-ema"]
    run(*words, "--save-hf", str(folder / "hf"), "--save-hf-ema", processes=2)
    return folder


def test_the_loss_of_the_average_is_that_of_the_exported_model(trained):
    evaluations = records(trained / "run")["validation"]
    assert (
        all(abs(r["ema_loss"] - r["lm_loss"]) > 1e-4 for r in evaluations) and len(evaluations) >= 2
    )
    words = [*FLAGS, "--load", f"hf:{trained / 'hf'}", "--skip-train", "--train-iters", "4"]
    run(*words, "--metrics-file", str(trained / "metrics.jsonl"))
    exported = dict(values(records(trained)["validation"], "dataset", "lm_loss"))
    assert exported == pytest.approx(dict(values(evaluations, "dataset", "ema_loss")), rel=1e-6)


def test_tools_take_the_average(trained):
    words = ["--from", "megatron", "--to", "hf", "--ema", str(trained / "run")]
    run(*words, str(trained / "hf2"), script="tools/convert_checkpoint.py")
    exported, converted = (load_file(trained / f"{n}/model.safetensors") for n in ("hf", "hf2"))
    assert exported.keys() == converted.keys()
    assert all(torch.equal(exported[name], converted[name]) for name in exported)
    saved = newest(trained / "run", 4)
    model = load_model(trained / "run", ema=True)
    for p in model.chunks.parameters():
        s = sharding_of(p)
        real = p.detach()[tuple(slice(0, n) for n in s.extent)]
        assert torch.equal(real, saved[f"ema.{s.name}"])
        assert s.global_shape[0] < 4 or not torch.equal(real, saved[f"master.{s.name}"])


def test_an_average_begins_with_the_weights_that_are_loaded(trained):
    plain, more, last = (trained / name for name in ("plain", "more", "last"))
    run(*FLAGS, "--train-iters", "3", "--save", str(plain))
    with pytest.raises(CheckpointError, match="ema"):
        load_model(plain, ema=True)
    averaged = [*FLAGS, *AVERAGED, "--load", str(plain), "--save", str(more)]
    assert "average" in run(*averaged, "--train-iters", "4")
    before = newest(plain, 3)
    after = newest(more, 4)
    for name, new in after.items():
        kind, _, of = name.partition(".")
        if kind == "master":
            expected = 0.6 * before[name].double() + 0.4 * new.double()
            torch.testing.assert_close(after[f"ema.{of}"].double(), expected, rtol=0, atol=1e-7)
    run(*FLAGS, "--load", str(more), "--save", str(last), "--train-iters", "5")
    assert not any(name.startswith("ema.") for name in newest(last, 5))
