"""DeepHyper's centralised Bayesian optimisation (the search of the paper), over a finite list of candidates.

Dash et al. 2023, Optimizing distributed training on Frontier for large language models, Table V: asynchronous Bayesian
optimisation by upper confidence bound, in which failed trials count too. The forest, its bound and the choice are
DeepHyper's; the list, the first trials, the planner's prior and what failures count as are brought to it.
"""
from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ConfigSpace import OrdinalHyperparameter
from deephyper.hpo import CBO, HpProblem
from deephyper.skopt.learning import RandomForestRegressor
from sklearn.base import BaseEstimator, RegressorMixin, clone

from megatron.tuning.search.features import Array, places_of
from megatron.tuning.search.optimizer import Proposal
from megatron.tuning.search.start import LearningSearch
from megatron.tuning.search.surrogate import valid_of
from megatron.tuning.types import LOST_RANK, History

Key = tuple[int, ...]
"""Places of a candidate's values, in the problem's order of the parameters."""

_KAPPA = 1.5
_TREES = 100
_FAILURE = math.log(1.5)

# What is believed of the planner before anything is measured: log(cost) rises by 1 +- 0.5 where its prediction does by
# 1, and scatters about that by 5 %, which counts as much as four trials do.
_SLOPE, _SCATTER, _WEIGHT = 0.5, 0.05, 4.0


class OnPrediction(RegressorMixin, BaseEstimator):
    """Regressor of log(cost) less its prediction, which is also one more feature.

    regressor    of DeepHyper, whose `predict` may tell standard deviations; predictions: log(cost) by key
    """

    def __init__(self, regressor: Any, predictions: Mapping[Key, float]) -> None:
        self.regressor = regressor
        self.predictions = predictions

    def fit(self, X: Any, y: Any) -> OnPrediction:
        features, predicted = self._with_prediction(X)
        self.regressor_ = clone(self.regressor).fit(features, np.asarray(y, float) - predicted)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        features, predicted = self._with_prediction(X)
        if not return_std:
            return np.asarray(predicted + self.regressor_.predict(features))
        mean, deviation = self.regressor_.predict(features, return_std=True)
        return predicted + mean, deviation

    def _with_prediction(self, rows: Any) -> tuple[Array, Array]:
        predicted = np.array([self.predictions[_key(row)] for row in rows])
        return np.column_stack([np.asarray(rows, float), predicted]), predicted


class DeepHyperSearch(LearningSearch):
    """CBO, told everything that has been seen and asked for one candidate."""

    name = "deephyper"

    def learned(self, history: History, count: int) -> Proposal:
        open_ = history.open()
        random = np.random.default_rng([self._seed, count])
        seed = int(random.integers(2**31))
        # A forest takes many candidates for the same, and of those the first sample is taken: not the next of the list.
        sampled = random.permutation(open_).tolist()
        # What it warns of is its own: kinds of arrays, and points that are asked for again.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problem = _problem(history)
            names = problem.hyperparameter_names
            keys = _keys(history, names)
            expected = predictions(history)
            surrogate = _forest(seed)
            if history.prior is not None:
                surrogate = OnPrediction(surrogate, dict(zip(keys, expected.tolist(), strict=True)))
            configurations = [dict(zip(names, key, strict=True)) for key in keys]
            problem.set_sampling_fn(lambda size: [configurations[index] for index in sampled])
            search = _cbo(problem, surrogate, len(sampled), seed)
            search.tell([(configurations[index], objective) for index, objective in _told(history, expected)])
            asked = search.ask(1)[0]
        index_of = {keys[index]: index for index in open_}
        return Proposal(index_of[_key([asked[name] for name in names])], self.name)


def _problem(history: History) -> HpProblem:
    """The space, its values by their places: trees split places and DeepHyper's labels of categories alike."""
    problem = HpProblem()
    for parameter in history.parameters:
        problem.add_hyperparameter(OrdinalHyperparameter(parameter.name, list(range(len(parameter.values)))))
    return problem


def _keys(history: History, names: Sequence[str]) -> list[Key]:
    column = {parameter.name: number for number, parameter in enumerate(history.parameters)}
    places = places_of(history.parameters, history.candidates)[:, [column[name] for name in names]]
    return [_key(row) for row in places.tolist()]


def _key(places: Sequence[Any]) -> Key:
    return tuple(int(place) for place in places)


def _forest(seed: int) -> Any:
    """DeepHyper's extremely randomised trees ("ET"). Its threshold of 0.005 for a split takes costs to be spread over
    0..1, and would not split errors of some per cent at all; 10 trees tell their spread badly."""
    return RandomForestRegressor(
        _TREES, splitter="random", max_features=1.0, bootstrap=False, min_samples_split=2, random_state=seed
    )


def _cbo(problem: HpProblem, surrogate: Any, samples: int, seed: int) -> CBO:
    """Its acquisition is the least over samples, which are the open candidates; it writes no files."""
    logging.getLogger("deephyper").setLevel(logging.ERROR)
    return CBO(
        problem,
        random_state=seed,
        surrogate_model=surrogate,
        acq_func="UCB",
        acq_func_kwargs={"kappa": _KAPPA, "scheduler": {"type": "constant"}},
        acq_optimizer="sampling",
        # Costs stay as they are: predictions are of the same unit.
        acq_optimizer_kwargs={
            "n_points": samples, "filter_duplicated": False, "outliers_iqr_factor": float("inf"),
        },
        objective_scaler="identity",
        n_initial_points=1,
        checkpoint_history_to_csv=False,
    )  # fmt: skip


def _told(history: History, expected: Array) -> list[tuple[int, float]]:
    """By candidate the objective that CBO makes large, -log(cost). Of a failure half more than was expected of it:
    CBO's own "F" counts as the worst seen, which may be the only success, or so dear that nothing near it is tried. A
    lost rank says nothing about the layout. Of a running one what is expected (constant liar, Ginsbourger et al. 2010).
    """
    valid = valid_of(history)
    told = []
    for index, cost in history.seen.items():
        if cost is not None:
            told.append((index, -cost))
        elif history.failures.get(index) != LOST_RANK:
            told.append((index, -float(expected[index]) - _FAILURE))
    return told + [(index, -float(expected[index])) for index in sorted(history.pending - valid.keys())]


def predictions(history: History) -> Array:
    """log(cost) of each candidate by the planner, as far as the measured ones (at least one) bear it out: level + slope
    x prior by Bayesian linear regression. Without a prior the mean of what was measured. [candidates]"""
    valid = valid_of(history)
    costs = np.array(list(valid.values()))
    if history.prior is None:
        return np.full(len(history.candidates), costs.mean())
    prior = np.asarray(history.prior)
    known = prior[list(valid)]
    x, y = known - known.mean(), costs - costs.mean()
    slope, variance = 1.0, _SCATTER**2
    for _ in range(20):  # to the most plausible slope and scatter together
        slope = float((x @ y + variance / _SLOPE**2) / (x @ x + variance / _SLOPE**2))
        error = y - slope * x
        variance = float((_WEIGHT * _SCATTER**2 + error @ error) / (_WEIGHT + len(error)))
    return np.asarray(costs.mean() + slope * (prior - known.mean()))
