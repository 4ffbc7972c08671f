"""Where a value that is not finite came from: the same micro-batches once more, with a look at every module.

Nothing is changed by it: no weight moves, and the gradients are cleared. It costs one slow step.
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

from megatron.data.batch import MicroBatch
from megatron.engine.engine import StepResult
from megatron.errors import TrainingError
from megatron.parallel import collectives
from megatron.parallel.sharding import sharding_of
from megatron.training.run.state import Run
from megatron.training.safety.skips import StepUnderWay

Key = tuple[int, ...]
_ABSENT = (torch.iinfo(torch.int64).max,) * 4  # the key of a rank that has found nothing
_NOTHING = (
    "none on any rank: when the step was run again every value was finite. What does not repeat itself is a fault "
    "of memory, of a device or of a race: look at the health of the nodes"
)


class Phase(enum.IntEnum):
    """Where a bad value was seen, in the order of causes."""

    WEIGHT = 0
    FORWARD = 1
    BACKWARD = 2
    GRADIENT = 3  # the sum over a rank's micro-batches, of a parameter


@dataclass(frozen=True)
class _Finding:
    """The first bad value on this rank. Of several ranks the one with the smallest key has the cause: keys are
    (phase, micro-batch, place in the direction of the pass, number of the look within the stage)."""

    key: Key
    text: str
    tensor: int = 0  # its address: several modules look at one tensor


class _Tracer:
    """Looks at weights, at what enters and leaves every module of the chunks, and at the gradients of these."""

    def __init__(self, run: Run, micro_batches: Sequence[MicroBatch]) -> None:
        self.first: _Finding | None = None
        self._count = 0
        self._micro_batches = list(micro_batches)
        self._last_stage = run.executor.last_stage
        self._now: tuple[int, int, str] | None = None  # micro-batch, stage, its samples; None between forward passes
        self._size = run.config.batch.micro_batch_size

    def look(self, x: torch.Tensor, phase: Phase, micro_batch: int, place: int, text: str) -> None:
        """Keep what is wrong with `x`, if it comes before what was found. Of several looks at one gradient the last,
        behind the module, says the most."""
        self._count += 1
        x = x.detach()  # otherwise the look were a part of the graph, which a second computation does not find again
        if not x.is_floating_point() or bool(torch.isfinite(x).all()):
            return
        bad, first, address = x[~torch.isfinite(x)], self.first, x.data_ptr()
        text = f"{text}: {bad.numel()} of {x.numel()} values are not finite, the first is {float(bad[0])}"
        key = (int(phase), micro_batch, place, self._count)
        again = first is not None and phase is Phase.BACKWARD and (first.key[:-1], first.tensor) == (key[:-1], address)
        if first is None or again or key < first.key:
            self.first = _Finding(first.key if first is not None and again else key, text, address)

    @contextlib.contextmanager
    def installed(self, run: Run) -> Iterator[None]:
        """Hooks on the modules, and our own callables around the chunks of the executor; gone afterwards."""
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
        """The samples of a micro-batch, by their numbers."""
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
        # Without a micro-batch a layer is computed a second time, within a backward pass.
        if self._now is None or not isinstance(x, torch.Tensor):
            return
        index, stage, samples = self._now
        self.look(x, Phase.FORWARD, index, stage, f"forward pass of {samples}, {forward}")
        if x.requires_grad and not isinstance(x, torch.nn.Parameter):  # a bias's sum is looked at
            text = f"backward pass of {samples}, {backward}"
            x.register_hook(partial(self._gradient, index, -stage, text))

    def _gradient(self, index: int, place: int, text: str, gradient: torch.Tensor) -> None:
        self.look(gradient, Phase.BACKWARD, index, place, text)


def diagnose(
    run: Run, micro_batches: Sequence[MicroBatch], loss_scale: float, loss_weights: Sequence[Any] | None = None
) -> str:
    """What is the first value that is not finite in a step over these micro-batches, and on which rank, in a sentence.

    All ranks call it, with gradients of no step under way; all get the same sentence. The first: in a weight before any
    activation, in a forward pass before any backward pass, in the first micro-batch that has one, in the first stage
    (backward: the last), in the first module that came to see it. Weights are the same as in the step when that one
    was skipped.
    """
    run.engine.wait_for_weights()
    tracer = _Tracer(run, micro_batches)
    for stage, chunk in run.chunks.items():
        for p in chunk.parameters():
            tracer.look(p, Phase.WEIGHT, 0, int(stage), f"weight {sharding_of(p).name}")
    with tracer.installed(run):
        losses = run.executor.train(micro_batches, loss_scale=loss_scale, loss_weights=loss_weights)
    for index, (loss, batch) in enumerate(zip(losses, micro_batches, strict=False)):
        text = f"forward pass of {tracer.samples(batch)}, the loss, behind the output layer"
        tracer.look(loss, Phase.FORWARD, index, run.executor.last_stage, text)
    for stage, chunk in run.chunks.items():
        for p in chunk.parameters():
            # The norm is infinite, too, where a square is beyond the range of fp32.
            text = f"gradient of {sharding_of(p).name}, summed over its micro-batches and squared in fp32"
            tracer.look(run.engine.gradient(p).float().square(), Phase.GRADIENT, 0, -int(stage), text)
    run.engine.clear_gradients()
    found = tracer.first or _Finding(_ABSENT, "")
    keys = collectives.gather_first(torch.tensor([found.key]), run.topology.world).tolist()
    if min(keys) == list(_ABSENT):
        return _NOTHING
    rank, said = keys.index(min(keys)), f"rank {run.topology.rank} ({socket.gethostname()}:{run.topology.device})"
    return str(collectives.broadcast_object(f"{said}, {found.text}", run.topology.world, rank))


def named_modules(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a chunk, without lists of modules; layers are numbered over the whole model."""
    for name, module in chunk.named_modules():
        parts = name.split(".")
        if parts[0] == "layers" and len(parts) > 1:
            parts[1] = str(getattr(chunk.get_submodule(".".join(parts[:2])), "index", parts[1]))
        if name and not isinstance(module, torch.nn.ModuleList):
            yield ".".join(parts), module


def check_step(run: Run, under_way: StepUnderWay, result: StepResult) -> None:
    """Count the step that gave `result` as skipped or not. All ranks call it.

    Raises TrainingError on every rank, which names the first bad value, when too many are skipped in a row.
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
    run.reporter.say(f"iteration {again.iteration} is run again, to find where values cease to be finite")
    run.engine.clear_gradients()  # of the step that follows: its passes may be on their way
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
