"""Find idle times of a device in steps of G1: gaps on its compute stream, and host activity.

    python benchmarks/idle_gaps.py [--device cpu|cuda] [--output FOLDER]
    python benchmarks/idle_gaps.py --trace trace_rank0.json

Steps are recorded by --profile of pretrain_gpt.py, which makes them slower: the idle share is an
upper bound. The compute stream is the one that is busy longest. If a trace has no device, the
operators of the thread with the most operators are used instead of kernels, and a gap is the time
that Python takes between two of them.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shared import Table, device_parser, markdown
from benchmarks.sides import run
from benchmarks.workloads import OURS, cpu_cases, cuda_cases, quick

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of torch.profiler's Chrome traces
HOST = {"cpu_op", "cuda_runtime", "cuda_driver", "hip_runtime", "python_function"}
SIZES_MS = (0.01, 0.1, 1.0)  # limits between the classes of gaps
SHOWN = 10
WARM_UP = 4
STEPS = 3
Event = dict[str, Any]


@dataclass(frozen=True)
class Gap:
    """Idle time between two pieces of work.

    before, after  names of the pieces of work
    host           calls that the host is in at the middle of the gap, outermost first
    """

    ms: float
    before: str
    after: str
    host: tuple[str, ...]


@dataclass(frozen=True)
class StreamActivity:
    """Work on a stream.

    busy_ms    time in which it worked
    span_ms    time from the beginning of the first to the end of the last piece of work
    gaps       idle times, longest first
    launches   number of pieces of work
    """

    name: str
    busy_ms: float
    span_ms: float
    gaps: list[Gap]
    launches: int


def fold(events: Iterable[Event]) -> StreamActivity:
    """Return the compute stream of a trace. Raises ValueError for an empty trace."""
    complete = [
        event for event in events if event.get("ph") == "X" and event.get("dur") is not None
    ]
    host = [event for event in complete if event.get("cat") in HOST]
    work = [event for event in complete if event.get("cat") in DEVICE]
    streams: dict[str, list[Event]] = defaultdict(list)
    for event in work or (event for event in host if event["cat"] == "cpu_op"):
        stream = event.get("args", {}).get("stream", event.get("tid"))
        streams[f"stream {stream}" if work else f"thread {event['tid']}"].append(event)
    if not streams:
        raise ValueError("the trace has neither kernels nor operators")
    candidates = (_stream(name, listed, host) for name, listed in streams.items())
    return max(candidates, key=lambda stream: stream.busy_ms)


def _stream(name: str, work: list[Event], host: Sequence[Event]) -> StreamActivity:
    work = sorted(work, key=lambda event: (event["ts"], -event["dur"]))
    busy = 0.0
    gaps = []
    last = work[0]
    end = work[0]["ts"]
    for event in work:
        if event["ts"] > end:
            gaps.append((event["ts"] - end, end, last["name"], event["name"]))
        begins = max(event["ts"], end)
        ends = event["ts"] + event["dur"]
        if ends > end:
            busy = busy + ends - begins
            last = event
            end = ends
    gaps.sort(key=lambda gap: -gap[0])
    named = [
        Gap(length / 1e3, before, after, _inside(host, at + length / 2) if number < SHOWN else ())
        for number, (length, at, before, after) in enumerate(gaps)
    ]
    return StreamActivity(name, busy / 1e3, (end - work[0]["ts"]) / 1e3, named, len(work))


def _inside(host: Sequence[Event], at: float) -> tuple[str, ...]:
    inside = [event for event in host if event["ts"] <= at <= event["ts"] + event["dur"]]
    return tuple(event["name"] for event in sorted(inside, key=lambda event: -event["dur"]))


def tables(stream: StreamActivity, steps: int) -> list[Table]:
    """Return tables of the stream as a whole, its gaps by size, and the longest gaps."""
    idle = stream.span_ms - stream.busy_ms
    overview = [
        ["stream", "busy, ms a step", "idle, ms a step", "idle, share", "launches a step"],
        [
            stream.name,
            f"{stream.busy_ms / steps:.2f}",
            f"{idle / steps:.2f}",
            f"{100 * idle / stream.span_ms:.1f} %",
            f"{stream.launches / steps:.1f}",
        ],
    ]
    sizes = [["gaps, ms", "a step", "ms a step"]]
    for low, high in zip((0.0, *SIZES_MS), (*SIZES_MS, float("inf")), strict=True):
        some = [gap.ms for gap in stream.gaps if low <= gap.ms < high]
        counts = [f"{len(some) / steps:.1f}", f"{sum(some) / steps:.2f}"]
        sizes.append([f"{low:g} to {high:g}", *counts])
    longest = [["gap, ms", "after", "before", "the host is in"]]
    for gap in stream.gaps[:SHOWN]:
        host = " > ".join(name[:40] for name in gap.host[-3:]) or "no operator"
        longest.append([f"{gap.ms:.3f}", gap.before[:60], gap.after[:60], host])
    return [overview, sizes, longest]


def record(device: str, folder: Path) -> Path:
    """Train G1, or a small model on a CPU, with a profile of STEPS steps; return its trace.

    Raises ValueError if the training fails.
    """
    case = cuda_cases(2**40)[0] if device == "cuda" else quick(cpu_cases()[0])
    flags = f"--profile --profile-step-start {WARM_UP} --profile-step-end {WARM_UP + STEPS}".split()
    threads = len(os.sched_getaffinity(0)) if device == "cuda" else 1
    side = replace(OURS, flags=(*flags, "--trace-dir", str(folder)))
    outcome = run(case, side, warm_up=WARM_UP, steps=STEPS + 1, threads=threads, folder=folder)
    if outcome.reason:
        raise ValueError(outcome.reason)
    return folder / "trace_rank0.json"


def main() -> int:
    made = device_parser(__doc__, "idle")
    trace = "evaluate this trace of STEPS steps instead"
    made.add_argument("--trace", type=Path, metavar="FILE", help=trace)
    options = made.parse_args()
    try:
        if options.trace is None:
            options.output.mkdir(parents=True, exist_ok=True)
            options.trace = record(options.device, options.output.resolve())
        stream = fold(json.loads(options.trace.read_text())["traceEvents"])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    overview, *rest = tables(stream, STEPS)
    for table in (overview, *rest):
        print(*markdown(table), "", sep="\n")
    busy, idle, share = overview[1][1:4]
    print(f"idle {share}: {idle} ms a step beside {busy}; {stream.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
