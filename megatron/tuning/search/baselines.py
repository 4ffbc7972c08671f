"""Searches that learn nothing: what the others are measured against."""
from __future__ import annotations

import numpy as np

from megatron.tuning.search.optimizer import Proposal
from megatron.tuning.types import History


class RandomSearch:
    """Any open candidate, all with the same chance."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def propose(self, history: History, count: int) -> Proposal | None:
        open_ = history.open()
        if not open_:
            return None
        return Proposal(open_[int(np.random.default_rng([self._seed, count]).integers(len(open_)))], self.name)


class ExhaustiveSearch:
    """Every candidate: the planner's best first, or without a prior as they are listed."""

    name = "exhaustive"

    def propose(self, history: History, count: int) -> Proposal | None:
        open_ = history.open()
        if not open_:
            return None
        prior = history.prior
        return Proposal(open_[0] if prior is None else min(open_, key=lambda index: prior[index]), self.name)
