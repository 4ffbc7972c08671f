"""Times of a run's saves; a failed save costs nothing but that save."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.errors import CheckpointError
from megatron.training.run.checkpoints import Saves
from megatron.training.run.stopping import Agreement
from tests.helpers.tiny import rank_topology


class FakeSaver:
    """Saver without a disk, which records its calls in order. `broken`: calls that fail."""

    def __init__(self):
        self.calls = []
        self.broken = set()
        self.pending = self.written = False
        self.iteration = 0

    def _do(self, *call):
        self.calls.append(call)
        if call[0] in self.broken:
            raise CheckpointError(f"{call[0]}: ENOSPC")

    def start(self, iteration, engine, state, provenance, background):
        assert not self.pending, "a save was under way"
        self._do("start", iteration, background)
        self.iteration = iteration
        self.pending = background
        self.written = False
        return None if background else self._saved()

    def commit(self):
        self.pending = False
        self._do("commit", self.iteration)
        return self._saved()

    def advance(self):
        return self.commit()

    def finish(self):
        return self.commit() if self.pending else None

    def _saved(self):
        folder = Path(f"iter_{self.iteration}")
        return SimpleNamespace(
            folder=folder, iteration=self.iteration, bytes=8, elapsed_s=2.0, stall_s=1.0
        )


class Case:
    """Saves over a FakeSaver, with a clock that the test moves."""

    def __init__(self, saved=None, **changes):
        usual = dict.fromkeys(("save_interval", "save_interval_minutes", "save_trigger_file"))
        checkpoint = SimpleNamespace(**{"save": "folder", "async_save": False, **usual, **changes})
        config = SimpleNamespace(checkpoint=checkpoint)
        self.now = 0.0
        self.saver = FakeSaver()
        self.agreement = Agreement(rank_topology())
        self.messages = []
        self.records = []
        reporter = SimpleNamespace(
            say=self.messages.append,
            publish=lambda event: self.records.append((event.event, event.iteration)),
        )
        arguments = config, self.saver, self.agreement, reporter, None
        self.saves = Saves(*arguments, saved_iteration=saved, clock=lambda: self.now)

    def step(self, iteration, seconds=1.0):
        """Do what the loop does after a step."""
        self.now += seconds
        agreed = self.agreement.now()
        self.saves.commit_written(agreed)
        if self.saves.is_due(iteration, agreed):
            self.saves.save(iteration, {})

    @property
    def starts(self):
        return [call[1] for call in self.saver.calls if call[0] == "start"]

    @property
    def failure(self):
        """Return the error that the failed save would raise at the end of the run."""
        try:
            self.saves.check()
        except CheckpointError as error:
            return str(error)
        return ""


def test_the_interval_counts_iterations():
    case = Case(save_interval=3)
    for i in range(1, 8):
        case.step(i)
    assert case.saver.calls == [("start", 3, False), ("start", 6, False)]
    case.saves.save(7, {}, last=True)
    case.saves.save(7, {}, last=True)
    assert case.saver.calls[2:] == [("start", 7, False)]
    assert case.records == [("checkpoint", i) for i in (3, 6, 7)] and not case.failure


def test_minutes_count_from_the_last_save():
    case = Case(save_interval=5, save_interval_minutes=0.5)
    for i in range(1, 14):
        case.step(i, seconds=12.0)
    # At 36 s; 5 is due by iterations; 30 s after those 60 s; 10 by iterations; 36 s later.
    assert case.starts == [3, 5, 8, 10, 13]


def test_the_trigger_saves_once(tmp_path):
    trigger = tmp_path / "save"
    case = Case(save_trigger_file=str(trigger))
    for i in range(1, 6):
        if i == 3:
            trigger.touch()
        case.step(i)
    assert case.starts == [3] and not trigger.exists()


def test_a_save_that_is_due_comes_before_the_last_one():
    case = Case(save_interval_minutes=1.0)
    assert case.saves.ahead(7) == 1
    case.now = 60.0
    assert case.saves.ahead(7) == 2


def test_what_is_loaded_is_not_saved_again():
    case = Case(saved=4, save_interval=4)
    case.saves.save(4, {}, last=True)
    assert case.saver.calls == []


def test_a_save_in_the_background_is_completed_once_it_is_written():
    case = Case(save_interval=2, async_save=True)
    case.step(1)
    case.step(2)
    case.step(3)
    assert case.saver.calls == [("start", 2, True)] and case.saves.saved_iteration is None
    # The last one, the pending one and, at 4, the one that is due.
    assert case.saves.ahead(4) == 3 and case.saves.ahead(3) == 2
    case.saver.written = True
    case.step(4)
    assert case.saver.calls == [("start", 2, True), ("commit", 2), ("start", 4, True)]
    case.step(5)
    case.step(6)  # the one of 4 is not written: it is awaited
    case.saves.save(6, {}, last=True)
    assert case.saver.calls[3:] == [("commit", 4), ("start", 6, True), ("commit", 6)]
    assert case.saves.saved_iteration == 6 and not case.saves.settle()


def test_a_failed_save_is_tried_again_after_a_minute_of_steps():
    case = Case(save_interval=10)
    case.step(10)
    case.saver.broken = {"start"}
    case.step(20)
    assert "iteration 20" in case.messages[-2] and "ENOSPC" in case.messages[-2]
    assert "iteration 10" in case.messages[-1]
    for i in range(21, 27):
        case.step(i, seconds=11.9)  # 59.5 s after 25
    assert case.starts == [10, 20, 26]
    assert case.records == [
        ("checkpoint", 10),
        ("checkpoint_failed", 20),
        ("checkpoint_failed", 26),
    ]
    assert "iteration 26" in case.failure and "iteration 10" in case.failure
    case.saver.broken = set()
    for i in range(27, 34):
        case.step(i, seconds=11.9)
    # The regular one comes before the minute is over.
    assert case.starts[3:] == [30]
    assert not case.failure and case.saves.saved_iteration == 30


def test_a_background_save_that_fails_is_the_one_of_its_iteration():
    case = Case(save_interval=2, async_save=True)
    case.saver.broken = {"commit"}
    case.step(2)
    case.saver.written = True
    case.step(3)
    assert case.records == [("checkpoint_failed", 2)] and case.saves.saved_iteration is None
    case.saver.broken = set()
    case.saves.save(3, {}, last=True)
    assert case.records[1:] == [("checkpoint", 3)] and not case.failure


def test_the_last_save_does_not_rely_on_one_of_the_same_iteration_that_fails():
    case = Case(save_interval=2, async_save=True)
    case.saver.broken = {"commit"}
    case.step(2)
    case.saves.save(2, {}, last=True)
    assert (
        case.saver.calls == [("start", 2, True), ("commit", 2), ("start", 2, False)]
        and not case.failure
    )


def test_other_errors_are_not_taken_for_a_full_disk():
    """Other errors are not taken for a full disk.

    A lost peer, for example, must end the run at once.
    """
    case = Case(save_interval=1)

    def start(*_, **__):
        raise RuntimeError("pair.cc:1")

    case.saver.start = start
    with pytest.raises(RuntimeError, match="pair.cc:1"):
        case.step(1)


def test_the_wall_time_hears_how_long_a_save_takes():
    case = Case(save_interval=1)
    durations = []
    case.saves.after_save.append(durations.append)
    case.step(1)
    assert durations == [2.0]
