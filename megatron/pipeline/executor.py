"""Executes this rank's instructions in a pipeline schedule.

Chunks may be any callables that map a micro-batch and a hidden state to a hidden state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.errors import ConfigError, LaunchError
from megatron.parallel.collectives import post
from megatron.parallel.deferred_gradients import WeightGradients
from megatron.parallel.topology import Group, Topology
from megatron.pipeline.captured import Captures, Chunk, MicroBatch, Root, Slot
from megatron.pipeline.orders import (
    COMPUTE,
    SENDS,
    SENDS_IN_FLIGHT,
    AnyOrder,
    Instruction,
    Op,
    name_of,
    stage_owners,
)
from megatron.pipeline.schedule import build_rank_schedule

Shape = Sequence[int] | Callable[[MicroBatch], Sequence[int]]


class Executor:
    """Runs the forward and backward passes of this rank's chunks over a step's micro-batches.

    topology          has the pipeline group, and the device on which received tensors are
                      allocated.
    chunks            by global stage, those of this rank (orders.stage_owners): called as
                      chunk(micro_batch, hidden). The first stage gets hidden=None; the last stage
                      returns the scalar loss of the micro-batch, or [1 + k] with k figures after
                      it, the others a tensor like `message`. In training the value
                      of the loss is read after its backward pass, which may compute it.
    schedule          a name in SCHEDULES or an order function (orders.py), with the same number of
                      chunks on every rank.
    message           shape and dtype of the hidden state between stages; the shape may be a
                      function of the micro-batch.
    weight_gradients  the queue in which linear layers leave their weight gradients; needed only
                      by orders that split backward passes.
    before_training   called by `train` with the number of micro-batches, before the first pass: the
                      Engine uses it to find the last gradient of each parameter.
    after_backward    called with the global stage after each full backward pass, or after the
                      second half of one that is split.
    captures          records and replays the passes of training steps; None: all run eagerly.

    Every rank of the pipeline must call `train` and `evaluate` in the same order with the same
    number of micro-batches. Gradients are added to the parameters' accumulators, or else to
    `.grad`; the executor itself reduces nothing and changes no parameter. Raises ConfigError for
    chunks of other stages than this rank's, a schedule that is unknown or does not suit the sizes,
    and a missing queue of weight gradients; and MegatronError like build_schedule.
    """

    def __init__(
        self,
        topology: Topology,
        chunks: Mapping[int, Chunk],
        schedule: AnyOrder,
        message: tuple[Shape, torch.dtype],
        weight_gradients: WeightGradients | None = None,
        before_training: Callable[[int], None] | None = None,
        after_backward: Callable[[int], None] | None = None,
        captures: Captures | None = None,
        first_trained: int = 0,
    ) -> None:
        size = topology.pipeline.size
        rank = topology.pipeline.rank
        self.num_chunks = len(chunks)
        self.owners = stage_owners(schedule, size, self.num_chunks)
        stages = [stage for stage, owner in enumerate(self.owners) if owner == rank]
        if sorted(chunks) != stages:
            raise ConfigError(
                f"pipeline rank {rank} of {size} with {self.num_chunks} chunks runs the global "
                f"stages {stages}, but was given chunks for {sorted(chunks)}"
            )
        if (self.owners[0], self.owners[-1]) != topology.ends:
            raise ConfigError(
                f"schedule {name_of(schedule)!r} has the first and the last stage on pipeline "
                f"ranks {self.owners[0]} and {self.owners[-1]}, but the topology on "
                f"{' and '.join(map(str, topology.ends))}: pass its owners to Topology.create"
            )
        self.topology = topology
        self.chunks = chunks
        self.schedule = schedule
        self.message = message
        self.weight_gradients = weight_gradients
        self.before_training = before_training
        self.after_backward = after_backward
        self.captures = captures
        self.first_trained = first_trained
        # raises the errors of a schedule that suits no number of micro-batches
        self._plan(1, False)

    @property
    def last_stage(self) -> int:
        return len(self.owners) - 1

    def train(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_scale: float = 1.0,
        loss_weights: Sequence[float | Tensor] | None = None,
    ) -> list[Tensor]:
        """Add the gradients of loss_scale * sum(weight_i * loss_i) to the parameters.

        There is one loss weight per micro-batch, by default 1 / the number of micro-batches on all
        data-parallel ranks, so that values rounded to 16 bits do not depend on the layout. Each
        weight is a number or a scalar on the device, and is read after the forward pass of its
        micro-batch. Returns the detached, unscaled losses of the micro-batches in order on the rank
        of the last stage, and an empty list on other ranks. No value is copied to the host.

        Raises ConfigError for a wrong number of loss weights, an output of the wrong shape or
        dtype, a missing queue of weight gradients, and micro-batches or passes that `captures`
        cannot replay; and LaunchError, with the peer's rank, if a neighbour is lost.
        """
        count = len(micro_batches)
        plan = self._plan(count, False)
        weights = (
            [1 / (count * self.topology.data.size)] * count
            if loss_weights is None
            else loss_weights
        )
        if len(weights) != count:
            raise ConfigError(
                f"{len(weights)} loss weights for {count} micro-batches: give one per micro-batch"
            )
        if self.before_training:
            self.before_training(count)
        captures = self.captures
        if captures is None:
            return _Pass(self, micro_batches, loss_scale, weights).run(plan)
        with captures.stream():
            ready = captures if captures.begin(micro_batches) else None
            return _Pass(self, micro_batches, loss_scale, weights, ready).run(plan)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the losses of the micro-batches on the rank of the last stage, without gradients.

        Other ranks return an empty list.
        """
        with torch.no_grad():
            return _Pass(self, micro_batches, None, ()).run(self._plan(len(micro_batches), True))

    def new_message(self, micro_batch: MicroBatch) -> Tensor:
        """Allocate the hidden state that is passed between stages for this micro-batch."""
        shape, dtype = self.message
        shape = shape(micro_batch) if callable(shape) else shape
        return torch.empty(tuple(shape), dtype=dtype, device=self.topology.device)

    def _plan(self, micro_batches: int, forward_only: bool) -> tuple[Instruction, ...]:
        pipeline = self.topology.pipeline
        chunks = self.num_chunks
        plan = build_rank_schedule(
            self.schedule, pipeline.size, chunks, micro_batches, pipeline.rank, forward_only
        )
        # an order may split backward passes only with more micro-batches
        if self.weight_gradients is None and any(i.op is Op.BACKWARD_WEIGHT for i in plan):
            raise ConfigError(
                f"schedule {name_of(self.schedule)!r} needs weight_gradients: the queue that the "
                "linear layers share with it"
            )
        return plan


_NAMES = {op: op.name.encode() for op in Op}  # for the flight recorder


class _Saved(NamedTuple):
    """Saved state of a chunk's forward pass: its graph, its input, and its output's gradient.

    `root` leads to the graph; `gradient` is the list from which it takes the gradient (Root). For a
    recorded pass, `root` is its slot, which also holds the input.
    """

    root: Tensor | Slot
    hidden: Tensor | None
    gradient: list[Tensor]


class _Pass:
    """State of one call of train or evaluate."""

    def __init__(
        self,
        executor: Executor,
        micro_batches: Sequence[MicroBatch],
        loss_scale: float | None,
        weights: Sequence[float | Tensor],
        captures: Captures | None = None,
    ) -> None:
        self._executor = executor
        self._micro_batches = micro_batches
        self._loss_scale = loss_scale  # None when evaluating
        self._weights = weights
        self._exchange = StageMessages(executor.topology.pipeline, executor.owners)
        self._last_stage = executor.last_stage
        self._captures = captures
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._activations: dict[tuple[int, int], Tensor] = {}  # by the stage that produced them
        # gradients of inputs, by the stage that produced them
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._losses: dict[int, Tensor] = {}

    def run(self, instructions: Sequence[Instruction]) -> list[Tensor]:
        handlers: dict[Op, Callable[[Instruction], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.SEND_FORWARD: lambda i: self._exchange.send(i, self._activations.pop(i[1:])),
            Op.SEND_BACKWARD: lambda i: self._exchange.send(i, self._gradients.pop(i[1:])),
            Op.RECV_FORWARD: self._receive,
            Op.RECV_BACKWARD: self._receive,
        }
        flight = self._executor.topology.flight
        ends = self._executor.after_backward
        for instruction in instructions:
            flight.instruction(_NAMES[instruction.op], instruction.stage, instruction.micro_batch)
            handlers[instruction.op](instruction)
            if ends is not None and instruction.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                ends(instruction.stage)
            if instruction.op in COMPUTE:
                flight.computed()
        self._exchange.finish()
        flight.schedule_ends()
        return [self._losses[i] for i in sorted(self._losses)]

    def _receive(self, instruction: Instruction) -> None:
        micro_batch = self._micro_batches[instruction.micro_batch]
        self._exchange.receive(instruction, self._executor.new_message(micro_batch))

    def _input(self, stage: int, micro_batch: int) -> Tensor | None:
        if stage == 0:
            return None
        if stage - 1 in self._executor.chunks:
            return self._activations.pop((stage - 1, micro_batch))
        return self._exchange.take(Instruction(Op.RECV_FORWARD, stage, micro_batch))

    def _forward(self, instruction: Instruction) -> None:
        _, stage, index = instruction
        hidden = self._input(stage, index)
        if hidden is not None and self._loss_scale is not None:
            # a stage before which nothing trains sends back zeros
            hidden.requires_grad_(stage > self._executor.first_trained)
        micro_batch = self._micro_batches[index]
        slot = None
        if self._captures is not None:
            slot = self._captures.take(stage, micro_batch, hidden)
            output = slot.forward(micro_batch, hidden)
        else:
            output = self._executor.chunks[stage](micro_batch, hidden)
        gradient: list[Tensor] = []
        if stage == self._last_stage:
            if output.numel() == 0 or output.dim() > 1:
                raise ConfigError(
                    "the last stage must return a scalar loss, or [1 + k] with k figures after it, "
                    f"got shape {list(output.shape)}"
                )
            loss = output.detach()
            self._losses[index] = loss.reshape(()) if loss.numel() == 1 else loss
            if self._loss_scale is not None:
                of_loss = torch.zeros_like(loss)
                of_loss.view(-1)[:1].fill_(1.0).mul_(self._loss_scale * self._weights[index])
                gradient.append(of_loss)
        else:
            self._check_output(instruction, output, micro_batch)
            self._activations[stage, index] = output.detach()
        if slot is not None:
            self._saved[stage, index] = _Saved(slot, None, gradient)
        elif self._loss_scale is not None:
            root = Root.apply(output, gradient)  # type: ignore[no-untyped-call]
            self._saved[stage, index] = _Saved(root, hidden, gradient)

    def _check_output(
        self, instruction: Instruction, output: Tensor, micro_batch: MicroBatch
    ) -> None:
        shape, dtype = self._executor.message
        shape = shape(micro_batch) if callable(shape) else shape
        if tuple(output.shape) != tuple(shape) or output.dtype != dtype:
            raise ConfigError(
                f"{instruction} returned shape {list(output.shape)} of {output.dtype}, but the "
                f"next stage expects shape {list(shape)} of {dtype}: set message to the shape and "
                "dtype of the chunk's output"
            )

    def _backward(self, instruction: Instruction) -> None:
        _, stage, index = instruction
        saved = self._saved.pop((stage, index))
        if stage != self._last_stage:
            if stage + 1 in self._executor.chunks:
                gradient = self._gradients.pop((stage + 1, index))
            else:
                gradient = self._exchange.take(Instruction(Op.RECV_BACKWARD, stage, index))
            saved.gradient.append(gradient)
            del gradient  # its memory is free as soon as autograd has used it
        if isinstance(saved.root, Slot):
            self._repeat_backward(saved.root, saved.gradient.pop(), instruction)
            return
        if saved.root.requires_grad:  # a chunk may be frozen
            torch.autograd.backward(saved.root)
        if saved.hidden is not None:
            gradient_of_input = saved.hidden.grad
            if gradient_of_input is None:  # a chunk may not use its input
                gradient_of_input = torch.zeros_like(saved.hidden)
            self._gradients[stage, index] = gradient_of_input.detach()

    def _repeat_backward(self, slot: Slot, gradient: Tensor, instruction: Instruction) -> None:
        op, stage, index = instruction
        assert self._captures is not None, "a slot belongs to recorded passes"
        eager = self._captures.eager(stage, index)
        gradient_of_input = slot.backward(gradient, eager, op is Op.BACKWARD_INPUT)
        if gradient_of_input is not None:
            self._gradients[stage, index] = gradient_of_input
        if slot.loss is not None:
            self._losses[index] = slot.loss.clone()
        if op is Op.BACKWARD:
            slot.release()

    def _backward_input(self, instruction: Instruction) -> None:
        weight_gradients = self._executor.weight_gradients
        assert weight_gradients is not None, (
            "a split backward pass without a queue of weight gradients"
        )
        root = self._saved[instruction[1:]].root
        weight_gradients.begin()
        try:
            self._backward(instruction)
        finally:
            deferred = weight_gradients.take()
        if isinstance(root, Slot):
            deferred = root.later(deferred)
        self._deferred[instruction[1:]] = deferred

    def _backward_weight(self, instruction: Instruction) -> None:
        waiting = self._deferred.pop(instruction[1:])[::-1]
        with torch.no_grad():
            while waiting:
                waiting.pop()()  # frees its tensors before the next one runs


# --- messages
#
# Sends and receives are posted one by one, without tags. On NCCL and RCCL the messages of a pair of
# ranks, in both directions, run in the order in which they were posted. This cannot deadlock,
# because a schedule lists the messages of all ranks in one common sequence (schedule.py). Therefore
# never post a message that is not in the schedule.


class _Message(NamedTuple):
    instruction: Instruction
    work: dist.Work
    tensor: Tensor


class StageMessages:
    """Messages of this rank during one pass over a schedule.

    owners  the pipeline rank of each stage
    """

    def __init__(self, pipeline: Group, owners: Sequence[int]) -> None:
        self._pipeline = pipeline
        self._owners = owners
        self._sent: deque[_Message] = deque()
        self._received: dict[Instruction, _Message] = {}

    def send(self, instruction: Instruction, tensor: Tensor) -> None:
        """Start sending `tensor`; it is kept alive and must not change until it has been sent."""
        tensor = tensor.contiguous()
        self._release(SENDS_IN_FLIGHT - 1)
        with self._recorded(instruction, tensor):
            work = post(b"send", tensor, self._pipeline, self._peer(instruction))
        self._sent.append(_Message(instruction, work, tensor))

    def receive(
        self,
        instruction: Instruction,
        buffer: Tensor,
    ) -> None:
        """Post a receive into `buffer`; `take` with the same instruction returns it."""
        with self._recorded(instruction, buffer):
            work = post(b"receive", buffer, self._pipeline, self._peer(instruction))
        self._received[instruction] = _Message(instruction, work, buffer)

    def take(self, instruction: Instruction) -> Tensor:
        """Wait for a posted receive and return its tensor."""
        message = self._received.pop(instruction)
        with self._recorded(instruction, message.tensor):
            message.work.wait()
        return message.tensor

    def finish(self) -> None:
        """Wait until everything has been sent."""
        self._release(0)

    def _release(self, keep: int) -> None:
        """Release tensors that have been sent; wait for the oldest until at most `keep` remain."""
        while self._sent:
            oldest = self._sent[0]
            with self._named_neighbour(oldest.instruction):
                left = oldest.work.is_completed()
            if not left:
                if len(self._sent) <= keep:
                    return
                with self._recorded(oldest.instruction, oldest.tensor):
                    oldest.work.wait()
            self._sent.popleft()

    def _peer(self, instruction: Instruction) -> int:
        """Return the global rank at the other end of a message."""
        with_next = instruction.op in (Op.SEND_FORWARD, Op.RECV_BACKWARD)
        stage = instruction.stage + (1 if with_next else -1)
        return self._pipeline.ranks[self._owners[stage]]

    @contextmanager
    def _recorded(self, instruction: Instruction, tensor: Tensor) -> Iterator[None]:
        """Record a message that may block this rank; an error in it names the neighbour."""
        flight = self._pipeline.flight
        call = b"send" if instruction.op in SENDS else b"receive"
        peer = self._peer(instruction)
        flight.enter(call, self._pipeline.kind, tensor.nbytes, peer=peer)
        with self._named_neighbour(instruction):
            yield
        flight.leave()

    @contextmanager
    def _named_neighbour(self, instruction: Instruction) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            rank = self._pipeline.ranks[self._pipeline.rank]
            peer = self._peer(instruction)
            raise LaunchError(
                f"rank {rank} lost its pipeline neighbour, rank {peer}, during {instruction}: "
                f"{error}. Rank {peer} has died, hangs, or lost another neighbour: look for the "
                "first error in its log"
            ) from error
