"""Steps of one device in a module's pass, in order, as recorded by planner/recorder.py.

Computations run one after another on the device, messages one after another on the links of
their group, and a `Wait` blocks the device until its message has arrived. The computations between
a `Post` and its `Wait` therefore overlap with the message. An `Alloc` allocates a tensor's memory,
and a `Free` releases it once no reference is left. A `Sum` marks the beginning or the end of an
addition to a gradient sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from megatron.kernels.cost import Attention, Computation, Memory, Product
from megatron.parallel.sharding import Sharding


class Recomputed(NamedTuple):
    """Computation that recomputation repeats."""

    operation: Computation


class GroupMessage(NamedTuple):
    """Collective in a group, for a whole tensor of `bytes` bytes.

    kind   as in compute.py, or "ring". For "all_to_all", `bytes` are held by each rank for all
           members, itself included; for "ring", each rank sends `bytes` to the next
    group  name of the group in Channels.lanes
    """

    kind: str
    bytes: float
    group: str = "tensor"


class Post(NamedTuple):
    """Start of a message, with its number in the trace."""

    message: GroupMessage
    number: int


class Wait(NamedTuple):
    """Wait for the message of this number; messages of earlier passes have already arrived."""

    number: int


class Alloc(NamedTuple):
    """Allocation of `bytes` bytes, before the allocator's rounding, for the tensor `id`.

    category  in a trace "activations" (made in a forward pass), or "temporary" or "logits" (made in
              a backward pass); in a dry run any of memory.CATEGORIES
    """

    bytes: int
    id: int
    category: str


class Free(NamedTuple):
    """Release of the memory of the tensor `id`."""

    id: int


class Sum(NamedTuple):
    """Use of a gradient sum.

    parameter  index of its parameter among the module's parameters
    complete   whether a contribution is complete; otherwise one is about to be added
    """

    parameter: int
    complete: bool


PassEvent = Product | Attention | Memory | Recomputed | Post | Wait | Alloc | Free | Sum


@dataclass(frozen=True, eq=False)
class Pass:
    """Steps of a pass, with the path of the module that runs each one ("" for none)."""

    steps: tuple[PassEvent, ...]
    labels: tuple[str, ...]

    def computations(self, *, recompute: bool | None = None) -> Iterator[Computation]:
        """Yield computations in order; `recompute`: only (True) or no (False) repeated ones."""
        return (operation for _, operation in self.labelled(recompute=recompute))

    def labelled(self, *, recompute: bool | None = None) -> Iterator[tuple[str, Computation]]:
        """Yield the same computations, each after the path of the module that runs it."""
        for label, step in zip(self.labels, self.steps, strict=True):
            if isinstance(step, Recomputed):
                if recompute is not False:
                    yield label, step.operation
            elif isinstance(step, Product | Attention | Memory) and recompute is not True:
                yield label, step

    def messages(self) -> Iterator[GroupMessage]:
        """Yield the messages in order."""
        return (step.message for step in self.steps if isinstance(step, Post))

    def flops(self, *, recompute: bool | None = None) -> float:
        """Count FLOPs of matrix products and attention; `recompute` as in `computations`."""
        return sum(
            o.flops for o in self.computations(recompute=recompute) if not isinstance(o, Memory)
        )


@dataclass(frozen=True, eq=False)
class TracedModule:
    """Module of the model with its passes.

    `backward` is the whole backward pass; `inputs` and `weights` are its two halves if it is split.
    All four passes use the same numbers for tensors and messages: tensors that `forward` allocates
    and does not free are kept for `backward`, or for `inputs`, which keeps the rest for `weights`.

    parameters  shardings in order of use, with partial_gradient as determined by a forward pass
    hands_on    bytes of the output, which the next module keeps
    tables      bytes that the first pass of a run allocates and all later passes use
    """

    parameters: tuple[Sharding, ...]
    hands_on: int
    tables: int
    forward: Pass
    backward: Pass
    inputs: Pass
    weights: Pass

    @property
    def elements(self) -> int:
        """Number of parameters on one tensor rank."""
        return sum(p.elements for p in self.parameters)

    def padding(self, ranks: int) -> float:
        """Return the share of padding in the matrices sharded over `ranks` tensor ranks."""
        of_ranks = [p for p in self.parameters if p.dim is not None]
        if not of_ranks:
            return 0.0
        unpadded = sum(prod(p.global_shape) for p in of_ranks)
        return 1.0 - unpadded / (ranks * sum(p.elements for p in of_ranks))


@dataclass(frozen=True, eq=False)
class Trace:
    """Modules of a model's stages, for one micro-batch size.

    embedding  on the first stage
    kinds      for each kind of layer (trace.kinds_of_layers): a layer, with selective recomputation
               if configured; and a layer that keeps only its input and repeats its forward pass in
               the backward pass, or None if recomputation is not "full"
    head       last norm, output layer and loss, on the last stage
    """

    embedding: TracedModule
    kinds: tuple[tuple[TracedModule, TracedModule | None], ...]
    head: TracedModule

    @property
    def layer(self) -> TracedModule:
        """A layer of the first kind."""
        return self.kinds[0][0]

    @property
    def recompute(self) -> TracedModule | None:
        """A layer of the first kind with full recomputation, if configured."""
        return self.kinds[0][1]

    def layer_of(self, kind: int) -> tuple[TracedModule, TracedModule]:
        """Return a layer of one kind without and with recomputation."""
        layer, recompute = self.kinds[kind]
        return layer, recompute or layer
