"""The run: everything that the loop uses, assembled by setup.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from megatron.config import Config
from megatron.data.datasets import Datasets
from megatron.data.sampler import MicroBatch, MicroBatchStream
from megatron.data.tokenizer import Tokenizer
from megatron.engine.engine import Engine
from megatron.parallel.topology import Topology
from megatron.pipeline.executor import Executor
from megatron.protocols import Callback
from megatron.training.report.events import StepRecord
from megatron.training.report.metrics import (
    Interval,
    Stopwatch,
    Timers,
    TokenWeights,
)
from megatron.training.report.reporter import Reporter
from megatron.training.run.checkpoints import Saves
from megatron.training.run.local_saves import LocalSaves
from megatron.training.run.schedules import (
    BatchSchedule,
    LengthSchedule,
    Progress,
    Schedules,
)
from megatron.training.run.stopping import Agreement, StopRules, WallTime
from megatron.training.safety.watchdog import Watchdog


@dataclass(frozen=True)
class StepInProgress:
    """A step that may still be running on the device, with the values needed to count it later.

    step                            its record, without the figures that have not been read yet
    micro_batches, losses, weights  this rank's, to find out why the step was skipped, if it was
    """

    step: StepRecord
    micro_batches: Sequence[MicroBatch]
    losses: Sequence[torch.Tensor]
    weights: TokenWeights | None


@dataclass
class Skips:
    """The current streak of skipped steps.

    consecutive   number of steps in the streak
    first, scale  the first step at the latest loss scale, and that scale. The step can be repeated
                  exactly: while steps are skipped, only the scale changes, not the weights
    """

    consecutive: int = 0
    scale: float = 0.0
    first: StepInProgress | None = None


@dataclass
class LoopState:
    """Parts of a run that the loop replaces.

    train_stream  this rank's micro-batches of the training data
    in_progress   the last step, until its figures are read: `progress` does not yet show whether it
                  was skipped
    skips         the current streak of skipped steps
    went_back     {iteration: how often the run went back to the checkpoint of this iteration, after
                  loss spikes}
    """

    train_stream: MicroBatchStream
    in_progress: StepInProgress | None = None
    skips: Skips = field(default_factory=Skips)
    went_back: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class Run:
    """The parts of a run on this rank.

    tokenizer  None if only a vocabulary size is given
    saves      None without --save
    local_saves  None without --non-persistent-save-interval
    wall_time  None if the run has no time limit
    watchdog   patient until the first step is done; None with --hang-timeout 0
    callbacks  the project's and the user's, in the order in which they are called
    """

    config: Config
    topology: Topology
    tokenizer: Tokenizer | None
    chunks: torch.nn.ModuleDict
    engine: Engine
    executor: Executor
    schedules: Schedules
    batches: BatchSchedule
    lengths: LengthSchedule
    progress: Progress
    total_iterations: int
    datasets: Datasets
    interval: Interval
    reporter: Reporter
    agreement: Agreement
    stop: StopRules
    saves: Saves | None
    wall_time: WallTime | None
    watchdog: Watchdog | None
    timers: Timers
    loop: LoopState
    callbacks: list[Callback] = field(default_factory=list)
    watch: Stopwatch = field(default_factory=Stopwatch)
    local_saves: LocalSaves | None = None

    @property
    def eval_samples(self) -> int:
        """Return the number of samples of one evaluation."""
        return self.config.training.eval_iters * self.batches.global_batch_size_at_end

    @contextmanager
    def aside(self, phase: str) -> Iterator[None]:
        """Exclude work between steps from the step time, and mark it in the flight record."""
        with self.watch.paused(phase), self.topology.flight.phase(phase):
            yield

    def first_time(self, work: str) -> None:
        """Note that `work` begins, which may take longer the first time."""
        if self.watchdog is not None:
            self.watchdog.first_time(work)

    def no_first_time(self) -> None:
        """Note that the work that follows has been done before."""
        if self.watchdog is not None:
            self.watchdog.patient = False

    def saved(self, seconds: float) -> None:
        """Notify the callbacks that a checkpoint is complete; called as one of Saves.after_save."""
        for callback in self.callbacks:
            callback.on_save(self)

    def close(self) -> None:
        """Stop the watchdog, queries of Slurm and reading ahead, and close callbacks and files."""
        with ExitStack() as stack:  # last in, first out; each of them, whatever another raises
            stack.callback(self.reporter.close)
            stack.callback(self.loop.train_stream.close)
            if self.wall_time is not None:
                stack.callback(self.wall_time.close)
            for callback in reversed(self.callbacks):
                if not self.reporter.closes(callback):
                    stack.callback(callback.close)
            if self.local_saves is not None:
                stack.callback(self.local_saves.leave)
            if self.watchdog is not None:
                stack.callback(self.watchdog.stop)
