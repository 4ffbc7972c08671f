"""What people see while a search runs: one line for each thing that happens, tables that fit the terminal."""
from __future__ import annotations

import dataclasses
import io
import random

import pytest
from rich.console import Console

from megatron.tuning.live import Live, behind, best_table, outcome, progress, show_value
from megatron.tuning.session import View
from megatron.tuning.types import DONE, FAILED, INVALID, Candidate, Result, Trial, best_trial, cost_of
from tests.tuning import made

EVERYTHING, TRIALS = made.trials(30, seed=4)


def console(width: int, terminal: bool = False) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=width, force_terminal=terminal, highlight=False, markup=False), text


def simple(number: int, step_s: float, nodes: int = 1) -> Trial:
    candidate = Candidate(number, f"tp={number}", {"tp": number}, (), 8, nodes, 4096, step_s=0.5)
    return Trial(number, candidate, "optuna", f"trials/{number:04}", ("n1",), 10.0, 20.0, Result(DONE, step_s=step_s))


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_table_fits_and_is_in_order(width: int):
    where, text = console(width)
    where.print(best_table(TRIALS, "tokens_per_s", 10, where.width))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "…" not in text.getvalue()
    valid = sorted((cost, t.number) for t in TRIALS if (cost := cost_of(t, "tokens_per_s")) is not None)
    shown = [int(line.split()[0]) for line in lines if line.split() and line.split()[0].isdigit()]
    assert shown == [number for _, number in valid[:10]], text.getvalue()
    assert ("GiB" in text.getvalue()) == (width == 160) and "tokens/s" in text.getvalue()


def test_lines_of_a_log():
    where, text = console(60)
    live = Live("tokens_per_s", "out", where)
    fast, slow = simple(1, 1.0), simple(2, 1.25)
    failed = dataclasses.replace(slow, number=3, result=Result(FAILED, "hang", "no step for 60 s"))
    invalid = dataclasses.replace(slow, result=Result(INVALID, "invalid", "the batch is 4, not 8"))
    live.started(fast)
    live.ended(fast, fast, None)
    live.ended(slow, fast, fast)
    live.ended(failed, fast, fast)
    live.update(View([fast], [], fast, 3, 0, None))
    assert text.getvalue().splitlines() == [
        " tune: trial 1 tp=1: 8 process(es) on n1, chosen by optuna, 0.5 s a step predicted",
        " tune: trial 1 tp=1: 4,096 tokens/s (the first)",
        " tune: trial 2 tp=2: 3,277 tokens/s (20.0 % below the best, trial 1)",
        " tune: trial 3 tp=2: hang: no step for 60 s; out/trials/0002",
    ]
    assert outcome(invalid, "tokens_per_s") == "invalid: the batch is 4, not 8"


def test_values_and_distances_of_both_objectives():
    assert show_value(1 / 12345, "tokens_per_s") == "12,345 tokens/s"
    assert show_value(3600 / 1e9 * 2.5, "node_hours") == "2.5 node-hours for a billion tokens"
    assert behind(2.0, 1.0, "tokens_per_s") == 0.5 and behind(2.0, 1.0, "node_hours") == 1.0
    where, text = console(200)
    live = Live("node_hours", "out", where)
    live.ended(simple(2, 1.5), simple(1, 1.0), simple(1, 1.0))
    assert "50.0 % above the best, trial 1" in text.getvalue()


def test_progress_counts_what_ended():
    chance = random.Random(1)
    trials = [made.trial(i, c, "planner", chance, 4 * made.GIB) for i, c in enumerate(EVERYTHING[:12], 1)]
    memory = sum(t.result is not None and t.result.kind == "out of memory" for t in trials)
    view = View(trials, (), best_trial(trials, "tokens_per_s"), 40, 7, 90.0)
    said = progress(view, "tokens_per_s")
    assert said.startswith("12 of 40 trials, about 28:00 to go, 1:30 left") and f"{memory} out of memory" in said
    assert said.endswith("7 ruled out by memory") and memory > 0


def test_on_a_terminal_there_is_a_table_that_lives_and_goes():
    where, text = console(120, terminal=True)
    running = dataclasses.replace(TRIALS[4], result=None, ended=None)
    with Live("tokens_per_s", "out", where) as live:
        live.update(View(TRIALS, [running], best_trial(TRIALS, "tokens_per_s"), 40, 0, None))
        drawn = text.getvalue()
        assert "running" in drawn and "best of" in drawn and running.candidate.key in drawn
        live.update(View(TRIALS, [running], None, 40, 0, None))
        assert text.getvalue() == drawn, "drawn once a second"
