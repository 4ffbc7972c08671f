"""Cost of trackers, which are on for every second log line of one run.

    WANDB_MODE=offline python -m benchmarks.trackers [--pairs 40] [--log-interval 10] [--hidden 256]

Predicted before the first measurement: less than 1 % of a step (PREDICTED). TensorBoard, Weights &
Biases (offline), MLflow (SQLite) and a callback of one's own are on; the metrics file is always on.
They get the entries of all steps at the log line, and write them during the next steps, by threads
that compete with the steps for Python's lock and the cores. So the time from each line over the two
steps that follow is taken, with and without trackers, and the difference of the medians is shared by
the steps from line to line. The cost is also counted, as the processor time of the trackers'
threads, which noise of the machine hardly changes. A real run has longer steps, and a smaller share.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

import megatron  # noqa: E402
from megatron import program  # noqa: E402

PREDICTED = 0.01
AFTER = 2  # steps behind a line


class Alternate(megatron.Callback):
    """Turns the trackers on and off, and takes the time behind each line without the first two.

    after_s  {whether trackers are on: wall time of AFTER steps from each line}
    steps_s  wall time of every other step
    cpu_s    processor time of each event, by tracker
    """

    def __init__(self, interval: int) -> None:
        assert interval > 2 * AFTER, "trackers end before the next line"
        self._interval = interval
        self.after_s: dict[bool, list[float]] = {True: [], False: []}
        self.steps_s: list[float] = []
        self.cpu_s: dict[str, list[float]] = {}
        self._behind: list[Any] = []
        self._line = self._last = 0.0

    def on_start(self, run: Any) -> None:
        self._behind = run.reporter._behind
        for tracker in self._behind:
            self._measure(tracker._callback, self.cpu_s.setdefault(tracker._name, []))

    def _measure(self, callback: Any, seconds: list[float]) -> None:
        given = callback.on_event

        def measured(event: Any) -> None:
            start = time.thread_time()
            given(event)
            seconds.append(time.thread_time() - start)

        callback.on_event = measured

    def on_step(self, run: Any, step: Any) -> None:
        """Called at the end of a step, before its line."""
        now, (line, behind) = time.perf_counter(), divmod(step.iteration, self._interval)
        on = line % 2 == 0
        if behind == 0:
            self._line = now
            run.reporter._behind = self._behind if on else []
            if line == 2:  # what came before also compiles, connects and creates
                for seconds in self.cpu_s.values():
                    seconds.clear()
        elif behind == AFTER and line >= 2:
            self.after_s[on].append(now - self._line)
        elif behind > AFTER:
            self.steps_s.append(now - self._last)
        self._last = now

    def on_end(self, run: Any) -> None:
        run.reporter._behind = self._behind  # all of them are closed

    def on_event(self, event: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of trackers.")
    for name, value in (("hidden", 256), ("layers", 4), ("sequence", 256), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--log-interval", type=int, default=10)
    arguments = parser.parse_args()
    os.environ.setdefault("WANDB_MODE", "offline")
    interval = arguments.log_interval
    alternate = Alternate(interval)
    steps = (2 * arguments.pairs + 2) * interval + AFTER
    with tempfile.TemporaryDirectory() as folder:
        sizes = (
            f"--num-layers {arguments.layers} --hidden-size {arguments.hidden} "
            f"--seq-length {arguments.sequence} --max-position-embeddings {arguments.sequence} "
            f"--global-batch-size {arguments.batch} --num-attention-heads 4 --micro-batch-size 1 "
            f"--train-iters {steps} --lr 1e-4 --mock-data --log-interval {interval} "
            "--tokenizer-type NullTokenizer --vocab-size 1000 --eval-iters 0 "
            f"--log-params-norm --metrics-file {folder}/metrics.jsonl "
            f"--tensorboard-dir {folder}/tensorboard --wandb-project benchmark "
            f"--wandb-save-dir {folder} --mlflow-tracking-uri sqlite:///{folder}/mlflow.db"
        )
        with contextlib.redirect_stdout(sys.stderr):
            code = program.run(sizes.split(), callbacks=[alternate])
    if code:
        raise SystemExit(code)
    on, off = (sorted(alternate.after_s[kind]) for kind in (True, False))
    interval_s, counted = interval * statistics.median(alternate.steps_s), 0.0
    print(f"step: {1e3 * interval_s / interval:.1f} ms, a log line every {interval} steps")
    for name, seconds in alternate.cpu_s.items():
        share = sum(seconds) / len(on) / interval_s
        counted += share
        print(f"  processor time of events: {100 * share:5.2f} % of a step  {name}")
    added = (statistics.median(on) - statistics.median(off)) / interval_s
    spread = (on[3 * len(on) // 4] - on[len(on) // 4]) / interval_s / len(on) ** 0.5
    print(
        f"trackers add {100 * added:+.2f} % of a step, give or take {100 * 2 * spread:.2f} ({len(on)} "
        f"lines with, {len(off)} without); counted: {100 * counted:.2f} %; predicted: less than "
        f"{100 * PREDICTED:.0f} %"
    )


if __name__ == "__main__":
    main()
