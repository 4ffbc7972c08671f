"""Schedules of batch size, length, learning rate and weight decay as functions of progress.

Pure arithmetic, no torch. The schedules of learning rate and weight decay take what was consumed
before a step (iterations, samples, tokens) and return the value for that step. With warm-up the
very first step therefore has learning rate 0, as in Megatron. The unit is that of the decay: tokens
before samples before iterations. A warm-up given in another unit is converted with the full global
batch and the sequence length.

With n what was consumed, w the warm-up and d the decay length (warm-up included), all in one unit:

    n < w            lr * n / w
    constant         lr
    linear           min + (lr - min) * (1 - r)                  r = (n - w) / (d - w)
    cosine           min + (lr - min) * (1 + cos(pi r)) / 2      (Loshchilov and Hutter, arXiv
                     1608.03983, eq. 5)
    inverse square   max(min, lr * sqrt(max(w, 1) / n))          (Vaswani et al., arXiv 1706.03762,
                     section 5.3)
    WSD              lr until d - c, then min + (lr - min) * f(q) with q = (n - d + c) / c, c the
                     final decay (Hu et al., arXiv 2404.06395, section 4), f(q) = 1 - q (linear), (1
                     + cos(pi q)) / 2 (cosine), 2 * 0.5^q - 1 (exponential), 1 - sqrt(q)
                     (minus_sqrt; Haegele et al., arXiv 2405.18392)
    n > d            min, in every form but the constant one
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megatron.config.duration import show_duration
from megatron.config.option import MOST_SAMPLES
from megatron.errors import ConfigError
from megatron.model.formulas import flops_per_token_of, parameters_of

if TYPE_CHECKING:
    from megatron.config import Config


@dataclass(frozen=True)
class BatchSchedule:
    """Global batch size as a function of the samples consumed.

    `rampup` is (start, increment, samples): from `start` the batch grows by `increment` after each
    equal share of `samples`, and is `global_batch_size_at_end` from then on. `replica_batch_size`
    is micro-batch size x data-parallel size. `Config` has checked that all sizes divide into
    micro-batches.

    >>> [BatchSchedule(32, 4, (8, 8, 300)).global_batch_size(n) for n in (0, 99, 100, 200, 300)]
    [8, 8, 16, 24, 32]
    """

    global_batch_size_at_end: int
    replica_batch_size: int
    rampup: tuple[int, int, int] | None = None

    @classmethod
    def from_config(cls, config: Config) -> BatchSchedule:
        batch = config.batch
        rampup = None
        if batch.rampup_batch_size is not None:
            start, increment, samples = batch.rampup_batch_size
            rampup = (start, increment, samples)
        replica = batch.micro_batch_size * config.parallel.data_parallel_size
        return cls(batch.global_batch_size, replica, rampup)

    def global_batch_size(self, consumed_samples: int) -> int:
        """Return the samples of the step that starts after `consumed_samples`."""
        if self.rampup is None:
            return self.global_batch_size_at_end
        start, increment, samples = self.rampup
        steps = (self.global_batch_size_at_end - start) // increment
        if consumed_samples >= samples or steps == 0:
            return self.global_batch_size_at_end
        # Exact in integers: floor(consumed / (samples / steps)).
        return min(
            start + increment * (consumed_samples * steps // samples), self.global_batch_size_at_end
        )

    def _stretches(self, consumed_samples: int) -> Iterator[tuple[int, int]]:
        """Yield each batch size after `consumed_samples` with its number of steps.

        The last size has no end.
        """
        end = self.global_batch_size_at_end
        start, increment, samples = self.rampup or (end, 1, 0)
        shares = max(1, (end - start) // increment)
        while consumed_samples < samples:
            size = self.global_batch_size(consumed_samples)
            until = -(-(consumed_samples * shares // samples + 1) * samples // shares)
            steps = -(-(until - consumed_samples) // size)
            yield size, steps
            consumed_samples += steps * size
        yield end, sys.maxsize

    def num_micro_batches(self, consumed_samples: int) -> int:
        """Return the micro-batches of each data-parallel rank in that step."""
        return self.global_batch_size(consumed_samples) // self.replica_batch_size

    def samples_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Return the samples consumed after `iterations` more steps."""
        for size, steps in self._stretches(consumed_samples):
            taken = min(steps, iterations)
            consumed_samples += taken * size
            iterations -= taken
        return consumed_samples

    def iterations_until(self, samples: int, consumed_samples: int = 0, *, whole: bool) -> int:
        """Return the steps from `consumed_samples` until `samples` are consumed.

        With `whole`, a last step that would exceed `samples` is not counted, otherwise it is.
        """
        iterations = 0
        for size, steps in self._stretches(consumed_samples):
            left = max(0, samples - consumed_samples)
            taken = min(steps, left // size if whole else -(-left // size))
            consumed_samples += taken * size
            iterations += taken
        return iterations


@dataclass
class Progress:
    """Counts since the first step of the run, including all jobs before this one.

    iteration                 steps taken, skipped ones included
    consumed_samples          training samples taken by all ranks together
    consumed_tokens           the same in tokens
    consumed_valid_samples    validation samples taken by the evaluations inside the loop
    skipped_iterations        steps with non-finite gradients, which moved no weight
    scheduled_...             the first three without skipped steps: learning rate and weight decay
                              follow these, as in Megatron
    sources                   what was taken of each source of training data, see
                              megatron.data.sampler; as of the checkpoint that was loaded or is
                              written
    left_out                  ranges [start, stop) of positions in the order of samples that are
                              left out after loss spikes; consumed samples are counted without them
    recent_losses             losses of the last steps, oldest first: what --loss-spike-factor
                              compares with
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    scheduled_iterations: int = 0
    scheduled_samples: int = 0
    scheduled_tokens: int = 0
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: list[list[int]] = field(default_factory=list)
    recent_losses: list[float] = field(default_factory=list)

    @property
    def schedule_position(self) -> tuple[int, int, int]:
        """Return (iterations, samples, tokens) of the steps that moved the weights."""
        return self.scheduled_iterations, self.scheduled_samples, self.scheduled_tokens

    def advance(self, samples: int, seq_length: int) -> None:
        """Count one step over `samples` sequences; `count` records later whether it was skipped."""
        self.iteration += 1
        self.consumed_samples += samples
        self.consumed_tokens += samples * seq_length

    def count(self, samples: int, seq_length: int, *, skipped: bool) -> None:
        """Record whether the step over `samples` sequences was skipped or moved the weights."""
        self.skipped_iterations += int(skipped)
        if not skipped:
            self.scheduled_iterations += 1
            self.scheduled_samples += samples
            self.scheduled_tokens += samples * seq_length


def total_iterations(
    config: Config, batches: BatchSchedule, iteration: int = 0, consumed_samples: int = 0
) -> int:
    """Return the iteration at which a run at `iteration` with `consumed_samples` will be done.

    --train-samples is never exceeded; --train-tokens ends with the step that reaches it; the first
    end given holds.
    """
    batch, ends = config.batch, list[int]()
    if batch.train_iters is not None:
        ends.append(batch.train_iters)
    if batch.train_samples is not None:
        ends.append(
            iteration + batches.iterations_until(batch.train_samples, consumed_samples, whole=True)
        )
    if batch.train_tokens is not None:
        samples = -(-batch.train_tokens // config.model.seq_length)
        ends.append(iteration + batches.iterations_until(samples, consumed_samples, whole=False))
    if not ends:
        raise ConfigError(
            "the run has no end: give --train-iters, --train-samples or --train-tokens"
        )
    return min(ends)


@dataclass(frozen=True)
class Costs:
    """Size of a run on a number of nodes, and the time of what is left of it.

    flops is that of products and attention, without recomputation. seconds and node_hours are None
    where the speed is unknown.
    """

    nodes: int
    parameters: int
    tokens: int
    tokens_per_parameter: float
    flops: float
    seconds: float | None = None
    node_hours: float | None = None

    def at(self, tokens_per_s: float, done: int = 0) -> Costs:
        """Return the costs with the time at a speed, after `done` tokens."""
        seconds = (self.tokens - done) / tokens_per_s
        return replace(self, seconds=seconds, node_hours=self.nodes * seconds / 3600)

    @property
    def size(self) -> str:
        """Return the size of the whole run as text."""
        return (
            f"{self.tokens:,} tokens, {self.tokens_per_parameter:.3g} for each parameter, "
            f"{self.flops:.3g} FLOPs"
        )

    @property
    def time(self) -> str:
        """Return the time and the node-hours of what is left as text."""
        assert self.seconds is not None and self.node_hours is not None, "the speed is known"
        days = self.seconds / 86400
        length = f"{days:,.1f} days" if days >= 1 else show_duration(self.seconds)
        return f"{length}, {self.node_hours:,.{0 if self.node_hours >= 100 else 2}f} node-hours"


def run_costs(
    config: Config, nodes: int = 1, iteration: int = 0, consumed_samples: int = 0
) -> Costs:
    """Return the costs of a run that has done this much, without a time."""
    batches = BatchSchedule.from_config(config)
    left = total_iterations(config, batches, iteration, consumed_samples) - iteration
    tokens = batches.samples_after(max(left, 0), consumed_samples) * config.model.seq_length
    parameters = parameters_of(config)
    flops = tokens * flops_per_token_of(config)
    return Costs(nodes, parameters, tokens, tokens / parameters, flops)


def planned_samples(config: Config, batches: BatchSchedule) -> tuple[int, int, int]:
    """Return the training, validation and test samples of the whole run.

    They are counted as in Megatron, so that both can use the same index files. The evaluation
    before the first step needs no additional samples. Raises ConfigError for more than an index can
    list.
    """
    training, end = config.training, total_iterations(config, batches)
    train = config.batch.train_samples or batches.samples_after(end)
    evaluation = training.eval_iters * batches.global_batch_size_at_end
    planned = train, (end // training.eval_interval + 1) * evaluation, evaluation
    if max(planned) > MOST_SAMPLES:
        raise ConfigError(
            f"the run takes {train} samples for training and {planned[1]} for validation, at most "
            f"{MOST_SAMPLES} are possible: make it shorter than {end} iterations, lower "
            f"--eval-iters {training.eval_iters}, or raise --eval-interval {training.eval_interval}"
        )
    return planned


if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.config.training import BatchConfig, OptimizerConfig

_FINAL_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda q: 1.0 - q,
    "cosine": lambda q: 0.5 * (1.0 + math.cos(math.pi * q)),
    "exponential": lambda q: 2.0 * 0.5**q - 1.0,
    "minus_sqrt": lambda q: 1.0 - math.sqrt(q),
}
"""Factor of the learning rate, from 1 to 0, after the part q of the last phase of WSD; by
--lr-wsd-decay-style.
"""

_ENDLESS = ("constant", "inverse-square-root")  # forms that need no length
_UNITS = {"tokens": "tokens", "samples": "samples", "iters": "iterations"}


@dataclass(frozen=True)
class _Clock:
    """The counter that runs a schedule, and the conversion of the others into it."""

    config: Config
    unit: str

    def now(self, iteration: int, samples: int, tokens: int) -> int:
        return {"iterations": iteration, "samples": samples, "tokens": tokens}[self.unit]

    def convert(self, amount: float, unit: str, what: str) -> float:
        """Return `amount` of `unit` in this clock's unit."""
        if unit == self.unit or not amount:
            return amount
        batch = self.config.batch
        if batch.rampup_batch_size is not None and "iterations" in (unit, self.unit):
            raise ConfigError(
                f"{what} is given in {unit} but the decay in {self.unit}, and the batch size ramps "
                f"up, so that one cannot be converted into the other: give both in {self.unit}"
            )
        per_iteration = {
            "iterations": 1.0,
            "samples": float(batch.global_batch_size),
            "tokens": float(batch.global_batch_size * self.config.model.seq_length),
        }
        return amount * per_iteration[self.unit] / per_iteration[unit]


def _length(
    section: BatchConfig | OptimizerConfig, prefix: str, order: Sequence[str] = tuple(_UNITS)
) -> tuple[float, str] | None:
    """Return the first given of PREFIX_tokens, PREFIX_samples and PREFIX_iters, with its unit.

    They are tried in this order unless another one is given.
    """
    for suffix in order:
        amount = getattr(section, f"{prefix}_{suffix}", None)
        if amount:
            return amount, _UNITS[suffix]
    return None


def _run_length(config: Config) -> tuple[float, str] | None:
    """Return the length of the run.

    Samples and iterations take precedence over the token limit, which only shortens it.
    """
    return _length(config.batch, "train", ("samples", "iters", "tokens"))


class LearningRateSchedule:
    """Learning rate from `config.optimizer`, `config.batch` and `config.model.seq_length`.

    unit      "iterations", "samples" or "tokens": what `warmup` and `decay` count
    warmup    length of the linear warm-up
    decay     length until the learning rate has reached `min_lr`, warm-up included

    Raises ConfigError for lengths in several units that contradict each other; megatron.config
    checks the others.
    """

    def __init__(self, config: Config) -> None:
        o = config.optimizer
        self.max_lr, self.min_lr, self.style = float(o.lr), float(o.min_lr), o.lr_decay_style
        found = _length(o, "lr_decay") or _run_length(config)
        ends = self.style not in _ENDLESS
        if found is None and ends:
            raise ConfigError(
                f"lr-decay-style {self.style} needs a length: set train-iters, train-samples or "
                "lr-decay-iters"
            )
        self.decay, self.unit = found or (math.inf, "iterations")
        self._clock = _Clock(config, self.unit)
        self.warmup = self._warmup_length(o)
        if ends and self.decay <= self.warmup:
            raise ConfigError(
                f"the learning rate's decay ends after {self.decay:g} {self.unit}, which is not "
                f"after its warm-up of {self.warmup:g}: shorten the warm-up or lengthen the decay"
            )
        if self.style == "WSD":
            self._final = self._final_length(o)
            self._final_decay = _FINAL_DECAYS[o.lr_wsd_decay_style]

    def _warmup_length(self, o: OptimizerConfig) -> float:
        if o.lr_warmup_fraction is not None:
            return 0.0 if math.isinf(self.decay) else o.lr_warmup_fraction * self.decay
        found = _length(o, "lr_warmup")
        return self._clock.convert(*found, "the warm-up") if found else 0.0

    def _final_length(self, o: OptimizerConfig) -> float:
        found = _length(o, "lr_wsd_decay")
        assert found is not None, "megatron.config refuses WSD without a length"
        final = self._clock.convert(*found, "the final decay of WSD")
        if final > self.decay - self.warmup:
            raise ConfigError(
                f"the final decay of WSD takes {final:g} {self.unit}, more than the "
                f"{self.decay - self.warmup:g} after the warm-up: shorten it"
            )
        return final

    def lr(self, iteration: int = 0, samples: int = 0, tokens: int = 0) -> float:
        """Return the learning rate of the step that starts after this much was consumed."""
        n = self._clock.now(iteration, samples, tokens)
        if self.warmup > 0 and n <= self.warmup:
            return self.max_lr * n / self.warmup
        if self.style == "constant":
            return self.max_lr
        if n > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup, 1.0) / max(n, 1)))
        return self.min_lr + self._part(n) * (self.max_lr - self.min_lr)

    def _part(self, n: float) -> float:
        """Return where the learning rate after the warm-up is, from `min_lr` (0) to `max_lr` (1)."""
        if self.style == "WSD":
            start = self.decay - self._final
            return 1.0 if n <= start else self._final_decay((n - start) / self._final)
        r = (n - self.warmup) / (self.decay - self.warmup)
        return 1.0 - r if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * r))


class WeightDecaySchedule:
    """Weight decay over the whole run: start + f(n / end of run) * (end - start).

    f(x) = x (linear) or (1 - cos(pi x)) / 2 (cosine). Raises ConfigError for a change over a run
    without a length.
    """

    def __init__(self, config: Config) -> None:
        o = config.optimizer
        start, end = o.start_weight_decay, o.end_weight_decay
        self.start = o.weight_decay if start is None else start
        self.end = o.weight_decay if end is None else end
        self.style = o.weight_decay_incr_style
        found = _run_length(config)
        if found is None and self.style != "constant":
            raise ConfigError(
                f"weight-decay-incr-style {self.style} needs train-iters or train-samples: set one"
            )
        self.length, self.unit = found or (1.0, "iterations")
        self._clock = _Clock(config, self.unit)

    def weight_decay(self, iteration: int = 0, samples: int = 0, tokens: int = 0) -> float:
        """Return the weight decay of the step that starts after this much was consumed."""
        x = min(1.0, self._clock.now(iteration, samples, tokens) / self.length)
        if self.style == "constant" or x >= 1.0:
            return float(self.end)
        part = x if self.style == "linear" else 0.5 * (1.0 - math.cos(math.pi * x))
        return float(self.start + part * (self.end - self.start))
