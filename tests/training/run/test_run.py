"""Whole runs through `pretrain`: their output, their ends, and equality of resumed ones."""

import json

import numpy as np
import pytest

from megatron.training.report.reporter import Console
from tests.helpers.fault_points import strike
from tests.helpers.indexed import write_documents
from tests.helpers.processes import run_processes, run_processes_raw
from tests.helpers.tiny import INTERLEAVED, records, run, values

LONG = dict(min_lr=1e-3, lr_decay_style="cosine", log_interval=2, eval_interval=3, eval_iters=2)

pytestmark = pytest.mark.slow


def test_a_run_writes_what_happened(tmp_path):
    fields = dict(
        LONG,
        save=str(tmp_path),
        train_iters=5,
        save_interval=2,
        timeline_interval=4,
        eval_at_start=True,
        recompute_granularity="full",
        recompute_method="uniform",
        **INTERLEAVED,
    )
    run_processes(2, run, fields)
    by_event = records(tmp_path)
    (start,), (end,) = by_event["start"], by_event["end"]
    layout = {"world": 2, "tensor": 1, "pipeline": 2, "data": 1}
    assert start["layout"].items() >= layout.items()
    # what was chosen, without equal defaults and derived values
    differs = {"hidden_size", "lr_decay_style", "pipeline_model_parallel_size", "save"}
    assert start["differs"]["hidden_size"] == 16 and start["differs"].keys() >= differs
    assert not start["differs"].keys() & {"lr_decay_iters", "ffn_hidden_size"}
    assert start["config"]["hidden_size"] == 16 and start["versions"].keys() >= {
        "python",
        "torch",
        "deepspeed",
    }
    costs = {"parameters": start["parameters"], "tokens": 5 * 4 * 8, "seconds": None}
    assert start["costs"].items() >= costs.items()
    # Every second iteration, and the rest of the last interval.
    assert values(
        by_event["iteration"],
        "iteration",
        "consumed_samples",
        "consumed_tokens",
        "total_iterations",
    ) == [(2, 8, 64, 5), (4, 16, 128, 5), (5, 20, 160, 5)]
    # Before the first step because asked, at the interval, at the end on validation and test data.
    assert values(by_event["validation"], "iteration", "dataset", "samples") == [
        (0, "valid", 8),
        (3, "valid", 8),
        (5, "valid", 8),
        (5, "test", 8),
    ]
    assert values(by_event["checkpoint"], "iteration") == [(2,), (4,), (5,)]
    assert (end["iteration"], end["reason"]) == (5, "done")
    # Of every fourth iteration and the last one there is a timeline, and in the file the last one.
    assert values(by_event["timeline"], "iteration", "file") == [
        (4, "timeline.json"),
        (5, "timeline.json"),
    ]
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {e["args"]["iteration"] for e in events if e["ph"] == "M"} == {5}
    unrecorded, *recorded = (record.get("phases_ms") for record in by_event["iteration"])
    assert unrecorded is None
    for phases in recorded:
        assert all(
            phases[of]["min"] > 0
            for of in ("data", "forward", "backward", "recompute", "pipeline-wait", "optimizer")
        )
    assert recorded[1]["save"]["min"] > 0  # of iteration 4
    assert [len(record["stage_memory_bytes"]) for record in by_event["iteration"]] == [2, 2, 2]
    # An untrained model with small weights gives all 24 entries about the same probability.
    assert by_event["validation"][0]["lm_loss"] == pytest.approx(np.log(24), abs=0.05)


def write_numbers(prefix, tokens):
    """Write one document of ascending tokens, so that a sample's first token tells its number."""
    return write_documents(prefix, [range(tokens)])


def run_and_listen(rank, fields):
    """Return the lines about data that the run prints."""
    printed = []
    Console.say = lambda self, text: printed.append(text)
    run(rank, fields)
    return [text for text in printed if text.startswith(" data: ")]


def test_the_ledger_outlives_a_change_of_the_blend(tmp_path):
    a, b, c = (
        write_numbers(tmp_path / n, size) for n, size in zip("abc", (80, 80, 40), strict=True)
    )
    fields = dict(split="1", vocab_size=80, save=str(tmp_path / "run"))
    run_processes(1, run, dict(fields, data_path=("1", a, "1", b), exit_interval=4))
    resumed = dict(fields, data_path=("3", a, "1", c), load=fields["save"], straggler_report=True)
    printed, printed_on_rank_1 = run_processes(2, run_and_listen, resumed)
    assert printed == printed_on_rank_1 and "epoch 2" in printed[0] and "iteration 5" in printed[0]
    assert all(figure in printed[1] for figure in ("192", "a 1.400", "b 0.800", "c 0.400"))
    by_event = records(tmp_path / "run")
    first, _, last = (  # the second one has the new phase
        {name: count["samples"] for name, count in record["sources"].items()}
        for record in by_event["data"]
    )
    # 3 : 1 holds for the 8 of 24 samples that are left
    assert first == {a: 8, b: 8} and last == {a: 8 + 6, b: 8, c: 2}
    # Computing times of both ranks are compared where that is asked for.
    assert values(by_event["stragglers"], "iteration") == [(5,), (6,)]
    assert all(0 < r["min_ms"] <= r["max_ms"] for r in by_event["stragglers"])


def test_a_run_on_packed_documents(tmp_path):
    """Run on packed documents with three stages.

    The middle one needs the bounds of the documents too, but no end-of-document id.
    """
    sizes = np.random.RandomState(1).randint(1, 30, 60).tolist()
    prefix = write_documents(tmp_path / "x", ([size] * size for size in sizes))
    fields = dict(
        data_path=(prefix,),
        split="1",
        num_layers=3,
        vocab_size=30,
        data_packing="best-fit",
    )
    single = tmp_path / "whole"
    stages = tmp_path / "stages"
    (printed,) = run_processes(1, run_and_listen, dict(fields, save=str(single)))
    run_processes(3, run, dict(fields, save=str(stages), pipeline_model_parallel_size=3))
    one = records(single)
    three = records(stages)
    # Fewer than 8 of 8 predictions in each of 24 samples: predictions across documents or of
    # padding are not trained on.
    tokens = one["data"][-1]["sources"][prefix]["tokens"]
    assert 24 * 4 < tokens < 24 * 8 and f" {tokens} " in printed[-1]
    assert three["data"][-1]["sources"] == one["data"][-1]["sources"]
    losses = [values(side["iteration"], "lm_loss") for side in (three, one)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def run_and_fail(rank, fields):
    """Fail on rank 1 after its second step."""
    if rank == 1:
        strike("megatron.run.step", 2, "fail")
    run(rank, fields)


def test_when_one_rank_fails_the_others_name_it():
    (_, other), (_, failed) = run_processes_raw(
        2, run_and_fail, dict(pipeline_model_parallel_size=2)
    )
    assert failed.startswith("RuntimeError: ")
    message = other.splitlines()[0]
    assert (
        message.startswith("LaunchError: rank 0") and "rank 1" in message and "planted" in message
    )


def run_each(rank, runs):
    for fields in runs:
        run(rank, fields)


def test_an_evaluation_changes_no_step_and_depends_on_the_weights_alone(tmp_path):
    """An evaluation changes neither the dropout of later steps nor their data.

    Without --eval-at-start the first one follows the first step. Another job that has nothing left
    to train evaluates the last weights on the same samples.
    """
    plain = str(tmp_path / "plain")
    evaluated = str(tmp_path / "evaluated")
    more = dict(save=evaluated, load=evaluated, train_iters=3, eval_iters=2, eval_interval=1)
    run_processes(1, run_each, [dict(save=plain, train_iters=3), more, more])
    by_event = records(tmp_path / "evaluated")
    losses = [values(of["iteration"], "lm_loss") for of in (by_event, records(tmp_path / "plain"))]
    assert losses[0] == losses[1]
    # After the last step the loss is measured once on validation data, and on test data.
    last = [(3, "valid"), (3, "test")]
    assert values(by_event["validation"], "iteration", "dataset") == [
        (1, "valid"),
        (2, "valid"),
        *last,
        *last,
    ]
    first, second, third, _, resumed, _ = values(by_event["validation"], "lm_loss")
    assert len({first, second, third}) == 3 and resumed == third
