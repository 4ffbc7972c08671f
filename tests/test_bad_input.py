"""Bad input: one clear error on every rank, soon, without a traceback and without a hang."""
from __future__ import annotations

import re

import pytest

from tests.helpers.launching import TINY, launch

CASES = {
    "heads not divisible by TP": (
        2, ["--tensor-model-parallel-size", "2", "--num-attention-heads", "1"], ["num-attention-heads", "1", "2"],
    ),
    "fewer layers than stages": (
        2, ["--pipeline-model-parallel-size", "2", "--num-layers", "1"], ["num-layers", "1", "2"],
    ),
    "layers against chunks": (
        2, ["--pipeline-model-parallel-size", "2", "--num-layers", "3", "--num-layers-per-virtual-pipeline-stage", "2"],
        ["num-layers-per-virtual-pipeline-stage"],
    ),
    "global batch not divisible": (2, ["--global-batch-size", "7"], ["global-batch-size", "7", "8"]),
    "missing data": (
        2, ["--data-path", "no/such/corpus", "--split", "90,10,0"], ["no/such/corpus"],
    ),
    "sequence longer than positions": (2, ["--seq-length", "64"], ["max-position-embeddings", "64", "32"]),
    "unknown tokenizer": (2, ["--tokenizer-type", "GPT9Tokenizer"], ["GPT9Tokenizer", "GPT2BPETokenizer"]),
    "contradictory precision": (2, ["--fp16", "--bf16"], ["fp16", "bf16"]),
    "too many processes": (3, ["--tensor-model-parallel-size", "2"], ["3", "2"]),
    "unknown flag": (2, ["--num-layer", "4"], ["--num-layer", "--num-layers"]),
    "a missing tokenizer file": (
        2, ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "no-vocab.json", "--merge-file", "no-merges.txt"],
        ["no-vocab.json"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_error_is_clear_on_every_rank(name):
    n, arguments, words = CASES[name]
    given = [a for a in TINY if not (name == "missing data" and a == "--mock-data")]
    outcomes = launch(n, [*given, *arguments])
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 2, f"rank {rank}: exit code {outcome.code}\n{outcome.output}"
        assert "Traceback" not in outcome.output, outcome.output
        assert "Error" in outcome.output
    assert any(all(word in o.output for word in words) for o in outcomes), outcomes[0].output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{\"train_batch_size\": 8,\n oops}", ["line 2"]),
        ("[1]", ["object"]),
        ("{\"train_micro_batch_size_per_gpu\": 4}", ["4", "micro-batch-size", "2"]),
        ("{\"zero_optimization\": {\"stage\": 3}}", ["3", "stage"]),
        ("{\"fp16\": {\"enabled\": true}}", ["fp16"]),
    ],
)
def test_deepspeed_json(tmp_path, text, words):
    file = tmp_path / "ds.json"
    file.write_text(text)
    for outcome in launch(2, [*TINY, "--bf16", "--deepspeed", "--deepspeed_config", str(file)]):
        assert outcome.code == 2, outcome.output
        assert "Traceback" not in outcome.output
        assert "ds.json" in outcome.output
        for word in words:
            assert word in outcome.output


def test_all_problems_at_once():
    (outcome,) = launch(1, [*TINY, "--num-attention-heads", "5", "--fp16", "--bf16", "--seq-length", "64"])
    assert outcome.code == 2
    for word in ("num-attention-heads", "fp16", "max-position-embeddings"):
        assert word in outcome.output


def test_a_rank_that_never_starts_is_named():
    outcomes = launch(3, [*TINY, "--global-batch-size", "12", "--distributed-timeout-minutes", "0.1"], absent=[1])
    for rank in (0, 2):
        assert outcomes[rank].code != 0
        assert outcomes[rank].seconds < 120
    assert re.search(r"\branks? 1\b", outcomes[0].output)  # and rank 2, where it comes more than 6 s later


def test_a_rank_that_fails_alone_is_named_by_the_others(tmp_path):
    """One rank cannot write where all others can: the others end too, and say who failed."""
    outcomes = launch(2, [*TINY, "--pipeline-model-parallel-size", "2", "--distributed-timeout-minutes", "3"],
                      script="tests/helpers/failing_rank.py")
    assert outcomes[1].code != 0
    assert "rank 1" in outcomes[1].output
    assert "a fault of this rank alone" in outcomes[1].output
    assert outcomes[0].code != 0
    assert "rank 1" in outcomes[0].output
