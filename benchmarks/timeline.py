"""Cost of the timeline, with steps recorded and not recorded in turns of one run.

    python -m benchmarks.timeline [--pipeline 2] [--interval 10] [--pairs 20] [--hidden 256]

The processes train on this CPU with a log line every `interval` iterations. Every second time the
last step before the line is recorded, gathered and reported; the first recorded step also writes
timeline.json, which then happens once a minute. Each figure is the time from line to line, over the
iterations between. Pairs of neighbours are compared, so that a load that changes slowly cancels; on
a loaded machine the CPU time says more. The cost is also counted: marks of a step times the time of
one, and the CPU time of the report. Beside it are the bubble of the recorded steps and that of the
schedule's clock.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

from megatron.protocols import Callback


class Turns(Callback):
    """Records every second interval, and takes the wall and CPU time of each, per step."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []
        self.reports: list[tuple[int, float]] = []  # marks of the step, and CPU time of the report

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def on_start(self, run: Any) -> None:
        from megatron.training.run.callbacks import Recorder  # imports torch

        self._recorded, run.timers._interval = run.timers._interval, 0
        (recorder,) = (one for one in run.callbacks if isinstance(one, Recorder))
        self._before, plain = self._now(), recorder.timeline.report

        def report(recording: Any, save_s: float) -> Any:
            begun = time.thread_time()
            result = plain(recording, save_s)
            self.reports.append((len(recording._marks), time.thread_time() - begun))
            return result

        recorder.timeline.report = report  # type: ignore[method-assign]

    def on_log(self, run: Any, figures: Any) -> None:
        """Called behind the report of an interval, which belongs to it."""
        wall, cpu = self._now()
        steps = len(figures.steps)
        self.seconds.append(((wall - self._before[0]) / steps, (cpu - self._before[1]) / steps))
        self._before = self._now()
        run.timers._interval = self._recorded - run.timers._interval


def worker(rank: int, size: int, port: int, arguments: argparse.Namespace, folder: str) -> None:
    """Train one rank; the first writes the seconds of the intervals into the folder."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import megatron

    config = megatron.Config.create(
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_attention_heads=4,
        vocab_size=1000,
        seq_length=arguments.sequence,
        max_position_embeddings=arguments.sequence,
        micro_batch_size=1,
        global_batch_size=arguments.micro_batches,
        mock_data=True,
        eval_iters=0,
        lr=1e-4,
        train_iters=(2 * arguments.pairs + 2) * arguments.interval + 1,
        log_interval=arguments.interval,
        timeline_interval=arguments.interval,
        pipeline_model_parallel_size=arguments.pipeline,
        world_size=size,
        metrics_file=f"{folder}/metrics.jsonl",
    )
    turns = Turns()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    megatron.pretrain(config, callbacks=(turns,))
    if rank == 0:
        found = {"seconds": turns.seconds, "reports": turns.reports}
        (Path(folder) / "seconds.json").write_text(json.dumps(found))


def seconds_of_a_mark() -> float:
    """Time that the record of a call takes longer while marks are kept."""
    from megatron.parallel.flight import DeviceCalls, FlightRecorder, HostEvent

    flight, call = FlightRecorder(), "flight.enter(b'all_reduce', 'tensor', 8, True);flight.leave()"
    scope, number, best = {"flight": flight}, 20_000, []
    for kept in (False, True):
        if kept:
            flight.meter = DeviceCalls(HostEvent, on_host=True)
            flight.meter.marks = []
        best.append(
            min(timeit.repeat(call, globals=scope, timer=time.thread_time, repeat=7, number=number))
            / number
        )
    return best[1] - best[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of the timeline.")
    for name, value in (
        ("pipeline", 2),
        ("interval", 10),
        ("pairs", 20),
        ("hidden", 256),
        ("layers", 4),
        ("sequence", 256),
        ("micro-batches", 8),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        free.close()
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=worker, args=(rank, arguments.pipeline, port, arguments, folder))
            for rank in range(arguments.pipeline)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        # without the first two, in which everything happens for the first time, and the last step
        found = json.loads((Path(folder) / "seconds.json").read_text())
        seconds = found["seconds"][2 : 2 + 2 * arguments.pairs]
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
    for number, what in enumerate(("wall time", "CPU time of the first rank")):
        off, on = ([one[number] for one in seconds[first::2]] for first in (0, 1))
        shares = sorted(100 * (a / b - 1) for a, b in zip(on, off, strict=True))
        quarter = len(shares) // 4
        print(
            f"{what}, {len(on)} pairs of {arguments.interval} steps: median step "
            f"{1e3 * statistics.median(on):.2f} ms recorded, {1e3 * statistics.median(off):.2f} ms "
            f"not; of the pairs the median differs by {statistics.median(shares):+.2f} %, the "
            f"middle half by {shares[quarter]:+.2f} to {shares[-1 - quarter]:+.2f} %"
        )
    marks, report_s = (statistics.median(of) for of in zip(*found["reports"], strict=True))
    mark_s = seconds_of_a_mark()
    step_s = statistics.median(cpu for _, cpu in seconds)
    counted = (marks * mark_s + report_s) / (arguments.interval * step_s)
    print(
        f"counted: {marks:.0f} marks of {1e6 * mark_s:.2f} us and a report of {1e3 * report_s:.2f} "
        f"ms in {arguments.interval} steps of {1e3 * step_s:.1f} ms CPU time: {100 * counted:.2f} %"
    )
    found = [record for record in records if record["event"] == "timeline"]
    print(
        f"bubble: {statistics.median(r['bubble'] for r in found):.3f} measured (median), "
        f"{found[0]['predicted_bubble']:.3f} by the clock of the schedule"
    )


if __name__ == "__main__":
    main()
