"""What a search says: estimates of the best layouts, what a whole run costs, and what each choice is worth."""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.layout import DIMENSIONS, Layout, write_value
from megatron.planner.placement import naive_placement, place_with
from megatron.planner.search.find import Found, Judged, Search
from megatron.planner.timing import Estimate, estimate

_DAY = 86400.0


@dataclass(frozen=True)
class Run:
    """A training run with one layout: days and node-hours, without start, evaluation, saving and failures.

    steps     of the whole run; jobs: of the longest wall time that the machine gives, None where it has no limits
    """

    tokens: float
    steps: int
    days: float
    node_hours: float
    jobs: int | None


def run_of(found: Estimate, tokens: float) -> Run:
    """A run over so many tokens, the batch growing as --rampup-batch-size says."""
    seq = found.config.model.seq_length
    left, steps, seconds = tokens / seq, 0, 0.0
    for batch, samples in _ramp(found):
        samples = min(left, samples)
        if samples <= 0:
            break
        taken = -(-samples // batch)
        steps, seconds, left = steps + int(taken), seconds + taken * found.of_batch(batch).seconds, left - samples
    full = -(-left // found.config.batch.global_batch_size)
    steps, seconds = steps + int(full), seconds + full * found.seconds
    days = seconds / _DAY
    jobs = None
    if found.cluster.wall_limits:
        jobs = -int(-seconds // (3600 * found.cluster.wall_limit_hours(found.nodes)))
    return Run(tokens, steps, days, days * 24 * found.nodes, jobs)


def _ramp(found: Estimate) -> Iterator[tuple[int, float]]:
    """(global batch, samples that are taken with it) before the full batch."""
    batch = found.config.batch
    if batch.rampup_batch_size is not None:
        start, increment, samples = batch.rampup_batch_size
        sizes = range(start, batch.global_batch_size, increment)
        yield from ((size, samples / len(sizes)) for size in sizes)


def estimates_of(given: Search, chosen: Sequence[Judged]) -> list[tuple[Layout, Estimate]]:
    """Layouts with their whole estimates, on the placements that were chosen for them."""
    found, cluster = [], given.space.cluster
    for layout in (judged.layout for judged in chosen):
        config = given.space.config(layout)
        placement = place_with(config, cluster, layout.rank_order, layout.device_order)
        found.append((layout, estimate(config, cluster, placement)))
    return found


# -- sensitivity -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """What a choice is worth: for each value the best layout that has it, None where none fits or is allowed.

    losses  value -> part by which the throughput of the best layout with it is lower than that of the best of all
    """

    dimension: str
    title: str
    losses: tuple[tuple[Any, float | None], ...]

    @property
    def worst(self) -> float:
        """What the worst value costs that can be chosen at all."""
        return max((loss for _, loss in self.losses if loss is not None), default=0.0)

    @property
    def blind(self) -> float:
        """What a value costs that is chosen by chance among those that fit: the mean."""
        known = [loss for _, loss in self.losses if loss is not None]
        return sum(known) / len(known) if known else 0.0


def sensitivity(given: Search, found: Found) -> list[Effect]:
    """What each choice is worth, the one that matters most first."""
    if not found.estimated:
        return []
    best, effects, each = found.estimated[0], list[Effect](), given.space.cluster.devices_per_node
    titles, by_value = {d.names[0]: d.title for d in DIMENSIONS}, found.by_value(each)
    for name, values in itertools.groupby(sorted(found.seen), key=lambda value: value[0]):
        losses = [(v[1], 1 - best.score / by_value[v].score if v in by_value else None) for v in values]
        losses.sort(key=lambda x: (x[1] is None, x[1] or 0.0, str(x[0])))
        effects.append(Effect(name, titles[name], tuple(losses)))
    config, cluster = given.space.config(best.layout), given.space.cluster
    naive = naive_placement(config, cluster)  # ranks in Megatron's order on devices in theirs
    if (naive.layout.order, naive.device_order) != (best.layout.rank_order, best.layout.device_order):
        loss = 1 - best.seconds / estimate(config, cluster, naive).seconds
        effects.append(Effect("placement", "placement (of the best)", (("chosen", 0.0), ("plain", loss))))
    return sorted((e for e in effects if len(e.losses) > 1), key=lambda e: (-e.blind, e.dimension))


def write_losses(effect: Effect, most: int = 8) -> str:
    """'8: best, 4: -4.3 %, 1: -60 %', the best first."""
    words = []
    for value, loss in effect.losses[:most]:
        cost = "does not fit" if loss is None else f"-{100 * loss:.1f} %" if loss else "best"
        words.append(f"{write_value(value)}: {cost}")
    more = len(effect.losses) - most
    return ", ".join(words) + (f", {more} more" if more > 0 else "")
