"""tools/evaluate.py --tasks: choices and endings, against transformers in float64, on any layout."""

import json
import runpy
import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import megatron
from megatron.data.tokenizer import build_tokenizer
from megatron.errors import DataError
from megatron.training.run.tasks import read_tasks, tokens_of
from tests.helpers.hugging_face import S, V
from tests.helpers.launching import ROOT
from tests.tools.test_evaluate import byte_pairs, folder, gpt2, run  # noqa: F401 (a fixture)

RANDOM = np.random.RandomState(5)


def words(most):
    return " ".join(map(str, RANDOM.randint(0, V - 1, RANDOM.randint(1, most + 1))))


# Some texts are longer than the model's context, one has no context.
CHOICES = [
    {
        "context": words(S + 4) + " ",
        "choices": [words(6) for _ in range(2 + i % 3)],
        "answer": i % 2,
    }
    for i in range(25)
]
CHOICES[3]["context"] = ""
ENDINGS = [{"context": words(S), "ending": " " + words(2)} for _ in range(7)]


def log_likelihoods(context, ending):
    """Return the sum over the ending, whether it is greedy, and its tokens, by transformers."""
    before = [int(word) for word in context.split()] or [V - 1]
    after = [int(word) for word in ending.split()]
    ids = [*before, *after][-(S + 1) :]
    with torch.no_grad():
        scores = gpt2()[0](torch.tensor([ids[:-1]])).logits[0, -len(after) :].log_softmax(-1)
    chosen = scores[range(len(after)), after]
    return chosen.sum().item(), scores.argmax(-1).tolist() == after, len(after)


@pytest.fixture(scope="module")
def files(folder):  # noqa: F811
    """Write both tasks; every second ending is the greedy one."""
    for line in ENDINGS[::2]:
        ids = [int(word) for word in line["context"].split()]
        for _ in range(2):
            with torch.no_grad():
                ids.append(int(gpt2()[0](torch.tensor([ids[-S:]])).logits[0, -1].argmax()))
        line["ending"] = f" {ids[-2]} {ids[-1]}"
    paths = {}
    for name, lines in (("choices", CHOICES), ("endings", ENDINGS)):
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths


def expected():
    right = np.zeros(3)
    tokens = 0
    for line in CHOICES:
        scores = [log_likelihoods(line["context"], choice) for choice in line["choices"]]
        sums = np.array([f[0] for f in scores])
        sizes = np.array([f[2] for f in scores])
        tokens += sizes.sum()
        lengths = np.array([len(choice) for choice in line["choices"]])
        for i, values in enumerate((sums, sums / lengths, sums / sizes)):
            right[i] += values.argmax() == line["answer"]
    shares = right / len(CHOICES)
    assert len(set(shares.tolist())) > 1, "the three likelihoods differ"
    scores = [log_likelihoods(line["context"], line["ending"]) for line in ENDINGS]
    sums = np.array([f[0] for f in scores])
    sizes = np.array([f[2] for f in scores])
    greedy = np.mean([f[1] for f in scores])
    assert 0.4 < greedy < 0.9
    names = ("accuracy", "accuracy_bytes", "accuracy_tokens")
    choices = dict(zip(names, shares, strict=True), examples=len(CHOICES), tokens=tokens)
    perplexity = np.exp(-sums.sum() / sizes.sum())
    endings = dict(accuracy=greedy, log_likelihood=sums.mean(), perplexity=perplexity)
    return choices, endings | dict(examples=len(ENDINGS), tokens=sizes.sum())


@pytest.mark.slow
def test_figures_are_those_of_transformers(folder, files, tmp_path):  # noqa: F811
    tasks = [str(path) for path in files.values()]
    metrics = tmp_path / "metrics.jsonl"
    flags = "--tensor-model-parallel-size 2 --micro-batch-size 3".split()
    flags += ["--tasks", *tasks, "--metrics-file", str(metrics)]
    outcomes = run(folder, 4, *flags)
    assert [outcome.code for outcome in outcomes] == [0] * 4, outcomes
    lines = [line for line in outcomes[0].output.splitlines() if line.startswith("{")]
    records = [json.loads(line) for line in lines]
    for record, reference in zip(records, expected(), strict=True):
        assert {name: record[name] for name in reference} == pytest.approx(reference, rel=1e-5)
    assert [record["task"] for record in records] == ["choices", "endings"]
    assert records[0]["cut"] > 0 and records[0]["iteration"] == 7
    assert [json.loads(line) for line in metrics.read_text().splitlines()][-2:] == records


def test_contexts_and_endings_are_tokenized_as_one_text(tmp_path):
    tokenizer = byte_pairs(tmp_path / "tokenizer.json", bos=False)
    before, after = tokens_of(tokenizer, "größer ", "or not")
    assert tokenizer.decode(before) == "größer" and tokenizer.decode(after) == " or not"
    assert tokens_of(tokenizer, "", "or") == ([tokenizer.eod], tokenizer.encode("or"))
    (tmp_path / "bos").mkdir()
    marked = byte_pairs(tmp_path / "bos" / "tokenizer.json", bos=True)
    assert tokens_of(marked, "", "or") == ([1], marked.encode("or")[1:])
    assert tokens_of(marked, "a", " b")[0] == marked.encode("a")


def read(path, tokenizer, *lines):
    path.write_text("\n".join(map(json.dumps, lines)))
    return read_tasks([str(path)], tokenizer, 4)[0]


def test_files_that_are_no_task_are_refused(tmp_path):
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=9)
    path = tmp_path / "a.jsonl"
    right = {"context": "1 ", "choices": ["2", "3 4"], "answer": 1}
    task = read(path, tokenizer, right)
    assert (task.name, task.answers, task.lengths) == ("a", (1,), (1, 3))
    assert [b - a for a, b in pairwise(task.starts)] == [2]
    wrong = {"answer": [2], "context": [None]}
    wrong["choices"] = [["2", ""], "23", ["2", "1 2 3 4 5"], ["2", "77"]]
    for change in ({name: value} for name, values in wrong.items() for value in values):
        with pytest.raises(DataError, match=f"{path}:2"):
            read(path, tokenizer, right, right | change)
    with pytest.raises(DataError, match="1 of them"):
        read(path, tokenizer, right, {"context": "1 ", "ending": "2"})


@pytest.mark.slow
def test_the_harness_gets_the_figures_of_transformers(folder, files, monkeypatch):  # noqa: F811
    """A stand-in for lm-evaluation-harness asks as its tasks do, for texts of one window."""
    base = type("TemplateLM", (), {"cache_hook": SimpleNamespace(add_partial=lambda *_: None)})
    utils = SimpleNamespace(
        get_rolling_token_windows=lambda token_list, prefix_token, **_: [
            ([prefix_token, *token_list[:-1]], token_list)
        ],
        make_disjoint_window=lambda window: (window[0][:1], window[1]),
        normalize_gen_kwargs=lambda settings, _: settings,
    )
    for name, content in (
        ("lm_eval", dict(simple_evaluate=None, utils=utils)),
        ("lm_eval.api.model", dict(TemplateLM=base)),
        ("lm_eval.models", dict(utils=utils)),
        ("lm_eval.tasks", dict(TaskManager=None)),
    ):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    program = runpy.run_path(str(ROOT / "tools/megatron_inference/harness.py"))
    harness = program["MegatronLM"](megatron.load_model(folder / "checkpoint"))
    texts = [(line["context"], line["ending"]) for line in ENDINGS]
    scores = harness._loglikelihood_tokens(
        [(None, harness.tok_encode(before), harness.tok_encode(after)) for before, after in texts]
    )
    expected = [log_likelihoods(*text) for text in texts]
    assert [greedy for _, greedy in scores] == [greedy for _, greedy, _ in expected]
    assert [total for total, _ in scores] == pytest.approx([one[0] for one in expected], rel=1e-5)
    requests = [SimpleNamespace(args=(after,)) for _, after in texts]
    sums = [log_likelihoods("", after)[0] for _, after in texts]
    assert harness.loglikelihood_rolling(requests) == pytest.approx(sums, rel=1e-5)
    # the greedy endings, which stop strings cut
    greedy = [(b, *a.split()) for b, a in texts[::2] if len(b.split()) <= S - 2]
    greedy = [(before, *ending) for before, *ending in greedy if str(V - 1) not in ending]
    assert greedy
    for before, first, second in greedy:
        for stop, text in (("none", f"{first} {second}"), (f" {second}", first)):
            settings = {"until": [stop], "max_gen_toks": 2, "do_sample": False}
            request = SimpleNamespace(args=(before, settings))
            assert harness.generate_until([request]) == [text]
