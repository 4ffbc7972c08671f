"""What is known of one layout: a bound on its time, its memory, its estimate on the best of its placements."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron.config import Config
from megatron.engine.optimizer_state import optimizer_state
from megatron.errors import ConfigError
from megatron.planning.cluster import Cluster
from megatron.planning.memory import RankMemory, memory_of_ranks, parameters_of_rank
from megatron.planning.placement import Placement
from megatron.planning.search.choices import Choices, Shape, Wanted, nodes_of
from megatron.planning.search.places import worthwhile_placements
from megatron.planning.search.space import Space
from megatron.planning.timing import Estimate, estimate, lower_bound

GIB = 2**30


@dataclass(frozen=True)
class Judged:
    """A layout that was estimated.

    seconds      of an iteration; parts: of which it is made
    score        what the search makes small: seconds for each sample of the batch
    memory       bytes on each device of the fullest pipeline rank; rank: its number
    """

    choices: Choices
    seconds: float
    score: float
    parts: Mapping[str, float]
    mfu: float | None
    hfu: float | None
    tokens_per_s: float
    memory: float
    rank: int

    @property
    def key(self) -> tuple[float, Choices]:
        """By which layouts are ordered; among equals by their choices, so that the order is always the same."""
        return self.score, self.choices


@dataclass(frozen=True)
class TooBig:
    """A layout that does not fit: bytes that pipeline rank `rank` would need on each device."""

    choices: Choices
    memory: float
    rank: int


@dataclass(frozen=True)
class Refused:
    """A layout that the configuration or the machine does not allow."""

    choices: Choices
    reason: str


@dataclass(frozen=True)
class Bounded:
    """A layout and a score that it cannot be better than. `memory`: bytes that pipeline rank `rank` needs on each
    device, at least, or in all once `sized`."""

    bound: float
    choices: Choices
    memory: float
    rank: int = 0
    sized: bool = False


@dataclass(frozen=True)
class Outdone:
    """A layout that fits, and provably has no better score than was asked about."""

    choices: Choices


def memory_on(config: Config, cluster: Cluster, ranks: Sequence[int] | None = None) -> Sequence[RankMemory]:
    """Of these pipeline ranks, of all by default, by the operators that run on this machine's devices."""
    return memory_of_ranks(config, cluster.device_type, ranks=ranks)


@dataclass(frozen=True)
class Models:
    """The functions that a search asks. Tests put others in their place.

    memory      (config, cluster, ranks) -> memory of these pipeline ranks, None: of all
    bound       (config, cluster, placement) -> seconds that the layout is not faster than; without one: on none
    time        (config, cluster, placement) -> estimate
    placements  (config, cluster, wanted values) -> placements of which one is the best
    """

    memory: Callable[[Config, Cluster, Sequence[int] | None], Sequence[RankMemory]] = memory_on
    bound: Callable[[Config, Cluster, Placement | None], float] = lower_bound
    time: Callable[[Config, Cluster, Placement], Estimate] = estimate
    placements: Callable[[Config, Cluster, Wanted], Sequence[Placement]] = worthwhile_placements

    def fullest(self, config: Config, cluster: Cluster, capacity: float) -> RankMemory:
        """The pipeline rank that needs most memory; of a layout that does not fit `capacity` bytes, one that is too
        big."""
        # The first rank holds most micro-batches: often it is enough to ask for it.
        (first,) = self.memory(config, cluster, (0,))
        if first.total > capacity:
            return first
        return max(self.memory(config, cluster, None), key=lambda rank: (rank.total, -rank.rank))

    def fastest(
        self, config: Config, cluster: Cluster, wanted: Wanted, hopeless: Callable[[float], bool] = lambda _: False
    ) -> tuple[Placement, Estimate] | None:
        """The best placement, of equal ones always the same, and its estimate. None where all are hopeless, which is
        asked of seconds that a placement is not faster than."""
        best: tuple[tuple[float, str, tuple[int, ...]], Placement, Estimate] | None = None
        for placement in self.placements(config, cluster, wanted):
            least = self.bound(config, cluster, placement)
            if hopeless(least) or (best is not None and least > best[0][0]):
                continue
            found = self.time(config, cluster, placement)
            key = (found.seconds, placement.layout.order, placement.device_order)
            if best is None or key < best[0]:
                best = key, placement, found
        return best and best[1:]


@dataclass(frozen=True)
class Judge:
    """Judges the layouts of a space by its models.

    capacity  bytes of a device that a layout may use
    per_node  whether the score is node-seconds for each sample instead of seconds
    """

    space: Space
    capacity: float
    per_node: bool = False
    models: Models = field(default_factory=Models)
    _parameters: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)

    def score(self, seconds: float, shape: Shape) -> float:
        nodes = nodes_of(shape.devices, self.space.cluster) if self.per_node else 1
        return seconds * nodes / shape.batch

    def shape(self, shape: Shape) -> Bounded | Refused | TooBig:
        """A score that no variant of a shape is better than: without recomputation, by the best of its switches.

        Weights, gradients and the least of the optimizer's states must fit whatever is recomputed.
        """
        bounds, too_big = list[Bounded](), list[TooBig]()
        problem = Refused(Choices(shape, False, False, 1, "none"), "none of its variants is allowed")
        for choices in sorted({c._replace(recompute="none") for c in self.space.variants(shape)}):
            try:
                config = self.space.config(choices)
            except ConfigError as error:
                problem = Refused(choices, str(error))
                continue
            needs, rank = self._least_states(config)
            if needs > self.capacity:
                too_big.append(TooBig(choices, needs, rank))
            else:
                seconds = self.models.bound(config, self.space.cluster, None)
                bounds.append(Bounded(self.score(seconds, shape), choices, needs))
        if bounds:
            first = min(bounds, key=lambda found: (found.bound, found.choices))
            return replace(first, memory=min(found.memory for found in bounds))
        return min(too_big, key=lambda found: (found.memory, found.choices)) if too_big else problem

    def variants(self, shape: Shape) -> list[Bounded | Refused | TooBig]:
        """Every variant of a shape with a bound of its own."""
        found: list[Bounded | Refused | TooBig] = []
        for choices in self.space.variants(shape):
            try:
                config = self.space.config(choices)
            except ConfigError as error:
                found.append(Refused(choices, str(error)))
                continue
            needs, rank = self._least_states(config)
            if needs > self.capacity:
                found.append(TooBig(choices, needs, rank))
            else:
                seconds = self.models.bound(config, self.space.cluster, None)
                found.append(Bounded(self.score(seconds, shape), choices, needs))
        return found

    def size(self, bounded: Bounded) -> Bounded | TooBig | Refused:
        """With the memory that it needs in all."""
        try:
            config = self.space.config(bounded.choices)
            full = self.models.fullest(config, self.space.cluster, self.capacity)
        except ConfigError as error:
            return Refused(bounded.choices, str(error))
        if full.total > self.capacity:
            return TooBig(bounded.choices, full.total, full.rank)
        return replace(bounded, memory=full.total, rank=full.rank, sized=True)

    def time(self, sized: Bounded, limit: float = float("inf")) -> Judged | Refused | Outdone:
        """The estimate on the best of the layout's placements, unless its score is above `limit` on all of them."""
        choices = sized.choices
        try:
            best = self.models.fastest(
                self.space.config(choices), self.space.cluster, self.space.wanted,
                lambda seconds: self.score(seconds, choices.shape) > limit,
            )  # fmt: skip
        except ConfigError as error:
            return Refused(choices, str(error))
        if best is None:
            return Outdone(choices)
        placement, found = best
        placed = choices._replace(rank_order=placement.layout.order, device_order=placement.device_order)
        score = self.score(found.seconds, choices.shape)
        return Judged(
            choices=placed, seconds=found.seconds, score=score, parts=dict(found.parts),
            mfu=found.mfu, hfu=found.hfu, tokens_per_s=found.tokens_per_s, memory=sized.memory, rank=sized.rank,
        )  # fmt: skip

    def _least_states(self, config: Config) -> tuple[float, int]:
        """(bytes of weights, gradients and optimizer on the pipeline rank with most parameters, the rank)."""
        parallel, width = config.parallel, config.precision.weight_bytes
        key = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.num_chunks)
        if key not in self._parameters:
            ranks = range(parallel.pipeline_model_parallel_size)
            most, rank = max((parameters_of_rank(config, rank), -rank) for rank in ranks)
            self._parameters[key] = most, -rank
        most, rank = self._parameters[key]
        states = optimizer_state(config).bytes + (4 if width == 2 else 0)
        owners = parallel.data_parallel_size if config.engine.zero_stage else 1
        return most * (width + config.precision.gradient_bytes + states / owners), rank
