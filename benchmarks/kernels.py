"""Compare fused kernels with torch's operators: bytes/s on a GPU, ratios on a CPU, call overhead.

    python benchmarks/kernels.py [--quick] [--device cpu|cuda] [--dtype float32 ...] [--op NAME ...] [--output FOLDER]
    python benchmarks/kernels.py --roofline

Every figure is a median over rounds of one run, in which the sides take turns; a ratio is the
median of the ratios of the rounds, so that disturbances of the machine affect both sides. Results
are compared before they are timed.

On a GPU a row is one pass of one operator: the bytes that it must move (each input once, each
output once) per second, relative to a device-to-device copy in the same rounds. The sides are our
kernel, torch's sequence of operators, the same under torch.compile, and apex, Liger and flash-attn
if installed. The L2 cache is flushed before each call, and rows are added until a launch moves
256 MB. "MI250X" is those bytes divided by 1.25 TB/s, which a copy reaches on one GCD: an estimate,
not a measurement; --roofline prints it for the layers of a 22B and a 175B model and needs no
device.

On a CPU the ratio is torch's time divided by ours, above 1 if ours is faster; "expected" is the
ratio of bytes, which holds if memory is the bottleneck. Caches are as the previous call left them.
The verdicts of an operator's sizes are compared with HOST_FASTER of megatron/kernels/choose.py.

--output writes kernels.json and kernels.md, tables as in docs/measured/kernels.md.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from kernel_cases import OPERATORS, Operator, Shape, Way, Work, enlarged
from kernel_tables import (
    PASSES,
    Row,
    gpu_table,
    host_table,
    judged,
    markdown,
    overhead_table,
    roofline_table,
    shape_text,
    show,
)
from rich.console import Console
from rich.progress import track
from sides import ALLOCATOR

from megatron.kernels import library
from megatron.kernels.ops import attention

Seconds = Callable[[], float]
GPU_BYTES = 256e6  # of one launch, several times any L2 cache
TINY: dict[str, Shape] = {
    "attention_weights": (1, 16, 16),
    "attention_gradient": (1, 16, 16),
    "causal_softmax": (1, 1, 16, 16),
    "masked_softmax": (1, 1, 16, 16),
    "rotate": (2, 1, 2, 16),
    "permute": (2, 2, 64),
    "unpermute": (2, 2, 64),
}


# ---- timing --------------------------------------------------------------------------------------


class HostClock:
    """`now`: the time of day, or the seconds that this process has worked."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now

    def time(self, call: Callable[[], Any]) -> tuple[Any, Seconds]:
        start = self.now()
        result = call()
        seconds = self.now() - start
        return result, lambda: seconds


class GpuClock:
    """Time a call by events, queued behind other work: the host is ahead, and the L2 is flushed."""

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
            return start.elapsed_time(end) / 1e3

        return result, seconds


Clock = HostClock | GpuClock


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@dataclass
class Side:
    """One way to compute an operator, and what it took: seconds of each pass in each round."""

    way: Way
    seconds: dict[str, list[float]] = field(default_factory=dict)
    gradients: list[torch.Tensor] | None = None

    def run(self, work: Work, clock: Clock, calls: int) -> None:
        """Run one round of calls, with each pass timed separately."""
        waiting: dict[str, list[Seconds]] = {"forward": [], "backward": []}
        for _ in range(calls):
            with torch.set_grad_enabled(bool(work.leaves)):
                result, seconds = clock.time(functools.partial(self.way, *work.arguments))
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

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


def ratio(side: Side, ours: Side, name: str) -> float:
    """Return the median over the rounds of the time of `side` divided by ours."""
    pairs = zip(side.seconds[name], ours.seconds[name], strict=True)
    return statistics.median(a / b for a, b in pairs)


def check_results(name: str, work: Work, dtype: torch.dtype) -> None:
    """Ours and torch's results are the same but for roundings, or there is nothing to compare."""
    if not work.comparable:
        return
    with torch.no_grad():
        other = work.exact or work.torch
        pairs = zip(
            as_tuple(work.ours(*work.arguments)), as_tuple(other(*work.arguments)), strict=True
        )
        for ours, theirs in pairs:
            error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
            # The sequence rounds after every operator: a few units of the last place.
            if not error < {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]:
                raise SystemExit(
                    f"{name}: the results differ by {float(error):.1e}, so there is nothing to "
                    "compare"
                )


def usable(work: Work, clock: Clock) -> tuple[dict[str, Side], dict[str, str]]:
    """The sides of other packages that run once, and why the others do not."""
    sides, missing = {}, {}
    for name, make in work.others.items():
        try:
            side = Side(make())
            side.run(work, clock, 1)
            sides[name] = side
        except Exception as error:  # whatever a foreign package raises, it is left out and said so
            missing[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return sides, missing


def measure(sides: dict[str, Side], copy: Side, work: Work, clock: Clock, budget_s: float) -> None:
    """Run rounds of all sides in turn: at least five, or three if there is little time."""
    nothing = Work((), copy.way, copy.way)
    for _ in range(2):  # compiles, sets up, warms up
        for side in sides.values():
            side.run(work, clock, 1)
    longest = max(side.seconds["both"][-1] for side in sides.values())
    for side in sides.values():
        side.seconds.clear()
    calls = max(1, min(50, round(5e-3 / longest))) if isinstance(clock, HostClock) else 1
    end, rounds, fewest = time.perf_counter() + budget_s, 0, 5 if budget_s > 0.5 else 3
    while rounds < fewest or (time.perf_counter() < end and rounds < 51):
        for side in sides.values():
            side.run(work, clock, calls)
        copy.run(nothing, clock, 1)
        rounds += 1


# ---- operators -----------------------------------------------------------------------------------


def bytes_of(operator: Operator, shape: Shape, e: int) -> tuple[dict[str, float], dict[str, float]]:
    """(bytes our kernel moves, torch's bytes over ours), by pass."""
    ours, theirs = operator.moved(shape, e), operator.eager(shape, e)
    names = PASSES if ours[1] else ("forward", "both")
    moved = dict(zip(PASSES, (*ours, sum(ours)), strict=True))
    eager = dict(zip(PASSES, (*theirs, sum(theirs)), strict=True))
    return {n: moved[n] for n in names}, {n: eager[n] / moved[n] for n in names}


def copying(device: torch.device, copied_bytes: int) -> Way:
    source = torch.ones(copied_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy(*_: Any) -> None:
        target.copy_(source)

    return copy


def run_operator(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    clock: Clock,
    budget_s: float,
    copy: Way,
) -> tuple[Row, dict[str, str]]:
    operator = OPERATORS[name]
    work, copied = operator.prepare(shape, device, dtype), Side(copy)
    check_results(name, work, dtype)
    sides = {"ours": Side(work.ours), "torch": Side(work.torch)}
    if device.type == "cuda":
        sides["compile"] = Side(torch.compile(work.torch, dynamic=False))
    others, missing = usable(work, clock)
    sides |= others
    measure(sides, copied, work, clock, budget_s)
    moved, expected = bytes_of(operator, shape, dtype.itemsize)
    seconds = {
        side: {p: each.median(p) for p in each.seconds}
        for side, each in (sides | {"copy": copied}).items()
    }
    ratios = {
        side: {p: ratio(each, sides["ours"], p) for p in moved}
        for side, each in sides.items()
        if side != "ours"
    }
    rounds = len(copied.seconds["both"])
    return Row(
        name, shape, str(dtype).removeprefix("torch."), moved, expected, seconds, ratios, rounds
    ), missing


# ---- overhead of a call --------------------------------------------------------------------------


def per_call_us(
    call: Callable[[], Any], device: torch.device, calls: int, now: Callable[[], float]
) -> float:
    """Return the median of seven series; on a GPU the host's time to queue a call."""
    series = []
    for _ in range(8):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = now()
        for _ in range(calls):
            call()
        series.append((now() - start) / calls * 1e6)
    return statistics.median(series[1:])


def overhead(
    names: list[str], device: torch.device, calls: int, now: Callable[[], float]
) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        operator = OPERATORS[name]
        shape = TINY.get(name, (2, 64))
        work = operator.prepare(shape, device, torch.float32)
        row: dict[str, Any] = {"operator": name, "shape": list(shape)}
        for side, way in (("ours", work.ours), ("torch", work.torch)):
            call = functools.partial(way, *work.arguments)
            with torch.no_grad():
                row[side] = per_call_us(call, device, calls, now)
            if work.leaves:
                row[f"{side} with gradient"] = per_call_us(call, device, calls, now)
        rows.append(row)
    return rows


def bare_call_us(device: torch.device, calls: int, now: Callable[[], float]) -> float:
    """Time a C function through ctypes, without torch's dispatcher and checks (GPU: the launch)."""
    x = torch.randn(4, 16, device=device)
    out = torch.empty_like(x)
    call = functools.partial(attention._CAUSAL, x, out, x, 4, 4, 16, attention.NO_WINDOW, 1.0)
    return per_call_us(call, device, calls, now)


# ---- command line --------------------------------------------------------------------------------


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if "model name" in line
        ]
        model = names[0] if names else model
    return f"{model}, {torch.get_num_threads()} thread(s)"


def cases(
    names: list[str], dtypes: list[torch.dtype], device: torch.device, quick: bool
) -> list[tuple[str, Shape, torch.dtype]]:
    found = []
    for name in names:
        operator = OPERATORS[name]
        shapes = operator.gpu if device.type == "cuda" else operator.host
        for dtype in dtypes:
            for shape in shapes[:1] if quick else shapes:
                if device.type == "cuda":
                    shape = enlarged(operator, shape, dtype.itemsize, GPU_BYTES)
                found.append((name, shape, dtype))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda (CUDA or ROCm) if there is one"
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=("float32", "bfloat16", "float16"),
        default=["float32", "bfloat16"],
        help="default: float32 bfloat16",
    )
    parser.add_argument("--op", nargs="+", choices=sorted(OPERATORS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="one shape each and few rounds")
    parser.add_argument(
        "--busy",
        action="store_true",
        help="for a shared CPU: one thread, and CPU time instead of elapsed time",
    )
    parser.add_argument("--output", type=Path, help="folder for kernels.json and kernels.md")
    parser.add_argument(
        "--roofline", action="store_true", help="print the estimate for MI250X and exit"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.roofline:
        print(markdown(roofline_table()), end="")
        return
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    console, names = (
        Console(width=max(140, shutil.get_terminal_size().columns)),
        options.op or list(OPERATORS),
    )
    found = library.find(device.type)
    if found.handle is None:
        raise SystemExit(f"there is nothing to compare: {found.line}")
    head = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(device),
        "torch": torch.__version__,
        "library": found.line,
    }
    console.print("\n".join(head.values()), highlight=False)
    gpu = device.type == "cuda"
    now = time.process_time if options.busy else time.perf_counter
    clock: Clock = GpuClock() if gpu else HostClock(now)
    copied_bytes, budget_s = 2 * (2**30 if gpu else 2**27), 0.1 if options.quick else 1.2
    copy, rows = copying(device, copied_bytes), []
    missing: dict[str, list[str]] = {}
    work = cases(names, [getattr(torch, name) for name in options.dtype], device, options.quick)
    for name, shape, dtype in track(
        work, "measuring", console=console, disable=not console.is_terminal
    ):
        row, absent = run_operator(name, shape, dtype, device, clock, budget_s, copy)
        rows.append(row)
        for side, why in absent.items():
            missing.setdefault(f"{side} ({why})", []).append(name)
        if not console.is_terminal:
            print(
                f"{name} {shape_text(shape)} {row.dtype}: torch / ours "
                f"{row.ratios['torch']['both']:.2f}",
                flush=True,
            )
    copy_s = statistics.median(row.seconds["copy"]["forward"] for row in rows)
    head["copy"] = f"a copy moves {copied_bytes / copy_s / 1e9:.1f} GB/s (read and written)"
    calls = overhead(names, device, 200 if options.quick else 1000, now)
    bare = bare_call_us(device, 2000, now)
    table = gpu_table(rows, copied_bytes) if gpu else host_table(rows)
    tables = [
        ("bytes/s over the copy's" if gpu else "time, torch's over ours", table),
        ("microseconds of a call on a few elements", overhead_table(calls)),
    ]
    notes = [f"left out: {why}: {', '.join(dict.fromkeys(ops))}" for why, ops in missing.items()]
    notes += [f"a C function through ctypes alone: {bare:.1f} us"]
    notes += [] if gpu else judged(rows)
    for title, lines in tables:
        show(console, title, lines)
    console.print("\n".join([head["copy"], *notes]), highlight=False)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        record = {
            **head,
            "rows": [vars(row) for row in rows],
            "overhead": calls,
            "bare_call_us": bare,
            "notes": notes,
        }
        (options.output / "kernels.json").write_text(json.dumps(record, indent=1) + "\n")
        text = "".join(f"{title}:\n\n{markdown(lines)}\n" for title, lines in tables)
        (options.output / "kernels.md").write_text(
            "; ".join(head.values()) + "\n\n" + text + "\n".join(notes) + "\n"
        )


if __name__ == "__main__":
    # Without the first setting a CPU spends its time on fresh pages, on every side alike.
    wanted = {"GLIBC_TUNABLES": ALLOCATOR} | (
        {"OMP_NUM_THREADS": "1"} if "--busy" in sys.argv else {}
    )
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    main()
