"""Steps with non-finite loss or gradients: they are skipped, counted, and traced to the first bad value.

To find it, the same micro-batches run once more while every module is checked. This changes nothing: no weight moves,
and the gradients are cleared. It costs one slow step.
"""
from __future__ import annotations

import contextlib
import enum
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.data.batch import MicroBatch
from megatron.engine.engine import StepResult
from megatron.errors import TrainingError
from megatron.parallel import collectives
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology
from megatron.training.report.metrics import TokenWeights
from megatron.training.run.state import Run

_ABSENT = (torch.iinfo(torch.int64).max,) * 4  # the key of a rank that has found nothing
_NOTHING = (
    "none on any rank: when the step was run again every value was finite. What does not repeat is a fault of memory, "
    "of a device, or a race: check the health of the nodes"
)


@dataclass(frozen=True)
class StepUnderWay:
    """A step that may still be running on the device: what is needed to count it when its figures arrive.

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

    A non-finite loss makes its gradients non-finite (vocabulary_loss.py), so that the engine's decision, which is the
    same on all ranks, covers losses as well.

    consecutive   skipped steps in a row
    first, scale  the first of these that can be repeated exactly, and its loss scale: no weight moves while steps are
                  skipped, but the scale does
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
        --max-consecutive-skips'th skipped one in a row. Not in fp16 while the scale can still fall and the losses are
        finite: then only the scale was wrong. All ranks call this."""
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


class Phase(enum.IntEnum):
    """Where a bad value was found, in the order of causes."""

    WEIGHT = 0
    FORWARD = 1
    BACKWARD = 2
    GRADIENT = 3  # the sum over a rank's micro-batches, of a parameter


@dataclass(frozen=True)
class _Finding:
    """The first bad value on this rank. The rank with the smallest key has the cause: keys are (phase, micro-batch,
    place in the direction of the pass, number of the check within the stage)."""

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
        self._now: tuple[int, int, str] | None = None  # micro-batch, stage, its samples; None between forward passes
        self._size = run.config.batch.micro_batch_size

    def check(self, x: torch.Tensor, phase: Phase, micro_batch: int, place: int, text: str) -> None:
        """Record a bad value in `x` if it precedes the one found so far. Of several checks of one gradient the last,
        behind the module, is the most specific."""
        self._count += 1
        x = x.detach()  # otherwise the check would be part of the graph, which recomputation does not repeat
        if not x.is_floating_point() or bool(torch.isfinite(x).all()):
            return
        bad, first, address = x[~torch.isfinite(x)], self.first, x.data_ptr()
        text = f"{text}: {bad.numel()} of {x.numel()} values are not finite, the first is {float(bad[0])}"
        key = (int(phase), micro_batch, place, self._count)
        again = first is not None and phase is Phase.BACKWARD and (first.key[:-1], first.address) == (key[:-1], address)
        if first is None or again or key < first.key:
            self.first = _Finding(first.key if first is not None and again else key, text, address)

    @contextlib.contextmanager
    def installed(self, run: Run) -> Iterator[None]:
        """Install hooks on the modules and wrap the chunks of the executor; remove both at the end."""
        executor, handles, plain = run.executor, list[Any](), run.executor.chunks
        begin, executor.before_training = executor.before_training, None  # no gradient leaves this rank
        for chunk in run.chunks.values():
            for name, module in named_modules(chunk):
                handles.append(module.register_forward_pre_hook(partial(self._before, name)))
                handles.append(module.register_forward_hook(partial(self._after, name)))
        executor.chunks = {stage: partial(self._run, stage, chunk) for stage, chunk in plain.items()}
        try:
            yield
        finally:
            executor.chunks, executor.before_training = plain, begin
            for handle in handles:
                handle.remove()

    def samples(self, batch: MicroBatch) -> str:
        """Return the sample numbers of a micro-batch as text."""
        return f"samples {batch.first_sample} to {batch.first_sample + self._size - 1}"

    def _run(
        self, stage: int, chunk: Callable[..., torch.Tensor], batch: MicroBatch, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        index = next(i for i, one in enumerate(self._micro_batches) if one is batch)
        self._now = (index, stage, self.samples(batch))
        try:
            if hidden is not None:
                self._watch(hidden, f"the message from stage {stage - 1}", f"the input of stage {stage}")
            out = chunk(batch, hidden)
            if stage != self._last_stage:
                self._watch(out, f"the output of stage {stage}", f"the message from stage {stage + 1}")
            return out
        finally:
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
        if x.requires_grad and not isinstance(x, torch.nn.Parameter):  # sums of gradients are checked
            text = f"backward pass of {samples}, {backward}"
            x.register_hook(lambda gradient: self.check(gradient, Phase.BACKWARD, index, -stage, text))


def diagnose(
    run: Run, micro_batches: Sequence[MicroBatch], loss_scale: float, loss_weights: Sequence[Any] | None = None
) -> str:
    """Return a sentence on the first non-finite value of a step over these micro-batches, and its rank.

    All ranks call this while no step is under way, and get the same sentence. The order is: weights before activations,
    forward before backward passes, then by micro-batch, by stage (backward: from the last) and by module. Weights are
    those of the step when it was skipped.
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
            text = f"gradient of {sharding_of(p).name}, summed over its micro-batches and squared in fp32"
            tracer.check(run.engine.gradient(p).float().square(), Phase.GRADIENT, 0, -int(stage), text)
    run.engine.clear_gradients()
    found = tracer.first or _Finding(_ABSENT, "")
    keys = collectives.gather_first(torch.tensor([found.key]), run.topology.world).tolist()
    if min(keys) == list(_ABSENT):
        return _NOTHING
    where = f"rank {run.topology.rank} ({socket.gethostname()}:{run.topology.device})"
    return str(collectives.broadcast_object(f"{where}, {found.text}", run.topology.world, keys.index(min(keys))))


def named_modules(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules of a chunk, without module lists; layers are numbered over the whole model."""
    for name, module in chunk.named_modules():
        parts = name.split(".")
        if parts[0] == "layers" and len(parts) > 1:
            parts[1] = str(getattr(chunk.get_submodule(".".join(parts[:2])), "index", parts[1]))
        if name and not isinstance(module, torch.nn.ModuleList):
            yield ".".join(parts), module


def check_step(run: Run, under_way: StepUnderWay, result: StepResult) -> None:
    """Count the step with `result` as skipped or not. All ranks call this.

    When too many are skipped in a row, raises TrainingError on every rank, which names the first bad value.
    """
    skips, step = run.skips, under_way.iteration
    over = skips.are_too_many(under_way, result)
    if result.skipped and not skips.scale_falls:
        run.reporter.say(
            f"WARNING: iteration {step} is skipped: loss or gradients are not finite ({skips.consecutive} in a row)"
        )
    if not over or skips.first is None:
        return
    again = skips.first
    run.reporter.say(f"iteration {again.iteration} is run again, to find the first non-finite value")
    run.engine.clear_gradients()  # of the next step, which may have begun
    found = diagnose(run, again.micro_batches, skips.scale, again.weights)
    first = step - skips.consecutive + 1
    of_scale = f", the first at the loss scale {skips.scale:g}" if skips.scale_falls else ""
    run.reporter.metrics.write("not_finite", iteration=again.iteration, skipped_since=first, first=found)
    raise TrainingError(
        f"loss or gradients were not finite in {skips.consecutive} steps in a row, {first} to {step} "
        f"(--max-consecutive-skips {skips.limit}); no weight moved since. The first bad value of step "
        f"{again.iteration}{of_scale}: {found}. Go back to an earlier checkpoint with --load-tag, leave the data out, "
        f"lower --lr, or take the node out of the job"
    )
