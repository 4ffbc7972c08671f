"""Rules for bad steps: skipped steps with non-finite loss or gradients, and loss spikes, whose loss
is far above that of the steps before (Chowdhery et al., PaLM, arXiv 2204.02311, section 5.1)."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.data.batch import MicroBatch
from megatron.engine.engine import StepResult
from megatron.parallel import collectives
from megatron.parallel.topology import Topology
from megatron.training.report.metrics import StepRecord, TokenWeights
from megatron.training.run.batches import Progress

_LEAST = 10  # losses needed for a median, or the whole window if that is shorter


@dataclass(frozen=True)
class StepUnderWay:
    """A step that may still be running on the device: what is needed to count it when its figures
    arrive.

    iteration, consumed_..., samples    as of the end of the step; `samples` are its own
    loss                                this rank's part of the mean loss, see local_loss
    micro_batches, losses, weights      of this rank, to find out why it was skipped
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    samples: int
    learning_rate: float
    loss: torch.Tensor | None
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
        """Count the step with `result`, before the weights change again; return whether it is the
        --max-consecutive-skips'th skipped one in a row. Not in fp16 while the scale can still fall
        and the losses are finite: then only the scale was wrong. All ranks call this."""
        if not result.skipped:
            self.reset()
            return False
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
            f"{self.loss / self.median:.3g} times the median "
            f"of the steps before it, {self.median:.6g}"
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

    @property
    def on(self) -> bool:
        return self._factor is not None

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
