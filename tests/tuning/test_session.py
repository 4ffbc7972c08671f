"""A search without processes: every candidate once, killed anywhere it goes on, and nothing starts too late."""
from __future__ import annotations

import dataclasses
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.tuning.journal import NAME, Journal
from megatron.tuning.ruling_out import ruled_out
from megatron.tuning.search.baselines import ExhaustiveSearch, RandomSearch
from megatron.tuning.search.optimizer import Optimizer, Proposal
from megatron.tuning.session import BUDGET, EXHAUSTED, SIGNAL, TIME, Ending, Plan, Session
from megatron.tuning.types import (
    DONE,
    FAILED,
    INVALID,
    OUT_OF_MEMORY,
    Candidate,
    History,
    Parameter,
    Result,
    Trial,
    seconds_cost,
)
from tests.tuning.runners import Made, Quiet, figures

WHO: dict[str, Any] = {"space": "made", "seed": 0}
PARAMETERS = (Parameter("a", (0, 1, 2, 3)), Parameter("b", (0, 1, 2)))
GIB = 2**30


def made(nodes: Callable[[int, int], int] = lambda a, b: 1, memory: bool = False) -> list[Candidate]:
    found = list[Candidate]()
    for a, b in itertools.product(PARAMETERS[0].values, PARAMETERS[1].values):
        assert isinstance(a, int) and isinstance(b, int)
        found.append(Candidate(
            len(found), f"a={a},b={b}", {"a": a, "b": b}, ("--a", str(a), "--b", str(b)), 8 * nodes(a, b), nodes(a, b),
            4096, (1 + a + b) * GIB if memory else None,
        ))  # fmt: skip
    return found


def truth(candidate: Candidate) -> Result:
    """One best, a = 2 and b = 1; a = 3 with b = 2 crashes."""
    a, b = candidate.values["a"], candidate.values["b"]
    assert isinstance(a, int) and isinstance(b, int)
    if (a, b) == (3, 2):
        return Result(FAILED, "crash", "exit code 1")
    return figures(candidate, 1 + (a - 2) ** 2 + 0.3 * (b - 1) ** 2)


class Climber:
    """Proposes an open neighbour of the best seen, or a random one: depends on everything that it may depend on."""

    name = "climber"

    def propose(self, history: History, count: int) -> Proposal | None:
        open_ = history.open()
        if not open_:
            return None
        chance = random.Random(f"{count} {sorted(history.pending)} {list(history.seen.items())}")
        known = {index: cost for index, cost in history.seen.items() if cost is not None}
        if known and chance.random() < 0.7:
            best = history.candidates[min(known, key=lambda index: known[index])]
            open_.sort(key=lambda i: sum(abs(_number(best, p.name) - _number(history.candidates[i], p.name))
                                         for p in history.parameters))  # fmt: skip
            return Proposal(open_[0], self.name)
        return Proposal(chance.choice(open_), "chance")


def _number(candidate: Candidate, name: str) -> int:
    value = candidate.values[name]
    assert isinstance(value, int)
    return value


def search(
    folder: Path, runner: Made, optimizer: Optimizer | None = None, candidates: list[Candidate] | None = None,
    show: Quiet | None = None, who: dict[str, Any] = WHO, pause: Callable[[], object] | None = None,
    left_s: Callable[[], float | None] = lambda: None, objective: str = "tokens_per_s", **plan: Any,
) -> tuple[Ending, list[Trial]]:  # fmt: skip
    folder.mkdir(exist_ok=True)
    journal = Journal.open(folder, who, {})
    what = Plan(candidates or made(), PARAMETERS, objective, **plan)
    session = Session(what, optimizer or Climber(), runner, journal, show or Quiet(), left_s=left_s,
                      pause=pause or runner.tick)  # fmt: skip
    try:
        return session.run(), journal.trials
    finally:
        journal.close("test")


def told(trials: list[Trial]) -> list[tuple[int, str, str, Result | None]]:
    return [(t.number, t.candidate.key, t.by, t.result) for t in trials]


def named(ending: Ending) -> tuple[Trial, ...]:
    return () if ending.best is None else ending.best.trials


pytestmark = pytest.mark.usefixtures("no_waiting_for_disks")


@pytest.mark.parametrize("optimizer", [ExhaustiveSearch(), RandomSearch(3), Climber()])
@pytest.mark.parametrize("objective", ["tokens_per_s", "node_hours"])
def test_every_candidate_once_and_the_best_is_the_best(tmp_path: Path, optimizer: Optimizer, objective: str) -> None:
    candidates = made(lambda a, b: 4 if a == 2 else 1)
    ending, trials = search(tmp_path, Made(truth, ("n1", "n2", "n3", "n4")), optimizer, candidates, objective=objective)
    assert ending.why == EXHAUSTED and ending.ended == len(candidates) == len(trials)
    assert Counter(t.candidate.key for t in trials) == Counter(c.key for c in candidates)
    costs = {c.key: seconds_cost(step, c, objective) for c in candidates if (step := truth(c).step_s) is not None}
    assert ending.best is not None and ending.best.candidate.key == min(costs, key=lambda key: costs[key])
    assert (ending.best.candidate.key == "a=2,b=1") == (objective == "tokens_per_s")  # four nodes: fast, and dear


def test_killed_after_any_record_and_started_again_it_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    _, undisturbed = search(tmp_path / "whole", Made(truth))
    lines = (tmp_path / "whole" / NAME).read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 3 * 12 + 1
    for cut in range(1, len(lines)):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / NAME).write_bytes(b"".join(lines[:cut]) + lines[cut][: len(lines[cut]) // 2])
        noted = sum(b'"event":"ended"' in line for line in lines[:cut])
        runner = Made(truth)
        ending, trials = search(folder, runner)
        assert told(trials) == told(undisturbed), f"cut at {cut}"
        assert ending.ended == 12 - noted == sum(what == "start" for what, _ in runner.log), "nothing is run again"


def test_what_was_complete_though_nobody_noted_it_counts(tmp_path: Path) -> None:
    search(tmp_path, Made(truth), max_trials=3)
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    third = max(i for i, line in enumerate(lines) if b'"event":"ended"' in line)
    (tmp_path / NAME).write_bytes(b"".join(lines[:third]))
    runner = Made(truth, recovered={3: figures(made()[0], 0.125)})
    ending, trials = search(tmp_path, runner, max_trials=3)
    assert runner.log == [] and ending.ended == 1 and ending.why == BUDGET
    assert trials[2].result is not None and trials[2].result.step_s == 0.125 and named(ending) == (trials[2],)
    # One that was proposed and never started has no files to ask.
    (tmp_path / NAME).write_bytes(b"".join(lines[: third - 1]))
    runner = Made(truth, recovered={3: figures(made()[0], 0.125)})
    search(tmp_path, runner, max_trials=3)
    assert runner.log == [("start", 3), ("end", 3)]


def test_side_by_side_on_nodes_of_their_own_and_a_large_one_is_not_passed_by(tmp_path: Path) -> None:
    hosts = [f"n{i}" for i in range(5)]
    candidates = made(lambda a, b: 4 if (a, b) == (1, 1) else 1 + b)
    runner = Made(truth, hosts, turns=4)
    busy, at_once = set[str](), list[int]()

    def tick() -> None:
        taken = [host for trial in runner.running for host in trial.hosts]
        assert len(taken) == len(set(taken)), "two trials on one node"
        assert all(len(trial.hosts) == trial.candidate.nodes for trial in runner.running)
        busy.update(taken)
        at_once.append(len(runner.running))
        runner.tick()

    ending, trials = search(tmp_path, runner, ExhaustiveSearch(), candidates, pause=tick)
    assert busy == set(hosts) and max(at_once) > 1 and ending.ended == 12
    starts = [number for what, number in runner.log if what == "start"]
    assert starts == sorted(starts), "in the order of the proposals"
    assert next(t.number for t in trials if t.candidate.nodes == 4) == 5
    # Not even Slurm could: more nodes than there are.
    with pytest.raises(ConfigError, match="4 node"):
        search(tmp_path / "few", Made(truth, hosts[:2]), ExhaustiveSearch(),
               [dataclasses.replace(candidates[4], index=0)])  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_in_order_and_the_trial_is_run_again_under_its_number(
    tmp_path: Path, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    if number == signal.SIGHUP:  # these tests may run under nohup, which a search respects
        handler = signal.signal(number, signal.SIG_DFL)
        request.addfinalizer(lambda: signal.signal(number, handler))
    runner, before = Made(truth), signal.getsignal(number)

    def tick() -> None:
        if runner.log[-1] == ("start", 4):
            os.kill(os.getpid(), number)

    ending, trials = search(tmp_path, runner, pause=tick)
    assert (ending.why, ending.signal, ending.ended) == (SIGNAL, number.name, 3)
    assert runner.stops == [f"interrupted: {number.name}"] and signal.getsignal(number) == before
    assert trials[3].result is None and trials[3].ended is not None
    again = Made(truth)
    ending, trials = search(tmp_path, again)
    assert again.log[0] == ("start", 4) and ending.ended == 9
    _, undisturbed = search(tmp_path / "other", Made(truth))
    assert told(trials) == told(undisturbed)


@pytest.mark.parametrize(("kind", "counts"), [("crash", 0), ("lost rank", 0), (OUT_OF_MEMORY, 1), ("refused", 1)])
def test_what_breaks_off_as_a_signal_comes_is_run_again(tmp_path: Path, kind: str, counts: int) -> None:
    """At its end a batch system signals all processes, trials and tuner alike."""
    runner = Made(lambda c: Result(FAILED, kind, "ended by signal 15"), turns=1)
    ending, trials = search(tmp_path, runner, pause=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert (ending.why, ending.ended, len(trials)) == (SIGNAL, counts, 1)
    assert (trials[0].result is not None) is bool(counts)


def test_nothing_starts_that_would_not_end_in_time(tmp_path: Path) -> None:
    runner = Made(truth, turns=10)
    started: list[float] = []

    def left_s() -> float:
        return 1035.5 - runner.now

    ending, trials = search(tmp_path, runner, left_s=left_s)
    started = [t.started for t in trials if t.started is not None]
    assert ending.why == TIME and ending.ended == len(trials) == 3
    took = trials[0].ended - trials[0].started if trials[0].ended and trials[0].started else 0.0
    assert took == pytest.approx(10, abs=1) and max(started) + took <= 1035.5 and runner.stops == []
    # With the last layout, nothing is left, however little time is.
    last = Made(truth, turns=10)
    ending, trials = search(tmp_path / "last", last, candidates=made()[:3], left_s=lambda: 1035.5 - last.now)
    assert ending.why == EXHAUSTED and len(trials) == 3
    # A trial that takes longer than the others is stopped at the end, and run again by the next start.
    slow = Made(truth, turns=200)
    ending, trials = search(tmp_path, slow, left_s=lambda: 1035.5 - slow.now)
    assert ending.why == TIME and ending.ended == 0 and slow.stops == [TIME] and len(trials) == 4


def test_out_of_memory_rules_out_what_needs_no_less(tmp_path: Path) -> None:
    def small(candidate: Candidate) -> Result:
        assert candidate.memory_bytes is not None
        if candidate.memory_bytes > 4 * GIB:
            return Result(FAILED, OUT_OF_MEMORY, "too much")
        return truth(candidate)

    ending, trials = search(tmp_path, Made(small), RandomSearch(0), made(memory=True))
    tried = {t.candidate.key for t in trials}
    least = min(t.candidate.memory_bytes or 0 for t in trials if t.result and t.result.kind == OUT_OF_MEMORY)
    assert ending.why == EXHAUSTED and least > 4 * GIB and ending.ruled_out == 12 - len(trials) > 0
    assert all(c.key in tried for c in made(memory=True) if (c.memory_bytes or 0) <= 4 * GIB)
    assert sum(t.result is not None and t.result.status == FAILED for t in trials) < 5, "not each of those too big"


def test_ruling_out_against_its_definition() -> None:
    chance = random.Random(7)
    for _ in range(200):
        candidates = [
            dataclasses.replace(c, memory_bytes=chance.choice([None, *range(1, 6)]), processes=chance.choice([2, 4]))
            for c in made()
        ]
        ended = []
        for number, candidate in enumerate(chance.sample(candidates, 5), 1):
            result = chance.choice([Result(FAILED, OUT_OF_MEMORY), Result(FAILED, "hang"), Result(DONE, step_s=1.0),
                                    Result(INVALID, step_s=1.0)])  # fmt: skip
            ended.append(Trial(number, candidate, "x", "f", result=result))

        def no_less(a: Candidate, b: Candidate) -> bool:
            return (None not in (a.memory_bytes, b.memory_bytes) and (a.memory_bytes or 0) >= (b.memory_bytes or 0)
                    and a.processes >= b.processes)  # fmt: skip

        fitted = [t.candidate for t in ended if t.result and t.result.status in (DONE, INVALID)]
        failed = [t.candidate for t in ended if t.result and t.result.kind == OUT_OF_MEMORY]
        valid = [f for f in failed if not any(no_less(fits, f) for fits in fitted)]
        expected = {c.index for c in candidates if any(no_less(c, f) for f in valid)}
        assert ruled_out(candidates, ended) == expected


def test_what_is_to_run_again_is_not_taken_from_its_old_files(tmp_path: Path) -> None:
    """Killed between the note that an invalid trial runs again and its start: the metrics file is still the old one."""
    old = dataclasses.replace(figures(made()[0], 9.0), status=INVALID)
    search(tmp_path, Made(lambda c: old), ExhaustiveSearch(), max_trials=1)
    journal = Journal.open(tmp_path, WHO, {})
    journal.retried(journal.trials[0])
    journal.close("killed")
    runner = Made(lambda c: figures(c, 0.5), recovered={1: old})
    _, trials = search(tmp_path, runner, max_trials=1, retry_failed=True)
    assert runner.log == [("start", 1), ("end", 1)] and trials[0].valid


def test_a_smaller_budget_holds_for_what_was_interrupted_and_what_is_none_here_takes_none(tmp_path: Path) -> None:
    runner = Made(truth)

    def stop_in_the_third() -> None:
        if len(runner.log) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    search(tmp_path, runner, pause=stop_in_the_third)
    less = Made(truth)
    ending, trials = search(tmp_path, less, max_trials=2)
    assert (ending.why, ending.ended, less.log) == (BUDGET, 0, []) and trials[2].result is None
    left = [c for c in made() if c.key != trials[2].candidate.key]  # it does not fit on fewer nodes
    elsewhere = [dataclasses.replace(c, index=i) for i, c in enumerate(left)]
    ending, trials = search(tmp_path, Made(truth), candidates=elsewhere, max_trials=4)
    assert (ending.why, ending.ended) == (BUDGET, 2) and [t.number for t in trials if t.result] == [1, 2, 4, 5]


def test_failed_trials_for_which_a_smaller_budget_has_no_room_keep_their_results(tmp_path: Path) -> None:
    """Noted to run again and then not run, they would be trials without an end."""
    crash = Result(FAILED, "crash", "exit code 1")
    search(tmp_path, Made(lambda c: crash if c.index in (1, 3) else truth(c)), ExhaustiveSearch(), max_trials=5)
    journal, show = (tmp_path / NAME).read_text(), Quiet()
    runner = Made(truth)
    ending, trials = search(tmp_path, runner, max_trials=4, retry_failed=True, show=show)
    assert (ending.why, ending.ended, runner.log) == (BUDGET, 0, [])
    assert [t.number for t in trials if t.result == crash] == [2, 4]
    assert '"retried"' not in (tmp_path / NAME).read_text()[len(journal) :]
    assert any("--max-trials is 4" in line for line in show.lines)
    ending, trials = search(tmp_path, runner, max_trials=5, retry_failed=True)
    assert ending.ended == 2 and all(t.valid for t in trials)


def test_what_proposals_are_told(tmp_path: Path) -> None:
    seen: list[tuple[History, int]] = []

    class Spy(ExhaustiveSearch):
        def propose(self, history: History, count: int) -> Proposal | None:
            seen.append((history, count))
            return super().propose(history, count)

    prior = [float(12 - i) for i in range(12)]
    search(tmp_path, Made(truth, ("n1", "n2")), Spy(), prior=prior)
    assert [count for _, count in seen[:12]] == list(range(12))
    first, second, last = seen[0][0], seen[1][0], seen[-1][0]
    assert first.left_out == frozenset() and first.prior == prior and second.pending == {11} == second.left_out
    assert last.failures == {11: "crash"} and last.seen[11] is None and len(last.seen) == 12


def test_a_trial_that_is_another_one_here_is_an_error_and_one_that_is_none_here_stays(tmp_path: Path) -> None:
    search(tmp_path, Made(truth), ExhaustiveSearch(), max_trials=2)
    other = [dataclasses.replace(c, flags=("--a", "9")) if c.index == 1 else c for c in made()]
    with pytest.raises(ConfigError, match="trial 2, a=0,b=1"):
        search(tmp_path, Made(truth), candidates=other)
    larger = [dataclasses.replace(c, processes=16) for c in made()]
    with pytest.raises(ConfigError, match="trial 1, a=0,b=0.* 8 processes.* 16"):
        search(tmp_path, Made(truth), candidates=larger)
    fewer = [dataclasses.replace(c, index=i) for i, c in enumerate(made()[1:])]
    ending, trials = search(tmp_path, Made(truth), ExhaustiveSearch(), fewer)
    assert ending.ended == 10 and len(trials) == 12 and trials[0].candidate.key == "a=0,b=0"


def test_an_error_leaves_nothing_running(tmp_path: Path) -> None:
    class Broken(Made):
        def start(self, trial: Trial) -> Trial:
            if trial.number == 2:
                raise OSError("x")
            return super().start(trial)

    runner = Broken(truth, ("n1", "n2"))
    with pytest.raises(OSError, match="x"):
        search(tmp_path, runner)
    assert len(runner.stops) == 1 and not runner.running
    ending, _ = search(tmp_path, Made(truth))
    assert ending.ended == 12


def test_a_signal_that_comes_while_a_proposal_is_made_starts_nothing(tmp_path: Path) -> None:
    class Thinking(Climber):
        def propose(self, history: History, count: int) -> Proposal | None:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().propose(history, count)

    runner = Made(lambda candidate: figures(candidate, 1.0))
    ending, trials = search(tmp_path, runner, Thinking())
    assert ending.why == SIGNAL and len(trials) == 1 and not runner.log
