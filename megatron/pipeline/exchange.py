"""Point-to-point messages between neighbouring pipeline ranks.

Sends and receives are posted one by one, without tags and without batching. On NCCL and RCCL the
messages of a communicator run in the order in which they were posted, and the first message of a
pair sets up its communicator, which holds up both hosts. Neither can deadlock, because a schedule
lists the messages of all ranks in one common sequence (lists.py). Do not post a message that is not
in the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.errors import LaunchError
from megatron.parallel.topology import Group
from megatron.pipeline.instructions import SENDS, SENDS_IN_FLIGHT, Instruction


class _Message(NamedTuple):
    instruction: Instruction
    work: Any
    tensor: torch.Tensor


class Exchange:
    """The messages of this rank during one pass over a schedule."""

    def __init__(self, pipeline: Group) -> None:
        self._pipeline = pipeline
        self._sent: deque[_Message] = deque()
        self._received: dict[Instruction, _Message] = {}

    def send(self, instruction: Instruction, tensor: torch.Tensor) -> None:
        """Start to send `tensor`; it is kept alive until it has left and must not change until
        then.
        """
        tensor = tensor.contiguous()
        self._release(SENDS_IN_FLIGHT - 1)
        with self._recorded(instruction, tensor):
            work = dist.isend(tensor, self._peer(instruction), group=self._pipeline.handle)
        self._sent.append(_Message(instruction, work, tensor))

    def receive(
        self,
        instruction: Instruction,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Post a receive; `take` with the same instruction hands over the tensor."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=device)
        with self._recorded(instruction, buffer):
            work = dist.irecv(buffer, self._peer(instruction), group=self._pipeline.handle)
        self._received[instruction] = _Message(instruction, work, buffer)

    def take(self, instruction: Instruction) -> torch.Tensor:
        """The tensor of a posted receive, once it is there."""
        message = self._received.pop(instruction)
        with self._recorded(instruction, message.tensor):
            message.work.wait()
        return message.tensor

    def finish(self) -> None:
        """Wait until everything sent has left."""
        self._release(0)

    def _release(self, keep: int) -> None:
        """Let go of sent tensors: of those that have left, and of the oldest until at most `keep`
        remain.
        """
        while self._sent:
            oldest = self._sent[0]
            with self._blame(oldest.instruction):
                left = oldest.work.is_completed()
            if not left:
                if len(self._sent) <= keep:
                    return
                with self._recorded(oldest.instruction, oldest.tensor):
                    oldest.work.wait()
            self._sent.popleft()

    def _peer(self, instruction: Instruction) -> int:
        """Global rank at the other end."""
        return self._pipeline.ranks[instruction.peer_stage % self._pipeline.size]

    @contextmanager
    def _recorded(self, instruction: Instruction, tensor: torch.Tensor) -> Iterator[None]:
        """A message that may hold up this rank; an error names the neighbour."""
        flight, call = self._pipeline.flight, b"send" if instruction.op in SENDS else b"receive"
        flight.enter_message(call, self._pipeline.kind, tensor.nbytes, self._peer(instruction))
        with self._blame(instruction):
            yield
        flight.leave()

    @contextmanager
    def _blame(self, instruction: Instruction) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            own, peer = self._pipeline.ranks[self._pipeline.rank], self._peer(instruction)
            raise LaunchError(
                f"rank {own} lost its pipeline neighbour, rank {peer}, during {instruction}: "
                f"{error}. "
                f"Rank {peer} has died, hangs, or lost a neighbour of its own: look for the first "
                "error in its log"
            ) from error
