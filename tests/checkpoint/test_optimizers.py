"""The state of each optimizer goes on from a checkpoint, on another layout, too."""

import json

import pytest

from benchmarks.faults.history import tensors, tensors_that_differ
from tests.helpers.launching import launch

WORDS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --swiglu "
    "--max-position-embeddings 16 --vocab-size 64 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 4 --lr 1e-3 --lr-decay-style constant --log-interval 1 --eval-iters 0 "
    "--num-workers 0 --mock-data"
).split()
MUON = "--optimizer muon --muon-fp32-matmul-prec high --muon-extra-scale-factor 0.2"
CUT = "--tensor-model-parallel-size 2"


def losses(folder, ranks, words):
    """Run, in `folder` where words begin with @, and return the losses."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    line = [*WORDS, *words.replace("@", f"{folder}/").split(), "--metrics-file", str(metrics)]
    for outcome in launch(ranks, line):
        assert outcome is not None and outcome.code == 0, outcome
    records = map(json.loads, metrics.read_text().splitlines())
    return [r["lm_loss"] for r in records if r["event"] == "iteration"]


@pytest.mark.slow
def test_muon_goes_on_on_another_layout_and_not_with_adam(tmp_path):
    uninterrupted = losses(tmp_path, 1, MUON)
    first = losses(tmp_path, 2, f"{MUON} {CUT} --save @saved --exit-interval 2")
    rest = losses(tmp_path, 2, f"{MUON} --load @saved")
    assert first + rest == pytest.approx(uninterrupted, rel=5e-6) and len(rest) == 2
    (outcome,) = launch(1, [*WORDS, "--load", str(tmp_path / "saved")])
    assert outcome is not None and outcome.code != 0
    assert "--optimizer muon" in outcome.output and "--no-load-optim" in outcome.output


@pytest.mark.slow
def test_bf16_moments_and_average_go_on_to_the_bit_and_load_into_fp32_and_back(
    tmp_path,
):
    """With bf16 weights, so that one kernel updates weights, their copy, moments and average."""
    average = "--bf16 --optimizer-implementation fused --ema-decay 0.7 --ema-interval 2"
    rounded = f"{average} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    uninterrupted = losses(tmp_path, 1, f"{rounded} --save @whole --save-interval 2")
    load = "--load @whole --load-tag 2"
    assert losses(tmp_path, 1, f"{rounded} {load} --save @rest") == uninterrupted[2:]
    resumed, expected = (tmp_path / name / "iter_0000004" for name in ("rest", "whole"))
    assert not tensors_that_differ(resumed, expected) and any(
        "ema" in name for name in tensors(resumed)
    )
    wide = losses(tmp_path, 1, f"{average} {load} --save @wide")
    assert wide == pytest.approx(uninterrupted[2:], rel=1e-3)
    assert len(losses(tmp_path, 1, f"{rounded} --load @wide --train-iters 5")) == 1
