"""The loss scale of fp16 training (Micikevicius et al., arXiv 1710.03740, section 3.2).

Pure Python. Every rank makes the same updates, because overflow is agreed on by all ranks before.
"""
from __future__ import annotations

from typing import Any


class LossScale:
    """A scale that does not change: 1 in fp32 and bf16, or what the user fixed in fp16."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = float(scale)

    def update(self, overflow: bool) -> None:
        """Take note of a step that was taken, or skipped by overflow."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"scale": self.scale}

    def load_state(self, state: dict[str, Any]) -> None:
        """A fixed scale is a setting: what another run used does not replace it."""


class DynamicLossScale(LossScale):
    """Halves after `hysteresis` overflows, doubles after `window` steps in a row without one.

    The allowance of overflows is refilled when the scale doubles. The scale never falls below `minimum`.
    """

    dynamic = True

    def __init__(self, initial: float, minimum: float, window: int, hysteresis: int) -> None:
        super().__init__(max(initial, minimum))
        self.minimum, self.window, self.hysteresis = float(minimum), int(window), int(hysteresis)
        self._good_steps, self._allowance = 0, self.hysteresis

    def update(self, overflow: bool) -> None:
        if overflow:
            self._good_steps = 0
            self._allowance -= 1
            if self._allowance <= 0:
                self.scale = max(self.scale / 2.0, self.minimum)
            return
        self._good_steps += 1
        if self._good_steps == self.window:
            self._good_steps, self._allowance = 0, self.hysteresis
            self.scale *= 2.0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self._good_steps, "allowance": self._allowance}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where another run stood; a fixed scale's state gives only the scale."""
        self.scale = float(state["scale"])
        self._good_steps = int(state.get("good_steps", 0))
        self._allowance = int(state.get("allowance", self.hysteresis))


def loss_scale_of(precision: Any) -> LossScale:
    """The loss scale that `config.precision` asks for."""
    if not precision.fp16:
        return LossScale(1.0)
    if precision.loss_scale:
        return LossScale(precision.loss_scale)
    return DynamicLossScale(
        precision.initial_loss_scale, precision.min_loss_scale, precision.loss_scale_window, precision.hysteresis
    )


class ScaleForDeepSpeed:
    """What DeepSpeed's optimizer asks of a loss scaler.

    DeepSpeed updates its scaler before it divides the gradients by the scale, so that a step at which the scale grows
    would be taken with gradients half as large. This one ignores DeepSpeed's update; the Engine updates after the step.
    """

    def __init__(self, inner: LossScale) -> None:
        self._inner = inner
        self.dynamic = inner.dynamic

    @property
    def cur_scale(self) -> float:
        return self._inner.scale

    @property
    def loss_scale(self) -> float:
        return self._inner.scale

    def update_scale(self, overflow: bool) -> None:
        """Left to the Engine."""
