"""Time of a training step: on the schedule's clock, by a formula for ranking, and in tables."""

from __future__ import annotations

from megatron.planner.timing.estimate import COMPONENTS, Estimate, estimate, folded_seconds
from megatron.planner.timing.explain import explain

__all__ = ["COMPONENTS", "Estimate", "estimate", "explain", "folded_seconds"]
