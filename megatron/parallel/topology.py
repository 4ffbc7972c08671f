"""This process's place among all, and the process groups that it takes part in.

Rank order: unless another one is chosen, the tensor-parallel rank varies fastest, then the
data-parallel rank, then the pipeline rank. So neighbouring ranks, which launchers put on one node,
form the groups that communicate most.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron.config.parallel import RANK_ORDERS
from megatron.errors import ConfigError
from megatron.parallel.flight import FlightRecorder
from megatron.parallel.processes import bounded

DEFAULT_ORDER = RANK_ORDERS[0]

_LATE_S = 5.0  # torch's own, more detailed message may come this late


def compress_ranks(ranks: Iterable[int]) -> str:
    """Return rank numbers as ranges.

    >>> compress_ranks([7, 3, 5, 6])
    '3, 5-7'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True)
class Layout:
    """Sizes of the directions; pure arithmetic on rank numbers.

    >>> Layout(tensor=2, pipeline=2, data=2).coordinates(5)
    (1, 0, 1)
    >>> list(Layout(tensor=2, pipeline=2, data=2).data_ranks(tensor=1, pipeline=1))
    [5, 7]

    The data line is the direction over which gradients are reduced. Its members m divide once more:
    into replicas of the samples, each of `context` neighbours that share the sequences of a replica
    (m = replica * context + context rank), and into lines of `expert` neighbours that hold
    different experts. With the same m % expert, they hold the same experts.

    >>> Layout(data=8, context=2, expert=4).replicas
    4
    >>> list(Layout(data=8, context=2, expert=4).expert_data_ranks(5))
    [1, 5]

    ZeRO divides gradients, and with stage 3 weights, over `shard` neighbours of the data line, and
    the optimizer's state over `states` of them; 0 means all.
    Lines of experts over several nodes, with `expert_node` neighbours on each, divide into these
    and into lines between the nodes. 1: tokens do not go over nodes (for_world).

    >>> layout = Layout(data=8, expert=8, expert_node=4)
    >>> list(layout.expert_within_ranks(6)), list(layout.expert_between_ranks(6))
    ([4, 5, 6, 7], [2, 6])

    `order` names the directions from the one that varies fastest over the ranks to the slowest: any
    of RANK_ORDERS.

    >>> Layout(tensor=2, pipeline=2, data=2, order="tp-pp-dp").coordinates(5)
    (1, 1, 0)

    Lines of the grid are ranges, which take no memory: some jobs have 75,000 ranks.
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
                    "ranks that share each part of the model: start more processes, or change it"
                )
        shard, states = self.shard_sizes
        if states % shard or self.data % states or (shard % self.expert and self.expert % shard):
            experts = f", and {self.expert} ranks of experts" if self.expert > 1 else ""
            raise ConfigError(
                f"ZeRO over {shard} ranks, and its optimizer states over {states}, do not divide "
                f"the {self.data} ranks that share each part of the model{experts}: change "
                "--zero-shard-size or --zero-state-shard-size"
            )

    @classmethod
    def for_world(
        cls,
        world_size: int,
        tensor: int,
        pipeline: int,
        order: str = DEFAULT_ORDER,
        context: int = 1,
        expert: int = 1,
        expert_node: int | None = None,
        per_node: int = 1,
        shard: int = 0,
        states: int = 0,
    ) -> Layout:
        """Return the layout of `world_size` processes; the length of the data line is what remains.

        expert_node  None: as many as there are on nodes of `per_node` ranks, or 1 if lines of
                     experts divide them unevenly

        Raises ConfigError when the processes do not divide into whole replicas.
        """
        data, rest = divmod(world_size, tensor * pipeline)
        if rest or not data:
            raise ConfigError(
                f"world size {world_size} is not a multiple of tensor-model-parallel-size {tensor} "
                f"x pipeline-model-parallel-size {pipeline} = {tensor * pipeline}: start "
                f"{max(1, data) * tensor * pipeline} processes or change the sizes"
            )
        layout = cls(tensor, pipeline, data, order, context, expert)
        each, rest = divmod(per_node, layout.strides[1])
        each = 0 if rest else min(each, data)
        if -1 in (shard, states) and not each:
            raise ConfigError(
                f"the nodes have no neighbouring data-parallel ranks of their own in rank order "
                f"{order}: give --zero-shard-size and --zero-state-shard-size as numbers"
            )
        shard, states = (each if size == -1 else size for size in (shard, states))
        layout = replace(layout, shard=shard, states=states)
        each = each if expert_node is None else expert_node
        over_nodes = 1 < each < expert and expert % each == 0
        return replace(layout, expert_node=each) if over_nodes else layout

    @property
    def shard_sizes(self) -> tuple[int, int]:
        """Return over how many ranks ZeRO divides gradients or weights, and optimizer states."""
        return self.shard or self.data, self.states or self.data

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def replicas(self) -> int:
        """Return the data-parallel size: the number of replicas with samples of their own."""
        return self.data // self.context

    def __str__(self) -> str:
        """Return the sizes, such as tensor 2 x pipeline 1 x context 2 x data 4."""
        context = f" x context {self.context}" if self.context > 1 else ""
        return (
            f"tensor {self.tensor} x pipeline {self.pipeline}{context} x data {self.replicas}"
            + (
                f", experts over {self.expert} of the {self.data} data-parallel ranks"
                if self.expert > 1
                else ""
            )
            + (f", {self.expert_node} on each node" if self.expert_node > 1 else "")
            + (
                f", ZeRO over {self.shard_sizes[0]} of the data-parallel ranks, its states over "
                f"{self.shard_sizes[1]}"
                if self.shard or self.states
                else ""
            )
        )

    @functools.cached_property
    def strides(self) -> tuple[int, int, int]:
        """Distances between neighbours in the tensor, data and pipeline direction, in ranks."""
        sizes = {"tp": self.tensor, "dp": self.data, "pp": self.pipeline}
        strides, stride = {}, 1
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

    def tensor_ranks(self, *, data: int, pipeline: int) -> range:
        return _line(
            self.rank(tensor=0, data=data, pipeline=pipeline), self.tensor, self.strides[0]
        )

    def data_ranks(self, *, tensor: int, pipeline: int) -> range:
        return _line(
            self.rank(tensor=tensor, data=0, pipeline=pipeline), self.data, self.strides[1]
        )

    def context_ranks(self, rank: int) -> range:
        """Return the ranks that hold parts of the same sequences as `rank`."""
        return self._neighbours(rank, self.context)

    def expert_ranks(self, rank: int) -> range:
        """Return the ranks that together hold the experts of which `rank` holds some."""
        return self._neighbours(rank, self.expert)

    def expert_within_ranks(self, rank: int) -> range:
        """Return those of the expert ranks that are on the node of `rank`."""
        return self._neighbours(rank, self.expert_node)

    def expert_between_ranks(self, rank: int) -> range:
        """Return those that have the place of `rank` on their nodes; `rank` if there is one hop."""
        place = self.coordinates(rank)[1] % self.expert_node
        return self.expert_ranks(rank)[place :: self.expert_node]

    def expert_data_ranks(self, rank: int) -> range:
        """Return the ranks that hold the same experts as `rank`."""
        t, d, p = self.coordinates(rank)
        first, stride = self.rank(tensor=t, data=d % self.expert, pipeline=p), self.strides[1]
        return _line(first, self.data // self.expert, self.expert * stride)

    def _neighbours(self, rank: int, size: int) -> range:
        t, d, p = self.coordinates(rank)
        first = self.rank(tensor=t, data=d - d % size, pipeline=p)
        return _line(first, size, self.strides[1])

    def pipeline_ranks(self, *, tensor: int, data: int) -> range:
        return _line(
            self.rank(tensor=tensor, data=data, pipeline=0), self.pipeline, self.strides[2]
        )

    def model_ranks(self, *, data: int) -> tuple[int, ...]:
        """Return the ranks of one replica of the model, in ascending order as in torch's group."""
        lines = (self.tensor_ranks(data=data, pipeline=p) for p in range(self.pipeline))
        return tuple(sorted(rank for line in lines for rank in line))


def _line(first: int, size: int, stride: int) -> range:
    return range(first, first + size * stride, stride)


def neighbours(size: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbours in a ring of `size`, in rounds in which each member has one.

    >>> neighbours(4)
    [[(0, 1), (2, 3)], [(1, 2)], [(3, 0)]]
    """
    rounds = [[(low, low + 1) for low in range(first, size - 1, 2)] for first in (0, 1)]
    if size > 2:
        rounds.append([(size - 1, 0)])
    return [pairs for pairs in rounds if pairs]


@dataclass(frozen=True)
class Group:
    """Some ranks that communicate, seen from one of them.

    `handle` is the torch process group; None for a group of one, which never communicates.
    Communication over the group is recorded in `flight`, under the group's `kind` (one of
    flight.KINDS). `pairs` has, by the global rank of the other member, groups of two for messages
    (collectives.post).
    """

    ranks: Sequence[int]
    rank: int
    handle: Any = None
    kind: str = "other"
    flight: FlightRecorder = field(default_factory=FlightRecorder, compare=False, repr=False)
    pairs: dict[int, Group] = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


GroupFactory = Callable[[Sequence[int]], Any]


@dataclass(frozen=True)
class Shards:
    """The ranks over which ZeRO divides what all of a line would hold.

    inner   neighbours that hold gradients, and with stage 3 weights, once
    outer   ranks with the same part of these, each with another part of its optimizer states
    states  the ranks that hold the optimizer's state once: inner times outer
    copies  ranks with the same part of the optimizer's state
    """

    inner: Group
    outer: Group
    states: Group
    copies: Group

    @classmethod
    def undivided(cls, line: Group) -> Shards:
        """Return what ZeRO stage 0 has: all ranks of the line hold everything."""
        alone = Group((line.ranks[line.rank],), 0)
        return cls(alone, alone, alone, line)

    @property
    def part(self) -> int:
        """Return which of `states.size` equal parts the optimizer of this rank has."""
        return self.part_of(self.states.rank)

    def part_of(self, member: int) -> int:
        """Return which part a member of `states` has."""
        outer, inner = divmod(member, self.inner.size)
        return inner * self.outer.size + outer

    def have_all(self, experts: Group) -> bool:
        """Return whether the ranks of `states` have all experts of a layer among them."""
        return self.states.size % experts.size == 0

    @property
    def hops(self) -> int:
        """Return the number of messages, one after another, that sum a gradient."""
        return sum(group.size > 1 for group in (self.inner, self.outer, self.copies))


@dataclass(frozen=True)
class Topology:
    """This process's place, its groups and its device, passed to everything that communicates.

    `data` is the whole line over which gradients are summed and ZeRO shards: all replicas of the
    samples, and all context ranks of each. `context` and the groups of experts are parts of it
    (Layout). `shards` divides it for ZeRO, `expert_shards` the ranks with the same experts.
    `embedding` joins the first and last pipeline stages where both hold a tied embedding;
    None elsewhere.
    """

    layout: Layout
    rank: int
    world: Group
    tensor: Group
    data: Group
    pipeline: Group
    model: Group
    embedding: Group | None
    device: Any
    context: Group
    expert: Group
    expert_data: Group
    expert_between: Group
    expert_within: Group
    shards: Shards
    expert_shards: Shards

    @property
    def expert_hops(self) -> tuple[Group, ...]:
        """The groups in which a token goes to its experts, one after the other."""
        two = self.layout.expert_node > 1
        return (self.expert_between, self.expert_within) if two else (self.expert,)

    @property
    def groups(self) -> list[Group]:
        """The groups of more than this rank, each once, in the same order on all ranks."""
        groups: dict[int, Group] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            parts = vars(value).values() if isinstance(value, Shards) else (value,)
            for part in parts:
                if isinstance(part, Group) and part.handle is not None:
                    groups.setdefault(id(part.handle), part)
        return list(groups.values())

    @property
    def flight(self) -> FlightRecorder:
        """The recorder of this rank's current activity, for others to read when it hangs."""
        return self.world.flight

    @property
    def replica(self) -> int:
        """The number of this rank's replica of the samples, of `layout.replicas`."""
        return self.data.rank // self.context.size

    @classmethod
    def create(
        cls,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        *,
        device: Any = None,
        timeout: datetime.timedelta | None = None,
        tied_embeddings: bool = True,
        flight: FlightRecorder | None = None,
        order: str = DEFAULT_ORDER,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        zero_shard_size: int = 0,
        zero_state_shard_size: int = 0,
        expert_ranks_per_node: int | None = None,
        ranks_per_node: int = 1,
    ) -> Topology:
        """Build the groups of this process over the initialised default process group.

        Without one there is a single process. `tied_embeddings` False saves the group that only a
        tied embedding needs. `flight` records what this rank waits in (Rendezvous.flight); by
        default the record is not read. `order` is Layout's, the same on all ranks, as are
        `expert_ranks_per_node` and `ranks_per_node` (Layout.for_world).

        Raises ConfigError when the world does not divide, and LaunchError when ranks do not form a
        group in time.
        """
        import torch
        import torch.distributed as dist

        running = dist.is_available() and dist.is_initialized()
        world_size, rank = (dist.get_world_size(), dist.get_rank()) if running else (1, 0)
        layout = Layout.for_world(
            world_size,
            tensor_model_parallel_size,
            pipeline_model_parallel_size,
            order,
            context_parallel_size,
            expert_model_parallel_size,
            expert_ranks_per_node,
            ranks_per_node,
            zero_shard_size,
            zero_state_shard_size,
        )
        device = torch.device("cpu") if device is None else torch.device(device)
        # While gloo connects, it waits five times `timeout` for a member that died, and cannot be
        # interrupted.
        seconds = (timeout or dist.default_pg_timeout).total_seconds() + _LATE_S

        def new_group(ranks: Sequence[int]) -> Any:
            def form() -> Any:
                if device.type == "cuda" and device.index is not None:
                    torch.cuda.set_device(device)  # the current device is per thread
                # Only the members take part: at thousands of ranks a call of the world per group
                # takes minutes.
                return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)

            return bounded(form, seconds, f"ranks {compress_ranks(ranks)} did not form a group")

        return cls.from_layout(
            layout,
            rank,
            device=device,
            new_group=new_group if running else None,
            all_ranks=dist.group.WORLD if running else None,
            tied_embeddings=tied_embeddings,
            flight=flight,
        )

    @classmethod
    def from_layout(
        cls,
        layout: Layout,
        rank: int,
        *,
        device: Any = None,
        new_group: GroupFactory | None = None,
        all_ranks: Any = None,
        tied_embeddings: bool = True,
        flight: FlightRecorder | None = None,
    ) -> Topology:
        """Return the view of `rank` on `layout`.

        Without `new_group` nothing communicates: for planning and tests. `all_ranks` is the handle
        of the world where there is one; `new_group` makes the others.
        """
        t, d, p = layout.coordinates(rank)
        recorder = flight or FlightRecorder()

        def group(kind: str, ranks: Sequence[int]) -> Group:
            nonlocal all_ranks
            handle = None
            if new_group is not None and len(ranks) == layout.world_size > 1:
                handle = all_ranks = all_ranks or new_group(ranks)
            elif new_group is not None and len(ranks) > 1:
                handle = new_group(ranks)
            return Group(ranks, ranks.index(rank), handle, kind, recorder)

        def pair(line: Group) -> None:
            """Give the pairs of neighbours their groups, in which nothing but messages goes."""
            if new_group is None:
                return
            for pairs in neighbours(line.size):
                ends = next((each for each in pairs if line.rank in each), (line.rank,))
                ranks = sorted(line.ranks[member] for member in ends)
                handle = new_group(ranks)  # also where it is alone: see tied embeddings
                for peer in set(ranks) - {rank}:
                    made = Group(ranks, ranks.index(rank), handle, line.kind, recorder)
                    line.pairs[peer] = made

        def shards(name: str, line: Group, each: int) -> Shards:
            """Divide a line, of which a member stands for `each` of the data line."""
            of = [max(1, size // each) for size in layout.shard_sizes]
            made = [line]

            def part(kind: str, size: int, stride: int) -> Group:
                block = line.rank - line.rank % (size * stride)
                ranks = line.ranks[block + line.rank % stride : block + size * stride : stride]
                for known in made:
                    if known.ranks == ranks:
                        return known
                made.append(group(f"{name}.{kind}", ranks))
                return made[-1]

            inner, outer = part("inner", of[0], 1), part("outer", of[1] // of[0], of[0])
            return Shards(
                inner, outer, part("states", of[1], 1), part("copies", line.size // of[1], of[1])
            )

        # All members create their groups in this order, so that overlapping groups form without
        # deadlock.
        world = group("world", range(layout.world_size))
        tensor = group("tensor", layout.tensor_ranks(data=d, pipeline=p))
        data = group("data", layout.data_ranks(tensor=t, pipeline=p))
        pipeline = group("pipeline", layout.pipeline_ranks(tensor=t, data=d))
        model_ranks = layout.model_ranks(data=d)
        same = [g for g in (pipeline, tensor) if tuple(g.ranks) == model_ranks]
        model = same[0] if same else group("model", model_ranks)
        embedding = None
        if tied_embeddings and layout.pipeline > 1 and p in (0, layout.pipeline - 1):
            ends = (pipeline.ranks[0], pipeline.ranks[-1])
            embedding = pipeline if layout.pipeline == 2 else group("embedding", ends)
        elif tied_embeddings and layout.pipeline > 2 and new_group is not None:
            # torch names a group by its ranks and the number of groups that this one knows. Members
            # of the next group, perhaps of another topology, must know as many.
            new_group((rank,))
        context = group("context", layout.context_ranks(rank))
        expert = group("expert", layout.expert_ranks(rank))
        same_experts = data if layout.expert == 1 else None
        expert_data = same_experts or group("expert_data", layout.expert_data_ranks(rank))
        of_data = shards("shards", data, 1)
        of_experts = of_data
        if layout.expert > 1:
            of_experts = shards("expert_shards", expert_data, layout.expert)
        two = layout.expert_node > 1
        between = layout.expert_between_ranks(rank) if two else (rank,)
        hops = (
            group("expert_between", between),
            group("expert_within", layout.expert_within_ranks(rank)),
        )
        pair(pipeline)
        return cls(
            layout,
            rank,
            world,
            tensor,
            data,
            pipeline,
            model,
            embedding,
            device,
            context,
            expert,
            expert_data,
            *hops,
            of_data,
            of_experts,
        )

    def describe(self, places: Sequence[str] = ()) -> str:
        """Return the layout in a few lines; `places` are node and device of each rank.

        One rank alone has no groups to show.
        """

        def show(ranks: Sequence[int]) -> str:
            named = [f"{r} ({places[r]})" if r < len(places) else str(r) for r in ranks[:16]]
            return ", ".join(named) + (f", ... {len(ranks) - 16} more" if len(ranks) > 16 else "")

        layout = self.layout
        line = f" layout: {layout.world_size} ranks = {layout}, rank order {layout.order}"
        if layout.world_size == 1:
            return line
        parts = [("context", layout.context_ranks(0))] if layout.context > 1 else []
        parts += [("expert", layout.expert_ranks(0))] if layout.expert > 1 else []
        more = "".join(
            f"\n   first {f'{name}-parallel group:':<25}{show(ranks)}" for name, ranks in parts
        )
        return (
            f"{line}\n   first tensor-parallel group:   "
            f"{show(layout.tensor_ranks(data=0, pipeline=0))}\n   first pipeline-parallel group: "
            f"{show(layout.pipeline_ranks(tensor=0, data=0))}\n   first data-parallel group:     "
            f"{show(layout.data_ranks(tensor=0, pipeline=0)[:: layout.context])}{more}"
        )
