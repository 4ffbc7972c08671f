"""Bad steps: rollback after a loss spike, and the search for the first non-finite value.

A run that skips too many steps in a row searches for the cause. The search runs the same
micro-batches again and checks the weights, the inputs and outputs of every module, and the
gradients. No weight changes, and the gradients are cleared. It takes the time of a slow step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.checkpoint.find import CheckpointChoice, find
from megatron.checkpoint.shared_errors import decided_by_first
from megatron.data.order import around, merged
from megatron.data.sampler import MicroBatch
from megatron.engine.engine import StepResult
from megatron.errors import TrainingError
from megatron.parallel import collectives
from megatron.parallel.sharding import sharding_of
from megatron.training.report.events import LossSpike, NotFinite, StepRecord
from megatron.training.report.metrics import loss_share, mean_of_counted
from megatron.training.run.checkpoints import load_checkpoint, report_choice
from megatron.training.run.data import open_stream
from megatron.training.run.schedules import Progress
from megatron.training.run.state import Run, Skips, StepInProgress

MOST = 5
"""Limit on returns to the same checkpoint. Each time, the samples of one more step are left out; if
the loss still spikes after that, the weights are the cause, and no choice of samples will help."""
_NOTHING = (
    "none on any rank: when the step was run again, every value was finite. A value that does not "
    "recur points to faulty memory, a faulty device or a race: check the health of the nodes"
)


_LEAST = 10  # losses needed for a median, or the whole window if that is shorter


@dataclass(frozen=True)
class Spike:
    """A step with a loss spike.

    iteration    number of the step, from 1
    loss         mean loss of its global batch; may be infinite or NaN
    median       median loss of the steps before it; None while there were too few
    start, stop  numbers of samples consumed before and after it
    """

    iteration: int
    loss: float
    median: float | None
    start: int
    stop: int

    def __str__(self) -> str:
        if not self.median or not math.isfinite(self.loss):
            return f"the loss of iteration {self.iteration} is {self.loss}"
        return (
            f"the loss {self.loss:.6g} of iteration {self.iteration} is "
            f"{self.loss / self.median:.3g} times the median of the steps before it, "
            f"{self.median:.6g}"
        )


def loss_over_ranks(run: Run, step: StepRecord) -> float | None:
    """Return the loss of a step, combined from all ranks; see mean_of_counted.

    All ranks call this. It waits for the device.
    """
    width = 3 + len(run.config.loss_components)
    total = torch.zeros(width, dtype=torch.float64, device=run.topology.device)
    if step.loss is not None:
        total = loss_share(step.loss, step.counted)
    loss, *_, counted, every = collectives.all_reduce(total, run.topology.world).tolist()
    return mean_of_counted(loss, counted, every)


def find_spike(run: Run, step: StepRecord, loss: float | None) -> Spike | None:
    """Return the spike of a step whose `loss` over all ranks is not finite or too high; else None.

    "Too high" means more than --loss-spike-factor times the median of the last --loss-spike-window
    losses. Skipped steps, earlier spikes, and steps without a token in the loss do not count.

    The losses are kept in `Progress.recent_losses`, so that a resumed run makes the same decisions
    as an uninterrupted one.
    """
    factor = run.config.training.loss_spike_factor
    window = run.config.training.loss_spike_window
    assert factor is not None, "the run searches for spikes"
    if loss is None:
        return None
    losses = run.progress.recent_losses
    median = statistics.median(losses) if len(losses) >= min(_LEAST, window) else None
    if median == 0:  # older checkpoints have a loss of 0 for steps without a token in the loss
        median = None
    if not math.isfinite(loss) or (median is not None and loss > factor * median):
        start = step.consumed_samples - step.global_batch_size
        return Spike(step.iteration, loss, median, start, step.consumed_samples)
    if not step.skipped:  # a skipped step changes no weight: the same weights would count twice
        losses.append(loss)
        del losses[:-window]
    return None


def roll_back(run: Run, spike: Spike) -> bool:
    """Restore `run` from its newest good checkpoint before the spike, without that step's samples.

    Weights, optimizer, counters, ledger and stream are as if a run had been resumed from that
    checkpoint with that step's samples in `Progress.left_out`, which later checkpoints contain.
    Returns True; if there is no such checkpoint, only reports the spike and returns False. All
    ranks call this between two steps, after they have agreed on `spike`.

    Raises TrainingError if the run has already gone back to the same checkpoint MOST times, and
    CheckpointError if that checkpoint cannot be loaded.
    """
    reporter = run.reporter
    saves = run.saves
    event = LossSpike(iteration=spike.iteration, lm_loss=spike.loss, median=spike.median)
    reporter.say(f"WARNING: {spike}")
    choice: CheckpointChoice | None = None
    if saves is not None:
        saves.settle()  # saves under way predate the spike
    if saves is not None and saves.saved_iteration is not None:
        directory = run.config.checkpoint.save
        assert directory is not None, "a run that saves has a --save folder"
        before = min(spike.iteration, saves.saved_iteration + 1)  # later ones are from another run
        choice = decided_by_first(run.topology, lambda: find(directory, before=before))
        report_choice(choice, reporter.say, reporter.publish)
    if choice is None or choice.folder is None:
        reporter.say(
            "WARNING: there is no checkpoint from before it to go back to: training continues"
        )
        reporter.publish(event)
        return False
    # Load everything, including what flags left out when the run loaded its first checkpoint.
    config = run.config.replace(
        load=run.config.checkpoint.save,
        load_tag=None,
        finetune=False,
        no_load_optim=False,
        reset_iteration=False,
    )
    progress = load_checkpoint(config, run.topology, run.engine, choice.folder, reporter)
    run.loop.went_back[progress.iteration] += 1
    if run.loop.went_back[progress.iteration] > MOST:
        raise TrainingError(
            f"{spike}, after the run went back to the checkpoint of iteration {progress.iteration} "
            f"{MOST} times and left out the samples of as many steps: go back further with "
            "--load-tag, lower --lr, or raise --loss-spike-factor "
            f"{run.config.training.loss_spike_factor}"
        )
    first, last = _resume(run, spike, progress)
    if saves is not None:
        saves.saved_iteration = progress.iteration
    left_out = run.progress.left_out
    reporter.say(
        f"WARNING: back to iteration {progress.iteration}; samples {first} to {last} of the data "
        f"order are left out from now on ({sum(stop - start for start, stop in left_out)} in all)"
    )
    reporter.publish(
        dataclasses.replace(
            event,
            back_to_iteration=progress.iteration,
            samples=[first, last + 1],
            left_out=left_out,
            sources=run.progress.sources,
        )
    )
    return True


def _resume(run: Run, spike: Spike, progress: Progress) -> tuple[int, int]:
    """Resume from `progress` of the loaded checkpoint, without the samples of the spike.

    Returns the first and the last of the positions left out.
    """
    ranges = merged(run.progress.left_out)
    first, last = around(np.array([spike.start, spike.stop - 1], np.int64), ranges).tolist()
    left_out = merged([*ranges, (first, last + 1)])
    # in place, because other objects refer to it
    vars(run.progress).update(vars(progress), left_out=[list(pair) for pair in left_out])
    dataset = run.datasets.train
    assert dataset is not None, "a run that trains has training data"
    for callback in run.callbacks:
        callback.on_rollback(run, range(spike.start, spike.stop))
    run.loop.train_stream.close()
    run.loop.train_stream = open_stream(
        run.config,
        run.topology,
        dataset,
        progress.consumed_samples,
        run.tokenizer,
        left_out,
        iteration=progress.iteration,
    )
    run.loop.skips = Skips()
    return first, last


class _Tracer:
    """Checks weights, forward passes (the inputs and outputs of every module), and gradients.

    `first` is the first bad value on this rank, with its key. The rank with the smallest key has
    the cause: keys are (phase, micro-batch, position in the direction of the pass, number of the
    check on the rank), with phases ordered from cause to effect.
    """

    WEIGHT, FORWARD, GRADIENT = range(3)

    def __init__(self, micro_batches: Sequence[MicroBatch], micro_batch_size: int) -> None:
        self.first: tuple[tuple[int, ...], str] | None = None
        self._micro_batches = list(micro_batches)
        self._size = micro_batch_size
        self._count = 0
        self._now: tuple[int, int] | None = None  # micro-batch and stage of the forward pass

    def check(self, x: Tensor, phase: int, micro_batch: int, position: int, text: str) -> None:
        """Record the first bad value in `x` if it precedes the one recorded so far."""
        self._count += 1
        # otherwise autograd would record the check, which recomputation does not repeat
        x = x.detach()
        if not x.is_floating_point() or bool(torch.isfinite(x).all()):
            return
        bad = x[~torch.isfinite(x)]
        key = (phase, micro_batch, position, self._count)
        if self.first is None or key < self.first[0]:
            values = f"{bad.numel()} of {x.numel()} values are not finite, the first is"
            self.first = key, f"{text}: {values} {float(bad[0])}"

    def check_forward(self, x: object, micro_batch: int, stage: int, what: str) -> None:
        """Check a value of a forward pass, if it is a tensor."""
        if isinstance(x, Tensor):
            first = self._micro_batches[micro_batch].first_sample
            text = f"forward pass of samples {first} to {first + self._size - 1}, {what}"
            self.check(x, self.FORWARD, micro_batch, stage, text)

    @contextlib.contextmanager
    def installed(self, run: Run) -> Iterator[None]:
        """Hook every module of the chunks inside the context."""
        executor = run.executor
        handles = list[RemovableHandle]()
        # no gradient leaves this rank
        begin = executor.before_training
        executor.before_training = None
        captures = executor.captures
        executor.captures = None  # replays call no hooks
        for stage, chunk in run.chunks.items():
            handles.append(chunk.register_forward_pre_hook(partial(self._enter, int(stage))))
            handles.append(chunk.register_forward_hook(self._leave))
            for name, module in named_modules(chunk):
                handles.append(module.register_forward_pre_hook(partial(self._before, name)))
                handles.append(module.register_forward_hook(partial(self._after, name)))
        try:
            yield
        finally:
            executor.before_training = begin
            executor.captures = captures
            for handle in handles:
                handle.remove()

    def _enter(self, stage: int, _: object, inputs: tuple[object, ...]) -> None:
        batch, hidden = inputs
        index = next(i for i, one in enumerate(self._micro_batches) if one is batch)
        self._now = (index, stage)
        self.check_forward(hidden, index, stage, f"the input of stage {stage}")

    def _leave(self, *_: object) -> None:
        self._now = None

    def _before(self, name: str, _: object, inputs: tuple[object, ...]) -> None:
        if self._now is not None:  # None: a backward pass is recomputing a layer
            for x in inputs:
                self.check_forward(x, *self._now, f"the input of {name}")

    def _after(self, name: str, _: object, __: object, outputs: object) -> None:
        if self._now is not None:
            for x in outputs if isinstance(outputs, tuple | list) else (outputs,):
                self.check_forward(x, *self._now, f"{name}'s output")


def diagnose(
    run: Run,
    micro_batches: Sequence[MicroBatch],
    loss_scale: float,
    loss_weights: Sequence[float | Tensor] | None = None,
) -> str:
    """Return a sentence about the first non-finite value of a step over these micro-batches.

    It names the value's rank. All ranks call this while no step is running, and get the same
    sentence. The order is: weights before activations, activations before gradients; activations by
    micro-batch, stage and module; gradients from the last stage and parameter to the first, as in a
    backward pass. The weights are the same as when the step was skipped.
    """
    run.engine.wait_for_weights()
    tracer = _Tracer(micro_batches, run.config.batch.micro_batch_size)
    parameters = [
        (int(stage), p) for stage, chunk in run.chunks.items() for p in chunk.parameters()
    ]
    for stage, p in parameters:
        tracer.check(p, tracer.WEIGHT, 0, stage, f"weight {sharding_of(p).name}")
    with tracer.installed(run), run.engine.local_gradients():
        losses = run.executor.train(micro_batches, loss_scale=loss_scale, loss_weights=loss_weights)
    for index, loss in enumerate(losses):
        what = "the loss, after the output layer"
        tracer.check_forward(loss, index, run.executor.last_stage, what)
    for stage, p in reversed(parameters):
        if not p.requires_grad:
            continue
        # The norm is infinite, too, if a square exceeds the range of fp32.
        squares = run.engine.gradient(p).float().square()
        text = (
            f"gradient of {sharding_of(p).name}, summed over its micro-batches and squared in fp32"
        )
        tracer.check(squares, tracer.GRADIENT, 0, -stage, text)
    run.engine.clear_gradients()
    where = f"rank {run.topology.rank} ({socket.gethostname()}:{run.topology.device})"
    local = tracer.first and (tracer.first[0], f"{where}, {tracer.first[1]}")
    reports = [one for one in collectives.gather_objects(local, run.topology.world) if one]
    return str(min(reports, key=lambda one: one[0])[1]) if reports else _NOTHING


def named_modules(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a chunk's modules, except module lists, with layers numbered over the whole model."""
    for name, child in chunk.named_children():
        if isinstance(child, nn.ModuleList):
            for number, layer in enumerate(child):
                path = f"{name}.{getattr(layer, 'index', number)}"
                yield from layer.named_modules(prefix=path)
        else:
            yield from child.named_modules(prefix=name)


def count_skip(run: Run, in_progress: StepInProgress, result: StepResult) -> None:
    """Count a skipped step, before the weights change again. All ranks call this.

    A non-finite loss makes its gradients non-finite (layers/vocabulary.py), so the engine's
    decision, which is the same on all ranks, covers losses, too. After --max-consecutive-skips in a
    row this raises TrainingError on every rank, naming the first bad value, except in fp16 while
    the loss scale can still fall and the losses are finite: then only the scale was too high.
    """
    skips = run.loop.skips
    step = in_progress.step.iteration
    precision = run.config.precision
    limit = run.config.training.max_consecutive_skips
    scale_falls = precision.fp16 and not precision.loss_scale
    skips.consecutive += 1
    if result.loss_scale != skips.scale:
        skips.first = in_progress
        skips.scale = result.loss_scale
    if not scale_falls:
        run.reporter.say(
            f"WARNING: iteration {step} is skipped: loss or gradients are not finite "
            f"({skips.consecutive} in a row)"
        )
    if not limit or skips.consecutive < limit or skips.first is None:
        return
    if scale_falls and result.loss_scale > precision.min_loss_scale:
        bad = torch.zeros((), dtype=torch.int32, device=run.topology.device)
        for loss in in_progress.losses:
            bad += ~torch.isfinite(loss).all()
        if not collectives.all_reduce(bad, run.topology.world, dist.ReduceOp.MAX):
            return
    repeated = skips.first
    run.reporter.say(
        f"iteration {repeated.step.iteration} is run again, to find the first non-finite value"
    )
    run.engine.clear_gradients()  # of the next step, which may have begun
    finding = diagnose(run, repeated.micro_batches, skips.scale, repeated.weights)
    first = step - skips.consecutive + 1
    of_scale = f", the first at the loss scale {skips.scale:g}" if scale_falls else ""
    run.reporter.publish(
        NotFinite(iteration=repeated.step.iteration, skipped_since=first, first=finding)
    )
    raise TrainingError(
        f"loss or gradients were not finite in {skips.consecutive} steps in a row, {first} to "
        f"{step} (--max-consecutive-skips {limit}); no weight has changed since. The first bad "
        f"value of step {repeated.step.iteration}{of_scale}: {finding}. Go back to an earlier "
        "checkpoint with --load-tag, leave the data out, lower --lr, or take the node out of the "
        "job"
    )
