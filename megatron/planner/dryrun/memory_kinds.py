"""The categories under which a rank's memory is counted. Needs no torch."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

CATEGORIES = ("weights", "master", "moments", "gradients", "activations", "logits", "buffers", "temporary")
"""weights      of forward and backward
master       fp32 weights of the optimizer; nothing in fp32, where the weights are it
moments      the optimizer's state
gradients    sums in fp32 or bf16
activations  made in a forward pass and not yet freed by a backward pass, what it needs only for itself included
logits       of a chunk of tokens, and their gradient
buffers      messages between pipeline stages, and the micro-batches
temporary    made in a backward pass, recomputed activations included, and by the optimizer"""


@dataclass(frozen=True)
class Held:
    """One piece of memory.

    what   shape and dtype of the tensor with which it was made, and what it holds where that is known
    when   what the rank did, e.g. "FORWARD of stage 3, micro-batch 2"; "" for what stays
    where  the line of this package that asked for it; "" for what stays
    """

    n_bytes: int
    category: str
    what: str
    when: str
    where: str

    def __str__(self) -> str:
        made = ", ".join(part for part in (self.when, self.where) if part)
        return f"{self.what} ({self.category}{'; ' + made if made else ''})"


class Unit(NamedTuple):
    """What figures are given in."""

    name: str
    n_bytes: float

    @classmethod
    def of(cls, most_bytes: float) -> Unit:
        """GiB, or MiB where all is small."""
        return cls("GiB", 2.0**30) if most_bytes >= 2**29 else cls("MiB", 2.0**20)

    def show(self, n_bytes: float) -> str:
        """
        >>> Unit.of(2**40).show(3 * 2**30), Unit.of(2**40).show(5 * 2**20), Unit.of(0).show(0)
        ('3.00', '0.005', '0')
        """
        value = n_bytes / self.n_bytes
        return "0" if not n_bytes else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"
