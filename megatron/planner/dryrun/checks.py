"""What the ranks of a job post, and whether it goes together. Needs no torch."""
from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.pipeline.instructions import RECEIVES, SENDS, Instruction


class Finding(NamedTuple):
    """What is wrong. kind: "memory", "messages" or "error" (the code could not run)."""

    kind: str
    rank: int
    text: str


class Message(NamedTuple):
    """One message between two pipeline ranks, as one of them posts it."""

    instruction: Instruction
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{list(self.shape)} of {self.dtype} ({self.instruction})"


class Collective(NamedTuple):
    """One collective of a group, as one member posts it.

    shapes   of what goes in, then of what comes out
    content  the dtype, or what is said where that is no tensor
    """

    call: str
    shapes: tuple[tuple[int, ...], ...]
    content: str

    def __str__(self) -> str:
        return f"{self.call} {' -> '.join(str(list(shape)) for shape in self.shapes)} of {self.content}"


Collectives = Mapping[tuple[int, ...], Sequence[Collective]]
"""Those of one rank by the ranks of the group, in order."""


def check_messages(
    rank: int, posted: Sequence[Message], plan: Sequence[Instruction], shape: tuple[int, ...], dtype: str
) -> list[Finding]:
    """Find the first message of a rank that is not its schedule's, or not of this shape and dtype.

    Messages have no tags: the n-th that one rank sends to another is the n-th that the other receives from it. A
    schedule's own lists go together (pipeline/schedule.py), so each rank is held to its list.
    """
    expected = [Message(i, shape, dtype) for i in plan if i.op in SENDS | RECEIVES]
    for n, (here, there) in enumerate(itertools.zip_longest(posted, expected), 1):
        if here != there:
            text = f"its message {n} is {here or 'missing'}, and the other side waits for {there or 'none'}"
            return [Finding("messages", rank, text)]
    return []


def check_collectives(posted: Mapping[int, Collectives]) -> list[Finding]:
    """Find, for each two ranks that are members of one group, the first collective that they do not both post."""
    findings = []
    for (a, of_a), (b, of_b) in itertools.combinations(sorted(posted.items()), 2):
        for group in dict.fromkeys((*of_a, *of_b)):
            if a not in group or b not in group:
                continue
            for n, (x, y) in enumerate(itertools.zip_longest(of_a.get(group, ()), of_b.get(group, ())), 1):
                if x != y:
                    ranks = ", ".join(map(str, group[:4])) + (f", ... {group[-1]}" if len(group) > 4 else "")
                    text = f"collective {n} in the group of ranks {ranks} is {x or 'missing'}"
                    findings.append(Finding("messages", a, f"{text}, on rank {b} {y or 'missing'}"))
                    break
    return findings
