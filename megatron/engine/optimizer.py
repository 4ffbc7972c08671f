"""The torch optimizer of this rank's master weights, its parameter groups and fragments."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron.engine.optimizer_state import OptimizerState
from megatron.errors import ConfigError
from megatron.kernels.choose import choose_fusions, fused_adam
from megatron.kernels.ops.optimizer import FusedAdamW, Untraced
from megatron.parallel.collectives import gather_objects
from megatron.parallel.sharding import Sharding, sharding_of
from megatron.parallel.topology import Topology

if TYPE_CHECKING:
    from megatron.config import Config

WantsWhole = Callable[[str, tuple[int, ...]], bool]


def unique_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trainable parameters in order; a weight that two layers share appears once."""
    return [p for p in module.parameters() if p.requires_grad]


def parameter_groups(
    parameters: Sequence[torch.nn.Parameter],
    weight_decay: float,
    bucket_elements: float = math.inf,
    whole: WantsWhole | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups: first those with weight decay, then those without, cut into buckets.

    Each kind is in the reverse of the order given, which is about the order in which a backward
    pass produces gradients. A group has at most `bucket_elements` unless one parameter has more.
    The tied embedding is a separate group, so that the first and the last stage divide it alike
    over their data-parallel ranks. So are parameters that the optimizer wants `whole`, by global
    name and shape.

    A group's key `decays` says whether its weight decay follows the schedule, its key `whole`
    whether it consists of whole parameters.
    """
    kinds: dict[tuple[bool, bool, bool], list[list[torch.nn.Parameter]]] = {}
    for p in reversed(parameters):
        s = sharding_of(p)
        wanted = whole is not None and bool(whole(s.name, s.global_shape))
        buckets = kinds.setdefault((not s.decay, wanted, s.tied), [[]])
        elements = sum(q.numel() for q in buckets[-1])
        if elements and elements + p.numel() > bucket_elements and not s.tied:
            buckets.append([])
        buckets[-1].append(p)
    return [
        {
            "params": bucket,
            "weight_decay": 0.0 if spared else weight_decay,
            "decays": not spared,
            "whole": wanted,
        }
        for (spared, wanted, _), buckets in sorted(kinds.items())
        for bucket in buckets
    ]


def check_groups(groups: list[dict[str, Any]], topology: Topology) -> None:
    """Raise ConfigError, on every rank, where a model-parallel rank has no parameters to train."""
    trains = gather_objects(bool(groups), topology.model)
    without = [rank for rank, some in zip(topology.model.ranks, trains, strict=True) if not some]
    if without:
        raise ConfigError(
            f"ranks {without} have no parameters to train: use fewer pipeline stages or another "
            "--pipeline-layout, so that no stage is without layers"
        )


def build_optimizer(
    groups: list[dict[str, Any]], config: Config, device: torch.device
) -> torch.optim.Optimizer:
    """Make the AdamW or SGD of `config.optimizer`.

    AdamW is apex's where --optimizer-implementation asks for it and it runs on this device; our
    kernel where megatron.kernels.choose says so; otherwise torch's fused one.
    """
    settings, kernels = config.optimizer, config.kernels
    if settings.optimizer == "sgd":
        return SGD(groups, lr=settings.lr, momentum=settings.sgd_momentum, fused=True)
    betas, eps = (settings.adam_beta1, settings.adam_beta2), settings.adam_eps
    if kernels.optimizer_implementation == "apex" and fused_adam(device.type).usable:
        apex: Any = importlib.import_module("apex.optimizers").FusedAdam
        made: torch.optim.Optimizer = apex(
            groups, lr=settings.lr, betas=betas, eps=eps, adam_w_mode=True
        )
        for group in made.param_groups:
            group["step"] = 0
        return made
    if choose_fusions(kernels, device, config.precision.dtype_name).optimizer:
        return FusedAdamW(groups, lr=settings.lr, betas=betas, eps=eps)
    return AdamW(groups, lr=settings.lr, betas=betas, eps=eps, fused=True)


def create_state(optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Create the optimizer's state as zeros.

    torch creates it at the first step. A fresh engine needs it earlier to load a checkpoint, and it
    is better to run out of memory at the start.
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
    """Return the number of steps that the bias correction has counted; 0 if it counts none."""
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


def untraced_step(optimizer: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the method `step` of one of torch's optimizers without its compiler mark."""
    step: Callable[..., Any] = inspect.unwrap(optimizer.step)
    return torch.no_grad()(step)


class AdamW(Untraced, torch.optim.AdamW):
    """torch.optim.AdamW."""

    step = untraced_step(torch.optim.AdamW)


class SGD(Untraced, torch.optim.SGD):
    """torch.optim.SGD."""

    step = untraced_step(torch.optim.SGD)


# -- parts of parameters ---------------------------------------------------------------------------
#
# ZeRO concatenates the parameters of a group and gives each data-parallel rank one range of the
# result. A range of a row-major tensor consists of a few rectangular parts; each has a place in the
# global tensor, whatever the layout.

Index = tuple[int, ...]


def boxes(start: int, stop: int, shape: Sequence[int]) -> list[tuple[Index, Index]]:
    """Return elements [start, stop) of a row-major array as rectangular parts (offsets, sizes).

    They are in order, and at most 2 * dimensions - 1.

    >>> boxes(2, 9, (3, 4))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found = []
    while start < stop:
        offset = tuple(start // stride % n for stride, n in zip(strides, shape, strict=True))
        dim = 0  # the outermost dimension of which a whole slice begins here
        while start % strides[dim] or start + strides[dim] > stop:
            dim += 1
        count = min((stop - start) // strides[dim], shape[dim] - offset[dim])
        found.append((offset, (*(1,) * dim, count, *shape[dim + 1 :])))
        start += count * strides[dim]
    return found


@dataclass(frozen=True)
class Fragment:
    """Part of a local parameter whose optimizer state this rank holds.

    It is the range [start, start + numel) of the parameter.

    master   fp32 weights, a flat view into the optimizer's partition  # [numel]
    moments  the optimizer's state by name, flat views like `master`
    """

    parameter: torch.nn.Parameter
    sharding: Sharding
    start: int
    numel: int
    master: torch.Tensor
    moments: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def real(self, flat: torch.Tensor) -> Iterator[tuple[Index, torch.Tensor]]:
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
                place = zip(offset, self.sharding.offset, strict=True)
                yield tuple(o + s for o, s in place), view


def is_copy(parameter: torch.nn.Parameter, topology: Topology) -> bool:
    """Return whether another rank of the model group holds the same values and counts them.

    True for the last stage's tied embedding, and on all but the first of the tensor ranks that hold
    the same.
    """
    sharding = sharding_of(parameter)
    if sharding.tied and topology.embedding is not None and topology.pipeline.is_last:
        return True
    if sharding.dim is None:
        return not topology.tensor.is_first
    return topology.tensor.rank % sharding.copies > 0
