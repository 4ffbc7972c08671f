"""Where the figures of a run go: log lines, metrics file and TensorBoard. Only rank 0 writes."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import Config
from megatron.data.ledger import Ledger
from megatron.training.report.console import Console
from megatron.training.report.log_line import (
    format_iteration,
    format_memory,
    format_timers,
    format_validation,
    perplexity,
)
from megatron.training.report.metrics import IterationReport, MetricsFile
from megatron.training.report.stragglers import StragglerReport
from megatron.training.report.tensorboard import TensorBoard
from megatron.training.run.host import PLAUSIBLE_UTILISATION
from megatron.training.run.progress import Progress

_GROWTH = 1.05  # of memory since it was last said, which is worth another line


class Reporter:
    """Tells people and tools how the run goes. Every rank may call it; rank 0 speaks."""

    def __init__(self, config: Config, rank: int) -> None:
        self._timing_option = config.logging.timing_log_option
        self._memory_said = 0.0
        self.console = Console(enabled=rank == 0)
        flag = "--metrics-file" if config.logging.metrics_file else f"--save {config.checkpoint.save}"
        self.metrics = MetricsFile(config.metrics_path if rank == 0 else None, flag=flag, warn=self.say)
        self._tensorboard = TensorBoard(config, enabled=rank == 0, warn=self.say)

    def say(self, text: str) -> None:
        """Print one or more lines."""
        self.console.say(text)

    def iteration(
        self, report: IterationReport, times_ms: dict[str, list[float]], epochs: Mapping[str, float] | None = None
    ) -> None:
        """The log line of an interval, its timers if any, its record, and its steps for TensorBoard, with the `epochs`
        that were taken of each source of data. The most memory of a rank is said after the first one, and when it has
        grown."""
        self.say(format_iteration(report))
        if report.hfu is not None and report.hfu > PLAUSIBLE_UTILISATION:
            self.say(
                f" warning: HFU {report.hfu:.3f} is more than a device can do: the time or the peak is wrong"
            )
        timers: dict[str, Any] = {}
        if times_ms:
            self.say(format_timers(times_ms, self._timing_option))
            timers["times_ms"] = {name: {"min": min(t), "max": max(t)} for name, t in times_ms.items()}
        self._say_memory(report)
        self.metrics.write("iteration", **report.as_record(), **timers)
        self._tensorboard.iteration(report, times_ms, epochs)
        loss = "" if report.lm_loss is None else f"loss {report.lm_loss:.3f}  "
        self.console.update(report.iteration, f"{loss}{report.tokens_per_s:,.0f} tokens/s")

    def _say_memory(self, report: IterationReport) -> None:
        held, rank = report.memory_bytes, report.memory_rank
        if held is not None and rank is not None and held > _GROWTH * self._memory_said:
            self.say(format_memory(held, rank, report.reserved_bytes))
            self._memory_said = held

    def validation(
        self, prefix: str, progress: Progress, dataset: str, loss: float, samples: int, seconds: float
    ) -> None:
        """One evaluation on `samples` samples of the 'valid' or 'test' data set."""
        self.say(format_validation(prefix, loss))
        self.metrics.write(
            "validation", iteration=progress.iteration, consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens, dataset=dataset, lm_loss=loss, perplexity=perplexity(loss),
            samples=samples, elapsed_s=seconds,
        )  # fmt: skip
        if dataset == "valid":
            self._tensorboard.validation(progress.iteration, progress.consumed_samples, loss)

    def sources(self, progress: Progress, ledger: Ledger) -> None:
        """What the run has taken of each source of training data."""
        self.say(ledger.line())
        self.metrics.write(
            "data", iteration=progress.iteration, consumed_samples=progress.consumed_samples, sources=ledger.record()
        )

    def stragglers(self, iteration: int, found: StragglerReport | None) -> None:
        """What each rank needed for its own computations; None on all ranks but the first."""
        if found is None:
            return
        for line in found.lines:
            self.say(line)
        self.metrics.write("stragglers", iteration=iteration, **found.record)

    def close(self) -> None:
        self.console.end()
        self.metrics.close()
        self._tensorboard.close()
