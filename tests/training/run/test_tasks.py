"""--eval-tasks: tasks during training, on any layout, as tools/evaluate.py evaluates them."""

import json

import pytest

from tests.helpers.launching import launch
from tests.helpers.processes import run_processes
from tests.helpers.tiny import INTERLEAVED, records, run

FIELDS = dict(
    num_layers=4,
    seq_length=16,
    tokenizer_type="NullTokenizer",
    vocab_size=23,
    micro_batch_size=2,
    train_iters=3,
    eval_interval=2,
    eval_at_start=True,
    init_method_std=0.2,
)
ENDINGS = [{"context": f"{i} {i + 1} {i + 2} " * (1 + i % 3), "ending": f" {i}"} for i in range(9)]
OTHERS = {"event", "task", "time", "elapsed_s"}
CHOICES = [{"context": "1 2", "choices": [" 3 4", " 9", " 1 1 1"], "answer": 0}]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.slow
def test_figures_at_each_evaluation_are_those_of_any_layout(tmp_path):
    tasks = (write(tmp_path / "a.jsonl", ENDINGS), write(tmp_path / "b.jsonl", CHOICES))
    layouts = [
        (1, {}),
        (4, dict(INTERLEAVED, context_parallel_size=2, micro_batch_size=1)),
    ]
    runs = []
    for n, (processes, fields) in enumerate(layouts):
        fields = dict(FIELDS, **fields, eval_tasks=tasks, save=str(tmp_path / str(n)))
        run_processes(processes, run, fields)
        runs.append(records(tmp_path / str(n))["task"])
    one = runs[0]
    assert [(r["iteration"], r["task"]) for r in one] == [
        (at, name) for at in (0, 2, 3) for name in "ab"
    ]
    assert len({r["log_likelihood"] for r in one[::2]}) == 3, "the model learns"
    for other in runs[1:]:
        for reference, actual in zip(one, other, strict=True):
            names = set(reference) - OTHERS
            expected = pytest.approx({k: reference[k] for k in names}, rel=2e-5)
            assert {k: actual[k] for k in names} == expected
    arguments = ["--load", str(tmp_path / "0"), "--format", "json", "--tasks", *tasks]
    (outcome,) = launch(1, arguments, script="tools/evaluate.py")
    assert outcome.code == 0, outcome
    lines = [json.loads(line) for line in outcome.output.splitlines() if line.startswith("{")]
    for reference, actual in zip(one[-2:], lines, strict=True):
        names = set(reference) - OTHERS
        assert {k: actual[k] for k in names} == pytest.approx(
            {k: reference[k] for k in names}, rel=1e-5
        )
