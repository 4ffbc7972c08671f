"""Device memory of a training step: the tensors of a trace, summed over those that are alive.

States follow from the parameters of each pipeline rank. Not counted: the runtime and the
communication library, which take a gigabyte or more on a GPU before training begins, workspaces
inside kernels, and fragmentation. Needs torch if a trace is not cached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from megatron.config import Config, ModelConfig
from megatron.engine.optimizer_state import optimizer_state
from megatron.pipeline.orders import SENDS_IN_FLIGHT
from megatron.pipeline.schedule import moments_of_rank
from megatron.planner.events import Give, Part, Step, Take, Trace
from megatron.planner.stage import (
    Stage,
    experts_of,
    owned_elements,
    parameters_of,
    stages_of,
    whole_parameters,
)
from megatron.planner.trace import GPT2_VOCABULARY, trace

GPU_BLOCK, CPU_BLOCK = 512, 64
"""Allocation granularity in bytes: of the caching allocator of CUDA and ROCm (kMinBlockSize in
CUDACachingAllocator), and of torch's allocator of host memory."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each device of one pipeline rank, at the peak of a step.

    weights      in the training dtype, including embedding and output layer
    master       fp32 weights of the optimizer, under ZeRO-1 this replica's partition; none in fp32
    moments      of the optimizer, partitioned likewise
    gradients    sums in fp32 or bf16
    activations  made by forward passes and kept for backward passes
    logits       of a chunk of tokens, and their gradient
    buffers      messages to and from neighbouring stages, and the micro-batches
    temporary    tensors within a backward pass, including recomputed activations
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
        """Memory held for the whole run: weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.activations + self.logits + self.buffers + self.temporary


CATEGORIES = tuple(field.name for field in dataclasses.fields(RankMemory))[1:]
Bytes = np.ndarray[Any, np.dtype[np.float64]]
"""Bytes by category, or one such row for each step."""
NOTHING = np.zeros((1, len(CATEGORIES)))
_ACTIVATIONS, _BUFFERS, _TEMPORARY = map(CATEGORIES.index, ("activations", "buffers", "temporary"))


# -- passes ----------------------------------------------------------------------------------------


def changes(steps: Iterable[Step], block: int, made: dict[int, Take]) -> Bytes:
    """Write a row for each tensor that is allocated or freed, its size rounded up to `block`.

    made  live tensors, updated in place; freeing any other tensor does not count
    """
    rows = []
    for step in steps:
        if isinstance(step, Take):
            made[step.id] = taken = step
        elif isinstance(step, Give) and step.id in made:
            taken = made.pop(step.id)
        else:
            continue
        row = [0.0] * len(CATEGORIES)
        size = -(-taken.bytes // block) * block
        row[CATEGORIES.index(taken.category)] = size if taken is step else -size
        rows.append(row)
    return np.array(rows).reshape(len(rows), len(CATEGORIES))


def find_peak(rows: Bytes) -> tuple[Bytes, int]:
    """Return the largest running sum of the rows, and the number of rows it adds up."""
    now = np.concatenate([NOTHING, rows]).cumsum(axis=0)
    at = int(now.sum(axis=1).argmax())
    return now[at], at


@lru_cache(maxsize=1 << 12)
def _passes(part: Part, block: int) -> dict[str, Bytes]:
    """Return the rows of a part's passes, by name."""
    kept: dict[int, Take] = {}
    forward = changes(part.forward.steps, block, kept)
    backward = changes(part.backward.steps, block, dict(kept))
    inputs, weights = (changes(half.steps, block, kept) for half in (part.inputs, part.weights))
    return {"forward": forward, "backward": backward, "inputs": inputs, "weights": weights}


def _as_temporary(rows: Bytes) -> Bytes:
    """Return the rows with activations counted as temporary, as for recomputed ones."""
    found = rows.copy()
    found[:, _TEMPORARY] += found[:, _ACTIVATIONS]
    found[:, _ACTIVATIONS] = 0.0
    return found


# -- chunks ----------------------------------------------------------------------------------------


class ChunkMemory(NamedTuple):
    """Bytes that one micro-batch adds in one chunk.

    kept      after the forward pass
    forward   at the peak of the forward pass
    backward  at the peak of the backward pass, including what was kept
    waiting   after a backward pass with deferred weight gradients
    """

    kept: Bytes
    forward: Bytes
    backward: Bytes
    waiting: Bytes


@lru_cache(maxsize=1 << 14)
def chunk_memory(traced: Trace, stage: Stage, group: int, block: int) -> ChunkMemory:
    """Simulate the memory of a stage.

    A part's output is freed at the end of its forward pass, and counts as the input of the next
    part; on another stage it arrives as a message.

    group  most layers that are recomputed together
    block  granularity to which a tensor's size is rounded up
    """
    embedding, head = (_passes(part, block) for part in (traced.embedding, traced.head))
    kinds = [traced.layer_of(kind) for kind in stage.layer_kinds]
    layers = [_passes(layer, block) for layer, _ in kinds]
    agains = [_passes(again, block) for _, again in kinds]
    groups, at = list[slice](), 0
    for count, times in _groups(stage, group):
        groups += [slice(i, i + count) for i in range(at, at + count * times, count)]
        at += count * times
    first = int(stage.first)
    last = int(stage.last)
    forward = np.concatenate(
        [
            NOTHING,
            *[embedding["forward"]] * first,
            *(rows for some in groups for rows in _forward_again(agains[some])),
            *(layer["forward"] for layer in layers[at:]),
            *[head["forward"]] * last,
        ]
    )

    def backward(half: str) -> Bytes:
        def again(some: slice) -> list[Bytes]:
            inside = layers[some][:-1]
            made = [_as_temporary(layer["forward"]) for layer in inside]
            undone = [_as_temporary(layer[half]) for layer in reversed(inside)]
            return [*made * (half != "weights"), agains[some][-1][half], *undone]

        return np.concatenate(
            [
                NOTHING,
                *[head[half]] * last,
                *(layer[half] for layer in reversed(layers[at:])),
                *(rows for some in reversed(groups) for rows in again(some)),
                *[embedding[half]] * first,
            ]
        )

    kept = forward.sum(axis=0)
    halves = [backward(half) for half in (("inputs", "weights") if stage.split else ("backward",))]
    most = find_peak(np.concatenate([kept[None], *halves]))[0]
    return ChunkMemory(kept, find_peak(forward)[0], most, kept + halves[0].sum(axis=0))


def _forward_again(agains: Sequence[dict[str, Bytes]]) -> Iterator[Bytes]:
    """Yield the rows of a recomputed group: the layers after the first keep nothing of their own."""
    for i, again in enumerate(agains):
        yield again["forward"]
        if i:
            yield -again["forward"].sum(axis=0, keepdims=True)


def _groups(stage: Stage, group: int) -> list[tuple[int, int]]:
    """List (layers, number of groups) of the recomputed groups, in order."""
    if stage.groups_again == stage.layers_again:
        return [(1, stage.groups_again)]
    whole, rest = divmod(stage.layers_again, group)
    return [(group, whole), (rest, 1)] if rest else [(group, whole)]


# -- ranks -----------------------------------------------------------------------------------------


def memory_of_ranks(config: Config, device: str = "cuda") -> tuple[RankMemory, ...]:
    """Return the memory of all pipeline ranks in a step of the full global batch.

    device   "cpu" or a GPU's: they differ in operators and in the rounding of memory
    """
    ranks = range(config.parallel.pipeline_model_parallel_size)
    return tuple(_memory(config, rank, device) for rank in ranks)


def peak_rank(config: Config, device: str, capacity: float) -> RankMemory:
    """Find the pipeline rank with the highest peak, or any rank that needs more than `capacity`."""
    first = _memory(config, 0, device)  # holds the most micro-batches
    if first.total > capacity:
        return first
    others = range(1, config.parallel.pipeline_model_parallel_size)
    ranks = (first, *(_memory(config, rank, device) for rank in others))
    return max(ranks, key=lambda rank: rank.total)


def state_bytes(
    config: Config, parameters: int, experts: int, whole: int, whole_experts: int
) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer for a rank's parameters.

    experts, whole  how many of them are of experts, and how many the optimizer takes whole;
                    whole_experts: how many are both
    """
    precision, state = config.precision, optimizer_state(config)
    owned = owned_elements(config, parameters, experts)
    of_whole = owned_elements(config, whole, whole_experts)
    return {
        "weights": precision.weight_bytes * parameters,
        "master": 0.0 if precision.dtype_name == "float32" else 4.0 * owned,
        "moments": state.bytes * (owned - of_whole) + state.of(True).bytes * of_whole,
        "gradients": precision.gradient_bytes * parameters,
    }


def sized_model(config: Config) -> ModelConfig:
    """Return the model with a vocabulary: GPT-2's if the size depends on tokenizer files."""
    model = config.model
    return (
        model
        if model.vocab_size is not None
        else dataclasses.replace(model, vocab_size=GPT2_VOCABULARY)
    )


def parameters_of_rank(config: Config, rank: int, device: str = "cuda") -> int:
    """Count parameters on each device of a pipeline rank, including a tied embedding's copy."""
    traced = trace(config, device)
    own = stages_of(config)[rank :: config.parallel.pipeline_model_parallel_size]
    count = sum(parameters_of(traced, stage) for stage in own)
    # one rank with several chunks has one tied embedding
    if len(own) > 1 and own[0].first and own[-1].last:
        count -= sum(p.elements for p in traced.head.parameters if p.tied)
    return count


def experts_of_rank(config: Config, rank: int, device: str) -> int:
    """Count the parameters of experts on each device of a pipeline rank."""
    own = stages_of(config)[rank :: config.parallel.pipeline_model_parallel_size]
    return sum(experts_of(trace(config, device), stage) for stage in own)


def whole_of_rank(config: Config, rank: int, device: str, only_experts: bool = False) -> int:
    """Count the parameters on each device of a rank that the optimizer takes whole."""
    own = stages_of(config)[rank :: config.parallel.pipeline_model_parallel_size]
    traced = trace(config, device)
    found = (p for stage in own for p in whole_parameters(config, traced, stage))
    return sum(p.elements for p in found if p.experts or not only_experts)


PARTS_OF_RANK = experts_of_rank, whole_of_rank, partial(whole_of_rank, only_experts=True)
"""Functions that count the parameters of a rank as state_bytes wants them, after all of them."""


def _memory(config: Config, rank: int, device: str) -> RankMemory:
    counts = (count(config, rank, device) for count in (parameters_of_rank, *PARTS_OF_RANK))
    states = state_bytes(config, *counts)
    held = _peak_bytes(config, rank, device) + [states.get(name, 0.0) for name in CATEGORIES]
    return RankMemory(rank, *map(float, held))


def _peak_bytes(config: Config, rank: int, device: str) -> Bytes:
    """Return the bytes of passes and messages at their peak."""
    parallel = config.parallel
    traced = trace(config, device)
    m = config.num_micro_batches()
    p = parallel.pipeline_model_parallel_size
    v = parallel.num_chunks
    group = config.recompute.recompute_num_layers
    block = CPU_BLOCK if device == "cpu" else GPU_BLOCK
    mine = [chunk_memory(traced, stage, group, block) for stage in stages_of(config)[rank::p]]
    forward, chunk, held, waiting = moments_of_rank(config.schedule, p, v, m, rank)
    now = np.array([[c.backward, c.forward] for c in mine])[chunk, forward]
    now = now + held @ np.array([c.kept for c in mine]) + waiting[:, None] * mine[0].waiting
    if p > 1:
        more = int(m > 1)  # the next message may be received while the last one is in use
        awaited = np.where(
            forward, int(rank < p - 1 or v > 1), more * int(rank > 0 or v > 1)
        ) + int(v > 1)
        now[:, _BUFFERS] += (_sent(config, rank) + awaited) * traced.layer.hands_on
    most: np.ndarray[Any, np.dtype[np.float64]] = now[np.argmax(now.sum(axis=1))]
    most[_ACTIVATIONS] += max(layer.tables for layer, _ in traced.kinds)
    # tokens, labels and positions, int64, and fp32 masks of all micro-batches of the step
    if rank in (0, p - 1):
        most[_BUFFERS] += 28.0 * config.model.seq_length * config.batch.micro_batch_size * m
    return most


def _sent(config: Config, rank: int) -> int:
    """Count sent messages that a rank still keeps at its peak; fewer with few micro-batches."""
    p = config.parallel.pipeline_model_parallel_size
    v = config.parallel.num_chunks
    passes = config.num_micro_batches() * v
    ahead = passes if rank < p - 1 or v > 1 else 0
    back = max(0, passes - (p - 1 - rank) - 1) if rank > 0 or v > 1 else 0
    return min(SENDS_IN_FLIGHT, ahead + back)
