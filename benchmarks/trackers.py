"""Cost of trackers: step time with all of them on and off, alternating in blocks of one run.

    WANDB_MODE=offline python -m benchmarks.trackers [--blocks 20] [--block 10] [--hidden 256]

Predicted before the first measurement: less than 1 % of a step (PREDICTED). Every step is a log
line, so that each step's events are written during the next one, by threads that compete with the
step for Python's lock and the cores. TensorBoard, Weights & Biases (offline), MLflow (SQLite) and a
callback of one's own are on; the metrics file is always on. Before a block the trackers catch up,
and its first step is not counted. A real run of longer steps has a smaller share.
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

from results import figure  # noqa: E402

import megatron  # noqa: E402
from megatron import program  # noqa: E402

PREDICTED = 0.01


class Alternate(megatron.Callback):
    """Turns the trackers off and on after every `block` steps, and keeps the times of the steps."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.blocks: list[tuple[bool, list[float]]] = []
        self.cpu_s: dict[str, list[float]] = {}
        self._behind: list[Any] = []
        self._last = 0.0

    def on_start(self, run: Any) -> None:
        self._behind = run.reporter._behind
        for tracker in self._behind:
            self._measure(tracker._callback, self.cpu_s.setdefault(tracker._name, []))

    def _measure(self, callback: Any, seconds: list[float]) -> None:
        """Keep the processor time of each event, which noise of the machine hardly changes."""
        given = callback.on_event

        def measured(event: Any) -> None:
            start = time.thread_time()
            given(event)
            seconds.append(time.thread_time() - start)

        callback.on_event = measured

    def on_step(self, run: Any, step: Any) -> None:
        now = time.perf_counter()
        if (step.iteration - 1) % self.block == 0:
            on = len(self.blocks) % 2 == 0
            while any(tracker._published > tracker._taken for tracker in self._behind):
                time.sleep(0.01)
            run.reporter._behind = self._behind if on else []
            self.blocks.append((on, []))
        else:
            self.blocks[-1][1].append(now - self._last)
        self._last = time.perf_counter()

    def on_end(self, run: Any) -> None:
        run.reporter._behind = self._behind  # all of them are closed

    def on_event(self, event: Any) -> None:
        pass


def ratios(blocks: list[tuple[bool, list[float]]]) -> list[float]:
    """Return the step time of each block with trackers over that of the block after it."""
    medians = [statistics.median(times) for _, times in blocks]
    return [on / off for on, off in zip(medians[::2], medians[1::2], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of trackers.")
    for name, value in (("hidden", 256), ("layers", 4), ("sequence", 256), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--block", type=int, default=10)
    arguments = parser.parse_args()
    os.environ.setdefault("WANDB_MODE", "offline")
    alternate = Alternate(arguments.block)
    with tempfile.TemporaryDirectory() as folder:
        sizes = (
            f"--num-layers {arguments.layers} --hidden-size {arguments.hidden} "
            f"--seq-length {arguments.sequence} --max-position-embeddings {arguments.sequence} "
            f"--global-batch-size {arguments.batch} --num-attention-heads 4 --micro-batch-size 1 "
            f"--train-iters {arguments.blocks * arguments.block} --lr 1e-4 --mock-data "
            "--tokenizer-type NullTokenizer --vocab-size 1000 --eval-iters 0 --log-interval 1 "
            f"--log-params-norm --metrics-file {folder}/metrics.jsonl "
            f"--tensorboard-dir {folder}/tensorboard --wandb-project benchmark "
            f"--wandb-save-dir {folder} --mlflow-tracking-uri sqlite:///{folder}/mlflow.db"
        )
        with contextlib.redirect_stdout(sys.stderr):
            code = program.run(sizes.split(), callbacks=[alternate])
    if code:
        raise SystemExit(code)
    found = figure([r - 1 for r in ratios(alternate.blocks)], floor=0.0)
    off_s = statistics.median(s for on, times in alternate.blocks if not on for s in times)
    print(f"step without trackers: {1e3 * off_s:.1f} ms")
    for name, seconds in alternate.cpu_s.items():
        print(f"  processor time of an event: {1e3 * statistics.median(seconds):6.2f} ms  {name}")
    print(
        f"trackers add {100 * found['median']:+.2f} % of a step (pairs of blocks: "
        f"{100 * found['min']:+.2f} to {100 * found['max']:+.2f} %, {found['count']:.0f} pairs); "
        f"predicted: less than {100 * PREDICTED:.0f} %"
    )


if __name__ == "__main__":
    main()
