"""What may be the best is measured again: which layouts, how often, and what is named by all measurements."""
from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.tuning.confirming import in_turn, noise_of, reach
from megatron.tuning.journal import NAME
from megatron.tuning.layouts import Layout, best_layout, layouts_of
from megatron.tuning.search.baselines import ExhaustiveSearch
from megatron.tuning.session import BUDGET, EXHAUSTED, NODES, TIME
from megatron.tuning.types import (
    CONFIRM,
    CRASH,
    DONE,
    FAILED,
    INVALID,
    LOST_RANK,
    OUT_OF_MEMORY,
    Candidate,
    Result,
    Trial,
)
from tests.tuning import test_session
from tests.tuning.runners import Made, figures
from tests.tuning.test_session import Climber, search, told

pytestmark = pytest.mark.usefixtures("no_waiting_for_disks")
RATE = "tokens_per_s"
CANDIDATES = [Candidate(i, f"k={i}", {"k": i}, (), 8, 1, 1000) for i in range(8)]


def trial(number: int, k: int, outcome: float | str | None, spread: float | None = None) -> Trial:
    """Of layout k: with this step time, with this failure, or without an end. More than eight confirm."""
    result = None if outcome is None else Result(FAILED, outcome, "why") if isinstance(outcome, str) else Result(
        DONE, step_s=outcome, spread=spread, steady=4, tokens_per_s=1000 / outcome, memory_bytes=number)  # fmt: skip
    return Trial(number, CANDIDATES[k], CONFIRM if number > 8 else "x", f"trials/{number:04}", result=result)


def chosen(*trials: Trial, keys: Sequence[str] = tuple(c.key for c in CANDIDATES)) -> str | None:
    """The first in turn."""
    return next(iter(in_turn(trials, RATE, keys)), None)


# -- a layout ----------------------------------------------------------------------------------------------------------


def test_a_layout_has_the_median_of_its_runs_and_rates_that_belong_to_it() -> None:
    (one,) = layouts_of([trial(9, 0, 1.2, 0.3), trial(1, 0, 1.0, 0.1), trial(10, 0, 1.1), trial(11, 0, LOST_RANK)])
    result = one.result
    assert one.valid and one.number == 1 and one.by == "x" and one.numbers == "trials 1, 9, 10" and not one.failures
    assert (result.step_s, result.steady, result.memory_bytes) == (1.1, 12, 10)
    assert result.spread == pytest.approx(0.2) and result.tokens_per_s == pytest.approx(1000 / 1.1)
    assert one.apart == pytest.approx(0.2 / 1.1)
    single = Layout(CANDIDATES[0], (trial(1, 0, 1.0),))
    assert single.result is single.trials[0].result and single.apart is None and single.numbers == "trial 1"


@pytest.mark.parametrize(("outcomes", "valid"), [
    ([1.0, CRASH], False), ([1.0, CRASH, 1.0], True), ([CRASH, 1.0, "hang"], False), ([1.0, LOST_RANK], True),
    ([LOST_RANK, LOST_RANK], False), ([1.0, 1.0, 1.0, OUT_OF_MEMORY], False),
])  # fmt: skip
def test_a_layout_that_fails_half_the_time_or_ran_out_of_memory_once_has_no_figures(
    outcomes: list[float | str], valid: bool
) -> None:
    trials = [trial(number, 0, outcome) for number, outcome in enumerate(outcomes, 1)]
    (one,) = layouts_of(trials)
    assert one.valid is valid is (best_layout(trials, RATE) is not None)
    if OUT_OF_MEMORY in outcomes:
        assert one.result.kind == OUT_OF_MEMORY and "1 of 4" in str(one.result.reason)


# -- which one is next -------------------------------------------------------------------------------------------------


def test_the_best_goes_first_then_those_within_reach_that_were_measured_least() -> None:
    once = [trial(1, 0, 1.02), trial(2, 1, 1.0), trial(3, 2, 1.03), trial(4, 3, 1.4)]
    assert chosen(*once) == "k=1"
    assert in_turn(once, RATE, ["k=0", "k=1", "k=2"]) == ["k=1", "k=0", "k=2"]
    assert chosen(*once, trial(9, 1, None)) == "k=0", "what runs counts: the next one goes elsewhere"
    assert chosen(*once, trial(9, 1, 1.0)) == "k=0"
    assert chosen(*once, trial(9, 1, 1.0), trial(10, 0, 1.02)) == "k=2"
    assert chosen(*once, trial(9, 1, 1.1)) == "k=0", "now the best, and measured once"
    assert chosen(*once, keys=["k=2", "k=3"]) == "k=2" and chosen(*once, keys=["k=3"]) is None
    assert chosen(*once, trial(9, 1, CRASH)) == "k=0"
    assert chosen(*once[:1], trial(9, 0, LOST_RANK), *once[1:2]) == "k=1"


def test_nothing_is_measured_again_where_nothing_is_in_doubt() -> None:
    assert chosen() is None and chosen(trial(1, 0, 1.0)) is None and chosen(trial(1, 0, CRASH)) is None
    assert chosen(trial(1, 0, 1.0), trial(2, 1, CRASH)) is None
    assert chosen(trial(1, 0, 1.0), trial(2, 1, 1.2)) is None
    # The same two on a machine whose steps differ by half.
    assert chosen(trial(1, 0, 1.0, 0.5), trial(2, 1, 1.2, 0.5)) == "k=0"
    assert chosen(trial(1, 0, 1.0, 9.0), trial(2, 1, 1.4, 9.0)) is None, "40 % behind is no rival, whatever the noise"


def test_noise_is_learnt_from_what_was_repeated() -> None:
    """Of 200 layouts measured twice with a scatter of 5 %; of none; and of three measured once with a spread."""
    chance = random.Random(5)
    runs = [Layout(CANDIDATES[0], tuple(trial(n, 0, math.exp(chance.gauss(0, 0.05))) for n in (1, 9)))
            for _ in range(200)]  # fmt: skip
    assert noise_of(runs) == pytest.approx(0.05, rel=0.12)
    assert noise_of([]) == noise_of(layouts_of([trial(1, 0, 1.0)])) == pytest.approx(0.02)
    # The range of four normal ones is 2.06 deviations, and the error of their median 0.6 (1.25 / 2) of one.
    spread = layouts_of([trial(k + 1, k, 1.0, 0.2) for k in range(3)])
    assert noise_of(spread) == pytest.approx(math.hypot(0.02, 0.2 / 2.06 * 0.627), rel=0.03)
    assert reach(0.02, 1, 1) > reach(0.02, 4, 4) and reach(9.0, 1, 1) == math.log(1.25)


def test_three_more_measurements_name_better_layouts() -> None:
    """Sixty searches of eight layouts 2 % apart, with a scatter of 3 %: how far behind what is named truly is."""

    def regret(confirm: int, seed: int) -> float:
        chance = random.Random(seed)

        def measured(number: int, k: int) -> Trial:
            return trial(number, k, (1 + 0.02 * k) * math.exp(chance.gauss(0, 0.03)))

        trials = [measured(k + 1, k) for k in range(8)]
        for number in range(9, 9 + confirm):
            if (key := chosen(*trials)) is not None:
                trials.append(measured(number, int(key[2:])))
        best = best_layout(trials, RATE)
        assert best is not None
        return 0.02 * best.candidate.index

    without, three, five = (statistics.mean(regret(n, seed) for seed in range(60)) for n in (0, 3, 5))
    assert max(three, five) < 0.75 * without, (without, three, five)


# -- in a session ------------------------------------------------------------------------------------------------------


class Noisy(Made):
    """Trials of one layout differ; `says` has other results, by number."""

    def __init__(self, *words: object, says: dict[int, Result] | None = None, **more: object) -> None:
        super().__init__(*words, **more)  # type: ignore[arg-type]
        self.says = says or {}

    def of(self, trial: Trial) -> Result:
        result = super().of(trial)
        if result.step_s is None or trial.number in self.says:
            return self.says.get(trial.number, result)
        return figures(trial.candidate, result.step_s * (1 + 0.08 * random.Random(trial.number).random()))


def flat(candidate: Candidate) -> Result:
    """Twelve layouts that are 1 % apart, the last the best; all of them may be."""
    return figures(candidate, 1.12 - 0.01 * candidate.index)


def again(trials: Sequence[Trial]) -> list[int]:
    return [t.number for t in trials if t.confirms]


def test_after_the_search_leading_layouts_are_measured_again_and_all_runs_count(tmp_path: Path) -> None:
    ending, trials = search(tmp_path, Noisy(flat), ExhaustiveSearch(), confirm=3)
    assert ending.why == EXHAUSTED and again(trials) == [13, 14, 15] and ending.best == best_layout(trials, RATE)
    assert ending.best is not None and len(ending.best.runs) == 2
    assert search(tmp_path, Noisy(flat), ExhaustiveSearch(), confirm=3)[0].ended == 0
    # Of none that runs there is no doubt.
    none = search(tmp_path / "none", Made(lambda c: Result(FAILED, CRASH, "no")), confirm=3)
    assert (none[0].ended, none[0].best) == (12, None)


def test_killed_after_any_record_it_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"max_trials": 4, "confirm": 3, "objective": "node_hours"}
    _, undisturbed = search(tmp_path / "whole", Noisy(flat), **plan)
    assert len(again(undisturbed)) == 3
    lines = (tmp_path / "whole" / NAME).read_bytes().splitlines(keepends=True)
    for cut in range(1, len(lines)):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / NAME).write_bytes(b"".join(lines[:cut]) + lines[cut][: len(lines[cut]) // 2])
        noted = sum(b'"event":"ended"' in line for line in lines[:cut])
        ending, trials = search(folder, runner := Noisy(flat), **plan)
        assert told(trials) == told(undisturbed) and ending.why == BUDGET, f"cut at {cut}"
        assert ending.ended == 7 - noted == sum(what == "start" for what, _ in runner.log), "nothing is run again"


def test_how_many_may_change_from_start_to_start(tmp_path: Path) -> None:
    """A search of the version before has none; one that goes on with more trials has another best to confirm."""
    for most, confirm, ended in ((4, 0, 4), (4, 2, 2), (4, 1, 0), (6, 1, 3), (6, 3, 2)):
        ending, _ = search(tmp_path, Noisy(flat), max_trials=most, confirm=confirm)
        assert ending.ended == ended, (most, confirm)
    _, trials = search(tmp_path, Noisy(flat), max_trials=6)
    assert again(trials) == [5, 6, 9, 10, 11]
    assert len({t.candidate.key for t in trials if not t.confirms}) == 6, "what was confirmed is not proposed again"


def test_one_that_was_interrupted_is_run_again_unless_none_are_asked_for(tmp_path: Path) -> None:
    search(tmp_path, Noisy(flat), max_trials=3, confirm=2)
    path = tmp_path / NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: next(i for i, line in enumerate(lines) if b'"number":4,"hosts"' in line) + 1]))
    show = test_session.Quiet()
    ending, trials = search(tmp_path, Noisy(flat), max_trials=3, show=show)
    assert ending.ended == 0 and trials[3].result is None and ending.why == BUDGET
    assert any("trial 4" in line and "--confirm is 0" in line for line in show.lines)
    runner = Noisy(flat)
    assert search(tmp_path, runner, max_trials=3, confirm=2)[0].ended == 2
    assert [number for what, number in runner.log if what == "start"] == [4, 5]


@pytest.mark.parametrize(("kind", "status", "stays"), [
    (CRASH, FAILED, False), (OUT_OF_MEMORY, FAILED, False), (None, INVALID, False), (LOST_RANK, FAILED, True),
])  # fmt: skip
def test_a_layout_that_fails_when_it_is_run_again_is_not_named(
    tmp_path: Path, kind: str | None, status: str, stays: bool
) -> None:
    first = search(tmp_path / "before", Noisy(flat), max_trials=4)[0].best
    ending, trials = search(tmp_path, Noisy(flat, says={5: Result(status, kind, "why")}), max_trials=4, confirm=1)
    assert first is not None and ending.best is not None and trials[4].candidate.key == first.candidate.key
    assert (ending.best.candidate.key == first.candidate.key) is stays
    # Asked for, it is run again under its number; not where none are wanted now.
    ending, trials = search(tmp_path, Noisy(flat), max_trials=4, retry_failed=True, confirm=0)
    assert ending.ended == 0 and trials[4].result == Result(status, kind, "why")
    ending, trials = search(tmp_path, Noisy(flat), max_trials=4, retry_failed=True, confirm=1)
    assert ending.ended == 1 and len(trials) == 5 and trials[4].valid


def test_they_run_side_by_side_once_nothing_of_the_search_runs(tmp_path: Path) -> None:
    runner, seen = Noisy(flat, ("n1", "n2", "n3")), list[list[Trial]]()

    def tick() -> None:
        seen.append(list(runner.running))
        runner.tick()

    _, trials = search(tmp_path, runner, pause=tick, max_trials=7, confirm=3)
    assert len(again(trials)) == 3 and max(map(len, seen)) == 3
    assert all(len({trial.confirms for trial in running}) <= 1 for running in seen)
    assert any(len(running) > 1 and running[0].confirms for running in seen)
    assert max(Counter(t.candidate.key for t in trials).values()) == 2, "each on another layout"


def test_without_time_for_them_the_next_start_makes_them(tmp_path: Path) -> None:
    def left(runner: Made, until: float) -> Callable[[], float]:
        return lambda: until - runner.now

    first = Noisy(flat, turns=10)
    ending, trials = search(tmp_path, first, max_trials=3, confirm=2, left_s=left(first, 1034.0))
    assert (ending.why, ending.ended, again(trials)) == (TIME, 3, [])
    ending, trials = search(tmp_path, Noisy(flat), max_trials=3, confirm=2)
    assert (ending.why, ending.ended, again(trials)) == (BUDGET, 2, [4, 5])


# -- nodes that die ----------------------------------------------------------------------------------------------------


def test_what_a_dead_node_ended_runs_again_in_the_same_start_and_the_rest_goes_on(tmp_path: Path) -> None:
    hosts, candidates = ("n1", "n2", "n3"), test_session.made(lambda a, b: 2 if a else 1)
    runner = Noisy(flat, hosts, die={2: ("n2",), 13: ("n3",)})
    ending, trials = search(tmp_path, runner, ExhaustiveSearch(), candidates, confirm=0)
    assert ending.why == EXHAUSTED and ending.ended == 12 and ("lost", 2) in runner.log
    assert [number for what, number in runner.log if what == "start"].count(2) == 2
    # Two of three are dead: only the layouts of one node can run, the next start has the others and what confirms.
    runner = Noisy(flat, hosts, die={4: ("n1", "n2")})
    ending, trials = search(tmp_path / "few", runner, ExhaustiveSearch(), candidates, confirm=2)
    assert ending.why == NODES and ending.ended == 3 and trials[3].result is None
    ending, trials = search(tmp_path / "few", Noisy(flat, hosts), ExhaustiveSearch(), candidates, confirm=2)
    assert ending.why == EXHAUSTED and ending.ended == 11 and len(again(trials)) == 2


def test_a_confirming_trial_that_a_dead_node_ended_goes_back(tmp_path: Path) -> None:
    runner = Noisy(flat, ("n1", "n2"), die={5: ("n1",)})
    ending, trials = search(tmp_path, runner, Climber(), max_trials=4, confirm=2)
    assert ending.why == BUDGET and again(trials) == [5, 6] and all(trial.valid for trial in trials)


def test_time_that_is_up_is_not_the_end_of_what_lacks_nodes(tmp_path: Path) -> None:
    candidates = test_session.made(lambda a, b: 2 if a else 1)
    small, runner = [c.key for c in candidates if c.nodes == 1], Noisy(flat, ("n1", "n2"), die={1: ("n1",)})

    def left_s() -> float:
        return 0.0 if sum(what == "end" for what, _ in runner.log) == len(small) else 100.0

    ending, trials = search(tmp_path, runner, ExhaustiveSearch(), candidates, confirm=0, left_s=left_s)
    assert sorted(t.candidate.key for t in trials if t.valid) == sorted(small) and ending.why == NODES


def test_the_turn_of_a_layout_that_lacks_nodes_stays_its_own(tmp_path: Path) -> None:
    """A node dies when all layouts were tried: those that fit are measured again once, and not in place of others."""
    def alike(candidate: Candidate) -> Result:
        return figures(candidate, 1.0)

    candidates = test_session.made(lambda a, b: 2 if a else 1)
    small = [c.key for c in candidates if c.nodes == 1]
    runner = Made(alike, ("n1", "n2"), die={len(candidates) + 1: ("n1",)})
    ending, trials = search(tmp_path, runner, ExhaustiveSearch(), candidates, confirm=20)
    assert sorted(t.candidate.key for t in trials if t.confirms) == sorted(small) and ending.why == NODES
    ending, trials = search(tmp_path, Made(alike, ("n1", "n2")), ExhaustiveSearch(), candidates, confirm=20)
    assert {len(one.runs) for one in layouts_of(trials)} == {2, 3} and ending.why == EXHAUSTED
