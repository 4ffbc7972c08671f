"""The run: everything that the loop works with, put together by setup.py."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.data.datasets import Datasets
from megatron.data.sampler import Ledger, MicroBatch
from megatron.data.tokenizer import Tokenizer
from megatron.engine.engine import Engine, StepResult
from megatron.engine.lr import LearningRateSchedule, WeightDecaySchedule
from megatron.parallel import collectives
from megatron.parallel.topology import Topology
from megatron.pipeline.executor import Executor
from megatron.training.report.metrics import (
    Interval,
    Profiler,
    StepRecord,
    Stopwatch,
    Stragglers,
    Timers,
    TokenWeights,
)
from megatron.training.report.reporter import Reporter
from megatron.training.run.batches import BatchSchedule, Progress
from megatron.training.run.checkpoints import Saves
from megatron.training.run.data import Stream
from megatron.training.run.stopping import Agreement, StopRules, WallTime
from megatron.training.safety.watchdog import Watchdog


@dataclass
class Run:
    """The parts of a run on this rank.

    saves           None without --save
    wall_time       None where the end of the job is unknown
    stragglers      None without --straggler-report
    watchdog        patient until the first step is done; None with --hang-timeout 0
    copies_checked  whether copies of weights were compared after a step of this job that was not
                    skipped
    under_way       the last step, until its figures are read: `progress` does not know yet whether
                    it was skipped
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

    def count_data(self) -> None:
        """Count the samples of the last step in the ledger, and report which sources begin a new
        epoch.
        """
        if self.ledger is not None:
            for source, epoch in self.ledger.advance(self.progress.consumed_samples):
                self.reporter.say(
                    f" data: {source} begins epoch {epoch} at iteration {self.progress.iteration}"
                )

    def account_data(self) -> None:
        """Report what was taken of each source, if anything since the last report."""
        if self.ledger is not None and self.accounted_iteration != self.progress.iteration:
            self.reporter.sources(self.progress, self.ledger)
            self.accounted_iteration = self.progress.iteration

    def done_before(self, before: bool) -> None:
        """Set whether what comes next was done before: what is done for the first time may take
        longer.
        """
        if self.watchdog is not None:
            self.watchdog.patient = not before

    def call(self, event: str, *figures: Any) -> None:
        """Call the callbacks of the run: "on_start" and others of megatron.protocols.Callback."""
        for callback in self.config.pieces.callbacks:
            getattr(callback, event)(self, *figures)

    def close(self) -> None:
        """Close files and stop reading ahead."""
        if self.watchdog is not None:
            self.watchdog.stop()
        self.profiler.finish()
        if self.wall_time is not None:
            self.wall_time.close()
        self.train_stream.close()
        self.reporter.close()


# --- rules


_LEAST = 10  # losses needed for a median, or the whole window if that is shorter


@dataclass(frozen=True)
class StepUnderWay:
    """A step that may still be running on the device: what is needed to count it when its figures
    arrive.

    step                            what is known of it without its figures
    micro_batches, losses, weights  of this rank, to find out why it was skipped
    """

    step: StepRecord
    micro_batches: Sequence[MicroBatch]
    losses: Sequence[torch.Tensor]
    weights: TokenWeights | None


class SkipRules:
    """--max-consecutive-skips. A step that is not skipped costs nothing here.

    A non-finite loss makes its gradients non-finite (vocabulary_loss.py), so that the engine's
    decision, which is the same on all ranks, covers losses as well.

    consecutive   skipped steps in a row
    first, scale  the first of these that can be repeated exactly, and its loss scale: no weight
                  moves while steps are skipped, but the scale does
    """

    def __init__(self, config: Config, topology: Topology) -> None:
        precision = config.precision
        self.limit = config.training.max_consecutive_skips
        self.scale_falls = precision.fp16 and not precision.loss_scale
        self._topology, self._lowest = topology, precision.min_loss_scale
        self.reset()

    def reset(self) -> None:
        """Restart counting: a step was taken, or the run went back to a checkpoint."""
        self.consecutive, self.scale = 0, 0.0
        self.first: StepUnderWay | None = None

    def are_too_many(self, under_way: StepUnderWay, result: StepResult) -> bool:
        """Count a skipped step; return whether it is the --max-consecutive-skips'th in a row.

        Not in fp16 while the scale can still fall and the losses are finite: then only the scale
        was wrong. All ranks call this.
        """
        self.consecutive += 1
        if result.loss_scale != self.scale:
            self.first, self.scale = under_way, result.loss_scale
        if not self.limit or self.consecutive < self.limit:
            return False
        if not self.scale_falls or result.loss_scale <= self._lowest:
            return True
        bad = torch.zeros((), dtype=torch.int32, device=self._topology.device)
        for loss in under_way.losses:
            bad += ~torch.isfinite(loss)
        return bool(collectives.all_reduce(bad, self._topology.world, dist.ReduceOp.MAX))


@dataclass(frozen=True)
class Spike:
    """A step with a loss spike.

    iteration    the step, from 1
    loss         mean loss of its global batch; may be infinite or NaN
    median       of the steps before it; None while there were too few
    start, stop  its samples, as consumed samples before and after it
    """

    iteration: int
    loss: float
    median: float | None
    start: int
    stop: int

    def __str__(self) -> str:
        if self.median is None or not math.isfinite(self.loss):
            return f"the loss of iteration {self.iteration} is {self.loss}"
        return (
            f"the loss {self.loss:.6g} of iteration {self.iteration} is "
            f"{self.loss / self.median:.3g} times the median of the steps before it, "
            f"{self.median:.6g}"
        )


class SpikeRule:
    """--loss-spike-factor: finds steps whose loss is not finite, or exceeds the factor times the
    median of the last --loss-spike-window steps.

    `went_back` counts how often the run went back to the checkpoint of an iteration. The losses are
    kept in `progress.recent_losses`, so that a resumed run decides like one that was not
    interrupted. A step costs one reduction of a number over all ranks, and the host waits for it:
    the decision must be known before the next step.
    """

    def __init__(self, config: Config, topology: Topology, progress: Progress) -> None:
        training = config.training
        self.went_back: Counter[int] = Counter()
        self._topology, self._progress = topology, progress
        self._factor, self._window = training.loss_spike_factor, training.loss_spike_window

    def add(self, step: StepRecord, loss: float) -> Spike | None:
        """Take note of a step and its `mean_loss`; return the spike, if it is one, the same on all
        ranks.
        """
        assert self._factor is not None, "the rule is on"
        losses = self._progress.recent_losses
        median = statistics.median(losses) if len(losses) >= min(_LEAST, self._window) else None
        if not math.isfinite(loss) or (median is not None and loss > self._factor * median):
            start = step.consumed_samples - step.global_batch_size
            return Spike(step.iteration, loss, median, start, step.consumed_samples)
        if not step.skipped:  # a skipped step moved no weight; its loss comes again
            losses.append(loss)
            del losses[: -self._window]
        return None

    def mean_loss(self, loss: torch.Tensor | None) -> float:
        """Return the loss of a step from each rank's part of it. All ranks call this; waits for the
        device.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._topology.device)
        if loss is not None:
            total += loss
        return float(collectives.all_reduce(total, self._topology.world))
