"""Whether a trial is well: by steps that come, and by time in which somebody looked."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.planning.experiments.endings import HANG, TIME_OUT, Ending
from megatron.tuning.watch import Watch


class Looking:
    """Looks five times a second of its own clock. steps: as many as the trial has done."""

    def __init__(self, folder: Path, limit_s: float, stall_s: float | None) -> None:
        self.now, self._metrics = 5000.0, folder / "metrics.jsonl"
        self.watch = Watch(self._metrics, 100, self.now, limit_s, stall_s, 0.5)

    def for_s(self, seconds: float) -> Ending | None:
        """The first thing that it finds, and when."""
        for _ in range(round(5 * seconds)):
            self.now += 0.2
            if (found := self.watch.look(self.now)) is not None:
                return found
        return None

    def step(self) -> None:
        with open(self._metrics, "a") as file:
            file.write(json.dumps({"event": "iteration", "iteration": 1, "step_time_s": 0.5}) + "\n")


@pytest.mark.parametrize(("stall_s", "patience_s"), [(None, 60), (10.0, 10)])
def test_steps_that_do_not_come_are_a_hang_and_a_limit_is_one(
    tmp_path: Path, stall_s: float | None, patience_s: float
) -> None:
    of = Looking(tmp_path, 300.0, stall_s)
    assert of.for_s(100) is None, "before the first step it has its limit"
    of.step()
    assert of.for_s(patience_s - 1) is None
    of.step()
    assert of.for_s(patience_s - 1) is None
    found = of.for_s(2)
    assert found is not None and found.kind == HANG and "2 of 100" in found.reason
    slow = Looking(tmp_path / "none", 300.0, stall_s)
    assert slow.for_s(299) is None
    found = slow.for_s(2)
    assert found is not None and found.kind == TIME_OUT


def test_time_in_which_the_whole_job_stood_still_does_not_count(tmp_path: Path) -> None:
    """Slurm suspends a job with all its processes, the tuner too."""
    of = Looking(tmp_path, 300.0, 10.0)
    of.step()
    assert of.for_s(1) is None
    of.now += 86400
    assert of.for_s(4) is None
    found = of.for_s(10)
    assert found is not None and found.kind == HANG
