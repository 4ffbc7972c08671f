"""What the measured candidates say about the others: a Gaussian process on the logarithm of the cost.

With a prior it learns what the planner gets wrong, log(measured / predicted): errors of a model are alike where
layouts are alike, and much smaller than the differences between layouts. Failures are learnt apart, as a chance
(Gelbart et al. 2014, Bayesian optimization with unknown constraints): a cost made up for them would bend the costs of
everything around them.
"""
from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor

from megatron.tuning.search.features import Array, Features
from megatron.tuning.search.kernels import belief_of, cost_kernel, failure_kernel
from megatron.tuning.types import LOST_RANK, History

KAPPA = 1.0
"""Standard deviations below the mean that a candidate is judged by (Srinivas et al. 2010, GP-UCB)."""

# A failure counts as this many times the best that was seen. The worst seen is often several times the best: by that a
# small chance of failure would outweigh any gain, and the best layouts often lie next to ones that fail.
_FAILURE = 1.1


class Posterior(NamedTuple):
    """For each candidate: mean and standard deviation of log(cost) if it runs, and the chance that it fails."""

    mean: Array
    deviation: Array
    failing: Array


def valid_of(history: History) -> dict[int, float]:
    """log(cost) of the candidates that ran."""
    return {index: cost for index, cost in history.seen.items() if cost is not None}


class CostModel:
    """Gaussian process of log(cost), of some candidates whose cost is known (at least one).

    prior  log(predicted cost) of each candidate, None without one
    at     candidates that are known; costs: their log(cost)
    """

    def __init__(self, features: Features, prior: Sequence[float] | None, at: Sequence[int], costs: Array) -> None:
        self._prior = np.zeros(len(features.points)) if prior is None else np.asarray(prior, dtype=np.float64)
        self._at = list(at)
        errors = np.asarray(costs) - self._prior[self._at]
        self._level = float(errors.mean())
        self._errors = errors - self._level
        self._points = features.points
        if prior is not None:
            self._points = np.column_stack([features.points, self._prior - self._prior[self._at].mean()])
        kernel = cost_kernel(features, prior is not None)
        self._model = GaussianProcessRegressor(kernel, optimizer=_most_plausible(kernel))
        _fit(self._model, self._points[self._at], self._errors)

    def believe(self, pending: Sequence[int]) -> None:
        """Takes candidates to come out as expected, which makes them certain: the next one is sought elsewhere.

        Kriging believer: Ginsbourger et al. 2010, Kriging is well-suited to parallelize optimization.
        """
        believed = np.concatenate([self._errors, self._model.predict(self._points[list(pending)])])
        self._model = GaussianProcessRegressor(self._model.kernel_, optimizer=None)
        _fit(self._model, self._points[[*self._at, *pending]], believed)

    def predict(self) -> tuple[Array, Array]:
        """Mean and standard deviation of log(cost) of every candidate."""
        mean, deviation = self._model.predict(self._points, return_std=True)
        return self._prior + self._level + mean, deviation


def posterior(history: History, features: Features) -> Posterior:
    """From at least one candidate that ran."""
    valid = valid_of(history)
    model = CostModel(features, history.prior, list(valid), np.array(list(valid.values())))
    if pending := sorted(history.pending - valid.keys()):
        model.believe(pending)
    return Posterior(*model.predict(), chance_of_failure(history, features))


def chance_of_failure(history: History, features: Features) -> Array:
    """For each candidate, 0..1. A lost rank says nothing about the layout; before both a failure and a success are
    known there is nothing to tell apart, and everything is taken to run."""
    known = [
        index for index, cost in history.seen.items() if cost is not None or history.failures.get(index) != LOST_RANK
    ]
    failed = np.array([history.seen[index] is None for index in known], dtype=bool)
    if not failed.any() or failed.all():
        return np.zeros(len(features.points))
    kernel = failure_kernel(features)
    model = GaussianProcessClassifier(kernel, optimizer=_most_plausible(kernel))
    _fit(model, features.points[known], failed)
    return np.asarray(model.predict_proba(features.points)[:, 1])


def failure_cost(costs: Sequence[float]) -> float:
    """log(cost) that a failure counts as, by what was seen."""
    return min(costs) + math.log(_FAILURE)


def expected_lower_bound(known: Posterior, failed: float) -> Array:
    """What each candidate is judged by, least is best: the lower confidence bound of log(cost) if it runs and `failed`
    if it fails, by the chances of both. What would be no better than a failure is judged by its bound alone."""
    bound = known.mean - KAPPA * known.deviation
    return bound + known.failing * np.maximum(failed - bound, 0.0)


def choose(history: History, features: Features) -> int:
    """The open candidate of the least expected lower bound; of equal ones the first."""
    open_ = history.open()
    failed = failure_cost(list(valid_of(history).values()))
    bounds = expected_lower_bound(posterior(history, features), failed)[open_]
    # Threads of BLAS add up in any order: the last digits must not decide.
    return open_[int(np.argmin(np.round(bounds, 9)))]


def _fit(model: Any, points: Array, targets: Array) -> None:
    with warnings.catch_warnings():
        # A hyperparameter at its bound, or rounding in the last digits of the search for it: nothing to tell a user.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(points, targets)


def _most_plausible(kernel: Any) -> Callable[[Callable[..., Any], Array, Array], tuple[Array, float]]:
    """Optimiser for scikit-learn: maximum a posteriori where its own takes the maximum likelihood."""
    from scipy.optimize import minimize

    middle, scatter = belief_of(kernel)

    def optimise(objective: Callable[..., Any], start: Array, bounds: Array) -> tuple[Array, float]:
        def loss(theta: Array) -> tuple[float, Array]:
            value, gradient = objective(theta, eval_gradient=True)
            off = (theta - middle) / scatter
            return value + float(off @ off) / 2, gradient + off / scatter

        found = minimize(loss, start, method="L-BFGS-B", jac=True, bounds=bounds)
        return found.x, float(found.fun)

    return optimise
