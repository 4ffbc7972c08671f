"""DeepSpeed's two ZeRO-1 optimizers, taught to use our buckets.

BF16_Optimizer serves bf16, DeepSpeedZeroOptimizer fp32 and fp16. Both keep master weights and moments, decide about
overflow and update their partition. Around that they flatten, copy, reduce, clip and gather; here the gradients are
flat and reduced before, the norm is one pass over this rank's partition, the clip factor is part of the update
where AdamW is fused, and the weights are gathered by whoever calls.
"""
from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.engine.adamw import FusedAdamW
from megatron.engine.buckets import Bucket
from megatron.engine.fragments import is_copy
from megatron.kernels.library import available
from megatron.kernels.ops.optimizer import scale_and_norm_
from megatron.parallel.collectives import all_reduce
from megatron.parallel.topology import Topology


class _Flat:
    """What DeepSpeed takes for a group's gradients: a partition that is flat already."""

    def __init__(self, flat_partition: torch.Tensor) -> None:
        self.flat_partition = flat_partition


class ZeroStep:
    """One optimizer step on reduced gradients; DeepSpeed's engine is what runs it.

    outer    DeepSpeed's optimizer; `inner` is ours, on whose parameters it calls step()
    rank     this rank's place among the `ranks` that share the optimizer
    kernels  whether ours may take the norm, where they are loaded

    buckets  one for each parameter group, in their order
    """

    def __init__(
        self, outer: Any, inner: torch.optim.Optimizer, topology: Topology, dtype: torch.dtype, rank: int, ranks: int,
        kernels: bool,
    ) -> None:
        self._outer, self._inner, self._topology = outer, inner, topology
        self._kernels = kernels and available(topology.device)
        self._bf16 = dtype == torch.bfloat16
        self._module: Any = importlib.import_module(type(outer).__module__)
        self._clip = float(outer.clip_grad)
        self._norm: float | None = None
        names = _BF16 if self._bf16 else _OTHERS
        groups, weights, self._masters = (getattr(outer, name) for name in names)
        if self._bf16:
            sums = outer.fp32_groups_gradients_flat
        else:
            sums = [torch.zeros_like(w, dtype=torch.float32) for w in weights]
        self.buckets = [
            Bucket(list(group), gradients, w, rank, ranks)
            for group, gradients, w in zip(groups, sums, weights, strict=True)
        ]
        if dtype == torch.float32:
            self._share_masters()
        if self._bf16:
            self._prepare_bf16()
        else:
            self._prepare_others()
        self._counted, self._copies = self._parts()

    # -- preparation ---------------------------------------------------------------------------------------------------

    def _parts(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This rank's gradients: those that count in the norm, and those for which another rank answers."""
        counted, copies = list[torch.Tensor](), list[torch.Tensor]()
        for bucket in self.buckets:
            counted += bucket.reduced([p for p in bucket.parameters if not is_copy(p, self._topology)])
            copies += bucket.reduced([p for p in bucket.parameters if is_copy(p, self._topology)])
        return counted, copies

    def _share_masters(self) -> None:
        """In fp32 the master weights are this rank's part of the weights themselves: no copy is kept or made."""
        for bucket, master in zip(self.buckets, self._masters, strict=True):
            master.data = bucket.own(bucket.weights)
            for p in bucket.parameters:
                mapping = p._hp_mapping  # type: ignore[attr-defined]
                if mapping is not None:
                    place = mapping.hp_fragment_address
                    mapping.hp_fragment = master.detach().narrow(0, place.start, place.numel)

    def _prepare_bf16(self) -> None:
        outer = self._outer
        outer.get_grads_for_norm = self._for_norm
        outer.clear_hp_grads = _nothing  # sums are begun anew, not filled with zeros
        if self._updates_with_factor():
            outer.clip_grad = 0.0
        if isinstance(self._inner, FusedAdamW):
            outer.update_lp_params = _nothing
            parts = [bucket.own(bucket.weights) for bucket in self.buckets]
            self._inner.copies = dict(zip(self._masters, parts, strict=True))
            if outer.grad_acc_dtype != torch.float32:  # for others DeepSpeed makes copies in fp32
                gradients = [bucket.own(bucket.gradients) for bucket in self.buckets]
                self._inner.gradients = dict(zip(self._masters, gradients, strict=True))
                outer.fp32_groups_gradient_flat_partition = []

    def _prepare_others(self) -> None:
        outer = self._outer
        outer.check_grad_overflow = False  # the norm shows it, without another pass over the gradients
        outer.scaled_global_norm = self._global_norm
        outer._update_model_bit16_weights = _nothing  # the parameters are views of the flat weights, and stay so
        for p in (p for bucket in self.buckets for p in bucket.parameters):
            p.grad_accum = None  # type: ignore[attr-defined]
        if self._updates_with_factor():
            outer.unscale_and_clip_grads = _nothing

    def _updates_with_factor(self) -> bool:
        """Let the update multiply the gradients by the clip factor, where it can without another pass over them."""
        inner = self._inner
        if isinstance(inner, FusedAdamW):
            inner.gradient_scale = self._clip_factor
            return True
        if isinstance(inner, torch.optim.AdamW) and inner.defaults["fused"]:
            inner.register_step_pre_hook(self._tell_torch)
            return True
        return False

    def _tell_torch(self, inner: Any, *_: Any) -> None:
        """torch's fused optimizers divide by `grad_scale`, which torch.amp.GradScaler sets in the same way."""
        factor = self._clip_factor()
        inner.grad_scale = None if factor == 1.0 else torch.tensor(1.0 / factor, device=self._topology.device)

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, engine: Any) -> None:
        """Take one step, with the reduced gradients, of DeepSpeed's engine; no weights are gathered."""
        self._norm = None
        outer = self._outer
        if self._bf16:
            # Every gradient counts as present, also a zero one.
            outer.fp32_groups_has_gradients[:] = [[True] * len(bucket.parameters) for bucket in self.buckets]
        else:
            for i, bucket in enumerate(self.buckets):
                outer.averaged_gradients[i] = _Flat(bucket.own(bucket.gradients))
        with self._without_gathering():
            engine.step()

    @property
    def grad_norm(self) -> float:
        """Global norm of the last step that was not skipped, without the loss scale."""
        return self._global() if self._norm is None else self._norm

    def update_working_weights(self) -> None:
        """Make this rank's part of the weights of forward and backward from the master weights."""
        with torch.no_grad():
            for bucket, master in zip(self.buckets, self._masters, strict=True):
                bucket.own(bucket.weights).copy_(master)

    @contextlib.contextmanager
    def _without_gathering(self) -> Iterator[None]:
        before = self._module.all_gather_dp_groups
        self._module.all_gather_dp_groups = _nothing
        try:
            yield
        finally:
            self._module.all_gather_dp_groups = before

    # -- norm and clipping ---------------------------------------------------------------------------------------------

    def _squares(self) -> torch.Tensor:
        """The sum of squares of this replica group's gradients; a scalar.

        A parameter that several model-parallel ranks hold counts on one of them. A bad value in another's copy would
        pass, and the copies would part for good: 0 times their squares is 0, or NaN where anything is not finite.
        """
        squares: Callable[[list[torch.Tensor]], torch.Tensor]
        squares = scale_and_norm_ if self._kernels else square
        zero = torch.zeros((), device=self._topology.device)
        total = squares(self._counted) if self._counted else zero
        if self._copies:
            total = total + 0.0 * squares(self._copies)
        return all_reduce(total, self._topology.data) if self.buckets[0].ranks > 1 else total

    def _for_norm(self, for_clipping: bool = False) -> Any:
        """What DeepSpeed's bf16 optimizer takes the norm of, one number; or what it is to clip."""
        if for_clipping:
            return [bucket.own(bucket.gradients) for bucket in self.buckets]
        return [self._squares().sqrt()], {}

    def _global_norm(self, norm_type: float = 2) -> torch.Tensor:
        """For DeepSpeed's other optimizer: the norm over all ranks, loss scale included, on the host.

        It is asked whether the step counts, which has to wait for the number anyway; nobody waits for it again.
        """
        return all_reduce(self._squares(), self._topology.model).sqrt().cpu()

    def _global(self) -> float:
        return float(self._outer._global_grad_norm)

    def _clip_factor(self) -> float:
        """As torch.nn.utils.clip_grad_norm_ has it, and the loss scale; DeepSpeed has stored the norm before."""
        if self._norm is None:
            self._norm = self._global()
        scale = 1.0 if self._bf16 else float(self._outer.loss_scale)
        return (min(1.0, self._clip / (self._norm + 1e-6)) if self._clip > 0.0 else 1.0) / scale


_BLOCK = 1 << 16


def square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of flat tensors, by torch.

    Squares of blocks are added up in fp32 and the blocks in fp64: all in fp64 takes torch eighteen times as long.
    """
    norms = []
    for t in tensors:
        whole = len(t) // _BLOCK * _BLOCK
        norms.append(torch.linalg.vector_norm(t[:whole].view(-1, _BLOCK), dim=1, dtype=torch.float32))
        norms.append(torch.linalg.vector_norm(t[whole:], dtype=torch.float32).view(1))
    return torch.cat(norms).double().square().sum().float()


# Names under which DeepSpeed keeps, for each group: the parameters, their flat weights, this rank's master weights.
_BF16 = ("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition")
_OTHERS = ("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups")


def _nothing(*_: Any, **__: Any) -> None:
    """In place of what is done elsewhere, or not needed."""
