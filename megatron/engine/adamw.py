"""AdamW in one pass over all weights."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron.engine.untraced import Untraced
from megatron.errors import KernelError
from megatron.kernels.ops.optimizer import adamw_


class FusedAdamW(Untraced, torch.optim.Optimizer):
    """torch.optim.AdamW through megatron.kernels.ops.optimizer: fp32 weights, gradients fp32 or 16 bit.

    params  as torch's optimizers take them; lr, betas, eps, weight_decay are numbers

    Each group counts its steps in `group["step"]`, on the host, also for a parameter without gradient, which is left
    out. State: `exp_avg` and `exp_avg_sq`, fp32. A state_dict of torch.optim.AdamW can be loaded.

    copies          {parameter: 16-bit tensor of its shape}: gets the new weights in the same pass
    gradients       {parameter: gradient} in place of .grad, which has the parameter's format
    gradient_scale  factor of all gradients, e.g. of clipping: one fp32 number on their device, which the host need not
                    know. Where it is not finite the step changes nothing, and whoever finds out calls `uncount`
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})
        self.copies: dict[torch.Tensor, torch.Tensor] = {}
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.gradient_scale: float | torch.Tensor = 1.0

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # What connects it with other objects is not in a copy.
        self.__dict__.setdefault("copies", {})
        self.__dict__.setdefault("gradients", {})
        self.__dict__.setdefault("gradient_scale", 1.0)
        for group in self.param_groups:
            for option in ("maximize", "amsgrad"):
                if group.get(option):
                    raise KernelError(f"FusedAdamW has no {option}; use torch.optim.AdamW for this state")
            group.setdefault("step", 0)
            for p in group["params"]:
                if "step" in self.state.get(p, {}):  # torch counts for each parameter
                    group["step"] = int(self.state[p].pop("step"))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; the closure's result, where one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            for parameters in self._alike(group["params"]):
                self._update(group, parameters)
        return loss

    def uncount(self) -> None:
        """The last step changed nothing, and does not count in the bias correction."""
        for group in self.param_groups:
            group["step"] -= 1

    def _alike(self, parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Those with a gradient, together as one launch can take them: by device and types."""
        kinds: dict[Any, list[torch.Tensor]] = {}
        for p in parameters:
            if (gradient := self._gradient(p)) is not None:
                copy = self.copies.get(p)
                kinds.setdefault((p.device, gradient.dtype, None if copy is None else copy.dtype), []).append(p)
        return list(kinds.values())

    def _gradient(self, p: torch.Tensor) -> torch.Tensor | None:
        return self.gradients.get(p, p.grad)

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        adamw_(
            parameters, [g for p in parameters if (g := self._gradient(p)) is not None], [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states], [self.copies[p] for p in parameters if p in self.copies], lr=group["lr"],
            beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"], step=group["step"],
            gradient_scale=self.gradient_scale,
        )  # fmt: skip
