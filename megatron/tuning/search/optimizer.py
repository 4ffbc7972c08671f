"""What every search has in common: one proposal at a time, made of what has been seen and of nothing else."""
from __future__ import annotations

import contextlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from megatron.config.settings import did_you_mean
from megatron.errors import ConfigError
from megatron.tuning.types import History

SEARCHES = {
    "auto": "deephyper where it is installed, optuna otherwise",
    "deephyper": "DeepHyper's centralised Bayesian optimisation, as in the paper",
    "optuna": "Bayesian optimisation in an Optuna study",
    "tpe": "Optuna's tree-structured Parzen estimator",
    "random": "any open candidate, all alike",
    "exhaustive": "every candidate, the planner's best first",
}
"""What --search takes, with a sentence for each."""

_NEEDS = {"deephyper": ("deephyper", "sklearn"), "optuna": ("optuna", "sklearn"), "tpe": ("optuna",)}
_EXTRA = {"deephyper": "deephyper"}


@dataclass(frozen=True)
class Proposal:
    """index: of the candidate; by: what chose it, for the table (planner, start, optuna, ...)."""

    index: int
    by: str


class Optimizer(Protocol):
    """A search without state: the same history, seed and count give the same proposal, so that a run that was
    interrupted goes on exactly as if it had not been."""

    @property
    def name(self) -> str: ...

    def propose(self, history: History, count: int) -> Proposal | None:
        """The candidate to try next; None when none is open.

        count  proposals made so far: seeds what is random
        """
        ...


def make_optimizer(name: str, seed: int) -> Optimizer:
    """The search of a name in SEARCHES; its `name` says which one `auto` became.

    Raises ConfigError for another name, and where the library that it needs is missing or too old.
    """
    if name not in SEARCHES:
        raise ConfigError(f"--search {name}: no such search{did_you_mean(name, SEARCHES)}")
    if name == "auto":
        with contextlib.suppress(ImportError):  # missing, or an older one
            return _make("deephyper", seed)
        name = "optuna"
    install = f"pip install --upgrade 'megatron-frontier[{_EXTRA.get(name, 'tune')}]', or --search random"
    if lacking := missing(name):
        raise ConfigError(f"--search {name} needs {' and '.join(lacking)}, which this Python does not have: {install}")
    try:
        return _make(name, seed)
    except ImportError as error:
        raise ConfigError(f"--search {name}: what it needs is installed, but of another version ({error}): {install}"
                          ) from None  # fmt: skip


def _make(name: str, seed: int) -> Optimizer:
    """Raises ImportError."""
    if lacking := missing(name):
        raise ImportError(lacking)
    if name == "deephyper":
        from megatron.tuning.search.deephyper_search import DeepHyperSearch

        return DeepHyperSearch(seed)
    if name in ("optuna", "tpe"):
        from megatron.tuning.search.optuna_search import OptunaSearch, TpeSearch

        return OptunaSearch(seed) if name == "optuna" else TpeSearch(seed)
    from megatron.tuning.search.baselines import ExhaustiveSearch, RandomSearch

    return RandomSearch(seed) if name == "random" else ExhaustiveSearch()


def missing(name: str) -> list[str]:
    """Libraries that a search needs and that are not installed."""
    return [library for library in _NEEDS.get(name, ()) if find_spec(library) is None]
