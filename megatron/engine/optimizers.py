"""Optimizers for --optimizer: torch's AdamW and SGD, Lion, AdEMAMix and Muon.

AdamW with our kernel, or with bf16 moments, is in megatron/kernels/ops/optimizer.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, cycle, islice, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.engine.buckets import muon_scale
from megatron.engine.optimizer_state import MASTER
from megatron.kernels.ops.optimizer import Untraced

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.config.training import OptimizerConfig


def untraced_step(optimizer: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the method `step` of a torch optimizer without its decorator, which calls Dynamo."""
    step: Callable[..., Any] = inspect.unwrap(optimizer.step)
    return torch.no_grad()(step)


class SGD(Untraced, torch.optim.SGD):
    """torch.optim.SGD whose step does not call Dynamo."""

    step = untraced_step(torch.optim.SGD)


class AdamW(Untraced, torch.optim.AdamW):
    """torch.optim.AdamW whose step does not call Dynamo."""

    step = untraced_step(torch.optim.AdamW)


class SkipsOnDevice:
    """Optimizer whose step can be skipped by tensors on the device: the host need not wait.

    The engine sets the attributes, as torch.amp.GradScaler does for torch's fused optimizers.

    grad_scale  divides all gradients
    found_inf   1 if the step is to change nothing, else 0; fp32 like grad_scale
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def gradient(self, p: Tensor) -> Tensor:
        """Return the gradient, divided in place by `grad_scale`; zeros in a skipped step."""
        assert p.grad is not None, "every parameter of a step has a gradient"
        if self.grad_scale is not None and self.found_inf is not None:
            p.grad.div_(self.grad_scale).masked_fill_(self.found_inf > 0, 0.0)
        return p.grad

    def step_counts(self, p: Tensor) -> Tensor:
        """Return 1, or 0 in a skipped step: a factor on changes to weights and state."""
        none = torch.zeros((), device=p.device)
        return 1.0 - (none if self.found_inf is None else self.found_inf)

    def move(self, p: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        """Subtract the weight decay and the update, both times the learning rate."""
        lr = group["lr"] * self.step_counts(p).double()  # rounded last, like a number on the host
        p.mul_(1.0 - lr * group["weight_decay"]).addcmul_(update, lr.float(), value=-1.0)


# -- Lion ------------------------------------------------------------------------------------------


class Lion(Untraced, SkipsOnDevice, torch.optim.Optimizer):
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2), with decoupled weight decay."""

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                gradient = self.gradient(p)
                self.move(p, torch.lerp(gradient, momentum, beta1).sign_(), group)
                momentum.lerp_(gradient, (1.0 - beta2) * self.step_counts(p))


# -- AdEMAMix --------------------------------------------------------------------------------------


class AdEMAMix(SkipsOnDevice, AdamW):
    """AdEMAMix (Pagliardini et al., arXiv 2409.03137, algorithm 1): AdamW with a slow average.

    The slow average of the gradients is not corrected for its start at zero. Its share alpha grows
    linearly, and its half-life ln(1/2) / ln(beta3) from beta1's, over their warm-ups (section 3).
    """

    def __init__(self, groups: Any, settings: OptimizerConfig) -> None:
        self._settings = settings
        betas = settings.adam_beta1, settings.adam_beta2
        super().__init__(groups, lr=settings.lr, betas=betas, eps=settings.adam_eps, fused=True)

    def _slow(self, step: Tensor, beta1: float) -> tuple[Tensor, Tensor]:
        """Return alpha and beta3 of a step, counted from 1, in float64."""
        o = self._settings
        ones = torch.ones_like(step)
        share = (step / (o.ademamix_beta3_warmup or 1)).clamp(max=1.0)
        inverse = (1.0 - share) / (beta1 * ones).log() + share / (o.ademamix_beta3 * ones).log()
        beta3 = inverse.reciprocal().exp().clamp(max=o.ademamix_beta3)
        return o.ademamix_alpha * (step / (o.ademamix_alpha_warmup or 1)).clamp(max=1.0), beta3

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                gradient = self.gradient(p)
                counts = self.step_counts(p)
                state["step"] += counts
                step = state["step"].to(p.device).double().clamp(min=1.0)  # 0 if all were skipped
                alpha, beta3 = self._slow(step, beta1)
                fast = state["exp_avg"].lerp_(gradient, (1.0 - beta1) * counts)
                slow = state["exp_avg_slow"].lerp_(gradient, ((1.0 - beta3) * counts).float())
                squares = state["exp_avg_sq"].lerp_(gradient.square_(), (1.0 - beta2) * counts)
                root = squares.div((1.0 - beta2**step).float()).sqrt_().add_(group["eps"])
                update = fast.div((1.0 - beta1**step).float()).add_(slow * alpha.float())
                self.move(p, update.div_(root), group)


# -- Muon ------------------------------------------------------------------------------------------

Coefficients = tuple[float, float, float]
QUINTIC: tuple[Coefficients, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Cesista et al. 2025, leloykun.github.io/ponder/muon-opt-coeffs."""
POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
)
"""Amsel et al., arXiv 2505.16932, rounded to four decimal places."""
SIMPLE = (3.4445, -4.7750, 2.0315)
"""Jordan et al. 2024, kellerjordan.github.io/posts/muon; also used by torch.optim.Muon."""


def coefficients(kind: str, steps: int) -> list[Coefficients]:
    """Return the coefficients of each step for a value of --muon-coefficient-type."""
    series = {
        "simple": repeat(SIMPLE),
        "quintic": cycle(QUINTIC),
        "polar_express": chain(POLAR_EXPRESS, repeat(POLAR_EXPRESS[-1])),
    }
    return list(islice(series[kind], steps))


def newton_schulz(x: Tensor, steps: Sequence[Coefficients]) -> Tensor:
    """Return an approximation of U V^T of x = U S V^T [rows, columns], computed in the dtype of x.

    Each step maps the singular values s, which are initially at most 1, to a s + b s^3 + c s^5.
    """
    norm = torch.linalg.matrix_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    x = x / norm.clamp(min=1e-7).to(x.dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for a, b, c in steps:
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(SkipsOnDevice, AdamW):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for groups of full matrices.

    Other groups use torch's fused AdamW.

    near  see HostState
    """

    def __init__(self, groups: Any, config: Config) -> None:
        settings = config.optimizer
        self._model = config.model
        self._settings = settings
        betas = settings.adam_beta1, settings.adam_beta2
        super().__init__(groups, lr=settings.lr, betas=betas, eps=settings.adam_eps, fused=True)
        self.near: Callable[..., Iterable[dict[str, Any]]] = lambda groups, *names: groups
        self._steps = coefficients(settings.muon_coefficient_type, settings.muon_num_ns_steps)
        self._dtype = torch.bfloat16
        if settings.muon_fp32_matmul_prec == "high":
            self._dtype = torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        every = self.param_groups
        matrices = [group for group in every if group["full_parameters"]]
        self.param_groups = [group for group in every if not group["full_parameters"]]
        try:
            AdamW.step(self)
        finally:
            self.param_groups = every
        beta = self._settings.muon_momentum
        updates = list[Tensor]()
        for group in self.near(matrices, "momentum_buffer"):
            (p,) = group["params"]  # this rank's range of a bucket
            momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            gradient = self.gradient(p)
            counts = self.step_counts(p)
            momentum.lerp_(gradient, (1.0 - beta) * counts)
            updates.append(
                gradient.lerp_(momentum, beta)
                if self._settings.muon_nesterov
                else gradient.copy_(momentum)
            )
            if "step" in self.state[p]:
                self.state[p]["step"] += counts
        if matrices:
            matrices[0]["full_parameters"](updates, self.orthogonalized, self._dtype)
        for group, update in zip(self.near(matrices, MASTER), updates, strict=True):
            self.move(group["params"][0], update, group)

    def orthogonalized(self, name: str, x: Tensor) -> Tensor:
        """Return the update of a parameter [.., rows, columns], which may be several matrices.

        The matrices for queries (with their gates), keys and values are fused as
        [groups (queries, key, value) d, columns]. A gated unit stores its gate and value matrices
        as [2, rows, columns].
        """
        if self._settings.muon_split_qkv and name.endswith("query_key_value.weight"):
            groups = self._model.num_key_value_heads
            d = self._model.kv_channels
            grouped = x.view(groups, -1, x.shape[-1])
            matrices = grouped.split((grouped.shape[1] - 2 * d, d, d), dim=1)
            updates = [self._update(matrix.flatten(0, 1)).view_as(matrix) for matrix in matrices]
            return torch.cat(updates, dim=1).view_as(x)
        if x.dim() == 2:
            return self._update(x)
        return torch.stack([self._update(each) for each in x.flatten(0, -3)]).view_as(x)

    def _update(self, x: Tensor) -> Tensor:
        scale = muon_scale(self._settings.muon_scale_mode, x.shape)
        factor = self._settings.muon_extra_scale_factor * scale
        return newton_schulz(x, self._steps) * factor
