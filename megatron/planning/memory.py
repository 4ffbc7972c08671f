"""What a training step needs of a device's memory, from the configuration alone. Needs no torch.

Weights, gradients and optimizer states follow from the parameters of each pipeline rank, activations from the same
order of forward and backward passes that the executor runs. Not counted: the runtime and the communication library,
which take a gigabyte or more on a GPU before training begins, and what an allocator cannot reuse.
"""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.model import formulas
from megatron.model.stages import assign_layers
from megatron.pipeline import orders
from megatron.pipeline.instructions import Instruction, Op
from megatron.planning.traffic import GPT2_VOCABULARY

if TYPE_CHECKING:
    from megatron.config import Config, ModelConfig

# Tokens whose logits exist at a time on a GPU unless --cross-entropy-chunk-tokens says otherwise.
_CHUNK_TOKENS = 4096


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each device of one pipeline rank.

    weights      in the format of computation, embedding and output layer included
    gradients    their fp32 sums
    optimizer    fp32 master weights (in fp32 the weights themselves) and moments; under ZeRO-1 a replica's part of them
    activations  kept for backward passes, when most micro-batches are in flight
    temporary    logits of a chunk of tokens, a layer's gradients and recomputed activations, messages: an estimate
    """

    rank: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary


def memory_of_ranks(config: Config) -> tuple[RankMemory, ...]:
    """The memory of every pipeline rank in a step with the full global batch."""
    return tuple(_memory(config, rank) for rank in range(config.parallel.pipeline_model_parallel_size))


def sized_model(config: Config) -> ModelConfig:
    """The model with a vocabulary: GPT-2's where only the tokenizer's files would tell."""
    model = config.model
    return model if model.vocab_size is not None else dataclasses.replace(model, vocab_size=GPT2_VOCABULARY)


def stage_layers(config: Config) -> tuple[int, ...]:
    """Layers of every global stage; stage g is a chunk of pipeline rank g % pipeline size."""
    parallel = config.parallel
    ranges = assign_layers(config.model.num_layers, parallel.num_stages, parallel.pipeline_layout)
    return tuple(len(layers) for layers in ranges)


def compute_order(config: Config, rank: int, micro_batches: int | None = None) -> list[Instruction]:
    """What pipeline rank `rank` computes in a step of so many micro-batches, in order; None: of the full batch."""
    parallel, m = config.parallel, micro_batches or config.num_micro_batches()
    p = parallel.pipeline_model_parallel_size
    if p == 1:
        return orders.one_rank(parallel.num_chunks, m)
    if parallel.schedule == "interleaved":
        return orders.interleaved(rank, p, parallel.num_chunks, m)
    order = orders.zero_bubble_h1 if parallel.schedule == "zb-h1" else orders.one_forward_one_backward
    return order(rank, p, m)


def parameters_of_rank(config: Config, rank: int) -> int:
    """Parameters on each device of a pipeline rank, the last one's copy of a tied embedding included."""
    model, parallel = sized_model(config), config.parallel
    tp, last = parallel.tensor_model_parallel_size, parallel.num_stages - 1
    layers, vocabulary = stage_layers(config), model.padded_vocab_size(tp)
    return sum(
        formulas.stage_parameters(
            model, layers[stage], first=stage == 0, last=stage == last, tensor_size=tp, vocab_size=vocabulary
        )
        for stage in range(rank, parallel.num_stages, parallel.pipeline_model_parallel_size)
    )


def _memory(config: Config, rank: int) -> RankMemory:
    n, width = parameters_of_rank(config, rank), _dtype_bytes(config)
    owners = config.parallel.data_parallel_size if config.engine.zero_stage else 1
    moments = 8 if config.optimizer.optimizer == "adam" else 4
    return RankMemory(
        rank=rank,
        weights=float(n * width),
        gradients=4.0 * n,
        optimizer=n * (moments + (4 if width == 2 else 0)) / owners,
        activations=_peak_of_activations(config, rank),
        temporary=_temporary(config, rank),
    )


def _dtype_bytes(config: Config) -> int:
    return 4 if config.precision.dtype_name == "float32" else 2


def _peak_of_activations(config: Config, rank: int) -> float:
    """Most bytes at once, over the passes of this rank in their order."""
    layers, last = stage_layers(config), config.parallel.num_stages - 1
    held = {stage: _kept_bytes(config, count, stage == last) for stage, count in enumerate(layers)}
    # A split backward pass keeps inputs of linear layers until its second half: an upper bound is to count all.
    frees = Op.BACKWARD_WEIGHT if config.parallel.schedule == "zb-h1" else Op.BACKWARD
    m, p = config.num_micro_batches(), config.parallel.pipeline_model_parallel_size
    now = peak = 0.0
    for op, stage, _ in compute_order(config, rank, m if m % p else min(m, 4 * p)):  # whole rounds repeat
        if op is Op.FORWARD:
            now += held[stage]
            peak = max(peak, now)
        elif op is frees:
            now -= held[stage]
    return peak


def _layer_bytes(config: Config, granularity: str | None) -> float:
    again = config.recompute.recompute_modules if granularity == "selective" else ()
    return formulas.layer_activation_bytes(
        config.model, config.batch.micro_batch_size, _dtype_bytes(config), granularity=granularity, modules=again,
        tensor_size=config.parallel.tensor_model_parallel_size, sequence_parallel=config.parallel.sequence_parallel,
    )


def _kept_bytes(config: Config, layers: int, last: bool) -> float:
    """Activations of one micro-batch in one chunk."""
    recompute = config.recompute
    if recompute.recompute_granularity != "full":
        kept = layers * _layer_bytes(config, recompute.recompute_granularity)
    elif recompute.recompute_method == "block":
        again = min(recompute.recompute_num_layers, layers)
        kept = again * _layer_bytes(config, "full") + (layers - again) * _layer_bytes(config, None)
    else:
        kept = -(-layers // recompute.recompute_num_layers) * _layer_bytes(config, "full")
    if last:
        kept += formulas.head_activation_bytes(
            config.model, config.batch.micro_batch_size, _dtype_bytes(config), _sequence_parts(config)
        )
    return kept


def _sequence_parts(config: Config) -> int:
    return config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1


def _temporary(config: Config, rank: int) -> float:
    model, recompute, tp = sized_model(config), config.recompute, config.parallel.tensor_model_parallel_size
    micro, width, p = config.batch.micro_batch_size, _dtype_bytes(config), config.parallel.pipeline_model_parallel_size
    tokens = model.seq_length * micro
    # A layer's backward pass: gradients of the MLP's values before and after the activation and the latter made again,
    # of the projection, and three tensors of the residual stream's width (the gathered input, its gradient, their sum).
    inner = 3 * (2 if model.swiglu else 1) * model.ffn_hidden_size
    projection = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.kv_channels
    size = tokens * width * ((inner + projection) / tp + 3 * model.hidden_size)
    if recompute.recompute_granularity == "full":
        group = 1 if recompute.recompute_method == "block" else recompute.recompute_num_layers
        size += min(group, max(stage_layers(config))) * _layer_bytes(config, None)
    if p > 1:
        size += 4.0 * formulas.pipeline_message_bytes(model, micro, width, _sequence_parts(config))
    if rank == p - 1:
        chunk = config.kernels.cross_entropy_chunk_tokens
        at_once = min(_CHUNK_TOKENS if chunk is None else chunk or tokens, tokens)
        # In the format of the weights, and in fp32 where torch's operators take the softmax.
        size += formulas.logits_bytes(model, at_once, width + 4, tp)
    return size
