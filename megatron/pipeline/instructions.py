"""The words of a schedule: instructions, and the lists of them that the ranks of a pipeline run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


class Op(IntEnum):
    """Kind of an instruction. BACKWARD is the whole backward pass; zero-bubble schedules split it
    in two.

    Numbered as csrc/schedule_clock.cpp does.
    """

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    SEND_FORWARD = 4
    RECV_FORWARD = 5
    SEND_BACKWARD = 6
    RECV_BACKWARD = 7

    @property
    def letters(self) -> str:
        """A short name: F, B, I, W, SF, RF, SB, RB."""
        return ("F", "B", "I", "W", "SF", "RF", "SB", "RB")[self]


COMPUTE = frozenset((Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
SENDS = frozenset((Op.SEND_FORWARD, Op.SEND_BACKWARD))
RECEIVES = frozenset((Op.RECV_FORWARD, Op.RECV_BACKWARD))

SENDS_IN_FLIGHT = 4
"""Messages that a rank has on their way at most: their tensors are kept until they have left, and
some backends (gloo) only report it to a wait, so the oldest is waited for. Waiting cannot deadlock:
the schedules run even where every send blocks."""

_PEER_OFFSET = {Op.SEND_FORWARD: 1, Op.RECV_FORWARD: -1, Op.SEND_BACKWARD: -1, Op.RECV_BACKWARD: 1}


class Instruction(NamedTuple):
    """One step of one rank.

    `stage` is the global stage that computes, sends or receives: chunk * pipeline size + pipeline
    rank. A message appears twice, as SEND under the stage that produced it and as RECV under the
    stage that needs it.
    """

    op: Op
    stage: int
    micro_batch: int

    @property
    def peer_stage(self) -> int:
        """The global stage at the other end of this message."""
        return self.stage + _PEER_OFFSET[self.op]

    def __str__(self) -> str:
        return f"{self.op.name} of stage {self.stage}, micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """Instructions of every rank of a pipeline for one step, in order. Index it with a pipeline
    rank.
    """

    name: str
    pipeline_size: int
    chunks: int
    micro_batches: int
    forward_only: bool
    ranks: tuple[tuple[Instruction, ...], ...] = field(repr=False)

    @property
    def num_stages(self) -> int:
        return self.pipeline_size * self.chunks

    def __getitem__(self, rank: int) -> tuple[Instruction, ...]:
        return self.ranks[rank]

    def __iter__(self) -> Iterator[tuple[Instruction, ...]]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)
