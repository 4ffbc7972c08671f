"""Run the points of an experiment inside an allocation or on this machine: what fits runs side by side.

A point that fails is recorded and the others go on. A point that is complete is not run again. Nothing can hang: every
point has a limit, after which its processes are stopped.
"""
from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.config.duration import duration_s, show_duration
from megatron.errors import ConfigError
from megatron.parallel.environment import job_name
from megatron.parallel.slurm import ask_slurm
from megatron.planning.experiments.cost import SLACK, START_UP_S, Cost
from megatron.planning.experiments.folder import PointFolder
from megatron.planning.experiments.launch import Run, Step, slurm_command, start_here, start_step, training_command
from megatron.planning.experiments.points import Point

DEFAULT_LIMIT_S = 3600.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Place:
    """Where points run. hosts: names of the nodes that are free for them; [] for this machine alone.

    time_left_s: seconds until the allocation ends, None where nobody knows.
    """

    launcher: str
    hosts: Sequence[str] = ()
    side_by_side: bool = True
    time_left_s: Callable[[], float | None] = lambda: None


@dataclass
class _Running:
    folder: PointFolder
    run: Run
    hosts: list[str]
    started: float
    limit_s: float
    begun: float
    stopped: str | None = None


@dataclass
class Outcome:
    """Names of the points by what became of them. `waiting` ones were not started or were interrupted; `resumable`:
    another job with the same command would get further."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    out_of_time: bool = False

    @property
    def resumable(self) -> bool:
        """Something was done and the rest did not fit into the time: without the first it would never end."""
        return self.out_of_time and bool(self.done)


def slurm_time_left_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Seconds that squeue says are left of this job."""
    return duration_s(_squeue("%L", environ) or "")


def slurm_job_runs(environ: Mapping[str, str] = os.environ) -> bool | None:
    """Whether squeue has this job as running, not cancelled or out of time; None: it does not say."""
    said = _squeue("%T", environ)
    return None if said is None else said == "RUNNING"


def _squeue(what: str, environ: Mapping[str, str]) -> str | None:
    """What squeue says of this job; None where it does not answer."""
    job = job_name(environ)
    if not job:
        return None
    try:
        done = ask_slurm("squeue", "-h", "-j", job, "-o", what, timeout_s=30)
    except (OSError, subprocess.SubprocessError):
        return None
    unknown = "Invalid job id" in done.stderr  # it has ended
    return done.stdout.strip() if done.returncode == 0 or unknown else None


def command(point: Point, launcher: str, folder: PointFolder) -> list[str]:
    """Of each process of a point on this machine, or of the launcher of its job step."""
    flags = [*point.flags, "--metrics-file", str(folder.metrics)]
    return slurm_command(flags) if launcher == "slurm" else training_command(flags)


def limit_s(point_cost: Cost, given: float | None) -> float:
    """How long a point may take."""
    if given is not None:
        return given
    return DEFAULT_LIMIT_S if point_cost.total_s is None else SLACK * point_cost.total_s + START_UP_S


class Runner:
    """Runs points; `say` gets a line for each thing that happens."""

    def __init__(
        self, root: Path, place: Place, costs: Mapping[str, Cost], *, limit: float | None = None,
        retry_failed: bool = False, say: Callable[[str], object] = print,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._root, self._place, self._costs, self._limit = root, place, costs, limit
        self._retry, self._say = retry_failed, say
        self._clock, self._sleep = clock, sleep
        self._free: list[str] = list(place.hosts)
        self._running: list[_Running] = []
        self._started = 0
        self.outcome = Outcome()
        self.signal: int | None = None

    def run(self, points: Sequence[Point]) -> Outcome:
        """Run every point that is not done. Raises ConfigError for a folder that holds something else."""
        waiting = self._to_do(points)
        handlers = {n: signal.signal(n, self._on_signal) for n in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
        try:
            while waiting or self._running:
                if self.signal is not None:
                    self._interrupt(waiting)
                else:
                    self._start_what_fits(waiting)
                self._reap()
                if self._running:
                    self._sleep(_POLL_S)
        finally:
            for each in self._running:
                each.run.kill()
                each.folder.claim.release()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self.outcome

    def _on_signal(self, number: int, _frame: object) -> None:
        self.signal = number

    def _to_do(self, points: Sequence[Point]) -> list[PointFolder]:
        """Folders of the points to run, the longest first; the others are accounted for."""
        found = []
        for point in points:
            folder = PointFolder(self._root, point)
            if point.problem is not None:
                self.outcome.failed[point.name] = why = f"refused: {point.problem}"
                if folder.result().get("reason") != why:
                    folder.prepare()
                    folder.finish(None, time.time(), [], why)
                continue
            state = folder.state()
            if state == "done":
                self.outcome.skipped.append(point.name)
                self._say(f"{point.name}: done already")
            elif state.startswith("failed") and not self._retry:
                self.outcome.failed[point.name] = state.removeprefix("failed: ")
                self._say(f"{point.name}: {state} (--retry-failed runs it again)")
            else:
                found.append(folder)
        return sorted(found, key=lambda f: (-(self._costs[f.point.name].total_s or 0.0), -f.point.nodes))

    def _start_what_fits(self, waiting: list[PointFolder]) -> None:
        for folder in list(waiting):
            point = folder.point
            if self._place.launcher == "slurm" and point.nodes > len(self._place.hosts):
                waiting.remove(folder)
                self._postpone(point, f"needs {point.nodes} nodes, there are {len(self._place.hosts)}", for_time=False)
            elif self._room_for(point):
                waiting.remove(folder)
                self._start_or_postpone(folder)

    def _room_for(self, point: Point) -> bool:
        if self._running and (self._place.launcher == "local" or not self._place.side_by_side):
            return False
        return self._place.launcher == "local" or point.nodes <= len(self._free)

    def _postpone(self, point: Point, why: str, *, for_time: bool = True) -> None:
        self.outcome.waiting[point.name] = why
        self.outcome.out_of_time |= for_time
        self._say(f"{point.name}: not started: {why}")

    def _start_or_postpone(self, folder: PointFolder) -> None:
        point, needed = folder.point, self._costs[folder.point.name].total_s
        left = self._place.time_left_s()
        if left is not None and needed is not None and left < needed:
            self._postpone(point, f"needs about {show_duration(needed)}, {show_duration(left)} are left of the job")
            return
        try:
            folder.claim.take(self._say)
        except ConfigError as error:  # another experiment with the same folder measures this point now
            self._postpone(point, str(error), for_time=False)
            return
        if folder.complete():
            folder.claim.release()
            self.outcome.skipped.append(point.name)
            self._say(f"{point.name}: done meanwhile by another run")
            return
        folder.prepare()
        hosts, self._free = self._free[: point.nodes], self._free[point.nodes :]
        limit = limit_s(self._costs[point.name], self._limit)
        where = f" on {_shown(hosts)}" if hosts else ""
        self._say(f"{point.name}: {point.world} process(es){where}, at most {show_duration(limit)}; {folder.log}")
        run = self._start(folder, hosts, limit)
        self._running.append(_Running(folder, run, hosts, time.time(), limit, self._clock()))
        self._started += 1

    def _start(self, folder: PointFolder, hosts: list[str], limit: float) -> Run:
        point = folder.point
        words = command(point, self._place.launcher, folder)
        if self._place.launcher == "local":
            return start_here(words, point.world, folder.log, folder.tasks)
        step = Step(f"{point.name}-{os.getpid()}", hosts, point.tasks_per_node, self._started + 1, limit)
        return start_step(words, step, folder.log, folder.tasks)

    def _reap(self) -> None:
        for each in list(self._running):
            if not each.run.poll():
                self._watch(each)
                continue
            self._running.remove(each)
            self._free += each.hosts
            name, took = each.folder.point.name, show_duration(time.time() - each.started)
            if self.signal is not None and not each.folder.complete():
                self._postpone(each.folder.point, f"interrupted by {signal.Signals(self.signal).name}")
                each.folder.claim.release()
                continue
            reason = each.folder.finish(each.run.exit_codes, each.started, each.hosts, each.stopped)
            each.folder.claim.release()
            if reason is None:
                self.outcome.done.append(name)
                self._say(f"{name}: done after {took}")
            else:
                self.outcome.failed[name] = reason
                self._say(f"{name}: failed after {took}: {reason}; {each.folder.log}")

    def _watch(self, each: _Running) -> None:
        """Stop a point that takes too long."""
        if each.stopped is None and self._clock() > each.begun + each.limit_s:
            each.stopped = f"stopped after its limit of {show_duration(each.limit_s)}"
            each.run.stop()

    def _interrupt(self, waiting: list[PointFolder]) -> None:
        for folder in waiting:
            self._postpone(folder.point, f"interrupted by {signal.Signals(self.signal or 0).name}")
        waiting.clear()
        for each in self._running:
            each.run.stop()


def _shown(hosts: Sequence[str]) -> str:
    return hosts[0] if len(hosts) == 1 else f"{len(hosts)} nodes, {hosts[0]} to {hosts[-1]}"
