"""Custom optimizer: DeepSpeed's FusedLamb under ZeRO.

Its trust ratio needs all elements of a parameter. Another optimizer with Adam's moments can take
its place in `make`.
"""

from __future__ import annotations

from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


class Lamb(torch.optim.Optimizer):
    """Brings weights, gradients and moments of each parameter to one rank, which updates it."""

    def __init__(self, groups: Any, settings: Any) -> None:
        super().__init__(groups, {"lr": settings.lr, "weight_decay": 0.0})
        self.settings = settings
        self.inner: Any = None

    @staticmethod
    def full_parameters(name: str, shape: tuple[int, ...]) -> bool:
        return True

    def make(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        from deepspeed.ops.lamb import FusedLamb

        betas = self.settings.adam_beta1, self.settings.adam_beta2
        return FusedLamb(parameters, betas=betas, eps=self.settings.adam_eps)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        full_matrices = self.param_groups[0]["full_parameters"]
        flats = []
        step = 0
        for group in self.param_groups:
            (p,) = group["params"]  # a flat part of the fp32 weights
            state = self.state[p]
            moments = [state.setdefault(name, torch.zeros_like(p)) for name in MOMENTS]
            state["step"] = step = state.get("step", 0) + 1
            flats.append(torch.stack((p, p.grad, *moments), -1))

        def update(name: str, values: torch.Tensor) -> torch.Tensor:
            if values.is_meta:  # in a dry run
                return values
            weights, gradient, *moments = (x.contiguous() for x in values.unbind(-1))
            p = torch.nn.Parameter(weights)
            p.grad = gradient
            self.inner = self.inner or self.make([p])
            group = self.param_groups[full_matrices.group_of[name]]
            keys = {key: group[key] for key in ("lr", "weight_decay")}
            self.inner.param_groups[0].update(keys, params=[p])
            state = {"step": step - 1, **dict(zip(MOMENTS, moments, strict=True))}
            self.inner.state = {p: state}
            self.inner.step()
            return torch.stack((p, gradient, *(state[name] for name in MOMENTS)), -1)

        if full_matrices is None:  # in a trial step, which only shows which state is kept
            return
        full_matrices(flats, update)
        for group, flat in zip(self.param_groups, flats, strict=True):
            (p,) = group["params"]
            weights, _, *moments = flat.unbind(-1)
            p.copy_(weights)
            for name, values in zip(MOMENTS, moments, strict=True):
                self.state[p][name].copy_(values)


PIECES = {"optimizer": Lamb}
