"""The optimizer's side of training: DeepSpeed's ZeRO-1 around this rank's pipeline chunks.

The executor calls the chunks directly and `after_backward()` after each backward pass; `step()` then reduces the
gradients, clips, updates and hands new weights to all ranks. DeepSpeed's own forward and backward are never called:
they divide the gradients that enter each pipeline stage by the number of micro-batches.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron.engine.adamw import FusedAdamW, OnePassStep
from megatron.engine.deepspeed_json import deepspeed_json
from megatron.engine.deepspeed_setup import ensure_process_group, import_deepspeed, start_engine
from megatron.engine.fragments import Fragment, is_copy, mark_for_deepspeed
from megatron.engine.gradients import Gradients
from megatron.engine.loss_scale import ScaleForDeepSpeed, loss_scale_of
from megatron.engine.mpu import ModelParallelUnit
from megatron.engine.optimizer import (
    MOMENTS,
    build_optimizer,
    check_groups,
    create_moments,
    get_step,
    parameter_groups,
    set_step,
    unique_parameters,
)
from megatron.kernels.choose import choose_fusions
from megatron.parallel.collectives import all_reduce
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank.

    grad_norm    global L2 norm of the gradient before clipping, without the loss scale; None when skipped
    skipped      True when the gradient was not finite: weights and optimizer are unchanged
    loss_scale   the scale with which this step's gradients were computed
    num_zeros    elements of the gradient that are exactly 0, when asked for; None when skipped
    params_norm  global L2 norm of the weights after the step, when asked for
    """

    grad_norm: float | None
    skipped: bool
    loss_scale: float
    num_zeros: float | None = None
    params_norm: float | None = None


class Engine:
    """ZeRO stage 1 or 0, in fp32, bf16 or fp16, with fp32 gradients and master weights.

    config    reads .batch, .engine, .optimizer, .precision and, where they are there, .logging and .kernels
    chunks    this rank's model, with fp32 parameters that carry a Sharding each; they become fp16 or bf16 here

    Stage 1 partitions the optimizer over the data-parallel ranks. Stage 0 is the same with partitions of one rank; the
    gradients are then averaged over the data-parallel ranks here, in buckets, before DeepSpeed sees them.
    The gradient is the mean over data-parallel ranks of what their backward passes sum up: the loss must be divided by
    the number of micro-batches of a rank and multiplied by `loss_scale`.

    Raises ConfigError for a missing DeepSpeed or for ranks without parameters.
    """

    def __init__(self, config: Any, topology: Topology, chunks: torch.nn.Module) -> None:
        self.topology = topology
        self.chunks = chunks
        self.skipped_steps = 0
        self._dtype = getattr(torch, config.precision.dtype_name)
        self._stage = int(config.engine.zero_stage)
        self._moments = MOMENTS[config.optimizer.optimizer]
        logging = getattr(config, "logging", None)
        self.log_num_zeros = bool(getattr(logging, "log_num_zeros_in_grad", False))
        self.log_params_norm = bool(getattr(logging, "log_params_norm", False))

        parameters = unique_parameters(chunks)
        for p in parameters:
            assert p.dtype == torch.float32, f"{sharding_of(p).name} is {p.dtype}: chunks arrive with fp32 parameters"
        mark_for_deepspeed(parameters, topology)
        groups = parameter_groups(parameters, config.optimizer.weight_decay)
        ensure_process_group(topology.device)
        check_groups(groups, topology)
        ordered = [p for g in groups for p in g["params"]]

        exact = self._exact_weights(ordered)
        deepspeed = import_deepspeed(topology.device)
        mpu = ModelParallelUnit(topology, self._stage)
        self._basic = self._build_optimizer(config, groups)
        settings = deepspeed_json(config, mpu.partition.size, sum(p.numel() for p in ordered))
        self._engine = start_engine(
            deepspeed, topology, model=chunks, optimizer=self._basic, config=settings, mpu=mpu
        )
        self._optimizer = self._engine.optimizer
        self._update_working_weights = self._optimizer.update_lp_params
        if isinstance(self._basic, FusedAdamW) and self._dtype == torch.bfloat16:
            OnePassStep(self._optimizer, self._basic)
        self._bucket = max(1, int(config.engine.zero_reduce_bucket_size))
        self._take_over(ordered)
        self._gradients = Gradients(ordered, self._optimizer, self._dtype)
        create_moments(self._basic, self._moments)
        self._scale = loss_scale_of(config.precision)
        if self._dtype == torch.float16:
            self._optimizer.loss_scaler = ScaleForDeepSpeed(self._scale)
        self._fragments = self._find_fragments(ordered)
        for fragment in self._fragments:
            if fragment.parameter in exact:
                whole = exact[fragment.parameter].view(-1)
                fragment.master.copy_(whole.narrow(0, fragment.start, fragment.numel))

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _build_optimizer(self, config: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        kernels, device = getattr(config, "kernels", None), self.topology.device
        if kernels is None:
            return build_optimizer(groups, config.optimizer, device)
        fused = choose_fusions(kernels, device, config.precision.dtype_name).optimizer
        return build_optimizer(groups, config.optimizer, device, kernels.optimizer_implementation, fused)

    def _exact_weights(self, parameters: list[torch.nn.Parameter]) -> dict[torch.nn.Parameter, torch.Tensor]:
        """The fp32 weights, which DeepSpeed would round before it makes master weights of them.

        They are kept in host memory: the device has better use for its own.
        """
        if self._dtype == torch.float32:
            return {}
        return {p: p.detach().cpu().contiguous() for p in parameters}

    def _take_over(self, parameters: list[torch.nn.Parameter]) -> None:
        """Leave to DeepSpeed only what `step` calls for."""
        # Hooks on parameters guess when a backward pass is over; hand-driven passes of a pipeline break the guess.
        for hook in getattr(self._optimizer, "_grad_acc_hooks", ()):
            hook.remove()
        for p in parameters:
            if self._dtype == torch.float16 and not hasattr(p, "grad_accum"):
                p.grad_accum = None  # type: ignore[attr-defined]
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.enable_backward_allreduce = False

    def _find_fragments(self, parameters: list[torch.nn.Parameter]) -> list[Fragment]:
        found = []
        for p in parameters:
            mapping = p._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                continue  # another data-parallel rank holds all of it
            local, held = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = self._basic.param_groups[mapping.param_group_index]["params"][0]
            views = {"master": flat.detach()}
            views.update({name: self._basic.state[flat][name] for name in self._moments})
            views = {name: t.narrow(0, held.start, held.numel) for name, t in views.items()}
            master = views.pop("master")
            found.append(Fragment(p, sharding_of(p), int(local.start), int(local.numel), master, views))
        return found

    # -- training --------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """By this the loss is multiplied before the backward pass; 1 but in fp16."""
        return self._scale.scale

    def after_backward(self) -> None:
        """Take the gradients of one backward pass (or of one weight-gradient pass) into the fp32 sums."""
        self._gradients.accumulate()

    def gradient(self, p: torch.nn.Parameter) -> torch.Tensor:
        """The fp32 gradient sum of a parameter since the last step, loss scale included, before any reduction."""
        return self._gradients.of(p)

    def step(self, lr: float, weight_decay: float | None = None) -> StepResult:
        """Reduce the gradients over all ranks, clip them, update the weights and clear the gradients.

        A gradient that is not finite on any rank skips the step on all. `weight_decay`, where given, is the one of the
        decaying parameters from now on.
        """
        for group in self._basic.param_groups:
            group["lr"] = lr
            if weight_decay is not None and group["decays"]:
                group["weight_decay"] = weight_decay
        scale = self._scale.scale
        self._reduce()
        num_zeros = self._count_zeros() if self.log_num_zeros else None
        self._engine.step()
        skipped = bool(self._optimizer.overflow)
        self._scale.update(skipped)
        self.skipped_steps += skipped
        return StepResult(
            grad_norm=None if skipped else float(self._engine.get_global_grad_norm()),
            skipped=skipped,
            loss_scale=scale,
            num_zeros=None if skipped else num_zeros,
            params_norm=self._params_norm() if self.log_params_norm else None,
        )

    def clear_gradients(self) -> None:
        """Forget the gradients accumulated since the last step."""
        for p in self._gradients.parameters:
            p.grad = None
        self._optimizer.zero_grad()

    def _reduce(self) -> None:
        gradients, topology = self._gradients, self.topology
        gradients.accumulate()
        gradients.all()  # a parameter that got no gradient on this rank takes part in the collectives all the same
        gradients.reduce_model_parallel(topology)
        if self._dtype != torch.float16:  # in fp16 DeepSpeed looks for overflow in every gradient
            gradients.spread_invalid(topology)
        if self._dtype == torch.bfloat16:
            # In place: DeepSpeed would copy the whole flat buffer. Every gradient counts as present, also a zero one.
            gradients.average(topology.data, self._bucket)
            have = self._optimizer.fp32_groups_has_gradients
            have[:] = [[True] * len(group) for group in self._optimizer.bf16_groups]
            return
        if self._stage == 0:
            gradients.average(topology.data, self._bucket)
        self._optimizer.setup_buckets()
        self._engine.allreduce_gradients()

    # -- figures ---------------------------------------------------------------------------------------------------

    def _partition_gradients(self) -> list[tuple[Fragment, torch.Tensor]]:
        """This rank's fragments and the reduced gradient of each  # [numel], between reduction and step."""
        if self._dtype == torch.bfloat16:
            return [
                (f, self._gradients.of(f.parameter).view(-1).narrow(0, f.start, f.numel)) for f in self._fragments
            ]
        lines: dict[int, torch.Tensor] = {}
        found = []
        for f in self._fragments:
            mapping = f.parameter._hp_mapping  # type: ignore[attr-defined]
            index = mapping.param_group_index
            if index not in lines:
                lines[index] = torch.cat([t.reshape(-1) for t in self._optimizer.averaged_gradients[index]])
            found.append((f, lines[index].narrow(0, mapping.hp_fragment_address.start, f.numel)))
        return found

    def _over_model(self, value: torch.Tensor) -> float:
        """Sum a float64 scalar over everything that together holds the model once."""
        if self._stage == 1:
            all_reduce(value, self.topology.data)
        return float(all_reduce(value, self.topology.model))

    def _sum(self, terms: list[torch.Tensor]) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.float64, device=self.topology.device)
        return torch.stack([zero, *(t.to(zero) for t in terms)]).sum()

    @torch.no_grad()
    def _count_zeros(self) -> float:
        terms = [
            view.numel() - view.count_nonzero()
            for f, gradient in self._partition_gradients()
            if not is_copy(f.parameter, self.topology)
            for _, view in f.real(gradient)
        ]
        return self._over_model(self._sum(terms))

    @torch.no_grad()
    def _params_norm(self) -> float:
        terms = [
            torch.linalg.vector_norm(view, dtype=torch.float64).square()
            for f in self._fragments
            if not is_copy(f.parameter, self.topology)
            for _, view in f.real(f.master)
        ]
        return math.sqrt(self._over_model(self._sum(terms)))

    # -- state, for checkpoints ------------------------------------------------------------------------------------

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Names of the optimizer's state tensors, as in every fragment's `moments`."""
        return self._moments

    def fragments(self) -> list[Fragment]:
        """What this rank's optimizer holds, as views: writing to them changes the optimizer."""
        return self._fragments

    @property
    def data_parallel_copies(self) -> int:
        """How many data-parallel ranks hold the same fragments: 1 when ZeRO partitions them."""
        return 1 if self._stage == 1 else self.topology.data.size

    def scalars(self) -> dict[str, Any]:
        """The state that is the same on every rank, JSON-ready."""
        return {
            "optimizer_step": get_step(self._basic),
            "skipped_steps": self.skipped_steps,
            "loss_scale": self._scale.state() if self._dtype == torch.float16 else None,
        }

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Take over what `scalars()` gave, perhaps on another layout or in another precision."""
        set_step(self._basic, int(scalars["optimizer_step"]))
        self.skipped_steps = int(scalars.get("skipped_steps", 0))
        if self._dtype == torch.float16 and scalars.get("loss_scale"):
            self._scale.load_state(scalars["loss_scale"])

    def update_working_weights(self) -> None:
        """Make the weights of forward and backward from the master weights, on all data-parallel ranks."""
        self._update_working_weights()
