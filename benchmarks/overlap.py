"""Step time by link delay, measured (artificial delay on gloo) and predicted, with and without
overlap.

    python benchmarks/overlap.py [--only pp dp tp] [--quick] [--real] [--slower 4]

pp   Pipelines of sleeping stages, 2 and 4 ranks, each schedule, predicted from the schedule and the
     length of a pass (tests/helpers/replay.py): the median of sleeps without delay, since a sleep
     of 20 ms takes slightly longer. "off" means that messages are posted late: receives when they
     are needed, or for the interleaved schedule in the sequence of a step without latency.
dp   The program with two replicas, ZeRO-1: --overlap-grad-reduce and --overlap-param-gather, on and
     off.
tp   The program with two tensor ranks: --tp-comm-overlap, on and off.

dp and tp are predicted from the windows without delay: these give each rank's compute time between
its messages, and the messages are simulated on links with the delay (replay.py). The links are
those of benchmarks/delayed_links.py. Figures are medians of several windows in one run. Matrix
products of dp and tp sleep as long as a machine of a given rate would compute, so that rows are
meaningful on a busy machine, too; --real computes them. A Chrome trace per rank and a plot per row,
with the last delay, are written to the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

import overlap_replay  # noqa: E402

from megatron.pipeline import schedule as schedule_module  # noqa: E402
from megatron.pipeline.orders import Op  # noqa: E402
from megatron.pipeline.schedule import Schedule, build_schedule  # noqa: E402
from tests.helpers.replay import Replay, actions_of, replay  # noqa: E402

Windows = list[list[dict[str, Any]]]  # [rank][window]
Delay = tuple[float, float | None]  # seconds, gigabytes per second

SECONDS = {
    Op.FORWARD: 0.020,
    Op.BACKWARD: 0.040,
    Op.BACKWARD_INPUT: 0.020,
    Op.BACKWARD_WEIGHT: 0.020,
}
NUMEL = 25_000  # 0.1 MB

PROGRAM = (
    "--num-layers 4 --num-attention-heads 4 --seq-length 512 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1023 --train-iters 10000 --eval-iters 0 "
    "--num-workers 0 --log-interval 10000"
).split()
# by --real; small where products only take time
SIZES = {False: "--hidden-size 64", True: "--hidden-size 256"}
GFLOPS_PER_S = {"dp": 5.0, "tp": 2.5}
PARALLEL = {
    "dp": "--micro-batch-size 1 --global-batch-size 4",
    "tp": "--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 2 "
    "--sequence-parallel",
}
BUCKETS = {False: 40_000, True: 500_000}  # elements, by --real
FLAGS = {
    "dp": {
        True: "--overlap-grad-reduce --overlap-param-gather",
        False: "--no-overlap-grad-reduce --no-overlap-param-gather",
    },
    "tp": {True: "--tp-comm-overlap", False: "--no-tp-comm-overlap"},
}
DELAYS: dict[str, list[Delay]] = {
    "pp": [(0.0, None), (0.005, None), (0.010, None), (0.002, 0.0125), (0.020, None)],
    "dp": [(0.0, None), (0.001, 0.02), (0.001, 0.01), (0.001, 0.005)],
    "tp": [(0.0, None), (0.0005, 0.1), (0.0005, 0.05), (0.0005, 0.025)],
}
FASTER_LINKS = 10.0  # with --real, whose messages are larger and whose products are faster


class Failed(Exception):
    """Failure of a process of a row, with the reason."""


def run_job(job: dict[str, Any], size: int, folder: Path) -> Windows:
    """Start `size` workers and collect what they recorded."""
    (folder / "job.json").write_text(json.dumps(job))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    processes = []
    for rank in range(size):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            str(ROOT / "benchmarks" / "overlap_worker.py"),
            str(folder / "job.json"),
            str(folder / f"windows{rank}.json"),
        ]
        log = (folder / f"log{rank}.txt").open("w")
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
        )
    codes = [process.wait() for process in processes]  # all of them, also after one that failed
    if any(codes):
        lines = (folder / "log0.txt").read_text().strip().splitlines()
        raise Failed(lines[-1] if lines else "no output")
    return [json.loads((folder / f"windows{rank}.json").read_text()) for rank in range(size)]


def of_delay(windows: Windows, delay: Delay) -> list[list[dict[str, Any]]]:
    """The windows of all ranks with this delay: [round][rank]."""
    return [list(ranks) for ranks in zip(*windows, strict=True) if ranks[0]["delay"] == list(delay)]


def step_ms(rounds: list[list[dict[str, Any]]], steps: int) -> float:
    """Median over the rounds of the time from the first start to the last end, for one step."""
    spans = [max(w["ended"] for w in ranks) - min(w["started"] for w in ranks) for ranks in rounds]
    return statistics.median(spans) / steps * 1e3


def write_pictures(
    row: str, rounds: list[list[dict[str, Any]]], predicted: Replay, folder: Path
) -> None:
    """Traces and a picture of the last round."""
    name = re.sub(r"\W+", "_", row)
    for rank, window in enumerate(rounds[-1]):
        overlap_replay.write_trace(window, rank, folder / f"trace_{name}_rank{rank}.json")
    overlap_replay.plot(rounds[-1], predicted, row, folder / f"{name}.png")


def show(row: str, delay: Delay, figures: Iterable[tuple[float, float]]) -> None:
    link = f"{delay[0] * 1e3:5.1f} ms" + (f" + {delay[1]:5.3f} GB/s" if delay[1] else "")
    cells = [f"{p:8.1f} {m:8.1f} {100 * (m / p - 1):+6.1f}%" for p, m in figures]
    print(f"{row:34s} {link:22s} " + "  | ".join(cells), flush=True)


def head(title: str) -> None:
    print(
        f"\n{title}\n{'ms per step':34s} {'link':22s} {'overlap off: predicted, measured':26s}  | "
        "on",
        flush=True,
    )


def slowed(delays: Iterable[Delay], slower: float) -> list[Delay]:
    return [(latency * slower, bandwidth and bandwidth / slower) for latency, bandwidth in delays]


def pipelines(quick: bool, slower: float, folder: Path) -> None:
    forward_ms = SECONDS[Op.FORWARD] * slower * 1e3
    head(
        f"Pipelines of sleeping stages ({forward_ms:g} ms forward, twice that backward; messages "
        "of 0.1 MB)"
    )
    rounds = 1 if quick else 3
    delays = slowed(DELAYS["pp"][:3] if quick else DELAYS["pp"], slower)
    for size in (2, 4):
        for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)):
            micro_batches, row = 2 * size, f"{name} pp{size}"
            late = "other order" if chunks > 1 else "at need"
            found: dict[bool, Windows] = {}
            for ahead in (False, True):
                job = dict(
                    kind="sleeps",
                    delays=delays,
                    rounds=rounds,
                    steps=1,
                    schedule=name,
                    chunks=chunks,
                    numel=NUMEL,
                    micro_batches=micro_batches,
                    late=None if ahead else late,
                    seconds={op.letters: seconds * slower for op, seconds in SECONDS.items()},
                )
                found[ahead] = run_job(job, size, folder)
            for delay in delays:
                figures = []
                for ahead in (False, True):
                    seconds = pass_seconds(of_delay(found[ahead], delays[0]))
                    schedule = build_schedule(name, size, chunks, micro_batches)
                    predicted = predict_pipeline(schedule, seconds, delay, None if ahead else late)
                    # Every step ends with a barrier, which has a delay of its own: one latency.
                    seen = of_delay(found[ahead], delay)
                    figures.append(((predicted.makespan + delay[0]) * 1e3, step_ms(seen, 1)))
                    if delay == delays[-1]:
                        write_pictures(f"{row} {'on' if ahead else 'off'}", seen, predicted, folder)
                show(row, delay, figures)


def pass_seconds(rounds: list[list[dict[str, Any]]]) -> dict[Op, float]:
    """The median length of each kind of pass."""
    spans: dict[Op, list[float]] = {op: [] for op in SECONDS}
    of_letter = {op.letters: op for op in SECONDS}
    for window in (window for ranks in rounds for window in ranks):
        for label, start, end in window["computed"]:
            spans[of_letter[label[0]]].append(end - start)
    return {op: statistics.median(found) if found else SECONDS[op] for op, found in spans.items()}


def predict_pipeline(
    schedule: Schedule, seconds: dict[Op, float], delay: Delay, late: str | None
) -> Replay:
    """The schedule over links with this delay; `late` as in overlap_worker.sleeps."""
    if late == "other order":
        schedule = in_nominal_sequence(schedule)
    occupies = NUMEL * 4 / (delay[1] * 1e9) if delay[1] else 0.0
    return replay(actions_of(schedule, seconds, occupies, delay[0], posted_ahead=late != "at need"))


def in_nominal_sequence(schedule: Schedule) -> Schedule:
    """The same computations with their messages in the sequence of a step without latency."""
    from unittest import mock

    with mock.patch.object(schedule_module, "planned_latency", lambda chunks: 0.0):
        build_schedule.cache_clear()
        other = build_schedule(
            schedule.name, schedule.pipeline_size, schedule.chunks, schedule.micro_batches
        )
    build_schedule.cache_clear()
    return other


def programs(kind: str, quick: bool, real: bool, slower: float, folder: Path) -> None:
    pace = "as fast as they are" if real else f"paced to {GFLOPS_PER_S[kind] / slower:g} GFLOP/s"
    head(f"{PARALLEL[kind]}, products {pace}: {FLAGS[kind][True]}")
    delays = slowed(DELAYS[kind], 1 / FASTER_LINKS if real else slower)
    rounds, steps = 2 if quick else 5, 2 if quick else 4
    found: dict[bool, Windows] = {}
    for on in (False, True):
        flags = (
            f"{PARALLEL[kind]} {SIZES[real]} --zero-reduce-bucket-size {BUCKETS[real]} "
            f"{FLAGS[kind][on]}"
        )
        job = dict(
            kind="program",
            delays=delays,
            rounds=rounds,
            steps=steps,
            arguments=PROGRAM + flags.split(),
            gflops_per_s=None if real else GFLOPS_PER_S[kind] / slower,
        )
        try:
            found[on] = run_job(job, 2, folder)
        except Failed as error:
            print(f"{kind} {'on' if on else 'off'}: {error}")
            return
    for delay in delays:
        figures = []
        for on in (False, True):
            base, seen = of_delay(found[on], delays[0]), of_delay(found[on], delay)
            replays = [
                replay([overlap_replay.actions_of_window(w, *delay) for w in ranks])
                for ranks in base
            ]
            predicted = statistics.median(r.makespan for r in replays) / steps * 1e3
            figures.append((predicted, step_ms(seen, steps)))
            if delay == delays[-1]:
                write_pictures(f"{kind} {'on' if on else 'off'}", seen, replays[-1], folder)
        show(kind, delay, figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=("pp", "dp", "tp"), default=["pp", "dp", "tp"])
    parser.add_argument("--quick", action="store_true", help="fewer delays and repetitions")
    parser.add_argument(
        "--real", action="store_true", help="dp and tp with real products, for an idle machine"
    )
    parser.add_argument(
        "--slower",
        type=float,
        default=1.0,
        help="multiply sleeps, products and delays by this factor, for a busy machine",
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "overlap")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for kind in arguments.only:
        if kind == "pp":
            pipelines(arguments.quick, arguments.slower, arguments.folder)
        else:
            programs(kind, arguments.quick, arguments.real, arguments.slower, arguments.folder)


if __name__ == "__main__":
    main()
