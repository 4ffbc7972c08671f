"""How many samples a step takes and in how many micro-batches; pure arithmetic."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.option import MOST_SAMPLES
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config import Config


@dataclass(frozen=True)
class BatchSchedule:
    """Global batch size as a function of the samples consumed.

    `rampup` is (start, increment, samples): from `start` the batch grows by `increment` each time an equal share of
    `samples` has been consumed, and is `global_batch_size_at_end` from then on. `replica_batch_size` is what one
    micro-batch on every data-parallel rank takes: micro-batch size x data-parallel size.
    Raises ConfigError when a size on the way does not divide into micro-batches.

    >>> [BatchSchedule(32, 4, (8, 8, 300)).global_batch_size(n) for n in (0, 99, 100, 200, 300)]
    [8, 8, 16, 24, 32]
    """

    global_batch_size_at_end: int
    replica_batch_size: int
    rampup: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        for size in self.sizes():
            if size % self.replica_batch_size:
                raise ConfigError(
                    f"global batch size {size}{' of --rampup-batch-size' if self.rampup else ''} is not a multiple of "
                    f"micro-batch size x data-parallel size = {self.replica_batch_size}: choose multiples of it"
                )

    @classmethod
    def from_config(cls, config: Config) -> BatchSchedule:
        batch = config.batch
        replica = batch.micro_batch_size * config.parallel.data_parallel_size
        rampup = None
        if batch.rampup_batch_size is not None:
            if len(batch.rampup_batch_size) != 3:
                raise ConfigError(f"--rampup-batch-size takes START INCREMENT SAMPLES, not {batch.rampup_batch_size}")
            start, increment, samples = batch.rampup_batch_size
            rampup = (start, increment, samples)
        return cls(batch.global_batch_size, replica, rampup)

    def sizes(self) -> list[int]:
        """Every global batch size of the run, in order."""
        end = self.global_batch_size_at_end
        if self.rampup is None:
            return [end]
        start, increment, samples = self.rampup
        if start < 1 or increment < 1 or samples < 0 or start > end or (end - start) % increment:
            raise ConfigError(
                f"--rampup-batch-size {start} {increment} {samples} does not lead to global batch size {end}: "
                f"{end} minus the start must be a multiple of the increment"
            )
        return list(range(start, end + 1, increment))

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples of the step that starts after `consumed_samples`."""
        if self.rampup is None:
            return self.global_batch_size_at_end
        start, increment, samples = self.rampup
        steps = (self.global_batch_size_at_end - start) // increment
        if consumed_samples >= samples or steps == 0:
            return self.global_batch_size_at_end
        # Exact in integers: floor(consumed / (samples / steps)).
        return min(start + increment * (consumed_samples * steps // samples), self.global_batch_size_at_end)

    def _same_until(self, consumed_samples: int) -> int:
        """Up to where steps have the size of the one that starts after `consumed_samples`, within the ramp-up."""
        assert self.rampup is not None
        start, increment, samples = self.rampup
        sizes = max(1, (self.global_batch_size_at_end - start) // increment)
        return -(-(consumed_samples * sizes // samples + 1) * samples // sizes)

    def num_micro_batches(self, consumed_samples: int) -> int:
        """Micro-batches of each data-parallel rank in that step."""
        return self.global_batch_size(consumed_samples) // self.replica_batch_size

    @property
    def eval_micro_batches(self) -> int:
        """Micro-batches of each data-parallel rank in one evaluation iteration: always the full global batch."""
        return self.global_batch_size_at_end // self.replica_batch_size

    def samples_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Samples consumed after `iterations` more steps."""
        ramp_end = self.rampup[2] if self.rampup else 0
        while iterations and consumed_samples < ramp_end:
            size = self.global_batch_size(consumed_samples)
            steps = min(iterations, -(-(self._same_until(consumed_samples) - consumed_samples) // size))
            consumed_samples += steps * size
            iterations -= steps
        return consumed_samples + iterations * self.global_batch_size_at_end

    def iterations_until(self, samples: int, consumed_samples: int = 0, *, whole: bool) -> int:
        """Steps from `consumed_samples` until `samples` are consumed.

        With `whole` a last step that would go beyond `samples` is not taken; without, it is.
        """
        iterations = 0
        ramp_end = self.rampup[2] if self.rampup else 0
        while consumed_samples < min(ramp_end, samples):
            size = self.global_batch_size(consumed_samples)
            steps = -(-(min(self._same_until(consumed_samples), samples) - consumed_samples) // size)
            if whole and consumed_samples + steps * size > samples:
                return iterations + (samples - consumed_samples) // size
            consumed_samples += steps * size
            iterations += steps
        left = max(0, samples - consumed_samples)
        full = self.global_batch_size_at_end
        return iterations + (left // full if whole else -(-left // full))


def total_iterations(config: Config, batches: BatchSchedule, iteration: int = 0, consumed_samples: int = 0) -> int:
    """The iteration at which the run is done, when it stands at `iteration` with `consumed_samples`.

    --train-samples never takes more samples than it says; --train-tokens ends with the step that reaches it; where
    several ends are given the first to come holds.
    """
    batch = config.batch
    ends = []
    if batch.train_iters is not None:
        ends.append(batch.train_iters)
    if batch.train_samples is not None:
        ends.append(iteration + batches.iterations_until(batch.train_samples, consumed_samples, whole=True))
    if batch.train_tokens is not None:
        samples = -(-batch.train_tokens // config.model.seq_length)
        ends.append(iteration + batches.iterations_until(samples, consumed_samples, whole=False))
    if not ends:
        raise ConfigError("the run has no end: give --train-iters, --train-samples or --train-tokens")
    return min(ends)


def planned_samples(config: Config, batches: BatchSchedule) -> tuple[int, int, int]:
    """Training, validation and test samples of the whole run from its beginning, counted as Megatron counts them, so
    that index files on disk serve both. The evaluation before the first step needs none of its own. Raises ConfigError
    for more than an index could ever list."""
    training, end = config.training, total_iterations(config, batches)
    train = config.batch.train_samples or batches.samples_after(end)
    evaluation = training.eval_iters * batches.global_batch_size_at_end
    planned = train, (end // training.eval_interval + 1) * evaluation, evaluation
    if max(planned) > MOST_SAMPLES:
        raise ConfigError(
            f"the run takes {train} samples for training and {planned[1]} for validation; {MOST_SAMPLES} are the most: "
            f"make it shorter than {end} iterations, lower --eval-iters {training.eval_iters}, or raise "
            f"--eval-interval {training.eval_interval}"
        )
    return planned
