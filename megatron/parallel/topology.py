"""This process's position in the job, and its process groups."""

from __future__ import annotations

import contextlib
import datetime
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING

from megatron.parallel.flight import FlightRecorder
from megatron.parallel.host_processes import bounded
from megatron.parallel.layout import Layout, LayoutSizes
from megatron.parallel.sharding import Sharding

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    GroupFactory = Callable[[Sequence[int]], ProcessGroup]

_LATE_S = 5.0  # how long after the time limit torch's own, more detailed error may come


def compress_ranks(ranks: Iterable[int]) -> str:
    """Format rank numbers as ranges.

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


def neighbours(size: int, owners: Sequence[int] = ()) -> list[list[tuple[int, int]]]:
    """Return the pairs of pipeline ranks that have neighbouring stages, in rounds.

    In a round each of the `size` ranks is in at most one pair. `owners` has the rank of each stage;
    by default the ranks are neighbours in a ring: so are the last one and the first, if there are
    more than two.

    >>> neighbours(4), neighbours(4, [0, 1, 3, 3, 1, 0])
    ([[(0, 1), (2, 3)], [(1, 2)], [(3, 0)]], [[(0, 1)], [(1, 3)]])
    """
    rounds = [[(low, low + 1) for low in range(first, size - 1, 2)] for first in (0, 1)]
    if size > 2:
        rounds.append([(size - 1, 0)])
    if owners:
        used = {frozenset(pair) for pair in pairwise(owners) if pair[0] != pair[1]}
        rounds = [[pair for pair in pairs if frozenset(pair) in used] for pairs in rounds]
        others = used - {frozenset(pair) for pairs in rounds for pair in pairs}
        rounds += [[(low, high)] for low, high in sorted(map(sorted, others))]
    return [pairs for pairs in rounds if pairs]


@dataclass(frozen=True)
class Group:
    """Some ranks that communicate, seen from one of them.

    `handle` is the torch process group; None if the group never communicates: if it has one member,
    or in planning. Communication over the group is recorded in `flight`, under the group's `kind`
    (one of flight.KINDS). `pairs` contains groups of two for messages (collectives.post), by the
    global rank of the other member.
    """

    ranks: Sequence[int]
    rank: int
    handle: ProcessGroup | None = None
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


@dataclass(frozen=True)
class ShardGroups:
    """The groups over which ZeRO shards the state that every data-parallel rank would hold.

    inner   neighbours that together hold one copy of the gradients and, with stage 3, the weights
    outer   ranks with the same shard of these, each with a different part of the shard's optimizer
            state
    states  the ranks that together hold one copy of the optimizer's state: inner times outer
    copies  ranks with the same shard of the optimizer's state
    """

    inner: Group
    outer: Group
    states: Group
    copies: Group

    @classmethod
    def undivided(cls, group: Group) -> ShardGroups:
        """Return the groups of ZeRO stage 0: every rank of `group` holds everything."""
        alone = Group((group.ranks[group.rank],), 0)
        return cls(alone, alone, alone, group)

    @property
    def shard_index(self) -> int:
        """Return the index of this rank's optimizer shard among the `states.size` equal shards."""
        return self.shard_index_of(self.states.rank)

    def shard_index_of(self, member: int) -> int:
        """Return the index of the optimizer shard of a member of `states`."""
        outer, inner = divmod(member, self.inner.size)
        return inner * self.outer.size + outer


@dataclass
class _Groups:
    """Builder of a rank's groups; see Topology.from_layout."""

    layout: Layout
    rank: int
    new_group: GroupFactory | None
    all_ranks: ProcessGroup | None
    flight: FlightRecorder

    def make(self, kind: str, *known: Group, ends: Iterable[int] = ()) -> Group:
        """Return the group of a kind: a `known` one with the same ranks, if any.

        ends  the pipeline ranks in the group of kind "embedding"
        """
        ranks = self.layout.ranks("pipeline" if ends else kind, self.rank)
        if ends:
            ranks = tuple(ranks[end] for end in sorted(ends))
        for group in known:
            if len(group.ranks) == len(ranks) and all(map(operator.eq, group.ranks, ranks)):
                return group
        handle = None
        if self.new_group is not None and len(ranks) == self.layout.world_size > 1:
            handle = self.all_ranks = self.all_ranks or self.new_group(ranks)
        elif self.new_group is not None and len(ranks) > 1:
            handle = self.new_group(ranks)
        return self._group(ranks, handle, kind)

    def _group(self, ranks: Sequence[int], handle: ProcessGroup | None, kind: str) -> Group:
        return Group(ranks, ranks.index(self.rank), handle, kind, self.flight)

    def pair(self, group: Group, owners: Sequence[int]) -> None:
        """Create a group for each pair of neighbours of this rank, which carries only messages."""
        if self.new_group is None:
            return
        for pairs in neighbours(group.size, owners):
            ends = next((each for each in pairs if group.rank in each), (group.rank,))
            ranks = sorted(group.ranks[member] for member in ends)
            handle = self.new_group(ranks)  # even for this rank alone; see from_layout
            for peer in set(ranks) - {self.rank}:
                group.pairs[peer] = self._group(ranks, handle, group.kind)

    def shards(self, group: Group) -> ShardGroups:
        """Divide `group` for ZeRO; subgroups with the same ranks are one group."""
        known = [group]
        for dimension in fields(ShardGroups):
            known.append(self.make(f"{group.kind}.{dimension.name}", *known))
        return ShardGroups(*known[1:])


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This process's rank, its groups and its device, passed to everything that communicates.

    `data` is the full group over which gradients are summed and ZeRO shards: all replicas, and all
    context ranks of each. `context` is a subgroup of it. Experts are divided over ranks of the
    stage as Layout says: the groups that its `lines` describe have the same names here. `shards`
    divides `data` for ZeRO; `expert_shards` divides `expert_data`, the ranks with the same experts.
    `owners` has the pipeline rank of each stage (pipeline.orders.stage_owners), `ends` those of the
    first and of the last stage. `embedding` joins these two if both hold a tied embedding; it is
    None if they are one rank, and on the other ranks.
    """

    layout: Layout
    rank: int
    world: Group
    tensor: Group
    data: Group
    pipeline: Group
    model: Group
    embedding: Group | None
    device: torch.device
    context: Group
    expert: Group
    expert_data: Group
    expert_between: Group
    expert_within: Group
    expert_tensor: Group
    expert_inputs: Group
    expert_span: Group
    shards: ShardGroups
    expert_shards: ShardGroups
    owners: Sequence[int]

    @property
    def ends(self) -> tuple[int, int]:
        return self.owners[0], self.owners[-1]

    @property
    def has_first_stage(self) -> bool:
        return self.pipeline.rank == self.ends[0]

    @property
    def has_last_stage(self) -> bool:
        """Return whether this rank computes the loss."""
        return self.pipeline.rank == self.ends[1]

    @property
    def expert_hops(self) -> tuple[Group, ...]:
        """The groups over which a token is sent to its experts, in order."""
        two = self.layout.expert_node > 1
        return (self.expert_between, self.expert_within) if two else (self.expert,)

    def tensor_of(self, sharding: Sharding) -> Group:
        """Return the ranks that divide a parameter, or hold copies of what they do not divide."""
        return self.expert_tensor if sharding.experts else self.tensor

    def holders_of_state(
        self, states: Group, expert_states: Group
    ) -> list[tuple[tuple[bool, ...], Group, int]]:
        """Return data-parallel ranks that, with all tensor ranks, hold the optimizer's state.

        Each entry has the parameters (Sharding.experts) whose state its ranks hold, these ranks,
        and how often they hold it: one entry for all parameters, if their ranks are the same.

        states, expert_states  ShardGroups.states of other parameters, and of experts
        """
        once = self.layout.expert_ranks
        group = self.expert_span if states.size * self.tensor.size % once else states
        copies = group.size * self.tensor.size // (once * expert_states.size)
        if group is states and copies == 1:
            return [((False, True), states, 1)]
        return [((False,), states, 1), ((True,), group, copies)]

    @property
    def groups(self) -> list[Group]:
        """The groups with other ranks, each once, in the same order on all ranks; without pairs."""
        groups: dict[int, Group] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            members = vars(value).values() if isinstance(value, ShardGroups) else (value,)
            for group in members:
                if isinstance(group, Group) and group.handle is not None:
                    groups.setdefault(id(group.handle), group)
        return list(groups.values())

    def abort(self) -> None:
        """Make calls that wait in a communicator of NCCL or RCCL fail; not run on several GPUs."""
        for group in (*self.groups, *self.pipeline.pairs.values()):
            with contextlib.suppress(AttributeError, RuntimeError):
                if group.handle is not None:
                    group.handle._get_backend(self.device).abort()

    @property
    def flight(self) -> FlightRecorder:
        """The recorder of this rank's current activity, which others read when the rank hangs."""
        return self.world.flight

    @property
    def replica(self) -> int:
        """The index of this rank's data-parallel replica among `layout.replicas`."""
        return self.data.rank // self.context.size

    def messages_between(
        self, ranks: Sequence[int], timeout: datetime.timedelta | None = None
    ) -> Group:
        """Create a group for messages from host memory, beside those of the groups of training.

        The members of each such group call this; all ranks of the world are in one. Raises
        LaunchError if ranks do not form a group in time.
        """
        import torch.distributed as dist

        def form() -> ProcessGroup:
            made: ProcessGroup = dist.new_group(
                list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True
            )
            return made

        seconds = (timeout or dist.default_pg_timeout).total_seconds() + _LATE_S
        handle = bounded(form, seconds, f"ranks {compress_ranks(ranks)} did not form a group")
        return Group(ranks, ranks.index(self.rank), handle, "other", self.flight)

    @classmethod
    def create(
        cls,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        *,
        device: torch.device | str | None = None,
        timeout: datetime.timedelta | None = None,
        tied_embeddings: bool = True,
        flight: FlightRecorder | None = None,
        sizes: LayoutSizes | None = None,
        owners: Sequence[int] = (),
    ) -> Topology:
        """Build the groups of this process over the initialised default process group.

        Without a process group there is a single process. `tied_embeddings` False omits the group
        that only a tied embedding needs. `flight` records the calls in which this rank waits
        (Rendezvous.flight); by default nobody reads the record. `sizes`, the same on all ranks,
        replaces the first two arguments. `owners` has the pipeline rank of each stage, by default
        those of round-robin stages.

        Raises the ConfigError of Layout.for_world, and LaunchError if ranks do not form a group in
        time.
        """
        import torch
        import torch.distributed as dist

        running = dist.is_available() and dist.is_initialized()
        world_size, rank = (dist.get_world_size(), dist.get_rank()) if running else (1, 0)
        sizes = sizes or LayoutSizes(tensor_model_parallel_size, pipeline_model_parallel_size)
        layout = Layout.for_world(world_size, sizes)
        device = torch.device("cpu") if device is None else torch.device(device)
        # While gloo connects, it waits five times `timeout` for a member that died, and cannot be
        # interrupted.
        seconds = (timeout or dist.default_pg_timeout).total_seconds() + _LATE_S

        def new_group(ranks: Sequence[int]) -> ProcessGroup:
            def form() -> ProcessGroup:
                if device.type == "cuda" and device.index is not None:
                    torch.cuda.set_device(device)  # the current device is per thread
                # Only the members take part: with thousands of ranks, a collective call by the
                # world for each group would take minutes.
                made: ProcessGroup = dist.new_group(
                    list(ranks), timeout=timeout, use_local_synchronization=True
                )
                return made

            return bounded(form, seconds, f"ranks {compress_ranks(ranks)} did not form a group")

        return cls.from_layout(
            layout,
            rank,
            device=device,
            new_group=new_group if running else None,
            all_ranks=dist.group.WORLD if running else None,
            tied_embeddings=tied_embeddings,
            flight=flight,
            owners=owners,
        )

    @classmethod
    def from_layout(
        cls,
        layout: Layout,
        rank: int,
        *,
        device: torch.device | None = None,
        new_group: GroupFactory | None = None,
        all_ranks: ProcessGroup | None = None,
        tied_embeddings: bool = True,
        flight: FlightRecorder | None = None,
        owners: Sequence[int] = (),
    ) -> Topology:
        """Return the topology of `rank` on `layout`.

        Without `new_group` nothing communicates: for planning and tests. `all_ranks` is the handle
        of the world, if there is one; `new_group` makes the handles of the other groups.
        """
        import torch

        p = layout.coordinates(rank)[2]
        groups = _Groups(layout, rank, new_group, all_ranks, flight or FlightRecorder())
        # All members create their groups in this order, so that overlapping groups form without
        # deadlock.
        made = {kind: groups.make(kind) for kind in ("world", "tensor", "data", "pipeline")}
        pipeline = made["pipeline"]
        made["model"] = groups.make("model", pipeline, made["tensor"])
        embedding = None
        ends = {owners[0], owners[-1]} if owners else {0, layout.pipeline - 1}
        if tied_embeddings and len(ends) > 1 and p in ends:
            embedding = groups.make("embedding", pipeline, ends=ends)
        elif tied_embeddings and len(ends) > 1 and layout.pipeline > 2 and new_group is not None:
            # torch names a group after its ranks and the number of groups this rank has created.
            # This number must be the same for all members of the next group, which may belong to
            # another topology.
            new_group((rank,))
        made |= {kind: groups.make(kind) for kind in ("context", "expert")}
        made["expert_data"] = groups.make("expert_data", made["data"])
        shards = groups.shards(made["data"])
        expert_shards = shards
        if made["expert_data"] is not made["data"]:
            expert_shards = groups.shards(made["expert_data"])
        made |= {kind: groups.make(kind) for kind in ("expert_between", "expert_within")}
        made["expert_tensor"] = groups.make("expert_tensor", made["tensor"])
        made["expert_inputs"] = groups.make("expert_inputs", made["expert_tensor"])
        made["expert_span"] = groups.make("expert_span", made["expert"])
        groups.pair(pipeline, owners)
        return cls(
            layout=layout,
            rank=rank,
            embedding=embedding,
            device=device or torch.device("cpu"),
            shards=shards,
            expert_shards=expert_shards,
            owners=owners or range(layout.pipeline),
            **made,
        )

    def describe(self, locations: Sequence[str] = ()) -> str:
        """Return the layout and the first group of each dimension, in a few lines.

        locations  node and device of each rank

        For a single rank the groups are left out.
        """

        def show(ranks: Sequence[int]) -> str:
            named = [f"{r} ({locations[r]})" if r < len(locations) else str(r) for r in ranks[:16]]
            return ", ".join(named) + (f", ... {len(ranks) - 16} more" if len(ranks) > 16 else "")

        layout = self.layout
        line = f" layout: {layout.world_size} ranks = {layout}, rank order {layout.order}"
        if layout.world_size == 1:
            return line
        kinds = [name for name in ("context", "expert") if getattr(layout, name) > 1]
        kinds += ["expert_tensor"] * layout.folded
        for kind in ("tensor", "pipeline", "data", *kinds):
            ranks = layout.ranks(kind, 0)[:: layout.context if kind == "data" else 1]
            words = kind.replace("_", " ")
            line += f"\n   first {f'{words}-parallel group:':<32}{show(ranks)}"
        return line
