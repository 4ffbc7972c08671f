"""Time that is left for trials: of the command line's and of the allocation's."""
from __future__ import annotations

import pytest

from megatron.tuning.session import time_of


def test_the_time_left_is_the_least_of_both_and_the_scheduler_is_asked_now_and_then(monkeypatch: pytest.MonkeyPatch):
    now, asked = [100.0], list[float]()
    monkeypatch.setattr("megatron.tuning.session.time.monotonic", lambda: now[0])

    def allocation_s() -> float | None:
        asked.append(now[0])
        return 1000.0 - (now[0] - 100.0)

    left_s = time_of(900.0, allocation_s, reserve_s=60.0)
    assert left_s() == 900.0
    left_s = time_of(None, allocation_s, reserve_s=60.0)
    asked.clear()
    for _ in range(100):
        assert left_s() == pytest.approx(1040.0 - now[0])
        now[0] += 1.0
    assert len(asked) == 4
    assert time_of(None, lambda: None, reserve_s=60.0)() is None


def test_a_scheduler_that_does_not_answer_is_taken_at_its_last_word(monkeypatch: pytest.MonkeyPatch):
    now, answers = [100.0], iter([500.0, None, 430.0])
    monkeypatch.setattr("megatron.tuning.session.time.monotonic", lambda: now[0])
    left_s = time_of(None, lambda: next(answers), reserve_s=60.0)
    said = []
    for now[0] in (100.0, 140.0, 180.0):
        said.append(left_s())
    assert said == [440.0, 400.0, 370.0]
