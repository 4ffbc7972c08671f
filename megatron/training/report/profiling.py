"""torch's profiler over some iterations (--profile)."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron.config import Config
from megatron.errors import ConfigError


class Profiler:
    """Records iterations --profile-step-start up to --profile-step-end on --profile-ranks; off without --profile.

    Writes one Chrome trace per rank into --trace-dir, or beside TensorBoard's files, or into the current folder.
    Raises ConfigError when that folder cannot be made.
    """

    def __init__(self, config: Config, rank: int) -> None:
        logging = config.logging
        self._on = bool(logging.profile) and rank in logging.profile_ranks
        self._start, self._end = logging.profile_step_start, logging.profile_step_end
        self._details = logging.profile == "pt-full"
        folder = Path(logging.trace_dir or logging.tensorboard_dir or ".")
        self._path = folder / f"trace_rank{rank}.json"
        self._profile: Any = None
        if self._on:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--trace-dir {folder}: {error.strerror}: choose another") from error

    def step(self, iteration: int) -> str | None:
        """Call before each step with its number; a line to print when a trace was written."""
        if self._on and self._profile is None and self._start <= iteration < self._end:
            self._profile = torch.profiler.profile(
                record_shapes=self._details, with_stack=self._details, profile_memory=self._details
            )
            self._profile.start()
        elif self._profile is not None and iteration >= self._end:
            return self.finish()
        return None

    def finish(self) -> str | None:
        """Write what was recorded, if anything."""
        if self._profile is None:
            return None
        profile, self._profile, self._on = self._profile, None, False
        profile.stop()
        try:
            profile.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:  # a full disk must not end the run
            return f" warning: the profile cannot be written to {self._path}: {error}"
        return f" profile of iterations {self._start} to {self._end} written to {self._path}"
