"""What one device does in a pass of a stage, in order: computations, and messages with the waits for them.

A pass is a tuple of steps. Computations follow each other on the device; messages follow each other on the links of the
tensor-parallel group, each from where it is posted, and a `Wait` holds the device until its message is there. So what
hides a message is what stands between its `Post` and its `Wait`, as in the layers.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Product(NamedTuple):
    """`batch` products [m, k] x [k, n]. moved: bytes read and written for a sum to which the product is added, beyond
    those of its result; the kernel moves them while it multiplies."""

    m: int
    n: int
    k: int
    batch: int = 1
    moved: float = 0.0

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch


class Attention(NamedTuple):
    """Causal attention that keeps no scores: flash-attn's, torch's or in blocks; `heads` of queries on this device."""

    batch: int
    heads: int
    seq: int
    head_dim: int
    backward: bool = False

    @property
    def flops(self) -> float:
        """As formulas.attention_score_flops counts: all pairs, the backward pass twice the forward's."""
        return (2 if self.backward else 1) * 4.0 * self.batch * self.heads * self.seq**2 * self.head_dim


class Memory(NamedTuple):
    """Memory-bound kernels that read and write so many bytes together.

    kind  "norm", "activation", "residual" (bias, dropout, residual sum), "loss", "embedding" or "copy" (the rest)
    """

    bytes: float
    kernels: int = 1
    kind: str = "copy"


class Again(NamedTuple):
    """A computation of recomputation."""

    operation: Product | Attention | Memory


class Message(NamedTuple):
    """A collective of the tensor-parallel group over a tensor of `bytes` bytes in all."""

    kind: str
    bytes: float


class Post(NamedTuple):
    """A message is started; `number` is its own in the pass."""

    message: Message
    number: int


class Wait(NamedTuple):
    """The device needs the message of this number. One that was posted in an earlier pass has long arrived."""

    number: int


Computation = Product | Attention | Memory
Step = Computation | Again | Post | Wait
Pass = tuple[Step, ...]


class Steps:
    """A pass while it is put together."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._posted = 0

    def run(self, *operations: Computation, again: bool = False) -> None:
        self._steps += [Again(operation) for operation in operations] if again else operations

    def post(self, kind: str, size: float) -> Wait:
        """Start a message; add what is returned where it is needed."""
        self._posted += 1
        self._steps.append(Post(Message(kind, size), self._posted))
        return Wait(self._posted)

    def wait(self, *messages: Wait) -> None:
        self._steps += messages

    def send(self, kind: str, size: float) -> None:
        """A message that is waited for at once."""
        self.wait(self.post(kind, size))

    def done(self) -> Pass:
        return tuple(self._steps)


def computations(steps: Iterable[Step], *, again: bool | None = None) -> Iterator[Computation]:
    """The computations of a pass; `again` True or False: only those of recomputation, or only the others."""
    for step in steps:
        if isinstance(step, Again):
            if again is not False:
                yield step.operation
        elif not isinstance(step, Post | Wait) and again is not True:
            yield step


def messages(steps: Iterable[Step]) -> Iterator[Message]:
    """The messages of a pass in their order."""
    return (step.message for step in steps if isinstance(step, Post))


def flops(steps: Iterable[Step], *, again: bool | None = None) -> float:
    """FLOPs of the matrix products and of attention, as formulas.py counts them."""
    return sum(
        operation.flops for operation in computations(steps, again=again) if not isinstance(operation, Memory)
    )


def as_again(steps: Iterable[Step]) -> Pass:
    """The same pass as recomputation."""
    return tuple(step if isinstance(step, Post | Wait | Again) else Again(step) for step in steps)
