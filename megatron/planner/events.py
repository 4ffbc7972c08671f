"""Steps of one device in a pass of a stage, in order, as planner/recorder.py notes them.

Computations follow each other on the device; messages follow each other on the links of their
group, each from where it is posted, and a `Wait` holds the device until its message is there. So
what hides a message is what stands between its `Post` and its `Wait`. A `Take` is a tensor's
memory, a `Give` the moment from which nothing refers to it any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from megatron.kernels.work import Attention, Computation, Memory, Product


class Again(NamedTuple):
    """Computation that recomputation repeats."""

    operation: Computation


class Message(NamedTuple):
    """Collective of the tensor-parallel group over a tensor of `bytes` bytes in all."""

    kind: str
    bytes: int


class Post(NamedTuple):
    """Start of a message, with its number in the trace."""

    message: Message
    number: int


class Wait(NamedTuple):
    """Point at which the device needs the message of this number; one posted in an earlier pass has
    long arrived.
    """

    number: int


class Take(NamedTuple):
    """Memory of `bytes` bytes, before an allocator rounds them, for the tensor `id` of the trace.

    category  "activations" (made in a forward pass), "temporary" or "logits" (made in a backward
              pass)
    """

    bytes: int
    id: int
    category: str


class Give(NamedTuple):
    """Release of the memory of the tensor `id`."""

    id: int


Step = Product | Attention | Memory | Again | Post | Wait | Take | Give


@dataclass(frozen=True, eq=False)
class Pass:
    """Steps of a pass, and for each the path of the module that runs it ("" for none)."""

    steps: tuple[Step, ...]
    labels: tuple[str, ...]

    def computations(self, *, again: bool | None = None) -> Iterator[Computation]:
        """Yield the computations in order; `again` True or False: only those of recomputation, or
        only the others.
        """
        return (operation for _, operation in self.labelled(again=again))

    def labelled(self, *, again: bool | None = None) -> Iterator[tuple[str, Computation]]:
        """Yield the computations as above, each with the module that runs it."""
        for label, step in zip(self.labels, self.steps, strict=True):
            if isinstance(step, Again):
                if again is not False:
                    yield label, step.operation
            elif isinstance(step, Product | Attention | Memory) and again is not True:
                yield label, step

    def messages(self) -> Iterator[Message]:
        """Yield the messages in order."""
        return (step.message for step in self.steps if isinstance(step, Post))

    def flops(self, *, again: bool | None = None) -> float:
        """Count FLOPs of matrix products and attention."""
        return sum(o.flops for o in self.computations(again=again) if not isinstance(o, Memory))


class Parameter(NamedTuple):
    """Parameter on one tensor rank. shape: here, with padding; whole: of the model's, without.

    dim      that tensor ranks divide; None where all hold the same
    partial  its gradients on the tensor ranks are terms of a sum
    """

    name: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dim: int | None
    decays: bool
    tied: bool
    partial: bool

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, eq=False)
class Part:
    """Part of the model. backward is whole; inputs and weights are the halves of a split backward
    pass. Tensors and messages have numbers that are the same in all four: what `forward` takes and
    does not give is kept for `backward`, or for `inputs`, whose rest is kept for `weights`.
    hands_on: bytes of the output, which the next part keeps; tables: bytes that the first pass of a
    run makes and all later ones use."""

    parameters: tuple[Parameter, ...]
    hands_on: int
    tables: int
    forward: Pass
    backward: Pass
    inputs: Pass
    weights: Pass

    @property
    def elements(self) -> int:
        """Number of all parameters on one tensor rank."""
        return sum(p.elements for p in self.parameters)

    def padding(self, ranks: int) -> float:
        """Return the share of the matrices that tensor ranks divide, of so many ranks, that only
        pads.
        """
        whole = sum(prod(p.whole) for p in self.parameters if p.dim is not None)
        return 1.0 - whole / (ranks * sum(p.elements for p in self.parameters if p.dim is not None))


@dataclass(frozen=True, eq=False)
class Trace:
    """Parts of a model's stages, for one micro-batch size.

    embedding  on the first stage
    layer      one layer; with selective recomputation as it is set
    again      one layer that keeps its input alone and runs forward once more in its backward pass;
               None where no layer does (recomputation is not "full")
    head       last norm, output layer and loss, on the last stage
    """

    embedding: Part
    layer: Part
    again: Part | None
    head: Part
