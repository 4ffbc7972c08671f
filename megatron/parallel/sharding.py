"""The part of a global parameter that a local tensor holds.

Every parameter has a `Sharding` as `parameter.sharding`. The engine reads from it how gradients are
reduced, the checkpoint under which name and at which place a tensor is stored; neither needs to
know the layer that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sharding:
    """A shard of a global tensor.

    name             unique name in the whole model, the same on any layout
    global_shape     shape without padding
    offset           global index of the local tensor's first element
    extent           how much of the local tensor, from its first element, is real; the rest is
                     padding
    dim              the dimension that tensor parallelism divides; None when every tensor rank
                     holds the same values
    partial_gradient whether the gradients of the tensor ranks are terms of a sum; None leaves that
    to the autograd
                     graph of the first forward pass (engine/gradients.py)
    tied             whether this is the tied embedding weight, held by the first and the last stage
    decay            whether weight decay applies
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    dim: int | None = None
    partial_gradient: bool | None = None
    tied: bool = False
    decay: bool = True


def shard(
    name: str,
    global_shape: Sequence[int],
    dim: int | None,
    rank: int,
    size: int,
    *,
    padded: int | None = None,
    **properties: bool,
) -> Sharding:
    """Return the shard of tensor rank `rank` of `size` when dimension `dim` is cut into equal
    parts.

    `padded` is the padded length of `dim`, a multiple of `size`; entries beyond the global shape
    are not real.

    >>> shard("w", (6, 4), 0, 1, 2).offset
    (3, 0)
    >>> shard("e", (10, 4), 0, 1, 2, padded=16).extent
    (2, 4)
    """
    offset, extent = [0] * len(global_shape), list(global_shape)
    if dim is not None:
        total = padded or global_shape[dim]
        assert total % size == 0, (
            f"{name}: dimension {dim} of length {total} does not divide by {size}"
        )
        each = total // size
        offset[dim] = min(rank * each, global_shape[dim])
        extent[dim] = max(0, min(each, global_shape[dim] - rank * each))
    return Sharding(name, tuple(global_shape), tuple(offset), tuple(extent), dim, **properties)


def attach(
    parameter: torch.nn.Parameter, sharding: Sharding, tensor_size: int
) -> torch.nn.Parameter:
    """Put `sharding` on a parameter, with the attributes by which DeepSpeed knows sharded
    parameters.
    """
    parameter.sharding = sharding  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = sharding.dim is not None and tensor_size > 1  # type: ignore[attr-defined]
    return parameter


def sharding_of(parameter: torch.Tensor) -> Sharding:
    """Return the Sharding of a parameter."""
    found = getattr(parameter, "sharding", None)
    assert found is not None, (
        "parameter without sharding: create it through megatron.layers.context"
    )
    return found
