"""A row for every rank: where it runs and what it holds; and a check that the rows of all ranks fit together."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.model.stages import assign_layers

if TYPE_CHECKING:
    from megatron.planning.placement import Placement


class RankRow(NamedTuple):
    """One rank. `chunks` are the layers of each of its chunks, in the order of the model."""

    rank: int
    node: int
    device: int
    nic: str
    tp: int
    dp: int
    pp: int
    chunks: tuple[range, ...]


def rank_rows(config: Config, placement: Placement) -> Iterator[RankRow]:
    """The rows of a placement, one at a time."""
    parallel, cluster = config.parallel, placement.cluster
    layers = assign_layers(config.model.num_layers, parallel.num_stages, parallel.pipeline_layout)
    size = parallel.pipeline_model_parallel_size
    chunks = [tuple(layers[stage::size]) for stage in range(size)]
    for rank in range(parallel.world_size):
        node, device = placement.place(rank)
        tp, dp, pp = placement.layout.coordinates(rank)
        yield RankRow(rank, node, device, cluster.nics[cluster.nic_of_device[device]], tp, dp, pp, chunks[pp])


def check_rank_table(rows: Iterable[RankRow], num_layers: int | None = None) -> int:
    """The number of ranks, if the table is consistent, and if its chunks end with the last of `num_layers` where given.

    Ranks count up from 0; no device has two ranks and all nodes have as many; each (tp, dp, pp) of the grid is there
    once; ranks of a stage hold the same layers; and every layer is held once by each replica, in the order of the model
    as chunks go round the stages. Raises ConfigError with the first thing that is wrong.
    """
    where: dict[tuple[int, int], int] = {}
    grid: dict[tuple[int, int, int], int] = {}
    chunks: dict[int, tuple[range, ...]] = {}
    for expected, row in enumerate(rows):
        if row.rank != expected:
            raise ConfigError(f"rank table: rank {row.rank} stands where rank {expected} was expected")
        _note(where, (row.node, row.device), row.rank, "node {}, device {}")
        _note(grid, (row.tp, row.dp, row.pp), row.rank, "tp {}, dp {}, pp {}")
        if chunks.setdefault(row.pp, row.chunks) != row.chunks:
            raise ConfigError(f"rank table: rank {row.rank} holds other layers than the other ranks of stage {row.pp}")
    if not grid:
        raise ConfigError("rank table: it has no rows")
    _check_grid(grid)
    _check_nodes(where)
    _check_layers([chunks[stage] for stage in sorted(chunks)], num_layers)
    return len(grid)


def _note(seen: dict[Any, int], key: tuple[int, ...], rank: int, what: str) -> None:
    if key in seen:
        raise ConfigError(f"rank table: ranks {seen[key]} and {rank} are both {what.format(*key)}")
    seen[key] = rank


def _check_grid(grid: dict[tuple[int, int, int], int]) -> None:
    sizes = [max(place[i] for place in grid) + 1 for i in range(3)]
    if sizes[0] * sizes[1] * sizes[2] != len(grid):
        raise ConfigError(
            f"rank table: {len(grid)} ranks do not fill the grid of tp {sizes[0]} x dp {sizes[1]} x pp {sizes[2]}"
        )


def _check_nodes(where: dict[tuple[int, int], int]) -> None:
    on_node = Counter(node for node, _ in where)
    if sorted(on_node) != list(range(len(on_node))) or len(set(on_node.values())) > 1:
        few = min(on_node, key=lambda node: on_node[node])
        raise ConfigError(f"rank table: node {few} has {on_node[few]} ranks, another one {max(on_node.values())}")
    devices = {frozenset(d for n, d in where if n == node) for node in (0, len(on_node) - 1)}
    if len(devices) > 1:
        raise ConfigError("rank table: the first and the last node use different devices")


def _check_layers(stages: list[tuple[range, ...]], num_layers: int | None) -> None:
    counts = {len(chunks) for chunks in stages}
    if len(counts) > 1:
        raise ConfigError(f"rank table: stages have {sorted(counts)} chunks")
    next_layer = 0
    for chunk in range(counts.pop()):
        for stage, chunks in enumerate(stages):
            layers = chunks[chunk]
            if layers.start != next_layer or not len(layers):
                raise ConfigError(
                    f"rank table: chunk {chunk} of stage {stage} begins with layer {layers.start}, but the one before "
                    f"ends at {next_layer}"
                )
            next_layer = layers.stop
    if num_layers is not None and next_layer != num_layers:
        raise ConfigError(f"rank table: {next_layer} layers are placed, but the model has {num_layers}")
