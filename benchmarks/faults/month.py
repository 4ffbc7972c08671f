"""A month of faults in compressed time: runs that meet them, and what they cost.

Faults are drawn from the published rates of a large run (megatron/planner/faults.toml) for a month
of 1,024 nodes, and laid over the steps of a small run: what takes hours between two faults there
takes some steps here. Each is injected by the process that it hits, when it completes the step: in
its training process, in its supervisor, in its connections, in its weights, in files. The job
restarts within itself; if it ends, it is started again, as a scheduler would.

The processes are on one machine; the names of their nodes are not its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import itertools
import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults import disk, history
from benchmarks.faults.job import CONSTANT, FaultJob, JobOutcome, run_well, training
from benchmarks.faults.kills import differences
from benchmarks.faults.month_report import compare, predicted_run, timeline
from megatron.errors import EXIT_LOST_RANK
from megatron.planner.faults import KINDS, fault_rates
from tests.helpers.poison import flip_bit

STEP = "megatron.run.step"
MET = "megatron.parallel.met"
MOMENTS = {
    "step": (STEP,),
    "save": ("megatron.checkpoint.synced", "megatron.checkpoint.local"),
    "restart": ("megatron.parallel.leaving_groups", MET, "megatron.parallel.group"),
}
"""Audit events at which faults occur, by the kind of moment."""
FLIPS = ("weight", "memory", "disk")
SOURCE = "llama3"
NODES = 1024  # of the run whose month is drawn
RANKS = 4
SPARES = 2
SAVE_INTERVAL = 50
LOCAL_INTERVAL = 5
GAP = 60  # steps between two faults, on average
SLOW_STEPS = 20
SLOW_S = 0.05
FULL_STEPS = SAVE_INTERVAL + 5  # after which there is room on the disk again
LEVEL_STEP = 3  # step of each generation after which a process notes what it holds
MOST_STARTS = 200
JOB_LIMIT_S = 1800.0
HANG_TIMEOUT_S = 3.0
OTHERS_LEAVE_S = 60.0
LEAVE_S = 5.0  # time in which the processes of a job have to end after their supervisors
MORE_HELD = 3  # descriptors or threads that a process may hold at one time and not at another
NO_SPACE = os.strerror(errno.ENOSPC)
MOST_KIB = 300  # memory by which each restart may enlarge a process that survives it
LAYOUT = ("--pipeline-model-parallel-size", "2", "--zero-stage", "0")


@dataclass(frozen=True)
class Fault:
    """A fault that the rank `victim` meets when it completes the step, or soon after.

    moment  "step": at once; "save": during the next save; "restart": during the restart that the
            death of another process then causes
    flip    of a corruption: what is damaged, a weight, this rank's memory of local checkpoints or
            the newest checkpoint on disk
    """

    number: int
    step: int
    kind: str
    victim: int
    moment: str = "step"
    flip: str = ""

    @property
    def event(self) -> str:
        """Audit event at which it occurs."""
        events = MOMENTS[self.moment]
        return events[self.number % len(events)]


def draw(chance: random.Random, days: float, ranks: int) -> list[Fault]:
    """Return the faults of so many days of NODES nodes, in the order of their steps.

    Cases that the draw lacks are added once, so that all are tried: every kind, every flip, the
    loss of the store, and a process that dies during a save and each phase of a restart.
    """
    rates = fault_rates(SOURCE)
    total = sum(rates.values()) * NODES
    cases: list[dict[str, Any]] = []
    at = chance.expovariate(total)
    while at < days:
        (kind,) = chance.choices(list(rates), list(rates.values()))
        cases.append({"kind": kind, "victim": chance.randrange(ranks)})
        at += chance.expovariate(total)
    flips = itertools.cycle(FLIPS)
    for case in cases:
        if case["kind"] == "corruption":
            case["flip"] = next(flips)
    must: list[dict[str, Any]] = [{"kind": kind} for kind in KINDS if kind != "corruption"]
    must += [{"kind": "corruption", "flip": flip} for flip in FLIPS]
    must += [{"kind": "node", "victim": 0}]  # which serves the store
    for moment, events in MOMENTS.items():
        if moment != "step":
            must += [{"kind": "process", "moment": moment} for _ in events]
    for case in must:
        if not any(case.items() <= one.items() for one in cases) or "moment" in case:
            cases.append({"victim": chance.randrange(ranks), **case})
    chance.shuffle(cases)
    step = 1
    faults: list[Fault] = []
    for number, case in enumerate(cases):
        step += 1 + int(chance.expovariate(1 / GAP))
        faults.append(Fault(number, step, **case))
    return faults


# -- in the processes of the job -------------------------------------------------------------------


def join(task: int, folder: str, checkpoints: str, faults: Sequence[Fault], fills: bool) -> None:
    """Make this process a task on a node of its own, whose training processes meet the faults.

    folder       of the files that mark what has happened
    checkpoints  folder that the job saves to
    fills        whether it is a small file system, which may be filled
    """
    node = f"virtual{task:02}"
    os.environ |= {"SLURMD_NODENAME": node, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    injection = _Injection(node, folder, checkpoints, faults, fills)
    setup: Any = importlib.import_module("megatron.training.run.setup")
    plain = setup.train

    def train(run: Any) -> Any:
        injection.run = run
        try:
            return plain(run)
        finally:
            injection.run = None

    setup.train = train
    sys.addaudithook(injection)


@dataclass(eq=False)
class _Injection:
    """Audit hook that lets the faults occur; processes that are forked inherit it."""

    node: str
    folder: str
    checkpoints: str
    faults: Sequence[Fault]
    fills: bool
    slow_until: int = 0
    rank: int = -1
    run: Any = None

    def __post_init__(self) -> None:
        self.freed = {f.step + FULL_STEPS for f in self.faults if f.kind == "storage"}
        self.at_step = {f.step: f for f in self.faults}
        self.delayed = [f for f in self.faults if f.moment != "step"]
        self.events = {event for events in MOMENTS.values() for event in events}
        self.steps_since_met = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in self.events:
            return
        if event == MET:
            self.rank = arguments[0].launch.rank
            self.steps_since_met = 0
        elif event == STEP:
            self._step(arguments[0])
        for fault in self.delayed:
            # Not every rank writes files.
            hit = fault.moment == "save" or fault.victim == self.rank
            if event == fault.event and hit and self._is_due(fault):
                self._meet(fault)

    def _step(self, iteration: int) -> None:
        self.steps_since_met += 1
        if self.steps_since_met == LEVEL_STEP:
            self._note_resources()
        if iteration <= self.slow_until:
            time.sleep(SLOW_S)
        if iteration in self.freed:
            self._filler.unlink(missing_ok=True)
        if os.path.exists(f"{self.folder}/broken_{self.node}"):
            Path(self.folder, f"again_{time.time()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        fault = self.at_step.get(iteration)
        if fault is None or os.path.exists(self._marker(fault)):
            return
        if fault.moment == "step":
            if fault.victim == self.rank:
                self._meet(fault)
        elif self.rank == (fault.victim + 1) % RANKS and not self._is_due(fault):
            self._mark(fault, "due")
            if fault.moment == "restart":
                os.kill(os.getpid(), signal.SIGKILL)

    def _marker(self, fault: Fault, what: str = "fault") -> Path:
        return Path(self.folder, f"{what}_{fault.number:03}")

    def _is_due(self, fault: Fault) -> bool:
        return self._marker(fault, "due").exists() and not self._marker(fault).exists()

    def _mark(self, fault: Fault, what: str = "fault") -> bool:
        """Write when a fault occurs, or that it is due; return whether no process has done so."""
        unfinished = Path(self.folder, f"unfinished_{os.getpid()}")
        unfinished.write_text(json.dumps({"time": time.time(), **dataclasses.asdict(fault)}))
        try:
            os.link(unfinished, self._marker(fault, what))
        except FileExistsError:
            return False
        finally:
            unfinished.unlink()
        return True

    def _note_resources(self) -> None:
        """Append what this process holds: descriptors, threads and KiB of memory."""
        held = [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]
        held.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4)
        with open(f"{self.folder}/held_{self.node}_{os.getpid()}", "a") as file:
            file.write(json.dumps(held) + "\n")

    def _meet(self, fault: Fault) -> None:
        if fault.kind == "device":
            Path(self.folder, f"broken_{self.node}").touch()
        if not self._mark(fault):
            return
        if fault.kind in ("process", "device"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "node":  # the kernel ends this process, too
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        elif fault.kind == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "maintenance":
            os.kill(os.getppid(), signal.SIGTERM)
        elif fault.kind == "slow":
            self.slow_until = fault.step + SLOW_STEPS
        elif fault.kind == "network":
            _close_connections()
        elif fault.kind == "corruption":
            self._flip(fault.flip)
        elif fault.kind == "storage" and self.fills:
            with contextlib.suppress(OSError), open(self._filler, "wb", 0) as full:
                while True:
                    full.write(bytes(1 << 12))

    @property
    def _filler(self) -> Path:
        return Path(self.checkpoints, "filler")

    def _flip(self, what: str) -> None:
        """Flip bits. Processes that need what was damaged in memory and on disk then end."""
        if what == "weight":
            self.run.engine.wait_for_weights()
            flip_bit(max(self.run.chunks.parameters(), key=lambda one: one.numel()))
        elif what == "memory":
            _damage_memory()
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            files = sorted(Path(self.checkpoints).glob("iter_" + "[0-9]" * 7 + "/*.distcp"))
            if files:
                content = bytearray(files[-1].read_bytes())
                content[len(content) // 2] ^= 1
                files[-1].write_bytes(content)
            for supervisor in _siblings(os.getppid()):
                os.kill(supervisor, signal.SIGKILL)
            signal.pause()


def _damage_memory() -> None:
    """Flip a bit in every page of the memory in which this rank's local checkpoints are."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "megatron-state" in os.readlink(f"/proc/self/fd/{name}"):
                for page in range(0, os.fstat(int(name)).st_size, 4096):
                    (value,) = os.pread(int(name), 1, page + 1000)
                    os.pwrite(int(name), bytes([value ^ 1]), page + 1000)


def _siblings(process: int) -> list[int]:
    """Return the IDs of a process and of all others with the same parent, that process last."""
    parents = dict[int, str]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = (folder / "stat").read_text().rpartition(")")[2].split()[1]
    others = [one for one in parents if parents[one] == parents[process] and one != process]
    return [*others, process]


def _close_connections() -> None:
    """Shut down all connections of this process, and that of its supervisor to the store.

    Their node is then cut off.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                one.getpeername()  # fails for a socket that listens
                one.shutdown(socket.SHUT_RDWR)


# -- the job ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """One start of the job.

    begun, ended  seconds since 1970
    codes         exit codes of its processes
    left          processes and files in shared memory that it has left behind
    """

    begun: float
    ended: float
    codes: tuple[int, ...]
    left: tuple[str, ...] = ()


def arguments(save: Path, metrics: Path, last: int) -> list[str]:
    metrics.mkdir(parents=True, exist_ok=True)
    more = [*LAYOUT, *CONSTANT, "--async-save", "--keep-last", "3"]
    more += ["--metrics-file", str(metrics / "metrics.jsonl")]
    return training(save, last, SAVE_INTERVAL, *more)


def supervised() -> list[str]:
    """Return the flags of a job that restarts within itself."""
    flags = {
        "--max-restarts": 1000,
        "--spare-ranks": SPARES,
        "--non-persistent-save-interval": LOCAL_INTERVAL,
        "--hang-timeout": HANG_TIMEOUT_S,
        "--distributed-timeout-minutes": OTHERS_LEAVE_S / 60,
    }
    return [word for name, value in flags.items() for word in (name, str(value))]


def run(
    folder: Path, save: Path, metrics: Path, last: int, faults: Sequence[Fault], fills: bool
) -> Iterator[Start]:
    """Start the job until it has trained `last` steps; yield each start once it has ended."""
    marks = folder / "marks"
    marks.mkdir(parents=True)
    arms = {
        task: [(join, task, str(marks), str(save), faults, fills)] for task in range(RANKS + SPARES)
    }
    shared = set(os.listdir("/dev/shm"))
    for number in range(MOST_STARTS):
        begun = time.time()
        logs = folder / f"logs_{number:02}"
        flags = [*arguments(save, metrics, last), *supervised()]
        with FaultJob(RANKS + SPARES, flags, logs, arms=arms) as job:
            codes = job.wait(JOB_LIMIT_S)
        ended = time.time()
        left = processes_that_write_to(logs)
        while left and time.time() < ended + LEAVE_S:
            left = processes_that_write_to(logs)
        left += sorted(set(os.listdir("/dev/shm")) - shared)
        yield Start(begun, ended, tuple(codes), tuple(left))
        if history.steps(metrics)[-1][0] == last and 0 in codes:
            return
        for mark in marks.glob("broken_*"):  # the new job has other nodes
            mark.unlink()


def processes_that_write_to(folder: Path) -> list[str]:
    """Return the processes that have a file of a folder open."""
    processes = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(f"{folder}/"):
                processes.add(f"process {link.parts[2]}")
    return sorted(processes)


def growth(marks: Path) -> tuple[list[str], str]:
    """Return problems with what processes hold after more and more restarts, and a description.

    The first levels of a process are those after its first and second restart, which may still
    allocate.
    """
    problems = []
    longest: list[list[int]] = []
    for file in sorted(marks.glob("held_*")):
        levels = [json.loads(line) for line in file.read_text().splitlines()]
        if len(levels) > len(longest):
            longest = levels
        first = [max(some) for some in zip(*levels[:3], strict=True)]
        for name, limit, last in zip(("descriptors", "threads"), first, levels[-1], strict=False):
            if last > limit + MORE_HELD:
                problems.append(f"{file.name}: {limit} {name} grew to {last}: {levels}")
        restarts = len(levels) - 3
        if restarts > 3 and levels[-1][2] - first[2] > MOST_KIB * restarts:
            problems.append(f"{file.name}: its memory grew from {first[2]} to {levels[-1][2]} KiB")
    if not longest:
        return problems, "no process took part in a restart"
    (fds, threads, kib), last = longest[min(2, len(longest) - 1)], longest[-1]
    return problems, (
        f"the process with the most restarts, {len(longest) - 1}, held {fds} descriptors, {threads} "
        f"threads and {kib / 1024:.1f} MiB at first, {last[0]}, {last[1]} and "
        f"{last[2] / 1024:.1f} MiB in the end"
    )


def campaign(
    folder: Path, chance: random.Random, days: float, say: Callable[[str], None]
) -> Iterator[JobOutcome]:
    """Run the month and the same training undisturbed; compare results and time."""
    faults = draw(chance, days, RANKS)
    last = faults[-1].step + 2 * SAVE_INTERVAL
    kinds = Counter(fault.kind for fault in faults)
    delayed = Counter(fault.moment for fault in faults)
    say(
        f"{len(faults)} faults of {days:g} days of {NODES} nodes over {last} steps: "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        + f"; {delayed['save']} during a save, {delayed['restart']} during a restart"
    )
    undisturbed = folder / "undisturbed"
    began = time.monotonic()
    flags = arguments(undisturbed, undisturbed, last)
    run_well(RANKS, flags, folder / "logs_undisturbed", limit_s=JOB_LIMIT_S)
    say(f"undisturbed: {time.monotonic() - began:.0f} s")
    metrics = folder / "metrics"
    size = sum(file.stat().st_blocks * 512 for file in history.newest(undisturbed).iterdir())
    fills = not disk.missing()
    with contextlib.ExitStack() as stack:
        save = folder / "run"
        if fills:
            stack.enter_context(disk.tmpfs(save, 6 * size))
        starts = []
        for start in run(folder, save, metrics, last, faults, fills):
            starts.append(start)
            say(
                f"start {len(starts)}: {start.ended - start.begun:.0f} s, exit codes {start.codes}, "
                f"step {history.steps(metrics)[-1][0]}"
            )
        problems = check(folder, save, metrics, undisturbed, last, faults, starts)
        report = timeline(metrics, folder / "marks", starts)
    slow = SLOW_STEPS, SLOW_S
    long_run = predicted_run(report, RANKS, SPARES, LOCAL_INTERVAL, SAVE_INTERVAL, slow)
    grown, held = growth(folder / "marks")
    for line in [*report.lines(), held, *compare(report, long_run)]:
        say(line)
    ways = history.records(metrics, "restart")
    notes = f"{100 * report.effective:.1f} % effective in {report.wall_s:.0f} s"
    yield JobOutcome(
        f"{len(faults)} faults, {len(starts)} starts, {len(ways)} restarts",
        notes,
        tuple(problems + grown),
    )


def _logs_of_starts_with(code: int, folder: Path, starts: Sequence[Start]) -> Iterator[str]:
    """Yield the output of the first rank in each start in which a process had an exit code."""
    for number, start in enumerate(starts):
        if code in start.codes:
            yield (folder / f"logs_{number:02}" / "rank_0.log").read_text(errors="replace")


def check(
    folder: Path,
    save: Path,
    metrics: Path,
    undisturbed: Path,
    last: int,
    faults: Sequence[Fault],
    starts: Sequence[Start],
) -> list[str]:
    """Return the problems: what differs from the undisturbed run, and faults that did not occur."""
    problems = []
    steps = history.steps(metrics)
    if steps[-1][0] != last:
        problems.append(f"it ended at step {steps[-1][0]} of {last}")
    # Steps between the corruption of a weight and its detection differ: they are repeated.
    tainted = {
        step
        for fault in faults
        if fault.flip == "weight"
        for step in range(fault.step, fault.step + SAVE_INTERVAL + 1)
    }
    last_of = {iteration: n for n, (iteration, _) in enumerate(steps)}
    valid = [
        step for n, step in enumerate(steps) if step[0] not in tainted or n == last_of[step[0]]
    ]
    problems += differences(save, valid, undisturbed, last)
    occurred = len(list((folder / "marks").glob("fault_???")))
    if occurred != len(faults):
        problems.append(f"{occurred} of {len(faults)} faults occurred")
    codes = {code for start in starts for code in start.codes}
    unexpected = codes - {0, EXIT_LOST_RANK, -9, 128 + 9}
    if all(NO_SPACE in logs for logs in _logs_of_starts_with(2, folder, starts)):
        unexpected.discard(2)  # the last save failed
    if unexpected:
        problems.append(f"exit codes {sorted(unexpected)}")
    problems += [f"left behind: {', '.join(start.left)}" for start in starts if start.left]
    tracebacks = [
        str(log.relative_to(folder))
        for log in sorted(folder.glob("logs_*/rank_*.log"))
        if "Traceback" in log.read_text(errors="replace")
    ]
    if tracebacks:
        problems.append(f"tracebacks in {', '.join(tracebacks[:8])}")
    return problems
