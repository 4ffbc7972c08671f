"""A search: proposals become trials, trials become results, results become better proposals, until the budget is used.

Trials run side by side where there is room. What happens is in the journal before it is acted upon; a search that was
killed goes on from there. When the search has ended, the layouts that may be the best are measured again.
"""
from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.errors import ConfigError
from megatron.tuning import confirming
from megatron.tuning.journal import Journal
from megatron.tuning.layouts import Layout, best_layout, layouts_of
from megatron.tuning.ruling_out import ruled_out
from megatron.tuning.search.optimizer import Optimizer
from megatron.tuning.types import CONFIRM, CRASH, DONE, LOST_RANK, Candidate, History, Parameter, Trial, cost_of

EXHAUSTED, BUDGET, TIME, SIGNAL, ALLOCATION, NODES = (
    "nothing is left to try", "the trials are used up", "time is up", "interrupted", "the allocation ends",
    "too few nodes are left",
)  # fmt: skip
"""Why a session ends."""

POLL_S = 0.2
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Runner(Protocol):
    """Runs trials as processes; none of its methods waits for a trial, except stop_all."""

    @property
    def running(self) -> Sequence[Trial]: ...

    def can_start(self, candidate: Candidate) -> bool:
        """Whether there is room for it now."""

    def can_ever_start(self, candidate: Candidate) -> bool:
        """False: so many nodes have been left out in this start that there will be no room for it."""

    def start(self, trial: Trial) -> Trial:
        """The trial, with its hosts and when it started."""

    def poll(self) -> list[Trial]:
        """Those that ended since the last call, with their results; without one where it was the allocation that ended
        them."""

    def lost_by(self, trial: Trial) -> str | None:
        """Of a trial that `poll` has just returned without a result: the dead node that ended it, so that it is to run
        again in this start on others; None: its allocation ended."""

    def stop_all(self, why: str) -> list[Trial]:
        """Stop what runs and wait for its end; returns those trials, with a result where they had all their steps."""

    def recover(self, trial: Trial) -> Trial | None:
        """A trial of an earlier start with its result, where its metrics file tells of all its steps."""


class Show(Protocol):
    """Tells people what happens."""

    def note(self, text: str) -> None: ...

    def started(self, trial: Trial) -> None: ...

    def ended(self, trial: Trial, layout: Layout, best: Layout | None, before: Layout | None) -> None:
        """`layout`: the trial's, with all its trials; `best`: of all trials, `before`: before this one."""

    def update(self, view: View) -> None:
        """Called at every turn."""


@dataclass(frozen=True)
class Plan:
    """What is searched, and how far.

    max_trials  of the whole search, whatever number of starts it takes; None: until nothing is left
    prior       log(cost) by the planner, for each candidate; None: search without it
    confirm     most trials after the search that measure leading layouts again
    """

    candidates: Sequence[Candidate]
    parameters: Sequence[Parameter]
    objective: str
    max_trials: int | None = None
    prior: Sequence[float] | None = None
    retry_failed: bool = False
    confirm: int = 0


@dataclass(frozen=True)
class View:
    """A moment of a session. planned: most trials in all, so far as is known; left_s: of its time."""

    trials: Sequence[Trial]
    running: Sequence[Trial]
    best: Layout | None
    planned: int
    ruled_out: int
    left_s: float | None


@dataclass(frozen=True)
class Ending:
    """How a session ended.

    ended      trials that did since it began
    signal     its name, of an interrupted session
    ruled_out  layouts that were not tried because others ran out of memory
    """

    why: str
    ended: int
    best: Layout | None
    signal: str = ""
    ruled_out: int = 0


class Session:
    """One start of a search.

    left_s  seconds that are left for trials; None: as long as it takes
    pause   called between two looks at the trials
    """

    def __init__(
        self, plan: Plan, optimizer: Optimizer, runner: Runner, journal: Journal, show: Show, *,
        left_s: Callable[[], float | None] = lambda: None, pause: Callable[[], object] = lambda: time.sleep(POLL_S),
    ) -> None:  # fmt: skip
        if not plan.candidates:
            raise ConfigError("nothing can be tried: no layout of the space is valid and fits (--dry-run says why)")
        self._plan, self._optimizer, self._runner, self._journal, self._show = plan, optimizer, runner, journal, show
        self._left_s, self._pause = left_s, pause
        self._by_key = {candidate.key: candidate for candidate in plan.candidates}
        self._smallest = min(plan.candidates, key=lambda candidate: (candidate.nodes, candidate.processes))
        self._waiting = list[Trial]()
        self._set_aside = list[Trial]()  # of this start: there are too few nodes left for them
        self._out_by: tuple[tuple[int, ...], frozenset[int]] = (), frozenset()
        self._ended = 0
        self._signal = ""

    def run(self) -> Ending:
        """Go on until nothing is left, the budget is used, or a signal comes.

        Raises ConfigError where the journal has trials that are others in this space.
        """
        self._check_journal()
        why = "the tuner failed"
        with self._signals():
            try:
                self._go_on()
                why = self._loop()
            finally:
                self._interrupt(f"{why}: {self._signal}" if self._signal else why)
        return Ending(why, self._ended, self._best(), self._signal, len(self._not_tried()))

    # -- what was before -----------------------------------------------------------------------------------------------

    def _check_journal(self) -> None:
        for trial in self._journal.trials:
            now = self._by_key.get(trial.candidate.key)
            if now is not None and (now.flags, now.processes) != (trial.candidate.flags, trial.candidate.processes):
                raise ConfigError(
                    f"{self._journal.path}: trial {trial.number}, {trial.candidate.key}, ran "
                    f"{_difference(trial, now)}. Go on with the machine, the number of nodes and the version that it "
                    "began with, or give another --out"
                )

    def _go_on(self) -> None:
        """Count what is complete although nobody was there to note it; queue what was interrupted."""
        for trial in self._journal.trials:
            if trial.result is None:
                self._recover(trial)
        if self._plan.retry_failed:
            self._retry()

    def _recover(self, trial: Trial) -> None:
        found = None if trial.started is None else self._runner.recover(trial)
        if found is not None:
            self._end(found)
        elif self._listed(trial) is None:
            self._show.note(f"trial {trial.number}, {trial.candidate.key}, is not run again: it does not fit here")
        elif self._confirms_too_much(trial):
            self._show.note(f"trial {trial.number}, {trial.candidate.key}, is not run again: it was to confirm what "
                            f"was found, and now --confirm is {self._plan.confirm}")  # fmt: skip
        else:
            self._queue(trial)

    def _retry(self) -> None:
        """Queue what gave no figures, as far as --max-trials and --confirm have room for it: the result of a trial
        that is not run again stays."""
        ended = [trial for trial in self._journal.trials if trial.result is not None]
        tried, most = sum(not trial.confirms for trial in ended), self._plan.max_trials
        over = most is not None and tried > most
        if over:
            self._show.note(f"--retry-failed: no trial of the search is run again: {tried} have ended, and "
                            f"--max-trials is {most}")  # fmt: skip
        for trial in ended:
            assert trial.result is not None, "ended"
            left_out = self._confirms_too_much(trial) if trial.confirms else over
            if trial.result.status != DONE and self._listed(trial) is not None and not left_out:
                self._journal.retried(trial)
                self._queue(trial)

    def _confirms_too_much(self, trial: Trial) -> bool:
        """Whether a trial is one of those that confirm, and more than are wanted now."""
        return confirming.places(self._journal.trials).get(trial.number, 0) > self._plan.confirm

    def _queue(self, trial: Trial) -> None:
        candidate = self._by_key[trial.candidate.key]
        self._waiting.append(dataclasses.replace(trial, candidate=candidate, started=None, ended=None, result=None))

    def _listed(self, trial: Trial) -> Candidate | None:
        """A trial's candidate in this space; None where it is not one here, such as with fewer nodes."""
        return self._by_key.get(trial.candidate.key)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _loop(self) -> str:
        while True:
            over = self._take_ended()
            if self._signal:
                return SIGNAL
            if over:
                return ALLOCATION
            left_s = self._left_s()
            if self._signal:
                return SIGNAL
            nothing_more = self._start_what_fits(left_s)
            if nothing_more is not None and (not self._runner.running or (left_s is not None and left_s <= 0)):
                return nothing_more if not self._runner.running else TIME
            self._show.update(self._view(left_s))
            self._pause()

    def _take_ended(self) -> bool:
        """Note what has ended, and run again what dead nodes ended; returns whether it was the allocation instead."""
        over = False
        for trial in self._runner.poll():
            node = self._runner.lost_by(trial)
            if self._took(trial, node or ALLOCATION):
                continue
            if node is None:
                over = True
            elif not self._signal:
                self._waiting.insert(0, dataclasses.replace(trial, hosts=(), started=None, ended=None, result=None))
        return over

    def _start_what_fits(self, left_s: float | None) -> str | None:
        """Start trials as long as there is room; returns why no other one will be started, if that is so."""
        while not self._signal:
            over = self._over()
            self._put_aside()
            if over is not None and not self._waiting and self._to_confirm() is None:
                return self._why_no_more(over)
            if not self._waiting and not self._runner.can_ever_start(self._smallest):
                return self._why_no_more(over)
            if not self._waiting and not self._has_room(self._smallest):
                return None if self._has_time(left_s) else TIME
            if not self._has_time(left_s):
                return TIME if self._is_more_to_do(over) else self._why_no_more(over)
            if not self._waiting and not (over is None and self._propose()) and not self._confirm():
                # What runs may fit and so bring back what was ruled out.
                return self._why_no_more(over)
            # The first in the queue is not overtaken by smaller ones, which would keep it waiting for ever.
            trial = self._waiting[0]
            if self._signal:  # it came while the search was thinking
                return None
            if not self._has_room(trial.candidate):
                return None
            del self._waiting[0]
            started = self._runner.start(trial)
            self._journal.started(started)
            self._show.started(started)
        return None

    def _over(self) -> str | None:
        """BUDGET where the search may try no more; what still waits is none of its trials then."""
        searched = [t for t in (*self._journal.ended, *self._runner.running) if not t.confirms]
        if self._plan.max_trials is None or len(searched) < self._plan.max_trials:
            return None
        self._waiting = [trial for trial in self._waiting if trial.confirms]
        return BUDGET

    def _put_aside(self) -> None:
        """What waits for more nodes than are left is for the next start, and keeps nothing else waiting."""
        aside = [trial for trial in self._waiting if not self._runner.can_ever_start(trial.candidate)]
        if aside:
            self._waiting = [trial for trial in self._waiting if trial not in aside]
            self._set_aside += aside

    def _why_no_more(self, over: str | None) -> str:
        """With what a session ends that starts no more. Where the search is over, only what was to confirm is missing
        for want of nodes."""
        turn = self._in_turn()
        unconfirmed = any(trial.confirms for trial in self._set_aside) or (turn and self._to_confirm(turn) is None)
        if unconfirmed or (over is None and self._lacks_nodes()):
            return NODES
        return over or EXHAUSTED

    def _lacks_nodes(self) -> bool:
        """Whether the search has layouts left for which there are too few nodes now."""
        return any(not trial.confirms for trial in self._set_aside) or bool(self._too_large() - self._settled())

    def _too_large(self) -> frozenset[int]:
        """Candidates for which there are too few nodes since some were left out."""
        return frozenset(c.index for c in self._plan.candidates if not self._runner.can_ever_start(c))

    def _settled(self) -> frozenset[int]:
        """Candidates that need no trial of the search: tried or ruled out."""
        tried = (self._listed(trial) for trial in self._journal.ended)
        return self._ruled_out().union(c.index for c in tried if c is not None)

    def _is_more_to_do(self, over: str | None) -> bool:
        """Whether another start would have something to run."""
        if self._waiting or self._runner.running or self._to_confirm() is not None:
            return True
        return over is None and bool(self.history().open())

    def _has_room(self, candidate: Candidate) -> bool:
        """Raises ConfigError for what will never have room."""
        room = self._runner.can_start(candidate)
        if not room and not self._runner.running:
            raise ConfigError(f"{candidate.key}: there is no room for its {candidate.nodes} node(s) of processes: give "
                              "more nodes, or another --out")  # fmt: skip
        return room

    def _propose(self) -> bool:
        count = sum(not trial.confirms for trial in self._journal.trials)
        proposal = self._optimizer.propose(self.history(), count)
        if proposal is None:
            return False
        self._append(self._plan.candidates[proposal.index], proposal.by)
        return True

    def _append(self, candidate: Candidate, by: str) -> None:
        """A new trial to the queue."""
        number = len(self._journal.trials) + 1
        trial = Trial(number, candidate, by, f"trials/{number:04}")
        self._journal.proposed(trial)
        self._waiting.append(trial)

    def _confirm(self) -> bool:
        """Put a layout into the queue that is to be measured again; returns whether there is one."""
        ended = self._over() is not None or not self._lacks_nodes()
        key = self._to_confirm() if ended else None
        if key is None:
            return False
        self._append(self._by_key[key], CONFIRM)
        return True

    def _to_confirm(self, turn: Sequence[str] | None = None) -> str | None:
        """The key of a layout that can be measured again now, of those in turn."""
        turn = self._in_turn() if turn is None else turn
        return next((key for key in turn if self._runner.can_ever_start(self._by_key[key])), None)

    def _in_turn(self) -> list[str]:
        """Keys of layouts to be measured again, once no trial of the search runs; by turns, so that each choice knows
        what it may. Where nodes died the first ones may have too few: their turn stays theirs, for others measured more
        often instead would be named on better evidence."""
        trials = self._journal.trials
        if any(not trial.confirms for trial in self._runner.running) or confirming.made(trials) >= self._plan.confirm:
            return []
        return confirming.in_turn(trials, self._plan.objective, self._by_key)

    def _end(self, trial: Trial) -> None:
        before = self._best()
        self._journal.finished(trial)
        self._ended += 1
        (layout,) = (one for one in layouts_of(self._journal.trials) if one.candidate.key == trial.candidate.key)
        self._show.ended(trial, layout, self._best(), before)

    def _interrupt(self, why: str) -> None:
        """What has ended meanwhile counts; what has not is run again by the next start."""
        found = [*self._runner.poll(), *self._runner.stop_all(why)]
        for trial in found:
            self._took(trial, why)

    def _took(self, trial: Trial, why: str) -> bool:
        """Note a trial that has ended; returns whether it did so with a result, and is not to be run again.

        Who signals the tuner may signal its trials too: one that breaks off then says nothing of its layout.
        """
        result = trial.result
        if result is None or (self._signal and result.kind in (CRASH, LOST_RANK)):
            self._journal.interrupted(trial, why)
            return False
        self._end(trial)
        return True

    def _has_time(self, left_s: float | None) -> bool:
        """Whether a trial that begins now is likely to end in time; the first ones are begun in any case."""
        if left_s is None:
            return True
        took = [t.ended - t.started for t in self._journal.ended if t.valid and t.ended and t.started]
        return left_s > (statistics.median(took) if took else 0.0)

    # -- what is known -------------------------------------------------------------------------------------------------

    def history(self) -> History:
        """All that the next proposal depends on."""
        seen, failures = dict[int, float | None](), dict[int, str]()
        for layout in layouts_of(self._journal.ended):
            candidate = self._by_key.get(layout.candidate.key)
            if candidate is None:
                continue
            cost = cost_of(layout, self._plan.objective)
            seen[candidate.index] = None if cost is None else math.log(cost)
            if cost is None:
                failures[candidate.index] = layout.result.kind or layout.result.status
        # Of a layout that is measured again something is known already.
        pending = frozenset(t.candidate.index for t in (*self._runner.running, *self._waiting) if not t.confirms)
        left_out = pending.union(seen, self._ruled_out(), self._too_large())
        return History(self._plan.candidates, self._plan.parameters, seen, failures, left_out, pending,
                       self._plan.prior)  # fmt: skip

    def _ruled_out(self) -> frozenset[int]:
        ended = tuple(trial.number for trial in self._journal.ended)
        if self._out_by[0] != ended:
            self._out_by = ended, ruled_out(self._plan.candidates, self._journal.ended)
        return self._out_by[1]

    def _not_tried(self) -> frozenset[int]:
        """Candidates that are ruled out, without those that were tried before that was known."""
        return self._ruled_out() - {c.index for t in self._journal.trials if (c := self._listed(t)) is not None}

    def _best(self) -> Layout | None:
        return best_layout(self._journal.trials, self._plan.objective)

    def _view(self, left_s: float | None) -> View:
        out = self._not_tried()
        planned = len(self._plan.candidates) - len(out)
        if self._plan.max_trials is not None:
            planned = min(planned, self._plan.max_trials)
        trials = self._journal.trials
        planned += sum(t.confirms for t in trials) + max(0, self._plan.confirm - confirming.made(trials))
        return View(trials, tuple(self._runner.running), self._best(), planned, len(out), left_s)

    # -- signals -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """A signal ends the session in order; SIGHUP, which a terminal sends when it closes, not under nohup."""
        taken = [n for n in _SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        handlers = {number: signal.signal(number, self._on_signal) for number in taken}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signal = signal.Signals(number).name


def _difference(trial: Trial, now: Candidate) -> str:
    """In words, between a candidate then and now."""
    if trial.candidate.processes != now.processes:
        return f"on {trial.candidate.processes} processes, now it would be on {now.processes}"
    then, here = set(trial.candidate.flags), set(now.flags)
    lost, more = " ".join(sorted(then - here)), " ".join(sorted(here - then))
    return f"with flags {lost or '(none)'} where now there are {more or '(none)'}"


def time_of(walltime_s: float | None, allocation_s: Callable[[], float | None], *, reserve_s: float,
            look_s: float = 30.0, clock: Callable[[], float] = time.monotonic,
            ) -> Callable[[], float | None]:  # fmt: skip
    """Seconds left for trials: of `walltime_s` from now on, and of the allocation less a reserve for the end.

    The allocation is asked every `look_s` seconds: its answer costs the scheduler something. Where it has none (None),
    the one before holds.
    """
    end = None if walltime_s is None else clock() + walltime_s
    asked: float | None = None
    allocation_end: float | None = None

    def left_s() -> float | None:
        nonlocal asked, allocation_end
        if asked is None or clock() - asked > look_s:
            answer = allocation_s()
            asked = clock()
            if answer is not None:
                allocation_end = asked + answer - reserve_s
        ends = [each for each in (end, allocation_end) if each is not None]
        return min(ends) - clock() if ends else None

    return left_s
