"""Time of a training step: on the schedule's clock, by a formula for ranking, and in tables."""

from __future__ import annotations

from megatron.planner.timing.estimate import (
    COMPONENTS,
    Estimate,
    dispatch_choice,
    estimate,
    folded_seconds,
)
from megatron.planner.timing.explain import explain

__all__ = ["COMPONENTS", "Estimate", "dispatch_choice", "estimate", "explain", "folded_seconds"]
