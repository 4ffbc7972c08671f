"""Costs of operators, and marks for code whose cost is not evident from its operators.

Our operators declare their cost in their definition (operators.operator). Code that consists of
several operators but counts as one computation is marked with `counts_as`; code that recomputes a
value is marked with `recomputed`. The planner's recorder (planner/recorder.py) reads both marks,
and the recording of a training step (training/report/timeline.py) reads those of recomputation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol


class Product(NamedTuple):
    """`batch` matrix products [m, k] x [k, n].

    moved: bytes moved in addition to those of the factors and a result in their dtype, for a sum to
    which the product is added; the kernel moves them while it multiplies.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    moved: int = 0

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch


class Attention(NamedTuple):
    """Causal attention that stores no scores: by flash-attn, by torch or in blocks.

    batch, seq, head_dim  sizes of the queries [batch, heads, seq, head_dim]
    heads     query heads on this device
    backward  whether this is the backward pass
    keys      the most keys that a query sees; None: the whole sequence
    """

    batch: int
    heads: int
    seq: int
    head_dim: int
    backward: bool = False
    keys: int | None = None

    @property
    def flops(self) -> float:
        """Return the FLOPs as in model/formulas.py.

        Masked pairs of a query and a key count as well, unless they are outside the window; a
        backward pass counts as two forward passes.
        """
        pairs = 4.0 * self.batch * self.heads * self.seq * (self.keys or self.seq)
        return (2 if self.backward else 1) * pairs * self.head_dim


class Memory(NamedTuple):
    """Memory-bound kernels: their number, and the total bytes that they read and write.

    kind  "norm", "activation", "residual" (bias, dropout, residual sum), "loss", "embedding" or
          "copy" (the rest)
    """

    bytes: int
    kernels: int = 1
    kind: str = "copy"


Computation = Product | Attention | Memory


class CostRecorder(Protocol):
    """A recorder that is notified when a marked piece of code begins and ends."""

    def enter(self, scope: Scope) -> None: ...

    def leave(self, scope: Scope) -> None: ...


_followers: list[CostRecorder] = []


class Scope:
    """A marked piece of code.

    work: the computation that its operators form together; None: they recompute a value.
    """

    __slots__ = ("work",)

    def __init__(self, work: Computation | None = None) -> None:
        self.work = work

    def __enter__(self) -> None:
        for follower in _followers:
            follower.enter(self)

    def __exit__(self, *_: object) -> None:
        for follower in _followers:
            follower.leave(self)


counts_as = Scope
"""Creates a context whose operators together count as one computation."""
recomputed = Scope
"""Creates a context whose operators recompute a value that was not kept."""


@contextlib.contextmanager
def followed(follower: CostRecorder) -> Iterator[None]:
    """Return a context in which `follower` records."""
    _followers.append(follower)
    try:
        yield
    finally:
        _followers.remove(follower)
