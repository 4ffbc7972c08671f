"""Custom optimizer: Lion (Chen et al., arXiv 2302.06675, algorithm 2).

--adam-beta1 and --adam-beta2 are its betas; learning rate and weight decay follow their schedules.
"""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, groups: Any, settings: Any) -> None:
        super().__init__(groups, {"lr": settings.lr, "weight_decay": 0.0})
        self.betas = settings.adam_beta1, settings.adam_beta2

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:  # a flat part of the fp32 weights
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                momentum, (beta1, beta2) = state["momentum"], self.betas
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(torch.lerp(p.grad, momentum, beta1)), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - beta2)


PIECES = {"optimizer": Lion}
