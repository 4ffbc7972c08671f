"""The first candidates, before there is anything to learn from."""
from __future__ import annotations

import math

import numpy as np

from megatron.tuning.search.features import Array, Features, features_of
from megatron.tuning.search.optimizer import Proposal
from megatron.tuning.types import LOST_RANK, History

PLANNED = 4
"""Trials of the planner's best before its errors are learnt."""

# Candidates that are compared, in a space so large that comparing all with all would take seconds.
_COMPARED = 1000
# As near as this, a failure is expected to repeat itself; in values of one parameter from its first to its last.
_NEAR = 0.5


class LearningSearch:
    """A search that begins with `first` and then learns from what has been seen."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def propose(self, history: History, count: int) -> Proposal | None:
        """As Optimizer has it."""
        if not history.open():
            return None
        begun = first(history, features_of(history.parameters, history.candidates), self._seed)
        return begun or self.learned(history, count)

    def learned(self, history: History, count: int) -> Proposal:
        """One of the open candidates, of which there is one at least; one that ran is known."""
        raise NotImplementedError


def first(history: History, features: Features, seed: int) -> Proposal | None:
    """What is tried until a surrogate has something to learn from; None from then on.

    With a prior the planner's best, without one candidates that represent the space; in both cases until one ran.
    """
    tried = len(history.seen.keys() | history.pending)
    enough = PLANNED if history.prior is not None else max(5, features.parameters + 1)
    if tried >= enough and any(cost is not None for cost in history.seen.values()):
        return None
    if history.prior is not None:
        return Proposal(_planned(history, features), "planner")
    return Proposal(_representative(history, features, seed), "start")


def _planned(history: History, features: Features) -> int:
    """The open candidate that the planner likes most, as long as nothing like it has failed: next to a failure it is
    thought to take twice as long. Of equal ones the first."""
    open_ = np.array(history.open())
    prior = np.asarray(history.prior)[open_]
    failed = [i for i, cost in history.seen.items() if cost is None and history.failures.get(i) != LOST_RANK]
    if failed:
        prior = prior + math.log(2) * np.exp(-((_nearest(features, failed)[open_] / _NEAR) ** 2))
    return int(open_[np.argmin(prior)])


def _representative(history: History, features: Features, seed: int) -> int:
    """The open candidate that shortens the mean distance of all candidates to the nearest tried one most (greedy
    facility location; a maximin design would try the corners first). The first one is drawn."""
    open_ = history.open()
    tried = sorted(history.seen.keys() | history.pending)
    random = np.random.default_rng([seed, len(tried)])
    if not tried:
        return open_[int(random.integers(len(open_)))]
    if len(open_) > _COMPARED:
        open_ = sorted(random.choice(open_, _COMPARED, replace=False).tolist())
    nearest = _nearest(features, tried)
    gains = [float(np.maximum(nearest - features.distances(index), 0.0).sum()) for index in open_]
    return open_[int(np.argmax(np.round(gains, 9)))]


def _nearest(features: Features, some: list[int]) -> Array:
    """Distance of each candidate to the nearest of some."""
    return np.min([features.distances(index) for index in some], axis=0)
