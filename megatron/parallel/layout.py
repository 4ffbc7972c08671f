"""Sizes of the mesh dimensions, and the groups of ranks that communicate.

Unless another rank order is chosen, the tensor-parallel rank varies fastest, then the data-parallel
rank, then the pipeline rank. Thus neighbouring ranks, which launchers put on one node, form the
groups that communicate most. This module needs no torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

from megatron.config.parallel import RANK_ORDERS
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config import Config

DEFAULT_ORDER = RANK_ORDERS[0]


class RankGroup(NamedTuple):
    """Ranks that communicate: `rows` lines, `row_stride` apart, of `length` ranks, `stride` apart.

    words  the group's name in logs
    """

    words: str
    stride: int
    length: int
    row_stride: int = 1
    rows: int = 1

    @property
    def size(self) -> int:
        return self.length * self.rows

    def ranks_of(self, rank: int) -> Sequence[int]:
        """Return the group of `rank`, itself included: line after line."""
        first = rank - rank // self.row_stride % self.rows * self.row_stride
        if self.rows == 1:
            return line_of(rank, self.stride, self.length)
        ends = range(first, first + self.rows * self.row_stride, self.row_stride)
        return tuple(each for end in ends for each in line_of(end, self.stride, self.length))


def line_of(rank: int, stride: int, size: int) -> range:
    """Return the line of `rank`, itself included: `size` ranks, `stride` apart."""
    first = rank - rank // stride % size * stride
    return range(first, first + size * stride, stride)


def _on_node(stride: int, length: int, ranks_per_node: int) -> int:
    """Return how many neighbours of a line of `length` ranks each node has; 0: nodes differ."""
    if length == 1 or stride >= ranks_per_node:
        return 1
    if ranks_per_node % (stride * length) == 0:
        return length
    whole = ranks_per_node % stride == 0 == stride * length % ranks_per_node
    return ranks_per_node // stride if whole else 0


@dataclass(frozen=True)
class LayoutSizes:
    """Sizes that a job chooses for its layout; all fields but the last have the settings' names.

    expert_tensor_parallel_size
                           None: the tensor-parallel size
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
    expert_tensor_parallel_size: int | None = None
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

    Gradients are reduced over the data dimension. Its members m are divided into replicas of
    `context` neighbours that share the replica's sequences (m = replica * context + context rank).

    >>> Layout(data=8, context=2).replicas
    4

    Experts have a mesh of their own over the same ranks (parallel folding, arXiv 2504.14960). The
    ranks of a pipeline stage are numbered by position = data * `tensor` + tensor, and their
    positions are position = (member of expert_data * `expert` + member of expert) * `expert_tensor`
    + member of expert_tensor. Each expert is divided over `expert_tensor` neighbours (0: as many as
    `tensor`); `expert` such groups hold different experts; ranks with the same position %
    (expert_tensor * expert) hold the same parts of the same experts.

    >>> list(Layout(data=8, expert=4).ranks("expert_data", 5))
    [1, 5]
    >>> list(Layout(tensor=4, data=4, expert_tensor=1, expert=8).ranks("expert", 5))
    [0, 1, 2, 3, 4, 5, 6, 7]

    ZeRO shards gradients, and with stage 3 weights, over `shard` neighbours in the data dimension,
    and the optimizer's state over `states` neighbours; 0 means all.
    An expert-parallel group on several nodes, with `expert_node` neighbours on each, is divided
    into groups within the nodes and groups between them. If `expert_node` is 1, it is not divided.

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
    expert_tensor: int = 0

    def __post_init__(self) -> None:
        if self.order not in RANK_ORDERS:
            raise ConfigError(f"rank order '{self.order}' is not one of {', '.join(RANK_ORDERS)}")
        if self.data % self.context:
            raise ConfigError(
                f"context-parallel size {self.context} does not divide the {self.data} ranks that "
                "share each part of the model: change that size, or the number of processes"
            )
        self._check_experts()
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
        if (shard * self.tensor) % self.expert_ranks and self.expert_ranks % (shard * self.tensor):
            raise ConfigError(
                f"of {shard * self.tensor} ranks that share ZeRO's gradients and "
                f"{self.expert_ranks} that share the experts, one number must divide the other: "
                "change --zero-shard-size"
            )

    def _check_experts(self) -> None:
        """Raise ConfigError unless the experts' mesh fits the ranks of a stage."""
        tensor, each = self.tensor, self.expert_tensor_size
        if tensor % each and each % tensor:
            raise ConfigError(
                f"of tensor-parallel size {tensor} and expert-tensor-parallel size {each}, one "
                "must divide the other: change --expert-tensor-parallel-size"
            )
        if (tensor * self.data) % self.expert_ranks:
            raise ConfigError(
                f"expert-tensor-parallel size {each} x expert-model-parallel size {self.expert} = "
                f"{self.expert_ranks} does not divide the {tensor * self.data} ranks of a pipeline "
                "stage: change these sizes, or the number of processes"
            )
        by_tensor, by_data, _ = self.strides
        if self.data == 1 or self.expert_ranks == tensor or by_data == tensor * by_tensor:
            return
        if tensor % self.expert_ranks and self.expert_ranks % tensor:
            raise ConfigError(
                f"in rank order {self.order}, of the {self.expert_ranks} ranks that share the "
                f"experts and tensor-parallel size {tensor}, one number must divide the other: use "
                f"rank order {DEFAULT_ORDER}, or change --expert-model-parallel-size"
            )
        if self.folded and by_data < by_tensor:  # torch sorts the ranks of a group
            raise ConfigError(
                f"rank order {self.order} does not go with experts over tensor- and data-parallel "
                f"ranks: use one with tp before dp, such as {DEFAULT_ORDER}, or "
                f"--expert-tensor-parallel-size {tensor}"
            )

    @property
    def expert_tensor_size(self) -> int:
        """Return the number of ranks over which each expert is divided."""
        return self.expert_tensor or self.tensor

    @property
    def expert_ranks(self) -> int:
        """Return the number of neighbouring ranks of a stage that hold all experts once."""
        return self.expert_tensor_size * self.expert

    @property
    def folded(self) -> bool:
        """Return whether experts are divided over other ranks than attention."""
        return self.expert_tensor_size != self.tensor

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
        expert_tensor = sizes.expert_tensor_parallel_size or 0
        layout = cls(
            tensor,
            pipeline,
            data,
            order,
            context=context,
            expert=expert,
            expert_tensor=0 if expert_tensor == tensor else expert_tensor,
        )
        each = layout.data_on_node(sizes.ranks_per_node)
        zero = sizes.zero_shard_size, sizes.zero_state_shard_size
        if -1 in zero and not each:
            raise ConfigError(
                f"no node has neighbouring data-parallel ranks to itself in rank order "
                f"{order}: give --zero-shard-size and --zero-state-shard-size as numbers, not node"
            )
        shard, states = (each if size == -1 else size for size in zero)
        layout = replace(layout, shard=shard, states=states)
        on_node = sizes.expert_ranks_per_node
        if on_node is None:
            on_node = layout.experts_on_node(sizes.ranks_per_node)
        over_nodes = 1 < on_node < expert and expert % on_node == 0
        return replace(layout, expert_node=on_node) if over_nodes else layout

    def data_on_node(self, ranks_per_node: int) -> int:
        """Return how many neighbours in the data dimension each node has; 0: nodes differ."""
        each, rest = divmod(ranks_per_node, self.strides[1])
        return 0 if rest else min(each, self.data)

    def experts_on_node(self, ranks_per_node: int) -> int:
        """Return how many neighbours of an expert-parallel group each node has; 0: nodes differ."""
        group = self._stage_group("", self.expert_tensor_size, self.expert)
        of_line = _on_node(group.stride, group.length, ranks_per_node)
        if group.rows == 1:
            return of_line
        rows = _on_node(group.row_stride, group.rows, ranks_per_node)
        return of_line * rows if of_line == group.length or rows == 1 else 0

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
        if self.folded:
            each = f", each over {self.expert_tensor_size}" if self.expert_tensor_size > 1 else ""
            stage = self.tensor * self.data
            text += f", experts over {self.expert_ranks} of a stage's {stage} ranks{each}"
        elif self.expert > 1:
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

    def position(self, rank: int) -> int:
        """Return the number of a global rank within its pipeline stage."""
        tensor, data, _ = self.coordinates(rank)
        return data * self.tensor + tensor

    def _stage_group(self, words: str, stride: int, size: int) -> RankGroup:
        """Return a group of `size` ranks of a stage whose positions are `stride` apart."""
        tensor, data, _ = self.strides
        if stride % self.tensor == 0:
            return RankGroup(words, stride // self.tensor * data, size)
        if stride * size <= self.tensor or data == tensor * self.tensor:
            return RankGroup(words, stride * tensor, size)
        length = self.tensor // stride  # in each of several tensor-parallel groups
        return RankGroup(words, stride * tensor, length, data, size // length)

    @functools.cached_property
    def lines(self) -> dict[str, RankGroup]:
        """Groups of ranks that communicate, by kind; for ZeRO's groups see ShardGroups.

        expert_inputs  ranks that divide each expert and have different samples
        expert_span    neighbours in the data dimension that, with the other tensor-parallel ranks
                       of each, are whole expert-parallel groups
        """
        tensor, data, pipeline = self.strides
        each = self.expert_node
        per_expert = self.expert_tensor_size
        nodes = self.expert // self.expert_node
        of_experts = self.tensor * self.data // self.expert_ranks
        lines = {
            "world": RankGroup("world", 1, self.world_size),
            "tensor": RankGroup("tensor-parallel", tensor, self.tensor),
            "data": RankGroup("data-parallel", data, self.data),
            "pipeline": RankGroup("pipeline-parallel", pipeline, self.pipeline),
            "context": RankGroup("context-parallel", data, self.context),
        }
        for name, words, stride, size in (
            ("expert", "expert-parallel", per_expert, self.expert),
            ("expert_data", "expert data-parallel", self.expert_ranks, of_experts),
            (
                "expert_between",
                "expert-parallel between nodes",
                per_expert * each,
                nodes if each > 1 else 1,
            ),
            ("expert_within", "expert-parallel within nodes", per_expert, each),
            ("expert_tensor", "expert tensor-parallel", 1, per_expert),
            (
                "expert_inputs",
                "inputs of divided experts",
                self.tensor,
                max(1, per_expert // self.tensor),
            ),
            (
                "expert_span",
                "experts' data-parallel span",
                self.tensor,
                math.lcm(self.expert_ranks, self.tensor) // self.tensor,
            ),
        ):
            lines[name] = self._stage_group(words, stride, size)
        for name, stride, divisor, size in (
            ("data", self.tensor, self.tensor, self.data),
            ("expert_data", self.expert_ranks, self.expert_ranks, of_experts),
        ):
            words = lines[name].words
            inner, states = (max(1, ranks * self.tensor // divisor) for ranks in self.shard_sizes)
            for dimension, what, apart, count in (
                ("inner", "one copy of gradients", 1, inner),
                ("outer", "shards of states", inner, states // inner),
                ("states", "one copy of states", 1, states),
                ("copies", "copies", states, size // states),
            ):
                lines[f"{name}.{dimension}"] = self._stage_group(
                    f"{words}, {what}", stride * apart, count
                )
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
        return self.lines[kind].ranks_of(rank)


KINDS = (*Layout().lines, "model", "embedding")
"""Kinds of groups: those of `Layout.lines`, "model" (the tensor-parallel ranks of all stages) and
"embedding" (the first and the last pipeline rank).
"""
