"""Custom optimizer: momentum whose update of every matrix is divided by its root mean square.

For matrices it needs all elements of the momentum, as Muon does; the update of other parameters is
the sign of their momentum. --adam-beta1 is the decay of the momentum; learning rate and weight
decay follow their schedules.
"""

from __future__ import annotations

from typing import Any

import torch


def normalized(name: str, x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean().sqrt() + 1e-12)


class Normalized(torch.optim.Optimizer):
    def __init__(self, groups: Any, settings: Any) -> None:
        super().__init__(groups, {"lr": settings.lr, "weight_decay": 0.0})
        self.beta = settings.adam_beta1

    @staticmethod
    def full_parameters(name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a parameter is a matrix of a layer."""
        return len(shape) > 1 and name.startswith("layers.") and not name.endswith(".bias")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        updates = []
        for group in self.param_groups:
            (p,) = group["params"]  # a flat part of the fp32 weights
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.lerp_(p.grad, 1 - self.beta)
            updates.append(momentum.clone() if group["full_parameters"] else momentum.sign())
        pairs = list(zip(self.param_groups, updates, strict=True))
        if full := [(group, update) for group, update in pairs if group["full_parameters"]]:
            full[0][0]["full_parameters"]([update for _, update in full], normalized)
        for group, update in pairs:
            (p,) = group["params"]
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


PIECES = {"optimizer": Normalized}
