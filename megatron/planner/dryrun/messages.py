"""What ranks send, receive and take part in. Needs no torch."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.pipeline.instructions import SENDS, Instruction


class Message(NamedTuple):
    """One message between two ranks, as one of them posts it."""

    instruction: Instruction
    peer: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def sends(self) -> bool:
        return self.instruction.op in SENDS

    @property
    def mirrored(self) -> tuple[bool, int, int, tuple[int, ...], str]:
        """What the other side's message must say of itself: whether it sends, stage, micro-batch, shape, dtype."""
        i = self.instruction
        return not self.sends, i.peer_stage, i.micro_batch, self.shape, self.dtype

    @property
    def itself(self) -> tuple[bool, int, int, tuple[int, ...], str]:
        i = self.instruction
        return self.sends, i.stage, i.micro_batch, self.shape, self.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} of {self.dtype} ({self.instruction})"


class Collective(NamedTuple):
    """One collective of a group, as one member posts it.

    shapes   of what goes in, then of what comes out
    content  the dtype, or what is said where that is no tensor
    """

    call: str
    ranks: Sequence[int]
    shapes: tuple[tuple[int, ...], ...]
    content: str

    @property
    def same_on_all(self) -> tuple[str, tuple[tuple[int, ...], ...], str]:
        return self.call, self.shapes, self.content

    def __str__(self) -> str:
        shapes = " -> ".join(str(list(shape)) for shape in self.shapes)
        return f"{self.call} {shapes} of {self.content}" if shapes else f"{self.call} of {self.content}"


@dataclass
class Log:
    """What one rank posted, in order."""

    messages: list[Message] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)

    def copy(self) -> Log:
        return Log(self.messages[:], self.collectives[:])

    def clear(self) -> None:
        self.messages.clear()
        self.collectives.clear()
