"""Handling of bad steps: rollback to a checkpoint after a loss spike, and diagnosis after too many
non-finite steps.

For the diagnosis the same micro-batches run once more while every module is checked for non-finite
values. This changes nothing: no weight moves, and the gradients are cleared. It costs one slow
step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.find import Found, find
from megatron.data.sampler import MicroBatch, around, merged, sample_order
from megatron.engine.engine import StepResult
from megatron.errors import TrainingError
from megatron.parallel import collectives
from megatron.parallel.sharding import sharding_of
from megatron.training.run.batches import Progress
from megatron.training.run.checkpoints import load_checkpoint, say_found
from megatron.training.run.data import open_stream
from megatron.training.run.state import Run, Spike, StepUnderWay

MOST = 5
"""How often a run goes back to one checkpoint. Each time the samples of one more step are left out;
a loss that spikes again after that is caused by the weights, and no choice of samples will help."""
_ABSENT = (torch.iinfo(torch.int64).max,) * 4  # the key of a rank that has found nothing
_NOTHING = (
    "none on any rank: when the step was run again every value was finite. What does not "
    "repeat is a fault of memory, of a device, or a race: check the health of the nodes"
)


def roll_back(run: Run, spike: Spike) -> bool:
    """Restore `run` from its newest good checkpoint before the spike, without the samples of the
    step.

    Weights, optimizer, counters, ledger and stream are as if a run had been resumed from that
    checkpoint with the samples in `Progress.left_out`, which later checkpoints contain. Where there
    is no such checkpoint, returns False and changes nothing but the log. All ranks call this
    between two steps, after they agreed on `spike`.

    Raises TrainingError when the run went back to the same checkpoint MOST times already,
    CheckpointError when none can be loaded.
    """
    reporter, saves = run.reporter, run.saves
    figures: dict[str, Any] = {
        "iteration": spike.iteration,
        "lm_loss": spike.loss,
        "median": spike.median,
    }
    reporter.say(f"WARNING: {spike}")
    if saves is not None:
        saves.settle()  # what is being written is from before the spike
    found = _checkpoint_before(run, spike)
    if found is None or found.folder is None:
        reporter.say(
            "WARNING: there is no checkpoint from before it to go back to: training continues"
        )
        reporter.metrics.write("loss_spike", **figures, folder=None)
        return False
    # Everything is loaded, including what the flags left out of the first checkpoint of the run.
    config = run.config.replace(
        load=run.config.checkpoint.save,
        load_tag=None,
        finetune=False,
        no_load_optim=False,
        reset_iteration=False,
    )
    progress = load_checkpoint(config, run.topology, run.engine, found.folder, reporter)
    run.spikes.went_back[progress.iteration] += 1
    if run.spikes.went_back[progress.iteration] > MOST:
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
    reporter.metrics.write(
        "loss_spike",
        **figures,
        back_to_iteration=progress.iteration,
        samples=[first, last + 1],
        left_out=left_out,
        sources=None if run.ledger is None else run.ledger.record(),
    )
    return True


def _checkpoint_before(run: Run, spike: Spike) -> Found | None:
    """Find the newest good checkpoint that this run wrote or started from, of an iteration before
    the spike.
    """
    directory, newest = (
        run.config.checkpoint.save,
        run.saves.saved_iteration if run.saves is not None else None,
    )
    if directory is None or newest is None:
        return None
    # imports torch's checkpoints, which takes long
    from megatron.checkpoint.together import decided_by_first

    before = min(spike.iteration, newest + 1)  # later ones in the folder are of another run
    found = decided_by_first(run.topology, partial(find, directory, before=before))
    say_found(found, run.reporter.say, run.reporter.metrics)
    return found


def _resume(run: Run, spike: Spike, progress: Progress) -> tuple[int, int]:
    """Resume from `progress`, the counters of the loaded checkpoint, without the samples of the
    spike; return the first and last position that are left out."""
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
        samples = sample_order(kind, len(dataset), ranges).indices(
            np.arange(spike.start, spike.stop, dtype=np.int64)
        )
        order = sample_order(kind, len(dataset), left_out)
        run.ledger = run.ledger.rolled_back(order, consumed, sources, samples)
    run.train_stream.close()
    run.train_stream = open_stream(run.config, run.topology, dataset, consumed, run.eod, left_out)
    run.accounted_iteration = progress.iteration
    run.skips.reset()
    return first, last


class Phase(enum.IntEnum):
    """Where a bad value was found, in the order of causes."""

    WEIGHT = 0
    FORWARD = 1
    BACKWARD = 2
    GRADIENT = 3  # the sum over a rank's micro-batches, of a parameter


@dataclass(frozen=True)
class _Finding:
    """The first bad value on this rank. The rank with the smallest key has the cause: keys are
    (phase, micro-batch, place in the direction of the pass, number of the check within the
    stage)."""

    key: tuple[int, ...]
    text: str
    address: int = 0  # several modules check one tensor


class _Tracer:
    """Checks weights, the inputs and outputs of every module of the chunks, and their gradients."""

    def __init__(self, run: Run, micro_batches: Sequence[MicroBatch]) -> None:
        self.first: _Finding | None = None
        self._count = 0
        self._micro_batches = list(micro_batches)
        self._last_stage = run.executor.last_stage
        # micro-batch, stage, its samples; None between forward passes
        self._now: tuple[int, int, str] | None = None
        self._size = run.config.batch.micro_batch_size

    def check(self, x: torch.Tensor, phase: Phase, micro_batch: int, place: int, text: str) -> None:
        """Record a bad value in `x` if it precedes the one found so far. Of several checks of one
        gradient the last, behind the module, is the most specific."""
        self._count += 1
        # otherwise the check would be part of the graph, which recomputation does not repeat
        x = x.detach()
        if not x.is_floating_point() or bool(torch.isfinite(x).all()):
            return
        bad, first, address = x[~torch.isfinite(x)], self.first, x.data_ptr()
        text = (
            f"{text}: {bad.numel()} of {x.numel()} values are not finite, the first is "
            f"{float(bad[0])}"
        )
        key = (int(phase), micro_batch, place, self._count)
        again = (
            first is not None
            and phase is Phase.BACKWARD
            and (first.key[:-1], first.address) == (key[:-1], address)
        )
        if first is None or again or key < first.key:
            self.first = _Finding(first.key if first is not None and again else key, text, address)

    @contextlib.contextmanager
    def installed(self, run: Run) -> Iterator[None]:
        """Hook every module of the chunks inside the context."""
        executor, handles = run.executor, list[Any]()
        # no gradient leaves this rank
        begin, executor.before_training = executor.before_training, None
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
            for handle in handles:
                handle.remove()

    def samples(self, batch: MicroBatch) -> str:
        """Return the sample numbers of a micro-batch as text."""
        return f"samples {batch.first_sample} to {batch.first_sample + self._size - 1}"

    def _enter(self, stage: int, _: Any, inputs: tuple[Any, ...]) -> None:
        batch, hidden = inputs
        index = next(i for i, one in enumerate(self._micro_batches) if one is batch)
        self._now = (index, stage, self.samples(batch))
        self._watch(hidden, f"the message from stage {stage - 1}", f"the input of stage {stage}")

    def _leave(self, _: Any, __: Any, output: torch.Tensor) -> None:
        assert self._now is not None, "the chunk was entered"
        stage = self._now[1]
        if stage != self._last_stage:
            message = f"the message from stage {stage + 1}"
            self._watch(output, f"the output of stage {stage}", message)
        self._now = None

    def _before(self, name: str, _: Any, inputs: tuple[Any, ...]) -> None:
        for x in inputs:
            self._watch(x, f"the input of {name}", f"{name}, the gradient of its input")

    def _after(self, name: str, _: Any, __: Any, outputs: Any) -> None:
        for x in outputs if isinstance(outputs, tuple | list) else (outputs,):
            self._watch(x, f"{name}, its output", f"the gradient of the output of {name}")

    def _watch(self, x: Any, forward: str, backward: str) -> None:
        # Outside of a forward pass a layer is recomputed, within a backward pass.
        if self._now is None or not isinstance(x, torch.Tensor):
            return
        index, stage, samples = self._now
        self.check(x, Phase.FORWARD, index, stage, f"forward pass of {samples}, {forward}")
        # sums of gradients are checked
        if x.requires_grad and not isinstance(x, torch.nn.Parameter):
            text = f"backward pass of {samples}, {backward}"
            x.register_hook(
                lambda gradient: self.check(gradient, Phase.BACKWARD, index, -stage, text)
            )


def diagnose(
    run: Run,
    micro_batches: Sequence[MicroBatch],
    loss_scale: float,
    loss_weights: Sequence[Any] | None = None,
) -> str:
    """Return a sentence on the first non-finite value of a step over these micro-batches, and its
    rank.

    All ranks call this while no step is under way, and get the same sentence. The order is: weights
    before activations, forward before backward passes, then by micro-batch, by stage (backward:
    from the last) and by module. Weights are those of the step when it was skipped.
    """
    run.engine.wait_for_weights()
    tracer = _Tracer(run, micro_batches)
    for stage, chunk in run.chunks.items():
        for p in chunk.parameters():
            tracer.check(p, Phase.WEIGHT, 0, int(stage), f"weight {sharding_of(p).name}")
    with tracer.installed(run):
        losses = run.executor.train(micro_batches, loss_scale=loss_scale, loss_weights=loss_weights)
    for index, (loss, batch) in enumerate(zip(losses, micro_batches, strict=False)):
        text = f"forward pass of {tracer.samples(batch)}, the loss, behind the output layer"
        tracer.check(loss, Phase.FORWARD, index, run.executor.last_stage, text)
    for stage, chunk in run.chunks.items():
        for p in chunk.parameters():
            # The norm is infinite as well where a square exceeds the range of fp32.
            text = (
                f"gradient of {sharding_of(p).name}, summed over its micro-batches and squared "
                "in fp32"
            )
            tracer.check(
                run.engine.gradient(p).float().square(), Phase.GRADIENT, 0, -int(stage), text
            )
    run.engine.clear_gradients()
    found = tracer.first or _Finding(_ABSENT, "")
    keys = collectives.gather_first(torch.tensor([found.key]), run.topology.world).tolist()
    if min(keys) == list(_ABSENT):
        return _NOTHING
    where = f"rank {run.topology.rank} ({socket.gethostname()}:{run.topology.device})"
    return str(
        collectives.broadcast_object(
            f"{where}, {found.text}", run.topology.world, keys.index(min(keys))
        )
    )


def named_modules(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules of a chunk, without module lists; layers are numbered over the whole
    model.
    """
    for name, module in chunk.named_modules():
        parts = name.split(".")
        if parts[0] == "layers" and len(parts) > 1:
            parts[1] = str(getattr(chunk.get_submodule(".".join(parts[:2])), "index", parts[1]))
        if name and not isinstance(module, torch.nn.ModuleList):
            yield ".".join(parts), module


def count_skip(run: Run, under_way: StepUnderWay, result: StepResult) -> None:
    """Count a skipped step, before the weights change again. All ranks call this.

    After too many in a row, raises TrainingError on every rank, which names the first bad value.
    """
    skips, step = run.skips, under_way.step.iteration
    over = skips.are_too_many(under_way, result)
    if not skips.scale_falls:
        run.reporter.say(
            f"WARNING: iteration {step} is skipped: loss or gradients are not finite "
            f"({skips.consecutive} in a row)"
        )
    if not over or skips.first is None:
        return
    again = skips.first
    run.reporter.say(
        f"iteration {again.step.iteration} is run again, to find the first non-finite value"
    )
    run.engine.clear_gradients()  # of the next step, which may have begun
    found = diagnose(run, again.micro_batches, skips.scale, again.weights)
    first = step - skips.consecutive + 1
    of_scale = f", the first at the loss scale {skips.scale:g}" if skips.scale_falls else ""
    run.reporter.metrics.write(
        "not_finite", iteration=again.step.iteration, skipped_since=first, first=found
    )
    raise TrainingError(
        f"loss or gradients were not finite in {skips.consecutive} steps in a row, {first} to "
        f"{step} (--max-consecutive-skips {skips.limit}); no weight moved since. The first bad "
        f"value of step {again.step.iteration}{of_scale}: {found}. Go back to an earlier checkpoint "
        "with --load-tag, leave the data out, lower --lr, or take the node out of the job"
    )
