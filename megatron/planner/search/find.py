"""Search: rank all layouts by a formula, then simulate the schedules of the best that fit."""

from __future__ import annotations

import heapq
import itertools
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatron.config import Config
from megatron.config.parallel import RANK_ORDERS, RecomputeConfig
from megatron.errors import ConfigError
from megatron.model.stages import stage_owners
from megatron.pipeline.schedule import check_clock
from megatron.planner.channels import EXCHANGES, Channels, wraps
from megatron.planner.cluster import GIB, Cluster
from megatron.planner.layout import (
    DIMENSIONS,
    CandidateLayout,
    Restrictions,
    Value,
    kind_of_recompute,
    recompute_settings,
    write_value,
)
from megatron.planner.memory import (
    offloaded_bytes,
    parameters_of_rank,
    peak_rank,
    state_bytes,
)
from megatron.planner.placement import (
    DISPATCHES,
    Placement,
    check_device_order,
    chosen_dispatch,
    dispatch_given,
    layout_of,
    over_nodes,
    placements_of,
)
from megatron.planner.progress import Progress
from megatron.planner.search.space import LayoutSpace, Rejections
from megatron.planner.stage import elements_of_rank
from megatron.planner.subprocesses import process_pool
from megatron.planner.timing import estimate, folded_seconds
from megatron.planner.trace import trace

ESTIMATED = 50
OF_EACH_VALUE = 12
"""Minimum numbers of layouts to estimate, if as many fit: in all, and with each value of each
dimension."""
_CLOSE = 1.01
"""A placement is estimated if its folded cost is at most this multiple of the lowest one."""
_ROUND = 64
"""Layouts per batch of memory checks; fixed, so that results do not depend on --processes."""
_PLACED = ("order", "devices", "epn")

Choice = tuple[str, Value]


class Ranked(NamedTuple):
    """Layout with its score: seconds per sample, by the formula or, once estimated, as simulated.

    memory  bytes on each device of the pipeline rank with the highest peak; 0 while unknown
    """

    score: float
    layout: CandidateLayout
    memory: float = 0.0

    @property
    def seconds(self) -> float:
        return self.score * self.layout.batch


class RejectedLayout(NamedTuple):
    """Layout that does not fit or is not valid.

    reason   why it was rejected, in words that are the same for similar layouts
    example  the problem of this layout in particular
    miss     bytes that it needs if it does not fit; otherwise 0
    """

    reason: str
    example: str
    miss: float = 0.0


@dataclass
class SearchResult:
    """Result of a search.

    estimated   layouts that were estimated, best first
    rejections  reasons for leaving out the others
    sizes       number of sizes that were considered
    seconds     duration of the search
    """

    estimated: list[Ranked] = field(default_factory=list)
    rejections: Rejections = field(default_factory=Rejections)
    sizes: int = 0
    seconds: float = 0.0

    @property
    def best(self) -> list[Ranked]:
        """Return the best layout for each combination of sizes."""
        by_sizes: dict[CandidateLayout, Ranked] = {}
        for one in self.estimated:
            by_sizes.setdefault(one.layout.sizes, one)
        return list(by_sizes.values())

    def by_value(self, per_node: int) -> dict[Choice, Ranked]:
        """Return the best layout for each (dimension, value), with any --recompute-num-layers."""
        return {
            value: one
            for one in reversed(self.estimated)
            for value in values_of(one.layout, per_node)
        }


def values_of(layout: CandidateLayout, per_node: int) -> list[Choice]:
    """List a layout's choices as (dimension, value), omitting dimensions without a choice."""
    layout = _without_counts(layout)
    return [
        (d.name, d.value(layout, per_node))
        for d in DIMENSIONS
        if d.name not in _PLACED and layout.has_choice(d.name)
    ]


def _without_counts(layout: CandidateLayout) -> CandidateLayout:
    """Return a layout with its kind of recomputation, without the number of layers."""
    return layout._replace(recompute=kind_of_recompute(layout.recompute))


@dataclass(frozen=True)
class LayoutSearch:
    """Space to search, and the evaluation of individual layouts.

    capacity  bytes on a device that a layout may use
    """

    space: LayoutSpace
    capacity: float
    _known: dict[Any, Any] = field(default_factory=dict)

    # -- tasks -------------------------------------------------------------------------------------

    def rank(self, sizes: Sequence[CandidateLayout]) -> tuple[list[Ranked], list[RejectedLayout]]:
        """Rank all layouts of these sizes, which share a micro-batch size.

        Weights, gradients and optimizer state must fit. For each kind of recomputation, only the
        layout with the smallest --recompute-num-layers is ranked. If no layout fits (_too_big),
        only the nearest misfit is returned.
        """
        too_big = self._too_big(sizes)
        if too_big is not None:
            return [], [too_big]
        ranked = list[Ranked]()
        rejected = list[RejectedLayout]()
        for size in sizes:
            layouts = [*self.space.variants(size)][::-1]
            try:
                config = self.space.config(size)
                for layout in {_without_counts(v): v for v in layouts}.values():
                    variant = _with(config, self.space.with_numbers(layout))
                    states, on_host, rank = self._states(variant)
                    if states > self.capacity:
                        rejected.append(self._misfit(layout, states, rank))
                    elif on_host and on_host > self._room_on_host:
                        reason = f"needs more than {self._room_on_host / GIB:.1f} GiB on the host"
                        example = f"{on_host / GIB:.1f} GiB: {self.space.write(layout)}"
                        rejected.append(RejectedLayout(reason, example, on_host))
                    else:
                        ranked.append(Ranked(self._folded(layout, variant), layout))
            except ConfigError as error:
                rejected.append(_refused(error))
        return ranked, rejected

    def fit(self, ranked: Ranked) -> Ranked | RejectedLayout:
        """Find and score the layout with the smallest --recompute-num-layers that fits.

        If none fits, return the nearest misfit.
        """
        layout = ranked.layout
        options = (layout._replace(recompute=v) for v in self.space.recomputations(layout))
        misfits = list[RejectedLayout]()
        try:
            for option in options:
                if _without_counts(option) != _without_counts(layout):
                    continue
                config = self.space.config(option)
                full = peak_rank(config, self.space.cluster.device_type, self.capacity)
                if full.total <= self.capacity:
                    return Ranked(self._folded(option, config), option, full.total)
                misfits.append(self._misfit(option, full.total, full.rank))
        except ConfigError as error:
            return _refused(error)
        return min(misfits, key=lambda rejected: rejected.miss)

    def judge(self, alike: Sequence[Ranked]) -> list[Ranked]:
        """Estimate layouts with the same instruction lists, so that these are built only once.

        Each layout is estimated on the best of its placements.
        """
        judged = []
        cluster = self.space.cluster
        for _, layout, memory in alike:
            config = self.space.config(layout)
            every = self._channels(config)
            costs = [
                (folded_seconds(config, cluster, channels), channels.placement)
                for channels in [one for one in every if self._has_room(config, one)] or every
            ]
            least = min(cost for cost, _ in costs)
            close = {
                cost: placement for cost, placement in reversed(costs) if cost <= _CLOSE * least
            }
            fastest = min(
                (estimate(config, cluster, placement) for placement in close.values()),
                key=lambda estimated: estimated.seconds,
            )
            placement = fastest.placement
            placed = layout._replace(
                rank_order=placement.layout.order,
                device_order=placement.chosen_devices,
                epn=chosen_dispatch(config, placement) or layout.epn,
            )
            judged.append(Ranked(fastest.seconds / layout.batch, placed, memory))
        return judged

    # -- one layout --------------------------------------------------------------------------------

    def _has_room(self, config: Config, channels: Channels) -> bool:
        """Return whether the layout fits on this placement: rows sent over nodes need memory.

        It fits with tokens sent directly to ranks, or as --expert-ranks-per-node says.
        """
        layout = channels.placement.layout
        if layout.expert_node == 1 or dispatch_given(config):
            return True
        sized = over_nodes(config, layout)
        device = self.space.cluster.device_type
        return peak_rank(sized, device, self.capacity).total <= self.capacity

    def _too_big(self, sizes: Sequence[CandidateLayout]) -> RejectedLayout | None:
        """Return the nearest misfit if no layout of these sizes fits; None if one may fit."""
        least: dict[int, CandidateLayout] = {}  # by pipeline size
        for size in sizes:
            least[size.pp] = min(least.get(size.pp, size), size, key=lambda s: (s.chunks, s.batch))
        misfits = list[RejectedLayout]()
        for size in least.values():
            variants = list(self.space.variants(size))
            switches = max(map(_thrift, variants))
            # first the layouts that recompute whole layers, which need the least memory
            for layout in reversed(variants):
                if _thrift(layout) != switches:
                    continue
                try:
                    config = self.space.config(layout)
                    memory, _, rank = self._states(config)
                    if memory <= self.capacity:
                        full = peak_rank(config, self.space.cluster.device_type, self.capacity)
                        if full.total <= self.capacity:
                            return None
                        memory = full.total
                        rank = full.rank
                except ConfigError:
                    return None
                misfits.append(self._misfit(layout, memory, rank))
        return min(misfits, key=lambda rejected: rejected.miss)

    def _misfit(self, layout: CandidateLayout, memory: float, rank: int) -> RejectedLayout:
        words = f"tp={layout.tp},pp={layout.pp},mbs={layout.micro},recompute={layout.recompute}"
        example = f"{memory / GIB:.1f} GiB on pipeline rank {rank}: {words}"
        return RejectedLayout(f"needs more than {self.capacity / GIB:.1f} GiB", example, memory)

    @property
    def _room_on_host(self) -> float:
        """Usable bytes of host memory: the same share as on a device."""
        cluster = self.space.cluster
        return self.capacity * cluster.host.memory_gib / cluster.memory_gib

    def _folded(self, layout: CandidateLayout, config: Config) -> float:
        """Score by the formula, on the placement that is best for the first similar variant.

        Similar variants differ only in what they recompute.
        """
        key = layout._replace(recompute="", rank_order="", device_order=(), epn=0)
        if key not in self._known:
            self._known[key] = min(
                self._channels(config),
                key=lambda channels: folded_seconds(config, self.space.cluster, channels),
            )
        return folded_seconds(config, self.space.cluster, self._known[key]) / layout.batch

    def _channels(self, config: Config) -> list[Channels]:
        """Return the channels of the placements to estimate."""
        cluster = self.space.cluster
        devices = min(config.parallel.world_size, cluster.devices_per_node)
        given = config.parallel.expert_ranks_per_node
        key = layout_of(config, devices=devices), wraps(config), given
        if key not in self._known:
            self._known[key] = [
                Channels(config, cluster, placement)
                for placement in worthwhile_placements(config, cluster, self.space.restrictions)
            ]
        known: list[Channels] = self._known[key]
        return known

    def _states(self, config: Config) -> tuple[float, float, int]:
        """Return the bytes of the pipeline rank with the most parameters, and this rank.

        The first number is that of weights, gradients and optimizer state on a device, the second
        that of optimizer state on a node's host.
        """
        parallel = config.parallel
        key = (
            parallel.tensor_model_parallel_size,
            stage_owners(config),
            parallel.expert_model_parallel_size,
            parallel.expert_tensor_parallel_size,
        )
        if key not in self._known:
            # Parameters do not depend on the micro-batch size; a micro-batch of 1 is traced first.
            batch = replace(config.batch, micro_batch_size=1)
            plain = _with(replace(config, batch=batch), CandidateLayout(1, 1))
            ranks = range(parallel.pipeline_model_parallel_size)
            device = self.space.cluster.device_type
            _, rank = max((parameters_of_rank(plain, rank, device), -rank) for rank in ranks)
            self._known[key] = elements_of_rank(plain, trace(plain, device), -rank), -rank
        elements, rank = self._known[key]
        states = state_bytes(config, elements)
        on_host = 0.0
        cluster = self.space.cluster
        if config.engine.cpu_offload and cluster.device_type != "cpu":
            devices = min(parallel.world_size, cluster.devices_per_node)
            on_host = sum(offloaded_bytes(config, elements))
            return sum(states.values()) - on_host, devices * on_host, rank
        return sum(states.values()), on_host, rank


def _thrift(layout: CandidateLayout) -> tuple[float, ...]:
    """Return a sort key for a layout's switches: a greater key means less memory."""
    divided = (1 / (n or layout.world) for n in (layout.shard, layout.states))
    switches = layout.sp, not layout.overlap
    return layout.offload, layout.zero, *(-share for share in divided), *switches


def _refused(error: ConfigError) -> RejectedLayout:
    return RejectedLayout("refused by the configuration", str(error))


def _with(config: Config, layout: CandidateLayout) -> Config:
    """Return a configuration of the same sizes with other switches, unvalidated, for ranking."""
    settings = recompute_settings(layout.recompute)
    return replace(
        config,
        parallel=replace(
            config.parallel, sequence_parallel=layout.sp, tp_comm_overlap=layout.overlap
        ),
        engine=replace(
            config.engine,
            zero_stage=layout.zero,
            zero_shard_size=layout.shard,
            zero_state_shard_size=layout.states,
            cpu_offload=layout.offload,
        ),
        recompute=RecomputeConfig(
            **settings | {"recompute_modules": settings["recompute_modules"] or ("core_attn",)}
        ),
    )


# -- all layouts -----------------------------------------------------------------------------------


def search(
    layout_search: LayoutSearch,
    top: int = 10,
    processes: int = 1,
    progress: Progress = lambda *_: None,
) -> SearchResult:
    """Find the best layouts in a space; the result does not depend on the number of processes.

    Raises MegatronError if the extension that simulates schedules is missing, or if a process of
    the search is killed.
    """
    check_clock()
    result = SearchResult()
    start = time.monotonic()
    each = layout_search.space.cluster.devices_per_node
    every = list(layout_search.space.sizes(result.rejections))
    result.sizes = len(every)
    ranked = list[Ranked]()
    fit = list[Ranked]()
    enough = Counter[Choice]()
    pruned = done = 0
    with _workers(layout_search, processes) as run:
        # sizes for which a micro-batch did not fit; larger ones, which take longest to trace, are
        # skipped
        full = set[tuple[int, ...]]()
        for micro in sorted({size.micro for size in every}):
            # grouped by the sizes that share traces; each group goes to one process
            tasks = defaultdict[tuple[int, ...], list[CandidateLayout]](list)
            for size in every:
                if size.micro == micro:
                    tasks[size.world, size.tp, size.cp, size.ep, size.etp].append(size)
            done += sum(len(tasks.pop(shared, ())) for shared in full)
            left = sorted(tasks.items(), key=lambda task: (-len(task[1]), task[0]))
            answers = run("rank", [sizes for _, sizes in left])
            progress("ranking layouts", "sizes", done, result.sizes)
            for (shared, sizes), (accepted, rejected) in zip(left, answers, strict=True):
                ranked += accepted
                for refusal in rejected:
                    result.rejections.add(*refusal)
                if not accepted:
                    full.add(shared)
                done += len(sizes)
                progress("ranking layouts", "sizes", done, result.sizes)
        heapq.heapify(ranked)
        to_check = len(ranked)  # less those that turn out to be too slow
        checked = 0
        while ranked:
            some: list[Ranked] = []
            while ranked and len(some) < _ROUND:
                one = heapq.heappop(ranked)
                values = values_of(one.layout, each)
                if len(fit) >= max(ESTIMATED, top) and all(
                    enough[value] >= OF_EACH_VALUE for value in values
                ):
                    pruned += 1
                    to_check -= not one.memory
                elif not one.memory:
                    some.append(one)
                else:
                    fit.append(one)
                    enough.update(values)
            for answer in run("fit", some):
                if isinstance(answer, Ranked):
                    heapq.heappush(ranked, answer)
                else:
                    result.rejections.add(*answer)
                checked += 1
                progress("checking memory", "layouts", checked, to_check)
        progress("checking memory", "layouts", checked, to_check)
        alike: dict[object, list[Ranked]] = {}
        for one in fit:
            of = one.layout
            micro_batches = of.batch // (of.replicas * of.micro)
            alike.setdefault((of.pp, of.chunks, of.schedule, micro_batches), []).append(one)
        answers = run("judge", sorted(alike.values(), key=len, reverse=True))
        progress("simulating schedules", "layouts", 0, len(fit))
        for judged in answers:
            result.estimated += judged
            progress("simulating schedules", "layouts", len(result.estimated), len(fit))
        result.estimated.sort()
    if pruned:
        result.rejections.add(
            "slower by the formula than those that were estimated", "", times=pruned
        )
    result.seconds = time.monotonic() - start
    return result


# -- processes -------------------------------------------------------------------------------------

_search_of_process: LayoutSearch


def _in_process(task: tuple[str, Any]) -> Any:
    sys.audit("megatron.planner.task", task[0])
    return getattr(_search_of_process, task[0])(task[1])


@contextmanager
def _workers(
    layout_search: LayoutSearch, processes: int
) -> Iterator[Callable[[str, Sequence[Any]], Iterator[Any]]]:
    """Yield a function that maps tasks to results, in order."""
    if processes < 2:
        yield lambda kind, tasks: (getattr(layout_search, kind)(task) for task in tasks)
        return
    global _search_of_process
    _search_of_process = layout_search  # forked processes inherit it
    killed = (
        "a process of the search was killed, possibly for lack of memory: use fewer --processes, "
        "or narrow the search with --fix"
    )
    with process_pool(processes, killed) as in_processes:
        yield lambda kind, tasks: in_processes(_in_process, [(kind, task) for task in tasks])


# -- placements ------------------------------------------------------------------------------------


_SIZES = (1.0, 2.0**24, 2.0**32)


def check_device_orders(restrictions: Restrictions, cluster: Cluster) -> None:
    """Raise ConfigError for a device order that is not a permutation of a node's devices."""
    for device_order in restrictions.get("devices", ()):
        check_device_order(device_order, cluster, f"devices={write_value(device_order)}")


def worthwhile_placements(
    config: Config, cluster: Cluster, restrictions: Restrictions
) -> list[Placement]:
    """List the placements with allowed rank orders ("order"), device orders ("devices") and "epn".

    By default all rank orders, the machine's device orders and DISPATCHES are allowed. A placement
    is left out if another one with as many of an expert group's ranks on a node is at least as fast
    in every collective and over all stage boundaries; the cost of a step is not computed. Raises
    ConfigError like check_device_orders, and if no allowed order is possible, like placement_of.
    """
    check_device_orders(restrictions, cluster)
    parallel = config.parallel
    devices = min(parallel.world_size, cluster.devices_per_node)
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "dp": parallel.gradient_ranks,
    }
    different: dict[tuple[str, ...], str] = {}  # one order per distinct numbering of the ranks
    for order in RANK_ORDERS:
        if order in restrictions.get("order", RANK_ORDERS):
            different.setdefault(tuple(d for d in order.split("-") if sizes[d] > 1), order)
    device_orders = restrictions.get("devices") or cluster.device_orders
    if devices < cluster.devices_per_node:
        device_orders = (cluster.local_order[:devices],)
    dispatches = restrictions.get("epn", DISPATCHES)
    times: dict[tuple[int, tuple[float, ...]], Placement] = {}
    problems = list[ConfigError]()
    for order, device_order in itertools.product(different.values(), device_orders):
        try:
            placements = placements_of(config, cluster, order, device_order, dispatches)
        except ConfigError as error:  # --zero-shard-size node needs an order with groups in a node
            problems.append(error)
            continue
        for placement in placements:
            key = placement.layout.expert_node, _times(config, cluster, placement)
            times.setdefault(key, placement)
    if not times:
        raise problems[0]
    return [
        placement
        for (each, seconds), placement in times.items()
        if not any(
            other != seconds and all(a <= b for a, b in zip(other, seconds, strict=True))
            for like, other in times
            if like == each
        )
    ]


def _times(config: Config, cluster: Cluster, placement: Placement) -> tuple[float, ...]:
    """Return the seconds of each kind and size of message; between stages, the maximum and sum."""
    channels = Channels(config, cluster, placement)
    parallel = config.parallel
    times = list[float]()
    calls = [("all_reduce", name) for name in channels.lanes]
    calls += [("reduce_scatter", name) for name in channels.lanes if name != "ends"]
    calls += [("all_to_all", name) for name in EXCHANGES]
    calls.append(("ring", "context"))
    for size in _SIZES:
        times += (channels.seconds(kind, size, name) for kind, name in calls)
        boundaries = [
            channels.boundary(rank, (rank + 1) % parallel.pipeline_model_parallel_size, size)
            for rank in range(len(channels.boundaries))
        ]
        if boundaries:
            times += (*max(boundaries), sum(map(sum, boundaries)))
    return tuple(round(seconds, 12) for seconds in times)
