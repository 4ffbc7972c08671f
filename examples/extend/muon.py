"""Custom optimizer that needs whole matrices: Muon for the matrices of layers, Lion for the rest.

Muon is by Jordan et al. 2024 (kellerjordan.github.io/posts/muon). --adam-beta1 is its momentum;
Lion uses both betas.

Updates of Muon are scaled by 0.2 sqrt(max(rows, columns)) so that a learning rate of Adam fits (Liu
et al., arXiv 2502.16982, section 2.2). A fused matrix, such as that of queries, keys and values, is
orthogonalised as one.
"""

from __future__ import annotations

from typing import Any

import torch


def orthogonalise(name: str, matrix: torch.Tensor) -> torch.Tensor:
    """Approximate U V^T of U S V^T = matrix [rows, columns] by five Newton-Schulz steps, scaled."""
    x = matrix.flatten(1) / (matrix.norm() + 1e-7)
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    x = wide if x.shape[0] <= x.shape[1] else wide.T
    return (0.2 * max(x.shape) ** 0.5 * x).reshape(matrix.shape)


class Muon(torch.optim.Optimizer):
    def __init__(self, groups: Any, settings: Any) -> None:
        super().__init__(groups, {"lr": settings.lr, "weight_decay": 0.0})
        self.betas = settings.adam_beta1, settings.adam_beta2

    @staticmethod
    def whole(name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a parameter is a matrix of a layer."""
        return len(shape) > 1 and name.startswith("layers.")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            whole, (beta1, beta2) = group["whole"], self.betas
            for p in group["params"]:  # a flat part of the fp32 weights
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                if whole is not None:
                    momentum.lerp_(p.grad, 1 - beta1)
                    update = whole(torch.lerp(p.grad, momentum, beta1), orthogonalise)
                else:
                    update = torch.sign(torch.lerp(p.grad, momentum, beta1))
                    momentum.lerp_(p.grad, 1 - beta2)
                p.add_(update, alpha=-group["lr"])


PIECES = {"optimizer": Muon}
