"""AdamW in one pass over all weights, and DeepSpeed's bf16 step with what surrounds it in the same pass."""
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron.errors import KernelError
from megatron.kernels.ops.optimizer import adamw_, scale_and_norm_


class FusedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW through megatron.kernels.ops.optimizer: fp32 weights, gradients fp32 or 16 bit.

    params  as torch's optimizers take them; lr, betas, eps, weight_decay are numbers

    Each group counts its steps in `group["step"]`, on the host, also for a parameter without gradient, which is left
    out. State: `exp_avg` and `exp_avg_sq`, fp32. A state_dict of torch.optim.AdamW can be loaded.

    copies          {parameter: 16-bit tensor of its shape}: gets the new weights in the same pass
    gradient_scale  asked once per step for the factor of all gradients, e.g. of clipping; None: 1
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})
        self.copies: dict[torch.Tensor, torch.Tensor] = {}
        self.gradient_scale: Callable[[], float] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # What connects it with other objects is not in a copy.
        self.__dict__.setdefault("copies", {})
        self.__dict__.setdefault("gradient_scale", None)
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
        scale = 1.0 if self.gradient_scale is None else self.gradient_scale()
        for group in self.param_groups:
            group["step"] += 1
            for parameters in self._alike(group["params"]):
                self._update(group, parameters, scale)
        return loss

    def _alike(self, parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Those with a gradient, together as one launch can take them: by device and types."""
        kinds: dict[Any, list[torch.Tensor]] = {}
        for p in parameters:
            if p.grad is not None:
                copy = self.copies.get(p)
                kinds.setdefault((p.device, p.grad.dtype, None if copy is None else copy.dtype), []).append(p)
        return list(kinds.values())

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor], scale: float) -> None:
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        adamw_(
            parameters, [p.grad for p in parameters if p.grad is not None], [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states], [self.copies[p] for p in parameters if p in self.copies], lr=group["lr"],
            beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"], step=group["step"],
            gradient_scale=scale,
        )  # fmt: skip


class OnePassStep:
    """Makes DeepSpeed's BF16_Optimizer clip and write the bf16 weights within the pass of FusedAdamW.

    outer  DeepSpeed's optimizer
    inner  ours, on whose parameters it calls step()

    DeepSpeed reads the gradients for their norm, multiplies all of them by the clip factor (8 bytes per weight of this
    rank), updates its partition, and copies that to bf16 (6 bytes per weight of the partition). Here the factor goes
    into the update, which writes the bf16 weights itself. The norm is one kernel for all gradients. How it is reduced
    over model-parallel ranks, and when a step is skipped, stays with DeepSpeed.
    """

    def __init__(self, outer: Any, inner: FusedAdamW) -> None:
        self._outer = outer
        self._clip = float(outer.clip_grad)
        self._gradients = outer.get_grads_for_norm
        self._all_gather = importlib.import_module("deepspeed.runtime.utils").all_gather_dp_groups
        ranks = [torch.distributed.get_rank(group) for group in outer.real_dp_process_group]
        partitions = [parts[rank] for parts, rank in zip(outer.bf16_partitioned_groups, ranks, strict=True)]
        inner.copies = dict(zip(outer.fp32_groups_flat_partition, partitions, strict=True))
        inner.gradient_scale = self._clip_factor
        outer.clip_grad = 0.0
        outer.get_grads_for_norm = self._norm
        outer.update_lp_params = self._share

    def _norm(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """What DeepSpeed takes the norm of: here one number, this rank's part of it."""
        gradients, of_experts = self._gradients()
        total = scale_and_norm_(gradients) if gradients else torch.zeros((), device=self._device())
        return [total.sqrt()], of_experts

    def _device(self) -> torch.device:
        return self._outer.fp32_groups_flat_partition[0].device

    def _clip_factor(self) -> float:
        """As torch.nn.utils.clip_grad_norm_ has it; DeepSpeed has stored the norm before it calls the update."""
        norm = float(self._outer._global_grad_norm)
        return min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0.0 else 1.0

    def _share(self) -> None:
        """Give this rank's new bf16 weights to the other data-parallel ranks, and get theirs."""
        outer = self._outer
        self._all_gather(
            groups_flat=outer.bf16_groups_flat, partitioned_param_groups=outer.bf16_partitioned_groups,
            dp_process_group=outer.real_dp_process_group, start_alignment_factor=outer.nccl_start_alignment_factor,
            allgather_bucket_size=outer.allgather_bucket_size,
        )  # fmt: skip
