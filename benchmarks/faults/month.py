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
import importlib
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
from benchmarks.faults.month_report import compare, predicted_run, timeline
from megatron.errors import EXIT_LOST_RANK
from megatron.planner.faults import KINDS, fault_rates
from tests.helpers.poison import flip_bit

STEP = "megatron.run.step"
SOURCE = "llama3"
NODES = 1024  # of the run whose month is drawn
RANKS = 4
SPARES = 2
SAVE_INTERVAL = 50
LOCAL_INTERVAL = 5
GAP = 100  # steps between two faults, on average
SLOW_STEPS = 20
SLOW_S = 0.05
FULL_STEPS = SAVE_INTERVAL + 5  # after which there is room on the disk again
MOST_STARTS = 200
JOB_LIMIT_S = 1800.0
HANG_TIMEOUT_S = 3.0
OTHERS_LEAVE_S = 60.0
LAYOUT = ("--pipeline-model-parallel-size", "2", "--zero-stage", "0")


@dataclass(frozen=True)
class Fault:
    """A fault: the rank `victim` meets it when it completes the step."""

    number: int
    step: int
    kind: str
    victim: int


def draw(chance: random.Random, days: float, ranks: int) -> list[Fault]:
    """Return the faults of so many days of NODES nodes, in the order of their steps.

    Kinds that the draw lacks are added once, so that all are tried.
    """
    rates = fault_rates(SOURCE)
    total = sum(rates.values()) * NODES
    kinds: list[str] = []
    at = chance.expovariate(total)
    while at < days:
        kinds += chance.choices(list(rates), list(rates.values()))
        at += chance.expovariate(total)
    kinds += [kind for kind in KINDS if kind not in kinds]
    chance.shuffle(kinds)
    step = 1
    faults: list[Fault] = []
    for number, kind in enumerate(kinds):
        step += 1 + int(chance.expovariate(1 / GAP))
        faults.append(Fault(number, step, kind, chance.randrange(ranks)))
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
    injection = _Injection(node, folder, checkpoints, {f.step: f for f in faults}, fills)
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
    """Audit hook that lets the faults happen; processes that are forked inherit it."""

    node: str
    folder: str
    checkpoints: str
    faults: dict[int, Fault]
    fills: bool
    slow_until: int = 0
    run: Any = None

    def __post_init__(self) -> None:
        self.freed = {f.step + FULL_STEPS for f in self.faults.values() if f.kind == "storage"}

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event != STEP:
            return
        iteration = arguments[0]
        assert isinstance(iteration, int), "a step's number"
        if iteration <= self.slow_until:
            time.sleep(SLOW_S)
        if iteration in self.freed:
            self._filler.unlink(missing_ok=True)
        if os.path.exists(f"{self.folder}/broken_{self.node}"):
            Path(self.folder, f"again_{time.time()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        fault = self.faults.get(iteration)
        if fault is not None:
            self._meet(fault)

    def _meet(self, fault: Fault) -> None:
        import torch.distributed as dist

        marker = f"{self.folder}/fault_{fault.number:03}"
        if dist.get_rank() != fault.victim or os.path.exists(marker):
            return
        if fault.kind == "device":
            Path(self.folder, f"broken_{self.node}").touch()
        with open(f"{marker}.tmp", "w") as file:
            json.dump({"time": time.time(), **dataclasses.asdict(fault)}, file)
        os.rename(f"{marker}.tmp", marker)
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
            self._flip(fault)
        elif fault.kind == "storage" and self.fills:
            with contextlib.suppress(OSError), open(self._filler, "wb", 0) as full:
                while True:
                    full.write(bytes(1 << 12))

    @property
    def _filler(self) -> Path:
        return Path(self.checkpoints, "filler")

    def _flip(self, fault: Fault) -> None:
        """Flip bits: of a weight, of this rank's memory file, or of the newest checkpoint on disk.

        After the second this process ends, and after the third all processes of the job do, so that
        what was damaged is needed.
        """
        files = sorted(Path(self.checkpoints).glob("iter_" + "[0-9]" * 7 + "/*.distcp"))
        what = fault.number % 3
        if what == 2 and files:
            content = bytearray(files[-1].read_bytes())
            content[len(content) // 2] ^= 1
            files[-1].write_bytes(content)
            for supervisor in _siblings(os.getppid()):
                os.kill(supervisor, signal.SIGKILL)
            signal.pause()
        if what == 1:
            _damage_memory()
            os.kill(os.getpid(), signal.SIGKILL)
        self.run.engine.wait_for_weights()
        flip_bit(max(self.run.chunks.parameters(), key=lambda one: one.numel()))


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
    """One start of the job: seconds since 1970 at its begin and end, and its exit codes."""

    begun: float
    ended: float
    codes: tuple[int, ...]


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
    for number in range(MOST_STARTS):
        begun = time.time()
        with FaultJob(
            RANKS + SPARES,
            [*arguments(save, metrics, last), *supervised()],
            folder / f"logs_{number:02}",
            arms=arms,
        ) as job:
            codes = job.wait(JOB_LIMIT_S)
        yield Start(begun, time.time(), tuple(codes))
        if history.steps(metrics)[-1][0] == last and 0 in codes:
            return
        for mark in marks.glob("broken_*"):  # the new job has other nodes
            mark.unlink()


def campaign(
    folder: Path, chance: random.Random, days: float, say: Callable[[str], None]
) -> Iterator[JobOutcome]:
    """Run the month and the same training undisturbed; compare results and time."""
    faults = draw(chance, days, RANKS)
    last = faults[-1].step + 2 * SAVE_INTERVAL
    kinds = Counter(fault.kind for fault in faults)
    say(
        f"{len(faults)} faults of {days:g} days of {NODES} nodes over {last} steps: "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    )
    undisturbed = folder / "whole"
    began = time.monotonic()
    flags = arguments(undisturbed, undisturbed, last)
    run_well(RANKS, flags, folder / "logs_whole", limit_s=JOB_LIMIT_S)
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
    for line in [*report.lines(), *compare(report, long_run)]:
        say(line)
    ways = history.records(metrics, "restart")
    notes = f"{100 * report.effective:.1f} % effective in {report.wall_s:.0f} s"
    yield JobOutcome(
        f"{len(faults)} faults, {len(starts)} starts, {len(ways)} restarts", notes, tuple(problems)
    )


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
        if fault.kind == "corruption"
        for step in range(fault.step, fault.step + SAVE_INTERVAL + 1)
    }
    last_of = {iteration: n for n, (iteration, _) in enumerate(steps)}
    valid = [
        step for n, step in enumerate(steps) if step[0] not in tainted or n == last_of[step[0]]
    ]
    if different := history.differing(valid, dict(history.steps(undisturbed))):
        problems.append(f"losses of steps {different[:8]} are not those of the undisturbed run")
    if {iteration for iteration, _ in steps} != set(range(1, last + 1)):
        problems.append("steps are missing")
    if steps[-1][0] == last:
        names = history.tensors_that_differ(history.newest(save), history.newest(undisturbed))
        if names:
            problems.append(f"in the end {len(names)} tensors differ, e.g. {names[0]}")
    occurred = len(list((folder / "marks").glob("fault_???")))
    if occurred != len(faults):
        problems.append(f"{occurred} of {len(faults)} faults occurred")
    unexpected = {code for start in starts for code in start.codes} - {
        0,
        EXIT_LOST_RANK,
        -9,
        128 + 9,
    }
    if unexpected:
        problems.append(f"exit codes {sorted(unexpected)}")
    return problems
