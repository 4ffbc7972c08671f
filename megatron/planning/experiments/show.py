"""The points of an experiment as a table, with what they cost and what does not fit. For people, before a job."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron.config.duration import show_duration
from megatron.config.validate import nearest_multiples
from megatron.planning.cluster import Cluster
from megatron.planning.experiments.cost import Cost, pack
from megatron.planning.experiments.points import Point, legal_replicas

if TYPE_CHECKING:
    from rich.table import Table

_HEADS = (
    "point", "nodes", "GCDs", "TP", "PP", "DP", "micro", "batch", "micro-batches", "bubble", "s/step", "time",
    "node-hours", "state",
)  # fmt: skip


def table(points: Sequence[Point], costs: Mapping[str, Cost], states: Mapping[str, str]) -> Table:
    """One row for each point; `states` says what is there of it already."""
    from rich.table import Table

    first = points[0].request
    made = Table(
        title=f"{first.experiment}: {first.warm_up} step(s) of warm-up and {first.iterations} measured at each point",
        title_justify="left",
    )
    for head in _HEADS:
        made.add_column(head, justify="left" if head in ("point", "state") else "right", no_wrap=head != "state")
    for point in points:
        made.add_row(*_row(point, costs[point.name], states.get(point.name, "")))
    return made


def _row(point: Point, cost: Cost, state: str) -> list[str]:
    head = [point.name, f"{point.nodes}", f"{point.world:,}"]
    config = point.config
    if config is None:
        return [*head, *[""] * 10, "refused"]
    sizes = [
        config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size,
        config.parallel.data_parallel_size, config.batch.micro_batch_size, config.batch.global_batch_size,
        config.num_micro_batches(),
    ]  # fmt: skip
    bubble = "" if cost.bubble is None else f"{100 * cost.bubble:.1f} %"
    times = ["", "", ""]
    if cost.total_s is not None and cost.iteration_s is not None:
        hours = point.nodes * cost.total_s / 3600
        times = [f"{cost.iteration_s:,.0f}", show_duration(cost.total_s), f"{hours:,.1f}"]
    return [*head, *(f"{n:,}" for n in sizes), bubble, *times, state]


def remarks(points: Sequence[Point], costs: Mapping[str, Cost]) -> list[str]:
    """Why points are refused, which numbers of replicas are legal, and which points outlast a job of their own size."""
    lines = [f"{p.name} is refused: {p.problem}" for p in points if p.problem]
    lines += _divisors(points)
    for point in points:
        cost = costs[point.name]
        if cost.fits_alone() is False and cost.total_s is not None and cost.limit_h is not None:
            lines.append(
                f"{point.name}: about {show_duration(cost.total_s)}, but a job of {point.nodes} node(s) may last "
                f"{cost.limit_h:g} h: run it in a larger allocation beside others"
                + (f", in partition {cost.queue}" if cost.queue else "") + ", or with fewer iterations"
            )
    if any(c.total_s is None and p.config is not None for p, c in ((p, costs[p.name]) for p in points)):
        lines.append("no time is published for this model: give --tflops to estimate times")
    return lines


def _divisors(points: Sequence[Point]) -> list[str]:
    """For a fixed batch: over which numbers of replicas it divides. Nothing is ever rounded."""
    found = next((p.config for p in points if p.config is not None), None)
    if points[0].request.kind != "strong" or found is None:
        return []
    batch, micro, most = found.batch.global_batch_size, found.batch.micro_batch_size, max(p.value for p in points)
    legal = legal_replicas(batch, micro, most)
    others = [n for n in range(1, most + 1) if n not in legal]
    line = f"a batch of {batch} divides over {', '.join(map(str, legal))} replicas"
    if others:
        near = ", ".join(f"{n} (would need {nearest_multiples(batch, n * micro)})" for n in others[:3])
        line += f", not over {near}{' and others' if len(others) > 3 else ''}: such points are refused, not rounded"
    return [line]


def budget(points: Sequence[Point], costs: Mapping[str, Cost], nodes: int, cluster: Cluster | None,
           side_by_side: bool = True, partition: str | None = None) -> list[str]:  # fmt: skip
    """What one allocation of `nodes` nodes takes for these points, beside a job for each."""
    known = [(p, t) for p in points if (t := costs[p.name].total_s) is not None]
    if not known:
        return []
    slots = pack(known, nodes, side_by_side=side_by_side)
    left_out = [p.name for p, _ in known if p.nodes > nodes]
    end_s = max((s.end_s for s in slots), default=0.0)
    alone = sum(p.nodes * t for p, t in known) / 3600
    how = "side by side" if side_by_side else "one after another"
    limit = cluster.wall_limit_hours(nodes, partition) if cluster is not None else None
    lines = [
        f"one allocation of {nodes} node(s), {how}: about {show_duration(end_s)}, {nodes * end_s / 3600:,.1f} "
        "node-hours" + (f" (longest job on so many nodes: {limit:g} h)" if limit is not None else ""),
        f"a job for each point: {alone:,.1f} node-hours",
    ]
    if limit is not None and end_s > 3600 * limit:
        lines.append(
            f"that is longer than {limit:g} h: what is not done goes on when the same command is submitted again"
        )
    if left_out:
        lines.append(f"too large for it: {', '.join(left_out)}")
    return lines
