"""When a run saves, and what comes of it: a save that fails costs the run nothing but that save."""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.training.report.reporter import Reporter
from megatron.training.run.agreement import Agreement

_DUE, _WRITING = "save", "writing"
_RETRY_S = 60.0  # after a failed save; every step would be slow, and the log full of it


class Outcome(Protocol):
    """What a Saver says of a checkpoint; see megatron.checkpoint.save.Saved."""

    @property
    def folder(self) -> Path: ...
    @property
    def iteration(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def elapsed_s(self) -> float: ...
    @property
    def stall_s(self) -> float: ...


class Writer(Protocol):
    """What writes checkpoints: megatron.checkpoint.save.Saver."""

    @property
    def pending(self) -> bool: ...
    @property
    def written(self) -> bool: ...
    def start(
        self, iteration: int, engine: Any, state: dict[str, Any], passport: dict[str, Any], background: bool
    ) -> Outcome | None: ...
    def commit(self) -> Outcome: ...
    def finish(self) -> Outcome | None: ...


@dataclass(frozen=True)
class Failure:
    """A save that failed: of which iteration, why, and when (of the clock of `Saves`)."""

    iteration: int
    reason: str
    at_s: float


class Saves:
    """--save-interval, --save-interval-minutes and --async-save, over the Saver of this rank.

    All ranks call every method. Minutes, and the next try after a failure, are decided on rank 0 and agreed; the
    `agreement` has also to say whether a rank still writes. `saved_iteration` is the last one of which there is a
    checkpoint in the --save folder, None for none. `after_save` are told how long each took.
    """

    def __init__(
        self,
        config: Config,
        writer: Writer,
        agreement: Agreement,
        reporter: Reporter,
        *,
        engine: Any = None,
        passport: Callable[[int], dict[str, Any]] = lambda iteration: {},
        saved_iteration: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = config.checkpoint
        self._directory, self._interval, self._background = settings.save, settings.save_interval, settings.async_save
        self._every_s = None if settings.save_interval_minutes is None else 60.0 * settings.save_interval_minutes
        self._writer, self._reporter, self._engine, self._passport = writer, reporter, engine, passport
        self._clock, self._last_s = clock, clock()
        self.after_save: list[Callable[[float], object]] = []
        self._started: int | None = None  # the iteration of a save in the background
        self.saved_iteration = saved_iteration
        self.saved_here = False  # whether this job made any
        self.failure: Failure | None = None  # of the last save, None when that one is good
        agreement.add_first(_DUE, self._is_time, lambda: self._every_s is not None or self.failure is not None)
        agreement.add(_WRITING, lambda: int(not writer.written), lambda: writer.pending)

    @property
    def under_way(self) -> bool:
        """Whether a save in the background is not complete yet."""
        return self._started is not None

    def is_due(self, iteration: int, agreed: Mapping[str, int]) -> bool:
        """Whether to save after `iteration`, given what the ranks agreed on."""
        return iteration not in (self.saved_iteration, self._started) and (
            self.at_interval(iteration) or bool(agreed.get(_DUE))
        )

    def at_interval(self, iteration: int) -> bool:
        """Whether --save-interval falls on `iteration`."""
        return self._interval is not None and iteration % self._interval == 0

    def ahead(self, iteration: int, steps: int = 1) -> int:
        """How many saves lie between now, after `iteration`, and an end after `steps` more: the last one, those that
        are due on the way, one under way. Of rank 0, whose clock counts."""
        due = sum(self.at_interval(iteration + i) for i in range(steps))
        return 1 + int(self.under_way) + max(due, int(self._is_time()))

    def save(self, iteration: int, state: dict[str, Any], *, last: bool = False) -> None:
        """Save `state`, what `iteration` steps led to: with --async-save in the background, but the `last` one of a
        run before this returns. A save of before that is still being written is waited for. Does nothing where this
        iteration is saved."""
        if self._started is not None and (last or self._started != iteration):
            self.settle()
        if iteration in (self.saved_iteration, self._started):
            return
        background = self._background and not last
        self._reporter.say(f"saving checkpoint at iteration {iteration:7d} to {self._directory}")
        self._last_s = self._clock()
        try:
            saved = self._writer.start(iteration, self._engine, state, self._passport(iteration), background)
        except CheckpointError as error:
            self._failed(iteration, error, last)
            return
        if saved is None:
            self._started = iteration
        else:
            self._succeeded(saved, background)

    def commit_written(self, agreed: Mapping[str, int]) -> bool:
        """Complete a save in the background once every rank has written its part; whether it is complete now."""
        if self._started is None or agreed.get(_WRITING, True):
            return False
        return self._complete(self._writer.commit)

    def settle(self) -> bool:
        """Wait for a save in the background, if there is one, and complete it; whether there was a good one."""
        return self.under_way and self._complete(self._writer.finish)

    def close(self) -> None:
        """Complete what is under way, and wait until old checkpoints are removed."""
        self.settle()
        self._writer.finish()

    def check(self) -> None:
        """At the end of the run: raise CheckpointError when the last save failed, so that nobody takes the run for
        saved."""
        if self.failure is None:
            return
        kept = "there is none of an earlier iteration" if self.saved_iteration is None else (
            f"the last good one is of iteration {self.saved_iteration}"
        )
        raise CheckpointError(
            f"what was trained up to iteration {self.failure.iteration} is not saved, {kept}: {self.failure.reason}"
        )

    def _is_time(self) -> bool:
        """Of rank 0."""
        now = self._clock()
        if self.failure is not None and now - self.failure.at_s >= _RETRY_S:
            return True
        return self._every_s is not None and now - self._last_s >= self._every_s

    def _complete(self, complete: Callable[[], Outcome | None]) -> bool:
        iteration, self._started = self._started, None
        assert iteration is not None, "a save is under way"
        try:
            saved = complete()
        except CheckpointError as error:
            self._failed(iteration, error)
            return False
        assert saved is not None, "a save was pending"
        self._succeeded(saved, background=True)
        return True

    def _succeeded(self, saved: Outcome, background: bool) -> None:
        say, iteration, seconds = self._reporter.say, saved.iteration, max(saved.elapsed_s, 1e-9)
        say(f"  successfully saved checkpoint at iteration {iteration:7d} to {self._directory}")
        say(
            f"Checkpoint Save GB: {saved.bytes / 1e9:.3f}, GB/Sec: {saved.bytes / 1e9 / seconds:.2f}, "
            f"Latency(second): {saved.elapsed_s:.3f}" + (f", stall(second): {saved.stall_s:.3f}" if background else "")
        )
        self._reporter.metrics.write(
            "checkpoint", iteration=iteration, folder=str(saved.folder), size_bytes=saved.bytes,
            elapsed_s=saved.elapsed_s, stall_s=saved.stall_s, background=background,
        )  # fmt: skip
        if self.failure is not None:
            say(f" saving works again: iteration {self.failure.iteration} could not be saved, {iteration} is")
        self.failure, self.saved_iteration, self.saved_here = None, iteration, True
        for told in self.after_save:
            told(saved.elapsed_s)

    def _failed(self, iteration: int, error: CheckpointError, last: bool = False) -> None:
        self.failure = Failure(iteration, str(error), self._clock())
        good = "there is none" if self.saved_iteration is None else f"it is of iteration {self.saved_iteration}"
        self._reporter.say(f" ERROR: the checkpoint of iteration {iteration} could not be saved: {error}")
        if not last:
            self._reporter.say(
                f" ERROR: training goes on and will try again; until then a fault costs all since the last checkpoint "
                f"({good})"
            )
        self._reporter.metrics.write("checkpoint_failed", iteration=iteration, reason=str(error))
