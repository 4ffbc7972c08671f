"""Runs that are killed again and again with SIGKILL, and go on each time, until their training is done.

A chain is one training: it is started, killed at a random moment, started anew with the same command line, and so on.
So each start both resumes from what the last kill left and is the next victim. In the end every loss that any of the
incarnations wrote is compared with those of a run that nobody disturbed.

Moments, in turn: at a random time after a random step; at a random time from the start of the processes on; before a
random file operation in the folder of the checkpoints (faulty_rank.py), which falls into saves, loads and retention;
and before or after a rename. Victims: all ranks at once, or one, after which the others have to end by themselves.
"""
from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults import history
from benchmarks.faults.job import FAULTY, MOCK, POLL_S, TINY, Job, run_job

SAVE_INTERVAL = 5
KINDS = ("step", "time", "file", "rename")
OVERDUE_S = 400.0
OTHERS_LEAVE_S = 20.0  # the others' --distributed-timeout-minutes, at least: after it they miss a rank that never came


_STEP = re.compile(r"(?m)^ iteration +(\d+)/")


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
    Chain("TP2, fp32, asynchronous", 2, ("--tensor-model-parallel-size", "2", "--async-save")),
    Chain("PP2, bf16", 2, ("--pipeline-model-parallel-size", "2", "--bf16", "--keep-last", "2")),
)


@dataclass
class Kill:
    """One kill: its kind, the victims, where the run was and where it was resumed from; what was wrong with it.

    moment     what the victim was about to do, or which step it was in
    reached    iterations that were done; `saved` is the last one whose checkpoint was said to be saved
    resumed    iteration that the next start loaded, 0 for initial weights, None until one has loaded
    """

    kind: str
    victims: str
    moment: str
    reached: int
    saved: int
    faults: list[str]
    resumed: int | None = None


@dataclass
class Outcome:
    """A chain from start to end."""

    chain: Chain
    kills: list[Kill] = field(default_factory=list)
    steps_compared: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """Everything that was not as it must be."""
        found = [f"kill {n} ({k.kind}, {k.moment}): {fault}" for n, k in enumerate(self.kills) for fault in k.faults]
        return found + self.faults

    @property
    def lost(self) -> list[int]:
        """Steps that each kill cost."""
        return [kill.reached - kill.resumed for kill in self.kills if kill.resumed is not None]

    def by_kind(self) -> Counter[str]:
        """How often each kind of moment hit each kind of victim."""
        return Counter(f"{kill.kind}/{kill.victims}" for kill in self.kills)


def run_chain(
    chain: Chain, kills: int, folder: Path, chance: random.Random, say: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Kill a training `kills` times, let it finish, compare it with an undisturbed one."""
    return _Running(chain, kills, folder, chance, say).run()


class _Running:
    """A chain on its way."""

    def __init__(
        self, chain: Chain, kills: int, folder: Path, chance: random.Random, say: Callable[[str], None]
    ) -> None:
        self.chain, self.kills, self.folder, self.chance, self.say = chain, kills, folder, chance, say
        self.save = folder / "run"
        # Three intervals for each kill, so that the training is not done before the last one.
        self.last = SAVE_INTERVAL * 3 * (kills + 1)
        self.outcome = Outcome(chain)
        self.files: list[int] = []  # operations on files in an interval, by rank
        self.renames: list[int] = []
        self.start_s = 0.0  # from the start to the first step
        self.leave_s = 600.0  # before it is known how long a start takes here

    def arguments(self, save: Path) -> list[str]:
        return [
            *TINY, *MOCK, *self.chain.flags, "--train-iters", str(self.last), "--save-interval", str(SAVE_INTERVAL),
            "--save", str(save), "--load", str(save), "--distributed-timeout-minutes", str(self.leave_s / 60),
        ]  # fmt: skip

    def run(self) -> Outcome:
        whole = self.folder / "whole"
        listing = self.folder / "moments.txt"
        env = {"FAULT_FOLDER": str(whole), "FAULT_LOG": str(listing)}
        with Job(self.chain.ranks, self.arguments(whole), self.folder / "logs_whole", env, FAULTY) as job:
            job.wait_for(_STEP.pattern)
            self.start_s = time.monotonic() - job.started
            if any(job.wait()):
                raise RuntimeError(f"the undisturbed run failed:\n{job.outputs()}")
        self.leave_s = max(OTHERS_LEAVE_S, 3 * self.start_s)
        saves = self.last // SAVE_INTERVAL
        for rank in range(self.chain.ranks):
            events = self._moments(listing, rank)
            self.files.append(max(1, len(events) // saves))
            self.renames.append(sum(event.startswith("os.rename ") for event in events) // saves)
        reference = dict(history.steps(whole))
        for number in range(self.kills):
            self.one(number)
        job = run_job(self.chain.ranks, self.arguments(self.save), self.folder / "logs_last")
        self._settle(job.outputs())
        if any(process.returncode for process in job.processes):
            self.outcome.faults.append(f"the last start failed: {job.tail()}")
            return self.outcome
        found = history.steps(self.save)
        self.outcome.steps_compared = len(found)
        different = history.differing(found, reference)
        if different:
            self.outcome.faults.append(f"losses of steps {different[:8]} are not those of the undisturbed run")
        if {iteration for iteration, _ in found} != set(range(1, self.last + 1)):
            self.outcome.faults.append("steps are missing")
        names = history.tensors_that_differ(history.newest(self.save), history.newest(whole))
        if names:
            self.outcome.faults.append(f"in the end {len(names)} tensors differ, e.g. {names[0]}")
        shutil.rmtree(self.folder)
        return self.outcome

    def one(self, number: int) -> None:
        """Start, kill, and note how far it had come. What it costs is known at the next start."""
        kind = KINDS[number % len(KINDS)]
        ranks = self.chain.ranks
        victim = self.chance.randrange(ranks)
        everybody = ranks == 1 or self.chance.random() < 0.5
        listing = self.folder / "moments.txt"
        env = self._environment(kind, victim, listing)
        logs = self.folder / f"logs_{number}"
        with Job(ranks, self.arguments(self.save), logs, env, FAULTY) as job:
            moment = self._strike(job, kind, victim, everybody)
            faults = self._leave(job, victim)
            output = job.outputs()
        self._settle(output)
        if kind in ("file", "rename"):
            moment = f"before {(self._moments(listing, victim) or ['its first file'])[-1]}"
        before = self.outcome.kills[-1] if self.outcome.kills else None
        loaded = _resumed(output)
        # One that was killed before it loaded anything left things as they were.
        reached, saved = (before.reached, before.saved) if before else (0, 0)
        if loaded is not None:
            reached = saved = loaded
        steps = [int(i) for i in _STEP.findall(output)]
        saves = [int(i) for i in re.findall(r"successfully saved checkpoint at iteration +(\d+)", output)]
        kill = Kill(
            kind, "all" if everybody else "one", moment, max(steps, default=reached), max(saves, default=saved), faults
        )
        self.outcome.kills.append(kill)
        self.say(f"{self.chain.name}: kill {number + 1} of {kill.victims}, {moment}; {kill.reached} steps done")

    @staticmethod
    def _moments(listing: Path, rank: int) -> list[str]:
        """What a rank did with files, in order."""
        place = listing.with_name(f"{listing.name}.{rank}")
        return place.read_text().splitlines() if place.exists() else []

    def _environment(self, kind: str, victim: int, listing: Path) -> dict[str, str]:
        for rank in range(self.chain.ranks):
            listing.with_name(f"{listing.name}.{rank}").unlink(missing_ok=True)
        env = {"FAULT_FOLDER": str(self.save), "FAULT_LOG": str(listing), "FAULT_RANK": str(victim)}
        if kind == "rename" and self.renames[victim]:
            env |= {"FAULT_EVENT": "os.rename", "FAULT_MOMENT": str(self.chance.randrange(3 * self.renames[victim]))}
        elif kind in ("file", "rename"):
            env["FAULT_MOMENT"] = str(self.chance.randrange(3 * self.files[victim]))
        return env

    def _strike(self, job: Job, kind: str, victim: int, everybody: bool) -> str:
        """Bring the kill about; what the run was doing."""
        seconds = self.chance.uniform(0, 1.5 * self.start_s) if kind == "time" else OVERDUE_S
        most = self.chance.randint(1, 3 * SAVE_INTERVAL) if kind == "step" else 4 * SAVE_INTERVAL
        while job.processes[victim].poll() is None and time.monotonic() - job.started < seconds:
            steps = [int(i) for i in _STEP.findall(job.output())]
            if steps and steps[-1] >= min(steps[0] + most, self.last):
                break
            time.sleep(POLL_S)
        if kind == "step":
            time.sleep(self.chance.uniform(0, 0.02))
        moment = f"{time.monotonic() - job.started:.2f} s after the start"
        job.kill(None if everybody else [victim])
        return moment

    def _leave(self, job: Job, victim: int) -> list[str]:
        """Wait for the others; what is wrong with how they ended."""
        codes = job.wait(self.leave_s + 400)
        others = [code for rank, code in enumerate(codes) if rank != victim and code != -signal.SIGKILL]
        # 0: training was done before the kill; 2: a lost peer; 75: the hang detector's.
        return [f"another rank ended with exit code {code}" for code in others if code not in (0, 2, 75)]

    def _settle(self, output: str) -> None:
        """Enter where the start that wrote `output` resumed from, into the kills since the last one that did."""
        resumed = _resumed(output)
        if resumed is None and not re.search(r"(?m)^ iteration +\d+/|no checkpoint in", output):
            return  # killed before it loaded anything: the next start tells
        resumed = resumed or 0
        # An asynchronous save may be on its way for at most one interval: the next one waits for it.
        most = SAVE_INTERVAL * (2 if self.chain.asynchronous else 1)
        for kill in self.outcome.kills:
            if kill.resumed is not None:
                continue
            kill.resumed = resumed
            if resumed < kill.saved:
                kill.faults.append(f"resumed from {resumed} although {kill.saved} was saved")
            if kill.reached - resumed > most:
                kill.faults.append(f"lost {kill.reached - resumed} steps, more than {most}")


def _resumed(output: str) -> int | None:
    """The iteration of the checkpoint that a start loaded; None when it said nothing of one."""
    found = re.findall(r"loaded checkpoint \S*iter_(\d+)", output)
    return int(found[0]) if found else None
