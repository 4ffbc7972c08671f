"""Bayesian optimisation of a finite list in an Optuna study, and Optuna's own TPE for comparison."""
from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from megatron.tuning.search.features import features_of, places_of
from megatron.tuning.search.optimizer import Proposal
from megatron.tuning.search.start import LearningSearch
from megatron.tuning.search.surrogate import choose
from megatron.tuning.types import History

_CANDIDATE, _FAILURE = "candidate", "failure"
# Samples of TPE in search of an open candidate.
_ASKED = 100


class ListedSampler(BaseSampler):
    """Optuna sampler that chooses among listed candidates by a Gaussian process.

    candidates, parameters, left_out and prior are of `space`; what has been seen, what failed and what runs it reads
    from the study, whose trials say their candidate.
    """

    def __init__(self, space: History) -> None:
        self._space = space
        self._places = places_of(space.parameters, space.candidates)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return _distributions(self._space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        told = {t.user_attrs[_CANDIDATE]: t for t in study.get_trials(deepcopy=False) if t.number != trial.number}
        history = replace(
            self._space,
            seen={index: t.value for index, t in told.items() if t.state.is_finished()},
            failures={index: t.user_attrs[_FAILURE] for index, t in told.items() if _FAILURE in t.user_attrs},
            pending=frozenset(index for index, t in told.items() if not t.state.is_finished()),
        )
        index = choose(history, features_of(history.parameters, history.candidates))
        return dict(zip(search_space, _key(self._places[index]), strict=True))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise AssertionError(f"{param_name} is not a parameter of the space")


class OptunaSearch(LearningSearch):
    """An Optuna study with ListedSampler."""

    name = "optuna"

    def learned(self, history: History, count: int) -> Proposal:
        asked = _ask(_study(history, ListedSampler(history)), history)
        return Proposal(_open_with(history)[asked], self.name)


class TpeSearch(LearningSearch):
    """Optuna's multivariate TPE over the whole product of the values; what is no open candidate is drawn again.

    The planner's best go first, beyond that TPE has no use for a prior.
    """

    name = "tpe"

    def learned(self, history: History, count: int) -> Proposal:
        random = np.random.default_rng([self._seed, count])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = TPESampler(seed=int(random.integers(2**31)), multivariate=True, n_startup_trials=1)
        study = _study(history, sampler)
        open_ = _open_with(history)
        for _ in range(_ASKED):
            if (index := open_.get(_ask(study, history))) is not None:
                return Proposal(index, self.name)
        # The best that TPE knows are all tried and what lies around them is invalid.
        return Proposal(history.open()[int(random.integers(len(history.open())))], "random")


def _distributions(history: History) -> dict[str, BaseDistribution]:
    """Of the places of values: the values may be 1 and true, which Optuna takes for the same."""
    return {
        parameter.name: IntDistribution(0, len(parameter.values) - 1) if parameter.ordered
        else CategoricalDistribution(range(len(parameter.values)))
        for parameter in history.parameters
    }  # fmt: skip


def _study(history: History, sampler: BaseSampler) -> Study:
    """All that has been seen and is running, as the trials of a study in memory."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler, direction="minimize")
    distributions = _distributions(history)
    places = places_of(history.parameters, history.candidates)
    told: list[tuple[int, TrialState, float | None]] = [
        (index, TrialState.FAIL if cost is None else TrialState.COMPLETE, cost)
        for index, cost in history.seen.items() if index not in history.pending
    ]  # fmt: skip
    told += [(index, TrialState.RUNNING, None) for index in sorted(history.pending)]
    study.add_trials(
        optuna.trial.create_trial(
            state=state, value=cost, distributions=distributions,
            params=dict(zip(distributions, _key(places[index]), strict=True)),
            user_attrs=_about(index, history.failures),
        )
        for index, state, cost in told
    )  # fmt: skip
    return study


def _about(index: int, failures: Mapping[int, str]) -> dict[str, Any]:
    return {_CANDIDATE: index} | ({_FAILURE: failures[index]} if index in failures else {})


def _ask(study: Study, history: History) -> tuple[int, ...]:
    trial = study.ask(_distributions(history))
    return _key([trial.params[parameter.name] for parameter in history.parameters])


def _open_with(history: History) -> dict[tuple[int, ...], int]:
    """The open candidate with these places."""
    places = places_of(history.parameters, history.candidates)
    return {_key(places[index]): index for index in reversed(history.open())}


def _key(places: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(place) for place in places)
