"""Cost of local checkpoints: step time with and without them in one run, stall, and interval.

    python benchmarks/local_saves.py [--size 30M] [--ranks 2] [--blocks 8] [--interval 0]

Ranks of this machine train a GPT by the real loop (train_step, between_steps) with ZeRO-1, each as
a node of its own, so that each sends its shards to the next. After `auto` has chosen its interval,
blocks of steps with local checkpoints and without them take turns; a block with them has as many
steps as --saves intervals, and one without has the same. A block's time is that of the slowest
rank. Printed are the ratio of the two, block by block, as median with its 95 % interval, and the
stall and the time to completion of saves.

Other programs lengthen steps, but hardly add processor time, which is that of rank 0; a save on
cores that do not train costs less than its share of this time.

A share of 1 % is lost in the scatter of steps. With a short --interval the cost of a save is many
times that, and gives the share at the interval that `auto` has chosen: both are printed.

copy         seconds and bytes per second of the copy into the slot alone
digest       seconds and bytes per second of hashing the slot, on one thread
compare      seconds of the comparison of the weights' copies, which precedes a save on disk

Expected before the first measurement, for 30M parameters (31 million: 372 MB of fp32 weights and
moments) on 2 ranks of a machine with 2 cores of an AMD EPYC, steps of 0.4 s: a rank copies 186 MB,
at 5 GB/s in 37 ms, which is the stall; hashes them at 13 GB/s in 14 ms; and sends and receives as
many through the loopback device, which copies four times, at 1.1 GB/s in 0.34 s of one core. On 2
cores that both train, that is taken from the steps: a save costs 0.2 to 0.4 s, so `auto` chooses 50
to 100 steps, and the ratio is below 1.01. With cores to spare only the stall counts: 9 steps. The
comparison reads 62 MB of bf16 weights and costs 20 times that in memory traffic, 0.15 s: more than
the copy.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import shared
from benchmarks.saves import LIMIT_S, SHAPES, Job, arguments, spread
from benchmarks.shared import ROOT, Record, markdown, parser
from megatron.jobs.scaling import median_interval
from megatron.planner.subprocesses import environment

WARM_UP = 5  # steps
NEVER = 10**12  # steps between saves
MOST_CHOOSING = 400  # steps in which `auto` must have chosen


def measured(job: Job, action: Callable[[], object], count: int = 5) -> float:
    """Return the median seconds of an action of the slowest rank."""
    times = []
    for _ in range(count):
        job.slowest(0.0)
        start = time.perf_counter()
        action()
        times.append(job.slowest(time.perf_counter() - start))
    return statistics.median(times)


def worker(size: str, interval: int, blocks: int, saves: int, folder: str) -> None:
    """Measure on this rank, and write the results of rank 0 to results.json."""
    from datetime import timedelta

    from megatron.checkpoint.local import Replication
    from megatron.checkpoint.memory_file import MemoryFile
    from megatron.checkpoint.tensors import copy_into, snapshot_bytes
    from megatron.config import parse_args
    from megatron.parallel.launch import detect_launch
    from megatron.parallel.rank_mapping import RankMapping
    from megatron.parallel.rendezvous import connect
    from megatron.training.report.events import LocalCheckpointSaved
    from megatron.training.run.host import set_up_host
    from megatron.training.run.local_saves import LocalMemory
    from megatron.training.run.process import Signals
    from megatron.training.run.setup import assemble, connect_groups

    launch = detect_launch()
    home = Path(folder)
    flags = arguments(size, launch.world_size, home / "loop")
    flags += ["--load", str(home / "loop"), "--max-restarts", "1"]
    flags += ["--non-persistent-save-interval", "auto"]
    config = parse_args(flags, launch.world_size)
    timeout = timedelta(seconds=LIMIT_S)
    rendezvous = connect(launch, timeout)
    set_up_host(config, rendezvous.device, launch)
    topology = connect_groups(config, rendezvous, timeout, RankMapping())
    jump = int(launch.world_size > 1)
    memory = MemoryFile(os.memfd_create("state"))
    local = LocalMemory(memory, Replication.between(topology, jump, timeout))
    run = assemble(config, topology, Signals(False), local=local)
    job = Job(run, home / "side")
    local_saves = run.local_saves
    assert local_saves is not None, "the flags ask for them"
    published: list[LocalCheckpointSaved] = []
    publish = run.reporter.publish

    def note(event: Any) -> None:
        if isinstance(event, LocalCheckpointSaved):
            published.append(event)
        else:
            publish(event)

    object.__setattr__(local_saves._reporter, "publish", note)
    choosing = 0
    while local_saves.interval is None or choosing < WARM_UP:
        job.step()
        choosing += 1
        assert choosing < MOST_CHOOSING, "auto must have chosen"
    by_auto = local_saves.interval
    chosen = interval or by_auto
    published.clear()

    def block(on: bool) -> tuple[float, float]:
        """Return the seconds of a step in a block, and its processor time on this rank."""
        local_saves.close()
        local_saves.interval = NEVER
        while (run.progress.iteration + 1) % chosen:
            job.step()
        # the first step of a block is followed by a save, and all of it is in the block
        local_saves.interval = chosen if on else NEVER
        steps = chosen * saves
        job.slowest(0.0)
        start, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            job.step()
        seconds, used = time.perf_counter() - start, time.process_time() - used
        return job.slowest(seconds) / steps, used / steps

    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(blocks):
        for on in (True, False) if number % 2 else (False, True):
            times[on].append(block(on))
    local_saves.close()
    tensors = job.shards()
    slot = memory.slots[0]
    size_bytes = snapshot_bytes(tensors)
    parts = {
        "copy": measured(job, lambda: copy_into(slot.memory.tensor, tensors)),
        "digest": measured(job, lambda: slot.digest(size_bytes, lambda: None)),
        "compare": measured(job, run.engine.check_copies),
    }
    if topology.rank == 0:
        results = {
            "interval": chosen,
            "auto": by_auto,
            "bytes": size_bytes,
            "on": [seconds for seconds, _ in times[True]],
            "off": [seconds for seconds, _ in times[False]],
            "used_on": [used for _, used in times[True]],
            "used_off": [used for _, used in times[False]],
            "stalls": [event.stall_s for event in published],
            "complete": [event.elapsed_s for event in published],
            "parts": parts,
        }
        (home / "results.json").write_text(json.dumps(results))
    run.close()
    rendezvous.close()
    sys.stdout.flush()
    os._exit(0)  # as a training process ends: threads of gloo may still run


def report(options: Any, answer: Record) -> str:
    """Return the results as text."""
    ratios = [on / off for on, off in zip(answer["on"], answer["off"], strict=True)]
    low, high = median_interval(ratios)
    gb = answer["bytes"] / 1e9
    of_step = statistics.median(answer["used_off"])
    of_save = answer["interval"] * (statistics.median(answer["used_on"]) - of_step)
    interval = answer["interval"]
    auto = answer["auto"]
    cost, least, most = (interval * (ratio - 1) for ratio in (statistics.median(ratios), low, high))
    rows = [
        ["quantity", "value"],
        ["interval, steps", str(interval)],
        ["interval that `auto` chose, steps", str(auto)],
        ["bytes of a rank's copy, GB", f"{gb:.3f}"],
        ["step without, s", spread(answer["off"], ".4f")],
        ["step with, s", spread(answer["on"], ".4f")],
        [
            "with / without",
            f"{statistics.median(ratios):.4f} ({low:.4f} to {high:.4f}, 95 %)",
        ],
        ["cost of a save, steps", f"{cost:.2f} ({least:.2f} to {most:.2f})"],
        [
            "share of the time at the interval of `auto`, %",
            f"{100 * cost / auto:.2f} ({100 * least / auto:.2f} to {100 * most / auto:.2f})",
        ],
        ["stall of a save, ms", spread([1e3 * s for s in answer["stalls"]], ".1f")],
        ["processor time of a save, ms", f"{1e3 * of_save:.0f}"],
        ["processor time of a step, ms", f"{1e3 * of_step:.0f}"],
        [
            "share of the processor time at the interval of `auto`, %",
            f"{100 * of_save / of_step / auto:.2f}",
        ],
        ["complete after, s", spread(answer["complete"], ".2f")],
        *(
            [f"{name}, ms", f"{1e3 * seconds:.1f} ({gb / seconds:.1f} GB/s)"]
            for name, seconds in answer["parts"].items()
        ),
    ]
    return "\n".join(markdown(rows))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--size", choices=SHAPES, default="30M")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--interval", type=int, default=0, help="default: what auto chooses")
    made.add_argument("--blocks", type=int, default=8, help="of each kind")
    made.add_argument("--saves", type=int, default=1, help="in each block with saves")
    made.add_argument("--worker", help="internal: the folder of a rank")
    options = made.parse_args()
    numbers = options.interval, options.blocks, options.saves
    if options.worker:
        worker(options.size, *numbers, options.worker)
        return
    with tempfile.TemporaryDirectory(prefix="local-saves-") as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(options.ranks)]
        words = [*sys.argv[1:], "--worker", folder]
        command = [sys.executable, str(ROOT / "benchmarks/local_saves.py"), *words]
        codes, _ = shared.launch(command, logs, environment(os.environ, 0, 1, 0), LIMIT_S)
        if any(codes):
            bad = next(log for log, code in zip(logs, codes, strict=True) if code)
            raise RuntimeError(f"exit codes {codes}: {bad.read_text(errors='replace')[-3000:]}")
        answer = json.loads((Path(folder) / "results.json").read_text())
    print(report(options, answer))


if __name__ == "__main__":
    main()
