"""Lion, Muon and QK-clip as in their papers, on parameters that are not sharded."""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron.config import Config
from megatron.parallel.sharding import sharding_of

A = 3.4445
B = -4.7750
C = 2.0315
"""Coefficients of --muon-coefficient-type simple."""


def orthogonal(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return a matrix after Newton-Schulz steps in float64, computed by its singular values."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.square().sum().sqrt().clamp(min=1e-7)
    for _ in range(steps):
        s = A * s + B * s**3 + C * s**5
    return (u * s) @ v


class _Plain(torch.optim.Optimizer):
    """Optimizer that steps along `direction`, with decoupled weight decay, in float64."""

    def __init__(self, groups: Any, config: Config) -> None:
        self.settings = config.optimizer
        self.model = config.model
        super().__init__(groups, {"lr": self.settings.lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault(
                    "kept", torch.zeros_like(p, dtype=torch.float64)
                )
                update = self.direction(p, momentum, p.grad.double())
                if update is not None:
                    decayed = p.double() * (1 - group["lr"] * group["weight_decay"])
                    p.copy_(decayed - group["lr"] * update)

    def direction(self, p: Any, momentum: torch.Tensor, g: torch.Tensor) -> torch.Tensor | None:
        raise NotImplementedError


class PlainLion(_Plain):
    def direction(self, p: Any, momentum: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        beta1 = self.settings.lion_beta1
        beta2 = self.settings.lion_beta2
        update = torch.sign(beta1 * momentum + (1 - beta1) * g)
        momentum.copy_(beta2 * momentum + (1 - beta2) * g)
        return update


class PlainMuon(_Plain):
    """Muon for the matrices of layers; torch's AdamW for other parameters."""

    def __init__(self, groups: Any, config: Config) -> None:
        super().__init__(groups, config)
        o = config.optimizer
        adam_groups = [g for g in groups if not self.is_matrix(g["params"][0])]
        betas = (o.adam_beta1, o.adam_beta2)
        self.adam = torch.optim.AdamW(
            adam_groups, lr=o.lr, betas=betas, eps=o.adam_eps, foreach=False
        )

    @staticmethod
    def is_matrix(p: Any) -> bool:
        """Return whether `p` is one of the matrices of a layer."""
        words = sharding_of(p).name.split(".")
        layers = "query_key_value dense dense_h_to_4h dense_4h_to_h in_proj out_proj".split()
        return words[-1] == "weight" and words[-2] in layers

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        self.adam.step()

    def direction(self, p: Any, momentum: torch.Tensor, g: torch.Tensor) -> torch.Tensor | None:
        if not self.is_matrix(p):
            return None
        beta = self.settings.muon_momentum
        momentum.copy_(beta * momentum + (1 - beta) * g)
        x = beta * momentum + (1 - beta) * g if self.settings.muon_nesterov else momentum
        update = torch.empty_like(x)
        for rows in self.rows_of(sharding_of(p).name, x.shape):
            block = x.flatten(0, -2)[rows]
            size = max(block.shape) ** 0.5 * self.settings.muon_extra_scale_factor
            update.flatten(0, -2)[rows] = size * orthogonal(block)
        return update

    def rows_of(self, name: str, shape: tuple[int, ...]) -> list[list[int]]:
        """Return the rows of each matrix in a parameter [.., rows, columns]."""
        m = self.model
        count = math.prod(shape[:-1])
        if "query_key_value" not in name:
            return [list(range(i, i + shape[-2])) for i in range(0, count, shape[-2])]
        d = m.kv_channels
        queries = m.num_attention_heads // m.num_key_value_heads
        queries *= 2 if m.attention_output_gate else 1
        kinds: list[list[int]] = [[], [], []]
        for row in range(count):
            head = row // d % (queries + 2)
            kinds[max(0, head - queries + 1)].append(row)
        return kinds


class PlainAdEMAMix(_Plain):
    """Algorithm 1 of arXiv 2409.03137 with the schedules of its section 3; eps is the group's."""

    def __init__(self, groups: Any, config: Config) -> None:
        super().__init__(groups, config)
        self.eps = {g["params"][0]: g.get("eps", config.optimizer.adam_eps) for g in groups}

    def direction(self, p: Any, momentum: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        o = self.settings
        state = self.state[p]
        zeros = torch.zeros_like(g)
        t = state["t"] = state.get("t", 0) + 1
        end = o.ademamix_beta3_warmup or 1
        log1, log3 = math.log(o.adam_beta1), math.log(o.ademamix_beta3)
        power = log1 * log3 / ((1 - t / end) * log3 + t / end * log1)
        beta3 = min(math.exp(power), o.ademamix_beta3) if t <= end else o.ademamix_beta3
        alpha = o.ademamix_alpha * min(1.0, t / (o.ademamix_alpha_warmup or 1))
        momentum.copy_(o.adam_beta1 * momentum + (1 - o.adam_beta1) * g)
        slow = state["slow"] = beta3 * state.get("slow", zeros) + (1 - beta3) * g
        squares = state["squares"] = (
            o.adam_beta2 * state.get("squares", zeros) + (1 - o.adam_beta2) * g.square()
        )
        root = (squares / (1 - o.adam_beta2**t)).sqrt() + self.eps[p]
        return (momentum / (1 - o.adam_beta1**t) + alpha * slow) / root


PLAIN = {"lion": PlainLion, "muon": PlainMuon, "ademamix": PlainAdEMAMix}


@torch.no_grad()
def clip_plainly(model: torch.nn.Module, settings: Any) -> None:
    """Apply QK-clip to a model that is not sharded, head by head."""
    clipped = 0
    for layer in [m for m in model.modules() if hasattr(m, "query_key_value")]:
        most = settings.qk_clip_threshold
        eta = [most / max(most, float(s)) for s in layer.core.largest]
        clipped += sum(e < 1.0 for e in eta)
        d = layer.head_dim
        queries = layer.queries
        for p in (layer.query_key_value.weight, layer.query_key_value.bias):
            if p is None:
                continue
            for group in range(layer.groups):
                of_group = eta[group * queries : (group + 1) * queries]
                of_key = min(of_group) ** (1.0 - settings.qk_clip_alpha)
                gate = [1.0] if layer.gated else []
                factors = [f for e in of_group for f in (e / of_key, *gate)] + [of_key, 1.0]
                for head, factor in enumerate(factors, group * len(factors)):
                    p[head * d : (head + 1) * d] *= factor
        layer.core.largest.zero_()
    assert clipped, "no head was clipped: use a lower threshold"
