"""Chains of runs that are repeatedly killed with SIGKILL and resumed, until training is done.

A chain is one training: it is started, killed at a named point, started again with the same command
line, and so on. Each start thus resumes from the state after the last kill, and is the next victim.
At the end all losses from all starts are compared with those of an undisturbed run.

The kill points are listed, not random: they are those of tests/helpers/fault_points.py that a run
reaches while it loads, trains, saves and removes old checkpoints. A seed determines their order,
and the selection if not all are tried. The victims are all ranks at once, or a single rank, after
which the others have to exit by themselves.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults import history
from benchmarks.faults.job import LIMIT_S, FaultJob, JobOutcome, run_job, run_well, training
from tests.helpers.fault_points import record, strike, strike_at

SAVE_INTERVAL = 5
STEP = "megatron.run.step"
# --distributed-timeout-minutes, after which the others give up on a rank that never connected
OTHERS_LEAVE_S = 60.0


@dataclass(frozen=True)
class Chain:
    """A layout and the flags under which it saves."""

    name: str
    ranks: int
    flags: tuple[str, ...]

    @property
    def asynchronous(self) -> bool:
        return "--async-save" in self.flags


CHAINS = (
    Chain("1 process, fp32", 1, ("--keep-last", "2", "--keep-every", "20")),
    Chain("DP2, bf16, asynchronous", 2, ("--bf16", "--async-save", "--keep-last", "3")),
    Chain(
        "TP2, fp32, asynchronous",
        2,
        ("--tensor-model-parallel-size", "2", "--async-save", "--keep-last", "1"),
    ),
    Chain("PP2, bf16", 2, ("--pipeline-model-parallel-size", "2", "--bf16", "--keep-last", "2")),
)


@dataclass(frozen=True)
class Moment:
    """Kill point of a rank, and how often the rank reached it in the listing run."""

    rank: int
    name: str
    times: int


@dataclass
class Kill:
    """One kill and the next resumption.

    moment     where it happened
    victims    "all" or "one"
    reached    number of iterations done
    saved      last iteration with a reported checkpoint
    faults     problems
    resumed    iteration that the next start loaded; 0 for initial weights, None until a start has
               loaded
    """

    moment: str
    victims: str
    reached: int
    saved: int
    faults: list[str]
    resumed: int | None = None


@dataclass
class ChainOutcome:
    """Outcome of a chain.

    moments         number of kill points to choose from
    steps_compared  number of steps compared with the undisturbed run
    faults          problems other than those of single kills
    """

    chain: Chain
    moments: int = 0
    kills: list[Kill] = field(default_factory=list)
    steps_compared: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """All problems."""
        of_kills = [
            f"kill {n} ({kill.moment}): {fault}"
            for n, kill in enumerate(self.kills)
            for fault in kill.faults
        ]
        return of_kills + self.faults

    @property
    def lost(self) -> list[int]:
        """Steps that each kill cost."""
        return [kill.reached - kill.resumed for kill in self.kills if kill.resumed is not None]


def campaign(
    folder: Path, chance: random.Random, total: int, say: Callable[[str], None]
) -> Iterator[JobOutcome]:
    """Kill `total` times, equally often on each layout; 0: at every point of each."""
    share, rest = divmod(total, len(CHAINS))
    for number, chain in enumerate(CHAINS):
        count = share + (number < rest) if total else None
        if count == 0:
            continue
        outcome = _Running(chain, count, folder / str(number), chance, say).run()
        lost = outcome.lost or [0]
        notes = (
            f"lost {sum(lost) / len(lost):.1f} steps on average, {max(lost)} at most, a save "
            f"every {SAVE_INTERVAL}; {outcome.steps_compared} losses compared"
        )
        what = f"{len(outcome.kills)} kills at {outcome.moments} moments, {chain.name}"
        yield JobOutcome(what, notes, tuple(outcome.wrong))


def differences(
    save: Path, steps: Sequence[tuple[int, history.Step]], undisturbed: Path, last: int
) -> list[str]:
    """Return in what a run to step `last` differs from an undisturbed one; all `steps` count."""
    problems = []
    if different := history.differing(steps, dict(history.steps(undisturbed))):
        problems.append(f"losses of steps {different[:8]} are not those of the undisturbed run")
    if {iteration for iteration, _ in steps} != set(range(1, last + 1)):
        problems.append("steps are missing")
    names = history.tensors_that_differ(history.newest(save), history.newest(undisturbed))
    if names:
        problems.append(f"in the end {len(names)} tensors differ, e.g. {names[0]}")
    return problems


class _Running:
    """A training that is killed at `kills` points (None: all) and may then finish."""

    def __init__(
        self,
        chain: Chain,
        kills: int | None,
        folder: Path,
        chance: random.Random,
        say: Callable[[str], None],
    ) -> None:
        self.chain = chain
        self.folder = folder
        self.chance = chance
        self.say = say
        self.save = folder / "run"
        self.outcome = ChainOutcome(chain)
        self.last = 5 * SAVE_INTERVAL  # steps of the run that lists the points
        moments = self.listed()
        chance.shuffle(moments)
        self.outcome.moments = len(moments)
        self.moments = moments[:kills]
        # Four intervals for each kill, so that the training is not done before the last one.
        self.last = SAVE_INTERVAL * 4 * (len(self.moments) + 1)

    def arguments(self, save: Path, *more: str) -> list[str]:
        leave = ("--distributed-timeout-minutes", str(OTHERS_LEAVE_S / 60))
        return training(save, self.last, SAVE_INTERVAL, *self.chain.flags, *leave, *more)

    def listed(self) -> list[Moment]:
        """List the kill points of every rank in a run that resumes from a checkpoint."""
        listed = self.folder / "listed"
        log = self.folder / "moments"
        ranks = range(self.chain.ranks)
        listed.mkdir(parents=True)
        run_well(
            len(ranks),
            self.arguments(listed, "--exit-interval", str(SAVE_INTERVAL)),
            self.folder / "logs_first",
        )
        arms = {rank: [(record, str(listed), f"{log}.{rank}")] for rank in ranks}
        run_well(len(ranks), self.arguments(listed), self.folder / "logs_listed", arms)
        counts = {rank: Counter(Path(f"{log}.{rank}").read_text().splitlines()) for rank in ranks}
        return [
            Moment(rank, name, times)
            for rank in ranks
            for name, times in sorted(counts[rank].items())
        ]

    def run(self) -> ChainOutcome:
        undisturbed = self.folder / "whole"
        run_well(self.chain.ranks, self.arguments(undisturbed), self.folder / "logs_whole")
        for number, moment in enumerate(self.moments):
            self.one(number, moment)
        before = len(self.records())
        job = run_job(self.chain.ranks, self.arguments(self.save), self.folder / "logs_last")
        self._settle(before)
        if any(job.codes):
            self.outcome.faults.append(f"the last start failed: {job.tail()}")
            return self.outcome
        steps = history.steps(self.save)
        self.outcome.steps_compared = len(steps)
        self.outcome.faults += differences(self.save, steps, undisturbed, self.last)
        shutil.rmtree(self.folder)
        return self.outcome

    def records(self) -> list[dict[str, Any]]:
        """Return the records that all starts so far have written to the metrics file."""
        return history.records(self.save) if (self.save / "metrics.jsonl").exists() else []

    def one(self, number: int, moment: Moment) -> None:
        """Start, kill, and record the progress; the next start shows which steps were lost."""
        ranks = self.chain.ranks
        nth = self.chance.randint(1, min(moment.times, 3))
        everybody = ranks == 1 or self.chance.random() < 0.5
        before = len(self.records())
        # A start that does not reach the point is killed at a later step.
        arms = [
            (strike_at, str(self.save), nth, "kill", moment.name),
            (strike, STEP, 4 * SAVE_INTERVAL, "kill"),
        ]
        with FaultJob(
            ranks,
            self.arguments(self.save),
            self.folder / f"logs_{number}",
            arms={moment.rank: arms},
        ) as job:
            job.wait_for_end([moment.rank])
            if everybody:
                job.kill()
            codes = job.wait(OTHERS_LEAVE_S + LIMIT_S)
        other_codes = [
            code
            for rank, code in enumerate(codes)
            if rank != moment.rank and code != -signal.SIGKILL
        ]
        # 0: training was done before the kill; 2: a lost peer; 75: the hang detector's.
        faults = [
            f"another rank ended with exit code {code}"
            for code in other_codes
            if code not in (0, 2, 75)
        ]
        if codes[moment.rank] not in (0, -signal.SIGKILL):
            faults.append(f"the victim ended with exit code {codes[moment.rank]}")
        loaded = self._settle(before)
        last = self.outcome.kills[-1] if self.outcome.kills else None
        # A start that was killed before it loaded anything has not changed anything.
        reached, saved = (last.reached, last.saved) if last else (0, 0)
        if loaded is not None:
            reached = saved = loaded
        made = self.records()[before:]
        kill = Kill(
            f"rank {moment.rank}, {moment.name}, {nth}",
            "all" if everybody else "one",
            max([r["iteration"] for r in made if r["event"] == "iteration"], default=reached),
            max([r["iteration"] for r in made if r["event"] == "checkpoint"], default=saved),
            faults,
        )
        self.outcome.kills.append(kill)
        self.say(
            f"{self.chain.name}: kill {number + 1} of {kill.victims}, {kill.moment}; "
            f"{kill.reached} steps done"
        )

    def _settle(self, before: int) -> int | None:
        """Record from which iteration a start resumed, and return it.

        The records from `before` on are those of this start. The iteration is recorded for all
        kills since the last start that loaded. If this start was killed before it loaded, None is
        returned, and a later start will record the iteration for these kills.
        """
        starts: list[int] = [
            record["iteration"] for record in self.records()[before:] if record["event"] == "start"
        ]
        if not starts:
            return None
        resumed = starts[0]
        # An asynchronous save may take at most one interval: the next save waits for it.
        most = SAVE_INTERVAL * (2 if self.chain.asynchronous else 1)
        for kill in self.outcome.kills:
            if kill.resumed is not None:
                continue
            kill.resumed = resumed
            if resumed < kill.saved:
                kill.faults.append(f"resumed from {resumed} although {kill.saved} was saved")
            if kill.reached - resumed > most:
                kill.faults.append(f"lost {kill.reached - resumed} steps, more than {most}")
        return resumed
