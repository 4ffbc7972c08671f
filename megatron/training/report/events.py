"""Events of a run, passed on rank 0 to the log, the metrics file, trackers and callbacks.

Each subclass of Event lists the fields of one kind of record in metrics.jsonl.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

from megatron.config.option import pairs

if TYPE_CHECKING:
    import torch

_UNRECORDED = {"recorded": False}
Record = Mapping[str, Any]


@dataclass(frozen=True)
class StepRecord:
    """One training step, with the figures that every rank has without communication.

    `loss` is this rank's term in the mean loss of the global batch, a scalar still on the device;
    None on ranks without a term (see local_loss). consumed_samples and consumed_tokens include this
    step.

    seq_length  length of its sequences; None: that of the run
    counted  fp64 [2], on the device: how many of this rank's micro-batches have a token in the
             loss, and how many it has in all; None: all have one, or the rank has no term
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    learning_rate: float
    loss: torch.Tensor | None
    skipped: bool = False
    loss_scale: float | None = None
    grad_norm: float | None = None
    num_zeros: float | None = None
    params_norm: float | None = None
    counted: torch.Tensor | None = None
    seq_length: int | None = None
    decoupled_learning_rate: float | None = None

    shown: ClassVar[Mapping[str, str]] = {"loss": "lm loss"} | pairs(
        "learning_rate=learning-rate decoupled_learning_rate=decoupled-learning-rate "
        "global_batch_size=batch-size loss_scale=loss-scale grad_norm=grad-norm "
        "num_zeros=num-zeros params_norm=params-norm consumed_samples=consumed-samples "
        "consumed_tokens=consumed-tokens"
    )


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened at `time`, in seconds since 1970. Subclasses are dataclasses too.

    event   kind of event, the value of "event" in the record
    shown   {field: its name in trackers}; Megatron-LM's name if it has one
    """

    event: ClassVar[str] = ""
    shown: ClassVar[Mapping[str, str]] = {}
    time: float = field(default_factory=time.time)

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def shown_as(self) -> Mapping[str, str]:
        """Return `shown`; subclasses may return names that depend on the event."""
        return self.shown

    def as_record(self) -> dict[str, Any]:
        """Return the record for metrics.jsonl, unrounded.

        Fields that equal their defaults are omitted, and so are those marked _UNRECORDED.
        """
        fields = [f for f in dataclasses.fields(self) if f.metadata.get("recorded", True)]
        values = [(f, getattr(self, f.name)) for f in fields]
        return {"event": self.event} | {f.name: v for f, v in values if v != f.default}


class Start(Event):
    """A run begins, or continues from `iteration`.

    config      all settings by name
    layout      sizes of the layout; see layout_record
    places      "node:device" of every rank
    device      name of rank 0's device
    parameters  number of parameters of the whole model
    versions    of Python, the system and libraries
    costs       tokens and FLOPs of the whole run; see RunCosts
    differs     settings that differ from their defaults
    """

    event = "start"
    iteration: int
    config: Record
    layout: Record
    places: Sequence[str]
    device: str
    parameters: int
    versions: Record
    costs: Record | None = None
    differs: Record | None = None

    def settings(self) -> dict[str, Any]:
        """Return what trackers show as the configuration, with parameters, device and versions."""
        about = {"parameters": self.parameters, "device": self.device, "versions": self.versions}
        return {**self.config, **about}


class Iteration(Event):
    """The figures of one log line.

    Times, rates and lm_loss are means over the interval. Learning rates, global_batch_size,
    loss_scale, grad_norm, num_zeros and params_norm are those of its last step. lm_loss excludes
    skipped steps, and micro-batches without a token in the loss; it is None if every step was
    skipped or had no such token. `nan` counts steps whose loss is not finite. `empty` counts steps
    without a token in the loss; in step_losses their loss is None. mfu and hfu are fractions of the
    device's peak, None if the peak is unknown. memory_bytes is the most that any rank has held
    since the job began, not only in the interval; memory_rank is that rank. reserved_bytes is the
    most that the allocator of any rank has reserved, None on a CPU.

    phases_ms           {phase: {"min", "mean", "max"}} over the ranks, for the recorded step; None
                        if no step was recorded
    stage_memory_bytes  most memory held by a rank of each pipeline stage
    energy_j            energy of all nodes in the interval; None, and not recorded, if unknown
    joules_per_token    the same per token
    energy_kwh          energy of all nodes since this job began; None if unknown
    times_ms            {phase: its time on each rank}, summarized by phases_ms
    balancing           {Megatron-LM's name for a router loss: its mean over layers and
                        micro-batches, without its coefficient}
    components          {name: mean of a component of the loss}; loss_name: the loss's own name
    scalars             {name: number} of the user's callbacks
    experts             {layer: its balance} with --moe-per-layer-logging: `imbalance`, the largest
                        load over the mean; `entropy` of the routing, as a fraction of its maximum;
                        `dropped`, the share of choices that were dropped; `tokens`, the number for
                        each expert
    sources             {data source: what was taken from it so far}; see DataTaken
    steps               the steps of the interval
    step_losses         the loss of each of `steps` over all ranks
    """

    event = "iteration"
    shown: ClassVar[Mapping[str, str]] = pairs(
        "step_time_s=iteration-time model_tflops=throughput hardware_tflops=hardware-throughput "
        "mfu=mfu hfu=hfu tokens_per_s=tokens-per-second "
        "tokens_per_s_per_device=tokens-per-second-per-device skipped=skipped-iterations "
        "nan=nan-iterations memory_bytes=mem-max-allocated-bytes "
        "reserved_bytes=mem-reserved-bytes stage_memory_bytes=stage-mem-max-allocated-bytes "
        "phases_ms=phase-ms energy_j=energy-joules energy_kwh=energy-kwh "
        "joules_per_token=joules-per-token sources=data balancing=moe components=loss "
        "scalars=user experts=moe/layer"
    )
    iteration: int
    total_iterations: int
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    seq_length: int
    learning_rate: float
    lm_loss: float | None
    loss_scale: float | None
    grad_norm: float | None
    num_zeros: float | None
    params_norm: float | None
    skipped: int
    nan: int
    step_time_s: float
    samples_per_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    model_tflops: float
    hardware_tflops: float
    mfu: float | None
    hfu: float | None
    memory_bytes: int
    memory_rank: int
    reserved_bytes: int | None
    phases_ms: Mapping[str, Mapping[str, float]] | None = None
    stage_memory_bytes: Sequence[int] | None = None
    energy_j: float | None = None
    joules_per_token: float | None = None
    energy_kwh: float | None = None
    balancing: Mapping[str, float] | None = None
    components: Mapping[str, float | None] | None = None
    scalars: Mapping[str, float] | None = None
    decoupled_learning_rate: float | None = None
    loss_name: str = "lm loss"
    experts: Mapping[str, Record] | None = None
    empty: int = 0
    times_ms: Mapping[str, Sequence[float]] = field(default_factory=dict, metadata=_UNRECORDED)
    sources: Mapping[str, Mapping[str, float]] = field(default_factory=dict, metadata=_UNRECORDED)
    steps: Sequence[StepRecord] = field(default=(), metadata=_UNRECORDED)
    step_losses: Sequence[float | None] = field(default=(), metadata=_UNRECORDED)


def perplexity(loss: float) -> float:
    """Return exp(loss), with the loss capped at 20."""
    return math.exp(min(20.0, loss))


class Validation(Event):
    """An evaluation on `samples` samples of the 'valid' or 'test' data set, or of one `corpus`.

    ema_loss  the loss with the averaged weights (--eval-ema)
    where     the iteration and the data, for the log
    components, loss_name  as in Iteration
    """

    event = "validation"
    iteration: int
    consumed_samples: int
    consumed_tokens: int
    dataset: str
    lm_loss: float
    samples: int
    elapsed_s: float
    corpus: str | None = None
    ema_loss: float | None = None
    components: Mapping[str, float] | None = None
    loss_name: str = "lm loss"
    where: str = field(default="", metadata=_UNRECORDED)

    def shown_as(self) -> Mapping[str, str]:
        """Return names that contain the kind of data and the corpus."""
        kind = "test" if self.dataset == "test" else "validation"
        name = f"{self.loss_name} {kind}" + (f" {self.corpus}" if self.corpus else "")
        shown = {"lm_loss": name, "perplexity": f"{name} ppl", "ema_loss": f"{name} ema"}
        return {**shown, "components": name}

    def as_record(self) -> dict[str, Any]:
        """Return the record, with the perplexity if the loss is the language model's."""
        known = self.loss_name == "lm loss"
        return super().as_record() | ({"perplexity": perplexity(self.lm_loss)} if known else {})


class TaskEvaluated(Event):
    """Results of a multiple-choice or cloze task; see evaluate_task.

    checkpoint   the folder of the model, if tools/evaluate.py evaluated it
    """

    event = "task"
    iteration: int
    task: str
    examples: int
    tokens: int
    accuracy: float
    elapsed_s: float
    accuracy_bytes: float | None = None
    accuracy_tokens: float | None = None
    log_likelihood: float | None = None
    perplexity: float | None = None
    cut: int = 0
    checkpoint: str | None = None

    def shown_as(self) -> Mapping[str, str]:
        """Return names that contain the name of the task."""
        kinds = ("accuracy", "accuracy_bytes", "accuracy_tokens", "log_likelihood", "perplexity")
        return {kind: f"task {self.task} {kind.replace('_', '-')}" for kind in kinds}

    def __str__(self) -> str:
        """Return a line for the log."""
        shown = {name: getattr(self, name) for name in self.shown_as()}
        figures = [
            f"{name.replace('_', ' ')} {v:.6g}" for name, v in shown.items() if v is not None
        ]
        cut = f", {self.cut} texts cut" if self.cut else ""
        return f"{self.task}: {', '.join(figures)}, of {self.examples} examples{cut}"


class HarnessEvaluated(Event):
    """Results of lm-evaluation-harness in tools/evaluate.py, as {task: {metric: value}}."""

    event = "lm_eval"
    iteration: int
    checkpoint: str
    results: Mapping[str, Record]
    elapsed_s: float


class DataTaken(Event):
    """Samples, tokens and epochs taken from each data source so far; see Ledger.record.

    phases   phases of the data that began since the last such event; see history.summary
    """

    event = "data"
    iteration: int
    consumed_samples: int
    consumed_tokens: int
    sources: Mapping[str, Record]
    phases: Sequence[Record] = ()


class ComputeTimes(Event):
    """Computing times of a step over the ranks, and the slow ranks; see summarise.

    slow        the slowest of the slow ranks, at most 64
    slow_ranks  number of slow ranks
    """

    event = "stragglers"
    shown: ClassVar[Mapping[str, str]] = {
        "min_ms": "compute-ms/min",
        "median_ms": "compute-ms/median",
        "max_ms": "compute-ms/max",
    }
    iteration: int
    min_ms: float
    median_ms: float
    max_ms: float
    slow: Sequence[Record]
    slow_ranks: int


class CheckpointSaved(Event):
    """A checkpoint is complete. Saving took `elapsed_s`; training waited for `stall_s` of it."""

    event = "checkpoint"
    shown: ClassVar[Mapping[str, str]] = {"elapsed_s": "save-time", "stall_s": "save-stall-time"}
    iteration: int
    folder: str
    size_bytes: int
    elapsed_s: float
    stall_s: float
    background: bool


class LocalCheckpointSaved(Event):
    """All ranks have a local checkpoint, `elapsed_s` after its start.

    Training waited for `stall_s` of this time; `size_bytes` is the size of rank 0's shards.
    """

    event = "local_checkpoint"
    shown: ClassVar[Mapping[str, str]] = {"stall_s": "local-save-stall-time"}
    iteration: int
    size_bytes: int
    stall_s: float
    elapsed_s: float


class LocalCheckpointLoaded(Event):
    """A restart within the job has loaded a local checkpoint in `elapsed_s`.

    Of its `size_bytes`, ranks got `received_bytes` from other ranks.
    """

    event = "local_checkpoint_loaded"
    iteration: int
    size_bytes: int
    received_bytes: int
    elapsed_s: float


class CheckpointFailed(Event):
    """A checkpoint could not be written."""

    event = "checkpoint_failed"
    iteration: int
    reason: str


class CheckpointRejected(Event):
    """A checkpoint is broken; `instead` is the one that is loaded, or "no checkpoint"."""

    event = "rejected_checkpoint"
    folder: str
    reason: str
    instead: str


class Restarted(Event):
    """The job has restarted after a fault, without being started anew.

    iteration  the last iteration of the state that was loaded
    restart    number of this restart in the job
    cause      the fault
    ranks      number of ranks that continue
    outage_s   seconds from the detection of the fault until the ranks are ready for a step
    ways       how many ranks came back in all restarts so far: in-process, forked, spare
    reached    the last iteration that was complete before: those after `iteration` are repeated
    """

    event = "restart"
    iteration: int
    restart: int
    cause: str
    ranks: int
    outage_s: float
    ways: Record
    reached: int


class NotFinite(Event):
    """Every step from `skipped_since` on was skipped.

    iteration  the step that was run again
    first      description of the first non-finite value in it
    """

    event = "not_finite"
    iteration: int
    skipped_since: int
    first: str


class LossSpike(Event):
    """A loss was not finite, or too high compared with the `median` of the steps before.

    back_to_iteration and the fields after it are None if the run had no checkpoint to go back to.

    back_to_iteration  iteration of the checkpoint to which the run went back
    samples            [start, stop) in the order of the data, left out because of this spike
    left_out           all ranges [start, stop) that are left out from now on
    sources            what was taken from each data source, as in DataTaken
    """

    event = "loss_spike"
    iteration: int
    lm_loss: float
    median: float | None
    back_to_iteration: int | None = None
    samples: Sequence[int] | None = None
    left_out: Sequence[Sequence[int]] | None = None
    sources: Mapping[str, Record] | None = None


class TimelineRecorded(Event):
    """Bubble of a step (fraction of the pipeline's time without computation), and its prediction.

    predicted_bubble   None if the extension that computes it is not built
    file               name of the Perfetto trace, next to the metrics file; None without a trace
    """

    event = "timeline"
    shown: ClassVar[Mapping[str, str]] = {
        "bubble": "bubble",
        "predicted_bubble": "predicted-bubble",
    }
    iteration: int
    bubble: float
    predicted_bubble: float | None
    file: str | None


class Generated(Event):
    """A text generated by tools/generate_text.py."""

    event = "generate"
    prompt: str
    text: str
    tokens: int
    seed: int


class Evaluated(Event):
    """Loss of a checkpoint on whole files, by tools/evaluate.py.

    bytes and bits_per_byte are None if the size of the text is unknown; bytes are those of the
    tokens, so without first tokens of documents that are not in the loss. context is the number of
    tokens in a window, stride the number between the starts of two windows.
    """

    event = "evaluate"
    checkpoint: str
    iteration: int
    data: Sequence[str]
    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    bytes: int | None
    context: int
    stride: int
    seconds: float
    tokens_per_second: float


class End(Event):
    """End of a run and its reason, "done" after the last iteration.

    A run that fails before its end has no such event. After this event, old checkpoints may still
    be removed, and --save-hf is written.

    energy_j   energy of all nodes in this job; NaN if unknown
    """

    event = "end"
    iteration: int
    consumed_samples: int
    skipped_iterations: int
    reason: str
    energy_j: float


def scalars(event: Event, every: int = 1) -> dict[int, dict[str, float]]:
    """Return the scalars of an event for trackers: {iteration: {name: value}}.

    Steps whose iteration is a multiple of `every` have a point; a skipped step has no loss. Values
    that are unknown or not finite are omitted. Mappings and lists have a scalar for each value,
    such as "data/web/tokens".
    """
    points: dict[int, dict[str, float]] = defaultdict(dict)
    if isinstance(event, Iteration):
        for step, loss in zip(event.steps, event.step_losses, strict=True):
            if step.iteration % every == 0:
                known = vars(step) | {"loss": None if step.skipped else loss}
                shown_step = {**step.shown, "loss": event.loss_name}
                points[step.iteration].update(_named(known, shown_step))
    if shown := event.shown_as():
        known = vars(event) | event.as_record()
        points[known["iteration"]].update(_named(known, shown))
    return points


def _named(values: Record, shown: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    for field_, name in shown.items():
        yield from _flat(name, values.get(field_))


def _flat(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        yield from _named(value, {key: f"{name}/{key}" for key in value})
    elif isinstance(value, Sequence):
        yield from _flat(name, dict(enumerate(value)))
    elif isinstance(value, int | float) and math.isfinite(value):
        # characters that every tracker accepts in a name
        yield re.sub(r"[^\w\-./ ]", "_", name), float(value)
