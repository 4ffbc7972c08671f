"""Proposals: candidates to try next, chosen from a list.

The first ones are chosen by the planner or at random, later ones by Optuna or DeepHyper.

A proposal is a pure function of the history, the seed and the number of earlier proposals, so that
a killed search resumes as if it had not been interrupted.
"""

from __future__ import annotations

import logging
import math
import operator
import random
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.errors import ConfigError
from megatron.jobs.candidate_layouts import Candidate
from megatron.jobs.space import Parameter

SEARCHES: Mapping[str, str] = {
    "auto": "deephyper if installed, otherwise optuna",
    "deephyper": "DeepHyper's centralised Bayesian optimisation, as in the paper",
    "optuna": "Optuna's tree-structured Parzen estimator",
}
"""Values of --search, with descriptions."""
_FIRST = 4  # trials chosen by the planner or at random (more while all of them fail)
_FAILURE = 0.405  # log(1.5): a failure counts as 1.5 times the expected cost
_NEAR = 0.223  # log(1.25)
_RIDGE = 0.1  # (16 % / 0.5)^2: costs scatter by 16 % around a prior with a slope of 1 +- 0.5
_KAPPA = 1.5
_TREES = 100


@dataclass(frozen=True)
class History:
    """The state on which a proposal depends.

    Candidates are given by their index in `candidates`.

    parameters  parameters of the space
    seen        log(cost) by candidate, in the order of first trials; None: it failed
    open        candidates that may be proposed: neither tried nor running nor ruled out
    pending     running candidates
    prior       the planner's log(cost) for each candidate; None: no prior
    """

    candidates: Sequence[Candidate]
    parameters: Sequence[Parameter]
    seen: Mapping[int, float | None]
    open: Sequence[int]
    pending: frozenset[int] = frozenset()
    prior: Sequence[float] | None = None

    def value_indices(self, index: int) -> tuple[int, ...]:
        """Return the indices of a candidate's values in the value list of each parameter."""
        values = self.candidates[index].values
        return tuple(p.values.index(values[p.name]) for p in self.parameters)

    def expected(self) -> list[float]:
        """Return the expected log(cost) of each candidate: linear in the planner's prior.

        Level and slope are fitted to the measured candidates by least squares, with the slope
        regularized toward 1 (_RIDGE). Without a prior, all candidates get the mean of the measured
        ones.
        """
        known = {index: cost for index, cost in self.seen.items() if cost is not None}
        level = statistics.mean(known.values()) if known else 0.0
        if self.prior is None:
            return [level] * len(self.candidates)
        middle = statistics.mean(
            self.prior[index] for index in known or range(len(self.candidates))
        )
        pairs = [(self.prior[index] - middle, cost - level) for index, cost in known.items()]
        slope = (sum(x * y for x, y in pairs) + _RIDGE) / (sum(x * x for x, _ in pairs) + _RIDGE)
        return [level + slope * (prior - middle) for prior in self.prior]

    def reports(self) -> dict[int, float]:
        """Return the log(cost) to report for tried and running candidates.

        A failure counts as 1.5 times the expected cost. A running candidate counts as its expected
        cost, so that the next proposal goes elsewhere (constant liar, Ginsbourger et al. 2010).
        """
        expected = self.expected()
        tried = {
            i: expected[i] + _FAILURE if cost is None else cost for i, cost in self.seen.items()
        }
        return {index: expected[index] for index in self.pending} | tried


def find_search(name: str) -> str:
    """Return the search that a name in SEARCHES selects: "optuna" or "deephyper".

    Raises ConfigError if the library of that search is missing or has an incompatible version.
    """
    try:
        if name == "optuna":
            import optuna  # noqa: F401
        else:
            import deephyper.hpo  # noqa: F401
            import sklearn  # noqa: F401
        return "optuna" if name == "optuna" else "deephyper"
    except ImportError as error:
        if name == "auto":
            return find_search("optuna")
        extra = "tune" if name == "optuna" else name
        raise ConfigError(
            f"--search {name} needs a library that is missing or has an incompatible version "
            f"({error}): pip install --upgrade 'megatron-frontier[{extra}]'"
        ) from None


class Halving:
    """Optuna's asynchronous successive halving (Li et al., arXiv 1810.05934) for trials.

    After 1, `factor`, factor^2 ... evaluations, a trial continues if its loss is among the best
    1/factor of the trials that got that far. A trial ends after `most` evaluations.
    """

    def __init__(self, factor: int, most: int) -> None:
        import optuna

        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=factor)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(pruner=pruner)
        self._most = most
        self._trials: dict[int, tuple[Any, int]] = {}  # trial, number of losses reported to it

    def stops(self, number: int, losses: Sequence[float]) -> bool:
        """Return whether to stop trial `number`, given its losses so far."""
        if number not in self._trials:
            self._trials[number] = self._study.ask(), 0
        trial, reports = self._trials[number]
        stop = False
        for step, loss in enumerate(losses[: self._most - 1], 1):
            if step > reports:
                trial.report(loss, step)
                stop = stop or trial.should_prune()
        self._trials[number] = trial, len(losses)
        return stop


def propose(search: str, seed: int, history: History, count: int) -> tuple[int, str]:
    """Return (index of the candidate to try next, its proposer's name).

    At least one candidate must be open.

    search  optuna or deephyper
    count   number of earlier proposals, which together with `seed` determines random choices
    """
    prior = history.prior
    chance = random.Random(f"{seed} {count}")
    failed = [history.value_indices(index) for index, cost in history.seen.items() if cost is None]
    if len(history.seen.keys() | history.pending) >= _FIRST and len(failed) < len(history.seen):
        return (_deephyper if search == "deephyper" else _optuna)(history, chance), search
    if prior is None:
        return chance.choice(history.open), "random"

    def belief(index: int) -> float:
        """Return the planner's log(cost), plus log(1.25) for each failed candidate nearby.

        A candidate is nearby if at most one value differs.
        """
        near = [
            other
            for other in failed
            if sum(map(operator.ne, history.value_indices(index), other)) < 2
        ]
        return prior[index] + len(near) * _NEAR

    return min(history.open, key=belief), "planner"


def _optuna(history: History, chance: random.Random) -> int:
    """Sample value indices by TPE, and return the open candidate nearest to the sample."""
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions: dict[str, BaseDistribution] = {
        p.name: IntDistribution(0, len(p.values) - 1)
        if p.ordered
        else CategoricalDistribution(range(len(p.values)))
        for p in history.parameters
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna warns that multivariate is experimental
        sampler = optuna.samplers.TPESampler(
            seed=chance.getrandbits(31), multivariate=True, n_startup_trials=1
        )
        study = optuna.create_study(sampler=sampler)
        for index, cost in history.reports().items():
            params = dict(zip(distributions, history.value_indices(index), strict=True))
            study.add_trial(
                optuna.trial.create_trial(params=params, distributions=distributions, value=cost)
            )
        asked = study.ask(distributions).params

    def far(index: int) -> float:
        apart = zip(history.parameters, asked.values(), history.value_indices(index), strict=True)
        return math.fsum(
            abs(a - b) / max(1, len(p.values) - 1) if p.ordered else a != b for p, a, b in apart
        )

    return min(history.open, key=far)


def _deephyper(history: History, chance: random.Random) -> int:
    """Choose by asynchronous Bayesian optimisation with an upper confidence bound.

    Failed trials also count (Dash et al. 2023, Table V). DeepHyper provides the forest, its bound
    and the choice; the candidates, the prior and the cost of failures are supplied here.
    """
    import numpy as np
    from ConfigSpace import OrdinalHyperparameter
    from deephyper.hpo import CBO, HpProblem
    from deephyper.skopt.learning import RandomForestRegressor
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

    class OnPrediction(RandomForestRegressor):  # type: ignore[misc]
        """Forest for log(cost) minus the expected log(cost), which is also an added feature."""

        def fit(self, X: Floats, y: Floats) -> object:
            return super().fit(*self._on(X, y))

        def predict(self, X: Floats, return_std: bool = False) -> object:
            rows, predicted = self._on(X, 0.0)
            forecast = super().predict(rows, return_std)
            return (forecast[0] - predicted, forecast[1]) if return_std else forecast - predicted

        @staticmethod
        def _on(X: Floats, y: Floats | float) -> tuple[Floats, Floats]:
            predicted = np.array([predictions[tuple(map(int, row))] for row in X])
            return np.column_stack([np.asarray(X, float), predicted]), np.asarray(y) - predicted

    logging.getLogger("deephyper").setLevel(logging.ERROR)
    seed = chance.getrandbits(31)
    # A forest predicts the same for many candidates, and the first of these in the sample is
    # chosen: shuffle the sample, so that this is not always the next candidate of the list.
    sampled = chance.sample(list(history.open), len(history.open))
    names = sorted(p.name for p in history.parameters)  # DeepHyper's order
    points = [
        {p.name: p.values.index(c.values[p.name]) for p in history.parameters}
        for c in history.candidates
    ]
    keys = [tuple(point[name] for name in names) for point in points]
    predictions = dict(zip(keys, history.expected(), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about array types and repeated points
        problem = HpProblem()
        for parameter in history.parameters:
            # By index: trees split indices in the same way as DeepHyper's category labels.
            problem.add_hyperparameter(
                OrdinalHyperparameter(parameter.name, list(range(len(parameter.values))))
            )
        problem.set_sampling_fn(lambda size: [points[index] for index in sampled])
        # DeepHyper's split threshold of 0.005 assumes costs spread over 0..1; its 10 trees estimate
        # the spread poorly.
        forest = OnPrediction(
            _TREES,
            splitter="random",
            max_features=1.0,
            bootstrap=False,
            min_samples_split=2,
            random_state=seed,
        )
        search = CBO(
            problem,
            random_state=seed,
            surrogate_model=forest,
            acq_func="UCB",
            acq_func_kwargs={"kappa": _KAPPA, "scheduler": {"type": "constant"}},
            acq_optimizer="sampling",
            acq_optimizer_kwargs={
                "n_points": len(sampled),
                "filter_duplicated": False,
                "outliers_iqr_factor": float("inf"),
            },
            objective_scaler="identity",
            n_initial_points=1,
            checkpoint_history_to_csv=False,
        )
        search.tell([(points[index], -cost) for index, cost in history.reports().items()])
        asked = search.ask(1)[0]
    return next(index for index in sampled if points[index] == asked)
