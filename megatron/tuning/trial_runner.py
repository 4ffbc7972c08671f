"""Runs trials: as processes on this machine, one at a time, or as job steps on disjoint nodes of an allocation.

Nothing here waits for a trial: `poll` looks at those that run, ends what takes too long or hangs, and hands out what
has ended. A trial ends alone, whatever it does, and none outlives the tuner. When one fails on nodes of an allocation
Slurm is asked about these; those that are dead are left out from then on, and the trial is no answer.
"""
from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.planning.experiments.endings import OUT_OF_MEMORY, REFUSED, Ending, ending
from megatron.planning.experiments.launch import Run, Step, slurm_command, start_here, start_step, training_command
from megatron.planning.experiments.runner import slurm_job_runs
from megatron.tuning.nodes import Inquiry, Nodes
from megatron.tuning.result import failed, read_result
from megatron.tuning.trial_folder import TrialFolder, TrialSettings, asked_of, trial_flags
from megatron.tuning.types import FAILED, Candidate, Result, Trial
from megatron.tuning.watch import Watch

__all__ = ["Place", "TrialRunner", "TrialSettings"]

GRACE_S = 15.0
"""From a polite signal to force. A trial has nothing to save."""
INTERRUPTED = "interrupted"
_POLL_S = 0.1
_FULL = 0.95  # of a memory limit
_WAIT_S = 60  # that the tasks of a step have to end when one has
# What a first rank says whose port another program has (parallel/meeting.py), which says nothing about the layout.
_PORT_TAKEN = "cannot serve port"
_STARTS, _OTHER_PORT = 3, 331
_MOST_LOST = 2  # nodes may die under a trial; more often than that it is the layout that takes them along


@dataclass(frozen=True)
class Place:
    """Where trials run.

    launcher            "local" or "slurm"
    hosts               nodes that are free for trials; () for this machine alone
    tasks_per_node      most processes of a node
    parallel            most trials at once
    memory_limit_bytes  that each process may take of the host's memory; None: no limit
    """

    launcher: str
    hosts: tuple[str, ...]
    tasks_per_node: int
    parallel: int = 1
    memory_limit_bytes: int | None = None


@dataclass
class _Running:
    """asked, run and watch are None for a trial that was refused before anything was started. starts: how many of them
    were in vain before, because its port was taken. result, inquiry: of one that has ended, as long as its nodes are
    asked for."""

    trial: Trial
    folder: TrialFolder
    asked: Config | None = None
    run: Run | None = None
    watch: Watch | None = None
    stopped: Ending | None = None
    starts: int = 0
    result: Result | None = None
    inquiry: Inquiry | None = None


class TrialRunner:
    """Runs trials in folders below `folder`, the tuner's. `say` gets a line for each node that is left out."""

    def __init__(
        self, folder: Path, place: Place, settings: TrialSettings, say: Callable[[str], object] = lambda text: None,
        *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        if place.launcher not in ("local", "slurm"):
            raise ConfigError(f"launcher '{place.launcher}' is unknown: use local or slurm")
        self._folder, self._place, self._settings = folder.resolve(), place, settings
        self._nodes = Nodes(place.hosts, say)
        self._clock, self._sleep = clock, sleep
        self._running: list[_Running] = []
        self._lost, self._losses = dict[int, str](), Counter[int]()

    @property
    def running(self) -> Sequence[Trial]:
        """Trials that have not ended, in the order in which they were started."""
        return [each.trial for each in self._running]

    def can_start(self, candidate: Candidate) -> bool:
        """Whether there is room for it now."""
        if self._place.launcher == "local":
            return not self._running
        return len(self._running) < self._place.parallel and candidate.nodes <= self._nodes.free

    def can_ever_start(self, candidate: Candidate) -> bool:
        """False: so many nodes have been left out in this start that there will be no room for it."""
        return self._nodes.usable is None or candidate.nodes <= self._nodes.usable

    def lost_by(self, trial: Trial) -> str | None:
        """Of a trial that `poll` has just returned without a result: the dead node that ended it ("node03 is down"), so
        that it is to be run again in this start, on other nodes; None: its allocation ended."""
        return self._lost.get(trial.number)

    def start(self, trial: Trial) -> Trial:
        """Start it; returns it with its hosts and when it started. `can_start` has said that there is room.

        It is tied to the thread that calls this. Raises ConfigError where nothing can be written or started.
        """
        hosts = () if self._place.launcher == "local" else self._nodes.take(trial.candidate.nodes)
        trial = dataclasses.replace(trial, hosts=hosts, started=time.time(), ended=None, result=None)
        self._lost.pop(trial.number, None)
        try:
            self._running.append(self._start(TrialFolder(self._folder, trial)))
        except BaseException:
            self._nodes.give_back(hosts)
            raise
        return trial

    def poll(self) -> list[Trial]:
        """Trials that have ended since the last call, with their results; without one where it was not the trial but a
        node (`lost_by`) or the allocation that ended."""
        ended = []
        for each in list(self._running):
            if each.run is None or each.run.poll():
                trial = self._settled(each)
                ended += [] if trial is None else [trial]
            elif each.watch is not None and each.stopped is None:
                each.stopped = self._at_its_limit(each.run, each.watch.look(self._clock()))
                if each.stopped is not None:
                    each.run.stop()
        return ended

    def stop_all(self, why: str) -> list[Trial]:
        """Stop what runs and wait for its end, for seconds. Returns the trials: without a result, as interrupted ones,
        unless they had done all their steps."""
        for each in self._running:
            if each.inquiry is not None:
                each.inquiry.stop()
            if each.run is not None:
                each.stopped = each.stopped or Ending(INTERRUPTED, why)
                each.run.stop()
        ended, deadline = list[Trial](), self._clock() + 2 * GRACE_S
        while self._running and self._clock() < deadline:
            ended += self._stopped()
            if self._running:
                self._sleep(_POLL_S)
        for each in self._running:
            if each.run is not None:
                each.run.kill()
        return ended + self._stopped()

    def recover(self, trial: Trial) -> Trial | None:
        """A trial of an earlier start with its result, where its metrics file tells of all its steps."""
        folder = TrialFolder(self._folder, trial)
        try:
            asked = asked_of(trial.candidate, self._settings)
        except ConfigError:
            return None
        result = self._read(folder, asked, "the tuner ended before it")
        if result is None:
            return None
        ended = folder.metrics.stat().st_mtime
        _note(folder, result, None, trial)
        return dataclasses.replace(trial, ended=ended, result=result)

    # -- one trial -----------------------------------------------------------------------------------------------------

    def _start(self, folder: TrialFolder, starts: int = 0) -> _Running:
        try:
            return self._started(folder, starts)
        except OSError as error:
            raise ConfigError(
                f"trial {folder.trial.number} cannot be started in {folder.path}: {error.strerror or error}. See to "
                "the disk or the machine; the same command goes on"
            ) from error

    def _started(self, folder: TrialFolder, starts: int) -> _Running:
        trial, settings = folder.trial, self._settings
        candidate = trial.candidate
        try:
            self._check_size(candidate)
            flags, asked = trial_flags(candidate, settings), asked_of(candidate, settings)
        except ConfigError as error:
            folder.prepare(candidate.flags, settings)
            return _Running(trial, folder, stopped=Ending(REFUSED, f"refused: {' '.join(str(error).split())}"))
        limit_s = settings.limit_s(candidate)
        folder.prepare(flags, settings)
        run = self._launch(folder, [*flags, "--metrics-file", str(folder.metrics)], limit_s, starts)
        watch = Watch(folder.metrics, settings.steps, self._clock(), limit_s, settings.stall_s, candidate.step_s)
        return _Running(trial, folder, asked, run, watch, starts=starts)

    def _check_size(self, candidate: Candidate) -> None:
        place, processes, nodes = self._place, candidate.processes, candidate.nodes
        if place.launcher == "local":
            if nodes > 1:
                raise ConfigError(f"{candidate.key} takes {nodes} nodes; --launcher local has this machine alone")
        elif processes % nodes or processes // nodes > place.tasks_per_node:
            raise ConfigError(
                f"{candidate.key}: {processes} processes do not fill {nodes} node(s) of up to {place.tasks_per_node}"
            )

    def _launch(self, folder: TrialFolder, flags: list[str], limit_s: float, starts: int) -> Run:
        trial, limit = folder.trial, self._place.memory_limit_bytes
        candidate = trial.candidate
        if self._place.launcher == "local":
            return start_here(
                training_command(flags), candidate.processes, folder.log, folder.tasks, memory_limit_bytes=limit,
                grace_s=GRACE_S, clock=self._clock,
            )  # fmt: skip
        tasks = candidate.processes // candidate.nodes
        name = f"trial-{trial.number}-{os.getpid()}"  # another search may run in this job
        turn = trial.number + _OTHER_PORT * starts
        step = Step(name, trial.hosts, tasks, turn, limit_s, _WAIT_S, limit)
        return start_step(slurm_command(flags), step, folder.log, folder.tasks, grace_s=GRACE_S, clock=self._clock)

    def _settled(self, each: _Running) -> Trial | None:
        """A trial whose processes have ended, as soon as it is known what that means; None: not yet, or it has been
        started again."""
        if each.result is None:
            each.result = result = self._result(each)
            if self._lacked_a_port(each, result):
                self._running[self._running.index(each)] = self._start(each.folder, each.starts + 1)
                return None
            if self._is_lost(each, result):
                return self._end(each, None)
            # Whatever it ended as: a rank whose first peer never answers refuses to go on, or hangs.
            if self._place.launcher == "slurm" and result.status == FAILED and each.run is not None:
                each.inquiry = Inquiry(each.trial.hosts) if os.environ.get("SLURM_JOB_ID") else None
        dead = {} if each.inquiry is None else each.inquiry.dead
        return None if dead is None else self._end_on(each, each.result, dead)

    def _end_on(self, each: _Running, result: Result, dead: Mapping[str, str]) -> Trial:
        """End a trial on nodes of which some may be dead: then that is what ended it, unless it ran out of memory,
        which takes nodes along, or nodes die under it again and again."""
        self._nodes.leave_out(dead)
        if not dead:
            return self._end(each, result)
        number, said = each.trial.number, ", ".join(f"{host} {why}" for host, why in dead.items())
        self._losses[number] += 1
        if result.kind == OUT_OF_MEMORY or self._losses[number] > _MOST_LOST:
            return self._end(each, dataclasses.replace(result, reason=f"{result.reason}; {said}"))
        self._lost[number] = said
        return self._end(each, None)

    def _lacked_a_port(self, each: _Running, result: Result) -> bool:
        """Whether it is to be started again: another program had the port of its first rank."""
        taken = result.status == FAILED and _PORT_TAKEN in (result.reason or "")
        return taken and each.stopped is None and each.starts + 1 < _STARTS

    def _is_lost(self, each: _Running, result: Result) -> bool:
        """Whether a trial failed because the job ends: Slurm signals its steps as it does the tuner."""
        failed_alone = self._place.launcher == "local" or each.run is None or each.stopped is not None
        return result.status == FAILED and not failed_alone and slurm_job_runs() is False

    def _read(self, folder: TrialFolder, asked: Config, note: str | None) -> Result | None:
        settings = self._settings
        return read_result(
            folder.metrics, folder.trial.candidate, asked, settings.iterations, settings.warm_up, note=note
        )

    def _result(self, each: _Running) -> Result:
        codes = None if each.run is None else each.run.exit_codes
        if each.asked is None:
            assert each.stopped is not None, "only what was refused has no settings"
            return failed(each.stopped)
        why = self._why(each, codes)
        result = self._read(each.folder, each.asked, None if why is None else f"after its last step: {why.reason}")
        return result or failed(why or self._ending(each, codes))

    def _why(self, each: _Running, codes: Sequence[int] | None) -> Ending | None:
        """Why it ended badly; None where nothing says that it did."""
        if each.stopped is None:
            return self._ending(each, codes) if any(codes or ()) else None
        said = self._ending(each, None)  # its codes are those of our signals
        return said if said.kind == OUT_OF_MEMORY else each.stopped

    def _at_its_limit(self, run: Run, found: Ending | None) -> Ending | None:
        """What stands still because it gets no more memory is out of memory, also where it says nothing: a lock that is
        never released, a thread that was never started."""
        limit = self._place.memory_limit_bytes
        if found is None or limit is None or run.memory_bytes() < _FULL * limit:
            return found
        return Ending(OUT_OF_MEMORY, f"out of memory: at its limit of {limit / 2**30:.3g} GiB, {found.reason}")

    def _ending(self, each: _Running, codes: Sequence[int] | None) -> Ending:
        return ending(codes, each.folder.logs(), limited=self._place.memory_limit_bytes is not None)

    def _end(self, each: _Running, result: Result | None) -> Trial:
        self._running.remove(each)
        self._nodes.give_back(each.trial.hosts)
        if result is not None:
            codes = None if each.run is None else each.run.exit_codes
            _note(each.folder, result, codes, each.trial)
        return dataclasses.replace(each.trial, ended=time.time(), result=result)

    def _stopped(self) -> list[Trial]:
        """Trials that have ended after `stop_all` asked them to."""
        ended = []
        for each in list(self._running):
            if each.run is None or each.run.poll():
                result = self._result(each)
                unsettled = each.inquiry is not None
                interrupted = each.run is not None and (result.kind == INTERRUPTED or unsettled)
                ended.append(self._end(each, None if interrupted else result))
        return ended


def _note(folder: TrialFolder, result: Result, codes: Sequence[int] | None, trial: Trial) -> None:
    """How a trial ended, in its folder. Raises ConfigError; the next start finds out again."""
    try:
        folder.finish(result, codes, trial.hosts, trial.started or 0.0)
    except OSError as error:
        raise ConfigError(
            f"{folder.path}: the end of trial {trial.number} cannot be written ({error.strerror or error}). See to the "
            "disk; the same command goes on"
        ) from error
