"""The search: every layout ranked by its folded cost, the best of those that fit estimated on the schedule's clock."""
from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.config import Config
from megatron.config.layout import DIMENSIONS, Layout, kind_of_recompute, recompute_settings
from megatron.config.parallel import RecomputeConfig
from megatron.engine.optimizer_state import optimizer_state
from megatron.errors import ConfigError
from megatron.parallel.pool import process_pool
from megatron.planner.channels import Channels
from megatron.planner.memory import RankMemory, memory_of_ranks, parameters_of_rank
from megatron.planner.placement import Placement
from megatron.planner.search.places import worthwhile_placements
from megatron.planner.search.space import Rejections, Space
from megatron.planner.timing import estimate, folded_seconds

GIB = 2**30
ESTIMATED, OF_EACH_VALUE = 50, 8
"""How many layouts are estimated: of all, and of those with each value of each dimension."""
_CLOSE = 1.01
"""Placements are estimated whose folded cost is at most so many times that of the best."""
_ROUND = 64
"""Layouts of which memory is asked at once, by however many processes: so their number changes nothing."""
_PLACED, _SWITCHED = ("order", "devices"), ("sp", "overlap", "zero", "recompute")

Value = tuple[str, Any]


@dataclass(frozen=True)
class Judged:
    """A layout that was estimated. seconds: of a step; score: what is made small, seconds for each sample; memory:
    bytes on each device of the fullest pipeline rank."""

    layout: Layout
    seconds: float
    score: float
    mfu: float | None
    tokens_per_s: float
    memory: float

    @property
    def key(self) -> tuple[float, Layout]:
        """By which layouts are ordered; among equals by their choices, so that the order is always the same."""
        return self.score, self.layout


class Rejected(NamedTuple):
    """A layout that the configuration or the machine does not allow (reason), or that does not fit: bytes that pipeline
    rank `rank` would need on each device."""

    layout: Layout
    reason: str = ""
    memory: float = 0.0
    rank: int = 0


class Ranked(NamedTuple):
    """A layout and its score by the folded cost. memory: bytes on the fullest rank, None where nobody asked yet."""

    score: float
    layout: Layout
    memory: float | None = None


@dataclass
class Found:
    """What a search has found.

    estimated  the layouts that were estimated, the best first
    seen       every (dimension, value) of a layout that is valid, whether it fits or not
    """

    top: int
    estimated: list[Judged] = field(default_factory=list)
    seen: set[Value] = field(default_factory=set)
    rejections: Rejections = field(default_factory=Rejections)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def best(self) -> list[Judged]:
        """The best of each size."""
        found: dict[Any, Judged] = {}
        for judged in self.estimated:
            found.setdefault(judged.layout.sizes, judged)
        return list(found.values())

    def by_value(self, per_node: int) -> dict[Value, Judged]:
        """For (dimension, value) the best layout with it; recomputation without numbers of layers."""
        return {value: judged for judged in reversed(self.estimated) for value in values_of(judged.layout, per_node)}

    @property
    def front(self) -> list[Judged]:
        """Of those estimated the ones that no other one beats in both memory and score, by memory."""
        found: list[Judged] = []
        for judged in sorted(self.estimated, key=lambda j: (j.memory, j.key)):
            if not found or judged.score < found[-1].score:
                found.append(judged)
        return found


def values_of(layout: Layout, per_node: int) -> list[Value]:
    """(dimension, value) of what a layout chooses; without what it has no choice in."""
    found = []
    for dimension in DIMENSIONS:
        name = dimension.names[0]
        if name not in _PLACED and layout.has_choice(name):
            value = dimension.value(layout, per_node)
            found.append((name, kind_of_recompute(value) if name == "recompute" else value))
    return found


@dataclass(frozen=True)
class Search:
    """What is searched, and the answers on single layouts.

    capacity  bytes of a device that a layout may use
    per_node  whether the score is node-seconds for each sample instead of seconds
    """

    space: Space
    capacity: float
    per_node: bool = False
    _known: dict[Any, Any] = field(default_factory=dict)

    def score(self, seconds: float, layout: Layout) -> float:
        nodes = -(-layout.world // self.space.cluster.devices_per_node) if self.per_node else 1
        return seconds * nodes / layout.batch

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def largest(self, sizes: Sequence[Layout]) -> tuple[int, Rejected | None]:
        """(the largest micro-batch of these sizes of which any layout fits, why a larger one does not).

        Asked first, because to read the code for sizes of which nothing fits would take longest of all.
        """
        most = 0
        for micro in sorted({size.micro for size in sizes}):
            least: dict[int, Layout] = {}  # of each pipeline size
            for size in sizes:
                if size.micro == micro:
                    least[size.pp] = min(least.get(size.pp, size), size, key=lambda s: (s.chunks, s.batch))
            found = [rejected for size in least.values() if (rejected := self._too_big(size)) is not None]
            if len(found) == len(least):
                return most, min(found, key=lambda rejected: rejected.memory)
            most = micro
        return most, None

    def _too_big(self, size: Layout) -> Rejected | None:
        """Why nothing of a size fits; None where something does, or the configuration is refused, as is seen later."""
        variants = list(self.space.variants(size))
        switches = max((v.zero, v.sp, not v.overlap) for v in variants)
        kinds = {kind_of_recompute(v.recompute): v for v in variants if (v.zero, v.sp, not v.overlap) == switches}
        found = []
        for layout in list(kinds.values())[::-1]:  # those of whole layers, which keep least, first
            try:
                states, rank = self._states(self.space.config(layout))
                if states <= self.capacity:
                    full = self._memory(self.space.config(layout), (0,))[0]
                    states, rank = full.total, full.rank
            except ConfigError:
                return None
            if states <= self.capacity:
                return None
            found.append(Rejected(layout, "", states, rank))
        return min(found, key=lambda rejected: rejected.memory)

    def rank(self, sizes: Sequence[Layout]) -> tuple[list[Ranked], list[Rejected], Counter[str]]:
        """All of these sizes whose weights, gradients and optimizer fit, by their folded costs; for each kind of
        recomputation the one of fewest layers."""
        ranked, rejected, counts = list[Ranked](), list[Rejected](), Counter[str]()
        for size in sizes:
            groups: dict[Layout, dict[str, Layout]] = {}
            for layout in self.space.variants(size):
                kinds = groups.setdefault(layout._replace(recompute="none"), {})
                kinds.setdefault(kind_of_recompute(layout.recompute), layout)
                counts["layouts"] += 1
            counts["sizes"] += 1
            try:
                config = self.space.config(size)
                for layout, kinds in groups.items():
                    states, rank = self._states(_with(config, layout))
                    if states > self.capacity:
                        rejected.append(Rejected(layout, "", states, rank))
                    else:
                        ranked += [Ranked(self._folded(v, config), v) for v in kinds.values()]
            except ConfigError as error:
                rejected.append(Rejected(size, str(error)))
        return ranked, rejected, counts

    def fit(self, ranked: Ranked) -> Ranked | Rejected:
        """With its memory: of its kind of recomputation the layout of fewest layers that fits, with its own score."""
        layout, kind = ranked.layout, kind_of_recompute(ranked.layout.recompute)
        options = [v for v in self.space.recomputations(layout) if kind_of_recompute(v) == kind]
        full = functools.cache(lambda option: self._fullest(self.space.config(layout._replace(recompute=option))))

        def fits(option: str) -> bool:
            return full(option).total <= self.capacity

        try:
            if kind == "full:block":  # the more layers are recomputed, the less they keep and the longer they take
                first = bisect.bisect_left(options, True, 0, len(options) - 1, key=fits)
                options = options[first : first + 1]
            chosen = next(filter(fits, options), None)
            if chosen is None:
                least = min(options, key=lambda option: full(option).total)
                return Rejected(layout._replace(recompute=least), "", full(least).total, full(least).rank)
            own = layout._replace(recompute=chosen)
            return Ranked(self._folded(own, self.space.config(own)), own, full(chosen).total)
        except ConfigError as error:
            return Rejected(layout, str(error))

    def judge(self, ranked: Ranked) -> Judged | Rejected:
        """The estimate on the best of the placements."""
        layout, cluster = ranked.layout, self.space.cluster
        try:
            config = self.space.config(layout)
            costs = [(folded_seconds(config, cluster, channels), p) for p, channels in self._placements(config)]
            least = min(cost for cost, _ in costs)
            close = {cost: p for cost, p in reversed(costs) if cost <= _CLOSE * least}
            found = min((estimate(config, cluster, p) for p in close.values()), key=lambda e: e.seconds)
        except ConfigError as error:
            return Rejected(layout, str(error))
        place, memory = found.placement, ranked.memory
        assert memory is not None, "what is estimated fits"
        placed = layout._replace(rank_order=place.layout.order, device_order=place.device_order)
        score = self.score(found.seconds, layout)
        return Judged(placed, found.seconds, score, found.mfu, found.tokens_per_s, memory)

    # -- one layout ----------------------------------------------------------------------------------------------------

    def _folded(self, layout: Layout, config: Config) -> float:
        """The score by the folded cost, on the placement that is best for the first variant of these sizes. config: of
        the same sizes."""
        if layout.sizes not in self._known:
            first = _with(config, next(self.space.variants(layout)))
            channels = [channels for _, channels in self._placements(first)]
            self._known[layout.sizes] = min(channels, key=lambda c: folded_seconds(first, self.space.cluster, c))
        own = _with(config, layout)
        return self.score(folded_seconds(own, self.space.cluster, self._known[layout.sizes]), layout)

    def _placements(self, config: Config) -> list[tuple[Placement, Channels]]:
        """Those worth an estimate."""
        parallel, cluster = config.parallel, self.space.cluster
        key = (parallel.world_size, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size,
               parallel.num_chunks > 1)  # fmt: skip
        if key not in self._known:
            found = worthwhile_placements(config, cluster, self.space.wanted)
            self._known[key] = [(placement, Channels(config, cluster, placement)) for placement in found]
        known: list[tuple[Placement, Channels]] = self._known[key]
        return known

    def _memory(self, config: Config, ranks: Sequence[int] | None = None) -> Sequence[RankMemory]:
        """Of these pipeline ranks, of all by default, by the operators that run on the machine's devices."""
        return memory_of_ranks(config, "cpu" if self.space.cluster.device_type == "cpu" else "gpu", ranks=ranks)

    def _fullest(self, config: Config) -> RankMemory:
        """The pipeline rank that needs most memory; of a layout that does not fit, one that is too big."""
        first = self._memory(config, (0,))[0]  # which holds most micro-batches
        if first.total > self.capacity:
            return first
        return max(self._memory(config), key=lambda rank: (rank.total, -rank.rank))

    def _states(self, config: Config) -> tuple[float, int]:
        """(bytes of weights, gradients and optimizer on the pipeline rank with most parameters, the rank)."""
        parallel, in_fp32 = config.parallel, config.precision.dtype_name == "float32"
        key = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.num_stages
        if key not in self._known:
            # Parameters do not depend on the micro-batch, of which the code is read for small ones first.
            batch = dataclasses.replace(config.batch, micro_batch_size=1)
            plain = _with(dataclasses.replace(config, batch=batch), Layout(1, 1))
            kind = "cpu" if self.space.cluster.device_type == "cpu" else "gpu"
            ranks = range(parallel.pipeline_model_parallel_size)
            self._known[key] = max((parameters_of_rank(plain, rank, kind), -rank) for rank in ranks)
        most, rank = self._known[key]
        owners = parallel.data_parallel_size if config.engine.zero_stage else 1
        states = (optimizer_state(config).bytes + (0 if in_fp32 else 4)) / owners
        return most * ((4 if in_fp32 else 2) + config.precision.gradient_bytes + states), -rank


def _with(config: Config, layout: Layout) -> Config:
    """A configuration of the same sizes with other switches, which nobody has checked: to rank it."""
    again = recompute_settings(layout.recompute)
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, sequence_parallel=layout.sp, tp_comm_overlap=layout.overlap),
        engine=dataclasses.replace(config.engine, zero_stage=layout.zero),
        recompute=RecomputeConfig(**again | {"recompute_modules": again["recompute_modules"] or ("core_attn",)}),
    )


# -- all layouts -------------------------------------------------------------------------------------------------------


def search(
    given: Search, top: int = 10, processes: int = 1, progress: Callable[[Found], None] | None = None
) -> Found:
    """The best layouts of a space, with `processes` processes; the result does not depend on their number."""
    found, start, each = Found(top), time.monotonic(), given.space.cluster.devices_per_node
    with _workers(given, processes) as run:
        ranked = _ranked(given, found, run)
        found.seen.update(value for one in ranked for value in values_of(one.layout, each))
        heapq.heapify(ranked)
        fit, enough = list[Ranked](), Counter[Value]()
        while ranked:
            some: list[Ranked] = []
            while ranked and len(some) < _ROUND:
                one = heapq.heappop(ranked)
                values = values_of(one.layout, each)
                if len(fit) >= max(ESTIMATED, top) and all(enough[value] >= OF_EACH_VALUE for value in values):
                    found.counts["outdone"] += 1
                elif one.memory is None:
                    some.append(one)
                else:
                    fit.append(one)
                    enough.update(values)
            for answer in run("fit", some):
                if isinstance(answer, Ranked):
                    heapq.heappush(ranked, answer)
                else:
                    _reject(given, found, answer)
            if progress is not None:
                progress(found)
        for answer in run("judge", fit):
            if isinstance(answer, Judged):
                found.estimated.append(answer)
            else:
                _reject(given, found, answer)
    found.estimated.sort(key=lambda judged: judged.key)
    found.counts["estimated"], found.seconds = len(found.estimated), time.monotonic() - start
    return found


def _ranked(given: Search, found: Found, run: Callable[[str, Sequence[Any]], Iterator[Any]]) -> list[Ranked]:
    """Every layout that may fit."""
    families: dict[Any, list[Layout]] = {}
    for size in given.space.sizes(found.rejections):
        families.setdefault((size.world, size.tp), []).append(size)
        found.seen.update(v for v in values_of(size, given.space.cluster.devices_per_node) if v[0] not in _SWITCHED)
    tasks: dict[Any, list[Layout]] = {}
    for sizes, (most, why) in zip(families.values(), run("largest", list(families.values())), strict=True):
        for size in sizes:
            if size.micro <= most:  # in one process what the same code is read for
                tasks.setdefault((size.world, size.tp, size.micro), []).append(size)
            else:
                assert why is not None, "of larger micro-batches nothing fits"
                found.counts.update(sizes=1, layouts=sum(1 for _ in given.space.variants(size)))
                _reject(given, found, why)
    ranked: list[Ranked] = []
    for own, rejected, counts in run("rank", sorted(tasks.values(), key=len, reverse=True)):
        ranked += own
        found.counts += counts
        for each in rejected:
            _reject(given, found, each)
    return ranked


def _reject(given: Search, found: Found, of: Rejected) -> None:
    layout = of.layout
    if of.reason:
        found.counts["refused"] += 1
        found.rejections.add("layouts", "refused by the configuration", of.reason)
        return
    found.counts["too big"] += 1
    found.rejections.add(
        "layouts", f"need more than {given.capacity / GIB:.1f} GiB", f"{of.memory / GIB:.1f} GiB on pipeline rank "
        f"{of.rank}: tp={layout.tp},pp={layout.pp},mbs={layout.micro},recompute={layout.recompute}", miss=of.memory,
    )  # fmt: skip


# -- processes ---------------------------------------------------------------------------------------------------------

_search_of_process: Search


def _start(given: Search) -> None:
    global _search_of_process
    _search_of_process = given


def _in_process(task: tuple[str, Any]) -> Any:
    sys.audit("megatron.planner.task", task[0])
    return getattr(_search_of_process, task[0])(task[1])


@contextmanager
def _workers(given: Search, processes: int) -> Iterator[Callable[[str, Sequence[Any]], Iterator[Any]]]:
    """A function that answers tasks in their order."""
    if processes < 2:
        yield lambda kind, tasks: (getattr(given, kind)(task) for task in tasks)
        return
    # Forked, so that what is loaded and the machine's figures need not be sent.
    killed = "a process of the search was killed, as where memory ends: search with fewer --processes, or with --fix"
    with process_pool(processes, "fork", killed, _start, given) as in_processes:
        yield lambda kind, tasks: in_processes(_in_process, [(kind, task) for task in tasks])
