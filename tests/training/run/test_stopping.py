"""Reasons to stop, on which all ranks take the same decision."""

import os
import signal
from types import SimpleNamespace

import pytest

from megatron.training.run.process import Signals
from megatron.training.run.stopping import Agreement, StopRules, WallTime
from tests.helpers.tiny import rank_topology


class Rules:
    """StopRules of one process, with an agreement of their own."""

    def __init__(self, signals=None, wall_time=None, **changes):
        usual = dict(exit_interval=None, exit_signal_handler=False, kill_switch_file=None)
        settings = SimpleNamespace(training=SimpleNamespace(**{**usual, **changes}))
        self.agreement = Agreement(rank_topology())
        signals = signals or Signals(enabled=False)
        self.rules = StopRules(settings, self.agreement, signals, wall_time)

    def stop(self, iteration, at_start=False):
        check = self.rules.check_at_start if at_start else self.rules.check
        return check(iteration, self.agreement.now())

    @property
    def must_leave(self):
        return self.rules.must_leave(self.agreement.now())


def test_exit_interval_counts_finished_steps():
    rules = Rules(exit_interval=5)
    assert [i for i in range(1, 12) if rules.stop(i)] == [5, 10]
    assert rules.stop(5, at_start=True) is None


def test_the_duration_counts_from_the_start_and_leaves_time_for_what_comes():
    """5 % of it are left for the end: with 120 s, 114 s are for steps, evaluations and saves."""
    now = [100.0]
    wall_time = WallTime(lambda: None, 0.0, 10, duration_s=120, elapsed_s=lambda: now[0])
    rules = Rules(wall_time=wall_time)
    wall_time.after_step(2.0)
    assert rules.stop(1) is None
    wall_time.after_save(8.0)
    assert rules.stop(1) is None  # 2 + 1.5 * 8 s
    wall_time.after_step(2.0, evaluations=1)
    stop = rules.stop(2)  # 10 iterations more
    assert not stop.requeue
    assert all(word in stop.reason for word in ("iteration 2", "1.67", "2.00 min"))
    wall_time.after_step(2.0)
    assert not rules.must_leave
    now[0] = 103.0  # 11 s, in which no save of 12 s ends: an evaluation under way ends
    assert rules.must_leave
    wall_time.saved = True
    assert not rules.must_leave
    now[0] = 115.0
    assert rules.must_leave


def test_a_job_that_ends_is_continued_also_where_the_duration_is_over():
    wall_time = WallTime(lambda: 20.0, 0.0, duration_s=120, elapsed_s=lambda: 119.0)
    assert Rules(wall_time=wall_time).stop(8).requeue


def test_kill_switch(tmp_path):
    switch = tmp_path / "stop"
    switch.touch()
    stop = Rules(kill_switch_file=str(switch)).stop(2)
    # A user wants the run to end, not to begin again.
    assert str(switch) in stop.reason and not stop.requeue


def test_signals_are_caught_only_inside_the_block_and_only_when_asked():
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        rules = Rules(signals=signals)
        assert rules.stop(2) is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert "SIGTERM" in rules.stop(3).reason
    assert signal.getsignal(signal.SIGTERM) is before
    with Signals(enabled=False):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_run_unless_it_was_ignored(number, ignored):
    """As a lost connection is under nohup, and Ctrl-C in the background of a script."""
    before = signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), number)
            stop = Rules(signals=signals).stop(3)
            assert stop is None if ignored else number.name in str(stop)
    finally:
        signal.signal(number, before)


def test_only_the_first_signal_counts():
    with Signals() as signals:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        stop = Rules(signals=signals).stop(1)
        assert stop.requeue and "SIGUSR1" in stop.reason


def test_the_end_of_the_job_is_a_reason_to_go_on_in_another():
    """20 s of a step, 1.5 * 50 s of a save and 30 s of margin are 125."""
    left_s = [126.0]
    wall_time = WallTime(lambda: left_s[0], 0.0)
    wall_time.after_step(20.0)
    wall_time.after_save(50.0)
    assert Rules(wall_time=wall_time).stop(7) is None
    left_s[0] = 100.0
    stop = Rules(wall_time=wall_time).stop(7)
    figures = "iteration 7", "1:40", "20.0 s", "50.0 s"
    assert stop.requeue and all(figure in stop.reason for figure in figures)


def test_a_job_too_short_for_a_step_does_not_come_back():
    """A job too short for a step does not come back, because it would never make progress.

    A signal before the first step is another matter: the node is needed elsewhere.
    """
    wall_time = WallTime(lambda: 20.0, checkpoint_bytes=0.0)
    rules = Rules(wall_time=wall_time)
    assert not rules.stop(7, at_start=True).requeue and rules.stop(8).requeue
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        stop = Rules(signals=signals, wall_time=wall_time).stop(7, at_start=True)
    assert stop.requeue and "SIGUSR1" in stop.reason
