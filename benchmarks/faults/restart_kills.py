"""Jobs that restart within themselves, whose processes and nodes are killed with SIGKILL.

Each fault is a pair of kills: the first during training, the second during the restart that follows
(or the first steps after it). The points are those that a job with one restart reaches, in its
training processes and in its supervisors; a seed selects among them. The job has to recover without
a new start. The last of them may be the loss of the first task's supervisor, or SIGTERM or SIGINT to
all tasks: the job ends, and is started again. All losses, also of repeated steps, and the last state
must equal those of an undisturbed run.

The processes are on one machine; the names of their nodes are not its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.faults import history
from benchmarks.faults.job import CONSTANT, LIMIT_S, FaultJob, JobOutcome, run_well, training
from benchmarks.faults.kills import OTHERS_LEAVE_S, STEP, differences
from megatron.errors import EXIT_LOST_RANK
from megatron.parallel.host_processes import DEAD, GONE, process_state
from tests.helpers.fault_points import moment_name

SAVE_INTERVAL = 5
PATIENCE = 5  # steps after which a first kill that was not reached strikes at a step
GAP = 12  # steps between pairs: more than a restart goes back, and all patience
ENDS = 0.5  # probability that the last fault of a job ends it
_LISTED_KILL = SAVE_INTERVAL + 2  # step of the kill of the job that lists the points

Role = Literal["trainer", "supervisor"]
Victims = Literal["process", "task", "node", "terminate", "interrupt"]
_SIGNALS = {"terminate": signal.SIGTERM, "interrupt": signal.SIGINT}


@dataclass(frozen=True)
class Layout:
    """A layout and its flags.

    ranks     number of ranks
    local     whether the job saves to memory, too
    spares    number of spare tasks
    per_node  tasks of a node
    """

    name: str
    ranks: int
    flags: tuple[str, ...]
    local: bool = True
    spares: int = 0
    per_node: int = 8

    @property
    def tasks(self) -> int:
        return self.ranks + self.spares

    def on_node(self, task: int) -> list[int]:
        """Return the tasks on a task's node."""
        first = task - task % self.per_node
        return list(range(first, min(first + self.per_node, self.tasks)))


_TP, _PP = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
_EXPERTS = ("--num-experts", "2", "--expert-model-parallel-size", "2", "--bf16")
LAYOUTS = (
    Layout("TP2 PP2, ZeRO-0", 4, (*_TP, *_PP, "--zero-stage", "0")),
    Layout("DP4, ZeRO-2, nodes of 2", 4, ("--zero-stage", "2"), spares=2, per_node=2),
    Layout("TP2 DP2, from disk", 4, (*_TP, "--async-save"), local=False, spares=1, per_node=1),
    Layout("DP4, ZeRO-3, bf16", 4, ("--zero-stage", "3", "--bf16"), spares=1, per_node=1),
    Layout("EP2 DP4, ZeRO-1", 4, ("--zero-stage", "1", *_EXPERTS), spares=1, per_node=1),
    Layout(
        "PP2 DP2, ZeRO-1, nodes of 2",
        4,
        (*_PP, "--zero-stage", "1", "--async-save"),
        spares=2,
        per_node=2,
    ),
    Layout("TP2 PP2 DP2, nodes of 4", 8, (*_TP, *_PP), spares=4, per_node=4),
)


@dataclass(frozen=True)
class Point:
    """A point of a task's processes: its name, and how often it was reached when it was listed."""

    task: int
    role: Role
    name: str
    times: int = 1


@dataclass(frozen=True)
class Strike:
    """A kill at the nth time that a process reaches a point.

    victims  the process, its task, or its node; or a signal to all tasks, which end the job
    """

    point: Point
    nth: int
    victims: Victims

    def __str__(self) -> str:
        return f"{self.victims} of {self.point.role} {self.point.task} at {self.point.name} ({self.nth})"


@dataclass(frozen=True)
class Pair:
    """A kill after step `step`, and another one in the restart that follows."""

    number: int
    step: int
    first: Strike
    second: Strike


# -- in the processes of the job -------------------------------------------------------------------


def join(task: int, layout: Layout, folder: str, save: str, pairs: Sequence[Pair] | None) -> None:
    """Make this process a task of a job on the layout's nodes, which meets the pairs of kills.

    folder  of the files that mark what has happened
    save    folder that the job saves to
    pairs   the kills; None: one, and all points are listed
    """
    on_node = layout.on_node(task)
    os.environ["LOCAL_RANK"] = str(task - on_node[0])
    os.environ["LOCAL_WORLD_SIZE"] = str(len(on_node))
    os.environ["SLURMD_NODENAME"] = f"virtual{on_node[0]:02}"
    Path(folder, f"supervisor_{task}").write_text(str(os.getpid()))
    sys.addaudithook(_Injection(task, layout.on_node(task), folder, os.path.abspath(save), pairs))


@dataclass(eq=False)
class _Injection:
    """Audit hook that kills or lists; processes that are forked inherit it."""

    task: int
    on_node: Sequence[int]
    folder: str
    save: str
    pairs: Sequence[Pair] | None
    supervisor: int = field(default_factory=os.getpid)
    process: int = 0
    generation: int = 0
    iteration: int = 0  # that the process has completed in this generation
    steps: int = 0  # their number
    counts: dict[object, int] = field(default_factory=dict)
    pair: int = 0
    busy: bool = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.busy:
            return
        self.busy = True
        try:
            self._notice(event, arguments)
        finally:
            self.busy = False

    @property
    def role(self) -> Role:
        return "supervisor" if self.process == self.supervisor else "trainer"

    def _notice(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.process != os.getpid():  # forked
            self.process = os.getpid()
            self._write("processes", str(self.process))
        if event == "megatron.parallel.fault":  # in supervisors
            self._enter(arguments[0] + 1)
        elif event == "megatron.parallel.leaving_groups":  # in training processes
            self._enter(self.generation + 1)
        elif event == STEP:
            self.iteration = arguments[0]
            self.steps += 1
        if moment := moment_name(event, arguments, self.save):
            if self.pairs is None:
                self._list(moment)
            else:
                self._meet(moment)

    def _enter(self, generation: int) -> None:
        self.generation = generation
        self.iteration = self.steps = 0
        self.counts.clear()

    def _list(self, moment: str) -> None:
        restarts = self.generation == 1 and self.steps <= 1
        trains = self.generation == 0 and self.iteration > 1
        if restarts or trains:
            kind = "second" if restarts else "first"
            self._write("points", f"{kind}|{self.task}|{self.role}|{moment}")
        if moment == STEP and self.iteration == _LISTED_KILL and not self.generation:
            if self.task == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()

    def _meet(self, moment: str) -> None:
        assert self.pairs is not None, "otherwise points are listed"
        while self.pair < len(self.pairs) and self._mark("second", self.pair):
            self.pair += 1
            self.counts.clear()
        if self.pair == len(self.pairs):
            return
        pair = self.pairs[self.pair]
        first = self._mark("first", pair.number)
        if not first:
            if (steps := self.iteration - pair.step) >= 0:
                self._strike_at("first", pair, pair.first, moment, steps, PATIENCE)
        elif first["generation"] + 1 == self.generation:
            self._strike_at("second", pair, pair.second, moment, self.steps, 1)

    def _strike_at(
        self, which: str, pair: Pair, strike: Strike, moment: str, steps: int, most: int
    ) -> None:
        """Kill if this moment is the one of the strike, or after `most` steps without it.

        After twice as many steps any task is hit: that of the strike may be lost.
        """
        point = strike.point
        is_task = point.task == self.task
        if is_task and (point.role, point.name) == (self.role, moment):
            self.counts[which] = self.counts.get(which, 0) + 1
            if self.counts[which] == strike.nth:
                self._kill(which, pair, strike.victims, moment)
        elif moment == STEP and steps >= most * (1 if is_task else 2):
            self._kill(which, pair, "process", moment)

    def _kill(self, which: str, pair: Pair, victims: Victims, moment: str) -> None:
        """Kill the victims, unless another process has met this kill."""
        lost = {"task": [self.task], "node": self.on_node}.get(victims, [])
        met = {
            "generation": self.generation,
            "task": self.task,
            "at": f"{self.role} {self.task}, {moment}, iteration {self.iteration}",
            "victims": victims,
            "lost": lost,
        }
        path = self._mark_path(which, pair.number)
        temporary = f"{path}.{os.getpid()}"
        Path(temporary).write_text(json.dumps(met))
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
        if victims in _SIGNALS:
            for file in Path(self.folder).glob("supervisor_*"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(file.read_text()), _SIGNALS[victims])
            return
        supervisors = [int(Path(self.folder, f"supervisor_{task}").read_text()) for task in lost]
        for process in sorted(supervisors, key=lambda one: one == self.supervisor):
            with contextlib.suppress(ProcessLookupError):  # killed before
                os.kill(process, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _mark_path(self, which: str, number: int) -> str:
        return f"{self.folder}/{which}_{number:03}"

    def _mark(self, which: str, number: int) -> dict[str, Any]:
        """Return the record of a kill; {} if it has not happened."""
        try:
            with open(self._mark_path(which, number)) as file:
                met: dict[str, Any] = json.load(file)
                return met
        except FileNotFoundError:
            return {}

    def _write(self, name: str, line: str) -> None:
        with open(f"{self.folder}/{name}", "a") as file:
            file.write(f"{line}\n")


# -- the jobs --------------------------------------------------------------------------------------


def campaign(
    folder: Path, chance: random.Random, total: int, say: Callable[[str], None]
) -> Iterator[JobOutcome]:
    """Kill about `total` times, equally often on each layout; 0: at every point of a restart."""
    share, rest = divmod(total, len(LAYOUTS))
    for number, layout in enumerate(LAYOUTS):
        count = share + (number < rest) if total else None
        if count != 0:
            yield _Running(layout, folder / str(number), chance, say).run(count)


class _Running:
    """A job on a layout that meets pairs of kills."""

    def __init__(
        self, layout: Layout, folder: Path, chance: random.Random, say: Callable[[str], None]
    ) -> None:
        self.layout = layout
        self.folder = folder
        self.chance = chance
        self.say = say
        self.problems = list[str]()

    def run(self, kills: int | None) -> JobOutcome:
        """Let the job meet about so many kills; None: one at each point of a restart."""
        firsts, seconds = self._listed()
        pairs = self._drawn(firsts, seconds, kills)
        last = GAP * len(pairs) + SAVE_INTERVAL
        undisturbed = self.folder / "whole"
        run_well(self.layout.ranks, self._arguments(undisturbed, last), self.folder / "logs_whole")
        save = self.folder / "run"
        met, starts = self._disturbed(pairs, save, last)
        if not self.problems:
            self.problems += differences(save, history.steps(save), undisturbed, last)
        names = {(point.role, point.name) for point in [*firsts, *seconds]}
        figures = [f"{starts} starts", f"{len(history.records(save, 'restart'))} restarts reported"]
        figures.append(f"{len(history.steps(save))} losses compared")
        if not self.problems:
            shutil.rmtree(self.folder)
        what = f"{met} kills within jobs at {len(names)} moments, {self.layout.name}"
        return JobOutcome(what, ", ".join(figures), tuple(self.problems))

    def _arguments(self, save: Path, last: int, restarts: int = 0) -> list[str]:
        layout = self.layout
        flags = [*layout.flags, *CONSTANT, "--keep-last", "2"]
        flags += ["--distributed-timeout-minutes", str(OTHERS_LEAVE_S / 60)]
        if restarts:
            flags += ["--max-restarts", str(restarts), "--spare-ranks", str(layout.spares)]
            flags += ["--non-persistent-save-interval", "2"] if layout.local else []
        return training(save, last, SAVE_INTERVAL, *flags)

    def _job(
        self, name: str, save: Path, last: int, restarts: int, pairs: Sequence[Pair] | None
    ) -> tuple[list[int], FaultJob]:
        """Run a job in which the pairs of kills happen; None: one, and its points are listed."""
        marks = self.folder / name
        marks.mkdir(parents=True)
        arms = {
            task: [(join, task, self.layout, str(marks), str(save), pairs)]
            for task in range(self.layout.tasks)
        }
        arguments = self._arguments(save, last, restarts)
        with FaultJob(self.layout.tasks, arguments, self.folder / f"logs_{name}", arms=arms) as job:
            codes = job.wait(LIMIT_S + 20.0 * restarts)
            for process in map(int, (marks / "processes").read_text().split()):
                if process_state(process) not in (DEAD, GONE):
                    self.problems.append(f"process {process} is left after the end of the job")
        return codes, job

    def _listed(self) -> tuple[list[Point], list[Point]]:
        """List the points of training and those of a restart in a job that loses a process."""
        codes, job = self._job("listed", self.folder / "listed_run", _LISTED_KILL + 5, 1, None)
        if any(codes):
            raise RuntimeError(f"a job with one kill failed, exit codes {codes}:\n{job.outputs()}")
        lines = Counter((self.folder / "listed" / "points").read_text().splitlines())
        points: dict[str, list[Point]] = {"first": [], "second": []}
        for line, times in sorted(lines.items()):
            kind, task, words, name = line.split("|", 3)
            role: Role = "trainer" if words == "trainer" else "supervisor"
            points[kind].append(Point(int(task), role, name, times))
        return points["first"], points["second"]

    def _drawn(
        self, firsts: Sequence[Point], seconds: Sequence[Point], kills: int | None
    ) -> list[Pair]:
        """Draw pairs of kills, that of a supervisor only if a spare can take its place."""
        left = self.layout.spares
        lost = set[int]()

        def chosen(points: Sequence[Point]) -> Point:
            # each name is as likely as any other, however many ranks reach it
            name = self.chance.choice(sorted({(one.role, one.name) for one in points}))
            return self.chance.choice([p for p in points if (p.role, p.name) == name])

        def drawn(points: Sequence[Point]) -> Strike:
            nonlocal left
            kinds: list[Victims] = ["process", "task", "node", "node"]
            while True:
                point = chosen(points)
                victims = self.chance.choice(kinds if point.role == "trainer" else kinds[1:])
                on_node = set(self.layout.on_node(point.task)) - lost
                gone = {"process": set(), "task": {point.task}, "node": on_node}[victims]
                if point.task not in lost and 0 not in gone and len(gone) <= left:
                    left -= len(gone)
                    lost.update(gone)
                    return Strike(point, self.chance.randint(1, min(point.times, 3)), victims)

        trained = [point for point in firsts if point.role == "trainer"]
        count = len(seconds) if kills is None else (kills + 1) // 2
        pairs = [Pair(n, GAP * n + 2, drawn(trained), drawn(seconds)) for n in range(count)]
        if self.chance.random() < ENDS:
            kinds: list[Victims] = ["task", "terminate", "interrupt"]
            of_first = chosen([point for point in seconds if point.task == 0])
            pairs[-1] = replace(pairs[-1], second=Strike(of_first, 1, self.chance.choice(kinds)))
        return pairs

    def _disturbed(self, pairs: Sequence[Pair], save: Path, last: int) -> tuple[int, int]:
        """Run the job; return how many kills it met, and how often it was started."""
        codes, job = self._job("met", save, last, 2 * len(pairs), pairs)
        met = [
            json.loads(path.read_text())
            for number in range(len(pairs))
            for which in ("first", "second")
            if (path := self.folder / "met" / f"{which}_{number:03}").exists()
        ]
        for kill in met:
            self.say(f"{self.layout.name}: {kill['victims']} of {kill['at']}")
        if len(met) < 2 * len(pairs):
            self.problems.append(f"{len(met)} of {2 * len(pairs)} kills happened")
        lost = {task for kill in met for task in kill["lost"]}
        others = EXIT_LOST_RANK if 0 in lost else 0
        expected = [-signal.SIGKILL if n in lost else others for n in range(self.layout.tasks)]
        if codes != expected:
            self.problems.append(f"exit codes {codes} instead of {expected}:\n{job.tail()}")
        if met[-1]["lost"] != [0] and met[-1]["victims"] not in _SIGNALS:
            return len(met), 1
        codes, job = self._job("again", save, last, 1, [])
        if any(codes):
            self.problems.append(f"exit codes {codes} of the second start:\n{job.tail()}")
        return len(met), 2
