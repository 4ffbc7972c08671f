"""The engine: all stages of ZeRO around this rank's pipeline chunks; DeepSpeed runs the optimizer.

The executor calls the chunks directly. Gradients are summed in flat buckets, which are sent to the
ranks that own them during the last backward passes (in ZeRO stages 2 and 3, during all). `step()`
waits for these messages, clips, updates, and starts to send the new weights to all ranks; each of
the next forward passes waits only for the weights it needs. DeepSpeed's own forward and backward
are never called: they divide the gradients that enter each pipeline stage by the number of
micro-batches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.engine.buckets import ALIGNMENT, bucket_rule
from megatron.engine.copies import check_copies
from megatron.engine.deepspeed_engine import (
    ChunksModule,
    ModelParallelUnit,
    deepspeed_json,
    ensure_process_group,
    import_deepspeed,
    start_engine,
)
from megatron.engine.full_matrices import FullMatrices
from megatron.engine.gradients import Bucket, Gradients, Terms, WeightGather, calls_of, divide
from megatron.engine.optimizer import (
    Fragment,
    build_optimizer,
    create_state,
    freeze_copies,
    get_step,
    is_copy,
    parameter_groups,
    persistent_tensors,
    set_step,
    unique_parameters,
)
from megatron.engine.optimizer_state import (
    AVERAGE,
    MASTER,
    StepValues,
    group_keys,
    optimizer_state,
)
from megatron.engine.qk_clip import ParameterSlice, QKClip
from megatron.engine.update import Update, moves
from megatron.engine.zero_plan import ZeroPlan, zero_of, zero_plan
from megatron.errors import ConfigError
from megatron.kernels.host_copy import HostCopy
from megatron.kernels.ops.optimizer import FusedAdamW
from megatron.model.gpt import hidden_state, stages_of
from megatron.model.stages import recomputed_groups
from megatron.parallel.collectives import all_reduce
from megatron.parallel.host_processes import release_free_memory
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import ShardGroups, Topology
from megatron.pipeline.captured import Captures, Pool
from megatron.pipeline.executor import Executor

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.config.training import PrecisionConfig
    from megatron.layers.expert_router import Router


class LossScale:
    """Loss scale: 1 in fp32 and bf16; fixed or dynamic in fp16 (arXiv 1710.03740, section 3.2).

    A dynamic scale halves at the `hysteresis`-th overflow and at every later one, never below its
    minimum. After `loss_scale_window` steps in a row without overflow it doubles, and the overflows
    are counted from 0 again. Every rank makes the same updates, because all ranks agree on an
    overflow first.
    """

    def __init__(self, precision: PrecisionConfig) -> None:
        self.dynamic = precision.fp16 and not precision.loss_scale
        self._good_steps = 0
        self._allowance = precision.hysteresis
        self._precision = precision
        self.scale = 1.0
        if precision.fp16:
            first = max(precision.initial_loss_scale, precision.min_loss_scale)
            self.scale = precision.loss_scale or first

    def update(self, overflow: bool) -> None:
        """Count a step that was taken, or that was skipped because of an overflow."""
        if not self.dynamic:
            return
        if overflow:
            self._good_steps = 0
            self._allowance -= 1
            if self._allowance <= 0:
                self.scale = max(self.scale / 2.0, self._precision.min_loss_scale)
            return
        self._good_steps += 1
        if self._good_steps == self._precision.loss_scale_window:
            self._good_steps = 0
            self._allowance = self._precision.hysteresis
            self.scale *= 2.0

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        if not self.dynamic:
            return {"scale": self.scale}
        return {"scale": self.scale, "good_steps": self._good_steps, "allowance": self._allowance}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the state of another run, whose scale may have been fixed.

        If this run's scale is fixed, it is a setting and is kept.
        """
        if self.dynamic:
            self.scale = float(state["scale"])
            self._good_steps = int(state.get("good_steps", 0))
            self._allowance = int(state.get("allowance", self._precision.hysteresis))


@dataclass(frozen=True)
class StepResult:
    """Results of one optimizer step on the host; the same on every rank.

    grad_norm    global L2 norm of the gradient before clipping, without the loss scale; None when
                 skipped. If it is 0, weights and optimizer are unchanged, too
    skipped      True when the gradient was not finite: weights and optimizer are unchanged
    loss_scale   the scale with which this step's gradients were computed
    num_zeros    number of gradient elements that are exactly 0, if requested; None when skipped
    params_norm  global L2 norm of the weights after the step, if requested
    """

    grad_norm: float | None
    skipped: bool
    loss_scale: float
    num_zeros: float | None = None
    params_norm: float | None = None


class Engine:
    """ZeRO in fp32, bf16 or fp16, with fp32 master weights and gradient sums in fp32 or bf16.

    chunks    this rank's model: fp32 parameters, each with a Sharding; the engine converts them to
              the run's dtype, unless Sharding.fp32 is set. Parameters without requires_grad are
              frozen: they have no gradient and no optimizer state, but are sharded, gathered and
              saved like the rest

    Stage 1 shards the optimizer's state over the data-parallel ranks; stages 2 and 3 are in
    megatron/engine/sharded.py. Stage 0 is stage 1 with a single shard: all ranks get the sum of the
    gradients.

    With `config.engine.overlap_param_gather` weights arrive while the next forward passes run.
    Modules wait for their weights (WeightGather), and so does `state_dict()`. Code that reads
    `chunks.parameters()` in another way after `step()`, or after loading a checkpoint, must call
    `wait_for_weights()` first.

    The gradient is the sum over all backward passes of all data-parallel ranks: the loss must be
    divided by the number of micro-batches of all ranks and multiplied by `loss_scale`. Thus fp16
    overflows at the same values with every layout.

    deepspeed  the DeepSpeedEngine whose step runs the optimizer

    Attributes for checkpoints:

    copies                two groups of data-parallel ranks: those with the same fragments of
                          ordinary parameters as this rank, and those with the same fragments of
                          experts. If ZeRO shards over all ranks, each group is this rank alone
    routers               routers of the layers with experts
    persistent_tensors    fp32 tensors besides the parameters, by global name
    host_state            optimizer state in host memory; None if it is on the device

    first_trained         the first pipeline stage with parameters that train

    Raises ConfigError if DeepSpeed is missing, if a rank has no parameters, or if the model
    or the optimizer does not support a setting.
    """

    def __init__(self, config: Config, topology: Topology, chunks: nn.Module) -> None:
        self.topology = topology
        self.chunks = chunks
        self.skipped_steps = 0
        self._dtype = getattr(torch, config.precision.dtype_name)
        self._shards = _shards_of(config, topology)
        self.copies = self._shards[0].copies, self._shards[1].copies
        self.persistent_tensors = persistent_tensors(chunks)
        self._logging = config.logging
        self.routers: Sequence[Router] = ()
        self._find_experts()
        parameters = unique_parameters(chunks)
        self.first_trained = freeze_copies(self.chunks, parameters, topology)
        self._trains = {p: p.requires_grad for p in parameters}
        ensure_process_group(topology.device)

        self.plan = plan = _plan_of(config, topology, chunks, parameters)
        divided = self._divide(config, parameters)
        trained = [pair for pair in divided if not pair[0].frozen]
        exact = [shard for _, shard in trained]
        # parameters of the optimizer, which get their values from Update
        empty = [[nn.Parameter(shard.new_zeros(ALIGNMENT))] for shard in exact]
        groups = parameter_groups(empty, config.optimizer.weight_decay, plan.buckets)
        self._basic = build_optimizer(groups, config, topology.device)
        self.deepspeed = start_engine(
            import_deepspeed(topology.device),
            topology,
            from_file=bool(config.engine.extra),
            model=ChunksModule(chunks),
            optimizer=self._basic,
            config=deepspeed_json(config),
            mpu=ModelParallelUnit(topology),
        )
        self._update = Update(
            self.deepspeed,
            self._basic,
            topology,
            config,
            [bucket for bucket, _ in trained],
            exact,
            self._shards,
        )
        models: dict[Tensor, Tensor] = {}
        if config.engine.cpu_offload:  # in fp32 the masters are on the device
            models.update(zip(self._update.masters, exact, strict=True))
        self._set_full_matrices()
        # frozen parameters, with this rank's exact fp32 shards
        self._frozen = [
            (bucket, bucket.owned_weights if bucket.owned_weights.dtype == torch.float32 else shard)
            for bucket, shard in divided[len(trained) :]
        ]
        del exact, trained, divided
        self._connect(config)
        # the moments do not fit into any gap left by the initial weights
        release_free_memory()
        state = optimizer_state(config)
        create_state(self._basic, state, topology.device, models)
        models.clear()
        self.host_state = (
            self._update.offload(plan.updates()) if config.engine.cpu_offload else None
        )
        self._scale = LossScale(config.precision)
        # a step whose results have not been read yet
        self._in_progress: tuple[float, float, HostCopy] | None = None
        self._result: StepResult | None = None
        self._hold_state(config, AVERAGE in state.tensors)

    def _find_experts(self) -> None:
        """Find the state that the layers with experts share, and their routers."""
        contexts = (getattr(chunk, "context", None) for chunk in self.chunks.children())
        self._experts = next((c.experts for c in contexts if c is not None), None)
        if self._experts is None:
            return
        from megatron.layers.expert_load import move_biases, routers  # other models do not need it

        self.routers = routers(self.chunks)
        self._move_biases = move_biases
        for router in self.routers:
            router.measured = self._logging.moe_per_layer_logging

    def _divide(
        self, config: Config, parameters: Sequence[nn.Parameter]
    ) -> list[tuple[Bucket, Tensor]]:
        """Put parameters into the plan's buckets; return them and this rank's exact fp32 shards."""
        for p in parameters:
            assert p.dtype == torch.float32, (
                f"{sharding_of(p).name} is {p.dtype}: chunks arrive in fp32"
            )
        sums = torch.bfloat16 if config.precision.gradient_bytes == 2 else torch.float32
        divided = []
        for bucket in self.plan.buckets:
            flat, shard = divide(
                [parameters[number] for number in bucket.members],
                bucket,
                self.plan.zero,
                self._shards[bucket.kind.experts],
                self._dtype,
                sums,
                self.topology.device,
            )
            offloaded = config.engine.cpu_offload and not flat.frozen
            divided.append((flat, shard.cpu() if offloaded else shard))
        return divided

    def _set_full_matrices(self) -> None:
        """Give the optimizer's groups of full parameters the function that gathers them."""
        groups = self._basic.param_groups
        takes_full = [bool(group.get("full_parameters")) for group in groups]
        buckets = [
            b for b, is_full in zip(self._update.buckets, takes_full, strict=True) if is_full
        ]
        matrices = FullMatrices(buckets, self.topology) if buckets else None
        for group, is_full in zip(groups, takes_full, strict=True):
            group.update(group_keys(matrices if is_full else None))

    def _hold_state(self, config: Config, averaged: bool) -> None:
        """Collect this rank's optimizer state, for checkpoints, the average and QK-clip."""
        states = [self._update.state_of(master) for master in self._update.masters]
        owned = [
            (p, first, span, bucket, tensors)
            for bucket, tensors in zip(self._update.buckets, states, strict=True)
            for p, first, span in bucket.owned()
        ]
        self._owned_gradients = {p: b.owned_gradients[span] for p, _, span, b, _ in owned}
        self._fragments = [Fragment.of(p, first, span, each) for p, first, span, _, each in owned]
        for bucket, exact in self._frozen:
            tensors = {MASTER: exact, **({AVERAGE: exact} if averaged else {})}
            self._fragments += [Fragment.of(*one, tensors) for one in bucket.owned()]
        self._masters = [tensors[MASTER] for tensors in states]
        self._averages = [tensors[AVERAGE] for tensors in states if AVERAGE in tensors]
        self.start_average()
        # The optimizer, if it also updates the average; None with QK-clip, which changes the
        # weights after the update.
        self._averaging: FusedAdamW | None = None
        if self._averages and isinstance(self._basic, FusedAdamW) and not config.optimizer.qk_clip:
            self._averaging = self._basic
            self._basic.average = AVERAGE
        self._qk_clip: QKClip | None = None
        if not config.optimizer.qk_clip:
            return
        if config.pieces.layer is not None:
            raise ConfigError(
                "--qk-clip scales the weights of the built-in layer: remove the flag, or train "
                "without a layer of your own"
            )
        slices = [
            ParameterSlice(p, first, tensors[MASTER][span], bucket.owned_weights[span])
            for p, first, span, bucket, tensors in owned
        ]
        self._qk_clip = QKClip(config.optimizer, self.topology, self.chunks, slices)

    def _connect(self, config: Config) -> None:
        """Connect the parameters to the messages that carry their gradients and weights."""
        plan = self.plan
        chunks = list(self.chunks.children())
        terms = Terms(
            chunks if self.topology.tensor.size > 1 else (), config.parallel.sequence_parallel
        )
        direct = config.kernels.gradient_accumulation_fusion
        self._gradients: Gradients
        self._weights: WeightGather
        if plan.zero.divides_gradients:
            from megatron.engine.sharded import ShardedGradients, ShardedWeights

            context: Any = getattr(chunks[0], "context", None)
            self._gradients = ShardedGradients(
                plan,
                self.buckets,
                self.topology,
                terms,
                direct,
                getattr(context, "weight_gradients", None),
            )
        else:
            self._gradients = Gradients(plan, self.buckets, self.topology, terms, direct)
        if plan.zero.stage == 3:
            ((stage, chunk),) = self.chunks.named_children()
            self._weights = ShardedWeights(plan, self.buckets, chunk, int(stage))
        else:
            by_use = [self.buckets[number] for number in plan.return_order]
            self._weights = WeightGather(by_use, chunks, plan.zero.ahead)

    # -- training ----------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """Return the factor on the loss before the backward pass; 1 except in fp16.

        A dynamic scale depends on the last step: reading it waits for that step.
        """
        if self._scale.dynamic:
            self._settle()
        return self._scale.scale

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Return the plan's buckets as flat tensors, frozen parameters included."""
        return *self._update.buckets, *(bucket for bucket, _ in self._frozen)

    @property
    def has_moved(self) -> bool:
        """Return whether any step whose result has been read has changed the weights."""
        return self._gradients.counted

    def frozen_parameters(self) -> int:
        """Return the number of elements in the model's frozen parameters; all ranks call it."""
        views = [
            (f, torch.tensor(view.numel()))
            for f in self._counted()
            if not f.parameter.requires_grad
            for _, view in f.real(f.master)
        ]
        return int(self._over_model(views))

    def begin(self, micro_batches: int) -> None:
        """Announce the backward passes of this many micro-batches.

        Complete buckets can then be reduced early, and the experts' balancing losses get their
        factor. Needed only with overlap or experts. Raises ConfigError, on every rank, for a second
        call before `step` if sums may have been sent already; with ZeRO stages 2 and 3, a gradient
        that arrives after its sum was sent raises it instead.
        """
        self._gradients.begin(micro_batches)
        self._weights.begin(micro_batches)
        if self._experts is not None:
            self._experts.loss_scale = self.loss_scale / (
                micro_batches * self.topology.layout.replicas
            )

    def pass_ends(self, stage: int) -> None:
        """Announce the end of a pipeline stage's backward pass; needed by ZeRO-2 and ZeRO-3."""
        if self.plan.zero.divides_gradients:
            self._gradients.pass_ends(stage)
            self._weights.pass_ends()

    def gradient(self, p: nn.Parameter) -> Tensor:
        """Return the gradient sum of a parameter since the last step, before any reduction.

        It includes the loss scale. With overlap_grad_reduce the reduction begins during the
        backward passes, and the value is undefined after them. With ZeRO stages 2 and 3 it is only
        the part that has not been added to the sum yet, zero after a pass; all data-parallel ranks
        call this.
        """
        return self._gradients.of(p)

    def step(self, lr: float, **more: Any) -> StepResult:
        """Reduce and clip the gradients, update the weights and clear the gradients.

        `lr` and `more` are StepValues. Gradients that were put into `.grad` by hand count as well.
        If the gradient is not finite on any rank, the step is skipped on all. Raises the
        ConfigError of start_step.
        """
        self.start_step(StepValues(lr, **more))
        return self.finish_step()

    def start_step(self, values: StepValues) -> None:
        """Start a step without waiting for its result: the device decides whether the step counts.

        The next passes may follow at once; `finish_step` returns the result at any time before the
        next step. Until a first step has changed the weights, this waits: whether later steps may
        overlap depends on it. It also waits for the norm if the optimizer cannot skip on the
        device.

        Raises ConfigError if a parameter has been frozen, or is no longer frozen, since the engine
        was made, for betas that the optimizer does not have, and in the first step if it is unclear
        whether a gradient is a term of a sum over the tensor ranks (Terms).
        """
        self._settle()
        for p, trains in self._trains.items():
            if p.requires_grad != trains:
                raise ConfigError(
                    f"requires_grad of {sharding_of(p).name} was {trains} when the engine was made "
                    f"and is {p.requires_grad} now, but the optimizer cannot follow: set it "
                    "where the model is built, or make a new engine"
                )
        groups = self._basic.param_groups
        if values.betas is not None and not any("betas" in group for group in groups):
            raise ConfigError(
                f"{type(self._basic).__name__} has no betas in its groups: leave "
                "--adam-beta1-schedule and --adam-beta2-schedule out"
            )
        for group in groups:
            rate = values.decoupled_lr if group["decoupled"] else None
            group["lr"] = (values.lr if rate is None else rate) * group["lr_scale"]
            if values.weight_decay is not None and group["decays"]:
                group["weight_decay"] = values.weight_decay / group["lr_scale"]
            if values.betas is not None and "betas" in group:
                group["betas"] = values.betas
        scale = self._scale.scale
        if self.host_state is not None:
            self.host_state.prefetch()
        self._gradients.collect()
        self._gradients.reduce()
        self._weights.settle()  # the previous step's: some may not have been waited for
        new = values.new_in_average
        if self._averaging is not None:
            self._averaging.new_in_average = new
            new = 0.0
        zeros = [self._count_zeros()] if self._logging.log_num_zeros_in_grad else []
        norm = self._update.step(scale)
        if self._qk_clip is not None:
            self._state_rests()
            self._qk_clip.apply(moves(norm))
        if self.routers:
            self._move_biases(self.routers, self.topology.data, moves(norm))
        self._gradients.renew()
        self._weights.start()
        squares = [self._params_squares()] if self._logging.log_params_norm else []
        figures = torch.stack([(norm / scale).double(), *zeros, *squares])
        self._in_progress = scale, new, HostCopy(figures)
        if not self._gradients.counted:
            self._settle()

    def finish_step(self) -> StepResult:
        """Return the result of the last step; wait for the device if it has not been read yet."""
        self._settle()
        assert self._result is not None, "a step was started"
        return self._result

    def _settle(self) -> None:
        """Read the results of the last step and count it, if that has not been done yet."""
        if self._in_progress is None:
            return
        scale, new, figures = self._in_progress
        self._in_progress = None
        norm, *optional = figures.read()
        skipped = not math.isfinite(norm)
        if skipped or norm == 0:
            self._update.skip()
        else:
            self._gradients.counts()
            if new and self._averages:
                self._state_rests()
                for average, master in zip(self._averages, self._masters, strict=True):
                    average.lerp_(master.to(average.device), new)
        self._scale.update(skipped)
        self.skipped_steps += skipped
        zeros = optional.pop(0) if self._logging.log_num_zeros_in_grad else None
        self._result = StepResult(
            grad_norm=None if skipped else norm,
            skipped=skipped,
            loss_scale=scale,
            num_zeros=None if skipped else zeros,
            params_norm=math.sqrt(optional[0]) if optional else None,
        )

    def _state_rests(self) -> None:
        """Wait until offloaded state may be read and written."""
        if self.host_state is not None:
            self.host_state.settle()

    @contextlib.contextmanager
    def local_gradients(self) -> Iterator[None]:
        """Keep the full gradients of passes in this context on this rank until they are cleared.

        With ZeRO stages 2 and 3, this takes more memory than training does.
        """
        if not self.plan.zero.divides_gradients:
            yield
            return
        self._gradients.local = True
        try:
            yield
        finally:
            self._gradients.local = False

    def clear_gradients(self) -> None:
        """Discard the gradients accumulated since the last step.

        Like `step`, it is called on all ranks.
        """
        self._gradients.renew()

    def wait_for_weights(self) -> None:
        """Wait until all weights of the last step have arrived.

        For code that reads weights outside of forward passes. With ZeRO stage 3 all data-parallel
        ranks call it: it gathers all weights, which keep their memory until the next step.
        """
        self._weights.wait()

    def arriving(self, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        """Yield parameters; the weights of each are available until the next one is requested.

        With ZeRO stage 3 all data-parallel ranks request the same parameters in the same order.
        This takes less memory than `wait_for_weights`.
        """
        return self._weights.each(parameters)

    def check_copies(self, when: str = "now") -> None:
        """Compare, bit for bit, the weights that several ranks hold.

        These are data-parallel copies, weights replicated over the tensor ranks, and a tied
        embedding. The first call also compares the gradients of the first step.

        All ranks call it, after a step that was not skipped, and then at intervals: it reads all
        weights once, and sends a few bytes for each parameter and one number over all ranks. Raises
        TrainingError on every rank if copies differ, ConfigError if a gradient that is a term of a
        sum over the tensor ranks is treated as whole, or the other way round. `when` is part of the
        message.
        """
        self._settle()
        first = self._gradients.first
        self._gradients.first = None
        parameters = unique_parameters(self.chunks)
        check_copies(parameters, self.arriving(parameters), self.topology, when, first)

    # -- the average of the weights ----------------------------------------------------------------

    def start_average(self) -> None:
        """Set the average of the weights, if there is one, to the current weights."""
        self._state_rests()
        for average, master in zip(self._averages, self._masters, strict=False):
            average.copy_(master)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Let forward passes use the average of the weights.

        Afterwards the weights are bitwise the same as before: each rank keeps a copy of its shard.
        All data-parallel ranks enter and leave the context together. After an exception inside it,
        the average stays in place of the weights: restoring them takes messages between all ranks.
        """
        self._settle()
        self._state_rests()
        self._weights.settle()
        weights = [bucket.owned_weights for bucket in self._update.buckets]
        saved = [shard.clone() for shard in weights]
        self._use(weights, self._averages)
        yield
        self._use(weights, saved)

    @torch.no_grad()
    def _use(self, weights: list[Tensor], values: list[Tensor]) -> None:
        """Put values into this rank's shards of the weights, and send them to the other ranks."""
        self._weights.settle()
        torch._foreach_copy_(weights, values)
        self._weights.start()

    # -- figures -----------------------------------------------------------------------------------

    def _over_model(self, terms: list[tuple[Fragment, Tensor]]) -> Tensor:
        """Return the sum of scalars, in float64, over the ranks that together hold the model once.

        terms  pairs of a fragment and its scalar
        """
        zero = torch.zeros((), dtype=torch.float64, device=self.topology.device)

        def total(some: list[Tensor]) -> Tensor:
            return torch.stack([zero, *(t.to(zero) for t in some)]).sum()

        value = zero
        states = (shards.states for shards in self._shards)
        for experts, group, copies in self.topology.holders_of_state(*states):
            some = total([t for f, t in terms if f.sharding.experts in experts])
            value = value + all_reduce(some, group) / copies
        return all_reduce(value, self.topology.model)

    @torch.no_grad()
    def _count_zeros(self) -> Tensor:
        views = [
            (f, view)
            for f in self._counted()
            if f.parameter.requires_grad
            for _, view in f.real(self._owned_gradients[f.parameter])
        ]
        return self._over_model([(f, v.numel() - v.count_nonzero()) for f, v in views])

    @torch.no_grad()
    def _params_squares(self) -> Tensor:
        self._state_rests()
        views = [(f, view) for f in self._counted() for _, view in f.real(f.master)]
        return self._over_model(
            [(f, torch.linalg.vector_norm(v, dtype=torch.float64).square()) for f, v in views]
        )

    def _counted(self) -> list[Fragment]:
        """Return the fragments of parameters that no other rank of the model counts (is_copy)."""
        return [f for f in self._fragments if not is_copy(f.parameter, self.topology)]

    # -- state, for checkpoints --------------------------------------------------------------------

    def fragments(self) -> list[Fragment]:
        """Return the parts of parameters whose optimizer state this rank holds, and frozen parts.

        Their tensors are views through which weights and state can be written.
        """
        self._settle()
        self._state_rests()
        self._weights.settle()  # in fp32 the master weights are part of the weights being sent
        return self._fragments

    def scalars(self) -> dict[str, Any]:
        """Return the state that is the same on every rank, ready for JSON."""
        self._settle()
        return {
            "optimizer_step": get_step(self._basic),
            "skipped_steps": self.skipped_steps,
            "loss_scale": self._scale.state() if self._dtype == torch.float16 else None,
        }

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Restore the result of `scalars()`, which may be from another layout or precision."""
        self._settle()
        set_step(self._basic, int(scalars["optimizer_step"]))
        self.skipped_steps = int(scalars.get("skipped_steps", 0))
        if self._dtype == torch.float16 and scalars.get("loss_scale"):
            self._scale.load_state(scalars["loss_scale"])

    def update_working_weights(self) -> None:
        """Write the rounded master weights to the weights that forward and backward passes use.

        All data-parallel ranks call it.
        """
        self._state_rests()
        self._weights.settle()
        self._update.update_working_weights()
        with torch.no_grad():
            for bucket, shard in self._frozen:
                bucket.owned_weights.copy_(shard)
        self._weights.start(frozen=True)


def _shards_of(config: Config, topology: Topology) -> tuple[ShardGroups, ShardGroups]:
    """Return the groups of ranks that shard ordinary parameters, and those that shard experts."""
    if config.engine.zero_stage > 0:
        return topology.shards, topology.expert_shards
    return ShardGroups.undivided(topology.data), ShardGroups.undivided(topology.expert_data)


def _plan_of(
    config: Config,
    topology: Topology,
    chunks: nn.Module,
    parameters: Sequence[nn.Parameter],
) -> ZeroPlan:
    """Return ZeRO's plan for the parameters of this rank's chunks.

    Raises ConfigError for a parameter that ZeRO-3 would never gather.
    """
    numbers = {p: number for number, p in enumerate(parameters)}
    calls = {int(stage): calls_of(chunk, numbers) for stage, chunk in chunks.named_children()}
    recomputed = {
        stage: recomputed_groups(sum(call.layer for call in of_stage), config.recompute)
        for stage, of_stage in calls.items()
    }
    zero = zero_of(config, topology.layout)
    plan = zero_plan(
        zero,
        bucket_rule(config, zero.gradient_ranks),
        [replace(sharding_of(p), frozen=not p.requires_grad) for p in parameters],
        calls,
        recomputed,
        optimizer_state(config).sweeps,
    )
    called = {
        number for of_stage in calls.values() for call in of_stage for number in call.parameters
    }
    for bucket in filter(plan.zero.divides_weights, plan.buckets):
        if missing := sorted(set(bucket.members) - called):
            raise ConfigError(
                f"--zero-stage 3 gathers weights for the calls that weight_users() lists, but none "
                f"needs {sharding_of(parameters[missing[0]]).name}: list the module that uses it"
            )
    return plan


def build_executor(
    config: Config, topology: Topology, chunks: nn.ModuleDict, engine: Engine
) -> Executor:
    """Return an executor that runs the schedule on `chunks` (from build_chunks).

    It announces each step, and the end of each backward pass, to `engine`. Raises ConfigError if
    CUDA graphs need dropout kernels that this run does not have.
    """
    some: Any = next(iter(chunks.values()))
    stages = stages_of(chunks)
    captures = None
    message = hidden_state(config)
    if config.kernels.cuda_graph_impl is not None and topology.device.type != "meta":
        # Only kernels can make the dropout masks of captured passes. The configuration's checks
        # cannot tell whether this rank has them.
        model = config.model
        needed = set[str]()
        if model.hidden_dropout:
            needed.add("bias_dropout")
        if model.attention_dropout:
            blocked = config.kernels.attention_backend == "blocked"
            needed.add("attention_block" if blocked else "bias_dropout")
        if missing := sorted(name for name in needed if not getattr(some.context.fusions, name)):
            raise ConfigError(
                f"--cuda-graph-impl local with --hidden-dropout {model.hidden_dropout} and "
                f"--attention-dropout {model.attention_dropout} needs the kernels' masks, but "
                f"{' and '.join(missing)} of this run {'are' if missing[1:] else 'is'} torch's "
                "(the log says why): build the kernels (make kernels), set dropout to 0, or use "
                "--cuda-graph-impl none"
            )
        captures = Captures(
            {number: (stages[number], chunks[str(number)]) for number in stages},
            config.parallel.num_stages - 1,
            Pool(topology.device, topology.flight, message),
            config.kernels.cuda_graph_warmup_steps,
            engine.wait_for_weights,
        )
    shape, dtype = message

    def shape_of(batch: Any) -> tuple[int, ...]:
        return batch.tokens.shape[-1] // config.parallel.sequence_ranks, *shape[1:]

    return Executor(
        topology,
        stages,
        config.schedule,
        (shape_of if config.training.curriculum_learning else shape, dtype),
        some.context.weight_gradients,
        before_training=engine.begin,
        after_backward=engine.pass_ends,
        captures=captures,
        first_trained=engine.first_trained,
    )
