"""The run: everything that the loop works with, put together by setup.py."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.config import Config
from megatron.data.datasets import Datasets
from megatron.data.sampler import Ledger, MicroBatch
from megatron.data.tokenizer import Tokenizer
from megatron.engine.engine import Engine
from megatron.parallel.topology import Topology
from megatron.pipeline.executor import Executor
from megatron.training.report.events import StepRecord
from megatron.training.report.metrics import (
    Interval,
    Profiler,
    Stopwatch,
    Timers,
    TokenWeights,
)
from megatron.training.report.reporter import Reporter
from megatron.training.report.timeline import Timeline
from megatron.training.run.checkpoints import Saves
from megatron.training.run.data import Stream
from megatron.training.run.schedules import (
    BatchSchedule,
    Costs,
    Progress,
    Schedules,
)
from megatron.training.run.stopping import Agreement, StopRules, WallTime
from megatron.training.run.tasks import Task
from megatron.training.safety.watchdog import Watchdog


@dataclass(frozen=True)
class StepUnderWay:
    """A step that may still be running on the device, with what is needed to count it later.

    step                            what is known of it without its figures
    micro_batches, losses, weights  of this rank, to find out why it was skipped
    """

    step: StepRecord
    micro_batches: Sequence[MicroBatch]
    losses: Sequence[torch.Tensor]
    weights: TokenWeights | None


@dataclass
class Skips:
    """Skipped steps in a row.

    first, scale  the first of them that can be repeated exactly, and its loss scale: no weight
                  changes while steps are skipped, but the scale does
    """

    consecutive: int = 0
    scale: float = 0.0
    first: StepUnderWay | None = None


@dataclass
class Run:
    """The parts of a run on this rank.

    saves           None without --save
    wall_time       None where the end of the job is unknown
    watchdog        patient until the first step is done; None with --hang-timeout 0
    copies_checked  whether copies of weights were compared after a step of this job that moved them
    validated_iteration  the last one at which this job measured the validation loss
    evaluated       whether this job has begun an evaluation: the first one may take longer
    went_back       how often the run went back to the checkpoint of an iteration, after loss spikes
    empty_steps     steps without a token in the loss, in a row, at the last log line
    tasks           of --eval-tasks, and the iteration at which they were evaluated last
    costs           None once the time of the run is reported
    under_way       the last step, until its figures are read: `progress` does not show yet whether
                    it was skipped
    """

    config: Config
    topology: Topology
    tokenizer: Tokenizer | None
    chunks: torch.nn.ModuleDict
    engine: Engine
    executor: Executor
    schedules: Schedules
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
    saves: Saves | None
    wall_time: WallTime | None
    timers: Timers
    profiler: Profiler
    timeline: Timeline
    watch: Stopwatch = field(default_factory=Stopwatch)
    watchdog: Watchdog | None = None
    accounted_iteration: int | None = None
    copies_checked: bool = False
    validated_iteration: int | None = None
    evaluated: bool = False
    under_way: StepUnderWay | None = None
    skips: Skips = field(default_factory=Skips)
    went_back: Counter[int] = field(default_factory=Counter)
    costs: Costs | None = None
    empty_steps: int = 0
    tasks: Sequence[Task] = ()
    tasks_iteration: int | None = None

    @property
    def eod(self) -> int | None:
        """Return the token id that ends a document; None without a tokenizer."""
        return self.tokenizer.eod if self.tokenizer is not None else None

    @property
    def eval_samples(self) -> int:
        """Return the number of samples of one evaluation."""
        return self.config.training.eval_iters * self.batches.global_batch_size_at_end

    def state(self) -> dict[str, Any]:
        """Return a copy of `progress` for a checkpoint.

        Dropout masks and the order of the data are functions of seed and position, so there is no
        generator state.
        """
        if self.ledger is not None:
            self.progress.sources = self.ledger.record()
        return dataclasses.asdict(self.progress)

    def close(self) -> None:
        """Close files and stop reading ahead."""
        if self.watchdog is not None:
            self.watchdog.stop()
        self.profiler.close()
        self.timeline.write()
        if self.wall_time is not None:
            self.wall_time.close()
        self.train_stream.close()
        self.reporter.close()
