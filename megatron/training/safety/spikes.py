"""Loss spikes: steps whose loss is far above the last ones, and the way back to a checkpoint around their samples
(Chowdhery et al., PaLM, arXiv 2204.02311, section 5.1)."""
from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.find import Found, find
from megatron.config import Config
from megatron.data.left_out import around, merged
from megatron.data.sampler import sample_order
from megatron.errors import TrainingError
from megatron.parallel import collectives
from megatron.parallel.topology import Topology
from megatron.training.report.metrics import StepRecord
from megatron.training.run.checkpoints import load_checkpoint, say_found
from megatron.training.run.data import open_stream
from megatron.training.run.state import Progress, Run

MOST = 5
"""How often a run goes back to one checkpoint. Each time the samples of one more step are left out; a loss that spikes
again after that is caused by the weights, and no choice of samples will help."""
_LEAST = 10  # losses needed for a median, or the whole window if that is shorter


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
            f"the loss {self.loss:.6g} of iteration {self.iteration} is {self.loss / self.median:.3g} times the median "
            f"of the steps before it, {self.median:.6g}"
        )


class SpikeRule:
    """--loss-spike-factor: finds steps whose loss is not finite, or exceeds the factor times the median of the last
    --loss-spike-window steps.

    `went_back` counts how often the run went back to the checkpoint of an iteration. The losses are kept in
    `progress.recent_losses`, so that a resumed run decides like one that was not interrupted. A step costs one
    reduction of a number over all ranks, and the host waits for it: the decision must be known before the next step.
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
        """Take note of a step and its `mean_loss`; return the spike, if it is one, the same on all ranks."""
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
        """Return the loss of a step from each rank's part of it. All ranks call this; waits for the device."""
        total = torch.zeros((), dtype=torch.float64, device=self._topology.device)
        if loss is not None:
            total += loss
        return float(collectives.all_reduce(total, self._topology.world))


def roll_back(run: Run, spike: Spike) -> bool:
    """Restore `run` from its newest good checkpoint before the spike, without the samples of the step.

    Weights, optimizer, counters, ledger and stream are as if a run had been resumed from that checkpoint with the
    samples in `Progress.left_out`, which later checkpoints contain. Where there is no such checkpoint, returns False
    and changes nothing but the log. All ranks call this between two steps, after they agreed on `spike`.

    Raises TrainingError when the run went back to the same checkpoint MOST times already, CheckpointError when none can
    be loaded.
    """
    reporter, saves = run.reporter, run.saves
    figures: dict[str, Any] = {"iteration": spike.iteration, "lm_loss": spike.loss, "median": spike.median}
    reporter.say(f"WARNING: {spike}")
    if saves is not None:
        saves.settle()  # what is being written is from before the spike
    found = _checkpoint_before(run, spike)
    if found is None or found.folder is None:
        reporter.say("WARNING: there is no checkpoint from before it to go back to: training continues")
        reporter.metrics.write("loss_spike", **figures, folder=None)
        return False
    # Everything is loaded, including what the flags left out of the first checkpoint of the run.
    config = run.config.replace(
        load=run.config.checkpoint.save, load_tag=None, finetune=False, no_load_optim=False, reset_iteration=False
    )
    progress = load_checkpoint(config, run.topology, run.engine, found.folder, reporter)
    run.spikes.went_back[progress.iteration] += 1
    if run.spikes.went_back[progress.iteration] > MOST:
        raise TrainingError(
            f"{spike}, after the run went back to the checkpoint of iteration {progress.iteration} {MOST} times and "
            f"left out the samples of as many steps: go back further with --load-tag, lower --lr, or raise "
            f"--loss-spike-factor {run.config.training.loss_spike_factor}"
        )
    first, last = _resume(run, spike, progress)
    if saves is not None:
        saves.saved_iteration = progress.iteration
    left_out = run.progress.left_out
    reporter.say(
        f"WARNING: back to iteration {progress.iteration}; samples {first} to {last} of the data order are left out "
        f"from now on ({sum(stop - start for start, stop in left_out)} in all)"
    )
    reporter.metrics.write(
        "loss_spike", **figures, back_to_iteration=progress.iteration, samples=[first, last + 1], left_out=left_out,
        sources=None if run.ledger is None else run.ledger.record(),
    )  # fmt: skip
    return True


def _checkpoint_before(run: Run, spike: Spike) -> Found | None:
    """Find the newest good checkpoint that this run wrote or started from, of an iteration before the spike."""
    directory, newest = run.config.checkpoint.save, run.saves.saved_iteration if run.saves is not None else None
    if directory is None or newest is None:
        return None
    from megatron.checkpoint.together import decided_by_first  # imports torch's checkpoints, which takes long

    before = min(spike.iteration, newest + 1)  # later ones in the folder are of another run
    found = decided_by_first(run.topology, partial(find, directory, before=before))
    say_found(found, run.reporter.say, run.reporter.metrics)
    return found


def _resume(run: Run, spike: Spike, progress: Progress) -> tuple[int, int]:
    """Resume from `progress`, the counters of the loaded checkpoint, without the samples of the spike; return the first
    and last position that are left out."""
    before, kind = run.progress.left_out, run.config.data.dataloader_type
    ranges = merged(before)
    first, last = around(np.array([spike.start, spike.stop - 1], np.int64), ranges).tolist()
    left_out = merged([*ranges, (first, last + 1)])
    sources = progress.sources
    for field in dataclasses.fields(Progress):  # in place: others hold it, and the list of losses
        value = getattr(progress, field.name)
        if isinstance(value, list):
            getattr(run.progress, field.name)[:] = value
        else:
            setattr(run.progress, field.name, value)
    run.progress.left_out[:] = [list(pair) for pair in left_out]
    dataset, consumed = run.datasets.train, progress.consumed_samples
    assert dataset is not None, "a run that trains has training data"
    if run.ledger is not None:
        samples = sample_order(kind, len(dataset), ranges).indices(np.arange(spike.start, spike.stop, dtype=np.int64))
        order = sample_order(kind, len(dataset), left_out)
        run.ledger = run.ledger.rolled_back(order, consumed, sources, samples)
    run.train_stream.close()
    run.train_stream = open_stream(run.config, run.topology, dataset, consumed, run.eod, left_out)
    run.accounted_iteration = progress.iteration
    run.skips.reset()
    return first, last
