"""Which ranks of a job differ in what they hold and do, and how many micro-batches show all of it. Needs no torch."""
from __future__ import annotations

from dataclasses import dataclass

from megatron.config import Config
from megatron.model.stages import assign_layers
from megatron.parallel.topology import DEFAULT_ORDER, Layout
from megatron.pipeline.instructions import SENDS_IN_FLIGHT
from megatron.pipeline.orders import group_sizes


@dataclass(frozen=True)
class Kind:
    """Pipeline ranks with as many layers in each chunk, with and without embedding and head alike.

    pipeline_rank   the one that is looked at: the first, which has the most micro-batches in flight
    pipeline_ranks  all of them
    """

    pipeline_rank: int
    pipeline_ranks: tuple[int, ...]


def kinds_of(config: Config) -> tuple[Kind, ...]:
    """Every distinct kind of rank, in pipeline order.

    Tensor-parallel ranks hold tensors of one shape, padding included, and data-parallel ranks equal parts of each
    bucket: they do not differ. Under zb-h1, where later ranks keep more of what waits for weight gradients, the last
    rank of a kind is looked at beside the first.
    """
    parallel = config.parallel
    size, stages = parallel.pipeline_model_parallel_size, parallel.num_stages
    layers = [len(r) for r in assign_layers(config.model.num_layers, stages, parallel.pipeline_layout)]
    found: dict[tuple[object, ...], list[int]] = {}
    for rank in range(size):
        held = tuple(layers[stage] for stage in range(rank, stages, size))
        found.setdefault((held, rank == 0, rank == size - 1), []).append(rank)
    kinds = []
    for ranks in found.values():
        if config.pieces.schedule is not None:  # of which nothing is known
            kinds += [Kind(rank, (rank,)) for rank in ranks]
        elif parallel.schedule == "zb-h1" and len(ranks) > 1:
            kinds += [Kind(ranks[0], tuple(ranks[:-1])), Kind(ranks[-1], (ranks[-1],))]
        else:
            kinds.append(Kind(ranks[0], tuple(ranks)))
    return tuple(sorted(kinds, key=lambda kind: kind.pipeline_rank))


def layout_of(config: Config) -> Layout:
    """The sizes of the job's directions, in the order of its ranks."""
    parallel = config.parallel
    return Layout(
        parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.data_parallel_size,
        parallel.rank_order or DEFAULT_ORDER,
    )  # fmt: skip


def enough_micro_batches(config: Config) -> int:
    """So many micro-batches that a step with more of them needs no more memory, nor other messages between passes.

    After its warm-up a rank alternates between one forward and one backward pass, so that what it holds repeats from
    round to round (a round is one micro-batch, with several chunks a group of at least as many as there are ranks). The
    warm-up of the first rank is the longest: p passes with one chunk, 2 (p - 1) + (v - 1) g + 1 with v of them and g
    micro-batches in the step's first group (pipeline/orders.py). A round and more follow it here: with several chunks
    the first groups of the step itself, since another number of micro-batches may be grouped otherwise. Under zb-h1
    weight gradients wait for up to p passes more. A rank also keeps the last few messages that it has sent.
    """
    m, p, v = config.num_micro_batches(), config.parallel.pipeline_model_parallel_size, config.parallel.num_chunks
    if p == 1:
        return min(m, 3)
    if config.pieces.schedule is not None:
        return m
    if config.parallel.schedule == "interleaved":
        warm_up = -(-((v + 1) * p - 1) // (v * p))  # groups; larger ones are fewer
        return sum(group_sizes(p, m)[: warm_up + 1])
    return min(m, (2 * p if config.parallel.schedule == "zb-h1" else p) + 2 + SENDS_IN_FLIGHT)
