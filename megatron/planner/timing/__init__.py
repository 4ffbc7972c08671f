"""How long a training step takes, from the configuration, the machine and the lists that the executor runs.

    ../trace.py     what a pass consists of, read off the code: products, attention, memory-bound kernels, messages
    ../clocked.py   seconds of a pass on a device and its links
    ../stage.py     a stage's passes for one micro-batch
    replicas.py, update.py         what follows the last pass: gradients, optimizer, new weights
    estimate.py     all of it on the clock of the schedule, and the parts of the seconds
    fold.py         the same without a clock, to rank layouts; explain.py: the arithmetic, line by line

Needs torch, but no device, where a trace is not in the user's cache folder yet.
"""
from __future__ import annotations

from megatron.planner.timing.estimate import PARTS, Estimate, estimate
from megatron.planner.timing.explain import explain
from megatron.planner.timing.fold import folded_seconds

__all__ = ["PARTS", "Estimate", "estimate", "explain", "folded_seconds"]
