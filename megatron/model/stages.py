"""Divides layers into stages and recomputed groups, and places stages; needs no torch."""

from __future__ import annotations

from megatron.config import Config
from megatron.config.parallel import RecomputeConfig, even_counts
from megatron.errors import ConfigError
from megatron.pipeline import orders


def stage_owners(config: Config) -> tuple[int, ...]:
    """Return the pipeline rank of each global stage, as the schedule places them."""
    parallel = config.parallel
    sizes = parallel.pipeline_model_parallel_size, parallel.num_chunks
    return orders.stage_owners(config.schedule, *sizes)


def stages_of_rank(config: Config, rank: int) -> tuple[int, ...]:
    """Return the global stages of a pipeline rank in ascending order: those of its chunks."""
    parallel = config.parallel
    sizes = parallel.pipeline_model_parallel_size, parallel.num_chunks
    return orders.stages_of_rank(config.schedule, *sizes, rank)


def end_ranks(config: Config) -> tuple[int, int]:
    """Return the pipeline ranks of the first and of the last stage."""
    owners = stage_owners(config)
    return owners[0], owners[-1]


def assign_layers(num_layers: int, num_stages: int, layout: str | None = None) -> tuple[range, ...]:
    """Return the layers of every global stage, in model order.

    Without a layout every stage gets num_layers // num_stages layers, and the remaining k layers go
    one each to the k stages before the last. Thus the last stage, which also computes the output
    projection and the loss, never gets one, and the first, which also holds the embedding and the
    most activations under 1F1B, gets one only if all stages between them do.

    `layout` lists the number of layers in each stage, such as "3,4,4,3".

    Raises ConfigError if a stage would be empty, or if the layout does not have one positive number
    per stage, adding up to num_layers.

    >>> [len(layers) for layers in assign_layers(10, 4)]
    [2, 3, 3, 2]
    >>> assign_layers(5, 2, "3,2")
    (range(0, 3), range(3, 5))
    """
    if num_stages < 1:
        raise ConfigError(f"number of pipeline stages must be at least 1, got {num_stages}")
    if num_layers < num_stages:
        raise ConfigError(
            f"{num_layers} layers cannot fill {num_stages} pipeline stages (pipeline size x "
            f"chunks): use at most {max(num_layers, 1)} stages"
        )
    counts = (
        even_counts(num_layers, num_stages)
        if layout is None
        else _parse(layout, num_layers, num_stages)
    )
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def _parse(layout: str, num_layers: int, num_stages: int) -> list[int]:
    where = f"pipeline layout {layout!r}"
    try:
        counts = [int(number) for number in layout.split(",")]
    except ValueError:
        raise ConfigError(
            f'{where} must be whole numbers separated by commas, such as "3,4,4,3"'
        ) from None
    if len(counts) != num_stages:
        raise ConfigError(
            f"{where} names {len(counts)} stages, but there are {num_stages} (pipeline size x "
            "chunks): give the number of layers of each"
        )
    empty = [stage for stage, count in enumerate(counts) if count < 1]
    if empty:
        raise ConfigError(
            f"{where} gives {counts[empty[0]]} layers to stage {empty[0]}: each needs at least one"
        )
    if sum(counts) != num_layers:
        raise ConfigError(
            f"{where} places {sum(counts)} layers, but the model has {num_layers}: make them equal"
        )
    return counts


def recomputed_groups(layers: int, recompute: RecomputeConfig) -> list[int]:
    """Return, in order, the sizes of the groups of a stage's layers that are fully recomputed.

    uniform: each group of n layers keeps only its input (Chen et al., arXiv 1604.06174).
    block: each of the stage's first n layers keeps only its input; the others keep everything.
    """
    n = recompute.recompute_num_layers
    if recompute.recompute_granularity != "full":
        return []
    if recompute.recompute_method == "block":
        return [1] * min(n, layers)
    return [min(n, layers - first) for first in range(0, layers, n)]
