"""Searches on tables whose best is known."""
from __future__ import annotations

import os
import random
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.tuning.journal import NAME
from megatron.tuning.search import optimizer
from megatron.tuning.search.features import features_of
from megatron.tuning.search.optimizer import make_optimizer
from megatron.tuning.types import LOST_RANK, History, Parameter
from tests.tuning.runners import Made
from tests.tuning.tables import PARAMETERS, Table, candidates_of, history_of, play, table, trials_to_good
from tests.tuning.test_session import search, told, truth

SLOW, LONG = pytest.mark.slow, pytest.mark.campaign("search")
LEARNING = ("deephyper", "optuna")
PLAIN = table()


def few(*names: str) -> list[Any]:
    """Searches that learn, with and without the planner's ranking; those that are not among `names` are a campaign's.
    A name and a + is with it."""
    return [
        pytest.param(name, prior, marks=SLOW if f"{name}{'+' * prior}" in names else LONG)
        for name in LEARNING for prior in (False, True)
    ]  # fmt: skip


def small() -> tuple[Table, Sequence[Parameter]]:
    """12 candidates of values that Python takes for the same, of one that never varies, two of which fail."""
    parameters = (
        Parameter("x", (1, True, None, "1"), ordered=False), Parameter("y", (0.5, 1.0, 2)), Parameter("one", (4,)),
    )  # fmt: skip
    candidates = candidates_of(parameters, lambda values: True)
    costs = tuple(random.Random(3).uniform(0, 1) for _ in candidates)
    return Table(candidates, costs, tuple(reversed(costs)), frozenset({0, 7})), parameters


@pytest.mark.parametrize(("name", "with_prior"), [
    *few("deephyper+", "optuna"), pytest.param("tpe", True, marks=SLOW), ("random", False), ("exhaustive", True),
    ("exhaustive", False),
])  # fmt: skip
def test_a_space_is_exhausted_with_each_candidate_once(name: str, with_prior: bool) -> None:
    known, parameters = small()
    proposals = play(make_optimizer(name, 1), known, 100, known.prior if with_prior else None, parameters)
    assert sorted(p.index for p in proposals) == list(range(12))


@pytest.mark.parametrize("name", [
    "random", *(pytest.param(name, marks=SLOW) for name in ("deephyper", "optuna", "tpe")),
])  # fmt: skip
def test_a_search_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path: Path, name: str) -> None:
    prior = [0.1 * (i % 5) for i in range(12)]
    _, undisturbed = search(tmp_path / "whole", Made(truth), make_optimizer(name, 1), max_trials=9, prior=prior)
    lines = (tmp_path / "whole" / NAME).read_bytes().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if b'"event":"started","' in line and b'"number":8' in line) + 1
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / NAME).write_bytes(b"".join(lines[:cut]))
    _, trials = search(tmp_path / "cut", Made(truth), make_optimizer(name, 1), max_trials=9, prior=prior)
    assert told(trials) == told(undisturbed) and len(trials) == 9


@pytest.mark.parametrize(("name", "with_prior"), [
    *few("deephyper", "optuna+"), pytest.param("tpe", False, marks=SLOW), ("random", False), ("exhaustive", True),
])  # fmt: skip
def test_what_is_left_out_or_running_is_never_proposed(name: str, with_prior: bool) -> None:
    seen: dict[int, float | None] = {i: PLAIN.costs[i] for i in range(0, 456, 40)}
    pending = frozenset({3, 77})
    open_ = {5, 200, 201, 430}
    left_out = frozenset(range(456)) - open_
    history = History(
        PLAIN.candidates, PARAMETERS, seen, {}, left_out, pending, PLAIN.prior if with_prior else None
    )  # fmt: skip
    for count in range(1 if name == "tpe" else 2):
        proposal = make_optimizer(name, 0).propose(history, count)
        assert proposal is not None and proposal.index in open_


@SLOW
@pytest.mark.parametrize("name", LEARNING)
def test_it_writes_nothing_and_warns_of_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        play(make_optimizer(name, 0), table(lambda v: v["pp"] == 1), 9)
    assert os.listdir(tmp_path) == []
    assert capfd.readouterr() == ("", "")


@SLOW
@pytest.mark.parametrize("name", LEARNING)
def test_the_best_of_the_prior_come_first(name: str) -> None:
    proposals = play(make_optimizer(name, 0), PLAIN, 4, PLAIN.prior)
    order = sorted(range(456), key=lambda i: PLAIN.prior[i])
    assert [p.index for p in proposals] == order[:4]
    assert {p.by for p in proposals} == {"planner"}


@pytest.mark.parametrize(("name", "prior", "seeds"), [
    pytest.param("optuna", "none", 1, marks=SLOW),
    *(pytest.param(name, prior, 3, marks=LONG) for name in LEARNING for prior in ("none", "opposite")),
])  # fmt: skip
def test_it_needs_far_fewer_trials_than_random_search(name: str, prior: str, seeds: int) -> None:
    """6 of 456 are within 3 % of the best: random search needs 65 trials in the mean. An opposite prior names the worst
    first."""
    given = None if prior == "none" else [-cost for cost in PLAIN.costs]
    needed = [trials_to_good(make_optimizer(name, seed), PLAIN, 40, given) for seed in range(seeds)]
    by_chance = [trials_to_good(make_optimizer("random", seed), PLAIN, 456) for seed in range(20)]
    assert max(needed) <= 40
    assert statistics.median(needed) < statistics.median(by_chance) / 2


@pytest.mark.parametrize(("name", "with_prior"), few("optuna+"))
def test_a_region_that_fails_is_left(name: str, with_prior: bool) -> None:
    """Half of the space fails, and what the planner likes best is in that half."""
    known = table(lambda v: int(v["tp"] or 0) >= 4)
    assert min(range(456), key=lambda i: known.prior[i]) in known.fails and 0.4 < len(known.fails) / 456 < 0.6
    proposals = play(make_optimizer(name, 0), known, 25, known.prior if with_prior else None)
    failed = [p.index in known.fails for p in proposals]
    assert sum(failed[12:]) <= 3, failed
    assert any(known.good(p.index) for p in proposals)


@SLOW
def test_a_lost_rank_says_nothing_about_the_layout() -> None:
    from megatron.tuning.search.surrogate import chance_of_failure

    seen: dict[int, float | None] = {i: PLAIN.costs[i] for i in range(0, 456, 40)}
    features = features_of(PARAMETERS, PLAIN.candidates)
    lost = History(PLAIN.candidates, PARAMETERS, {**seen, 5: None}, {5: LOST_RANK})
    failed = History(PLAIN.candidates, PARAMETERS, {**seen, 5: None}, {5: "crash"})
    assert not chance_of_failure(lost, features).any()
    assert chance_of_failure(failed, features)[5] > 0.3


@SLOW
def test_several_at_once_are_not_neighbours() -> None:
    """A running candidate is certain to the surrogate; what lies beside it would tell nothing. If running ones are only
    left out, the next ones are the neighbours of the first."""
    seen: dict[int, float | None] = {i: PLAIN.costs[i] for i in range(0, 456, 30)}
    features = features_of(PARAMETERS, PLAIN.candidates)

    def apart(running: bool) -> float:
        chosen: list[int] = []
        for count in range(4):
            history = history_of(PLAIN, seen, pending=frozenset(chosen))
            history = history if running else replace(history, pending=frozenset())
            proposal = make_optimizer("optuna", 0).propose(history, count)
            assert proposal is not None
            chosen.append(proposal.index)
        return statistics.mean(features.distances(i)[j] for i in chosen for j in chosen if i < j)

    assert apart(running=True) > apart(running=False)


def test_random_takes_every_open_candidate_alike() -> None:
    known, parameters = small()
    drawn = [play(make_optimizer("random", seed), known, 1, None, parameters)[0].index for seed in range(1200)]
    counts = [drawn.count(i) for i in range(12)]
    assert min(counts) > 60 and max(counts) < 140


def test_exhaustive_follows_the_planner() -> None:
    known, parameters = small()
    search = make_optimizer("exhaustive", 0)
    assert [p.index for p in play(search, known, 12, None, parameters)] == list(range(12))
    order = sorted(range(12), key=lambda i: known.prior[i])
    assert [p.index for p in play(search, known, 12, known.prior, parameters)] == order


@pytest.mark.parametrize(("name", "lacks", "extra"), [
    ("deephyper", "deephyper", "deephyper"), ("optuna", "sklearn", "tune"), ("auto", "optuna", "tune"),
])  # fmt: skip
def test_a_missing_library_is_named(name: str, lacks: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "find_spec", lambda library: None if library in (lacks, "deephyper") else object())
    with pytest.raises(ConfigError, match=rf"{lacks}.*megatron-frontier\[{extra}\]"):
        make_optimizer(name, 0)
    assert make_optimizer("random", 0).name == "random"


@SLOW
def test_a_library_of_another_version_is_named_and_auto_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepHyper before 0.9 has no deephyper.hpo."""
    assert make_optimizer("auto", 0).name == "deephyper"
    monkeypatch.setitem(sys.modules, "deephyper.hpo", None)
    monkeypatch.delitem(sys.modules, "megatron.tuning.search.deephyper_search", raising=False)
    assert make_optimizer("auto", 0).name == "optuna"
    with pytest.raises(ConfigError, match=r"deephyper.*\[deephyper\]"):
        make_optimizer("deephyper", 0)
