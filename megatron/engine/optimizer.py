"""The torch optimizer for this rank's master weights, its groups and state, and Fragment."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.engine.buckets import BucketPlan
from megatron.engine.optimizer_state import MASTER, OptimizerState, group_keys, has_16_bit_moments
from megatron.engine.optimizers import SGD, AdamW, AdEMAMix, Lion, Muon
from megatron.errors import ConfigError
from megatron.kernels.choose import choose_fusions, fused_adam
from megatron.kernels.ops.optimizer import FusedAdamW
from megatron.parallel.collectives import gather_objects
from megatron.parallel.sharding import Sharding, sharding_of
from megatron.parallel.topology import Topology

if TYPE_CHECKING:
    from megatron.config import Config


def unique_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters, frozen ones included; a weight that two layers share appears once.

    They are in the order of their first use, as far as chunks list them in `weight_users`: backward
    passes then complete buckets in about the reverse order.
    """
    users = (getattr(chunk, "weight_users", None) for chunk in (module, *module.children()))
    used = (p for of_chunk in users if of_chunk for _, some in of_chunk() for p in some)
    return list(dict.fromkeys((*used, *module.parameters())))


@dataclass(frozen=True)
class _Trained:
    """Message from a rank to the others; its repr, which a dry run compares, is the same on all."""

    some: bool
    frozen: set[str] = field(repr=False)
    first: int = field(repr=False)


def freeze_copies(chunks: nn.Module, parameters: Sequence[nn.Parameter], topology: Topology) -> int:
    """Freeze each parameter that another rank of the model has frozen under the same name.

    In a single process they would be one parameter: for example a tied embedding, which the last
    stage also holds. Return the first stage of the model with parameters that train, or an earlier
    one. All ranks call it. Raises ConfigError, on every rank, if any rank has no
    parameters.
    """
    frozen = {sharding_of(p).name for p in parameters if not p.requires_grad}
    trained = (
        int(stage)
        for stage, chunk in chunks.named_children()
        if any(p.requires_grad for p in chunk.parameters())
    )
    first = min(trained, default=sys.maxsize)
    gathered = gather_objects(_Trained(bool(parameters), frozen, first), topology.model)
    ranks = topology.model.ranks
    without = [rank for rank, has in zip(ranks, gathered, strict=True) if not has.some]
    if without:
        raise ConfigError(
            f"ranks {without} have no parameters: use fewer pipeline stages or another "
            "--pipeline-layout, so that no stage is without layers"
        )
    every = set[str]().union(*(has.frozen for has in gathered))
    for p in parameters:
        if sharding_of(p).name in every:
            p.requires_grad_(False)
    return min(has.first for has in gathered)


def parameter_groups(
    parameters: Iterable[Sequence[nn.Parameter]],
    weight_decay: float,
    buckets: Sequence[BucketPlan],
) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups, one for each bucket that trains.

    parameters  the parameters of each group

    A group's key `decays` tells whether its weight decay follows the schedule, and its key
    `full_parameters` whether the optimizer needs full parameters, `decoupled` whether
    --decoupled-lr is its rate. Its learning rate is the
    schedule's times its key `lr_scale`, by which its weight decay is divided: the product of the
    two, with which AdamW shrinks weights, is the same for all groups that decay. Its key
    `eps_scale` is the factor on AdamW's epsilon.
    """
    kinds = (bucket.kind for bucket in buckets if not bucket.kind.frozen)
    return [
        {
            "params": list(of_group),
            "weight_decay": 0.0 if kind.spared else weight_decay / kind.lr_scale,
            "decays": not kind.spared,
            **group_keys(kind.full_parameters),
            "lr_scale": kind.lr_scale,
            "eps_scale": kind.eps_scale,
            "decoupled": kind.decoupled,
        }
        for of_group, kind in zip(parameters, kinds, strict=True)
    ]


def build_optimizer(
    groups: list[dict[str, Any]], config: Config, device: torch.device
) -> torch.optim.Optimizer:
    """Make a configuration's optimizer, which may be the user's own.

    AdamW is apex's if --optimizer-implementation asks for it and it runs on this device, our kernel
    if megatron.kernels.choose selects it, and otherwise torch's fused AdamW. With bf16 moments, it
    is always FusedAdamW, with or without our kernel.
    """
    settings = config.optimizer
    kernels = config.kernels
    if config.pieces.optimizer is not None:
        custom: torch.optim.Optimizer = config.pieces.optimizer(groups, settings)
        return custom
    for group in groups:
        group["eps"] = settings.adam_eps * group.get("eps_scale", 1.0)
    if settings.optimizer == "sgd":
        return SGD(groups, lr=settings.lr, momentum=settings.sgd_momentum, fused=True)
    if settings.optimizer == "lion":
        return Lion(groups, settings.lr, (settings.lion_beta1, settings.lion_beta2))
    if settings.optimizer == "ademamix":
        return AdEMAMix(groups, settings)
    if settings.optimizer == "muon":
        return Muon(groups, config)
    betas = (settings.adam_beta1, settings.adam_beta2)
    eps = settings.adam_eps
    narrow = has_16_bit_moments(config)
    if not narrow and kernels.optimizer_implementation == "apex" and fused_adam(device.type).usable:
        apex: Any = importlib.import_module("apex.optimizers").FusedAdam
        made: torch.optim.Optimizer = apex(
            groups, lr=settings.lr, betas=betas, eps=eps, adam_w_mode=True
        )
        for group in made.param_groups:
            group["step"] = 0
        return made
    kernel = choose_fusions(kernels, device, config.precision.dtype_name).optimizer
    if narrow or kernel:
        return FusedAdamW(groups, lr=settings.lr, betas=betas, eps=eps, kernel=kernel)
    return AdamW(groups, lr=settings.lr, betas=betas, eps=eps, fused=True)


def create_state(
    optimizer: torch.optim.Optimizer,
    state: OptimizerState,
    device: torch.device,
    models: Mapping[Tensor, Tensor] = MappingProxyType({}),
) -> None:
    """Create the optimizer's state as zeros, in tensors on the devices of the weights.

    device  where steps are counted if the optimizer is fused or capturable; else on the CPU
    models  for some parameters, a tensor with the shape and on the device of their state

    torch would create it in the first step. A new engine needs it earlier to load a checkpoint, and
    it is better to run out of memory at the start.
    """
    # torch's AdamW counts steps in a tensor for each parameter, FusedAdamW in its groups
    torchs = isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        for p in group["params"]:
            made = optimizer.state[p]
            for name, n_bytes in state.of(bool(group.get("full_parameters"))).tensors.items():
                if made.get(name) is None:
                    dtype = torch.bfloat16 if n_bytes == 2 else torch.float32
                    made[name] = torch.zeros_like(models.get(p, p), dtype=dtype)
            if "step" not in made and (torchs or state.step is not None):
                on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
                step = torch.zeros((), dtype=torch.float32, device=device if on_device else "cpu")
                made["step"] = step if torchs or state.step is Tensor else 0


def tensors_of(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Tensor]:
    """Return the tensors in a parameter's state that have the parameter's shape, by name."""
    state = optimizer.state[p].items()
    return {n: x for n, x in state if isinstance(x, Tensor) and x.shape == p.shape}


def get_step(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of steps that the bias correction has counted; 0 if none are counted."""
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
            if isinstance(counted, Tensor):
                counted.fill_(float(step))
            elif counted is not None:
                optimizer.state[p]["step"] = step


def persistent_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the fp32 tensors of a model other than its parameters, by global name.

    They are not sharded, are the same on all ranks of a stage, and are saved in checkpoints: for
    example expert biases, which follow the experts' load. A module's `persistent_tensors` returns
    them.
    """
    methods = (getattr(module, "persistent_tensors", None) for module in model.modules())
    return {name: tensor for some in methods if some for name, tensor in some().items()}


# -- parts of parameters ---------------------------------------------------------------------------
#
# ZeRO concatenates the parameters of a group and gives each data-parallel rank one range of the
# result. A range of a row-major tensor consists of a few rectangles; each has a position in the
# global tensor that does not depend on the layout.

Index = tuple[int, ...]


def boxes(start: int, stop: int, shape: Sequence[int]) -> list[tuple[Index, Index]]:
    """Return elements [start, stop) of a row-major array as rectangles (offsets, sizes).

    They are in order; there are at most 2 * dimensions - 1 of them.

    >>> boxes(2, 9, (3, 4))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    rectangles = []
    while start < stop:
        offset = tuple(start // stride % n for stride, n in zip(strides, shape, strict=True))
        dim = 0  # the outermost dimension along which a whole slice begins here
        while start % strides[dim] or start + strides[dim] > stop:
            dim += 1
        count = min((stop - start) // strides[dim], shape[dim] - offset[dim])
        rectangles.append((offset, (*(1,) * dim, count, *shape[dim + 1 :])))
        start += count * strides[dim]
    return rectangles


@dataclass(frozen=True)
class Fragment:
    """Part of a local parameter whose optimizer state this rank holds.

    It is the range [start, start + numel) of the parameter.

    master   fp32 weights, a flat view into this rank's range of a bucket  # [numel]
    moments  the optimizer's state by name, flat views like `master`. A frozen parameter has none
             but the average of the weights, if there is one, which is `master`
    """

    parameter: nn.Parameter
    sharding: Sharding
    start: int
    numel: int
    master: Tensor
    moments: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        parameter: nn.Parameter,
        start: int,
        span: slice,
        tensors: Mapping[str, Tensor],
    ) -> Fragment:
        """Return the fragment that begins at element `start`, at `span` of the flat tensors."""
        views = {name: flat[span] for name, flat in tensors.items()}
        master = views.pop(MASTER)
        numel = span.stop - span.start
        return cls(parameter, sharding_of(parameter), start, numel, master, views)

    def real(self, flat: Tensor) -> Iterator[tuple[Index, Tensor]]:
        """Yield (global offset, view) of the real elements of a flat tensor [numel].

        The tensor has the layout of this fragment. Padding is omitted. Views share memory with
        `flat`.
        """
        at = 0
        for offset, sizes in boxes(self.start, self.start + self.numel, self.parameter.shape):
            box = flat.narrow(0, at, math.prod(sizes)).view(sizes)
            at += box.numel()
            within = zip(offset, self.sharding.extent, strict=True)
            view = box[tuple(slice(0, max(0, extent - o)) for o, extent in within)]
            if view.numel():
                pairs = zip(offset, self.sharding.offset, strict=True)
                yield tuple(o + s for o, s in pairs), view


def is_copy(parameter: nn.Parameter, topology: Topology) -> bool:
    """Return whether another rank of the model group holds the same values and counts them.

    True for the last stage's tied embedding, and on all but the first of the tensor ranks that hold
    the same values.
    """
    sharding = sharding_of(parameter)
    if sharding.tied and topology.embedding is not None and not topology.has_first_stage:
        return True
    tensor = topology.tensor_of(sharding)
    if sharding.dim is None:
        return not tensor.is_first
    return tensor.rank % sharding.copies > 0
