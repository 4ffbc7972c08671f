"""What the ranks of a run send in one step, as this program sends it: bytes and counts from the configuration alone."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron.config import Config
from megatron.model import formulas
from megatron.model.stages import assign_layers

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GPT2_VOCABULARY = 50257


class Flow(NamedTuple):
    """Collectives of a kind: what they are, and the bytes that a rank of the busiest stage sends in them per step."""

    name: str
    bytes: float


@dataclass(frozen=True)
class Traffic:
    """One step's messages.

    tensor, data     collectives of a rank of the busiest pipeline rank
    message_bytes    of a message between stages
    boundary, wrap   messages per step and direction over a boundary of two pipeline ranks, and between the last and the
                     first (interleaved chunks)
    stages           pipeline ranks times chunks
    tied             the sum of a tied embedding's gradients over the first and the last stage
    notes            what had to be assumed
    """

    tensor: tuple[Flow, ...]
    data: tuple[Flow, ...]
    message_bytes: int
    boundary: int
    wrap: int
    stages: int
    tied: Flow | None
    notes: tuple[str, ...] = ()


def traffic_of(config: Config) -> Traffic:
    """What a step of this run sends."""
    parallel = config.parallel
    vocabulary, notes = config.model.vocab_size, list[str]()
    if vocabulary is None:
        vocabulary = GPT2_VOCABULARY
        notes.append(f"the vocabulary is known only when the tokenizer is read: {vocabulary} entries are assumed")
    micro_batches = config.num_micro_batches()
    has_boundaries = parallel.pipeline_model_parallel_size > 1
    return Traffic(
        tensor=_tensor(config, micro_batches),
        data=_data(config, vocabulary),
        message_bytes=formulas.pipeline_message_bytes(
            config.model, config.batch.micro_batch_size,
            4 if config.model.fp32_residual_connection else _DTYPE_BYTES[config.precision.dtype_name],
            parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1,
        ),
        boundary=parallel.num_chunks * micro_batches if has_boundaries else 0,
        wrap=(parallel.num_chunks - 1) * micro_batches if has_boundaries else 0,
        stages=parallel.num_stages,
        tied=_tied(config, vocabulary),
        notes=tuple(notes),
    )


def _layers_of_ranks(config: Config) -> list[list[int]]:
    """For each pipeline rank how many layers its chunks have."""
    parallel = config.parallel
    counts = [len(r) for r in assign_layers(config.model.num_layers, parallel.num_stages, parallel.pipeline_layout)]
    size = parallel.pipeline_model_parallel_size
    return [counts[rank::size] for rank in range(size)]


def _tensor(config: Config, micro_batches: int) -> tuple[Flow, ...]:
    tp = config.parallel.tensor_model_parallel_size
    if tp == 1:
        return ()
    passes = formulas.tensor_passes(config.parallel.sequence_parallel)
    one = formulas.ring_bytes(
        formulas.tensor_message_bytes(
            config.model, config.batch.micro_batch_size, _DTYPE_BYTES[config.precision.dtype_name]
        ),
        tp, "all_gather",
    )  # fmt: skip
    ranks = _layers_of_ranks(config)

    def flows(rank: int) -> tuple[Flow, ...]:
        layers = sum(ranks[rank])
        again = sum(_recomputed(config, count) for count in ranks[rank])
        ends = passes.embedding * (rank == 0) + passes.head * (rank == len(ranks) - 1)
        kind = "gather, scatter" if config.parallel.sequence_parallel else "all-reduce"
        counts = {
            f"forward ({kind})": passes.forward * layers, "recomputed forward": passes.forward * again,
            "backward": passes.backward * layers, "vocabulary": ends,
        }  # fmt: skip
        return tuple(Flow(name, one * count * micro_batches) for name, count in counts.items() if count)

    return max((flows(rank) for rank in range(len(ranks))), key=lambda found: sum(flow.bytes for flow in found))


def _recomputed(config: Config, layers: int) -> int:
    """Layers of a chunk that run forward a second time."""
    recompute = config.recompute
    if recompute.recompute_granularity != "full":
        return 0
    return min(layers, recompute.recompute_num_layers) if recompute.recompute_method == "block" else layers


def _data(config: Config, vocabulary: int) -> tuple[Flow, ...]:
    parallel, model = config.parallel, config.model
    replicas = parallel.data_parallel_size
    if replicas == 1:
        return ()
    ranks = _layers_of_ranks(config)
    parameters = [
        formulas.stage_parameters(
            model, sum(layers), first=rank == 0, last=rank == len(ranks) - 1,
            tensor_size=parallel.tensor_model_parallel_size, vocab_size=_padded(config, vocabulary),
        )
        for rank, layers in enumerate(ranks)
    ]
    gradients = formulas.gradient_message_bytes(parameters, config.precision.gradient_bytes)
    kind = f"{config.precision.main_grads_dtype} gradients"
    if config.engine.zero_stage == 0:
        return (Flow(f"{kind} (all-reduce)", formulas.ring_bytes(gradients, replicas)),)
    dtype_bytes = _DTYPE_BYTES[config.precision.dtype_name]
    weights = formulas.gradient_message_bytes(parameters, dtype_bytes)
    return (
        Flow(f"{kind} (scatter)", formulas.ring_bytes(gradients, replicas, "reduce_scatter")),
        Flow(f"{8 * dtype_bytes}-bit weights (gather)", formulas.ring_bytes(weights, replicas, "all_gather")),
    )


def _padded(config: Config, vocabulary: int) -> int:
    multiple = config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    return -(-vocabulary // multiple) * multiple


def _tied(config: Config, vocabulary: int) -> Flow | None:
    parallel, model = config.parallel, config.model
    if model.untie_embeddings_and_output_weights or parallel.pipeline_model_parallel_size == 1:
        return None
    words = formulas.embedding_parameters(model, _padded(config, vocabulary)) / parallel.tensor_model_parallel_size
    owners = parallel.data_parallel_size if config.engine.zero_stage == 1 else 1
    return Flow("tied embedding", formulas.ring_bytes(4 * words / owners, 2))
