"""What people see while a search runs: one line for each thing that happens, tables that fit the terminal."""
from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from megatron.tuning.layouts import Layout, best_layout
from megatron.tuning.live import Live, best_table
from megatron.tuning.session import View
from megatron.tuning.types import CONFIRM, DONE, FAILED, Candidate, Result, Trial, cost_of
from tests.helpers.clock import VirtualClock
from tests.tuning import made

_, TRIALS = made.trials(30, seed=4)


def console(width: int, terminal: bool = False) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=width, force_terminal=terminal, highlight=False, markup=False), text


def simple(number: int, step_s: float, nodes: int = 1) -> Trial:
    candidate = Candidate(number, f"tp={number}", {"tp": number}, (), 8, nodes, 4096, step_s=0.5)
    return Trial(number, candidate, "optuna", f"trials/{number:04}", ("n1",), 10.0, 20.0, Result(DONE, step_s=step_s))


def of(*trials: Trial) -> Layout:
    return Layout(trials[0].candidate, trials)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_table_fits_and_is_in_order(width: int) -> None:
    where, text = console(width)
    where.print(best_table(TRIALS, "tokens_per_s", 10, where.width))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "…" not in text.getvalue()
    valid = sorted((cost, t.number) for t in TRIALS if (cost := cost_of(t, "tokens_per_s")) is not None)
    shown = [int(line.split()[0]) for line in lines if line.split() and line.split()[0].isdigit()]
    assert shown == [number for _, number in valid[:10]], text.getvalue()
    assert ("GiB" in text.getvalue()) == (width == 160) and "tokens/s" in text.getvalue()


def test_lines_of_a_log() -> None:
    """A line for each start and end, with its figures; of a layout that was measured again with those of all runs."""
    where, text = console(60)
    live, fast, slow = Live("tokens_per_s", "out", where), simple(1, 1.0), simple(2, 1.25)
    failed = dataclasses.replace(slow, number=3, result=Result(FAILED, "hang", "no step for 60 s"))
    again = dataclasses.replace(fast, number=4, by=CONFIRM, folder="trials/0004", result=Result(DONE, step_s=2.0))
    crash = dataclasses.replace(again, number=5, result=Result(FAILED, "crash", "exit code 1"))
    expected: list[list[str]] = []

    def told(*words: str) -> None:
        expected.append([*words])

    live.started(fast)
    told("trial 1 tp=1", "8 process", "n1", "optuna", "0.5 s")
    live.ended(fast, of(fast), of(fast), None)
    told("trial 1 tp=1", "4,096 tokens/s")
    live.ended(slow, of(slow), of(fast), of(fast))
    told("trial 2 tp=2", "3,277 tokens/s", "20.0 %", "trial 1")
    live.ended(failed, of(failed), of(fast), of(fast))
    told("trial 3 tp=2", "hang: no step for 60 s", "out/trials/0002")
    live.ended(again, of(fast, again), of(slow), of(fast))
    told("trial 4 tp=1", "2,048 tokens/s", "2 times", "66.7 %", "2,731 tokens/s", "16.7 %", "trial 2")
    live.ended(crash, of(slow, crash), None, of(slow))
    told("trial 5 tp=1", "crash: exit code 1", "out/trials/0004")
    live.ended(again, of(fast, crash, again, crash), of(slow), of(slow))
    told("trial 4 tp=1", "2,048 tokens/s", "crash", "2 of 4", "exit code 1", "out/trials/0004")
    live.update(View([fast], [], of(fast), 3, 0, None))  # says nothing in a log
    lines = text.getvalue().splitlines()
    for line, words in zip(lines, expected, strict=True):
        assert all(word in line for word in words), (line, words)
    where, text = console(160)
    where.print(best_table([fast, slow, again], "tokens_per_s", 10, 160))
    rows = [line.split() for line in text.getvalue().splitlines() if line.split()[:1] in (["1"], ["2"])]
    assert [row[0] for row in rows] == ["2", "1"] and rows[1][4:6] == ["2", "66.7"], "one row for a layout"


def test_on_a_terminal_there_is_a_table_that_lives_and_goes() -> None:
    clock = VirtualClock()
    where, text = console(120, terminal=True)
    running = dataclasses.replace(TRIALS[4], result=None, ended=None)
    with Live("tokens_per_s", "out", where, clock) as live:
        live.update(View(TRIALS, [running], best_layout(TRIALS, "tokens_per_s"), 40, 0, None))
        drawn = text.getvalue()
        assert "running" in drawn and "best of" in drawn and running.candidate.key in drawn
        live.update(View(TRIALS, [running], None, 40, 0, None))
        assert text.getvalue() == drawn, "drawn once a second"
        clock.advance(1.0)
        live.update(View(TRIALS, [running], None, 40, 0, None))
        assert text.getvalue() != drawn
