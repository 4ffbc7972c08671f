"""Loss spikes: steps whose loss is far above the last ones (Chowdhery et al., PaLM, arXiv 2204.02311, section 5.1)."""
from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass

import torch

from megatron.config import Config
from megatron.parallel import collectives
from megatron.parallel.topology import Topology
from megatron.training.report.metrics import StepRecord
from megatron.training.run.progress import Progress

_LEAST = 10  # so many losses, or the whole window, make a median that a loss is compared with


@dataclass(frozen=True)
class Spike:
    """A step whose loss jumped.

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
        if not math.isfinite(self.loss):
            return f"the loss of iteration {self.iteration} is {self.loss}"
        assert self.median is not None, "a finite loss is a spike beside a median"
        return (
            f"the loss {self.loss:.6g} of iteration {self.iteration} is {self.loss / self.median:.3g} times the median "
            f"of the steps before it, {self.median:.6g}"
        )


class SpikeRule:
    """--loss-spike-factor: finds steps whose loss is more than so many times the median of the last
    --loss-spike-window steps, or not finite.

    `went_back` counts how often the run went back to the checkpoint of an iteration.

    The losses are kept in `progress.recent_losses`, so that a resumed run decides as one that was not interrupted.
    Where the rule is on, a step costs one reduction of a number over all ranks, and the host waits for it at its end:
    whether the run goes back is to be known before the next one.
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
        """Take note of a step and its `mean_loss`; the spike that it is, the same on all ranks."""
        assert self._factor is not None, "the rule is on"
        losses = self._progress.recent_losses
        median = statistics.median(losses) if len(losses) >= min(_LEAST, self._window) else None
        if not math.isfinite(loss) or (median is not None and loss > self._factor * median):
            start = step.consumed_samples - step.global_batch_size
            return Spike(step.iteration, loss, median, start, step.consumed_samples)
        if not step.skipped:  # a step that was left out moved no weight; its loss comes again
            losses.append(loss)
            del losses[: -self._window]
        return None

    def mean_loss(self, loss: torch.Tensor | None) -> float:
        """The loss of a step from each rank's part of it. All ranks call it; waits for the device."""
        total = torch.zeros((), dtype=torch.float64, device=self._topology.device)
        if loss is not None:
            total += loss
        return float(collectives.all_reduce(total, self._topology.world))
