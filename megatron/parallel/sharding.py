"""Metadata of a parameter: which shard of which global tensor a rank has, and how it is used.

Every parameter has a `Sharding` as `parameter.sharding`. From it the engine derives how gradients
are reduced and which optimizer state belongs to the parameter, the checkpoint its name and offset,
and the planner the cost of all this. None of them depends on the layer that made the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Kind = Literal["hidden", "embedding", "output", "vector"]


def kind_of(name: str, global_shape: Sequence[int]) -> Kind:
    """Return the kind of a parameter, on which its optimizer and its learning rate may depend.

    hidden     a layer's matrix, from features to features, or several of them in 3 or 4 dimensions
    embedding  a table from tokens or positions to features
    output     any other matrix, normally from features to the vocabulary
    vector     a norm, a bias, or a convolution of single channels

    A tied embedding is an embedding. A router, or the gate of a shared expert, is an output, from
    features to experts.

    >>> kind_of("layers.0.mlp.dense_h_to_4h.weight", (2, 8, 4))
    'hidden'
    >>> kind_of("layers.0.mlp.dense_h_to_4h.bias", (2, 8))
    'vector'
    """
    if len(global_shape) < 2 or name.endswith((".bias", ".conv1d.weight")):
        return "vector"
    if name.startswith("layers."):
        return "output" if name.endswith((".router.weight", ".gate.weight")) else "hidden"
    return "embedding" if name.startswith("embedding.") else "output"


@dataclass(frozen=True)
class Sharding:
    """A shard of a global tensor.

    name             unique name in the whole model, the same on any layout
    global_shape     shape without padding
    shape            shape of the local tensor, with padding
    offset           global index of the local tensor's first element
    extent           size of the real part of the local tensor, from its first element; the rest is
                     padding
    dim              the dimension that tensor parallelism divides; None if every tensor rank holds
                     the same values
    partial_gradient whether the gradients of the tensor ranks are terms of a sum; None: derived
                     from the autograd graph of the first forward pass (engine/gradients.py)
    tied             whether this is the tied embedding weight, held by the first and the last stage
    decay            whether weight decay applies
    copies           number of neighbouring tensor ranks that hold this shard of a divided
                     dimension; if there are several, their gradients are terms of a sum
    base_shape       global shape in the base model of muP; None without muP
    fp32             whether forward and backward passes use it in fp32 even if other weights are
                     16-bit
    experts          whether expert-parallel ranks hold different slices of dimension 0; then the
                     ranks that divide each expert take the place of the tensor ranks above
                     (Topology.tensor_of)
    frozen           in ZeRO's plan: whether it does not train. Parameters themselves have
                     requires_grad
    """

    name: str
    global_shape: tuple[int, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    dim: int | None = None
    partial_gradient: bool | None = None
    tied: bool = False
    decay: bool = True
    copies: int = 1
    base_shape: tuple[int, ...] | None = None
    fp32: bool = False
    experts: bool = False
    frozen: bool = False

    @property
    def elements(self) -> int:
        """Return the number of elements of the local tensor."""
        return math.prod(self.shape)

    @property
    def of_vocabulary(self) -> bool:
        """Return whether this is the word embedding or the output layer."""
        inside = self.name.startswith(("layers.", "embedding.position"))
        return self.kind in ("embedding", "output") and not inside

    @property
    def kind(self) -> Kind:
        return kind_of(self.name, self.global_shape)

    @property
    def growth(self) -> tuple[float, float]:
        """Return the ratios of outputs and of inputs to the base model's, for muP.

        A vector has only outputs. The features of a table are its inputs.
        """
        shape = self.global_shape
        base = self.base_shape or shape
        if self.kind == "vector":
            return math.prod(shape) / math.prod(base), 1.0
        return math.prod(shape[:-1]) / math.prod(base[:-1]), shape[-1] / base[-1]


@dataclass(frozen=True)
class Rows:
    """Rows of a global tensor that a tensor rank holds if the split is uneven.

    copies  see Sharding
    """

    first: int
    count: int
    copies: int = 1


def shard(
    name: str,
    global_shape: Sequence[int],
    dim: int | None,
    rank: int,
    size: int,
    *,
    padded: int | None = None,
    **properties: Any,
) -> Sharding:
    """Return the shard of tensor rank `rank` of `size`; dimension `dim` is split into equal parts.

    If `dim` is None, the shard is the full tensor. `padded` is the padded length of `dim`, a
    multiple of `size`. `properties` are further fields of the Sharding.

    >>> shard("w", (6, 4), 0, 1, 2).offset
    (3, 0)
    >>> shard("e", (10, 4), 0, 1, 2, padded=16).extent
    (2, 4)
    """
    offset = [0] * len(global_shape)
    extent = list(global_shape)
    shape = list(global_shape)
    if dim is not None:
        total = padded or global_shape[dim]
        assert total % size == 0, (
            f"{name}: dimension {dim} of length {total} does not divide by {size}"
        )
        each = total // size
        offset[dim] = min(rank * each, global_shape[dim])
        extent[dim] = max(0, min(each, global_shape[dim] - rank * each))
        shape[dim] = each
    sizes = tuple(global_shape), tuple(shape), tuple(offset), tuple(extent)
    return Sharding(name, *sizes, dim, **properties)


def attach(
    parameter: torch.nn.Parameter, sharding: Sharding, tensor_size: int
) -> torch.nn.Parameter:
    """Set a parameter's `sharding`, and the attribute that marks a shard for DeepSpeed."""
    parameter.sharding = sharding  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = sharding.dim is not None and tensor_size > 1  # type: ignore[attr-defined]
    return parameter


def sharding_of(parameter: torch.Tensor) -> Sharding:
    """Return the Sharding of a parameter."""
    sharding: Sharding | None = getattr(parameter, "sharding", None)
    assert sharding is not None, (
        "parameter without sharding: create it through megatron.layers.context"
    )
    return sharding
