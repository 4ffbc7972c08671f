"""A run: everything that the loop works with, put together by setup.py."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron.config import Config
from megatron.data.datasets import Datasets
from megatron.data.ledger import Ledger
from megatron.data.tokenizer import Tokenizer
from megatron.engine.engine import Engine
from megatron.engine.lr import LearningRateSchedule, WeightDecaySchedule
from megatron.parallel.topology import Topology
from megatron.pipeline.executor import Executor
from megatron.training.metrics import Interval
from megatron.training.micro_batches import BatchSchedule
from megatron.training.profiling import Profiler
from megatron.training.progress import Progress
from megatron.training.reporter import Reporter
from megatron.training.stopping import StopRules
from megatron.training.streams import Stream
from megatron.training.timers import Stopwatch, Timers


@dataclass
class Run:
    """The parts of a run on this rank. `total_iterations` is where it ends; `progress` is where it stands."""

    config: Config
    topology: Topology
    tokenizer: Tokenizer | None
    chunks: torch.nn.ModuleDict
    engine: Engine
    executor: Executor
    learning_rate: LearningRateSchedule
    weight_decay: WeightDecaySchedule
    batches: BatchSchedule
    progress: Progress
    total_iterations: int
    datasets: Datasets
    train_stream: Stream
    ledger: Ledger | None
    interval: Interval
    reporter: Reporter
    stop: StopRules
    timers: Timers
    profiler: Profiler
    write_checkpoint: Callable[[Progress], None]
    watch: Stopwatch = field(default_factory=Stopwatch)
    saved_iteration: int | None = None
    accounted_iteration: int | None = None

    @property
    def eod(self) -> int | None:
        """The id that ends a document."""
        return self.tokenizer.eod if self.tokenizer is not None else None

    @property
    def eval_samples(self) -> int:
        """Samples of one evaluation."""
        return self.config.training.eval_iters * self.batches.global_batch_size_at_end

    def save_checkpoint(self) -> bool:
        """Write a checkpoint of this iteration if --save is given and there is none yet; whether it was written. All
        ranks call it."""
        if not self.config.checkpoint.save or self.saved_iteration == self.progress.iteration:
            return False
        if self.ledger is not None:
            self.progress.sources = self.ledger.record()
        self.write_checkpoint(self.progress)
        self.saved_iteration = self.progress.iteration
        return True

    def count_data(self) -> None:
        """Enter the samples of the last step into the ledger, and say which sources are begun anew."""
        if self.ledger is not None:
            for source, epoch in self.ledger.advance(self.progress.consumed_samples):
                self.reporter.say(f" data: {source} begins epoch {epoch} at iteration {self.progress.iteration}")

    def account_data(self) -> None:
        """Report what was taken of each source, unless nothing has been since the last time."""
        if self.ledger is not None and self.accounted_iteration != self.progress.iteration:
            self.reporter.sources(self.progress, self.ledger)
            self.accounted_iteration = self.progress.iteration

    def profile_step(self) -> None:
        """Start or end the profiler where the flags say so."""
        line = self.profiler.step(self.progress.iteration)
        if line:
            self.reporter.say(line)

    def close(self) -> None:
        """Close files and stop reading ahead."""
        line = self.profiler.finish()
        if line:
            self.reporter.say(line)
        self.train_stream.close()
        self.reporter.close()
