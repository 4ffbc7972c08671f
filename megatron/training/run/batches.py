"""Batch sizes, progress and length of a run. Pure arithmetic, no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.config.option import MOST_SAMPLES
from megatron.errors import ConfigError

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
        """Yield each batch size after `consumed_samples` with its number of steps; the last size
        has no end."""
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
        """Return the steps from `consumed_samples` until `samples` are consumed; with `whole`
        without a last step that would exceed `samples`, otherwise with it."""
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


def planned_samples(config: Config, batches: BatchSchedule) -> tuple[int, int, int]:
    """Return the training, validation and test samples of the whole run, counted as in Megatron, so
    that both can use the same index files. The evaluation before the first step needs none of its
    own. Raises ConfigError for more than an index can list."""
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
