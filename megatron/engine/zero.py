"""DeepSpeed's two ZeRO-1 optimizers, taught to use our buckets.

BF16_Optimizer serves bf16, DeepSpeedZeroOptimizer fp32 and fp16. Both keep master weights and moments, decide about
overflow and update their partition. Around that they flatten, copy, reduce, clip and gather; here the gradients are
flat and reduced before, the norm is one pass over this rank's partition, and the weights are gathered by whoever
calls. They ask the device for the norm and wait for it; here norm, clip factor and whether the step counts stay on the
device, and the update reads them there.
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
        self._norm = torch.zeros((), device=topology.device)
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
        outer.get_grads_for_norm = self._to_clip
        outer.clear_hp_grads = _nothing  # sums are begun anew, not filled with zeros
        if self._reads_device():
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
        outer.scaled_global_norm = self._norm_for_deepspeed
        outer._update_model_bit16_weights = _nothing  # the parameters are views of the flat weights, and stay so
        for p in (p for bucket in self.buckets for p in bucket.parameters):
            p.grad_accum = None  # type: ignore[attr-defined]
        if self._reads_device():
            outer.unscale_and_clip_grads = _nothing

    def _reads_device(self) -> bool:
        """Whether the update takes the clip factor, and leaves everything as it is where that is not finite, without
        the host: apex's and most of one's own do not, so that DeepSpeed asks for the norm before them."""
        return isinstance(self._inner, FusedAdamW) or getattr(self._inner, "_step_supports_amp_scaling", False)

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, engine: Any) -> torch.Tensor:
        """Take one step, with the reduced gradients, of DeepSpeed's engine; no weights are gathered.

        Returns the global norm of the gradient, loss scale included, a scalar on the device. Where it is not finite
        nothing is changed; whoever reads it then calls `not_taken`.
        """
        outer = self._outer
        if self._bf16:
            # Every gradient counts as present, also a zero one.
            outer.fp32_groups_has_gradients[:] = [[True] * len(bucket.parameters) for bucket in self.buckets]
        else:
            for i, bucket in enumerate(self.buckets):
                outer.averaged_gradients[i] = _Flat(bucket.own(bucket.gradients))
        squares = self._squares()
        if self._bf16:
            squares = squares.sqrt().square()  # each rank's rounded as DeepSpeed does: runs go on bit by bit
        self._norm = all_reduce(squares, self._topology.model).sqrt()
        if self._reads_device():
            self._tell_update()
        with self._instead_of_deepspeed():
            engine.step()
        return self._norm

    def not_taken(self) -> None:
        """The last step was left out: it does not count in the bias correction. torch's optimizers know by themselves,
        and others were not called."""
        if isinstance(self._inner, FusedAdamW):
            self._inner.uncount()

    def update_working_weights(self) -> None:
        """Make this rank's part of the weights of forward and backward from the master weights."""
        with torch.no_grad():
            for bucket, master in zip(self.buckets, self._masters, strict=True):
                bucket.own(bucket.weights).copy_(master)

    @contextlib.contextmanager
    def _instead_of_deepspeed(self) -> Iterator[None]:
        """Let DeepSpeed call what is ours: it gathers nothing, and where the update reads the device it does not ask
        whether the norm is finite."""
        ours: dict[str, Any] = {
            "all_gather_dp_groups": _nothing, "get_global_norm_of_tensors": self._norm_for_deepspeed
        }  # fmt: skip
        if self._reads_device():
            ours["is_invalid_grad_norm"] = _nothing
        names = vars(self._module)
        before = {name: names[name] for name in ours if name in names}
        names.update((name, ours[name]) for name in before)
        try:
            yield
        finally:
            names.update(before)

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

    def _to_clip(self, for_clipping: bool = False) -> Any:
        """What DeepSpeed's bf16 optimizer is to clip; it takes the norm of nothing."""
        return [bucket.own(bucket.gradients) for bucket in self.buckets] if for_clipping else ([], {})

    def _norm_for_deepspeed(self, *_: Any, **__: Any) -> torch.Tensor:
        """The norm, on the host where DeepSpeed decides whether the step counts: nobody waits for it again."""
        return self._norm if self._reads_device() else self._norm.cpu()

    def _tell_update(self) -> None:
        """The factor of all gradients: as torch.nn.utils.clip_grad_norm_ has it, and the loss scale. It is computed in
        fp64, as the host would."""
        scale = 1.0 if self._bf16 else float(self._outer.loss_scale)
        norm = (self._norm / scale).double()
        good = torch.isfinite(norm)
        factor = (self._clip / (norm + 1e-6)).clamp(max=1.0) if self._clip > 0.0 else torch.ones_like(norm)
        factor = torch.where(good, factor / scale, torch.nan)
        inner: Any = self._inner
        if isinstance(inner, FusedAdamW):
            inner.gradient_scale = factor.float()
        else:  # torch's divide by `grad_scale`, and are told as by torch.amp.GradScaler
            inner.grad_scale, inner.found_inf = (1.0 / factor).float(), good.logical_not().float()


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
