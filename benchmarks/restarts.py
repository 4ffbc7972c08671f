"""Seconds from the kill of a training process to the next step, by the way in which the job returns.

    python benchmarks/restarts.py [--sizes tiny] [--ranks 2 4 8] [--ways memory torchrun] [--rounds 5]

Ranks of this machine train a GPT with ZeRO-1 and save to disk after step SAVE. One of them is ended
by SIGKILL when it completes step KILL. The ways take turns, each in a job of its own:

memory    restart within the job (--max-restarts): the supervisor forks another process, and all
          ranks continue from the local checkpoint, in memory, of step KILL or the one before
disk      the same from the checkpoint on disk
spare     the supervisor is killed too, as if a node were lost; a spare rank takes its place, and
          its state comes from a neighbour's memory
torchrun  torchrun --max-restarts: all processes are started anew, from the disk
new job   the job ends, and is started anew at once, as if it were requeued without a wait

The clock starts when the process is killed, and stops when the slowest rank completes a step of the
continued training; so steps that are repeated do not count. Every loss is compared, bit by bit,
with that of an undisturbed run: exit code 1 if one differs.

Parts of the time of restarts within the job, from audit events and the records of the run:

detection   until a supervisor reports the fault
decision    until all tasks have left their groups and the leader has decided on their places
meeting     the start of processes, until all have met at the store
groups      until the last rank has connected all groups and used them once
set-up      data, model, engine and loading, until rank 0 reports the restart
first step  until the slowest rank has completed it
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import shared
from benchmarks.saves import SHAPES, arguments
from benchmarks.shared import ROOT, Record, Table, markdown, parser
from megatron.metrics_file import read_records
from megatron.planner.subprocesses import environment
from tests.helpers.fault_points import strike_once

SAVE = 5
KILL = 7
LAST = 10
VICTIM = 1
LIMIT_S = 200.0
WITHIN = ["--max-restarts", "1"]
MEMORY = [*WITHIN, "--non-persistent-save-interval", "1"]
FLAGS = {
    "memory": MEMORY,
    "disk": WITHIN,
    "spare": [*MEMORY, "--spare-ranks", "1"],
    "torchrun": [],
    "new job": [],
}
STEP = "megatron.run.step"
FAULT = "megatron.parallel.fault"
MET = "megatron.parallel.met"
CONNECTED = "megatron.parallel.connected"
FORK = "os.fork"
EVENTS = (STEP, FAULT, MET, CONNECTED, FORK)
PARTS = ("detection", "decision", "meeting", "groups", "set-up", "first step")
Losses = dict[int, tuple[float, float]]


@dataclass(frozen=True)
class Mark:
    """An audit event of a process: seconds since 1970, and the iteration of a step."""

    time: float
    event: str
    process: int
    iteration: int


# ---- in the processes of a job -------------------------------------------------------------------


def worker(folder: str, what: str, words: Sequence[str]) -> None:
    """Train in this process, which notes its events and is hit if it is the victim.

    what  what happens to the victim, see strike_once; "" for an undisturbed run
    """
    notes = os.open(f"{folder}/marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: str, of: tuple[Any, ...]) -> None:
        if event in EVENTS:
            iteration = of[0] if event == STEP else 0
            os.write(notes, f"{time.time()} {event} {os.getpid()} {iteration}\n".encode())

    sys.addaudithook(note)
    if what and os.environ["RANK"] == str(VICTIM):
        strike_once(f"{folder}/struck", STEP, KILL, what)
    script = str(ROOT / "pretrain_gpt.py")
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


# ---- jobs ----------------------------------------------------------------------------------------


def start(folder: Path, size: str, ranks: int, way: str) -> None:
    """Run a job until it ends; `way`: how it returns after the fault, "" for an undisturbed run."""
    flags = arguments(size, ranks, folder)
    flags += ["--load", str(folder), "--log-interval", "1", "--train-iters", str(LAST)]
    flags += ["--save-interval", str(SAVE), *FLAGS.get(way, [])]
    what = {"spare": "supervisor", "": ""}.get(way, "kill")
    words = ["benchmarks/restarts.py", "--worker", str(folder), what, *flags]
    command = [sys.executable, str(ROOT / words[0]), *words[1:]]
    env = environment(os.environ, 0, 1, 0) | {"OMP_NUM_THREADS": "1"}
    awaited = []
    processes = ranks
    if way == "torchrun":
        elastic = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1"]
        command[1:1] = ["-m", "torch.distributed.run", *elastic]
        processes = 1
    elif way == "spare":
        processes = ranks + 1
        awaited = [rank for rank in range(processes) if rank != VICTIM]
    logs = [folder / f"rank{rank}.log" for rank in range(processes)]
    codes, _ = shared.launch(command, logs, env, LIMIT_S, awaited=awaited)
    bad = [rank for rank in awaited or range(processes) if codes[rank]]
    if way == "new job" and bad:
        return
    if bad:
        text = logs[bad[0]].read_text(errors="replace")
        raise RuntimeError(f"{way or 'undisturbed'}: exit codes {codes}: {text[-3000:]}")


def losses(folder: Path) -> list[tuple[int, tuple[float, float]]]:
    """Return (iteration, loss and gradient norm) of all steps, in the order of the file."""
    records = read_records(folder / "metrics.jsonl", "iteration")
    return [(r["iteration"], (r["lm_loss"], r["grad_norm"])) for r in records]


def undisturbed(size: str, ranks: int) -> Losses:
    with tempfile.TemporaryDirectory(prefix="restarts-") as folder:
        start(Path(folder), size, ranks, "")
        return dict(losses(Path(folder)))


def measure(size: str, ranks: int, way: str, reference: Losses) -> Record:
    """Run a job with a fault; return its times. Raises RuntimeError if a loss differs."""
    with tempfile.TemporaryDirectory(prefix="restarts-") as name:
        folder = Path(name)
        start(folder, size, ranks, way)
        if way == "new job":
            start(folder, size, ranks, way)
        steps = losses(folder)
        wrong = sorted({number for number, values in steps if reference.get(number) != values})
        if wrong or {number for number, _ in steps} != set(reference):
            raise RuntimeError(f"{way}: losses of steps {wrong} differ, or steps are missing")
        killed = (folder / "struck").stat().st_mtime  # the victim made it just before
        found = times(killed, marks_of(folder), read_records(folder / "metrics.jsonl"))
        return {"size": size, "ranks": ranks, "way": way, **found}


def marks_of(folder: Path) -> list[Mark]:
    """Return the events that the processes of a job noted, in the order of time."""
    lines = (line.split() for line in (folder / "marks").read_text().splitlines())
    marks = [Mark(float(at), event, int(pid), int(step)) for at, event, pid, step in lines]
    return sorted(marks, key=lambda mark: mark.time)


def times(killed: float, marks: Sequence[Mark], records: Iterable[Record]) -> Record:
    """Return the seconds from the kill to the next step, their parts, and the repeated steps.

    killed  when the process was killed, in seconds since 1970
    """
    after = [mark for mark in marks if mark.time > killed]
    met = max(mark.time for mark in after if mark.event == MET)
    firsts: dict[int, Mark] = {}
    for mark in after:
        if mark.event == STEP and mark.time > met:
            firsts.setdefault(mark.process, mark)
    end = max(mark.time for mark in firsts.values())
    repeated = KILL + 1 - min(mark.iteration for mark in firsts.values())
    result: Record = {"s": end - killed, "repeated": repeated}
    restarted = next((r["time"] for r in records if r.get("event") == "restart"), None)
    if restarted is not None:
        fault = next(mark.time for mark in after if mark.event == FAULT)
        fork = next(mark.time for mark in after if mark.event == FORK)
        groups = max(mark.time for mark in after if mark.event == CONNECTED)
        ends = [killed, fault, fork, met, groups, restarted, end]
        spans = (b - a for a, b in itertools.pairwise(ends))
        result["parts"] = dict(zip(PARTS, spans, strict=True))
    return result


# ---- tables --------------------------------------------------------------------------------------


def tables(results: Sequence[Record]) -> list[str]:
    """Return Markdown tables of the seconds, and of their parts."""
    of = defaultdict[tuple[str, int, str], list[Record]](list)
    for result in results:
        of[result["size"], result["ranks"], result["way"]].append(result)
    cases = list(dict.fromkeys((size, ranks) for size, ranks, _ in of))
    ways = [way for way in FLAGS if any(way == key[2] for key in of)]
    seconds: Table = [["model", "ranks", *ways]]
    parts: Table = [["model", "ranks", "way", *PARTS]]
    for size, ranks in cases:
        row = [size, str(ranks)]
        for way in ways:
            each = of[size, ranks, way]
            row.append(spread([r["s"] for r in each]) if each else "")
            if each and "parts" in each[0]:
                medians = [statistics.median(r["parts"][part] for r in each) for part in PARTS]
                parts.append([size, str(ranks), way, *(f"{value:.2f}" for value in medians)])
        seconds.append(row)
    return [*markdown(seconds), "", *markdown(parts)]


def spread(values: Sequence[float]) -> str:
    """Return the median with the smallest and the largest value."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3], sys.argv[4:])
        return
    made = parser(__doc__)
    made.add_argument("--sizes", nargs="+", choices=SHAPES, default=["tiny"])
    made.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    made.add_argument("--ways", nargs="+", choices=FLAGS, default=[*FLAGS])
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="appends the results to this file, and prints the tables of all in it",
    )
    options = made.parse_args()
    results: list[Record] = []
    if options.record and options.record.exists():
        results = [json.loads(line) for line in options.record.read_text().splitlines()]
    for size in options.sizes:
        for ranks in options.ranks:
            reference = undisturbed(size, ranks)
            for number in range(options.rounds):
                for way in options.ways[:: -1 if number % 2 else 1]:
                    results.append(measure(size, ranks, way, reference))
                    if options.record:
                        with options.record.open("a") as file:
                            file.write(json.dumps(results[-1]) + "\n")
    print(*tables(results), sep="\n")
    print("all losses equal those of the undisturbed runs")


if __name__ == "__main__":
    main()
