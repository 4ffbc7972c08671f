"""The state of each optimizer goes on from a checkpoint, on another layout, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.faults.history import tensors, tensors_that_differ
from tests.helpers.launching import Outcome, launch

WORDS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --swiglu "
    "--max-position-embeddings 16 --vocab-size 64 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 4 --lr 1e-3 --lr-decay-style constant --log-interval 1 --eval-iters 0 "
    "--num-workers 0 --mock-data"
).split()
MUON = "--optimizer muon --muon-fp32-matmul-prec high --muon-extra-scale-factor 0.2".split()
ROUNDED = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16".split()
CUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()


def run(ranks: int, words: list[str], metrics: Path) -> tuple[list[float], list[Outcome | None]]:
    """Return the losses of a run and how its ranks ended."""
    ended = launch(ranks, [*WORDS, *words, "--metrics-file", str(metrics)])
    records = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else ()
    return [r["lm_loss"] for r in records if r["event"] == "iteration"], ended


def good(ended: list[Outcome | None]) -> bool:
    return all(outcome is not None and outcome.code == 0 for outcome in ended)


@pytest.mark.slow
def test_muon_goes_on_on_another_layout_and_not_with_adam(tmp_path: Path) -> None:
    saved = ["--save", str(tmp_path / "saved"), "--save-interval", "2"]
    load = ["--load", str(tmp_path / "saved")]
    whole, ended = run(1, MUON, tmp_path / "one")
    assert good(ended) and len(whole) == 4
    first, ended = run(4, [*MUON, *CUT, *saved, "--exit-interval", "2"], tmp_path / "four")
    assert good(ended)
    rest, ended = run(2, [*MUON, *load], tmp_path / "two")
    assert good(ended)
    assert first + rest == pytest.approx(whole, rel=5e-6)
    for optimizer in ("adam", "lion"):
        _, ended = run(1, ["--optimizer", optimizer, *load], tmp_path / optimizer)
        (outcome,) = ended
        assert outcome is not None and outcome.code != 0
        assert "--optimizer muon" in outcome.output and "--no-load-optim" in outcome.output
    fresh, ended = run(1, [*load, "--no-load-optim"], tmp_path / "fresh")
    assert good(ended) and len(fresh) == 2


@pytest.mark.slow
def test_moments_and_average_of_one_pass_go_on_to_the_bit(tmp_path: Path) -> None:
    """With bf16 weights, so that one kernel updates weights, their copy, moments and average."""
    words = [*ROUNDED, *"--bf16 --optimizer-implementation fused --ema-decay 0.7".split()]
    words += ["--ema-interval", "2"]
    straight, parts = (["--save", str(tmp_path / name)] for name in ("straight", "parts"))
    whole, ended = run(1, [*words, *straight], tmp_path / "whole")
    assert good(ended)
    assert good(run(1, [*words, *parts, "--exit-interval", "2"], tmp_path / "first")[1])
    load = ["--load", str(tmp_path / "parts")]
    rest, ended = run(1, [*words, *load, *parts], tmp_path / "rest")
    assert good(ended) and rest == whole[2:]
    ours, theirs = (tmp_path / name / "iter_0000004" for name in ("parts", "straight"))
    assert not tensors_that_differ(ours, theirs) and any("ema" in name for name in tensors(ours))


@pytest.mark.slow
def test_bf16_moments_go_on_to_the_bit_and_load_into_fp32_and_back(tmp_path: Path) -> None:
    whole, ended = run(1, ROUNDED, tmp_path / "whole")
    assert good(ended)
    folder = str(tmp_path / "saved")
    save = ["--save", folder, "--exit-interval", "2"]
    assert good(run(1, [*ROUNDED, *save], tmp_path / "first")[1])
    rest, ended = run(1, [*ROUNDED, "--load", folder], tmp_path / "rest")
    assert good(ended) and rest == whole[2:]
    wide, ended = run(1, ["--load", folder, "--save", folder], tmp_path / "wide")
    assert good(ended) and wide == pytest.approx(whole[2:], rel=1e-3)
    more = ["--train-iters", "5", "--load", folder]
    narrow, ended = run(1, [*ROUNDED, *more], tmp_path / "narrow")
    assert good(ended) and len(narrow) == 1
