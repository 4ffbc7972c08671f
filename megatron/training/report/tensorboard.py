"""TensorBoard, under the tag names of Megatron-LM and, for losses, of Megatron-DeepSpeed too."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.training.report.log_line import perplexity
from megatron.training.report.metrics import IterationReport, StepRecord


class TensorBoard:
    """Writes each --tensorboard-log-interval'th step at the log line that follows it, when its loss is known.

    A writer that is off accepts every call and does nothing. A disk that fills up during the run turns it off; `warn`
    is told.
    """

    def __init__(self, config: Config, enabled: bool, warn: Callable[[str], object] = print) -> None:
        self._flags: Any = config.logging
        self._warn = warn
        self._world_size = config.parallel.world_size
        self._writer = _open_writer(config.logging) if enabled and config.logging.tensorboard_dir else None

    def iteration(
        self,
        report: IterationReport,
        times_ms: Mapping[str, Sequence[float]] | None = None,
        epochs: Mapping[str, float] | None = None,
    ) -> None:
        """Write the steps of one interval; `times_ms` are the timers of its parts, one number for each rank; `epochs`
        is how often each source of data has been gone through."""
        if self._writer is None:
            return
        with self._off_when_unwritable():
            for step, loss in zip(report.steps, report.step_losses, strict=True):
                if step.iteration % self._flags.tensorboard_log_interval == 0:
                    self._step(step, loss)
            if self._flags.log_memory_to_tensorboard and report.memory_bytes is not None:
                self._add("mem-allocated-bytes", report.memory_bytes, report.iteration)
                if report.reserved_bytes is not None:
                    self._add("mem-reserved-bytes", report.reserved_bytes, report.iteration)
            if self._flags.log_timers_to_tensorboard:
                self._add("iteration-time", report.step_time_s, report.iteration)
                self._add("iteration-time/samples-per-second", report.samples_per_s, report.iteration)
                for part, times in (times_ms or {}).items():
                    self._add(f"{part}-time", max(times) / 1e3, report.iteration)
            for source, number in (epochs or {}).items():
                self._add(f"data-epochs/{source}", number, report.iteration)
            self._writer.flush()

    def validation(self, iteration: int, consumed_samples: int, loss: float) -> None:
        """Write one evaluation of the validation set."""
        if self._writer is None:
            return
        with self._off_when_unwritable():
            for tag in ("lm loss validation", "lm-loss-validation/lm loss validation"):
                self._both(tag, loss, iteration, consumed_samples)
                if self._flags.log_validation_ppl_to_tensorboard:
                    self._both(f"{tag} ppl", perplexity(loss), iteration, consumed_samples)
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            with self._off_when_unwritable():
                self._writer.close()

    @contextmanager
    def _off_when_unwritable(self) -> Iterator[None]:
        """Figures are worth less than the run: an OSError inside the block ends TensorBoard, not training."""
        try:
            yield
        except OSError as error:
            self._writer = None
            folder = self._flags.tensorboard_dir
            self._warn(f" warning: --tensorboard-dir {folder}: {error.strerror}: nothing more is written there")

    def _step(self, step: StepRecord, loss: float) -> None:
        flags, at = self._flags, (step.iteration, step.consumed_samples)
        if math.isfinite(loss) and not step.skipped:
            for tag in ("lm loss", "lm-loss-training/lm loss"):
                self._both(tag, loss, *at)
                self._add(f"{tag} vs tokens", loss, step.consumed_tokens)
        if flags.log_learning_rate_to_tensorboard:
            self._both("learning-rate", step.learning_rate, *at)
        if flags.log_batch_size_to_tensorboard:
            self._both("batch-size", step.global_batch_size, *at)
        if flags.log_loss_scale_to_tensorboard and step.loss_scale is not None:
            self._both("loss-scale", step.loss_scale, *at)
        if flags.log_world_size_to_tensorboard:
            self._both("world-size", self._world_size, *at)
        for tag, value in (
            ("grad-norm", step.grad_norm), ("num-zeros", step.num_zeros), ("params-norm", step.params_norm)
        ):  # fmt: skip
            if value is not None:
                self._both(tag, value, *at)

    def _both(self, tag: str, value: float, iteration: int, samples: int) -> None:
        self._add(tag, value, iteration)
        self._add(f"{tag} vs samples", value, samples)

    def _add(self, tag: str, value: float, step: int) -> None:
        assert self._writer is not None
        self._writer.add_scalar(tag, value, step)


def _open_writer(flags: Any) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"--tensorboard-dir {flags.tensorboard_dir} needs the package tensorboard ({error}): install it, or leave "
            f"the flag out"
        ) from error
    try:
        return SummaryWriter(log_dir=flags.tensorboard_dir, max_queue=flags.tensorboard_queue_size)
    except OSError as error:
        raise ConfigError(f"--tensorboard-dir {flags.tensorboard_dir}: {error.strerror}: choose another") from error
