"""Runs short trainings, trials of the tuner and points of experiments: on this machine, one at a time, or side by side
as steps on nodes of their own in an allocation.

A run ends alone, whatever it does, and none outlives its starter: it has a limit, a longest time between two steps, and
maybe a limit of memory. When one fails on nodes of an allocation Slurm is asked about these; those that are dead are
left out from then on, and the run is no answer.
"""
from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron.config.duration import duration_s, show_duration
from megatron.data.folder_claim import LOCK_NAME
from megatron.errors import ConfigError, DataError
from megatron.jobs.endings import CRASH, HANG, LOST_RANK, OUT_OF_MEMORY, TIME_OUT, Ending, cause, ending
from megatron.jobs.nodes import Inquiry, Nodes
from megatron.jobs.processes import GRACE_S, Run, Step, logs_of, slurm_command, start_here, start_step, training_command
from megatron.jobs.scaling import METRICS, POINT, RESULT
from megatron.metrics_file import read_records
from megatron.parallel.environment import job_name
from megatron.parallel.slurm import ask_slurm

SLACK, START_UP_S = 3.0, 300.0
"""Longest time of a run: factor of its predicted steps; and start of Python, rendezvous, the first collectives.
Limits and no guesses."""
TIME, ALLOCATION = "time is up", "the allocation ends"
"""Why `Runner.run` ends before its source has nothing left; else the name of a signal."""
_POLL_S = 0.2
_LOOK_S = 30.0  # between two questions to Slurm, which cost the scheduler something
_LEAST_STALL_S, _SLOWER = 60.0, 10.0  # a step hangs after so long, and so many times any step before or predicted
_EXIT_S = 30.0  # from the last record to the end of the processes
_LONGEST_GAP_S = 5.0  # that one pause between two looks counts at most: a whole job may have been suspended meanwhile
_FULL = 0.95  # of a memory limit
# What a first rank says whose port another program has (parallel/meeting.py), which says nothing about the layout.
_PORT_TAKEN = "cannot serve port"
_STARTS, _OTHER_PORT = 3, 331
_MOST_LOST = 2  # nodes may die under a run; more often than that it is the layout that takes them along
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Place:
    """Where runs are. hosts: nodes that are free for them, () for this machine alone; parallel: most runs at once;
    memory_limit_bytes: that each process may take of the host's memory, None: no limit."""

    launcher: str
    hosts: tuple[str, ...] = ()
    parallel: int = 1
    memory_limit_bytes: int | None = None


@dataclass(frozen=True)
class Job:
    """A short training to be run.

    name      for messages and Slurm; folder: of its files; point: what goes into its point.json,
              with the hosts that it is on
    flags     of pretrain_gpt.py, without the place of the metrics file; steps: that it takes in all
    limit_s   longest time in all; stall_s: without a new step, None: by the steps before and step_s, the predicted one
    """

    name: str
    folder: Path
    point: Mapping[str, Any]
    flags: Sequence[str]
    processes: int
    nodes: int
    steps: int
    limit_s: float
    stall_s: float | None = None
    step_s: float | None = None


@dataclass(frozen=True)
class End:
    """How a run ended. why: None where nothing says that it ended badly, and where it was interrupted.

    complete     all steps are recorded
    interrupted  what ended it instead of itself, so that it is to run again: a signal, a dead node, the allocation
    """

    job: Job
    hosts: tuple[str, ...]
    started: float
    ended: float
    exit_codes: Sequence[int] | None
    complete: bool
    why: Ending | None = None
    interrupted: str = ""

    def note(self, record: Mapping[str, Any]) -> None:
        """Write its result.json: these figures, and where and how it ran. Raises ConfigError."""
        more = {"exit_code": cause(self.exit_codes), "started": self.started, "ended": self.ended,
                "hosts": list(self.hosts)}  # fmt: skip
        with _disk(self.job):
            write_json(self.job.folder / RESULT, {**record, **more})


class Source(Protocol):
    """What a runner asks for jobs, and tells how they ended."""

    def next(self, runner: Runner) -> Job | None:
        """The job that is to be started now, for which there is room; None: none now."""

    def ended(self, end: End) -> None: ...


@dataclass
class _Running:
    job: Job
    hosts: tuple[str, ...]
    started: float
    run: Run
    watch: Watch
    starts: int = 0
    stopped: Ending | None = None
    interrupted: str = ""
    failed: Ending | None = None
    inquiry: Inquiry | None = None


class Runner:
    """Runs the jobs of a source; `say` gets a line for each node that is left out. left_s: seconds that are left, None
    where nobody knows."""

    def __init__(
        self, place: Place, say: Callable[[str], object] = print, *, left_s: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self.place, self.left_s, self._clock, self._sleep = place, left_s, clock, sleep
        self._nodes = Nodes(place.hosts, say)
        self._running: list[_Running] = []
        self._lost = Counter[Path]()
        self._turn, self._over = 0, False
        self.signal = ""

    @property
    def running(self) -> list[Job]:
        """Those that have not ended, in the order in which they were started."""
        return [each.job for each in self._running]

    def room(self, nodes: int) -> bool:
        """Whether so many nodes are free now."""
        if self.place.launcher == "local":
            return not self._running
        return len(self._running) < self.place.parallel and nodes <= len(self._nodes.free)

    def ever(self, nodes: int) -> bool:
        """Whether so many nodes are left, free or taken."""
        return self.place.launcher == "local" or nodes <= self._nodes.usable

    def run(self, source: Source) -> str:
        """Run until the source has nothing and nothing runs: ""; or why it ended before.

        Raises ConfigError where nothing can be started or written.
        """
        why = "an error"
        with self._signals():
            try:
                why = self._loop(source)
            finally:
                self._stop_all(source, f"interrupted by {self.signal}" if self.signal else why)
        return why

    def _loop(self, source: Source) -> str:
        while True:
            self._reap(source)
            while not self.signal and not self._over and (job := source.next(self)) is not None:
                if self.signal:  # it came while the source was thinking
                    break
                self._start(job)
            left = self.left_s()
            if self.signal or self._over:
                return self.signal or ALLOCATION
            if not self._running:
                return ""
            if left is not None and left <= 0:
                return TIME
            self._sleep(_POLL_S)

    # -- one run -------------------------------------------------------------------------------------------------------

    def _start(self, job: Job) -> None:
        """It is tied to the thread that calls this."""
        hosts = () if self.place.launcher == "local" else self._nodes.take(job.nodes)
        self._turn += 1
        with _disk(job):
            job.folder.mkdir(parents=True, exist_ok=True)
            _set_aside(job.folder)
            write_json(job.folder / POINT, {**job.point, "hosts": list(hosts)})
            self._running.append(self._launched(job, hosts, self._turn, 0))

    def _launched(self, job: Job, hosts: tuple[str, ...], turn: int, starts: int) -> _Running:
        metrics, limit = job.folder / METRICS, self.place.memory_limit_bytes
        flags = [*job.flags, "--metrics-file", str(metrics)]
        if self.place.launcher == "local":
            run = start_here(training_command(flags), job.processes, job.folder, memory_limit_bytes=limit,
                             clock=self._clock)  # fmt: skip
        else:
            # Another search or experiment may run in this Slurm job.
            name, tasks = f"{job.name}-{os.getpid()}", job.processes // job.nodes
            step = Step(name, hosts, tasks, turn + _OTHER_PORT * starts, job.limit_s, limit)
            run = start_step(slurm_command(flags), step, job.folder, clock=self._clock)
        return _Running(job, hosts, time.time(), run, Watch(job, self._clock()), starts)

    def _reap(self, source: Source) -> None:
        for each in list(self._running):
            if each.run.poll():
                self._settle(each, source)
            elif each.stopped is None and (found := each.watch.look(self._clock())) is not None:
                each.stopped = self._at_its_limit(each.run, found)
                each.run.stop()

    def _settle(self, each: _Running, source: Source) -> None:
        """Tell the source of one whose processes have ended, as soon as it is known what that means."""
        complete = False
        with contextlib.suppress(DataError):
            complete = is_complete(each.job.folder, each.job.steps)
        if each.failed is None:
            each.failed = self._why(each, complete)
            if complete or each.failed is None:
                return self._end(each, source, complete)
            taken = _PORT_TAKEN in each.failed.reason and each.stopped is None and each.starts + 1 < _STARTS
            if taken and not each.interrupted:
                with _disk(each.job):
                    again = self._launched(each.job, each.hosts, self._turn, each.starts + 1)
                self._running[self._running.index(each)] = again
                return None
            if self.place.launcher != "local" and not each.interrupted:
                if each.stopped is None and slurm_job_runs() is False:
                    self._over, each.interrupted = True, ALLOCATION  # Slurm signals steps as it does their starter
                elif os.environ.get("SLURM_JOB_ID"):
                    # Whatever it ended as: a rank whose first peer never answers refuses to go on, or hangs.
                    each.inquiry = Inquiry(each.hosts)
            if self.signal and each.failed.kind in (CRASH, LOST_RANK):  # that may have signalled the run, too
                each.interrupted = f"interrupted by {self.signal}"
        if each.inquiry is not None and not each.interrupted:
            if each.inquiry.dead is None:
                return None
            self._blame(each, each.inquiry.dead)
        return self._end(each, source, complete)

    def _blame(self, each: _Running, dead: Mapping[str, str]) -> None:
        """Some of its nodes may be dead: then that is what ended it, unless it ran out of memory, which takes nodes
        along, or nodes die under it again and again."""
        self._nodes.leave_out(dead)
        if not dead:
            return
        assert each.failed is not None, "nodes are asked for what failed"
        said = ", ".join(f"{host} {why}" for host, why in dead.items())
        self._lost[each.job.folder] += 1
        if each.failed.kind == OUT_OF_MEMORY or self._lost[each.job.folder] > _MOST_LOST:
            each.failed = Ending(each.failed.kind, f"{each.failed.reason}; {said}")
        else:
            each.interrupted = said

    def _why(self, each: _Running, complete: bool) -> Ending | None:
        limited, logs, codes = self.place.memory_limit_bytes is not None, logs_of(each.job.folder), each.run.exit_codes
        if each.stopped is not None or each.interrupted:
            said = ending(None, logs, limited=limited)  # its codes are those of our signals
            if said.kind == OUT_OF_MEMORY:
                each.interrupted = ""
                return said
            return each.stopped or said
        return ending(codes, logs, limited=limited) if any(codes or ()) or not complete else None

    def _at_its_limit(self, run: Run, found: Ending) -> Ending:
        """What stands still because it gets no more memory is out of memory, also where it says nothing: a lock that is
        never released, a thread that was never started."""
        limit = self.place.memory_limit_bytes
        if limit is None or run.memory_bytes() < _FULL * limit:
            return found
        return Ending(OUT_OF_MEMORY, f"out of memory: at its limit of {limit / 2**30:.3g} GiB, {found.reason}")

    def _end(self, each: _Running, source: Source, complete: bool) -> None:
        self._running.remove(each)
        self._nodes.give_back(each.hosts)
        interrupted = "" if complete else each.interrupted
        source.ended(End(each.job, each.hosts, each.started, time.time(), each.run.exit_codes, complete,
                         None if interrupted else each.failed, interrupted))  # fmt: skip

    # -- the end -------------------------------------------------------------------------------------------------------

    def _stop_all(self, source: Source, why: str) -> None:
        """Stop what runs and wait for its end, for seconds: interrupted, unless it had done all its steps."""
        for each in self._running:
            if each.stopped is None or each.inquiry is not None:
                each.interrupted = each.interrupted or why
            each.run.stop()
        deadline = self._clock() + 2 * GRACE_S
        while self._running:
            late = self._clock() > deadline
            for each in list(self._running):
                if late:
                    each.run.kill()
                if late or each.run.poll():
                    self._settle(each, source)
            if self._running:
                self._sleep(_POLL_S)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """A signal ends it in order; SIGHUP, which a terminal sends when it closes, not under nohup."""

        def note(number: int, _frame: object) -> None:
            self.signal = signal.Signals(number).name

        taken = [n for n in _SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        handlers = {number: signal.signal(number, note) for number in taken}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


@dataclass
class Watch:
    """Whether a run makes progress, by what it adds to its metrics file: rank 0 writes a record for each step.

    Before the first step it has the whole limit: modules are imported, kernels compiled, communicators built, and how
    long that takes depends on the machine and on how many there are.
    """

    job: Job
    _looked: float
    _ran_s: float = 0.0
    _size: int = 0
    _changed: float = 0.0
    _steps: list[float] = field(default_factory=list)
    complete: bool = False

    def look(self, now: float) -> Ending | None:
        """Why it is to be stopped; None while it is well. now: seconds of the clock by which it began."""
        self._ran_s += min(now - self._looked, _LONGEST_GAP_S)
        self._looked = now
        metrics, size = self.job.folder / METRICS, 0
        with contextlib.suppress(OSError):
            size = metrics.stat().st_size
        if size != self._size:
            self._size, self._changed = size, self._ran_s
            with contextlib.suppress(DataError):
                records = read_records(metrics)
                self._steps = [float(r.get("step_time_s") or 0.0) for r in records if r["event"] == "iteration"]
                self.complete = _all_done(records, self.job.steps)
        if self.complete:
            return None if self._ran_s < self._changed + _EXIT_S else Ending(HANG, "did not end after its last step")
        where = f"after step {len(self._steps)} of {self.job.steps}" if self._steps else "before its first step"
        if self._ran_s > self.job.limit_s:
            return Ending(TIME_OUT, f"stopped after its limit of {show_duration(self.job.limit_s)}, {where}")
        patience_s = self.job.stall_s or max(_LEAST_STALL_S, _SLOWER * max([*self._steps, self.job.step_s or 0.0]))
        if self._steps and self._ran_s > self._changed + patience_s:
            return Ending(HANG, f"no step in {show_duration(self._ran_s - self._changed)}, {where}")
        return None


# -- folders -----------------------------------------------------------------------------------------------------------


def is_complete(folder: Path, steps: int) -> bool:
    """Whether the metrics file of a folder tells of all steps up to the end. Raises DataError."""
    return (folder / METRICS).is_file() and _all_done(read_records(folder / METRICS), steps)


def _all_done(records: Sequence[Mapping[str, Any]], steps: int) -> bool:
    ends = [r for r in records if r["event"] == "end"]
    return bool(ends) and ends[-1].get("reason") == "done" and ends[-1].get("iteration") == steps


def _set_aside(folder: Path) -> None:
    """Move what an earlier attempt left in a folder into one of its own there, attempt-1, attempt-2, ..."""
    old = [p for p in folder.iterdir() if not p.name.startswith(("attempt-", LOCK_NAME))]
    if old:
        attempts = (folder / f"attempt-{n}" for n in itertools.count(1))  # somebody may have removed some
        aside = next(path for path in attempts if not path.exists())
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file so that a reader finds the old one or the new one, whole, also after the node went down."""
    part = path.with_suffix(".part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@contextlib.contextmanager
def _disk(job: Job) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{job.name} cannot be started or noted in {job.folder}: {error.strerror or error}. See to "
                          "the disk or the machine; the same command goes on") from error  # fmt: skip


# -- the allocation ----------------------------------------------------------------------------------------------------


def time_left(
    walltime_s: float | None, allocation_s: Callable[[], float | None], reserve_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[], float | None]:  # fmt: skip
    """Seconds left: of `walltime_s` from now on, and of the allocation less a reserve for the end. Where nobody answers
    (None) the answer before holds."""
    end = None if walltime_s is None else clock() + walltime_s
    asked: float | None = None
    allocation_end: float | None = None

    def left_s() -> float | None:
        nonlocal asked, allocation_end
        if asked is None or clock() - asked > _LOOK_S:
            answer, asked = allocation_s(), clock()
            allocation_end = allocation_end if answer is None else asked + answer - reserve_s
        ends = [each for each in (end, allocation_end) if each is not None]
        return min(ends) - clock() if ends else None

    return left_s


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
