"""Figures of an interval."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron.training.report.events import StepRecord
from megatron.training.report.metrics import FlopRates, Interval
from tests.helpers.tiny import rank_topology, tiny

SINGLE = rank_topology()


def step(iteration, loss, *, skipped=False, batch=4):
    value = None if loss is None else torch.tensor(loss)
    return StepRecord(
        iteration, 4 * iteration, 32 * iteration, batch, 1e-3 * iteration, value, skipped, 1.0, 0.5
    )


def test_interval_leaves_skipped_steps_out_and_counts_them():
    interval = Interval(SINGLE, FlopRates(1, 8, 100.0, 150.0, peak_flops_per_s=1000.0), tiny())
    skipped = step(2, math.inf, skipped=True), step(4, math.nan, skipped=True)
    for record in (step(1, 3.0), skipped[0], step(3, 2.0, batch=8), skipped[1]):
        interval.steps.append(record)
    interval.meter = SimpleNamespace(used_j=lambda: 40.0)
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
    assert report.stage_memory_bytes == (77,)
    assert (report.energy_j, report.joules_per_token) == (40.0, 40.0 / (20 * 8))
    assert len(interval.steps) == 0  # counts start anew at each log line


def test_energy_is_counted_per_token_and_in_all():
    interval = Interval(SINGLE, FlopRates(1, 8, 100.0, 150.0), tiny())
    joules = iter([40.0, 24.0, math.nan, 1.0])
    interval.meter = SimpleNamespace(used_j=lambda: next(joules))
    for expected, used in ((40.0, 40.0), (24.0, 64.0), (None, math.nan), (1.0, math.nan)):
        interval.steps.append(step(1, 3.0))
        losses, memory = interval.reduce(77, None)
        phases = {"forward": [1.0, 3.0, 8.0]}
        report = interval.report(losses, 10, elapsed_s=2.0, memory=memory, phases=phases)
        assert report.energy_j == expected
        assert report.joules_per_token == (expected and expected / 32)
        assert interval.used_j == pytest.approx(used, nan_ok=True)
        assert report.phases_ms == {"forward": {"min": 1.0, "mean": 4.0, "max": 8.0}}
