"""Sizes of the mesh dimensions, and the groups of ranks that communicate.

Unless another rank order is chosen, the tensor-parallel rank varies fastest, then the data-parallel
rank, then the pipeline rank. Thus neighbouring ranks, which launchers put on one node, form the
groups that communicate most. This module needs no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

from megatron.config.parallel import RANK_ORDERS
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config import Config

DEFAULT_ORDER = RANK_ORDERS[0]


class RankGroup(NamedTuple):
    """Ranks that communicate: `size` of them, `stride` apart. words: the group's name in logs."""

    words: str
    stride: int
    size: int


def line_of(rank: int, stride: int, size: int) -> range:
    """Return the group of `rank`, itself included: `size` ranks, `stride` apart."""
    first = rank - rank // stride % size * stride
    return range(first, first + size * stride, stride)


@dataclass(frozen=True)
class LayoutSizes:
    """Sizes that a job chooses for its layout; all fields but the last have the settings' names.

    expert_ranks_per_node  number of an expert group's ranks on each node. None: derived from
                           `ranks_per_node`. If it does not divide the group, groups are not divided
    zero_shard_size, zero_state_shard_size
                           0: all data-parallel ranks; -1: those on a node
    rank_order             None: DEFAULT_ORDER
    ranks_per_node         number of consecutive ranks on each node
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_ranks_per_node: int | None = None
    zero_shard_size: int = 0
    zero_state_shard_size: int = 0
    rank_order: str | None = None
    ranks_per_node: int = 1

    @classmethod
    def of(
        cls, config: Config, rank_order: str | None = None, ranks_per_node: int = 1
    ) -> LayoutSizes:
        """Return the sizes of a configuration; `rank_order` None: the configuration's."""
        settings = [field.name for field in fields(cls) if field.name != "ranks_per_node"]
        sizes = cls(**{name: config.get(name) for name in settings}, ranks_per_node=ranks_per_node)
        return replace(sizes, rank_order=rank_order or sizes.rank_order)


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh dimensions; pure arithmetic on rank numbers.

    >>> Layout(tensor=2, pipeline=2, data=2).coordinates(5)
    (1, 0, 1)
    >>> list(Layout(tensor=2, pipeline=2, data=2).ranks("data", 7))
    [5, 7]

    Gradients are reduced over the data dimension. Its members m are divided in two ways: into
    replicas of `context` neighbours that share the replica's sequences (m = replica * context +
    context rank), and into groups of `expert` neighbours that hold different experts. Members with
    the same m % expert hold the same experts.

    >>> Layout(data=8, context=2, expert=4).replicas
    4
    >>> list(Layout(data=8, context=2, expert=4).ranks("expert_data", 5))
    [1, 5]

    ZeRO shards gradients, and with stage 3 weights, over `shard` neighbours in the data dimension,
    and the optimizer's state over `states` neighbours; 0 means all.
    An expert group on several nodes, with `expert_node` neighbours on each, is divided into groups
    within the nodes and groups between them. If `expert_node` is 1, it is not divided.

    >>> layout = Layout(data=8, expert=8, expert_node=4)
    >>> list(layout.ranks("expert_within", 6)), list(layout.ranks("expert_between", 6))
    ([4, 5, 6, 7], [2, 6])

    `order` names the dimensions from the one that varies fastest over the ranks to the slowest: any
    of RANK_ORDERS.

    >>> Layout(tensor=2, pipeline=2, data=2, order="tp-pp-dp").coordinates(5)
    (1, 1, 0)

    Groups are ranges, which take no memory: some jobs have 75,000 ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    order: str = DEFAULT_ORDER
    context: int = 1
    expert: int = 1
    shard: int = 0
    states: int = 0
    expert_node: int = 1

    def __post_init__(self) -> None:
        if self.order not in RANK_ORDERS:
            raise ConfigError(f"rank order '{self.order}' is not one of {', '.join(RANK_ORDERS)}")
        for name in ("context", "expert"):
            if self.data % getattr(self, name):
                raise ConfigError(
                    f"{name}-parallel size {getattr(self, name)} does not divide the {self.data} "
                    "ranks that share each part of the model: change that size, or the number of "
                    "processes"
                )
        shard, states = self.shard_sizes
        remedy = "change --zero-shard-size or --zero-state-shard-size"
        if states % shard:
            raise ConfigError(
                f"{shard} ranks that share ZeRO's gradients do not divide the {states} that share "
                f"its optimizer states: {remedy}"
            )
        if self.data % states:
            raise ConfigError(
                f"{states} ranks that share ZeRO's optimizer states do not divide the {self.data} "
                f"that share each part of the model: {remedy}, or the number of processes"
            )
        if shard % self.expert and self.expert % shard:
            raise ConfigError(
                f"of {shard} ranks that share ZeRO's gradients and {self.expert} that share the "
                "experts, one number must divide the other: change --zero-shard-size"
            )

    @classmethod
    def for_world(cls, world_size: int, sizes: LayoutSizes) -> Layout:
        """Return the layout of `world_size` processes, which determine the data dimension's size.

        Raises ConfigError if the processes do not divide into whole replicas, if another size does
        not divide the data dimension, or if ZeRO shards per node (-1) are impossible.
        """
        tensor = sizes.tensor_model_parallel_size
        pipeline = sizes.pipeline_model_parallel_size
        order = sizes.rank_order or DEFAULT_ORDER
        expert = sizes.expert_model_parallel_size
        data, rest = divmod(world_size, tensor * pipeline)
        if rest or not data:
            raise ConfigError(
                f"world size {world_size} is not a multiple of tensor-model-parallel-size {tensor} "
                f"x pipeline-model-parallel-size {pipeline} = {tensor * pipeline}: start "
                f"{max(1, data) * tensor * pipeline} processes or change the sizes"
            )
        context = sizes.context_parallel_size
        layout = cls(tensor, pipeline, data, order, context=context, expert=expert)
        each, rest = divmod(sizes.ranks_per_node, layout.strides[1])
        each = 0 if rest else min(each, data)
        zero = sizes.zero_shard_size, sizes.zero_state_shard_size
        if -1 in zero and not each:
            raise ConfigError(
                f"no node has neighbouring data-parallel ranks to itself in rank order "
                f"{order}: give --zero-shard-size and --zero-state-shard-size as numbers, not node"
            )
        shard, states = (each if size == -1 else size for size in zero)
        layout = replace(layout, shard=shard, states=states)
        if sizes.expert_ranks_per_node is not None:
            each = sizes.expert_ranks_per_node
        over_nodes = 1 < each < expert and expert % each == 0
        return replace(layout, expert_node=each) if over_nodes else layout

    @property
    def shard_sizes(self) -> tuple[int, int]:
        """Return the numbers of ranks over which ZeRO shards gradients, and optimizer state."""
        return self.shard or self.data, self.states or self.data

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def replicas(self) -> int:
        """Return the data-parallel size: the number of replicas with different samples."""
        return self.data // self.context

    def __str__(self) -> str:
        """Return the sizes, such as tensor 2 x pipeline 1 x context 2 x data 4."""
        context = f" x context {self.context}" if self.context > 1 else ""
        text = f"tensor {self.tensor} x pipeline {self.pipeline}{context} x data {self.replicas}"
        if self.expert > 1:
            text += f", experts over {self.expert} of the {self.data} data-parallel ranks"
        if self.expert_node > 1:
            text += f", {self.expert_node} on each node"
        if self.shard or self.states:
            shard, states = self.shard_sizes
            text += f", ZeRO over {shard} of the data-parallel ranks, its states over {states}"
        return text

    @functools.cached_property
    def strides(self) -> tuple[int, int, int]:
        """Distances between neighbours in the tensor, data and pipeline dimensions, in ranks."""
        sizes = {"tp": self.tensor, "dp": self.data, "pp": self.pipeline}
        strides = {}
        stride = 1
        for direction in self.order.split("-"):
            strides[direction] = stride
            stride *= sizes[direction]
        return strides["tp"], strides["dp"], strides["pp"]

    def rank(self, *, tensor: int, data: int, pipeline: int) -> int:
        t, d, p = self.strides
        return tensor * t + data * d + pipeline * p

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return the (tensor, data, pipeline) coordinates of a global rank."""
        t, d, p = self.strides
        return rank // t % self.tensor, rank // d % self.data, rank // p % self.pipeline

    @functools.cached_property
    def lines(self) -> dict[str, RankGroup]:
        """Groups of ranks that communicate, by kind; for ZeRO's groups see ShardGroups."""
        tensor, data, pipeline = self.strides
        each = self.expert_node
        nodes = self.expert // self.expert_node
        of_experts = self.data // self.expert
        lines = {
            "world": RankGroup("world", 1, self.world_size),
            "tensor": RankGroup("tensor-parallel", tensor, self.tensor),
            "data": RankGroup("data-parallel", data, self.data),
            "pipeline": RankGroup("pipeline-parallel", pipeline, self.pipeline),
            "context": RankGroup("context-parallel", data, self.context),
            "expert": RankGroup("expert-parallel", data, self.expert),
            "expert_data": RankGroup("expert data-parallel", data * self.expert, of_experts),
            "expert_between": RankGroup(
                "expert-parallel between nodes", data * each, nodes if each > 1 else 1
            ),
            "expert_within": RankGroup("expert-parallel within nodes", data, each),
        }
        for name, divisor in (("data", 1), ("expert_data", self.expert)):
            words, stride, size = lines[name]
            inner, states = (max(1, ranks // divisor) for ranks in self.shard_sizes)
            for dimension, what, apart, count in (
                ("inner", "one copy of gradients", 1, inner),
                ("outer", "shards of states", inner, states // inner),
                ("states", "one copy of states", 1, states),
                ("copies", "copies", states, size // states),
            ):
                lines[f"{name}.{dimension}"] = RankGroup(f"{words}, {what}", stride * apart, count)
        return lines

    def ranks(self, kind: str, rank: int) -> Sequence[int]:
        """Return the ranks of `rank`'s group of the given kind (KINDS), itself included."""
        if kind == "model":  # in ascending order, as in torch's group
            stages = self.ranks("pipeline", rank)
            lines = (self.ranks("tensor", stage) for stage in stages)
            return tuple(sorted(rank for line in lines for rank in line))
        if kind == "embedding":
            stages = self.ranks("pipeline", rank)
            return stages[0], stages[-1]
        return line_of(rank, *self.lines[kind][1:])


KINDS = (*Layout().lines, "model", "embedding")
"""Kinds of groups: those of `Layout.lines`, "model" (the tensor-parallel ranks of all stages) and
"embedding" (the first and the last pipeline rank).
"""
