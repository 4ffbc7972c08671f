"""Pieces of one's own: those of examples/extend train as in one process, and are dry-run and planned.

Tolerances are those of the parity grid (tests/parity/test_grid.py). Lion takes the sign of its update, which rounding
turns where the update is as small as a rounding error: there a weight may be off by two steps.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.launching import ROOT, Outcome, Script, launch
from tests.helpers.processes import run_processes
from tests.helpers.training import STEPS, assemble, train_plainly
from tests.parity.cases import layout, train

FOLDER = "examples/extend"
# Without biases: softmax does not see that of the keys, so that its gradient is nothing but rounding.
LION = dict(lr=1e-3, adam_beta1=0.9, adam_beta2=0.99, add_bias_linear=False)
RUNS: dict[str, dict[str, Any]] = {
    "layer": layout(tp=2, pp=2, dp=2, sp=True)[2],
    "schedule": layout(tp=2, pp=2, dp=2)[2],
    "optimizer": layout(tp=2, pp=2, dp=2, **LION)[2],
}
FILES = {name: str(ROOT / FOLDER / f"{name}.py") for name in (*RUNS, "data")}
TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 256 --micro-batch-size 1 --global-batch-size 8 --train-iters 3 --lr 1e-3 --log-interval 1 "
    "--eval-iters 0 --num-workers 0"
).split()
CUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel".split()
TEXT = ["--data-path", str(ROOT / "docs/frontier.md")]


def words(name: str) -> list[str]:
    return [*TINY, *(TEXT if name == "data" else ["--mock-data"]), "--pieces", FILES[name]]


@cache
def on_eight() -> list[list[dict[str, Any]]] | Exception:
    try:
        return run_processes(8, train, [{**fields, "pieces": FILES[name]} for name, fields in RUNS.items()])
    except Exception as error:  # of all their tests, without another try
        return error


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_one_process(name: str) -> None:
    found = on_eight()
    if isinstance(found, Exception):
        raise found
    ranks = [runs[list(RUNS).index(name)] for runs in found]
    expected = train_plainly({**RUNS[name], "pieces": FILES[name]})
    for rank in ranks:
        for (loss, norm, *_), (loss_1, norm_1) in zip(rank["history"], expected["history"], strict=True):
            assert loss == pytest.approx(loss_1, rel=5e-6)
            assert norm == pytest.approx(norm_1, rel=2e-5)
    whole = assemble([rank["parameters"] for rank in ranks])
    assert whole.keys() == expected["parameters"].keys()
    apart = [np.abs(whole[n] - values) for n, values in expected["parameters"].items()]
    turned, most = (1e-4, 2 * STEPS * LION["lr"]) if name == "optimizer" else (0.0, 5e-6)
    assert max(d.max() for d in apart) <= most
    assert sum((d > 5e-6).sum() for d in apart) <= turned * sum(d.size for d in apart)


def losses(metrics: Path) -> list[float]:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["lm_loss"] for record in records if record["kind"] == "iteration"]


def good(outcomes: list[Outcome | None]) -> None:
    for outcome in outcomes:
        assert outcome is not None and outcome.code == 0, outcome


@pytest.mark.slow
def test_data_of_ones_own_train_as_in_one_process_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("one", "eight", "again")}
    good(launch(1, [*words("data"), "--metrics-file", str(files["one"])]))
    save = ["--save", str(tmp_path / "saved"), *CUT]
    first = [*words("data"), *save, "--exit-interval", "2", "--metrics-file", str(files["eight"])]
    good(launch(8, first))
    good(launch(8, [*words("data"), *save, "--load", str(tmp_path / "saved"), "--metrics-file", str(files["again"])]))
    one = losses(files["one"])
    assert len(one) == 3 and losses(files["eight"]) + losses(files["again"]) == pytest.approx(one, rel=5e-6)


def ran(script: str, arguments: list[str], folder: Path) -> str:
    with Script(script, arguments, folder / "log") as process:
        outcome = process.wait()
    assert outcome.code == 0, outcome.output
    return outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_each_is_dry_run(name: str, tmp_path: Path) -> None:
    ran("pretrain_gpt.py", [*words(name), *CUT, "--world-size", "8", "--dry-run"], tmp_path)


def planned(flags: list[str], folder: Path) -> str:
    plan = ["--cluster", "frontier", "--nodes", "1", "--layout", "tp=2,pp=2,chunks=1,mbs=1", "--explain", "--global-batch", "16"]
    model = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257".split()
    return ran("tools/plan.py", [*plan, "--", *model, *flags], folder)


@pytest.mark.slow
def test_each_is_planned(tmp_path: Path) -> None:
    """The plan differs from that of the project's own pieces where these cost something else."""
    plain = planned([], tmp_path)
    for name, file in FILES.items():
        assert (planned(["--pieces", file], tmp_path) == plain) == (name == "data"), name
