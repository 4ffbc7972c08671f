"""Searches replayed in a table of measured layouts: how many trials each takes to come near the best.

A replay is a tuning run in all but the trials: megatron.tuning's session, journal and optimizers, with a runner that
looks its answers up.
"""
from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tuner_table import OBJECTIVE, Measured, Table

from megatron.tuning.journal import Journal
from megatron.tuning.layouts import Layout, best_layout
from megatron.tuning.search.optimizer import make_optimizer, missing
from megatron.tuning.session import Plan, Session, View
from megatron.tuning.types import DONE, FAILED, Candidate, Result, Trial

QUARTER, HALF = 4, 2
"""Parts of a space within which a search must be near the best: with the planner's prior, and without."""
CONFIRM = (0, 3, 5)
"""Trials that measure leading layouts again, as tools/tune.py --confirm has it, by which the named layout is judged."""


@dataclass(frozen=True)
class Search:
    """One row: what --search and --no-prior say. limit: the part of the space that is proved (4: a quarter), None for
    what it is compared with; whole: go on to the end of the space (a Bayesian search stops at half)."""

    label: str
    name: str
    prior: bool
    limit: int | None = None
    whole: bool = False


SEARCHES = (
    Search("DeepHyper", "deephyper", True, QUARTER),
    Search("Optuna", "optuna", True, QUARTER),
    Search("planner's order", "exhaustive", True, whole=True),
    Search("DeepHyper", "deephyper", False, HALF),
    Search("Optuna", "optuna", False, HALF),
    Search("Optuna's TPE", "tpe", False, whole=True),
    Search("random", "random", False, whole=True),
)


@dataclass(frozen=True)
class Replay:
    """One search with one seed: the candidates in the order in which they were tried, and the one that the tuner would
    have named after each trial (None before the first valid one). confirmed: named after each of the trials that came
    then and measured one of them again."""

    search: Search
    seed: int
    tried: tuple[int, ...]
    named: tuple[int | None, ...]
    confirmed: tuple[int | None, ...] = ()

    def found_at(self, table: Table) -> int | None:
        """Number of the first trial of a layout whose truth is within 3 % of the best; None if there was none."""
        near = table.near()
        return next((number for number, index in enumerate(self.tried, 1) if index in near), None)

    def regret(self, table: Table, trials: int) -> float:
        """How much dearer than the best the layout truly is that is named after so many trials, by what they told."""
        return _regret(table, self.named[min(trials, len(self.named)) - 1])

    def regret_confirmed(self, table: Table, most: int) -> float:
        """The same after the search and at most so many trials more."""
        return _regret(table, (self.named[-1], *self.confirmed)[: most + 1][-1])


def _regret(table: Table, index: int | None) -> float:
    return math.inf if index is None else table.regret(index)


class TableRunner:
    """Trials that end at once with what the table has of them (see megatron.tuning.trial_runner)."""

    def __init__(self, table: Table, seed: int) -> None:
        self._table, self._seed, self._answers = table, seed, table.answers(seed)
        self._told = Counter[int]()
        self._index = {candidate.key: candidate.index for candidate in table.candidates}
        self._running: list[Trial] = []

    @property
    def running(self) -> Sequence[Trial]:
        return tuple(self._running)

    def can_start(self, candidate: Candidate) -> bool:
        """One at a time, as on one machine."""
        return not self._running

    def can_ever_start(self, candidate: Candidate) -> bool:
        return True

    def lost_by(self, trial: Trial) -> str | None:
        return None

    def start(self, trial: Trial) -> Trial:
        trial = dataclasses.replace(trial, hosts=("table",), started=0.0)
        self._running.append(trial)
        return trial

    def poll(self) -> list[Trial]:
        ended = [dataclasses.replace(trial, ended=1.0, result=self._result(trial)) for trial in self._running]
        self._running.clear()
        return ended

    def stop_all(self, why: str) -> list[Trial]:
        stopped, self._running = self._running, []
        return stopped

    def recover(self, trial: Trial) -> Trial | None:
        return None

    def _result(self, trial: Trial) -> Result:
        index = self._index[trial.candidate.key]
        turn = self._told[index]
        self._told[index] += 1
        told, kind = self._table.again(index, turn, self._seed) if turn else self._answers[index]
        if told is None:
            return Result(FAILED, kind, "as in the sweep")
        step_s = math.exp(told) * trial.candidate.tokens
        found = (measured.get(trial.candidate.key, Measured()).steps_s for measured in self._table.passes)
        steps = next(filter(None, found))
        spread = (max(steps) - min(steps)) / statistics.median(steps)
        return Result(
            DONE, step_s=step_s, spread=spread, steady=len(steps), tokens_per_s=trial.candidate.tokens / step_s
        )  # fmt: skip


class Quiet:
    """Shows nothing (see megatron.tuning.session.Show)."""

    def note(self, text: str) -> None: ...

    def started(self, trial: Trial) -> None: ...

    def ended(self, trial: Trial, layout: Layout, best: Layout | None, before: Layout | None) -> None: ...

    def update(self, view: View) -> None: ...


def replay(table: Table, search: Search, seed: int) -> Replay:
    """Tune in the table with an empty journal."""
    trials = len(table.candidates) if search.whole else len(table.candidates) // HALF
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        ended = _session(table, search, seed, trials, Path(folder))
    place = {candidate.key: candidate.index for candidate in table.candidates}
    named: list[int | None] = []
    for count in range(1, len(ended) + 1):
        best = best_layout(ended[:count], OBJECTIVE)
        named.append(None if best is None else place[best.candidate.key])
    tried = [place[trial.candidate.key] for trial in ended if not trial.confirms]
    return Replay(search, seed, tuple(tried), tuple(named[: len(tried)]), tuple(named[len(tried) :]))


def _session(table: Table, search: Search, seed: int, trials: int, folder: Path) -> list[Trial]:
    """The trials of one session, in the order in which they ended."""
    prior = table.prior() if search.prior else None
    plan = Plan(table.candidates, table.parameters, OBJECTIVE, trials, prior, confirm=max(CONFIRM))
    journal = Journal.open(folder, {"search": search.name, "seed": seed}, {})
    try:
        optimizer = make_optimizer(search.name, seed)
        Session(plan, optimizer, TableRunner(table, seed), journal, Quiet(), pause=lambda: None).run()
        return journal.ended
    finally:
        journal.close("replayed")


def replay_all(
    table: Table, seeds: Sequence[int], searches: Sequence[Search], processes: int, done: Callable[[Replay], None]
) -> list[Replay]:
    """Every search with every seed, several at once; `done` is called as each ends. What is not installed is left out.

    By search, in the order given, then by seed.
    """
    jobs = [(search, seed) for search in searches if not missing(search.name) for seed in seeds]
    # The searches' linear algebra on matrices of some dozens of rows gains nothing from threads.
    os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    found: dict[tuple[Search, int], Replay] = {}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(replay, table, *job) for job in jobs]):
            result = future.result()
            found[result.search, result.seed] = result
            done(result)
    return [found[job] for job in jobs]
