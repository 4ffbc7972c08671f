"""Whole runs through `pretrain`: what they write, how they end, and that a resumed one is the same one."""
from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config import Config
from megatron.data.gpt_dataset import MockDataset
from megatron.training import pretrain
from megatron.training.metrics import read_metrics
from tests.helpers.processes import run_processes, run_processes_raw

FIELDS: dict[str, Any] = dict(
    num_layers=4, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=24, make_vocab_size_divisible_by=8,
    micro_batch_size=1, global_batch_size=4, mock_data=True, num_workers=0, train_iters=6, lr=1e-2, min_lr=1e-3,
    lr_decay_style="cosine", log_interval=2, eval_interval=3, eval_iters=2, hidden_dropout=0.2, attention_dropout=0.0,
    distributed_timeout_minutes=1.0,
)  # fmt: skip
INTERLEAVED = dict(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1)


def run(rank: int, fields: dict[str, Any]) -> None:
    pretrain(Config.create(**{**FIELDS, **fields}, world_size=int(os.environ["WORLD_SIZE"])))


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for record in read_metrics(folder / "metrics.jsonl"):
        found.setdefault(record["event"], []).append(record)
    return found


def values(found: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(record[name] for name in names) for record in found]


def test_a_run_writes_what_happened(tmp_path: Path) -> None:
    run_processes(2, run, dict(save=str(tmp_path), train_iters=5, save_interval=2, **INTERLEAVED))
    found = records(tmp_path)
    (start,), (end,) = found["start"], found["end"]
    assert start["layout"] == {"world": 2, "tensor": 1, "pipeline": 2, "data": 1}
    assert start["config"]["hidden_size"] == 16 and set(start["versions"]) == {"python", "torch", "deepspeed"}
    # Every second iteration, and the rest of the last interval.
    assert values(found["iteration"], "iteration", "consumed_samples", "consumed_tokens", "total_iterations") == [
        (2, 8, 64, 5), (4, 16, 128, 5), (5, 20, 160, 5)
    ]  # fmt: skip
    # Before the first step, at the interval, at the end on validation and test data.
    assert values(found["validation"], "iteration", "dataset", "samples") == [
        (0, "valid", 8), (3, "valid", 8), (5, "valid", 8), (5, "test", 8)
    ]  # fmt: skip
    assert values(found["checkpoint"], "iteration") == [(2,), (4,), (5,)]
    assert (end["iteration"], end["reason"]) == (5, "done")
    # An untrained model with small weights gives every one of the 24 entries about the same probability.
    assert found["validation"][0]["lm_loss"] == pytest.approx(np.log(24), abs=0.05)


def test_a_resumed_run_on_another_layout_is_the_same_run(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_processes(1, run, dict(save=str(whole)))
    run_processes(2, run, dict(save=str(parts), exit_interval=4, **INTERLEAVED))
    run_processes(2, run, dict(save=str(parts), load=str(parts), tensor_model_parallel_size=2))
    one, two = records(whole), records(parts)
    names = ("iteration", "consumed_samples", "learning_rate")
    assert values(one["iteration"], *names) == values(two["iteration"], *names)
    assert values(two["end"], "iteration", "reason") == [(4, "exiting program at iteration 4"), (6, "done")]
    # Dropout is on: masks (which only sequence parallelism changes), data order and optimizer must all continue.
    # 1e-5 is fp32 rounding of another layout.
    for event in ("iteration", "validation"):
        losses = [[r["lm_loss"] for r in side[event]] for side in (one, two)]
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def run_with_bad_micro_batch(rank: int, fields: dict[str, Any]) -> None:
    """Step 2's loss is infinite on data-parallel rank 1 alone."""
    from megatron.model import gpt

    plain = gpt.GPTChunk.forward

    def forward(self: Any, batch: Any, hidden: Any) -> Any:
        out = plain(self, batch, hidden)
        return out * float("inf") if self.is_last and self.training and batch.first_sample == 5 else out

    gpt.GPTChunk.forward = forward  # type: ignore[method-assign]
    run(rank, fields)


def test_a_step_that_overflows_is_skipped_and_counted(tmp_path: Path) -> None:
    fields = dict(save=str(tmp_path), log_interval=1, train_iters=3, fp16=True, initial_loss_scale=256.0)
    run_processes(2, run_with_bad_micro_batch, fields)
    found = records(tmp_path)
    assert values(found["iteration"], "iteration", "skipped", "nan") == [(1, 0, 0), (2, 1, 1), (3, 0, 0)]
    assert [r["lm_loss"] is None for r in found["iteration"]] == [False, True, False]
    assert found["end"][0]["skipped_iterations"] == 1


def run_and_signal(rank: int, fields: dict[str, Any]) -> None:
    """Rank 1 gets a signal during the second step."""
    plain = MockDataset.__getitem__

    def get(self: MockDataset, index: int) -> Any:
        if rank == 1 and index == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, index)

    MockDataset.__getitem__ = get  # type: ignore[method-assign]
    run(rank, fields)


def test_a_signal_on_one_rank_saves_and_ends_all(tmp_path: Path) -> None:
    run_processes(2, run_and_signal, dict(save=str(tmp_path), exit_signal_handler=True, train_iters=50, eval_iters=0))
    found = records(tmp_path)
    assert values(found["end"], "iteration", "reason") == [(2, "exiting program after receiving SIGTERM")]
    assert values(found["checkpoint"], "iteration") == [(2,)]


def run_and_signal_before_the_first_step(rank: int, fields: dict[str, Any]) -> None:
    """The signal comes during the evaluation before the first step: of 28, 24 and 8 samples, 24 are for validation."""
    plain = MockDataset.__getitem__

    def get(self: MockDataset, index: int) -> Any:
        if self.num_samples == 24 and index == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, index)

    MockDataset.__getitem__ = get  # type: ignore[method-assign]
    run(rank, fields)


def test_a_signal_during_the_first_evaluation_is_not_lost(tmp_path: Path) -> None:
    fields = dict(save=str(tmp_path), exit_signal_handler=True, train_iters=7)
    run_processes(1, run_and_signal_before_the_first_step, fields)
    found = records(tmp_path)
    assert values(found["end"], "iteration", "reason") == [(1, "exiting program after receiving SIGTERM")]
    assert values(found["checkpoint"], "iteration") == [(1,)]


def run_and_fail(rank: int, fields: dict[str, Any]) -> None:
    """Rank 1 has a defect at its sixth sample."""
    plain = MockDataset.__getitem__

    def get(self: MockDataset, index: int) -> Any:
        if rank == 1 and index == 5:
            raise ZeroDivisionError("sample 5 is bad")
        return plain(self, index)

    MockDataset.__getitem__ = get  # type: ignore[method-assign]
    run(rank, fields)


@pytest.mark.parametrize(
    "fields",
    [
        dict(pipeline_model_parallel_size=2),
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(dict(tensor_model_parallel_size=2), marks=pytest.mark.slow),
    ],
)
def test_when_one_rank_fails_the_others_name_it(fields: dict[str, Any]) -> None:
    outcomes = run_processes_raw(2, run_and_fail, {**fields, "eval_iters": 0}, timeout_s=40)
    assert [succeeded for succeeded, _ in outcomes] == [False, False]
    assert outcomes[1][1].startswith("ZeroDivisionError: sample 5 is bad")
    assert outcomes[0][1].startswith("LaunchError: rank 0")
    assert "rank 1" in outcomes[0][1].splitlines()[0] and "sample 5 is bad" in outcomes[0][1].splitlines()[0]


def test_ramp_up_and_token_limit_end_where_they_should(tmp_path: Path) -> None:
    # 2 + 2 + 3 + 3 + 4 samples: 2 until 4 are consumed, 3 until 10 (two shares of 4 samples), then 4.
    fields = dict(save=str(tmp_path), rampup_batch_size=(2, 1, 8), train_iters=None, train_samples=14, log_interval=1,
                  lr_decay_samples=14, eval_iters=0)  # fmt: skip
    run_processes(1, run, fields)
    sizes = [r["global_batch_size"] for r in records(tmp_path)["iteration"]]
    assert sizes == [2, 2, 3, 3, 4] and sum(sizes) == 14
