"""`make bench`: tokens/s, share of the ceiling and memory of training, compared with peers.

    python benchmarks/bench.py [--quick] [--only W1 W4 parts] [--minutes 10] [--threads N] [--output runs/bench]
    python benchmarks/bench.py --device cuda
    python benchmarks/bench.py --markdown runs/bench/DATE.json

The workloads are in workloads.py: GPT-2 124M on one process (W1), and tensor, pipeline and data
parallel runs of a smaller model on two (W2 to W4), each with pretrain_gpt.py as users start it and
with peers from PyPI that do the same work. The machine's ceiling, the rate of large matrix products
on the same number of threads, is measured in the same run, and every figure is also given as a
share of it.

Sides take turns in rounds of short runs: the first round starts every side once for a few warm-up
and measured steps, and the next one runs them in the opposite order. A machine that becomes slower
thus affects all sides, no side's memory restricts another one, and the spread includes differences
between two starts of one program (such as its memory layout). Ratios are computed within a round.
Rounds after the first run the cases that should end within --minutes of the start, those with the
fewest rounds first and then the shortest runs; notes name the cases that had fewer rounds.

A JSON file and its tables as Markdown are written to --output, and the run is compared with the
last run of the same machine in that folder.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import machine, parts, results
from benchmarks.shared import ROOT, parser, print_table
from benchmarks.sides import ALLOCATOR, PEERS, SideOutcome, environment, run
from benchmarks.workloads import OURS, Side, WorkloadCase, cpu_cases, cuda_cases, quick
from megatron.model.formulas import peak_tflops

PEAKS_OF = {"bf16": "bfloat16", "fp32": "float32"}
MOST_ROUNDS = 5
WARM_UP = 1
Key = tuple[WorkloadCase, Side]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    add = made.add_argument
    add("--quick", action="store_true", help="one tiny model of each workload, and one round")
    only = "workloads to run: W0 ... W5, on GPUs G1 ... G3; parts: optimizer, save, kernels"
    add("--only", nargs="+", metavar="NAME", help=only)
    minutes = "time for the parts and all rounds (default 10; one round is always run)"
    add("--minutes", type=float, default=10.0, metavar="N", help=minutes)
    add("--rounds", type=int, metavar="N", help="number of rounds; overrides --minutes")
    add("--steps", type=int, metavar="N", help="measured steps (default: 1 for W1, else 2)")
    add("--threads", type=int, metavar="N", help="total number of threads (default: all)")
    devices = ("cpu", "cuda")
    add("--device", choices=devices, default="cpu", help="cuda: a single GPU (CUDA or ROCm)")
    add("--output", type=Path, default=ROOT / "runs" / "bench", metavar="FOLDER")
    beside = "set-up clone of another version, whose pretrain_gpt.py replaces the peers"
    add("--beside", type=Path, metavar="CLONE", help=beside)
    add("--markdown", type=Path, metavar="FILE", help="print the tables of an earlier run and exit")
    return made.parse_args(arguments)


def choose(cases: Iterable[WorkloadCase], only: Sequence[str] | None) -> list[WorkloadCase]:
    """Return the cases of these workloads; W2, W3 and W4 include W0, their reference."""
    cases = list(cases)
    if not only:
        return cases
    known = {case.workload for case in cases} | {"parts"}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise SystemExit(f"--only {' '.join(unknown)}: the names are {', '.join(sorted(known))}")
    selected = set(only) | ({"W0"} if {"W2", "W3", "W4"} & set(only) else set())
    return [case for case in cases if case.workload in selected]


def beside(case: WorkloadCase, clone: Path) -> WorkloadCase:
    """Return the case with our sides only, each followed by the same side of another version."""
    pairs = [
        (side, replace(side, name=f"{side.name}, beside", root=clone, version_of=side))
        for side in case.sides
        if side.program == OURS.program
    ]
    return replace(case, sides=tuple(side for pair in pairs for side in pair))


def play(
    keys: list[Key],
    options: argparse.Namespace,
    threads: int,
    folder: Path,
    spent_s: float = 0.0,
) -> tuple[dict[Key, list[SideOutcome]], dict[str, list[float]]]:
    """Run rounds over the cases and sides; return the outcomes and the ceilings of each round.

    spent_s   seconds of --minutes that have passed

    A side that is left out of a round has an empty outcome for it.
    """
    outcomes: dict[Key, list[SideOutcome]] = {key: [] for key in keys}
    ceilings: dict[str, list[float]] = {}
    end = time.monotonic() + 60 * options.minutes - spent_s
    ceiling_s = 0.0
    rounds = options.rounds or (1 if options.quick else 0)
    for count in range(rounds or MOST_ROUNDS):
        chosen = {case for case, _ in keys}
        if count and not rounds:
            chosen = fitting(outcomes, end - time.monotonic() - ceiling_s)
        if not chosen:
            break
        start = time.monotonic()
        rates = measure_ceilings(keys, threads, folder, options.device, options.quick)
        for name, rate in rates.items():
            ceilings.setdefault(name, []).append(rate)
        ceiling_s = time.monotonic() - start
        for case, side in keys if count % 2 == 0 else reversed(keys):
            # a side that has failed is not started again
            outcome = next((o for o in outcomes[case, side] if o.reason), None)
            if outcome is None and (case not in chosen or (count and side.once)):
                outcome = SideOutcome()
            else:
                outcome = outcome or run(
                    case,
                    side,
                    warm_up=WARM_UP,
                    steps=options.steps or case.steps,
                    threads=threads,
                    folder=folder,
                )
                print(line(count, case, side, outcome), flush=True)
            outcomes[case, side].append(outcome)
    return outcomes, ceilings


def fitting(outcomes: dict[Key, list[SideOutcome]], left_s: float) -> set[WorkloadCase]:
    """Choose the cases for a further round of `left_s` seconds, by the times of the first round.

    Cases with the fewest rounds come first, and among these the ones whose sides ran shortest.
    """
    seconds: dict[WorkloadCase, list[float]] = {}
    for (case, side), rounds in outcomes.items():
        repeats = not side.once and not any(o.reason for o in rounds)
        seconds.setdefault(case, []).extend([rounds[0].wall_s] * repeats)
    played = {case: sum(bool(o.step_s) for o in outcomes[case, case.sides[0]]) for case in seconds}
    chosen = set()
    for case in sorted(seconds, key=lambda case: (played[case], max(seconds[case], default=0.0))):
        if seconds[case] and sum(seconds[case]) <= left_s:
            chosen.add(case)
            left_s -= sum(seconds[case])
    return chosen


def line(count: int, case: WorkloadCase, side: Side, outcome: SideOutcome) -> str:
    """Return the line that is printed after a start."""
    head = f"round {count + 1}  {case.workload} {case.name:12s} {side.name:28s}"
    if outcome.reason:
        return f"{head} {outcome.reason}"
    step = statistics.median(outcome.step_s)
    memory = (outcome.memory_bytes or 0) / results.GIB
    return (
        f"{head} {1e3 * step:8,.0f} ms/step  {case.tokens / step:8,.0f} tokens/s  {memory:6.2f} GiB"
    )


def measure_ceilings(
    keys: list[Key], threads: int, folder: Path, device: str, quick: bool
) -> dict[str, float]:
    """Return GFLOP/s of matrix products, by ceiling_name, for each number of processes."""
    rates: dict[str, float] = {}
    for processes in sorted({case.processes for case, _ in keys}):
        each = max(1, threads // processes)
        of_dtypes = machine.ceiling(each, processes, environment(each, folder), device, quick)
        for dtype, rate in of_dtypes.items():
            rates[ceiling_name(dtype, processes, each, device)] = rate
    return rates


def ceiling_name(dtype: str, processes: int, threads: int, device: str) -> str:
    return (
        f"{dtype}, {device}" if device == "cuda" else f"{dtype}, {processes} x {threads} thread(s)"
    )


def rows_of(
    keys: list[Key],
    outcomes: dict[Key, list[SideOutcome]],
    ceiling: dict[str, Any],
    threads: int,
    gpu: str = "",
) -> list[dict[str, Any]]:
    """Return the rows of the result.

    Rows of runs on several processes also have the rate relative to W0's single process, and those
    of runs on a GPU with a known peak have the MFU.
    """
    rows = []
    for case, side in keys:
        name = ceiling_name(
            case.dtype, case.processes, max(1, threads // case.processes), case.device
        )
        rate = ceiling.get(name)
        reference = outcomes[case, side.version_of or case.sides[0]]
        rows.append(
            results.row_of(
                case, side, outcomes[case, side], reference, 1e9 * rate["median"] if rate else None
            )
        )
        peak = peak_tflops(gpu, PEAKS_OF[case.dtype])
        if peak and "flops_per_s" in rows[-1]:
            rows[-1]["mfu"] = rows[-1]["flops_per_s"] / peak / 1e12
    alone = next((row for row in rows if row["workload"] == "W0" and "tokens_per_s" in row), None)
    for row in rows:
        if alone and row["workload"] in ("W2", "W3", "W4") and "tokens_per_s" in row:
            row["of_one_process"] = row["tokens_per_s"] / alone["tokens_per_s"]
    return rows


def show(record: dict[str, Any]) -> None:
    """Print heading, tables and notes."""
    print("", *results.heading(record), sep="\n")
    for title, lines in results.tables(record):
        if len(lines) > 1:
            print_table(title, lines)
    print(*results.notes(record), sep="\n")


def show_comparison(record: dict[str, Any], earlier: dict[str, Any] | None) -> None:
    """Print the changes since the last run that are larger than the stated spreads."""
    if earlier is None:
        print("there is no earlier run of this machine to compare with")
        return
    lines = results.compare(record, earlier)
    beyond = results.comparison_table(lines)
    then = f"{earlier['date']}, revision {earlier['git']['revision'][:12]}"
    counts = f"{len(beyond) - 1} of {len(lines)} figures differ by more than their spread"
    print(f"compared with {then}: {counts}")
    if len(beyond) > 1:
        print_table("beyond the spread", beyond)


def main() -> int:
    options = parse()
    if options.markdown:
        print(results.report(json.loads(options.markdown.read_text())), end="")
        return 0
    began = time.monotonic()
    date = datetime.datetime.now().isoformat(timespec="seconds")
    about = machine.describe(PEERS if PEERS.is_dir() else None)
    threads = options.threads or about["threads"]
    if options.device == "cuda":
        try:
            about["gpu"], memory = machine.device_memory()
        except RuntimeError as error:
            print(f"error: --device cuda: {error}", file=sys.stderr)
            return 2
        cases = cuda_cases(memory)
    else:
        cases = cpu_cases()
    cases = choose(cases, options.only)
    if options.beside:
        if not (options.beside / OURS.program).is_file():
            print(f"error: --beside {options.beside}: it has no {OURS.program}", file=sys.stderr)
            return 2
        cases = [beside(case, options.beside.resolve()) for case in cases]
    parts_wanted = options.device == "cpu" and (not options.only or "parts" in options.only)
    if options.quick:  # the first case of each workload has all programs
        cases = [quick(case) for case in {c.workload: c for c in reversed(cases)}.values()][::-1]
    folder = options.output.resolve() / "last"
    folder.mkdir(parents=True, exist_ok=True)
    # A side without settings takes all threads: it is comparable only if the others have all, too.
    fair = threads == about["threads"]
    keys = [
        (case, side)
        for case in cases
        for side in case.sides
        if (fair or not side.untouched) and not (options.quick and side.once)
    ]
    if about["load"] > 0.5:
        print(f"warning: the load is {about['load']}: something else runs, and figures will vary")
    measured = []
    if parts_wanted:
        first = quick(cpu_cases()[0]) if options.quick else cpu_cases()[0]
        measured = parts.measure(first, quick=options.quick, threads=threads, folder=folder)
    outcomes, ceilings = play(keys, options, threads, folder, spent_s=time.monotonic() - began)
    ceiling = {name: results.figure(rates) for name, rates in ceilings.items()}
    record = {
        "date": date,
        "quick": options.quick,
        "device": options.device,
        "git": machine.revision(),
        "machine": about,
        "threads": threads,
        "allocator": ALLOCATOR,
        "rounds": max((len(o) for o in outcomes.values()), default=0),
        "steps": options.steps or " or ".join(sorted({str(case.steps) for case in cases})),
        "warm_up": WARM_UP,
        "ceiling": ceiling,
        "rows": rows_of(keys, outcomes, ceiling, threads, about.get("gpu", "")),
        "parts": measured,
        "seconds": time.monotonic() - began,
    }
    path = results.write(record, options.output)  # before other files are read
    path.with_suffix(".md").write_text(results.report(record))
    earlier = results.last_of(options.output, record)
    show(record)
    show_comparison(record, earlier)
    print(f"{path}; logs in {folder}")
    # A peer that is absent or fails is a row; a run of ours or a part that fails is an error.
    failed = any(row["reason"] for row in record["rows"] if row["side"].startswith("ours"))
    return 1 if failed or any("value" not in row for row in measured) else 0


if __name__ == "__main__":
    # an exception, so that started processes are ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
