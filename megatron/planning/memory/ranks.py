"""The memory of every pipeline rank: what stays, and the fullest moment of its passes."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron.model import formulas
from megatron.model.stages import assign_layers
from megatron.pipeline.in_flight import moments_of_rank
from megatron.pipeline.instructions import SENDS_IN_FLIGHT
from megatron.planning.memory.chunk import ChunkMemory, chunk_memory
from megatron.planning.memory.layer import Settings, Sizes
from megatron.planning.memory.operators import Operators, operators_of
from megatron.planning.memory.tape import Held
from megatron.planning.traffic import GPT2_VOCABULARY

if TYPE_CHECKING:
    from megatron.config import Config, ModelConfig


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
    config: Config, device: str = "gpu", *, kernels: bool = True, ranks: Sequence[int] | None = None
) -> tuple[RankMemory, ...]:
    """The memory of every pipeline rank in a step with the full global batch.

    device   "gpu" or "cpu": they differ in the operators that run, and in how memory is rounded
    kernels  whether the library of fused kernels is there
    ranks    pipeline ranks; None: all
    """
    operators = operators_of(config, device, kernels)
    chunks = _Chunks(config, operators)
    every = range(config.parallel.pipeline_model_parallel_size)
    return tuple(_memory(config, chunks, rank) for rank in (every if ranks is None else ranks))


def sized_model(config: Config) -> ModelConfig:
    """The model with a vocabulary: GPT-2's where only the tokenizer's files would tell."""
    model = config.model
    return model if model.vocab_size is not None else dataclasses.replace(model, vocab_size=GPT2_VOCABULARY)


def stage_layers(config: Config) -> tuple[int, ...]:
    """Layers of every global stage; stage g is a chunk of pipeline rank g % pipeline size."""
    parallel = config.parallel
    ranges = assign_layers(config.model.num_layers, parallel.num_stages, parallel.pipeline_layout)
    return tuple(len(layers) for layers in ranges)


def parameters_of_rank(config: Config, rank: int) -> int:
    """Parameters on each device of a pipeline rank, the last one's copy of a tied embedding included."""
    return _parameters(config, rank, stage_layers(config))


def _parameters(config: Config, rank: int, layers: tuple[int, ...]) -> int:
    model, parallel = sized_model(config), config.parallel
    tp, last = parallel.tensor_model_parallel_size, parallel.num_stages - 1
    vocabulary, first, count = model.padded_vocab_size(tp), False, 0
    for stage in range(rank, parallel.num_stages, parallel.pipeline_model_parallel_size):
        count += formulas.stage_parameters(
            model, layers[stage], first=stage == 0, last=stage == last, tensor_size=tp, vocab_size=vocabulary
        )
        first = first or stage == 0
        shared = first and stage == last and stage > 0 and not model.untie_embeddings_and_output_weights
        if shared:  # one rank with several chunks: the embedding is the output layer's weight
            count -= formulas.embedding_parameters(model, vocabulary) // tp
    return count


class _Chunks:
    """The memory of the chunks of a configuration."""

    def __init__(self, config: Config, operators: Operators) -> None:
        self.config, self.operators = config, operators
        self.layers, self.last = stage_layers(config), config.parallel.num_stages - 1
        self.settings = Settings.of(config, sized_model(config))
        self.sizes = Sizes.of(self.settings)

    def of(self, stage: int) -> ChunkMemory:
        return chunk_memory(
            self.settings, self.operators, self.layers[stage], first=stage == 0, last=stage == self.last
        )


def _memory(config: Config, chunks: _Chunks, rank: int) -> RankMemory:
    n = _parameters(config, rank, chunks.layers)
    owners = config.parallel.data_parallel_size if config.engine.zero_stage else 1
    held, buffers = _fullest(config, chunks, rank)
    return RankMemory(
        rank=rank,
        weights=float(n * chunks.sizes.width),
        master=4.0 * n / owners if chunks.sizes.width == 2 else 0.0,
        moments=(8.0 if config.optimizer.optimizer == "adam" else 4.0) * n / owners,
        gradients=float(n * config.precision.gradient_bytes),
        activations=held.activations + _angles(config),
        logits=held.logits,
        buffers=buffers,
        temporary=held.temporary,
    )


def _fullest(config: Config, chunks: _Chunks, rank: int) -> tuple[Held, float]:
    """What passes and messages take at the moment at which that is the most."""
    parallel = config.parallel
    p, v = parallel.pipeline_model_parallel_size, parallel.num_chunks
    mine = [chunks.of(chunk * p + rank) for chunk in range(v)]
    forward, chunk, held, waiting = moments_of_rank(parallel.schedule, p, v, config.num_micro_batches(), rank)
    more = int(config.num_micro_batches() > 1)  # another message may be awaited while the one that came is used
    awaited = np.where(forward, int(rank < p - 1 or v > 1), more * int(rank > 0 or v > 1)) + int(v > 1)
    messages = (_sent(config, rank) + awaited if p > 1 else 0 * awaited) * chunks.sizes.residual
    passes = np.array([[c.backward.total, c.forward.total] for c in mine])
    total = passes[chunk, forward] + held @ np.array([c.kept.total for c in mine]) + messages
    total += waiting * mine[0].waiting.total
    at = int(np.argmax(total))
    now = mine[chunk[at]]
    found = list(now.forward if forward[at] else now.backward)
    for kind in range(3):
        found[kind] += waiting[at] * mine[0].waiting[kind] + sum(
            int(count) * c.kept[kind] for count, c in zip(held[at], mine, strict=True)
        )
    ends = rank in (0, p - 1)
    return Held(*map(float, found)), float(messages[at]) + (_micro_batches(config) if ends else 0.0)


def _sent(config: Config, rank: int) -> int:
    """Messages that a rank has sent and still keeps when it holds the most: few micro-batches have few."""
    p, v = config.parallel.pipeline_model_parallel_size, config.parallel.num_chunks
    passes = config.num_micro_batches() * v
    ahead = passes if rank < p - 1 or v > 1 else 0
    back = max(0, passes - (p - 1 - rank) - 1) if rank > 0 or v > 1 else 0
    return min(SENDS_IN_FLIGHT, ahead + back)


def _angles(config: Config) -> float:
    """Cosines and sines of the rotary embedding, fp32, which each chunk makes once."""
    model = config.model
    if model.position_embedding_type != "rope":
        return 0.0
    turned = 2 * int(model.kv_channels * model.rotary_percent / 2)
    return 4.0 * model.seq_length * turned * config.parallel.num_chunks


def _micro_batches(config: Config) -> float:
    """Tokens, labels and positions, int64, and fp32 masks of a step's micro-batches, which are there from its start."""
    return 28.0 * config.model.seq_length * config.batch.micro_batch_size * config.num_micro_batches()
