"""Refinement by runs, on made-up metrics files whose times are known multiples of the estimate's."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.calibration.refine import messages_s, read_run, refined, render
from megatron.config import Config
from megatron.errors import DataError
from megatron.planning.cluster import load_cluster
from megatron.planning.timing import estimate

FRONTIER = load_cluster("frontier")
MODEL: dict[str, Any] = dict(
    num_layers=8, hidden_size=2048, num_attention_heads=16, seq_length=2048, vocab_size=50257, global_batch_size=16,
    fp16=True, world_size=8,
)
QUIET = Config.create(**MODEL)
TALKING = Config.create(**MODEL, tensor_model_parallel_size=8, sequence_parallel=True, tp_comm_overlap=False)


def metrics(path: Path, config: Config, passes: float, rest: float, **changes: Any) -> Path:
    """A run of six steps, of which the first three take ten times as long."""
    records: list[dict[str, Any]] = [{"event": "start", "iteration": 0, "config": config.to_dict()}]
    for i in range(1, 7):
        slow = 10.0 if i <= 3 else 1.0
        times = {"forward-backward": {"min": 1.0, "max": 1e3 * passes * slow}, "optimizer": {"min": 1.0, "max": 2.0}}
        records.append({
            "event": "iteration", "iteration": i, "step_time_s": slow * (passes + rest), "skipped": 0,
            "global_batch_size": config.batch.global_batch_size, "times_ms": times, **changes,
        })  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def test_one_run_corrects_everything_to_what_it_took(tmp_path: Path) -> None:
    found = estimate(QUIET, FRONTIER)
    passes, rest = found.run.makespan, found.seconds - found.run.makespan
    path = metrics(tmp_path / "metrics.jsonl", QUIET, 1.3 * passes, 1.3 * rest)
    cluster, outcome = refined(FRONTIER, [path])
    assert outcome.factors.compute == outcome.factors.messages == pytest.approx(1.3)
    assert outcome.factors.rest == pytest.approx(1.3, rel=0.02)
    (row,) = outcome.runs
    assert row.run.seconds == pytest.approx(1.3 * found.seconds) and row.before == found.seconds
    assert row.after == pytest.approx(1.3 * found.seconds, rel=0.01)
    before, after = FRONTIER.compute.figures["products.float16"], cluster.compute.figures["products.float16"]
    assert [point[-1] for point in after.points] == pytest.approx([point[-1] / 1.3 for point in before.points])
    assert after.basis == before.basis and "times 1.300 by the step times of 1 run(s)" in after.source
    assert cluster.nic_gb_per_s == pytest.approx(25 / 1.3)
    assert cluster.compute.figures["hop_within_s"].value == pytest.approx(
        1.3 * FRONTIER.compute.figures["hop_within_s"].value
    )
    assert "1.300 for computations" in render(outcome) and "-23.1 %" in render(outcome)


def test_runs_with_other_shares_of_messages_tell_the_factors_apart(tmp_path: Path) -> None:
    paths = []
    for name, config in (("quiet", QUIET), ("talking", TALKING)):
        found = estimate(config, FRONTIER)
        sent = messages_s(found)
        passes = 1.2 * (found.run.makespan - sent) + 2.0 * sent
        rest = found.seconds - found.run.makespan
        paths.append(metrics(tmp_path / name / "metrics.jsonl", config, passes, rest))
    _, outcome = refined(FRONTIER, [path.parent for path in paths])
    assert outcome.factors.compute == pytest.approx(1.2) and outcome.factors.messages == pytest.approx(2.0)
    assert outcome.factors.runs == 2


def test_the_last_start_and_steady_steps_with_the_full_batch_count(tmp_path: Path) -> None:
    path = metrics(tmp_path / "metrics.jsonl", QUIET, 2.0, 0.5)
    run = read_run(path)
    assert (run.passes, run.rest) == (2.0, 0.5)
    again = path.read_text() + metrics(tmp_path / "later.jsonl", QUIET, 3.0, 1.0).read_text()
    path.write_text(again)
    assert read_run(path).passes == 3.0


def test_what_is_no_metrics_file_of_a_long_enough_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none.jsonl: No such file"):
        read_run(tmp_path / "none.jsonl")
    (tmp_path / "log.txt").write_text("hello\n")
    with pytest.raises(DataError, match="no record of a start"):
        read_run(tmp_path / "log.txt")
    skipped = metrics(tmp_path / "skipped.jsonl", QUIET, 1.0, 1.0, skipped=1)
    with pytest.raises(DataError, match=r"0 record\(s\) of steps with the full batch after the first 3: at least 3"):
        read_run(skipped)
    path = metrics(tmp_path / "untimed.jsonl", QUIET, 1.0, 1.0)
    path.write_text(path.read_text().replace("times_ms", "other"))
    with pytest.raises(DataError, match="run with --timing-log-level 1"):
        read_run(path)
