"""The torch optimizer that runs on this rank's master weights, and its parameter groups."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from megatron.engine.optimizer_state import OptimizerState
from megatron.errors import ConfigError
from megatron.kernels.choose import fused_adam
from megatron.kernels.ops.optimizer import adamw_
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology

WantsWhole = Callable[[str, tuple[int, ...]], bool]


def unique_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Trainable parameters in order; a weight that two layers share appears once."""
    return [p for p in module.parameters() if p.requires_grad]


def parameter_groups(
    parameters: Iterable[torch.nn.Parameter],
    weight_decay: float,
    bucket_elements: int | None = None,
    whole: WantsWhole | None = None,
) -> list[dict[str, Any]]:
    """The parameters with weight decay, then those without, cut into buckets; an empty group is
    left out.

    Each kind is in the reverse of the order given, which is about the order in which a backward
    pass makes gradients. A group has at most `bucket_elements` unless one parameter has more; None:
    all of a kind are one group. The tied embedding is a group of its own, so that the first and the
    last stage divide it alike over their data-parallel ranks. So are parameters that the optimizer
    wants `whole`, by global name and shape.

    Each group has a key `decays`, by which the Engine finds the ones whose weight decay follows the
    schedule, and a key `whole`, True for those of whole parameters.
    """
    kinds: dict[tuple[bool, bool, bool], list[torch.nn.Parameter]] = {}
    for p in list(parameters)[::-1]:
        s = sharding_of(p)
        wanted = whole is not None and bool(whole(s.name, s.global_shape))
        kinds.setdefault((not s.decay, wanted, s.tied), []).append(p)
    groups = []
    for (spared, wanted, tied), kind in sorted(kinds.items(), key=lambda item: item[0]):
        for bucket in [kind] if tied else _cut(kind, bucket_elements):
            decay = 0.0 if spared else weight_decay
            groups.append(
                {"params": bucket, "weight_decay": decay, "decays": not spared, "whole": wanted}
            )
    return groups


def _cut(
    parameters: list[torch.nn.Parameter], elements: int | None
) -> list[list[torch.nn.Parameter]]:
    buckets: list[list[torch.nn.Parameter]] = [[]]
    count = 0
    for p in parameters:
        if elements is not None and count and count + p.numel() > elements:
            buckets.append([])
            count = 0
        buckets[-1].append(p)
        count += p.numel()
    return buckets


def check_groups(groups: list[dict[str, Any]], topology: Topology) -> None:
    """Raise ConfigError, on every rank, unless all model-parallel ranks have the same kinds of
    parameter groups.
    """
    mine = tuple(sorted({bool(g["decays"]) for g in groups}, reverse=True))
    found: list[Any] = [mine]
    if topology.model.size > 1:
        found = [None] * topology.model.size
        dist.all_gather_object(found, mine, group=topology.model.handle)
    if len(set(found)) > 1 or not mine:
        names = {True: "with weight decay", False: "without"}
        listed = "; ".join(
            f"rank {rank}: {', '.join(names[d] for d in kinds) or 'none'}"
            for rank, kinds in zip(topology.model.ranks, found, strict=True)
        )
        raise ConfigError(
            "every pipeline stage and tensor rank needs parameters of the same kinds, but they "
            f"have: {listed}. Use fewer pipeline stages or another --pipeline-layout, so that no "
            "stage is without layers"
        )


def build_optimizer(
    groups: list[dict[str, Any]],
    settings: Any,
    device: torch.device,
    implementation: str = "auto",
    fused: bool = False,
) -> torch.optim.Optimizer:
    """AdamW or SGD, from `config.optimizer`.

    implementation  config.kernels.optimizer_implementation; "apex": apex's AdamW, where it runs on
                    this device
    fused           whether AdamW goes through our kernel (megatron.kernels.choose); else it is
                    torch's fused one
    """
    if settings.optimizer == "sgd":
        return SGD(groups, lr=settings.lr, momentum=settings.sgd_momentum, fused=True)
    betas = (settings.adam_beta1, settings.adam_beta2)
    if implementation == "apex" and fused_adam(device.type).usable:
        apex_adam: Any = importlib.import_module("apex.optimizers").FusedAdam
        apex = apex_adam(
            groups, lr=settings.lr, betas=betas, eps=settings.adam_eps, adam_w_mode=True
        )
        for group in apex.param_groups:
            group["step"] = 0
        result: torch.optim.Optimizer = apex
        return result
    if fused:
        return FusedAdamW(groups, lr=settings.lr, betas=betas, eps=settings.adam_eps)
    return AdamW(groups, lr=settings.lr, betas=betas, eps=settings.adam_eps, fused=True)


def create_state(optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Make the optimizer's state now, as zeros.

    torch makes it at the first step; a fresh engine must have it before to load a checkpoint, and
    memory that does not suffice is better found out at the start.
    """
    # fused, so that its steps are counted on the device
    torchs = isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        for p in group["params"]:
            made = optimizer.state[p]
            for name in state.tensors:
                if made.get(name) is None:
                    made[name] = torch.zeros_like(p)
            if "step" not in made and (torchs or state.step is not None):
                on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
                step = torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")
                made["step"] = step if torchs or state.step is torch.Tensor else 0


def get_step(optimizer: torch.optim.Optimizer) -> int:
    """Steps taken, which a bias correction counts; 0 for an optimizer that counts none."""
    group = optimizer.param_groups[0]
    step = optimizer.state[group["params"][0]].get("step", group.get("step", 0))
    return int(step)


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Continue the bias correction at `step`."""
    for group in optimizer.param_groups:
        if "step" in group:  # FusedAdamW and apex count per group
            group["step"] = step
        for p in group["params"]:
            counted = optimizer.state[p].get("step")
            if isinstance(counted, torch.Tensor):
                counted.fill_(float(step))
            elif counted is not None:
                optimizer.state[p]["step"] = step


class Untraced:
    """A base class before torch's optimizer: its methods without the marks for torch's compiler.

    torch marks methods of its optimizers as not to be traced, and imports the compiler when they
    are first called, which takes half as long as importing torch. Nothing here is traced, so the
    methods are used without the marks.
    """

    add_param_group: Callable[..., None] = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad: Callable[..., None] = inspect.unwrap(torch.optim.Optimizer.zero_grad)


def untraced_step(optimizer: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The method `step` of one of torch's optimizers; like that one it records no gradients."""
    result: Callable[..., Any] = torch.no_grad()(inspect.unwrap(optimizer.step))
    return result


class AdamW(Untraced, torch.optim.AdamW):
    """torch.optim.AdamW."""

    step = untraced_step(torch.optim.AdamW)


class SGD(Untraced, torch.optim.SGD):
    """torch.optim.SGD."""

    step = untraced_step(torch.optim.SGD)


class FusedAdamW(Untraced, torch.optim.Optimizer):
    """torch.optim.AdamW through megatron.kernels.ops.optimizer: fp32 weights, gradients fp32 or 16
    bit.

    params  as torch's optimizers take them; lr, betas, eps, weight_decay are numbers

    Each group counts its steps in `group["step"]`, on the host, also for a parameter without
    gradient, which is left out. State: `exp_avg` and `exp_avg_sq`, fp32.

    copies          {parameter: 16-bit tensor of its shape}: gets the new weights in the same pass
    gradients       {parameter: gradient} in place of .grad, which has the parameter's format
    gradient_scale  factor of all gradients, e.g. of clipping: one fp32 number on their device,
                    which the host need not know. Where it is not finite the step changes nothing,
                    and the caller must call `uncount`
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0}
        )
        self.copies: dict[torch.Tensor, torch.Tensor] = {}
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.gradient_scale: float | torch.Tensor = 1.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            group["step"] += 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                gradient = self.gradients.get(p, p.grad)
                if gradient is None:
                    continue
                state = self.state[p]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(p)
                adamw_(
                    [p],
                    [gradient],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [self.copies[p]] if p in self.copies else [],
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=group["step"],
                    gradient_scale=self.gradient_scale,
                )

    def uncount(self) -> None:
        """Take the last step, which changed nothing, out of the bias correction."""
        for group in self.param_groups:
            group["step"] -= 1
