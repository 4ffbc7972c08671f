"""Compare fused kernels with torch's operators: bytes/s on a GPU, ratios on a CPU, call overhead.

    python benchmarks/kernels.py [--quick] [--device cpu|cuda] [--dtype float32 ...] [--op NAME ...] [--output FOLDER]

Every figure is a median over rounds of one run, in which the sides take turns; a ratio is the
median of the ratios of the rounds, so that disturbances of the machine affect both sides. Results
are compared before they are timed.

On a GPU a row is one pass of one operator: the bytes that it must move (each input once, each
output once) per second, relative to a device-to-device copy in the same rounds. The sides are our
kernel, torch's sequence of operators, the same under torch.compile, and Liger and flash-attn if
installed. The L2 cache is flushed before each call, and rows are added until a launch moves 256 MB.
"MI250X" is those bytes divided by 1.25 TB/s, which a copy reaches on one GCD: an estimate, not a
measurement.

On a CPU the ratio is torch's time divided by ours, above 1 if ours is faster. Caches are as the
previous call left them.

--output writes kernels.json and kernels.md, tables as in docs/measured/kernels.md.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.kernel_cases import OPERATORS, CaseCost, Implementation, Shape, enlarged
from benchmarks.machine import processor
from benchmarks.shared import Record, Table, markdown, parser, print_table
from benchmarks.sides import ALLOCATOR
from megatron.kernels import library
from megatron.kernels.ops import attention

Seconds = Callable[[], float]
PASSES = ("forward", "backward", "both")
DTYPES = ("float32", "bfloat16", "float16")
MI250X_BYTES_PER_S = 1.25e12  # of a copy on one GCD
GPU_BYTES = 256e6  # of one launch, several times any L2 cache
# Tolerance: torch's sequence rounds after every operator, by a few units in the last place in all.
ROUNDING = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

# ---- timing --------------------------------------------------------------------------------------


class HostClock:
    """Times a call by `now`, in seconds: elapsed time, or this process's CPU time."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now

    def time(self, call: Callable[[], Any]) -> tuple[Any, Seconds]:
        start = self.now()
        result = call()
        seconds = self.now() - start
        return result, lambda: seconds


class GpuClock:
    """Times a call by events, queued behind work that lets the host get ahead, and flushes L2."""

    def __init__(self) -> None:
        self.other = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def time(self, call: Callable[[], Any]) -> tuple[Any, Seconds]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.other.zero_()
        torch.cuda._sleep(2_000_000)  # about a millisecond
        start.record()
        result = call()
        end.record()

        def seconds() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return result, seconds


Clock = HostClock | GpuClock


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@dataclass
class TimedImplementation:
    """Implementation of an operator, and its times.

    seconds    {pass: seconds per call, in each round}
    gradients  gradients of its outputs, for the backward pass
    """

    implementation: Implementation
    seconds: dict[str, list[float]] = field(default_factory=dict)
    gradients: list[torch.Tensor] | None = None

    def run(self, work: CaseCost, clock: Clock, calls: int) -> None:
        """Run one round of calls, with each pass timed separately."""
        waiting: dict[str, list[Seconds]] = {"forward": [], "backward": []}
        for _ in range(calls):
            with torch.set_grad_enabled(bool(work.leaves)):
                result, seconds = clock.time(
                    functools.partial(self.implementation, *work.arguments)
                )
            waiting["forward"].append(seconds)
            if work.leaves:
                outputs = as_tuple(result)
                if self.gradients is None:
                    self.gradients = [torch.randn_like(o) for o in outputs]
                backward = functools.partial(
                    torch.autograd.grad, outputs, work.leaves, self.gradients, allow_unused=True
                )
                _, seconds = clock.time(backward)
                waiting["backward"].append(seconds)
            del result
        took = {name: sum(s() for s in each) / calls for name, each in waiting.items() if each}
        for name, value in {**took, "both": sum(took.values())}.items():
            self.seconds.setdefault(name, []).append(value)

    def ratio(self, ours: TimedImplementation, name: str) -> float:
        """Return the median over the rounds of the time of this side divided by ours."""
        pairs = zip(self.seconds[name], ours.seconds[name], strict=True)
        return statistics.median(a / b for a, b in pairs)


def check_results(name: str, work: CaseCost, dtype: torch.dtype) -> None:
    """Raise SystemExit if our results and torch's differ by more than rounding errors."""
    if not work.comparable:
        return
    with torch.no_grad():
        expected = as_tuple((work.exact or work.torch)(*work.arguments))
        for ours, other in zip(as_tuple(work.ours(*work.arguments)), expected, strict=True):
            error = float((ours.double() - other.double()).norm() / other.double().norm())
            if not error < ROUNDING[dtype]:
                raise SystemExit(f"{name}: the results differ by {error:.1e}")


def usable(work: CaseCost, clock: Clock) -> tuple[dict[str, TimedImplementation], dict[str, str]]:
    """Return the sides of other packages that can run, and the reasons why the others cannot."""
    sides = {}
    missing = {}
    for name, make in work.peers.items():
        try:
            side = TimedImplementation(make())
            side.run(work, clock, 1)
            sides[name] = side
        except Exception as error:  # whatever a package raises, it is left out, with the reason
            missing[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return sides, missing


def measure(
    sides: dict[str, TimedImplementation],
    copy: TimedImplementation,
    work: CaseCost,
    clock: Clock,
    budget_s: float,
) -> None:
    """Run rounds of all sides in turn for `budget_s`.

    There are at most 51 rounds, and at least five, or three if the budget is at most 0.5 s.
    """
    nothing = CaseCost((), copy.implementation, copy.implementation)
    for _ in range(2):  # compiles, sets up, warms up
        for side in sides.values():
            side.run(work, clock, 1)
    longest = max(side.seconds["both"][-1] for side in sides.values())
    for side in sides.values():
        side.seconds.clear()
    calls = max(1, min(50, round(5e-3 / longest))) if isinstance(clock, HostClock) else 1
    end = time.perf_counter() + budget_s
    fewest = 5 if budget_s > 0.5 else 3
    for index in range(51):
        if index >= fewest and time.perf_counter() > end:
            break
        for side in sides.values():
            side.run(work, clock, calls)
        copy.run(nothing, clock, 1)


# ---- operators -----------------------------------------------------------------------------------


@dataclass
class OperatorTimes:
    """Figures of one operator, shape and type.

    moved    {pass: bytes that it must move}
    seconds  {side: {pass: median seconds of a call}}, also for the copy
    ratios   {side: {pass: median of its time divided by ours}}
    """

    operator: str
    shape: Shape
    dtype: str
    moved: dict[str, float]
    seconds: dict[str, dict[str, float]]
    ratios: dict[str, dict[str, float]]

    def of_copy(self, side: str, name: str, copied_bytes: float) -> str:
        """Return a side's bytes/s, by the bytes that a pass must move, over the copy's."""
        if side not in self.seconds:
            return ""
        copy_s = self.seconds["copy"]["forward"] * self.moved[name] / copied_bytes
        return f"{copy_s / self.seconds[side][name]:.2f}"


def copying(device: torch.device, copied_bytes: int) -> Implementation:
    source = torch.ones(copied_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def run_operator(
    name: str, shape: Shape, dtype: torch.dtype, clock: Clock, budget_s: float, copy: Implementation
) -> tuple[OperatorTimes, dict[str, str]]:
    """Return the row of an operator, and why other packages are missing."""
    operator = OPERATORS[name]
    copied = TimedImplementation(copy)
    device = torch.device("cuda" if isinstance(clock, GpuClock) else "cpu")
    work = operator.prepare(shape, device, dtype)
    check_results(name, work, dtype)
    sides = {"ours": TimedImplementation(work.ours), "torch": TimedImplementation(work.torch)}
    if device.type == "cuda":
        sides["compile"] = TimedImplementation(torch.compile(work.torch, dynamic=False))
    peers, missing = usable(work, clock)
    sides |= peers
    measure(sides, copied, work, clock, budget_s)
    passes = operator.moved(shape, dtype.itemsize)
    moved = {n: size for n, size in zip(PASSES, (*passes, sum(passes)), strict=True) if size}
    seconds = {
        side: {name: statistics.median(values) for name, values in each.seconds.items()}
        for side, each in (sides | {"copy": copied}).items()
    }
    ours = sides.pop("ours")
    ratios = {s: {name: each.ratio(ours, name) for name in moved} for s, each in sides.items()}
    kind = str(dtype).removeprefix("torch.")
    return OperatorTimes(name, shape, kind, moved, seconds, ratios), missing


# ---- overhead of a call --------------------------------------------------------------------------


def per_call_us(
    call: Callable[[], Any], device: torch.device, calls: int, now: Callable[[], float]
) -> float:
    """Return the microseconds of a call, the median of seven series; on a GPU, to queue it."""
    series = []
    for _ in range(8):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = now()
        for _ in range(calls):
            call()
        series.append((now() - start) / calls * 1e6)
    return statistics.median(series[1:])


def overhead(name: str, device: torch.device, calls: int, now: Callable[[], float]) -> list[str]:
    """Return the microseconds of a call on a few elements: ours and torch's, without and with
    gradient.
    """
    operator = OPERATORS[name]
    work = operator.prepare(tuple(min(n, 8) for n in operator.host[0]), device, torch.float32)
    cells = [name]
    for implementation in (work.ours, work.torch):
        call = functools.partial(implementation, *work.arguments)
        with torch.no_grad():
            cells.append(f"{per_call_us(call, device, calls, now):.1f}")
        cells.append(f"{per_call_us(call, device, calls, now):.1f}" if work.leaves else "")
    return cells


def bare_call_us(device: torch.device, calls: int, now: Callable[[], float]) -> float:
    """Time a C function through ctypes, without torch's dispatcher and checks (GPU: the launch)."""
    x = torch.randn(4, 16, device=device)
    out = torch.empty_like(x)
    call = functools.partial(attention._CAUSAL, x, out, x, 4, 4, 16, attention.NO_WINDOW, 1.0)
    return per_call_us(call, device, calls, now)


# ---- tables --------------------------------------------------------------------------------------


def shape_text(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def host_table(rows: list[OperatorTimes]) -> Table:
    """Tabulate the times torch / ours."""
    head = "operator, shape, type, ours ms, torch ms, forward, backward, both, beside"
    lines = [head.split(", ")]
    for row in rows:
        ratios = row.ratios["torch"]
        rest = [side for side in row.ratios if side != "torch"]
        lines.append(
            [
                row.operator,
                shape_text(row.shape),
                row.dtype,
                *(f"{row.seconds[side]['both'] * 1e3:.3f}" for side in ("ours", "torch")),
                *(f"{ratios[p]:.2f}" if p in ratios else "" for p in PASSES),
                ", ".join(f"{side} {row.ratios[side]['both']:.2f}" for side in rest),
            ]
        )
    return lines


def gpu_table(rows: list[OperatorTimes], copied_bytes: int) -> Table:
    """Tabulate the achieved share of the copy's bytes/s."""
    sides = dict.fromkeys(["ours", "torch", "compile", *(s for row in rows for s in row.seconds)])
    sides.pop("copy", None)
    head = ["operator", "shape", "type", "pass", "MB", "ours us"]
    lines = [[*head, *(f"{side} / copy" for side in sides), "MI250X us (estimate)"]]
    for row in rows:
        for name in (name for name in row.moved if name != "both"):
            lines.append(
                [
                    row.operator,
                    shape_text(row.shape),
                    row.dtype,
                    name,
                    f"{row.moved[name] / 1e6:.0f}",
                    f"{row.seconds['ours'][name] * 1e6:.0f}",
                    *(row.of_copy(side, name, copied_bytes) for side in sides),
                    f"{row.moved[name] / MI250X_BYTES_PER_S * 1e6:.0f}",
                ]
            )
    return lines


# ---- command line --------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda, also ROCm, if any")
    made.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES[:2])
    made.add_argument("--op", nargs="+", choices=sorted(OPERATORS), help="default: all")
    made.add_argument("--quick", action="store_true", help="one shape each and few rounds")
    busy = "for a shared CPU: one thread, and CPU time instead of elapsed time"
    made.add_argument("--busy", action="store_true", help=busy)
    made.add_argument("--output", type=Path, help="folder for kernels.json and kernels.md")
    return made.parse_args()


def main() -> None:
    options = parse()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = device.type == "cuda"
    names = options.op or list(OPERATORS)
    kernels = library.find(device.type)
    if kernels.handle is None:
        raise SystemExit(f"there is nothing to compare: {kernels.line}")
    name = torch.cuda.get_device_name() if gpu else processor()
    threads = f"{torch.get_num_threads()} thread(s), torch {torch.__version__}"
    head = [datetime.date.today().isoformat(), name, threads, kernels.line]
    print(*head, sep="\n", flush=True)
    now = time.process_time if options.busy else time.perf_counter
    clock: Clock = GpuClock() if gpu else HostClock(now)
    copied_bytes = 2 * (2**30 if gpu else 2**27)
    copy = copying(device, copied_bytes)
    rows = list[OperatorTimes]()
    missing: dict[str, list[str]] = {}
    for name in names:
        operator = OPERATORS[name]
        shapes = operator.gpu if gpu else operator.host
        for dtype in (getattr(torch, dtype) for dtype in options.dtype):
            for shape in shapes[:1] if options.quick else shapes:
                if gpu:
                    shape = enlarged(operator, shape, dtype.itemsize, GPU_BYTES)
                budget_s = 0.1 if options.quick else 1.2
                row, absent = run_operator(name, shape, dtype, clock, budget_s, copy)
                rows.append(row)
                for side, why in absent.items():
                    missing.setdefault(f"{side} ({why})", []).append(name)
                ratio = row.ratios["torch"]["both"]
                print(f"{name} {shape_text(shape)} {dtype}: torch / ours {ratio:.2f}", flush=True)
    copy_s = statistics.median(row.seconds["copy"]["forward"] for row in rows)
    calls = 200 if options.quick else 1000
    costs = ["operator", "ours", "ours with gradient", "torch", "torch with gradient"]
    tables = {
        "bytes/s over the copy's" if gpu else "time, torch's over ours": (
            gpu_table(rows, copied_bytes) if gpu else host_table(rows)
        ),
        "microseconds of a call on a few elements": [
            costs,
            *(overhead(name, device, calls, now) for name in names),
        ],
    }
    notes = [
        *(f"left out: {why}: {', '.join(dict.fromkeys(of))}" for why, of in missing.items()),
        f"a copy moves {copied_bytes / copy_s / 1e9:.1f} GB/s (read and written)",
        f"a C function through ctypes alone: {bare_call_us(device, 2 * calls, now):.1f} us",
    ]
    for title, lines in tables.items():
        print_table(title, lines)
    print(*notes, sep="\n")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        record: Record = {"head": head, "rows": [vars(row) for row in rows], "notes": notes}
        (options.output / "kernels.json").write_text(json.dumps(record, indent=1) + "\n")
        text = ["; ".join(head), ""]
        for title, lines in tables.items():
            text += [f"{title}:", "", *markdown(lines), ""]
        (options.output / "kernels.md").write_text("\n".join([*text, *notes, ""]))


if __name__ == "__main__":
    # Without this allocator setting, every side would spend its time on page faults on a CPU.
    settings = {"GLIBC_TUNABLES": ALLOCATOR}
    settings |= {"OMP_NUM_THREADS": "1"} if "--busy" in sys.argv else {}
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})
    main()
