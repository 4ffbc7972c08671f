"""Figures of an interval, and the metrics file."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import ConfigError
from megatron.metrics_file import read_records
from megatron.parallel.topology import Layout, Topology
from megatron.training.report.metrics import Interval, MetricsFile, Rates, StepRecord

SINGLE = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))


def step(
    iteration: int, loss: float | None, *, skipped: bool = False, batch: int = 4
) -> StepRecord:
    value = None if loss is None else torch.tensor(loss)
    return StepRecord(
        iteration, 4 * iteration, 32 * iteration, batch, 1e-3 * iteration, value, skipped, 1.0, 0.5
    )


def test_interval_leaves_skipped_steps_out_and_counts_them() -> None:
    interval = Interval(SINGLE, Rates(1, 8, 100.0, 150.0, peak_flops_per_s=1000.0))
    skipped = step(2, math.inf, skipped=True), step(4, math.nan, skipped=True)
    for record in (step(1, 3.0), skipped[0], step(3, 2.0, batch=8), skipped[1]):
        interval.steps.append(record)
    losses, memory = interval.reduce(77, 99)
    report = interval.report(losses, 10, elapsed_s=2.0, memory=memory)
    assert report.lm_loss == (3.0 + 2.0) / 2
    assert (report.skipped, report.nan) == (2, 2)
    assert report.step_time_s == 2.0 / 4
    assert report.samples_per_s == (4 + 4 + 8 + 4) / 2.0
    assert report.tokens_per_s == 8 * report.samples_per_s
    assert report.model_tflops == 10 * 100 / 1e12 and report.hardware_tflops == 10 * 150 / 1e12
    assert (report.mfu, report.hfu) == (1.0, 1.5)
    assert (report.iteration, report.learning_rate, report.total_iterations) == (4, 4e-3, 10)
    assert (report.memory_bytes, report.memory_rank, report.reserved_bytes) == (77, 0, 99)
    assert {"memory_bytes", "memory_rank", "reserved_bytes"} < report.as_record().keys()
    assert len(interval.steps) == 0  # counts start anew at each log line


def test_metrics_file_appends_and_survives_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    first = MetricsFile(path, clock=lambda: 12.5)
    first.write(
        "iteration", iteration=1, lm_loss=1 / 3, grad_norm=math.inf, nested={"a": [math.nan, 1.0]}
    )
    # Flushed: readable while the run continues.
    (record,) = read_records(path)
    assert record == {
        "event": "iteration",
        "time": 12.5,
        "iteration": 1,
        "lm_loss": 1 / 3,
        "grad_norm": None,
        "nested": {"a": [None, 1.0]},
    }
    first.close()
    with open(path, "a") as file:
        file.write('{"event": "iterat')  # killed during the write
    resumed = MetricsFile(path)
    resumed.write("validation", iteration=2)
    resumed.close()
    assert [r["event"] for r in read_records(path)] == ["iteration", "validation"]
    assert [r["iteration"] for r in read_records(path, "validation")] == [2]
    json.loads(path.read_text().splitlines()[-1])


def test_metrics_file_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="metrics-file.*file/metrics.jsonl"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl")
    with pytest.raises(ConfigError, match="^--save "):
        MetricsFile(tmp_path / "file" / "metrics.jsonl", flag="--save file")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="fifo"):
        MetricsFile(tmp_path / "fifo")


def test_a_disk_that_is_full_for_a_while_loses_records_and_not_the_run(tmp_path: Path) -> None:
    class Disk(io.RawIOBase):
        """Disk that takes 40 bytes of the second record and nothing of the third."""

        def __init__(self) -> None:
            self.held, self.calls = b"", 0

        def write(self, data: Any) -> int:
            self.calls += 1
            if self.calls == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken = bytes(data)[: 40 if self.calls == 2 else None]
            self.held += taken
            return len(taken)

    said: list[str] = []
    metrics, disk = MetricsFile(tmp_path / "m.jsonl", warn=said.append), Disk()
    metrics._file = disk  # type: ignore[assignment]
    (tmp_path / "full.jsonl").write_text('{"event": "iterat')
    # A run resumed on it writes nothing before there is a record.
    MetricsFile(tmp_path / "full.jsonl")
    assert (tmp_path / "full.jsonl").read_text() == '{"event": "iterat'
    for iteration in range(1, 6):
        metrics.write("iteration", iteration=iteration, padding="x" * 40)
    (tmp_path / "m.jsonl").write_bytes(disk.held)
    assert [r["iteration"] for r in read_records(tmp_path / "m.jsonl")] == [1, 4, 5]
    assert len(said) == 1 and str(tmp_path / "m.jsonl") in said[0]
