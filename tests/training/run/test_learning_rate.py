"""Learning-rate and weight-decay schedules, against values worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.training.run.schedules import LearningRateSchedule, WeightDecaySchedule


def config(**fields: Any) -> SimpleNamespace:
    optimizer = dict(
        lr=1.0,
        min_lr=0.1,
        lr_decay_style="linear",
        lr_decay_iters=None,
        lr_decay_samples=None,
        lr_decay_tokens=None,
        lr_warmup_fraction=None,
        lr_warmup_iters=0,
        lr_warmup_samples=0,
        lr_warmup_tokens=None,
        lr_wsd_decay_style="exponential",
        lr_wsd_decay_iters=None,
        lr_wsd_decay_samples=None,
        weight_decay=0.1,
        start_weight_decay=None,
        end_weight_decay=None,
        weight_decay_incr_style="constant",
    )
    batch = dict(
        global_batch_size=8,
        rampup_batch_size=None,
        train_iters=None,
        train_samples=None,
        train_tokens=None,
    )
    for name, value in fields.items():
        (batch if name in batch else optimizer)[name] = value
    return SimpleNamespace(
        optimizer=SimpleNamespace(**optimizer),
        batch=SimpleNamespace(**batch),
        model=SimpleNamespace(seq_length=16),
    )


def lr(schedule: LearningRateSchedule, iteration: int) -> float:
    return schedule.lr(iteration, 8 * iteration, 128 * iteration)


@pytest.mark.parametrize(
    ("style", "at", "expected"),
    [
        ("constant", 4, 1.0),
        ("constant", 1000, 1.0),
        ("linear", 0, 0.0),
        ("linear", 2, 0.5),
        ("linear", 4, 1.0),
        ("linear", 54, 0.55),
        ("linear", 104, 0.1),
        ("linear", 105, 0.1),
        ("cosine", 29, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),
        ("cosine", 54, 0.55),
        ("cosine", 104, 0.1),
        ("cosine", 1000, 0.1),
        ("inverse-square-root", 4, 1.0),
        ("inverse-square-root", 16, 0.5),
        ("inverse-square-root", 64, 0.25),
        ("inverse-square-root", 105, 0.1),
    ],
)
def test_closed_forms(style: str, at: int, expected: float) -> None:
    schedule = LearningRateSchedule(
        config(lr_decay_style=style, lr_decay_iters=104, lr_warmup_iters=4)
    )
    assert lr(schedule, at) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("style", "part"),
    [
        ("linear", 0.75),
        ("cosine", (1 + math.cos(math.pi / 4)) / 2),
        ("exponential", 2 * 0.5**0.25 - 1),
        ("minus_sqrt", 0.5),
    ],
)
def test_warmup_stable_decay(style: str, part: float) -> None:
    schedule = LearningRateSchedule(
        config(
            lr_decay_style="WSD",
            lr_wsd_decay_style=style,
            lr_decay_iters=100,
            lr_warmup_iters=10,
            lr_wsd_decay_iters=20,
        )
    )
    assert [lr(schedule, i) for i in (5, 10, 11, 80)] == [0.5, 1.0, 1.0, 1.0]
    assert lr(schedule, 85) == pytest.approx(0.1 + 0.9 * part)
    assert lr(schedule, 100) == pytest.approx(0.1)
    assert lr(schedule, 101) == 0.1


@given(st.integers(0, 130))
def test_units_agree(iteration: int) -> None:
    """One schedule is the same in iterations, samples (8 each) and tokens (16 per sample)."""
    by = [
        config(lr_decay_iters=100, lr_warmup_iters=10),
        config(lr_decay_samples=800, lr_warmup_samples=80),
        config(lr_decay_tokens=12800, lr_warmup_tokens=1280),
        config(lr_decay_iters=100, lr_warmup_fraction=0.1),
        config(lr_decay_samples=800, lr_warmup_iters=10),
        config(lr_decay_tokens=12800, lr_warmup_samples=80),
        config(train_iters=100, lr_warmup_tokens=1280),
        config(train_samples=800, lr_warmup_fraction=0.1),
    ]
    values = [lr(LearningRateSchedule(c), iteration) for c in by]
    assert values == pytest.approx([values[0]] * len(values), abs=1e-12)


@given(st.sampled_from(["linear", "cosine", "inverse-square-root", "WSD"]), st.integers(1, 300))
def test_stays_within_bounds_and_falls_after_warmup(style: str, iteration: int) -> None:
    schedule = LearningRateSchedule(
        config(lr_decay_style=style, lr_decay_iters=200, lr_warmup_iters=20, lr_wsd_decay_iters=50)
    )
    here, following = lr(schedule, iteration), lr(schedule, iteration + 1)
    assert 0 <= here <= 1.0
    if iteration >= 20:
        assert 0.1 <= following <= here


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(), "train-iters"),
        (dict(train_iters=10, lr_warmup_iters=10), "10"),
        (dict(train_iters=10, lr_decay_style="WSD", lr_wsd_decay_iters=11), "11"),
        (
            dict(train_samples=100, lr_warmup_iters=1, rampup_batch_size=(2, 2, 50)),
            "iterations.*samples",
        ),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LearningRateSchedule(config(**fields))


def test_ramp_up_with_samples_and_tokens_is_no_contradiction() -> None:
    c = config(lr_decay_tokens=1600, lr_warmup_samples=10, rampup_batch_size=(2, 2, 50))
    assert LearningRateSchedule(c).lr(0, 5, 80) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("style", "at", "expected"),
    [
        ("constant", 50, 0.2),
        ("linear", 25, 0.15),
        ("cosine", 25, 0.1 + 0.2 * (1 - math.sqrt(0.5)) / 2),
        ("cosine", 50, 0.2),
        ("linear", 100, 0.3),
        ("linear", 200, 0.3),
    ],
)
def test_weight_decay(style: str, at: int, expected: float) -> None:
    ends = (
        dict(start_weight_decay=0.2, end_weight_decay=0.2)
        if style == "constant"
        else dict(start_weight_decay=0.1, end_weight_decay=0.3)
    )
    schedule = WeightDecaySchedule(config(weight_decay_incr_style=style, train_samples=800, **ends))
    assert schedule.weight_decay(at, 8 * at, 128 * at) == pytest.approx(expected)


def test_weight_decay_defaults_and_contradictions() -> None:
    assert WeightDecaySchedule(config()).weight_decay(7) == 0.1
    with pytest.raises(ConfigError, match="train-iters"):
        WeightDecaySchedule(config(start_weight_decay=0.0, weight_decay_incr_style="linear"))
