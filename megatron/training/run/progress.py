"""How far a run has come."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Counts since the first step of the run, over all its resumptions.

    iteration                 steps taken, skipped ones included
    consumed_samples          training samples taken by all ranks together
    consumed_tokens           the same in tokens
    consumed_valid_samples    validation samples taken by the evaluations inside the loop
    skipped_iterations        steps whose gradients were not finite, so that no weight moved
    scheduled_...             the first three without skipped steps: by these the learning rate and the weight decay
                              advance, as in Megatron
    sources                   what was taken of each source of training data, see megatron.data.ledger; as of the
                              checkpoint that was loaded or is written
    left_out                  ranges [start, stop) of positions in the order of samples that the run goes around after
                              loss spikes; consumed samples are counted without them
    recent_losses             of the last steps, the oldest first: what --loss-spike-factor compares with
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
        """(iterations, samples, tokens) of the steps that moved the weights."""
        return self.scheduled_iterations, self.scheduled_samples, self.scheduled_tokens

    def advance(self, samples: int, seq_length: int) -> None:
        """Count one step over `samples` sequences; `count` says later whether it was skipped."""
        self.iteration += 1
        self.consumed_samples += samples
        self.consumed_tokens += samples * seq_length

    def count(self, samples: int, seq_length: int, *, skipped: bool) -> None:
        """Count the step over `samples` sequences as one that was skipped, or moved the weights."""
        self.skipped_iterations += int(skipped)
        if not skipped:
            self.scheduled_iterations += 1
            self.scheduled_samples += samples
            self.scheduled_tokens += samples * seq_length
