"""Fused kernels in tests: forced on, and counted."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from torch.autograd.profiler import profile

from megatron.kernels.choose import ALL, Fusions
from megatron.layers.context import LayerContext


class Operators:
    """Count our operators by name, forward and backward.

    The counts are in seen.calls of `with Operators() as seen`.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> Operators:
        self._profile = profile(use_cpu=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        names = (event.name for event in self._profile.function_events)
        self.calls.update(
            name.removeprefix("megatron::") for name in names if name.startswith("megatron::")
        )


def context(fusions: Fusions = ALL, **fields: Any) -> LayerContext:
    """Return the context of one process with these fusions.

    Without a kernel library, the operators' own fallback computes.
    """
    return dataclasses.replace(LayerContext.single(), fusions=fusions, **fields)


def force(monkeypatch: pytest.MonkeyPatch, fusions: Fusions = ALL) -> None:
    """Make models and engines use `fusions` from now on, regardless of flags and machine."""
    for module in ("megatron.model.gpt", "megatron.engine.optimizer"):
        monkeypatch.setattr(f"{module}.choose_fusions", lambda *_: fusions)
