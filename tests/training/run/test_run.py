"""Whole runs through `pretrain`: their output, their ends, and equality of resumed ones."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config import Config
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.sampler import MicroBatchStream
from megatron.metrics_file import read_records
from megatron.model import gpt
from megatron.program import pretrain
from megatron.training.report.reporter import Console
from megatron.training.run.loop import garbage_collection
from tests.helpers.fault_points import strike
from tests.helpers.processes import run_processes, run_processes_raw

FIELDS: dict[str, Any] = dict(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=8,
    vocab_size=24,
    make_vocab_size_divisible_by=8,
    micro_batch_size=1,
    global_batch_size=4,
    mock_data=True,
    num_workers=0,
    train_iters=6,
    lr=1e-2,
    min_lr=1e-3,
    lr_decay_style="cosine",
    log_interval=2,
    eval_interval=3,
    eval_iters=2,
    hidden_dropout=0.2,
    attention_dropout=0.0,
    distributed_timeout_minutes=1.0,
)
INTERLEAVED = dict(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1)

pytestmark = pytest.mark.slow


def run(rank: int, fields: dict[str, Any]) -> None:
    pretrain(Config.create(**{**FIELDS, **fields}, world_size=int(os.environ["WORLD_SIZE"])))


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for record in read_records(folder / "metrics.jsonl"):
        found.setdefault(record["event"], []).append(record)
    return found


def values(found: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(record[name] for name in names) for record in found]


def test_a_run_writes_what_happened(tmp_path: Path) -> None:
    again = dict(recompute_granularity="full", recompute_method="uniform")
    fields = dict(
        save=str(tmp_path), train_iters=5, save_interval=2, timeline_interval=4, eval_at_start=True
    )
    run_processes(2, run, {**fields, **again, **INTERLEAVED})
    found = records(tmp_path)
    (start,), (end,) = found["start"], found["end"]
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
        found["iteration"], "iteration", "consumed_samples", "consumed_tokens", "total_iterations"
    ) == [(2, 8, 64, 5), (4, 16, 128, 5), (5, 20, 160, 5)]
    # Before the first step because asked, at the interval, at the end on validation and test data.
    assert values(found["validation"], "iteration", "dataset", "samples") == [
        (0, "valid", 8),
        (3, "valid", 8),
        (5, "valid", 8),
        (5, "test", 8),
    ]
    assert values(found["checkpoint"], "iteration") == [(2,), (4,), (5,)]
    assert (end["iteration"], end["reason"]) == (5, "done")
    # Of every fourth iteration and the last one there is a timeline, and in the file the last one.
    assert values(found["timeline"], "iteration", "file") == [
        (4, "timeline.json"),
        (5, "timeline.json"),
    ]
    assert all(0 < r["bubble"] < 1 and 0 < r["predicted_bubble"] < 1 for r in found["timeline"])
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {e["args"]["iteration"] for e in events if e["ph"] == "M"} == {5}
    assert {e["tid"] for e in events if e.get("cat") == "backward"} == {0, 1}
    unrecorded, *recorded = (record.get("phases_ms") for record in found["iteration"])
    assert unrecorded is None
    for phases in recorded:
        assert all(0 <= of["min"] <= of["mean"] <= of["max"] for of in phases.values())
        assert all(
            phases[of]["min"] > 0
            for of in ("data", "forward", "backward", "recompute", "pipeline-wait", "optimizer")
        )
    assert recorded[1]["save"]["min"] > 0  # of iteration 4
    steps_ms = [e["dur"] / 1e3 for e in events if e["name"] == "step"]
    assert (
        sum(of["mean"] for name, of in recorded[1].items() if name != "save") <= sum(steps_ms) / 2
    )
    assert [len(record["stage_memory_bytes"]) for record in found["iteration"]] == [2, 2, 2]
    # An untrained model with small weights gives all 24 entries about the same probability.
    assert found["validation"][0]["lm_loss"] == pytest.approx(np.log(24), abs=0.05)


@pytest.mark.parametrize(
    ("orders", "sizes"),
    [
        (("tp-pp-dp", "dp-pp-tp"), dict(pipeline_model_parallel_size=2)),
        pytest.param(
            ("pp-dp-tp", "tp-dp-pp"),
            dict(pipeline_model_parallel_size=2, tensor_model_parallel_size=2),
            marks=pytest.mark.campaign("parity"),
        ),
    ],
)
def test_a_resumed_run_on_other_ranks_is_the_same_run(
    tmp_path: Path, orders: tuple[str, str], sizes: dict[str, int]
) -> None:
    """A run resumed on other ranks is the same run.

    It is saved under one order of ranks, and resumed under another one and on devices in another
    order.
    """
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    (samples,) = run_processes(1, run_and_note, dict(save=str(whole), eval_iters=0))
    world = 2 * sizes["pipeline_model_parallel_size"] * sizes.get("tensor_model_parallel_size", 1)
    first = dict(
        save=str(parts), exit_interval=4, rank_order=orders[0], device_order=tuple(range(world))
    )
    second = dict(
        save=str(parts),
        load=str(parts),
        rank_order=orders[1],
        device_order=tuple(range(world))[::-1],
    )
    noted = [
        run_processes(world, run_and_note, {**sizes, **part, "eval_iters": 0})
        for part in (first, second)
    ]
    one, two = records(whole), records(parts)
    assert [start["layout"]["rank_order"] for start in two["start"]] == list(orders)
    names = ("iteration", "consumed_samples", "learning_rate")
    assert values(one["iteration"], *names) == values(two["iteration"], *names)
    losses = [[r["lm_loss"] for r in side["iteration"]] for side in (one, two)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    taken = [sorted({number for rank in ranks for number, _ in rank}) for ranks in noted]
    assert taken == [list(range(16)), list(range(16, 24))] and taken[0] + taken[1] == sorted(
        n for n, _ in samples
    )


def write_numbers(prefix: Path, tokens: int) -> str:
    """Write one document of ascending tokens, so that a sample's first token tells its number."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document(range(tokens))
    return str(prefix)


def run_and_note(rank: int, fields: dict[str, Any]) -> list[tuple[int, list[int]]]:
    """Return the training samples on this rank, for each micro-batch.

    Each is (number of the first sample, first token of each).
    """
    noted: list[tuple[int, list[int]]] = []
    plain = MicroBatchStream.take

    def take(self: MicroBatchStream, n: int) -> Any:
        batches = plain(self, n)
        noted.extend((batch.first_sample, batch.tokens[:, 0].tolist()) for batch in batches)
        return batches

    MicroBatchStream.take = take  # type: ignore[method-assign]
    run(rank, fields)
    return noted


@pytest.mark.parametrize(
    "kind", ["single", pytest.param("cyclic", marks=pytest.mark.campaign("kills"))]
)
def test_resizes_in_mid_run_drop_and_repeat_no_sample(tmp_path: Path, kind: str) -> None:
    """Resizes in mid-run drop and repeat no sample.

    Data-parallel size is 2, 4, 1 and 2, with checkpoints between, while the batch grows and
    micro-batches change.
    """
    prefix, save = write_numbers(tmp_path / "x", 8 * 96 + 1), str(tmp_path / "run")
    fields = dict(
        mock_data=False,
        data_path=(prefix,),
        split="1",
        train_data_exact_num_epochs=1,
        dataloader_type=kind,
        save=save,
        vocab_size=800,
        num_layers=2,
        train_iters=None,
        train_samples=96,
        eval_iters=0,
        global_batch_size=16,
        rampup_batch_size=(8, 8, 64),
        load=save,
        hidden_dropout=0.0,
    )
    noted = []
    for processes, mbs, workers, end in ((2, 2, 2, 2), (4, 2, 0, 4), (1, 8, 1, 6), (2, 4, 1, None)):
        part = dict(micro_batch_size=mbs, num_workers=workers, exit_interval=end)
        noted += [
            note
            for rank in run_processes(processes, run_and_note, {**fields, **part})
            for note in rank
        ]
    taken = [token // 8 for _, tokens in sorted(noted) for token in tokens]
    assert sorted(taken) == list(range(96))  # all samples of the epoch, each once
    order = run_processes(
        1, run_and_note, {**fields, "save": None, "load": None, "micro_batch_size": 2}
    )[0]
    assert taken == [token // 8 for _, tokens in order for token in tokens]
    found = records(tmp_path / "run")
    assert found["end"][-1]["consumed_samples"] == 96
    assert [r["sources"][prefix]["samples"] for r in found["data"]] == [16, 32, 48, 96]
    assert found["data"][-1]["sources"] == {
        prefix: {"samples": 96, "tokens": 768, "epochs": pytest.approx(768 / 769)}
    }


def run_and_listen(rank: int, fields: dict[str, Any]) -> list[str]:
    """Return the lines about data that the run prints."""
    said: list[str] = []
    Console.say = lambda self, text: said.append(text)  # type: ignore[method-assign]
    run(rank, fields)
    return [text for text in said if text.startswith(" data: ")]


def test_the_ledger_outlives_a_change_of_the_blend(tmp_path: Path) -> None:
    a, b, c = (write_numbers(tmp_path / name, 80) for name in "abc")
    fields = dict(
        mock_data=False,
        split="1",
        num_layers=2,
        vocab_size=80,
        save=str(tmp_path / "run"),
        eval_iters=0,
    )
    run_processes(1, run, dict(fields, data_path=("1", a, "1", b), exit_interval=4))
    resumed = dict(fields, data_path=("3", a, "1", c), load=str(tmp_path / "run"))
    said, others = run_processes(2, run_and_listen, resumed)
    assert said == others and "epoch 2" in said[0] and "iteration 5" in said[0]
    assert all(figure in said[1] for figure in ("192", "a 1.400", "b 0.800", "c 0.200"))
    first, last = records(tmp_path / "run")["data"]
    assert {name: count["samples"] for name, count in first["sources"].items()} == {a: 8, b: 8}
    # 8 of 24 samples are left; 3 : 1 holds for the blend as a whole, whose first 16 samples were
    # not read from it.
    assert {name: count["samples"] for name, count in last["sources"].items()} == {
        a: 8 + 6,
        b: 8,
        c: 2,
    }
    assert last["sources"][a] == {"samples": 14, "tokens": 112, "epochs": pytest.approx(1.4)}


def test_a_run_on_packed_documents(tmp_path: Path) -> None:
    """Run on packed documents with three stages.

    The middle one needs the bounds of the documents too, but no end-of-document id.
    """
    sizes = np.random.RandomState(1).randint(1, 30, 60)
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        for size in sizes.tolist():
            writer.add_document([size] * size)
    fields = dict(
        mock_data=False,
        data_path=(str(tmp_path / "x"),),
        split="1",
        num_layers=3,
        vocab_size=30,
        eval_iters=0,
        data_packing="best-fit",
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    said = run_processes(1, run_and_listen, dict(fields, save=str(whole)))[0]
    run_processes(3, run, dict(fields, save=str(parts), pipeline_model_parallel_size=3))
    one, two = records(whole), records(parts)
    # Fewer than 8 of 8 predictions in each of 24 samples: predictions across documents or of
    # padding are not trained on.
    tokens = one["data"][-1]["sources"][str(tmp_path / "x")]["tokens"]
    assert 24 * 4 < tokens < 24 * 8 and f" {tokens} " in said[-1]
    assert two["data"][-1]["sources"] == one["data"][-1]["sources"]
    losses = [[record["lm_loss"] for record in side["iteration"]] for side in (one, two)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def run_with_bad_micro_batch(rank: int, fields: dict[str, Any]) -> None:
    """Make step 2's loss infinite on data-parallel rank 1 alone."""
    plain = gpt.GPTChunk.forward

    def forward(self: Any, batch: Any, hidden: Any, **options: Any) -> Any:
        out = plain(self, batch, hidden, **options)
        return (
            out * float("inf")
            if self.is_last and self.training and batch.first_sample == 5
            else out
        )

    gpt.GPTChunk.forward = forward  # type: ignore[method-assign]
    run(rank, fields)


def test_a_step_that_overflows_is_skipped_and_counted(tmp_path: Path) -> None:
    fields = dict(
        save=str(tmp_path), log_interval=1, train_iters=3, fp16=True, initial_loss_scale=256.0
    )
    run_processes(2, run_with_bad_micro_batch, fields)
    found = records(tmp_path)
    assert values(found["iteration"], "iteration", "skipped", "nan") == [
        (1, 0, 0),
        (2, 1, 1),
        (3, 0, 0),
    ]
    assert [r["lm_loss"] is None for r in found["iteration"]] == [False, True, False]
    assert found["end"][0]["skipped_iterations"] == 1


def run_and_fail(rank: int, fields: dict[str, Any]) -> None:
    """Fail on rank 1 after its second step."""
    if rank == 1:
        strike("megatron.run.step", 2, "fail")
    run(rank, fields)


def test_when_one_rank_fails_the_others_name_it() -> None:
    (_, other), (_, failed) = run_processes_raw(
        2, run_and_fail, dict(pipeline_model_parallel_size=2, eval_iters=0)
    )
    assert failed.startswith("RuntimeError: ")
    said = other.splitlines()[0]
    assert said.startswith("LaunchError: rank 0") and "rank 1" in said and "planted" in said


def test_an_evaluation_changes_no_step(tmp_path: Path) -> None:
    """An evaluation changes neither the dropout of later steps nor their data.

    Without --eval-at-start the first one follows the first step.
    """
    losses = []
    for iterations in (0, 2):
        fields = dict(
            save=str(tmp_path / str(iterations)),
            eval_iters=iterations,
            eval_interval=1,
            train_iters=3,
        )
        run_processes(1, run, {**fields, "num_layers": 2, "log_interval": 1})
        found = records(tmp_path / str(iterations))
        losses.append(values(found["iteration"], "lm_loss"))
    # After the last step the loss is measured once on validation data, and on test data.
    assert values(found["validation"], "iteration", "dataset") == [
        (1, "valid"),
        (2, "valid"),
        (3, "valid"),
        (3, "test"),
    ]
    assert losses[0] == losses[1]


def test_the_same_weights_have_one_validation_loss(tmp_path: Path) -> None:
    """Another job that has nothing left to train evaluates the last weights on the same samples."""
    fields = dict(save=str(tmp_path), load=str(tmp_path), num_layers=2, train_iters=6)
    for _ in range(2):
        run_processes(1, run, fields)
    found = [r for r in records(tmp_path)["validation"] if r["dataset"] == "valid"]
    assert values(found, "iteration") == [(3,), (6,), (6,)]
    before, last, again = (record["lm_loss"] for record in found)
    assert last == again != before


def test_collections_inside_a_training_skip_what_was_there_before() -> None:
    automatic = gc.isenabled()
    with garbage_collection(automatic=False):
        assert gc.get_freeze_count() > 10_000 and not gc.isenabled()
    assert gc.get_freeze_count() == 0 and gc.isenabled() == automatic
