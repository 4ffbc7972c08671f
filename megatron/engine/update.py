"""The optimizer's step: norm and clipping of the reduced gradients, update, working weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.config.phases import norm_limits
from megatron.engine.gradients import Bucket, owned_gradients, sum_of_squares
from megatron.engine.optimizer import is_copy, tensors_of
from megatron.engine.optimizer_state import MASTER
from megatron.engine.zero_plan import BucketInstruction, BucketOp
from megatron.kernels.library import available
from megatron.kernels.ops.optimizer import FusedAdamW, scale_and_norm_
from megatron.parallel.collectives import all_reduce
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import ShardGroups, Topology

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.engine.offload import HostState

NormGradients = list[tuple[list[Tensor], list[Tensor]]]
"""For kinds without a limit together, then for each limited kind: gradients that count in the norm,
and copies that another rank counts.
"""


class Update:
    """One optimizer step on reduced gradients, run by DeepSpeed's engine.

    For optimizers that can read them on the device, the norm, the clipping factor and the decision
    whether the step counts stay there; with other optimizers, the host waits for the norm.

    engine     DeepSpeed's engine, whose step calls `inner`
    inner      the optimizer; each of its groups has one parameter, this rank's range of a bucket
    buckets    one for each parameter group, in their order
    exact      this rank's range of the fp32 weights of each bucket  # [n / ranks]
    shards     the ranks that share parameters other than experts, and those that share experts

    masters    the parameters of `inner`: `exact`, or the weights themselves in fp32
    """

    def __init__(
        self,
        engine: Any,
        inner: torch.optim.Optimizer,
        topology: Topology,
        config: Config,
        buckets: Sequence[Bucket],
        exact: Sequence[Tensor],
        shards: tuple[ShardGroups, ShardGroups],
    ) -> None:
        self._engine = engine
        self._inner = inner
        self._topology = topology
        self._in_bf16 = config.precision.bf16
        kernels = config.kernels.optimizer_implementation != "torch"
        self._squares = (
            scale_and_norm_ if kernels and available(topology.device) else sum_of_squares
        )
        self._clip = config.optimizer.clip_grad or math.inf
        # Limits on the gradient norm of each kind of parameter (kind_of). Gradients are clipped to
        # these first; the limit on the global norm then applies to the result.
        limits = norm_limits(config.optimizer.clip_grad_by_kind)
        # With apex's optimizers, and with a user's own that cannot skip on the device, the host
        # decides: it reads the norm before the step.
        self._on_device = isinstance(inner, FusedAdamW) or getattr(
            inner, "_step_supports_amp_scaling", False
        )
        self.buckets = list(buckets)
        in_fp32 = config.precision.dtype_name == "float32"
        self._values = [b.owned_weights for b in self.buckets] if in_fp32 else list(exact)
        self.masters: list[Tensor] = [p for g in inner.param_groups for p in g["params"]]
        for master, values in zip(self.masters, self._values, strict=True):
            master.data = values
        # masters whose working weights the optimizer does not write
        self._rounded: dict[Tensor, Bucket] = {}
        if not in_fp32:
            self._rounded.update(zip(self.masters, self.buckets, strict=True))
        self._host: HostState | None = None
        parameters = [p for bucket in self.buckets for p in bucket.parameters]
        if isinstance(inner, FusedAdamW):
            inner.gradients = {
                master: bucket.owned_gradients
                for master, bucket in zip(self.masters, self.buckets, strict=True)
            }
            inner.copies = {
                master: bucket.owned_weights
                for master, bucket in self._rounded.items()
                if self._in_bf16 and bucket.weights.dtype != torch.float32
            }
            for master in inner.copies:
                del self._rounded[master]

        limited = {p: kind for p in parameters if (kind := sharding_of(p).kind) in limits}

        # This rank's gradients, kinds without a limit first: gradients that count in the norm, and
        # gradients that another rank counts.
        def lists(parameters: Iterable[torch.nn.Parameter]) -> NormGradients:
            pairs = []
            for kind in (None, *limits):
                some = [p for p in parameters if limited.get(p) == kind]
                copies = {p for p in some if is_copy(p, topology)}
                counted = [p for p in some if p not in copies]
                pairs.append(
                    (owned_gradients(self.buckets, counted), owned_gradients(self.buckets, copies))
                )
            return pairs

        self._norm_gradients = lists(parameters)
        # each with the ranks over which the squares are summed, and how often these hold each
        self._summed = [
            (lists([p for p in parameters if sharding_of(p).experts in experts]), group, copies)
            for experts, group, copies in topology.holders_of_state(*(s.states for s in shards))
        ]
        self._limits: Tensor | None = None
        if limits:
            ends = [math.inf, *limits.values()]
            self._limits = torch.tensor(ends, device=topology.device).double()

    def offload(self, updates: Iterable[BucketInstruction]) -> HostState:
        """Keep the optimizer's state in host memory, where it is now.

        updates  the updates in ZeRO's plan
        """
        from megatron.engine.offload import HostState  # other runs do not need it

        in_fp32 = self._values[0] is self.buckets[0].owned_weights
        if not in_fp32:
            self._values.clear()  # lets copied memory be freed
        uses = [(number, names) for op, number, names in updates if op is BucketOp.UPDATE]
        self._host = HostState(self._inner, self._topology.device, not in_fp32, self._round, uses)
        self._values = self._values or [self._host.on_host[m][MASTER] for m in self.masters]
        return self._host

    def state_of(self, master: Tensor) -> dict[str, Tensor]:
        """Return, by name, a master weight's tensors between steps, MASTER included."""
        state = (
            tensors_of(self._inner, master) if self._host is None else self._host.on_host[master]
        )
        return {MASTER: master.detach(), **state}

    def _round(self, master: Tensor) -> None:
        """Round a master weight to its working weights, unless the optimizer has done so."""
        if (bucket := self._rounded.get(master)) is not None:
            bucket.owned_weights.copy_(master.detach())

    def step(self, loss_scale: float) -> Tensor:
        """Take one step with the reduced gradients, which include the factor `loss_scale`.

        No weights are gathered. Returns the global norm of the gradient, loss scale included, as a
        scalar on the device. If `moves` is False for this norm, no weights and no state have
        changed, and the caller must call `skip` once it has read the norm.
        """
        squares = self._sum_of_squares()
        if self._in_bf16:  # round the root: runs of earlier versions continue bit for bit
            squares = squares.sqrt().square()
        squares = all_reduce(squares, self._topology.model)
        norm = squares.sqrt()
        clipped = norm
        if self._limits is not None:
            norm = squares.sum().sqrt()
            # the gradients of each of `_norm_gradients` are clipped by their own norm
            norms = squares.double().sqrt()
            factors = (self._limits / (norms / loss_scale + 1e-6)).clamp(max=1.0)
            for each, (counted, copies) in zip(
                factors[1:].float(), self._norm_gradients[1:], strict=True
            ):
                if counted or copies:
                    torch._foreach_mul_([*counted, *copies], each)
            clipped = (norms * factors).square().sum().sqrt().float()
        if not self._on_device and not moves(norm):
            return norm
        # The factor that torch.nn.utils.clip_grad_norm_ uses, divided by the loss scale, in fp64;
        # NaN if the step does not count.
        unscaled = (clipped / loss_scale).double()
        factor = (self._clip / (unscaled + 1e-6)).clamp(max=1.0)
        factor = torch.where(moves(unscaled), factor / loss_scale, torch.nan)
        self._pass_gradients(factor, loss_scale)
        self._engine.step()
        for master in self.masters:
            master.grad = None
        if self._host is None:
            for master in self.masters:
                self._round(master)
        return norm

    def skip(self) -> None:
        """Remove the last step, which was skipped, from the bias correction.

        Only FusedAdamW needs this. Other optimizers that skip on the device do it themselves, and
        the rest were not called.
        """
        if isinstance(self._inner, FusedAdamW):
            self._inner.uncount()

    def update_working_weights(self) -> None:
        """Copy the master weights to this rank's shard of the weights that passes use."""
        with torch.no_grad():
            for bucket, values in zip(self.buckets, self._values, strict=True):
                bucket.owned_weights.copy_(values)

    def _sum_of_squares(self) -> Tensor:
        """Return the sums of squares of the gradients, for each entry of `_norm_gradients`.

        Without limits by kind there is one entry, and the result is a scalar.

        A parameter that several model-parallel ranks hold is counted on one of them. A value that
        is not finite in another copy must not go unnoticed, or the copies would differ from then
        on. So the other copies contribute 0 times their squares: 0, or NaN if any is not finite.
        """
        zero = torch.zeros((), device=self._topology.device)
        sums = list[Tensor]()
        for gradients, group, held in self._summed:
            totals = []
            for counted, copies in gradients:
                total = self._squares(counted) if counted else zero
                if copies:
                    total = total + 0.0 * self._squares(copies)
                totals.append(total)
            total = torch.stack(totals) if len(totals) > 1 else totals[0]
            total = all_reduce(total, group)
            sums.append(total / held if held > 1 else total)
        return sums[0] if len(sums) == 1 else sums[0] + sums[1]

    def _pass_gradients(self, factor: Tensor, loss_scale: float) -> None:
        """Give the optimizer its gradients, and their factor if it takes one."""
        inner: Any = self._inner
        if isinstance(inner, FusedAdamW):
            inner.gradient_scale = factor.float()
            return
        gradients = [bucket.owned_gradients.float() for bucket in self.buckets]
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        if self._on_device:  # torch's optimizers take the inverse, as GradScaler passes it
            inner.grad_scale = (1.0 / factor).float()
            inner.found_inf = factor.isnan().float()
        elif loss_scale != 1.0 or math.isfinite(self._clip):
            torch._foreach_mul_(gradients, factor.float())


def moves(norm: Tensor) -> Tensor:
    """Return whether a gradient of this norm moves the weights: it is finite, and not exactly 0.

    If the gradient is 0 (for example because no token counts in the loss), momentum and weight
    decay must not move the weights either.
    """
    return norm.isfinite() & (norm > 0)
