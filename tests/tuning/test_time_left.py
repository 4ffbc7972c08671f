"""Time that is left for trials: of the command line's and of the allocation's."""
from __future__ import annotations

import pytest

from megatron.tuning.session import time_of
from tests.helpers.clock import VirtualClock


def test_the_time_left_is_the_least_of_both_and_the_scheduler_is_asked_now_and_then() -> None:
    clock, asked = VirtualClock(100.0), list[float]()

    def allocation_s() -> float | None:
        asked.append(clock())
        return 1000.0 - (clock() - 100.0)

    assert time_of(900.0, allocation_s, reserve_s=60.0, clock=clock)() == 900.0
    left_s = time_of(None, allocation_s, reserve_s=60.0, clock=clock)
    asked.clear()
    for _ in range(100):
        assert left_s() == pytest.approx(1040.0 - clock())
        clock.advance(1.0)
    assert len(asked) == 4
    assert time_of(None, lambda: None, reserve_s=60.0)() is None


def test_a_scheduler_that_does_not_answer_is_taken_at_its_last_word() -> None:
    clock, answers = VirtualClock(0.0), iter([500.0, None, 430.0])
    left_s = time_of(None, lambda: next(answers), reserve_s=60.0, clock=clock)
    said = []
    for _ in range(3):
        said.append(left_s())
        clock.advance(40.0)
    assert said == [440.0, 400.0, 370.0]
