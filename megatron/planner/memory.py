"""What a training step needs of a device's memory: a trace's tensors, added up as the schedule holds them.

States follow from the parameters of each pipeline rank. Not counted: the runtime and the communication library, which
take a gigabyte or more on a GPU before training begins, buffers inside of kernels, and what an allocator cannot reuse.
Needs torch where a trace has to be made.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron.engine.optimizer_state import optimizer_state
from megatron.pipeline.in_flight import moments_of_rank
from megatron.pipeline.instructions import SENDS_IN_FLIGHT
from megatron.planner.events import Give, Part, Pass, Take, Trace
from megatron.planner.stage import Stage, owners, parameters_of, stages_of
from megatron.planner.trace import GPT2_VOCABULARY, trace

if TYPE_CHECKING:
    from megatron.config import Config, ModelConfig

GPU_BLOCK, CPU_BLOCK = 512, 64
"""What a tensor's size is rounded up to: by the caching allocator of CUDA and ROCm (kMinBlockSize in
CUDACachingAllocator), and by torch's allocator of host memory."""


# -- passes ------------------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """Bytes of each category of the trace."""

    activations: float = 0.0
    logits: float = 0.0
    temporary: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.logits + self.temporary

    def plus(self, other: Held, times: float = 1.0) -> Held:
        return Held(*(a + times * b for a, b in zip(self, other, strict=True)))


class Change(NamedTuple):
    """What passes in a row add to what was held before: at their end, and at the fullest moment (their start, if that
    is it)."""

    end: Held = Held()
    fullest: Held = Held()

    def then(self, after: Change) -> Change:
        later = self.end.plus(after.fullest)
        return Change(self.end.plus(after.end), later if later.total > self.fullest.total else self.fullest)

    def times(self, count: int) -> Change:
        """So many times in a row; each changes as much as the one before."""
        if count < 2:
            return self if count else Change()
        most = max(self.fullest, self.end.plus(self.fullest, 1 / (count - 1)), key=lambda held: held.total)
        rest = self.end if most is not self.fullest else Held()
        return Change(self.end.plus(self.end, count - 1), self.fullest.plus(rest, count - 1))

    def as_temporary(self) -> Change:
        """The same for what is made again in a backward pass."""
        return Change(*(Held(0.0, held.logits, held.activations + held.temporary) for held in self))


def _chain(changes: Iterable[Change]) -> Change:
    return reduce(Change.then, changes, Change())


class _Changes(NamedTuple):
    """Those of a part's passes."""

    forward: Change
    backward: Change
    inputs: Change
    weights: Change


@lru_cache(maxsize=1 << 12)
def _changes(part: Part, block: int) -> _Changes:
    made: dict[int, Take] = {}
    forward = _change(part.forward, block, made)
    kept = dict(made)
    backward = _change(part.backward, block, made)
    return _Changes(forward, backward, _change(part.inputs, block, kept), _change(part.weights, block, kept))


def _change(of: Pass, block: int, made: dict[int, Take]) -> Change:
    """made: what there was before, to which what the pass makes is added."""
    now, total, most = dict.fromkeys(Held._fields, 0), 0, 0
    fullest = Held()
    for step in of.steps:
        if isinstance(step, Take):
            made[step.id] = step
            size = -(-step.bytes // block) * block
            now[step.category] += size
            total += size
            if total > most:
                most, fullest = total, Held(**now)
        elif isinstance(step, Give):
            taken = made.pop(step.id, None)
            if taken is None:
                continue  # a micro-batch's tokens
            size = -(-taken.bytes // block) * block
            now[taken.category] -= size
            total -= size
    return Change(Held(**now), fullest)


# -- chunks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkMemory:
    """Bytes of one micro-batch in one chunk, beyond what was held before.

    kept      after the forward pass
    forward   at the fullest moment of the forward pass
    backward  at that of the backward pass, what was kept included
    waiting   after a backward pass whose weight gradients wait
    """

    kept: Held
    forward: Held
    backward: Held
    waiting: Held


@lru_cache(maxsize=1 << 14)
def chunk_memory(traced: Trace, stage: Stage, group: int, block: int) -> ChunkMemory:
    """Follow the memory of a stage. group: layers that are recomputed together, at most; block: what a tensor's size
    is rounded up to.

    A part's output goes at the end of its forward pass, and is there as the input of the next: on another stage as a
    message.
    """
    embedding, layer, head = (_changes(part, block) for part in (traced.embedding, traced.layer, traced.head))
    again = layer if traced.again is None else _changes(traced.again, block)
    inner = again.forward.then(Change(Held().plus(again.forward.end, -1.0)))  # of a group, but for the first
    whole = ("inputs", "weights") if stage.split else ("backward",)

    def layers_forward() -> Iterable[Change]:
        for count, times in _groups(stage, group):
            yield again.forward.then(inner.times(count - 1)).times(times)
        yield layer.forward.times(stage.layers - stage.layers_again)

    def layers_backward(half: str) -> Iterable[Change]:
        one: Change = getattr(layer, half)
        yield one.times(stage.layers - stage.layers_again)
        for count, times in _groups(stage, group)[::-1]:
            inside = count - 1
            made = layer.forward.as_temporary().times(inside if half != "weights" else 0)
            yield _chain((made, getattr(again, half), one.as_temporary().times(inside))).times(times)

    forward = _chain((
        *([embedding.forward] if stage.first else []), *layers_forward(), *([head.forward] if stage.last else []),
    ))  # fmt: skip
    halves = [
        _chain((
            *([getattr(head, half)] if stage.last else []), *layers_backward(half),
            *([getattr(embedding, half)] if stage.first else []),
        ))
        for half in whole
    ]  # fmt: skip
    first = Change(forward.end, forward.end).then(halves[0])
    return ChunkMemory(forward.end, forward.fullest, _chain((first, *halves[1:])).fullest, first.end)


def _groups(stage: Stage, group: int) -> list[tuple[int, int]]:
    """Layers of a group that is recomputed, and how many such groups there are, in their order."""
    if stage.groups_again == stage.layers_again:
        return [(1, stage.groups_again)]
    whole, rest = divmod(stage.layers_again, group)
    return [(group, whole), (rest, 1)] if rest else [(group, whole)]


# -- ranks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each device of one pipeline rank, at the fullest moment of a step.

    weights      in the format of computation, embedding and output layer included
    master       fp32 weights of the optimizer; none in fp32, where the weights are it. Under ZeRO-1 a replica's part
    moments      of the optimizer, likewise divided
    gradients    sums in fp32 or bf16
    activations  made by forward passes and kept for backward passes
    logits       of a chunk of tokens
    buffers      messages to and from neighbouring stages, and the micro-batches
    temporary    what a backward pass makes for itself, recomputed activations among it
    """

    rank: int
    weights: float
    master: float
    moments: float
    gradients: float
    activations: float
    logits: float
    buffers: float
    temporary: float

    @property
    def optimizer(self) -> float:
        """Master weights and moments."""
        return self.master + self.moments

    @property
    def states(self) -> float:
        """What stays through all steps: weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.activations + self.logits + self.buffers + self.temporary


def memory_of_ranks(
    config: Config, device: str = "cuda", *, ranks: Sequence[int] | None = None
) -> tuple[RankMemory, ...]:
    """The memory of every pipeline rank, or of `ranks`, in a step with the full global batch.

    device   "cpu", or that of a GPU: they differ in the operators that run, and in how memory is rounded
    """
    traced = _traced(config, device)
    every = range(config.parallel.pipeline_model_parallel_size)
    block = CPU_BLOCK if device == "cpu" else GPU_BLOCK
    return tuple(_memory(config, traced, rank, block) for rank in (every if ranks is None else ranks))


def _traced(config: Config, device: str) -> Trace:
    return trace(config, "cpu" if device == "cpu" else "cuda")


def sized_model(config: Config) -> ModelConfig:
    """The model with a vocabulary: GPT-2's where only the tokenizer's files would tell."""
    model = config.model
    return model if model.vocab_size is not None else dataclasses.replace(model, vocab_size=GPT2_VOCABULARY)


def parameters_of_rank(config: Config, rank: int, device: str = "cuda") -> int:
    """Parameters on each device of a pipeline rank, the last one's copy of a tied embedding included."""
    return _parameters(config, _traced(config, device), rank)


def _parameters(config: Config, traced: Trace, rank: int) -> int:
    own = stages_of(config)[rank :: config.parallel.pipeline_model_parallel_size]
    count = sum(parameters_of(traced, stage) for stage in own)
    if len(own) > 1 and own[0].first and own[-1].last:  # one rank with several chunks has one tied embedding
        count -= sum(p.elements for p in traced.head.parameters if p.tied)
    return count


def _memory(config: Config, traced: Trace, rank: int, block: int) -> RankMemory:
    n, divided = _parameters(config, traced, rank), owners(config)
    held, buffers = _fullest(config, traced, rank, block)
    in_fp32 = config.precision.dtype_name == "float32"
    return RankMemory(
        rank=rank,
        weights=float(config.precision.weight_bytes * n),
        master=0.0 if in_fp32 else 4.0 * n / divided,
        moments=float(optimizer_state(config).bytes) * n / divided,
        gradients=float(n * config.precision.gradient_bytes),
        activations=held.activations + traced.layer.tables,
        logits=held.logits,
        buffers=buffers,
        temporary=held.temporary,
    )


def _fullest(config: Config, traced: Trace, rank: int, block: int) -> tuple[Held, float]:
    """What passes and messages take at the moment at which that is the most."""
    parallel = config.parallel
    p, v, group = parallel.pipeline_model_parallel_size, parallel.num_chunks, config.recompute.recompute_num_layers
    mine = [chunk_memory(traced, stage, group, block) for stage in stages_of(config)[rank::p]]
    forward, chunk, held, waiting = moments_of_rank(config.schedule, p, v, config.num_micro_batches(), rank)
    more = int(config.num_micro_batches() > 1)  # another message may be awaited while the one that came is used
    awaited = np.where(forward, int(rank < p - 1 or v > 1), more * int(rank > 0 or v > 1)) + int(v > 1)
    messages = (_sent(config, rank) + awaited if p > 1 else 0 * awaited) * float(traced.layer.hands_on)
    now = np.array([[c.backward, c.forward] for c in mine])[chunk, forward]
    now = now + held @ np.array([c.kept for c in mine]) + waiting[:, None] * np.array(mine[0].waiting)
    at = int(np.argmax(now.sum(axis=1) + messages))
    ends = rank in (0, p - 1)
    return Held(*map(float, now[at])), float(messages[at]) + (_micro_batches(config) if ends else 0.0)


def _sent(config: Config, rank: int) -> int:
    """Messages that a rank has sent and still keeps when it holds the most: few micro-batches have few."""
    p, v = config.parallel.pipeline_model_parallel_size, config.parallel.num_chunks
    passes = config.num_micro_batches() * v
    ahead = passes if rank < p - 1 or v > 1 else 0
    back = max(0, passes - (p - 1 - rank) - 1) if rank > 0 or v > 1 else 0
    return min(SENDS_IN_FLIGHT, ahead + back)


def _micro_batches(config: Config) -> float:
    """Tokens, labels and positions, int64, and fp32 masks of a step's micro-batches, which are there from its start."""
    return 28.0 * config.model.seq_length * config.batch.micro_batch_size * config.num_micro_batches()
