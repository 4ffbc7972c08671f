"""A month of a scheduler's faults in compressed time: one job of examples/frontier meets all.

The job trains on four virtual nodes of a real Slurm, with one spare node and restarts within the
job. Faults come in random order, some steps apart. Those that Slurm takes part in are caused by its
commands; the rest of the month is in month.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults import history
from benchmarks.faults.frontier import (
    ENDLESS,
    Submitted,
    differences,
    reached,
    restarts,
    submit,
    trainings,
    wait_until,
)
from benchmarks.faults.job import JobOutcome
from benchmarks.faults.month import LEAVE_S, Fault, Start, processes_that_write_to
from benchmarks.faults.month_report import timeline
from benchmarks.faults.testbed import ENDED, Testbed
from megatron.errors import EXIT_LOST_RANK

NODES = [f"node{number:02}" for number in range(1, 6)]
RANKS = 4
SAVE_INTERVAL = 20
GAP = 15  # steps between two faults, on average, besides those until the job has saved
MINUTES = 60  # time limit of each start
LEFT_S = 90  # least time that a shorter time limit leaves
NODE = "node"
CONTROLLER = "process without controller"
LIMIT = "time limit"
ENDING = ("first node", "preemption", "SIGTERM", "SIGUSR1")
CASES = (*(NODE,) * 3, *ENDING, CONTROLLER, LIMIT)
"""A node whose place a spare takes, or, without one, whose loss ends the job, as that of the first
node does; a process that dies while Slurm's controller is stopped; `scontrol requeue`, as for
another job; signals, of which SIGUSR1 is Slurm's before the time limit; a limit of which the program
learns by asking."""


class _Month:
    """The job and its history.

    training  nodes of the current start with ranks, and `spare` the one without, if it is left
    lost      nodes that have left the current start
    """

    def __init__(
        self, testbed: Testbed, folder: Path, chance: random.Random, say: Callable[[str], None]
    ) -> None:
        self._testbed = testbed
        self._chance = chance
        self._say = say
        self._enough = folder / "enough"
        self.marks = folder / "marks"
        self.marks.mkdir(parents=True)
        self.starts = list[Start]()
        self.problems = list[str]()
        self._last_lost = ""
        self._expected = 0  # number of restarts within the job
        self._shared = set(os.listdir("/dev/shm"))
        flags = [*ENDLESS, "--save-interval", str(SAVE_INTERVAL)]
        self.job: Submitted = submit(
            testbed,
            folder,
            [*flags, "--kill-switch-file", str(self._enough)],
            options=["-N", str(len(NODES)), f"--time={MINUTES}", "--signal=USR1@1"],
            PRESET="tiny",
            TASKS_PER_NODE="1",
            GPU_VISIBILITY="all",
            NODES_NEEDED=str(RANKS),
        )
        self._begin()

    def _begin(self) -> None:
        """Wait for the start of the job, and for its first step."""
        self.job.wait("RUNNING", *ENDED)
        self._begun = time.time()
        self.training, self.spare = NODES[:RANKS], NODES[RANKS]
        self.lost = list[str]()
        wait_until(lambda: self._since(self._begun, "iteration"), self.job)
        self._from = self._since(self._begun, "start")[0]["iteration"]

    def _since(self, at: float, event: str) -> list[dict[str, Any]]:
        """Return the records of an event after a time."""
        if not (self.job.checkpoints / "metrics.jsonl").exists():
            return []
        records = history.records(self.job.checkpoints, event)
        return [record for record in records if record["time"] > at]

    def meet(self, number: int, case: str) -> None:
        """Let a fault occur, and wait until the job is over it."""
        # Only a job that has saved since its start is requeued.
        wait_until(lambda: self._saved() > self._from, self.job)
        due = reached(self.job.run) + 1 + int(self._chance.expovariate(1 / GAP))
        wait_until(lambda: reached(self.job.run) >= due, self.job)
        at, step = time.time(), reached(self.job.run)
        victim = 0
        code: int | None = 0  # of the start that ends; None: the job restarts within itself
        if case in (NODE, "first node"):
            victim, code = self._lose_a_node(case), EXIT_LOST_RANK
            if victim and self.spare:
                self.training.append(self.spare)
                self.spare, code = "", None
        elif case == CONTROLLER:
            victim, code = self._chance.randrange(RANKS), None
            self._testbed.control("stop-controller")
            at = time.time()
            os.kill(trainings(self.job.run)[victim], signal.SIGKILL)
            while not self._since(at, "restart") and trainings(self.job.run):
                time.sleep(0.1)
            self._testbed.control("start-controller")
        elif case == "preemption":
            self._testbed.ask("scontrol", "requeue", self.job.number)
        elif case == LIMIT:
            self._testbed.shorten(self.job.number, LEFT_S)
        else:
            self._testbed.ask("scancel", f"--signal={case}", self.job.number)
        if code is None:
            restarted = wait_until(lambda: self._since(at, "restart"), self.job)
            wait_until(lambda: self._since(restarted[0]["time"], "iteration"), self.job)
            self._expected += 1
        else:
            self._end(code, "PENDING")
            if case == LIMIT:
                at = history.records(self.job.checkpoints, "iteration")[-1]["time"]
            self._start_again()
        if case == NODE and code == EXIT_LOST_RANK:
            case = "node without a spare"
        fault = Fault(number, step, case, victim)
        mark = {"time": at, **dataclasses.asdict(fault)}
        (self.marks / f"fault_{number:03}").write_text(json.dumps(mark))
        self._say(
            f"  {case} at step {step}: step {reached(self.job.run)} after {time.time() - at:.1f} s"
        )

    def _saved(self) -> int:
        tracker = self.job.checkpoints / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def _lose_a_node(self, case: str) -> int:
        """End a node with ranks, if possible the one that was lost last; return its place."""
        at = 0 if case != NODE else self._chance.randrange(1, len(self.training))
        if case == NODE and self._last_lost in self.training:
            at = self.training.index(self._last_lost)
        node = self.training.pop(at)
        self.lost.append(node)
        if at:
            self._last_lost = node
        self._testbed.control("lose-node", node)
        return at

    def _end(self, code: int, state: str) -> None:
        """Wait until this start has ended with a state, and look for what it has left."""
        ended = self.job.wait("PENDING", *ENDED)
        if ended != state:
            raise RuntimeError(f"the job is {ended}, not {state}: {self.job.text()[-3000:]}")
        at = time.time()
        left = self._left()
        while left and time.time() < at + LEAVE_S:
            left = self._left()
        self.problems += [f"start {len(self.starts) + 1} left {one}" for one in left]
        self.starts.append(Start(self._begun, at, (code,), tuple(left)))

    def _left(self) -> list[str]:
        files = set(os.listdir("/dev/shm")) - self._shared
        return [*processes_that_write_to(self.job.run), *sorted(files)]

    def _start_again(self) -> None:
        """Bring lost nodes back, and start the requeued job without the usual delay."""
        for node in self.lost:
            self._testbed.control("add-node", node)
        number = self.job.number
        self._testbed.ask("scontrol", "update", f"JobId={number}", f"TimeLimit={MINUTES}")
        self._testbed.control("hurry", number)
        self._begin()
        requeued = int(self._testbed.show(number)["Restarts"])
        if requeued != len(self.starts):
            self.problems.append(f"requeued {requeued} times for {len(self.starts)} starts")

    def finish(self) -> None:
        """End the job."""
        self._enough.touch()
        self._end(0, "COMPLETED")
        if (number := len(restarts(self.job.run))) != self._expected:
            self.problems.append(f"{number} restarts within the job, not {self._expected}")


def draw(chance: random.Random) -> list[str]:
    """Return the cases in random order.

    The time limit follows a new start: without accounting Slurm refuses to change a job that has
    lost a node.
    """
    cases = [case for case in CASES if case != LIMIT]
    chance.shuffle(cases)
    cases.insert(1 + cases.index(chance.choice(ENDING)), LIMIT)
    return cases


def campaign(
    folder: Path, chance: random.Random, say: Callable[[str], None]
) -> Iterator[JobOutcome]:
    """Let a job meet the faults; compare it with the same training undisturbed."""
    cases = draw(chance)
    say(f"{len(cases)} faults of a scheduler: {', '.join(cases)}")
    folder.mkdir(parents=True, exist_ok=True)
    with Testbed(nodes=len(NODES)) as testbed:
        month = _Month(testbed, folder, chance, say)
        for number, case in enumerate(cases):
            month.meet(number, case)
        month.finish()
    run = month.job.run
    report = timeline(month.job.checkpoints, month.marks, month.starts)
    for line in report.lines():
        say(line)
    problems = [*month.problems, *differences([run], folder / "undisturbed")]
    notes = f"{100 * report.effective:.1f} % effective in {report.wall_s:.0f} s"
    yield JobOutcome(
        f"{len(cases)} faults of a scheduler, {len(month.starts)} starts, "
        f"{len(restarts(run))} restarts",
        notes,
        tuple(problems),
    )
