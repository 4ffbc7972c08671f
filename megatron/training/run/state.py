"""A run: everything that the loop works with, put together by setup.py."""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.config import Config
from megatron.data.datasets import Datasets
from megatron.data.ledger import Ledger
from megatron.data.tokenizer import Tokenizer
from megatron.engine.engine import Engine
from megatron.engine.lr import LearningRateSchedule, WeightDecaySchedule
from megatron.parallel.topology import Topology
from megatron.pipeline.executor import Executor
from megatron.training.report.metrics import Interval
from megatron.training.report.profiling import Profiler
from megatron.training.report.reporter import Reporter
from megatron.training.report.stragglers import Stragglers
from megatron.training.report.timers import Stopwatch, Timers
from megatron.training.run.agreement import Agreement
from megatron.training.run.batches import BatchSchedule
from megatron.training.run.data import Stream
from megatron.training.run.progress import Progress
from megatron.training.run.saving import Saves
from megatron.training.run.stopping import StopRules
from megatron.training.run.walltime import WallTime
from megatron.training.safety.skips import SkipRules, StepUnderWay
from megatron.training.safety.spikes import SpikeRule
from megatron.training.safety.watchdog import Watchdog


@dataclass
class Run:
    """The parts of a run on this rank. `total_iterations` is where it ends; `progress` is where it stands.

    saves       None without --save
    wall_time   None where nothing says when the job ends
    watchdog    patient up to the end of the first step; None with --hang-timeout 0

    copies_checked  whether copies of weights were compared after a step of this job that counted
    under_way       the last step, where nobody has asked for its figures: `progress` does not know whether it counts
    """

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
    agreement: Agreement
    stop: StopRules
    skips: SkipRules
    spikes: SpikeRule
    saves: Saves | None
    wall_time: WallTime | None
    timers: Timers
    stragglers: Stragglers | None
    profiler: Profiler
    watch: Stopwatch = field(default_factory=Stopwatch)
    watchdog: Watchdog | None = None
    accounted_iteration: int | None = None
    copies_checked: bool = False
    under_way: StepUnderWay | None = None

    @property
    def eod(self) -> int | None:
        """The id that ends a document."""
        return self.tokenizer.eod if self.tokenizer is not None else None

    @property
    def eval_samples(self) -> int:
        """Samples of one evaluation."""
        return self.config.training.eval_iters * self.batches.global_batch_size_at_end

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of `progress`, a copy.

        Dropout masks and the order of the data are functions of seed and position, so no generator state is kept.
        """
        if self.ledger is not None:
            self.progress.sources = self.ledger.record()
        return dataclasses.asdict(self.progress)

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

    def done_before(self, before: bool) -> None:
        """Tell the watchdog whether what comes next was done before, so that nothing in it has to take long."""
        if self.watchdog is not None:
            self.watchdog.patient = not before

    def call(self, event: str, *figures: Any) -> None:
        """Tell the callbacks of the run: "on_start" and others of megatron.protocols.Callback."""
        for callback in self.config.pieces.callbacks:
            getattr(callback, event)(self, *figures)

    def close(self) -> None:
        """Close files and stop reading ahead."""
        if self.watchdog is not None:
            self.watchdog.stop()
        line = self.profiler.finish()
        if line:
            self.reporter.say(line)
        if self.wall_time is not None:
            self.wall_time.close()
        self.train_stream.close()
        self.reporter.close()
