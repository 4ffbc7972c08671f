"""Run short trainings (trials of the tuner, points of experiments).

On a single machine they run one at a time; in a Slurm job they run side by side as job steps, on
separate nodes. A failed run does not end the others, and no run outlives the process that started
it. Each run has a time limit, and a limit on the time between two training steps. When a run fails
inside a Slurm job, its nodes are tested; nodes that do not respond are left out from then on, and
the run is repeated on other nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.config.duration import duration_s, show_duration
from megatron.config.option import MOST_PROCESSES, integer
from megatron.data.file_lock import LOCK_NAME, renamed_into
from megatron.errors import ConfigError, DataError
from megatron.jobs.result import (
    CRASH,
    DONE,
    FAILED,
    HANG,
    LOST_RANK,
    OUT_OF_MEMORY,
    RUNNING,
    STOPPED,
    TIME_OUT,
    Ending,
    Result,
    all_done,
    cause,
    ending,
    is_complete,
    valid_losses,
)
from megatron.jobs.run_processes import (
    GRACE_S,
    RunProcesses,
    SlurmStep,
    logs_of,
    slurm_command,
    start_here,
    start_step,
    training_command,
)
from megatron.jobs.scaling import METRICS, POINT, RESULT
from megatron.metrics_file import read_records
from megatron.parallel.environment import ask_slurm, job_name
from megatron.training.run.process import SIGNALS, handled_signals
from megatron.untrusted import read_text

SLACK = 3.0
START_UP_S = 300.0
"""Time limit for a run: factor applied to its predicted time, and seconds for start-up."""
TIME = "time is up"
ALLOCATION = "the allocation ends"
"""Reasons why `Runner.run` ended before its source was exhausted; another is a signal's name."""
_POLL_S = 0.2
# a step counts as hung after this many seconds or, if that is longer, this multiple of the longest
# step (so far, or as predicted)
_LEAST_STALL_S = 60.0
_SLOWER = 10.0
_EXIT_S = 30.0  # allowed from the last record to the end of the processes
_MOST_LOST = 2  # attempts that a run may lose to dead nodes; the next loss is its result


Say = Callable[[str], object]
"""Function that receives a line for users."""


@dataclass(frozen=True)
class LaunchTarget:
    """Machine and nodes on which runs are started.

    launcher  local or slurm
    hosts     nodes of the allocation; () for this machine
    parallel  maximum number of runs at the same time
    """

    launcher: str
    hosts: tuple[str, ...] = ()
    parallel: int = 1


def add_launch_flags(group: argparse._ArgumentGroup, launcher: str | None) -> None:
    """Add the flags of a tool that starts runs; `launcher` is the default."""
    group.add_argument(
        "--launcher",
        choices=("local", "slurm"),
        default=launcher,
        help=f"how runs are started (default: {launcher or 'slurm inside an allocation, else local'})",
    )
    group.add_argument(
        "--hosts-file",
        type=Path,
        metavar="FILE",
        help="slurm: file with the nodes to use, one per line",
    )
    count = integer(1, MOST_PROCESSES)
    group.add_argument(
        "--tasks-per-node",
        type=count,
        metavar="N",
        help="slurm: processes per node (default: devices per node of the cluster)",
    )
    group.add_argument(
        "--nodes",
        type=count,
        metavar="N",
        help="slurm: nodes of the allocation, for --dry-run without --hosts-file",
    )


def read_hosts(file: Path | None) -> tuple[str, ...]:
    """Return the nodes that --hosts-file lists. Raises ConfigError."""
    if file is None:
        raise ConfigError(
            "no nodes: give --hosts-file FILE inside an allocation, as the scripts in "
            "examples/frontier do; --launcher local runs on this machine, --dry-run shows what "
            "would run"
        )
    hosts = tuple(read_text(file, 1 << 24, error=ConfigError).split())
    if not hosts:
        raise ConfigError(f"--hosts-file {file} is empty: give each node once, one per line")
    if len(set(hosts)) < len(hosts):
        twice = next(host for host in hosts if hosts.count(host) > 1)
        raise ConfigError(
            f"--hosts-file {file} has {twice} more than once: give each node once, one per line"
        )
    return hosts


@dataclass(frozen=True)
class Job:
    """A short training to run.

    name      for messages and Slurm; folder: for its files; point: contents of its point.json, to
              which the hosts are added
    flags     for pretrain_gpt.py, without --metrics-file; steps: total optimizer steps
    processes, nodes  numbers of processes and nodes
    limit_s   total time limit; stall_s: longest time without a new step, None: derived from earlier
              steps and step_s, the predicted time per step
    stops     decides from the validation losses so far whether to stop the run; None: never
    """

    name: str
    folder: Path
    point: Mapping[str, object]
    flags: Sequence[str]
    processes: int
    nodes: int
    steps: int
    limit_s: float
    stall_s: float | None = None
    step_s: float | None = None
    stops: Callable[[Sequence[float]], bool] | None = None


@dataclass
class Attempt:
    """A started job with its outcome.

    hosts           its nodes; () on this machine
    run, watch      its processes and their monitor
    started, ended  seconds since the epoch (1970)
    stopped         why it was stopped: a limit that it exceeded, or its validation loss
    complete        whether all steps are recorded
    why             why it failed; None if it succeeded or was interrupted. A complete run counts as
                    successful whatever this says
    interrupted     external cause of its end (a signal, a dead node, the allocation's end), after
                    which it is repeated
    inquiry         test of its nodes, if it failed inside a Slurm job
    """

    job: Job
    hosts: tuple[str, ...]
    run: RunProcesses
    watch: Watch
    started: float = field(default_factory=time.time)
    ended: float = 0.0
    stopped: Ending | None = None
    complete: bool = False
    why: Ending | None = None
    interrupted: str = ""
    inquiry: Inquiry | None = None

    def note(self, record: Mapping[str, object]) -> None:
        """Write result.json: this record, exit code, times and nodes. Raises ConfigError."""
        circumstances = {
            "exit_code": cause(self.run.exit_codes),
            "started": self.started,
            "ended": self.ended,
            "hosts": self.hosts,
        }
        with _disk(self.job):
            write_json(self.job.folder / RESULT, {**record, **circumstances})


class JobSource:
    """A source of jobs for a runner, with a record of their results.

    results   by the names of the jobs' folders; RUNNING for a job that will run again
    finished  folder names of the jobs that have ended since the start without interruption
    """

    def __init__(self, say: Say) -> None:
        self.say = say
        self.results = dict[str, Result]()
        self.finished = list[str]()

    def next(self, runner: Runner) -> Job | None:
        """Return a job to start now, which fits on the free nodes; None if there is none."""
        raise NotImplementedError

    def figures(self, job: Job) -> Result:
        """Return the result of a job that completed all its steps."""
        return Result(DONE)

    def report(self, end: Attempt, result: Result) -> None:
        """Report how a job ended; if `result` has no status, the job will run again."""

    def ended(self, end: Attempt) -> None:
        """Record the end of a job. Raises ConfigError if it cannot be written."""
        result = RUNNING
        folder = end.job.folder
        if not end.interrupted:
            if end.complete or end.why is None:
                result = self.figures(end.job)
            else:
                result = Result(FAILED, end.why.kind, end.why.reason)
            end.note(vars(result))
            self.finished.append(folder.name)
        self.results[folder.name] = result
        self.report(end, result)


class Runner:
    """Runs the jobs from a source.

    target  where to run them
    say     called with one line for each node that is left out
    left_s  returns the seconds left; None if unknown
    clock   returns the time in seconds
    sleep   waits for a number of seconds
    signal  name of the signal that ends the run; "" if there was none
    """

    def __init__(
        self,
        target: LaunchTarget,
        say: Say = print,
        *,
        left_s: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.target = target
        self.left_s = left_s
        self._clock = clock
        self._sleep = sleep
        self._local = target.launcher == "local"
        self._nodes = Nodes(target.hosts, say)
        self._running: list[Attempt] = []
        self._lost = Counter[Path]()
        self._turn = 0
        self._over = False
        self.signal = ""

    def room(self, nodes: int) -> bool:
        """Return whether a job on this many nodes can start now."""
        if self._local:
            return not self._running
        return len(self._running) < self.target.parallel and nodes <= len(self._nodes.free)

    def ever(self, nodes: int) -> bool:
        """Return whether a job on this many nodes can start now or later."""
        return self._local or nodes <= self._nodes.usable

    def run(self, source: JobSource) -> str:
        """Run until the source is exhausted; return "", or why it ended earlier.

        Raises ConfigError if jobs cannot be started or files cannot be written.
        """
        why = "an error"
        with handled_signals(SIGNALS, self._note):
            try:
                why = self._loop(source)
            finally:
                self._stop_all(source, f"interrupted by {self.signal}" if self.signal else why)
        return why

    def _loop(self, source: JobSource) -> str:
        while True:
            for each in list(self._running):
                if each.run.poll():
                    self._settle(each, source)
                elif each.stopped is None and (limit := each.watch.look(self._clock())) is not None:
                    each.stopped = limit
                    each.run.stop()
            while not self.signal and not self._over and (job := source.next(self)) is not None:
                if self.signal:  # received while the source was busy
                    break
                self._start(job)
            if self.signal or self._over:
                return self.signal or ALLOCATION
            if not self._running:
                return ""
            left = self.left_s()
            if left is not None and left <= 0:
                return TIME
            self._sleep(_POLL_S)

    # -- one run -----------------------------------------------------------------------------------

    def _start(self, job: Job) -> None:
        """Start a job; on this machine its processes end with the calling thread."""
        hosts = () if self._local else self._nodes.take(job.nodes)
        flags = [*job.flags, "--metrics-file", str(job.folder / METRICS)]
        self._turn += 1
        with _disk(job):
            job.folder.mkdir(parents=True, exist_ok=True)
            # move files of an earlier attempt into the subfolder attempt-1, attempt-2, ...
            names = ("attempt-", LOCK_NAME)
            old = [path for path in job.folder.iterdir() if not path.name.startswith(names)]
            if old:
                # some subfolders may have been removed, so take the first free name
                attempts = (job.folder / f"attempt-{n}" for n in itertools.count(1))
                aside = next(path for path in attempts if not path.exists())
                aside.mkdir()
                for path in old:
                    path.rename(aside / path.name)
            write_json(job.folder / POINT, {**job.point, "hosts": list(hosts)})
            if self._local:
                run = start_here(training_command(flags), job.processes, job.folder, self._clock)
            else:
                # Another search or experiment may be running in this Slurm job, so step names
                # include our process ID.
                name = f"{job.name}-{os.getpid()}"
                tasks = job.processes // job.nodes
                step = SlurmStep(name, hosts, tasks, self._turn, job.limit_s)
                run = start_step(slurm_command(flags), step, job.folder, self._clock)
        self._running.append(Attempt(job, hosts, run, Watch(job, self._clock())))

    def _settle(self, each: Attempt, source: JobSource) -> None:
        """Notify the source of a run's end, once the cause of the end is known."""
        if each.why is None:
            with contextlib.suppress(DataError):
                each.complete = is_complete(each.job.folder, each.job.steps)
            each.why = self._why(each)
            if each.why is not None and not each.complete:
                if not self._local and not each.interrupted:
                    if each.stopped is None and _squeue("%T") not in (None, "RUNNING"):
                        # at an allocation's end Slurm signals the steps as well as this process
                        self._over = True
                        each.interrupted = ALLOCATION
                    elif os.environ.get("SLURM_JOB_ID") and each.why.kind != STOPPED:
                        each.inquiry = Inquiry(each.hosts)
                # the run may have received the same signal as this process
                if self.signal and each.why.kind in (CRASH, LOST_RANK):
                    each.interrupted = f"interrupted by {self.signal}"
        if each.inquiry is not None and not each.interrupted:
            if each.inquiry.dead is None:
                return
            self._attribute_failure(each, each.inquiry.dead)
        self._running.remove(each)
        self._nodes.give_back(each.hosts)
        each.ended = time.time()
        each.interrupted = "" if each.complete else each.interrupted
        each.why = None if each.interrupted else each.why
        source.ended(each)

    def _why(self, each: Attempt) -> Ending | None:
        logs = logs_of(each.job.folder)
        codes = each.run.exit_codes
        if each.stopped is None and not each.interrupted:
            return ending(codes, logs) if any(codes or ()) or not each.complete else None
        message = ending(None, logs)  # its exit codes come from our signals
        if message.kind == OUT_OF_MEMORY:
            each.interrupted = ""
            return message
        return each.stopped or message

    def _attribute_failure(self, each: Attempt, dead: Sequence[str]) -> None:
        """Attribute a failure to the run's dead nodes.

        Exceptions are runs that ran out of memory, which can take down nodes, and runs whose nodes
        die again and again.
        """
        self._nodes.leave_out(dead)
        if not dead:
            return
        assert each.why is not None, "only nodes of failed runs are tested"
        message = f"{', '.join(dead)} did not respond"
        self._lost[each.job.folder] += 1
        if each.why.kind == OUT_OF_MEMORY or self._lost[each.job.folder] > _MOST_LOST:
            each.why = Ending(each.why.kind, f"{each.why.reason}; {message}")
        else:
            each.interrupted = message

    # -- the end -----------------------------------------------------------------------------------

    def _stop_all(self, source: JobSource, why: str) -> None:
        """Stop all runs and wait up to 2 GRACE_S; those with steps left count as interrupted."""
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

    def _note(self, number: int) -> None:
        self.signal = signal.Signals(number).name


@dataclass
class Watch:
    """Monitors a run's metrics file, to which rank 0 writes a record for each step.

    Before the first step, only the total limit applies: the time for imports, kernels and
    communicators depends on the machine and the number of ranks.
    """

    job: Job
    _begun: float
    _changed: float = 0.0
    _size: int = 0
    _steps: list[float] = field(default_factory=list)
    _complete: bool = False

    def look(self, now: float) -> Ending | None:
        """Return why the run must be stopped, or None. now: seconds on the runner's clock."""
        metrics = self.job.folder / METRICS
        size = 0
        with contextlib.suppress(OSError):
            size = metrics.stat().st_size
        if size != self._size:
            self._size = size
            self._changed = now
            with contextlib.suppress(DataError):
                records = read_records(metrics)
                self._steps = [
                    float(r.get("step_time_s") or 0.0) for r in records if r["event"] == "iteration"
                ]
                self._complete = all_done(records, self.job.steps)
                losses = valid_losses(records)
                if self.job.stops is not None and not self._complete and self.job.stops(losses):
                    return Ending(STOPPED, f"its validation loss is {losses[-1]:.4g}")
        still_s = now - self._changed
        if self._complete:
            return Ending(HANG, "did not end after its last step") if still_s > _EXIT_S else None
        done = len(self._steps)
        where = f"after step {done} of {self.job.steps}" if done else "before its first step"
        if now - self._begun > self.job.limit_s:
            return Ending(
                TIME_OUT, f"stopped after its limit of {show_duration(self.job.limit_s)}, {where}"
            )
        patience_s = self.job.stall_s or max(
            _LEAST_STALL_S, _SLOWER * max([*self._steps, self.job.step_s or 0.0])
        )
        if self._steps and still_s > patience_s:
            return Ending(HANG, f"no step in {show_duration(still_s)}, {where}")
        return None


# -- folders ---------------------------------------------------------------------------------------


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a file atomically and durably, so that it survives even if the node goes down."""
    with renamed_into(path) as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")


@contextlib.contextmanager
def _disk(job: Job) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{job.name} cannot be started or recorded in {job.folder}: {error.strerror or error}. "
            "Check the disk and the machine, then resume with the same command"
        ) from error


# -- the allocation --------------------------------------------------------------------------------


def time_left(
    walltime_s: float | None,
    allocation_s: Callable[[], float | None],
    reserve_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[], float | None]:
    """Return a function that returns the seconds left, or None if both limits are unknown.

    The limits are `walltime_s` from now on, and `reserve_s` before the end of the allocation; the
    earlier one counts.
    """
    begun = clock()
    left_s = allocation_s()
    known = [] if walltime_s is None else [walltime_s]
    known += [] if left_s is None else [left_s - reserve_s]
    return lambda: begun + min(known) - clock() if known else None


def slurm_time_left_s() -> float | None:
    """Return the seconds left in this Slurm job; None outside of a job, or if unknown."""
    return duration_s(_squeue("%L") or "")


def _squeue(what: str) -> str | None:
    """Return squeue's answer about this job; None if there is no job or no answer.

    The answer is empty if the job has ended.
    """
    job = job_name(os.environ)
    if not job:
        return None
    try:
        done = ask_slurm("squeue", "-h", "-j", job, "-o", what, timeout_s=30)
    except (OSError, subprocess.SubprocessError):
        return None
    unknown = "Invalid job id" in done.stderr  # the job has ended
    return done.stdout.strip() if done.returncode == 0 or unknown else None


_ANSWER_S = 60.0  # time for a node to start a task that only prints its name


class Nodes:
    """Free nodes and excluded nodes; `say` is called with one line for each excluded node."""

    def __init__(self, hosts: Sequence[str], say: Say) -> None:
        self._hosts = tuple(hosts)
        self._say = say
        self.free = list(hosts)
        self._out = set[str]()

    @property
    def usable(self) -> int:
        """Return the number of usable nodes, free or in use."""
        return len(self._hosts) - len(self._out)

    def take(self, count: int) -> tuple[str, ...]:
        """Take the first free nodes, which are neighbours if the list is in network order."""
        hosts = tuple(self.free[:count])
        self.free = self.free[count:]
        return hosts

    def give_back(self, hosts: Iterable[str]) -> None:
        """Return nodes to the free list, in its original order, except those that are left out."""
        free = {*self.free, *hosts} - self._out
        self.free = [host for host in self._hosts if host in free]

    def leave_out(self, dead: Iterable[str]) -> None:
        """Leave nodes out permanently."""
        for host in dead:
            if host in self._hosts and host not in self._out:
                self._out.add(host)
                self._say(
                    f"{host} does not respond and is left out from now on; {self.usable} of "
                    f"{len(self._hosts)} node(s) remain"
                )
        self.give_back(())


class Inquiry:
    """Tests in a separate thread which of the given nodes in this job are dead.

    dead: nodes that cannot start a task while another node can; None until known. If no node can,
    the fault lies with Slurm and no node counts as dead: the failure is attributed to the run.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = set(hosts)
        self.dead: list[str] | None = None
        threading.Thread(target=self._ask, name="nodes", daemon=True).start()

    def _ask(self) -> None:
        dead = set[str]()
        try:
            # Our own node always responds if steps can be started at all.
            here = {os.environ.get("SLURMD_NODENAME", "")} - {""}
            answered = self.answers(self._hosts | here)
            if answered:
                # Test again: srun starts tasks through other nodes, and a busy node may receive a
                # credential too late.
                silent = self._hosts - answered
                dead = silent - self.answers(silent)
        except OSError:  # srun cannot be started here
            pass
        finally:
            self.dead = sorted(dead)

    def answers(self, hosts: Iterable[str]) -> set[str]:
        """Return the nodes that can start a task: a step on each node prints the node's name.

        Raises OSError if srun cannot be started.
        """
        step = "srun -N 1 -n 1 -c 1 --overlap --time=3 --job-name=nodes -w".split()
        probes = [
            subprocess.Popen(
                [*step, host, "bash", "-c", 'echo "answers $SLURMD_NODENAME"'],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            for host in hosts
        ]
        answered = set[str]()
        deadline = time.monotonic() + _ANSWER_S
        for probe in probes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                message = probe.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
                answered.update(re.findall(r"^answers (\S+)$", message, re.MULTILINE))
            probe.kill()
        return answered
