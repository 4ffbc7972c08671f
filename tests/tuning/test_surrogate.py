"""The surrogate against finite differences, other kernels and closed forms."""
from __future__ import annotations

import math

import numpy as np
import pytest

from megatron.tuning.search.features import features_of
from megatron.tuning.types import Parameter
from tests.tuning.tables import PARAMETERS, candidates_of, history_of, table

pytestmark = pytest.mark.slow  # scikit-learn, which is imported where it is used, takes a second for that
KNOWN = table()
FEATURES = features_of(PARAMETERS, KNOWN.candidates)


def test_features_of_unordered_values_are_one_apart_and_ordered_ones_by_place() -> None:
    parameters = (
        Parameter("n", (1, 2, 4, 8)), Parameter("name", ("a", "b", "c"), ordered=False), Parameter("fixed", (7,)),
    )  # fmt: skip
    candidates = candidates_of(parameters, lambda values: values["n"] != 2)
    features = features_of(parameters, candidates)
    assert features.groups == (0, 1, 1, 1) and features.parameters == 2
    # (1, a), (1, b), (1, c), (4, a), ...: 2 never occurs, so 4 is half-way.
    assert features.distances(0)[:4] == pytest.approx([0, 1, 1, 0.5])
    assert features.distances(0)[8] == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("with_prior", [False, True])
def test_gradients_of_the_kernel_are_those_of_finite_differences(with_prior: bool) -> None:
    from megatron.tuning.search.kernels import belief_of, cost_kernel

    points = np.column_stack([FEATURES.points, KNOWN.prior])[::60]
    kernel = cost_kernel(FEATURES, with_prior)
    values, gradient = kernel(points, eval_gradient=True)
    theta = kernel.theta
    assert gradient.shape == (*values.shape, len(theta)) and len(belief_of(kernel)[0]) == len(theta)
    for i in range(len(theta)):
        step = np.zeros_like(theta)
        step[i] = 1e-5
        up, down = kernel.clone_with_theta(theta + step)(points), kernel.clone_with_theta(theta - step)(points)
        assert gradient[:, :, i] == pytest.approx((up - down) / 2e-5, abs=1e-8)


def test_a_grouped_kernel_is_materns_with_the_lengths_of_its_columns() -> None:
    from sklearn.base import clone
    from sklearn.gaussian_process.kernels import Matern

    from megatron.tuning.search.kernels import GroupedMatern

    points = np.random.default_rng(0).random((6, 3))
    grouped = GroupedMatern((0, 1, 1), np.array([0.5, 2.0]))
    assert grouped(points) == pytest.approx(Matern([0.5, 2.0, 2.0], nu=2.5)(points))
    assert clone(grouped)(points, points[:2]) == pytest.approx(grouped(points)[:, :2])


def test_a_kernel_on_some_columns_sees_those_alone() -> None:
    from sklearn.base import clone
    from sklearn.gaussian_process.kernels import Matern

    from megatron.tuning.search.kernels import On

    points = np.random.default_rng(0).random((6, 3))
    on = On(Matern(0.7), (0, 2))
    assert on(points) == pytest.approx(Matern(0.7)(points[:, [0, 2]]))
    assert on.diag(points) == pytest.approx(np.ones(6))
    assert clone(on) == on and on != On(Matern(0.7), (0, 1)) and on != On(Matern(0.8), (0, 2))


def test_what_was_measured_comes_back_and_is_more_certain_than_the_rest() -> None:
    from megatron.tuning.search.surrogate import posterior

    drawn = np.random.default_rng(0).choice(456, 40, replace=False).tolist()
    seen: dict[int, float | None] = {i: KNOWN.costs[i] for i in drawn}
    known = posterior(history_of(KNOWN, seen), FEATURES)
    at = list(seen)
    assert known.mean[at] == pytest.approx([KNOWN.costs[i] for i in at], abs=0.03)
    rest = [i for i in range(456) if i not in seen]
    assert known.deviation[at].max() < np.median(known.deviation[rest])
    assert np.mean(np.abs(known.mean - KNOWN.costs)[rest] < 2.5 * known.deviation[rest]) > 0.9


def test_a_prior_that_is_right_but_for_the_unit_is_followed() -> None:
    from megatron.tuning.search.surrogate import posterior

    prior = [cost - 2.0 for cost in KNOWN.costs]
    seen: dict[int, float | None] = {i: KNOWN.costs[i] for i in (3, 100, 250, 400)}
    known = posterior(history_of(KNOWN, seen, prior), FEATURES)
    assert known.mean == pytest.approx(KNOWN.costs, abs=0.02)


def test_a_prior_that_is_upside_down_is_turned() -> None:
    from megatron.tuning.search.surrogate import posterior

    prior = [-cost for cost in KNOWN.costs]
    seen: dict[int, float | None] = {i: KNOWN.costs[i] for i in range(0, 456, 45)}
    known = posterior(history_of(KNOWN, seen, prior), FEATURES)
    assert np.corrcoef(known.mean, KNOWN.costs)[0, 1] > 0.8


def test_the_bound_weighs_failures_by_their_chance() -> None:
    from megatron.tuning.search.surrogate import Posterior, expected_lower_bound, failure_cost

    known = Posterior(np.array([1.0, 1.0, 1.0, 9.0]), np.array([0.5, 0.5, 0.5, 0.5]), np.array([0.0, 1.0, 0.25, 1.0]))
    assert expected_lower_bound(known, 2.0) == pytest.approx([0.5, 2.0, 0.5 + 0.25 * 1.5, 8.5])
    assert failure_cost([3.0, 1.0]) == pytest.approx(1.0 + math.log(1.1))
