"""Schedules of batch size, learning rate, weight decay and betas over progress; the run's length.

This module is pure arithmetic, without torch. Schedules take the amounts consumed before a step
(iterations, samples, tokens) and return the value for that step. With warm-up the very first step
therefore has learning rate 0, or --lr-warmup-init, as in Megatron. The unit of a schedule is the unit of the run's
length (samples take precedence over iterations, iterations over tokens). Only the learning rate's
schedule has another unit if --lr-decay-tokens, --lr-decay-samples or --lr-decay-iters is set: the
unit of the first of these. A warm-up or WSD decay given in another unit is converted with the full
global batch size and the sequence length.

Every schedule is a list of pieces, whatever flags describe it. With q the consumed fraction of a
piece, and n the total consumed, the value of a piece that goes from `first` to `last` is

    constant             first
    warmup               first + (last - first) * q
    inverse-square-root  max(last, first * sqrt(max(w, 1) / n)), w where the piece begins
                         (Vaswani et al., arXiv 1706.03762, section 5.3)
    power                max(last, min(first, a B t^b)), B the full global batch size in samples, t
                         the tokens consumed, a = 4, b = -0.51 (Shen et al., arXiv 2408.13359)
    others               last + (first - last) * f(q), f(q) = 1 - q (linear), (1 + cos(pi q)) / 2
                         (cosine; Loshchilov and Hutter, arXiv 1608.03983, eq. 5), 2 * 0.5^q - 1
                         (exponential), 1 - sqrt(q) (minus_sqrt; Haegele et al., arXiv 2405.18392)

WSD is warm-up, constant and one of the others (Hu et al., arXiv 2404.06395, section 4). A warm
restart (arXiv 1608.03983) is a piece that begins again with the first value. After the decay of
--lr-decay-style the learning rate stays at the minimum, except with constant.
"""

from __future__ import annotations

import bisect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megatron.config.duration import show_duration
from megatron.config.option import MOST_SAMPLES
from megatron.config.phases import PHASED, parse_batch_sizes, parse_curriculum, parse_phases
from megatron.data.history import DataPhases, from_record
from megatron.data.order import SampleOrder, merged
from megatron.engine.optimizer_state import StepValues
from megatron.errors import ConfigError
from megatron.model.formulas import ModelSizes

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.config.training import BatchConfig, OptimizerConfig
    from megatron.protocols import LearningRate


@dataclass(frozen=True)
class BatchSchedule:
    """Global batch size as a function of the samples consumed.

    `sizes` lists (samples consumed, batch size from then on), beginning with 0 samples.
    `replica_batch_size` is micro-batch size x data-parallel size. `Config` has checked that all
    sizes divide into micro-batches.

    >>> [BatchSchedule(4, ((0, 8), (100, 16), (200, 32))).global_batch_size(n) for n in (99, 100)]
    [8, 16]
    """

    replica_batch_size: int
    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def from_config(cls, config: Config) -> BatchSchedule:
        batch = config.batch
        replica = batch.micro_batch_size * config.parallel.data_parallel_size
        sizes: tuple[tuple[int, int], ...] = ((0, batch.global_batch_size),)
        if batch.rampup_batch_size is not None:
            # `start` grows by `increment` after each equal share of `samples`
            start, increment, samples = batch.rampup_batch_size
            steps = (batch.global_batch_size - start) // increment
            sizes = tuple(
                (-(-i * samples // steps), start + i * increment) for i in range(steps + 1)
            )
        elif batch.step_batch_size_schedule is not None:
            tokens = parse_batch_sizes(batch.step_batch_size_schedule)
            sizes = tuple((n // config.model.seq_length, size) for n, size in tokens)
        return cls(replica, sizes)

    @property
    def global_batch_size_at_end(self) -> int:
        """Return the last batch size."""
        return self.sizes[-1][1]

    def global_batch_size(self, consumed_samples: int) -> int:
        """Return the number of samples in the step that starts after `consumed_samples`."""
        return self.sizes[self._size_index(consumed_samples)][1]

    def _size_index(self, consumed_samples: int) -> int:
        return bisect.bisect_right(self.sizes, (consumed_samples, sys.maxsize)) - 1

    def _stretches(self, consumed_samples: int) -> Iterator[tuple[int, int]]:
        """Yield each batch size after `consumed_samples` with its number of steps.

        The last size has no end.
        """
        index = self._size_index(consumed_samples)
        for (_, size), (until, _) in itertools.pairwise(self.sizes[index:]):
            steps = -(-max(0, until - consumed_samples) // size)
            yield size, steps
            consumed_samples += steps * size
        yield self.global_batch_size_at_end, sys.maxsize

    def num_micro_batches(self, consumed_samples: int) -> int:
        """Return a data-parallel rank's number of micro-batches after `consumed_samples`."""
        return self.global_batch_size(consumed_samples) // self.replica_batch_size

    def samples_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Return the number of samples consumed after `iterations` more steps."""
        for size, steps in self._stretches(consumed_samples):
            counted = min(steps, iterations)
            consumed_samples += counted * size
            iterations -= counted
        return consumed_samples

    def iterations_until(self, samples: int, consumed_samples: int = 0, *, full_steps: bool) -> int:
        """Return the number of steps from `consumed_samples` until `samples` are consumed.

        With `full_steps`, a last step that would exceed `samples` is not counted, otherwise it is.
        """
        iterations = 0
        for size, steps in self._stretches(consumed_samples):
            left = max(0, samples - consumed_samples)
            counted = min(steps, left // size if full_steps else -(-left // size))
            consumed_samples += counted * size
            iterations += counted
            if counted < steps:  # a step of a later, smaller size might fit, but is not next
                break
        return iterations


@dataclass(frozen=True)
class LengthSchedule:
    """Length of the sequences in training as a function of the iteration, counted from 1.

    `changes` lists (first iteration, length), beginning with iteration 1.
    """

    changes: tuple[tuple[int, int], ...]

    @classmethod
    def from_config(cls, config: Config) -> LengthSchedule:
        entries = config.training.curriculum_learning
        return cls(parse_curriculum(entries) or ((1, config.model.seq_length),))

    def at(self, iteration: int) -> int:
        return self.changes[bisect.bisect_right(self.changes, (iteration, sys.maxsize)) - 1][1]

    def stretches(
        self, batches: BatchSchedule, iteration: int, consumed_samples: int, end: int = sys.maxsize
    ) -> Iterator[tuple[int, int, int]]:
        """Yield length, iterations and samples of each stretch between two iterations."""
        starts = [first - 1 for first, _ in self.changes[1:]]
        for (_, length), start in zip(self.changes, [*starts, sys.maxsize], strict=True):
            steps = min(start, end) - iteration
            if steps > 0:
                samples = batches.samples_after(steps, consumed_samples) - consumed_samples
                yield length, steps, samples
                iteration += steps
                consumed_samples += samples


@dataclass
class Progress:
    """Counts since the first step of the run, including all jobs before this one.

    iteration                 steps taken, skipped ones included
    consumed_samples          training samples taken by all ranks together
    consumed_tokens           the same in tokens
    consumed_valid_samples    validation samples taken by the evaluations inside the loop
    skipped_iterations        steps with non-finite gradients, which changed no weight, and those of
                              --skip-train-iteration-range, which did not train
    scheduled_...             the first three without skipped steps: all schedules but that of the
                              batch size follow these, as in Megatron
    sources                   amounts taken from each source of training data, see
                              megatron.data.sampler; updated when a checkpoint is loaded or written
    left_out                  ranges [start, stop) of positions in the order of samples that are
                              left out after loss spikes; not included in consumed samples
    history                   {split: phases that have begun} of training and validation data, as
                              records of megatron.data.history; empty with --data-order megatron
    recent_losses             losses of the latest steps, oldest first, for --loss-spike-factor
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    scheduled_iterations: int = 0
    scheduled_samples: int = 0
    scheduled_tokens: int = 0
    sources: dict[str, dict[str, object]] = field(default_factory=dict)
    left_out: list[list[int]] = field(default_factory=list)
    history: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    recent_losses: list[float] = field(default_factory=list)

    def position(self, split: str = "train", consumed: int | None = None) -> int:
        """Return the position of the next sample of training or validation data.

        `consumed` training samples may come before it, instead of those so far.
        """
        if split == "valid":
            return self.consumed_valid_samples
        if consumed is None:
            consumed = self.consumed_samples
        return SampleOrder(0, left_out=merged(self.left_out)).position(consumed)

    def samples_at(self, batches: BatchSchedule, iteration: int) -> int:
        """Return the number of samples consumed when a run with this progress reaches an iteration."""
        left = max(0, iteration - self.iteration)
        return batches.samples_after(left, self.consumed_samples)

    def past(self, split: str = "train") -> DataPhases:
        """Return the phases of the data that have begun. Raises ValueError if they are damaged."""
        return from_record(self.history.get(split, []))

    def advance(self, samples: int, seq_length: int, iterations: int = 1) -> None:
        """Count steps over `samples` sequences; `count` records later whether one was skipped."""
        self.iteration += iterations
        self.consumed_samples += samples
        self.consumed_tokens += samples * seq_length

    def count(self, samples: int, seq_length: int, *, skipped: bool) -> None:
        """Record whether the step over `samples` sequences was skipped."""
        self.skipped_iterations += int(skipped)
        if not skipped:
            self.scheduled_iterations += 1
            self.scheduled_samples += samples
            self.scheduled_tokens += samples * seq_length


def total_iterations(
    config: Config, batches: BatchSchedule, progress: Progress | None = None
) -> int:
    """Return the iteration at which a run with this progress will be done.

    --train-samples is never exceeded; --train-tokens ends with the step that reaches it; if several
    are given, the earliest end counts. Raises ConfigError if none is given.
    """
    batch = config.batch
    progress = progress or Progress()
    iteration = progress.iteration
    consumed_samples = progress.consumed_samples
    ends = list[int]()
    if batch.train_iters is not None:
        ends.append(batch.train_iters)
    if batch.train_samples is not None:
        ends.append(
            iteration
            + batches.iterations_until(batch.train_samples, consumed_samples, full_steps=True)
        )
    if batch.train_tokens is not None:
        left = batch.train_tokens - progress.consumed_tokens
        end = iteration
        lengths = LengthSchedule.from_config(config)
        for length, steps, samples in lengths.stretches(batches, iteration, consumed_samples):
            last = consumed_samples - (-left // length)
            needed = batches.iterations_until(last, consumed_samples, full_steps=False)
            end += min(steps, needed)
            left -= samples * length
            consumed_samples += samples
        ends.append(end)
    if not ends:
        raise ConfigError(
            "the run has no end: give --train-iters, --train-samples or --train-tokens"
        )
    return min(ends)


@dataclass(frozen=True)
class RunCosts:
    """Size of a run on a number of nodes, and its remaining time.

    `flops` counts matrix products and attention, without recomputation. seconds and node_hours are
    None if the speed is unknown.
    """

    nodes: int
    parameters: int
    tokens: int
    tokens_per_parameter: float
    flops: float
    seconds: float | None = None
    node_hours: float | None = None

    def at(self, tokens_per_s: float, done: int = 0) -> RunCosts:
        """Return the costs with the time at this speed, after `done` tokens."""
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
        """Return the remaining time and node-hours as text."""
        assert self.seconds is not None and self.node_hours is not None, "the speed is known"
        days = self.seconds / 86400
        length = f"{days:,.1f} days" if days >= 1 else show_duration(self.seconds)
        return f"{length}, {self.node_hours:,.{0 if self.node_hours >= 100 else 2}f} node-hours"


def run_costs(
    config: Config, sizes: ModelSizes, nodes: int = 1, progress: Progress | None = None
) -> RunCosts:
    """Return the costs of a run with this progress; its speed and time are unknown."""
    batches = BatchSchedule.from_config(config)
    progress = progress or Progress()
    end = total_iterations(config, batches, progress)
    ahead = LengthSchedule.from_config(config).stretches(
        batches, progress.iteration, progress.consumed_samples, end
    )
    tokens = progress.consumed_tokens + sum(length * samples for length, _, samples in ahead)
    parameters = sizes.parameters()
    flops = tokens * sizes.flops_per_token()
    return RunCosts(nodes, parameters, tokens, tokens / parameters, flops)


def planned_samples(config: Config, batches: BatchSchedule) -> tuple[int, int, int]:
    """Return the training, validation and test samples of the whole run.

    They are counted as in Megatron, so that both programs can use the same index files. The
    evaluation before the first step needs no additional samples. Raises ConfigError for more than
    an index can list.
    """
    training = config.training
    end = total_iterations(config, batches)
    train = config.batch.train_samples or batches.samples_after(end)
    evaluation = training.eval_iters * batches.global_batch_size_at_end
    planned = train, (end // training.eval_interval + 1) * evaluation, evaluation
    if max(planned) > MOST_SAMPLES:
        raise ConfigError(
            f"the run takes {train} samples for training and {planned[1]} for validation, but at "
            f"most {MOST_SAMPLES} are possible: make it shorter than {end} iterations, lower "
            f"--eval-iters {training.eval_iters}, or raise --eval-interval {training.eval_interval}"
        )
    return planned


_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda q: 1.0 - q,
    "cosine": lambda q: 0.5 * (1.0 + math.cos(math.pi * q)),
    "exponential": lambda q: 2.0 * 0.5**q - 1.0,
    "minus_sqrt": lambda q: 1.0 - math.sqrt(q),
}
"""Fraction of a change that remains (1 to 0) after the fraction q of a phase, by shape."""

_ENDLESS = ("constant", "inverse-square-root", "power")  # shapes that need no length
_POWER = {"amplitude": 4.0, "exponent": -0.51}  # Shen et al., section 4
# Prefixes of the settings that shape learning rate, weight decay and betas over the run.
SCHEDULE = (
    *"lr min_lr decoupled_lr decoupled_min_lr weight_decay start_weight_decay end_weight_decay adam_beta".split(),
    *PHASED,
)
_BASIS = (
    "seq_length train_iters train_samples train_tokens global_batch_size rampup_batch_size "
    "step_batch_size_schedule"
).split()
_UNITS = {"tokens": "tokens", "samples": "samples", "iters": "iterations"}


@dataclass(frozen=True)
class _Clock:
    """The unit of a schedule, and the conversion of other units into it."""

    config: Config
    unit: str

    def convert(self, amount: float, unit: str, what: str) -> float:
        """Convert `amount` of `what` from `unit` into this clock's unit. Raises ConfigError."""
        if unit == self.unit or not amount:
            return amount
        batch = self.config.batch
        changes = batch.rampup_batch_size or batch.step_batch_size_schedule
        if changes and "iterations" in (unit, self.unit):
            raise ConfigError(
                f"{what} counts {unit} but the schedule {self.unit}, and the batch size changes, "
                "so that one cannot be converted into the other: for the shape power give the "
                f"run's length in samples, otherwise give both in {self.unit}"
            )
        per_iteration = {
            "iterations": 1.0,
            "samples": float(batch.global_batch_size),
            "tokens": float(batch.global_batch_size * self.config.model.seq_length),
        }
        return amount * per_iteration[self.unit] / per_iteration[unit]

    def length(self, section: OptimizerConfig, prefix: str, what: str) -> float:
        """Return the length of a section of a schedule in this clock's unit; 0 if none is set."""
        amount = _length(section, prefix)
        return self.convert(*amount, what) if amount else 0.0


def _length(
    section: BatchConfig | OptimizerConfig, prefix: str, order: Sequence[str] = tuple(_UNITS)
) -> tuple[float, str] | None:
    """Return the first of PREFIX_tokens, _samples, _iters in `order` that is set, and its unit."""
    for suffix in order:
        if amount := getattr(section, f"{prefix}_{suffix}", None):
            return amount, _UNITS[suffix]
    return None


def _run_length(config: Config) -> tuple[float, str] | None:
    """Return the run's length; tokens count only if neither samples nor iterations are set."""
    return _length(config.batch, "train", ("samples", "iters", "tokens"))


@dataclass(frozen=True)
class Piece:
    """A phase of a schedule, from `begin` to `stop` in the clock's unit.

    shape        how the value changes; see the module's docstring
    first, last  values at `begin` and `stop`; some shapes only have them as bounds
    power        amplitude and exponent of the shape power, for n in the clock's unit
    jumps        whether `first`, not the previous piece's last value, holds at `begin`
    """

    shape: str
    begin: float
    stop: float
    first: float
    last: float
    power: tuple[float, float] = (0.0, 0.0)
    jumps: bool = False

    def at(self, n: float) -> float:
        """Return the value at n, or at `stop` if n is beyond it."""
        n = min(n, self.stop)
        match self.shape:
            case "constant":
                return self.first
            case "warmup":
                rise = (self.last - self.first) * (n - self.begin)
                return self.first + rise / (self.stop - self.begin)
            case "inverse-square-root":
                return max(self.last, self.first * math.sqrt(max(self.begin, 1.0) / max(n, 1)))
            case "power":
                amplitude, exponent = self.power
                rate = amplitude * math.pow(n, exponent) if n > 0 else math.inf
                return max(self.last, min(self.first, rate))
        left = _DECAYS[self.shape]((n - self.begin) / (self.stop - self.begin))
        return self.last + left * (self.first - self.last)


@dataclass(frozen=True)
class PhaseSchedule:
    """A value that follows `pieces`, one after the other; the last value holds after them.

    unit  unit of the pieces: "iterations", "samples" or "tokens"
    """

    pieces: tuple[Piece, ...]
    unit: str

    def at(self, iteration: int = 0, samples: int = 0, tokens: int = 0) -> float:
        """Return the value for the step that starts after these amounts were consumed."""
        n = {"iterations": iteration, "samples": samples, "tokens": tokens}[self.unit]
        for piece in reversed(self.pieces):
            if n > piece.begin or (piece.jumps and n == piece.begin):
                return piece.at(n)
        return self.pieces[0].at(n)

    def __str__(self) -> str:
        texts = []
        for piece in self.pieces:
            ends = [f"{piece.at(n):.4g}" for n in (piece.begin, piece.stop) if n < math.inf]
            until = "" if math.isinf(piece.stop) else f" until {piece.stop:,.0f}"
            texts.append(f"{' to '.join(dict.fromkeys(ends))} ({piece.shape}{until})")
        return f"{', '.join(texts)} {self.unit}"


@dataclass(frozen=True)
class OwnRate(PhaseSchedule):
    """The user's own learning rate (protocols.LearningRate); raises ConfigError for bad values."""

    function: LearningRate
    settings: OptimizerConfig

    def at(self, iteration: int = 0, samples: int = 0, tokens: int = 0) -> float:
        value = self.function(iteration, samples, tokens, self.settings)
        if not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ConfigError(
                f"your own learning rate is {value!r} after {iteration} iterations, {samples} "
                f"samples and {tokens} tokens: return a finite number of at least 0"
            )
        return float(value)

    def __str__(self) -> str:
        return "of your own"


def _constant(value: float, begin: float = 0.0) -> Piece:
    return Piece("constant", begin, math.inf, value, value)


def _phased(config: Config, name: str, start: float, low: float) -> PhaseSchedule:
    """Return the schedule of phases in the setting `name`, from `start`.

    Decays end at `low` unless they have a value `to`. A schedule that is not set stays at `start`.
    Raises ConfigError for a phase that depends on the length of the run if the run has none.
    """
    written = getattr(config.optimizer, name)
    total, unit = _run_length(config) or (math.inf, "iterations")
    clock = _Clock(config, unit)
    pieces = list[Piece]()
    at = 0.0
    for phase in parse_phases(written) if written is not None else ():
        shape = phase.shape
        numbers = phase.numbers
        shares = [numbers.get("factor", 1.0) ** i for i in range(int(numbers.get("cycles", 1)))]
        length = max(0.0, total - at) / math.fsum(shares)
        if phase.length is not None:
            length = phase.length * total / 100 if phase.percent else phase.length
        if math.isinf(length) and shape not in _ENDLESS:
            raise ConfigError(
                f"--{name.replace('_', '-')} {written}: '{shape}' is relative to the run, which "
                "has no length: set --train-iters, --train-samples or --train-tokens"
            )
        before = pieces[-1].at(math.inf) if pieces else 0.0 if shape == "warmup" else start
        first = numbers.get("from", start if shape == "power" else before)
        last = numbers.get("to", {"warmup": start, "constant": first}.get(shape, low))
        power = (0.0, 0.0)
        if shape == "power":
            tokens = 1 / clock.convert(1.0, "tokens", "the shape power")  # tokens per unit
            amplitude, exponent = (numbers.get(key, value) for key, value in _POWER.items())
            power = amplitude * config.batch.global_batch_size * tokens**exponent, exponent
        for i, share in enumerate(shares):
            stop = at + length * share
            jumps = i > 0 or "from" in numbers
            pieces.append(Piece(shape, at, stop, first, last, power, jumps))
            at = stop
    pieces = [piece for piece in pieces if piece.stop > piece.begin]
    return PhaseSchedule(tuple(pieces or [_constant(start)]), unit)


def schedule_basis(config: Config) -> dict[str, object]:
    """Return all settings that determine the schedules of a run."""
    o = config.optimizer
    return o.schedule_basis or {
        **{name: config.get(name) for name in _BASIS},
        **{name: value for name, value in vars(o).items() if name.startswith(SCHEDULE)},
    }


def _on_basis(config: Config) -> Config:
    """Return `config` with the settings that its schedules follow."""
    if not (basis := config.optimizer.schedule_basis):
        return config
    basis = {"decoupled_lr": basis["lr"], "decoupled_min_lr": basis["min_lr"], **basis}
    sections = {
        name: replace(section, **{n: basis[n] for n in basis if hasattr(section, n)})
        for name in ("model", "batch", "optimizer")
        for section in [getattr(config, name)]
    }
    return replace(config, **sections)


def learning_rate(config: Config) -> PhaseSchedule:
    """Return the schedule of the learning rate.

    Raises ConfigError for lengths that are missing, contradict each other or cannot be converted;
    megatron.config checks the rest.
    """
    o = config.optimizer
    if config.pieces.learning_rate is not None:
        return OwnRate((), "iterations", config.pieces.learning_rate, o)
    lr = float(o.lr)
    low = float(o.min_lr)
    style = o.lr_decay_style
    if o.lr_schedule is not None:
        return _phased(config, "lr_schedule", lr, low)
    decay, unit = _length(o, "lr_decay") or _run_length(config) or (math.inf, "iterations")
    ends = style not in _ENDLESS
    if ends and math.isinf(decay):
        raise ConfigError(
            f"--lr-decay-style {style} needs a length: set --train-iters, --train-samples, "
            "--train-tokens or --lr-decay-iters"
        )
    clock = _Clock(config, unit)
    if o.lr_warmup_fraction is None:
        warmup = clock.length(o, "lr_warmup", "the warm-up")
    else:
        warmup = 0.0 if math.isinf(decay) else o.lr_warmup_fraction * decay
    if ends and decay <= warmup:
        raise ConfigError(
            f"the learning rate's decay ends after {decay:g} {unit}, not later "
            f"than its warm-up of {warmup:g}: shorten the warm-up or lengthen the decay"
        )
    pieces = [Piece("warmup", 0.0, warmup, o.lr_warmup_init, lr)] if warmup > 0 else []
    if style == "constant":
        pieces.append(_constant(lr, warmup))
    elif style == "WSD":
        final = clock.length(o, "lr_wsd_decay", "the final decay of WSD")
        if final > decay - warmup:
            raise ConfigError(
                f"the final decay of WSD takes {final:g} {unit}, more than the {decay - warmup:g} "
                "after the warm-up: shorten it"
            )
        pieces.append(Piece("constant", warmup, decay - final, lr, lr))
        pieces.append(Piece(o.lr_wsd_decay_style, decay - final, decay, lr, low))
    else:
        pieces.append(Piece(style, warmup, decay, lr, low))
        pieces.append(_constant(low, decay))
    return PhaseSchedule(tuple(pieces), unit)


def weight_decay(config: Config) -> PhaseSchedule:
    """Return the schedule of the weight decay, over the whole run unless it has phases.

    Raises ConfigError if the weight decay is to change over a run without a length.
    """
    o = config.optimizer
    if o.weight_decay_schedule is not None:
        return _phased(config, "weight_decay_schedule", o.weight_decay, 0.0)
    start = o.weight_decay if o.start_weight_decay is None else o.start_weight_decay
    end = o.weight_decay if o.end_weight_decay is None else o.end_weight_decay
    style = o.weight_decay_incr_style
    length, unit = _run_length(config) or (math.inf, "iterations")
    if style == "constant":
        start = end
    elif math.isinf(length):
        raise ConfigError(
            f"--weight-decay-incr-style {style} needs the length of the run: set --train-iters, "
            "--train-samples or --train-tokens"
        )
    return PhaseSchedule((Piece(style, 0.0, length, float(start), float(end)),), unit)


@dataclass(frozen=True)
class Schedules:
    """Values that may change from step to step.

    settings  settings of the optimizer, for the averaged weights
    named     each schedule by its name; "decoupled learning rate" only if it differs from the
              learning rate, "beta1" and "beta2" only with a schedule of either or, for
              AdamW, if the schedules follow a checkpoint
    """

    settings: OptimizerConfig
    named: dict[str, PhaseSchedule]

    @classmethod
    def from_config(cls, config: Config) -> Schedules:
        """Return the schedules of a run. Raises ConfigError."""
        config = _on_basis(config)
        o = config.optimizer
        named = {"learning rate": learning_rate(config), "weight decay": weight_decay(config)}
        decoupled = replace(o, lr=o.decoupled_lr, min_lr=o.decoupled_min_lr)
        if decoupled != o:
            named["decoupled learning rate"] = learning_rate(replace(config, optimizer=decoupled))
        scheduled = (o.adam_beta1_schedule, o.adam_beta2_schedule) != (None, None)
        if o.schedule_basis and o.optimizer == "adam" and config.pieces.optimizer is None:
            scheduled = True  # the engine gets its betas from this schedule
        if scheduled:
            named["beta1"] = _phased(config, "adam_beta1_schedule", o.adam_beta1, 0.0)
            named["beta2"] = _phased(config, "adam_beta2_schedule", o.adam_beta2, 0.0)
        return cls(o, named)

    def at(self, progress: Progress) -> StepValues:
        """Return the values of the next step."""
        p = progress
        here = (p.scheduled_iterations, p.scheduled_samples, p.scheduled_tokens)
        now = {name: schedule.at(*here) for name, schedule in self.named.items()}
        average = self._new_in_average(progress.scheduled_iterations)
        betas = (now["beta1"], now["beta2"]) if "beta1" in now else None
        decoupled = now.get("decoupled learning rate")
        return StepValues(now["learning rate"], now["weight decay"], betas, average, decoupled)

    def _new_in_average(self, steps: int) -> float:
        decay = self.settings.ema_decay
        interval = self.settings.ema_interval
        if decay is None or (steps + 1) % interval:
            return 0.0
        updates = steps // interval
        return 1.0 - min(decay, (1 + updates) / (10 + updates) if self.settings.ema_warmup else 1.0)

    def __str__(self) -> str:
        return "; ".join(f"{name} {schedule}" for name, schedule in self.named.items())
