"""The optimizer's side of training: DeepSpeed's ZeRO-1 around this rank's pipeline chunks.

The executor calls the chunks directly; gradients add up in flat buckets, and go to the ranks that own them while the
last backward passes run. `step()` waits for that, clips, updates, and begins to hand the new weights to all ranks; the
forward passes that follow wait for theirs. DeepSpeed's own forward and backward are never called: they divide the
gradients that enter each pipeline stage by the number of micro-batches.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron.engine.bucket_size import bucket_elements
from megatron.engine.buckets import Bucket
from megatron.engine.copies import check_copies
from megatron.engine.deepspeed_json import deepspeed_json
from megatron.engine.deepspeed_setup import ensure_process_group, import_deepspeed, start_engine
from megatron.engine.fragments import Fragment, is_copy, mark_for_deepspeed
from megatron.engine.gradients import Gradients
from megatron.engine.loss_scale import ScaleForDeepSpeed, loss_scale_of
from megatron.engine.mpu import ModelParallelUnit
from megatron.engine.optimizer import (
    build_optimizer,
    check_groups,
    create_state,
    get_step,
    parameter_groups,
    set_step,
    unique_parameters,
)
from megatron.engine.optimizer_state import optimizer_state, own_optimizer
from megatron.engine.terms import Terms
from megatron.engine.weights import WeightGather
from megatron.engine.whole import WholeParameters
from megatron.engine.zero import ZeroStep
from megatron.kernels.choose import choose_fusions
from megatron.parallel.collectives import all_reduce
from megatron.parallel.processes import HostCopy, release_free_memory
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, as numbers on the host; the same on every rank.

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
    """ZeRO stage 1 or 0, in fp32, bf16 or fp16, with fp32 master weights and gradient sums in fp32 or bf16.

    config    reads .batch, .engine, .optimizer, .precision and, where they are there, .kernels, .logging, .parallel and
              .pieces
    chunks    this rank's model, with fp32 parameters that carry a Sharding each; they become fp16 or bf16 here

    Stage 1 partitions the optimizer over the data-parallel ranks. Stage 0 is the same with partitions of one rank, and
    gradients that all ranks get the sum of.

    With `config.engine.overlap_param_gather` weights arrive while the next forward passes run. Modules wait for theirs
    (WeightGather), and so does `state_dict()`; whoever reads `chunks.parameters()` in another way after `step()`, or
    after a checkpoint was loaded, calls `wait_for_weights()` before.

    The gradient is the sum over data-parallel ranks of what their backward passes sum up: the loss must be divided by
    the number of micro-batches of all ranks and multiplied by `loss_scale`. So the numbers in which fp16 overflows are
    the same on every layout.

    Raises ConfigError for a missing DeepSpeed or for ranks without parameters.
    """

    def __init__(self, config: Any, topology: Topology, chunks: torch.nn.Module) -> None:
        self.topology = topology
        self.chunks = chunks
        self.skipped_steps = 0
        self._dtype = getattr(torch, config.precision.dtype_name)
        self._stage = int(config.engine.zero_stage)
        self._state = optimizer_state(config)
        self._moments = self._state.tensors
        logging = getattr(config, "logging", None)
        self.log_num_zeros = bool(getattr(logging, "log_num_zeros_in_grad", False))
        self.log_params_norm = bool(getattr(logging, "log_params_norm", False))

        parameters = unique_parameters(chunks)
        for p in parameters:
            assert p.dtype == torch.float32, f"{sharding_of(p).name} is {p.dtype}: chunks arrive with fp32 parameters"
        mark_for_deepspeed(parameters, topology)
        mpu = ModelParallelUnit(topology, self._stage)
        limit = None
        if topology.data.size > 1:
            limit = bucket_elements(int(config.engine.zero_reduce_bucket_size), topology.data.size)
        whole = getattr(own_optimizer(config), "whole", None)
        groups = parameter_groups(parameters, config.optimizer.weight_decay, limit, whole)
        ensure_process_group(topology.device)
        check_groups(groups, topology)
        ordered = [p for g in groups for p in g["params"]]

        exact = self._exact_weights(ordered)
        deepspeed = import_deepspeed(topology.device)
        self._basic = self._build_optimizer(config, groups)
        settings = deepspeed_json(config, mpu.partition.size, sum(p.numel() for p in ordered))
        sums = torch.bfloat16 if config.precision.gradient_bytes == 2 else torch.float32
        self._engine = start_engine(
            deepspeed, topology, sums=sums, model=chunks, optimizer=self._basic, config=settings, mpu=mpu
        )
        self._optimizer = self._engine.optimizer
        self._take_over()
        self._zero = ZeroStep(
            self._optimizer, self._basic, topology, self._dtype, mpu.partition.rank, mpu.partition.size,
            kernels=getattr(getattr(config, "kernels", None), "optimizer_implementation", "torch") != "torch",
        )  # fmt: skip
        for group, bucket in zip(self._basic.param_groups, self._zero.buckets, strict=True):
            group["whole"] = WholeParameters(bucket, topology) if group.get("whole") else None
        self._connect(config, parameters)
        self._make_masters_exact(exact)
        release_free_memory()  # the moments are larger than any hole that the weights of the start have left
        create_state(self._basic, self._state)
        self._scale = loss_scale_of(config.precision)
        self._under_way: tuple[float, HostCopy] | None = None  # a step whose figures nobody has read
        self._result: StepResult | None = None
        if self._dtype == torch.float16:
            self._optimizer.loss_scaler = ScaleForDeepSpeed(self._scale)
        self._fragments = self._find_fragments(ordered)

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _build_optimizer(self, config: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        kernels, device = getattr(config, "kernels", None), self.topology.device
        own = own_optimizer(config)
        if own is not None:
            return own(groups, config.optimizer)
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

    def _make_masters_exact(self, exact: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        """Write the exact weights into the masters, and let go of each: the moments then take its memory."""
        while exact:
            p, weight = exact.popitem()
            mapping = p._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                continue  # another data-parallel rank holds all of it
            local, held = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = self._basic.param_groups[mapping.param_group_index]["params"][0].detach()
            part = weight.view(-1).narrow(0, int(local.start), int(local.numel))
            flat.narrow(0, held.start, held.numel).copy_(part)

    def _take_over(self) -> None:
        """Leave to DeepSpeed only what `step` calls for."""
        # Hooks on parameters guess when a backward pass is over; hand-driven passes of a pipeline break the guess.
        for hook in getattr(self._optimizer, "_grad_acc_hooks", ()):
            hook.remove()
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.enable_backward_allreduce = False

    def _connect(self, config: Any, parameters: list[torch.nn.Parameter]) -> None:
        """Hang the parameters, in the order of the model, on the buckets of the optimizer."""
        place = {p: i for i, p in enumerate(parameters)}
        buckets = self._zero.buckets
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}

        def last_backward(bucket: Bucket) -> int:
            return -min(place[p] for p in bucket.parameters)

        direct = bool(getattr(getattr(config, "kernels", None), "gradient_accumulation_fusion", True))
        sequence_parallel = bool(getattr(getattr(config, "parallel", None), "sequence_parallel", False))
        terms = Terms(self.chunks.children() if self.topology.tensor.size > 1 else (), sequence_parallel)
        self._gradients = Gradients(
            sorted(buckets, key=last_backward), self.topology, terms, bool(config.engine.overlap_grad_reduce), direct
        )
        self._weights = WeightGather(
            sorted(buckets, key=last_backward, reverse=True), self.topology.data, self.chunks.children(),
            bool(config.engine.overlap_param_gather),
        )  # fmt: skip

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
        """Factor of the loss before the backward pass; 1 but in fp16. A dynamic one depends on the last
        step, for which this waits."""
        if self._scale.dynamic:
            self._settle()
        return self._scale.scale

    def begin(self, micro_batches: int) -> None:
        """The backward passes of so many micro-batches follow: what is complete before the last can be reduced.

        Not needed where nothing is to overlap. Raises ConfigError, on every rank, for a second call before `step`.
        """
        self._gradients.begin(micro_batches)

    def after_backward(self) -> None:
        """Take gradients that were put into `.grad` by hand; those of autograd and of our layers are taken already."""
        self._gradients.collect()

    def gradient(self, p: torch.nn.Parameter) -> torch.Tensor:
        """The gradient sum of a parameter since the last step, loss scale included, before any reduction.

        With overlap_grad_reduce the reduction begins during the backward passes: then nothing is promised after them.
        """
        return self._gradients.of(p)

    def step(self, lr: float, weight_decay: float | None = None) -> StepResult:
        """Reduce the gradients over all ranks, clip them, update the weights and clear the gradients.

        A gradient that is not finite on any rank skips the step on all. `weight_decay`, where given, is the one of the
        decaying parameters from now on.
        """
        self.start_step(lr, weight_decay)
        return self.finish_step()

    def start_step(self, lr: float, weight_decay: float | None = None) -> None:
        """`step` without its result, for which the host would wait: the device decides whether the step counts.

        The next passes may follow at once; `finish_step` gives the result any time before the next step. Until a first
        step has counted it is read here: what later ones may overlap depends on it.
        """
        self._settle()
        for group in self._basic.param_groups:
            group["lr"] = lr
            if weight_decay is not None and group["decays"]:
                group["weight_decay"] = weight_decay
        scale = self._scale.scale
        self._gradients.collect()
        self._gradients.reduce()
        self._weights.wait()  # of the step before: some may not have been asked for
        zeros = [self._count_zeros()] if self.log_num_zeros else []
        norm = self._zero.step(self._engine)
        self._gradients.renew()
        self._weights.start()
        squares = [self._params_squares()] if self.log_params_norm else []
        self._under_way = scale, HostCopy(torch.stack([(norm / scale).double(), *zeros, *squares]))
        if not self._gradients.counted:
            self._settle()

    def finish_step(self) -> StepResult:
        """The result of the last step; waits for the device where it was not read yet."""
        self._settle()
        assert self._result is not None, "a step was started"
        return self._result

    def _settle(self) -> None:
        """Read the figures of the last step and count it, where that is not done."""
        if self._under_way is None:
            return
        (scale, figures), self._under_way = self._under_way, None
        norm, *others = figures.read()
        skipped = not math.isfinite(norm)
        if skipped:
            self._zero.not_taken()
        else:
            self._gradients.counts()
        self._scale.update(skipped)
        self.skipped_steps += skipped
        zeros = others.pop(0) if self.log_num_zeros else None
        self._result = StepResult(
            grad_norm=None if skipped else norm,
            skipped=skipped,
            loss_scale=scale,
            num_zeros=None if skipped else zeros,
            params_norm=math.sqrt(others[0]) if others else None,
        )

    def clear_gradients(self) -> None:
        """Forget the gradients accumulated since the last step. To be called on all ranks, as `step` is."""
        for p in self._gradients.parameters:
            p.grad = None
        self._gradients.renew()

    def wait_for_weights(self) -> None:
        """Return when all weights of the last step are here: before they are read other than by a forward pass."""
        self._weights.wait()

    def check_copies(self, when: str = "now") -> None:
        """Compare, bit for bit, the weights that several ranks hold: data-parallel copies, what is replicated over the
        tensor ranks, a tied embedding. The first call also looks at the gradients of the first step.

        All ranks call it, after a step that was not skipped, then now and then: it reads all weights once, and sends a
        few bytes for each parameter and one number over all ranks. Raises TrainingError on every rank where copies
        differ, ConfigError where a gradient that is a term of a sum over the tensor ranks is taken as whole, or the
        other way round. `when` goes into the message.
        """
        self._settle()
        self._weights.wait()
        first, self._gradients.first = self._gradients.first, None
        check_copies(unique_parameters(self.chunks), self.topology, when, first)

    # -- figures ---------------------------------------------------------------------------------------------------

    def _partition_gradients(self) -> list[tuple[Fragment, torch.Tensor]]:
        """This rank's fragments and the reduced gradient of each  # [numel], between reduction and step."""
        found = []
        for f in self._fragments:
            bucket = self._bucket_of[f.parameter]
            start, stop = bucket.held(f.parameter)
            found.append((f, bucket.own(bucket.gradients)[start:stop]))
        return found

    def _over_model(self, terms: list[torch.Tensor]) -> torch.Tensor:
        """Sum scalars, in float64, over everything that together holds the model once; a scalar."""
        zero = torch.zeros((), dtype=torch.float64, device=self.topology.device)
        value = torch.stack([zero, *(t.to(zero) for t in terms)]).sum()
        if self._stage == 1:
            all_reduce(value, self.topology.data)
        return all_reduce(value, self.topology.model)

    @torch.no_grad()
    def _count_zeros(self) -> torch.Tensor:
        terms = [
            view.numel() - view.count_nonzero()
            for f, gradient in self._partition_gradients()
            if not is_copy(f.parameter, self.topology)
            for _, view in f.real(gradient)
        ]
        return self._over_model(terms)

    @torch.no_grad()
    def _params_squares(self) -> torch.Tensor:
        terms = [
            torch.linalg.vector_norm(view, dtype=torch.float64).square()
            for f in self._fragments
            if not is_copy(f.parameter, self.topology)
            for _, view in f.real(f.master)
        ]
        return self._over_model(terms)

    # -- state, for checkpoints ------------------------------------------------------------------------------------

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Names of the optimizer's state tensors, as in every fragment's `moments`."""
        return self._moments

    def fragments(self) -> list[Fragment]:
        """What this rank's optimizer holds, as views: writing to them changes the optimizer."""
        self._weights.wait()  # in fp32 the master weights are part of what is being sent
        return self._fragments

    @property
    def data_parallel_copies(self) -> int:
        """How many data-parallel ranks hold the same fragments: 1 when ZeRO partitions them."""
        return 1 if self._stage == 1 else self.topology.data.size

    def scalars(self) -> dict[str, Any]:
        """The state that is the same on every rank, JSON-ready."""
        self._settle()
        return {
            "optimizer_step": get_step(self._basic),
            "skipped_steps": self.skipped_steps,
            "loss_scale": self._scale.state() if self._dtype == torch.float16 else None,
        }

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Take over what `scalars()` gave, perhaps on another layout or in another precision."""
        self._settle()
        set_step(self._basic, int(scalars["optimizer_step"]))
        self.skipped_steps = int(scalars.get("skipped_steps", 0))
        if self._dtype == torch.float16 and scalars.get("loss_scale"):
            self._scale.load_state(scalars["loss_scale"])

    def update_working_weights(self) -> None:
        """Make the weights of forward and backward from the master weights, on all data-parallel ranks."""
        self._weights.wait()
        self._zero.update_working_weights()
        self._weights.start()
