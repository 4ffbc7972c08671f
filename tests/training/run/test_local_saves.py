"""When a run saves local checkpoints, and the interval that it chooses."""

import random
from types import SimpleNamespace

import pytest

from megatron.training.run.local_saves import LocalSaves
from megatron.training.run.stopping import Agreement
from tests.helpers.tiny import rank_topology


class Case:
    """Local saves over a saver that takes time on a clock of the test.

    A step takes `step_s`, the copy of a save `stall_s`, and the rest of it `steps` more steps, which
    take `slower_s` longer.
    """

    def __init__(self, interval, stall_s=0.0, step_s=1.0, steps=1, slower_s=0.0):
        self.now = 0.0
        self.step_s = step_s
        self.stall_s = stall_s
        self.slower_s = slower_s
        self.steps = steps
        self.left = None
        self.starts = []
        self.lines = []
        self.saved = []
        self.failed = False
        self.last = None
        checkpoint = SimpleNamespace(non_persistent_save_interval=interval)
        topology = rank_topology()
        self.agreement = Agreement(topology)
        reporter = SimpleNamespace(
            say=self.lines.append, publish=lambda event: self.saved.append(event.iteration)
        )
        config = SimpleNamespace(checkpoint=checkpoint)
        self.saves = LocalSaves(
            config, self, self.agreement, reporter, topology, clock=lambda: self.now
        )

    copied = 8

    @property
    def pending(self):
        return self.left is not None

    @property
    def done(self):
        return self.left is None or self.left <= 0

    def start(self, iteration, state, about):
        assert not self.pending, "it would wait for the last one"
        # the first use of each of two slots is slow
        self.now += self.stall_s * (10 if len(self.starts) < 2 else 1)
        self.starts.append(iteration)
        self.began = self.now
        self.left = self.steps

    def advance(self):
        self.left -= 1

    def commit(self, failed=False):
        self.left = None
        if failed:
            return 0.0
        self.last = SimpleNamespace(iteration=self.starts[-1])
        return self.now - self.began

    def run(self, first, last):
        for iteration in range(first, last + 1):
            self.now += self.step_s + self.pending * self.slower_s
            self.saves.complete(self.agreement.read())
            if self.saves.is_due(iteration):
                self.saves.save(iteration, {})
        return self.starts


def test_a_given_interval():
    assert Case(4).run(3, 14) == [4, 8, 12]


def test_a_failed_save_does_not_count():
    case = Case(4)
    case.failed = True
    case.run(1, 7)
    case.failed = False
    case.run(8, 11)
    assert (case.starts, case.saved) == ([4, 8], [8])


@pytest.mark.parametrize(
    ("stall_s", "step_s", "steps", "slower_s", "interval"),
    [
        (0.029, 1.0, 1, 0.0, 5),  # 1.5 times 2.9 % of a step
        (0.0001, 1.0, 1, 0.0, 2),  # complete after the second step
        (0.0001, 1.0, 7, 0.0, 8),  # a save does not wait for the one before
        (0.1995, 0.1, 1, 0.0, 300),
        (0.0095, 1.0, 3, 0.01, 8),  # four steps are longer by 1 % each
    ],
)
def test_auto_costs_one_percent(stall_s, step_s, steps, slower_s, interval):
    case = Case(0, stall_s, step_s, steps, slower_s)
    case.run(1, 300)
    assert case.saves.interval == interval
    assert len(case.lines) == 1
    measured = len([start for start in case.starts if start <= 300])
    case.run(301, 300 + 2 * interval)
    assert case.starts[-1] % interval == 0 and len(case.starts) == measured + 2


@pytest.mark.parametrize("seed", range(10))
def test_auto_costs_at_most_one_percent_if_steps_scatter(seed):
    """Steps scatter by a tenth, and a save makes four of them longer by three tenths."""
    chance = random.Random(seed)
    case = Case(0, stall_s=0.1, steps=3, slower_s=0.3)
    for iteration in range(1, 200):
        case.step_s = chance.lognormvariate(0.0, 0.1)
        case.run(iteration, iteration)
    assert 1.3 < 0.01 * case.saves.interval < 3 * 1.3
