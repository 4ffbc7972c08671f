"""Repeated measurements of the best layouts: which ones, and the winner by all measurements."""

import math
import random

import pytest

from megatron.jobs.candidate_layouts import Candidate
from megatron.jobs.result import CRASH, DONE, FAILED, LOST_RANK, OUT_OF_MEMORY, Result
from megatron.jobs.trial_statistics import (
    CONFIRM,
    Trial,
    in_turn,
    measured,
    noise_of,
    ranked,
    ruled_out,
)

RATE = "tokens_per_s"
CANDIDATES = [Candidate(i, f"k={i}", {"k": i}, 8, (), 1, 1000) for i in range(8)]


def trial(number, k, outcome, spread=None):
    """Return a trial of layout k: with a step time, with a failure, or without an end.

    Trials numbered above 8 confirm.
    """
    result = (
        Result()
        if outcome is None
        else Result(FAILED, outcome, "why")
        if isinstance(outcome, str)
        else Result(DONE, step_s=outcome, spread=spread, steady=4)
    )
    return Trial(number, CANDIDATES[k], CONFIRM if number > 8 else "x", result)


def turns(trials):
    return [candidate.key for candidate in in_turn(trials, RATE)]


def chosen(*trials):
    """Return the first of the trials that are next in turn."""
    return next(iter(turns(trials)), None)


def layouts_of(trials):
    return measured(trials, RATE)


def test_a_layout_has_the_median_of_its_runs():
    (one,) = layouts_of(
        [trial(9, 0, 1.2, 0.3), trial(1, 0, 1.0, 0.1), trial(10, 0, 1.1), trial(11, 0, LOST_RANK)]
    )
    assert one.step_s == 1.1 and one.numbers == "trials 1, 9, 10, 11" and not one.failures
    assert "3 times, 18.2 %" in one.spread and one.cost == pytest.approx(1.1 / 1000)


@pytest.mark.parametrize(
    ("outcomes", "valid"),
    [
        ([1.0, CRASH], False),
        ([1.0, CRASH, 1.0], True),
        ([CRASH, 1.0, "hang"], False),
        ([1.0, LOST_RANK], True),
        ([LOST_RANK, LOST_RANK], False),
        ([1.0, 1.0, 1.0, OUT_OF_MEMORY], False),
    ],
)
def test_a_layout_that_fails_half_the_time_or_ran_out_of_memory_once_has_no_figures(
    outcomes, valid
):
    trials = [trial(number, 0, outcome) for number, outcome in enumerate(outcomes, 1)]
    assert bool(ranked(measured(trials, RATE))) is valid


def test_the_best_goes_first_then_those_within_reach_that_were_measured_least():
    once = [trial(1, 0, 1.02), trial(2, 1, 1.0), trial(3, 2, 1.03), trial(4, 3, 1.4)]
    assert chosen(*once) == "k=1"
    assert turns(once) == ["k=1", "k=0", "k=2"]
    assert chosen(*once, trial(9, 1, None)) == "k=0", (
        "what runs counts: the next one goes elsewhere"
    )
    assert chosen(*once, trial(9, 1, 1.0), trial(10, 0, 1.02)) == "k=2"
    assert chosen(*once, trial(9, 1, 1.1)) == "k=0", "now the best, and measured once"
    assert chosen(*once[:1], trial(9, 0, LOST_RANK), *once[1:2]) == "k=1"


def test_nothing_is_measured_again_where_nothing_is_in_doubt():
    assert (
        chosen() is None and chosen(trial(1, 0, 1.0)) is None and chosen(trial(1, 0, CRASH)) is None
    )
    assert chosen(trial(1, 0, 1.0), trial(2, 1, CRASH)) is None
    assert chosen(trial(1, 0, 1.0), trial(2, 1, 1.2)) is None
    # The same two on a machine whose steps differ by half.
    assert chosen(trial(1, 0, 1.0, 0.5), trial(2, 1, 1.2, 0.5)) == "k=0"
    assert chosen(trial(1, 0, 1.0, 9.0), trial(2, 1, 1.4, 9.0)) is None, (
        "40 % behind is no rival, whatever the noise"
    )


def test_noise_is_learnt_from_what_was_repeated():
    """Noise is estimated from repeats, from no trial, and from the spreads of single measurements.

    The cases are 200 layouts measured twice with a scatter of 5 %, none, and three measured once.
    """
    chance = random.Random(5)
    runs = [
        one
        for _ in range(200)
        for one in layouts_of([trial(n, 0, math.exp(chance.gauss(0, 0.05))) for n in (1, 9)])
    ]
    assert noise_of(runs) == pytest.approx(0.05, rel=0.12)
    assert noise_of([]) == noise_of(layouts_of([trial(1, 0, 1.0)])) == pytest.approx(0.02)
    # The range of four normal values is 2.06 deviations, and the error of their median 0.6 (1.25 /
    # 2) of one.
    spread = layouts_of([trial(k + 1, k, 1.0, 0.2) for k in range(3)])
    assert noise_of(spread) == pytest.approx(math.hypot(0.02, 0.2 / 2.06 * 0.627), rel=0.03)


def test_ruling_out_against_its_definition():
    chance = random.Random(7)
    for _ in range(200):
        candidates = [
            Candidate(i, f"{i}", {}, 4, (), 1, 1, chance.choice([None, *range(1, 6)]))
            for i in range(12)
        ]
        ended = []
        for number, candidate in enumerate(chance.sample(candidates, 5), 1):
            result = chance.choice(
                [Result(FAILED, OUT_OF_MEMORY), Result(FAILED, "hang"), Result(DONE, step_s=1.0)]
            )
            ended.append(Trial(number, candidate, "x", result))

        def no_less(a, b):
            return None not in (a.memory_bytes, b.memory_bytes) and (a.memory_bytes or 0) >= (
                b.memory_bytes or 0
            )

        fitted = [t.candidate for t in ended if t.result.status == DONE]
        failed = [t.candidate for t in ended if t.result.kind == OUT_OF_MEMORY]
        valid = [f for f in failed if not any(no_less(fits, f) for fits in fitted)]
        assert ruled_out(candidates, ended) == {
            c.index for c in candidates if any(no_less(c, f) for f in valid)
        }
