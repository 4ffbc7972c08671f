"""What each parameter is worth by the trials: functional ANOVA, and what each value costs."""
from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.errors import ConfigError
from megatron.tuning.report.context import ReportContext, value_key
from megatron.tuning.types import Candidate, Parameter, Value, seconds_cost

LEAST_LAYOUTS = 8
"""With fewer, trees find whatever they are asked for."""
_MOST_PREDICTIONS = 400
_ALIKE = 1e-6  # of log(cost): trees do not tell apart what differs by less
_SEED = 0


@dataclass(frozen=True)
class Importance:
    """Parts of the variance of log(cost) that are a parameter's alone, by its name; what is missing to 1 is of
    parameters together.

    layouts  how many they rest on; refused: why there are none
    trusted  R2 of a forest for layouts that its trees have not seen: where it is not far above 0, importances mean
             nothing
    """

    shares: Mapping[str, float]
    layouts: int
    refused: str | None = None
    trusted: float | None = None


@dataclass(frozen=True)
class OfValue:
    """A value of a parameter, and how many layouts have it. loss: of the best of them against the best of all; None
    without a valid one."""

    value: Value
    valid: int
    failed: int
    loss: float | None


@dataclass(frozen=True)
class Worth:
    """A parameter and what its values cost; best: the value of the best layout."""

    parameter: Parameter
    values: tuple[OfValue, ...]
    best: Value

    @property
    def spread(self) -> float:
        """What the worst of its values costs, all else as good as it was found with it."""
        return max((v.loss for v in self.values if v.loss is not None), default=0.0)


def worths(context: ReportContext) -> list[Worth]:
    """Of each parameter that varies. Nothing without a valid layout."""
    best = context.best
    if best is None:
        return []
    found = []
    for parameter in context.varied():
        of_values = tuple(_of_value(context, parameter.name, value) for value in parameter.values)
        found.append(Worth(parameter, of_values, best.candidate.values.get(parameter.name)))
    return found


def _of_value(context: ReportContext, name: str, value: Value) -> OfValue:
    with_it = [one for one in context.layouts if value_key(one.candidate.values.get(name)) == value_key(value)]
    losses = [context.loss(one) for one in with_it if one.valid]
    failed = sum(not one.valid for one in with_it)
    return OfValue(value, len(losses), failed, min(losses, default=None))


def measured_importance(context: ReportContext) -> Importance:
    """By the valid layouts. Raises ConfigError without Optuna or scikit-learn."""
    valid = context.valid
    if len(valid) < LEAST_LAYOUTS:
        return Importance({}, len(valid), f"{len(valid)} valid layout(s): importances need at least {LEAST_LAYOUTS}")
    costs = [math.log(context.cost(one)) for one in valid]
    if max(costs) - min(costs) < _ALIKE:
        return Importance({}, len(valid), "all valid layouts cost the same: no parameter matters")
    return _importance([one.candidate for one in valid], costs, context.parameters)


def predicted_importance(context: ReportContext) -> Importance | None:
    """By the planner's predictions for candidates (a sample by chance, where they are many), tried or not; None where
    it predicted none."""
    known = [c for c in context.candidates if c.step_s is not None]
    if len(known) < LEAST_LAYOUTS:
        return None
    if len(known) > _MOST_PREDICTIONS:
        known = random.Random(_SEED).sample(known, _MOST_PREDICTIONS)
    costs = [math.log(seconds_cost(c.step_s, c, context.objective)) for c in known if c.step_s is not None]
    return _importance(known, costs, context.parameters) if max(costs) - min(costs) >= _ALIKE else None


def _importance(
    candidates: Sequence[Candidate], costs: Sequence[float], parameters: Sequence[Parameter]
) -> Importance:
    """Functional ANOVA of a random forest (Hutter, Hoos, Leyton-Brown 2014, section 3) by Optuna: the part of the
    forest's variance that one parameter explains, the others averaged over all their values.

    Ordered values count by their place among the parameter's values, others as categories.
    """
    try:
        import optuna
        import sklearn  # noqa: F401  Optuna itself imports it only when a forest is grown
        from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
        from optuna.importance import FanovaImportanceEvaluator
        from optuna.trial import create_trial
    except ImportError as error:
        raise ConfigError(
            f"importances need {error.name}, which is not installed: pip install 'megatron-frontier[tune]'"
        ) from None
    places: dict[str, list[int]] = {}
    distributions: dict[str, BaseDistribution] = {}
    for parameter in parameters:
        place = {value_key(value): i for i, value in enumerate(parameter.values)}
        found = [place[value_key(c.values.get(parameter.name))] for c in candidates]
        if len(set(found)) > 1:
            places[parameter.name], most = found, len(parameter.values) - 1
            distributions[parameter.name] = (
                IntDistribution(0, most) if parameter.ordered else CategoricalDistribution(range(most + 1))
            )
    if not distributions:
        return Importance({}, len(candidates), "no parameter differs between the valid layouts")
    loud = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study()
        for i, cost in enumerate(costs):
            params = {name: found[i] for name, found in places.items()}
            study.add_trial(create_trial(params=params, distributions=distributions, value=cost))
        shares = FanovaImportanceEvaluator(seed=_SEED).evaluate(study)
    finally:
        optuna.logging.set_verbosity(loud)
    ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return Importance(ordered, len(candidates), trusted=_trusted(places, parameters, costs))


def _trusted(places: Mapping[str, Sequence[int]], parameters: Sequence[Parameter], costs: Sequence[float]) -> float:
    """R2 of the out-of-bag predictions of a random forest (Breiman 2001, section 3.1)."""
    import numpy as np
    from sklearn.ensemble import RandomForestRegressor

    columns = []
    for parameter in parameters:
        if parameter.name in places:
            place = np.array(places[parameter.name])
            columns += [place] if parameter.ordered else [place == i for i in sorted(set(places[parameter.name]))]
    forest = RandomForestRegressor(128, oob_score=True, random_state=_SEED)
    forest.fit(np.stack(columns, axis=1).astype(float), np.array(costs))
    return float(forest.oob_score_)
