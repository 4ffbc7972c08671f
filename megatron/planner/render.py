"""Placements as text: what the messages of a step cost, beside another placement; all orders; the map of the nodes."""
from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron.planner.table import Table

if TYPE_CHECKING:
    from megatron.planner.placement import Placement

_DIRECTIONS = {"tp": "tensor", "pp": "pipeline", "dp": "data"}


def render_placement(placement: Placement, against: Placement, width: int = 100) -> str:
    """The layout, both orders, and a table of its messages, with the seconds of the naive placement beside them."""
    layout, cluster, cost, other = placement.layout, placement.cluster, placement.cost, against.cost
    nodes = -(-layout.world_size // len(placement.device_order))
    seconds = {(d, part.name): part.seconds for d in _DIRECTIONS for part in other.of(d)}
    rows = []
    for direction, title in _DIRECTIONS.items():
        for part in cost.of(direction):
            about = "" if part.basis == "published" else "~"
            naive = seconds.get((direction, part.name))
            rows.append((title, part.name, _amount(part.bytes / 1e9), about + _amount(part.gb_per_s),
                         _seconds(part.seconds), "-" if naive is None else _seconds(naive), part.limit))  # fmt: skip
    rows.append(("all", "nothing hidden", "", "", _seconds(cost.seconds), _seconds(other.seconds), ""))
    table = Table("", ("direction", "messages", "GB", "GB/s", "s", "naive s", "limited by"), rows)
    if _orders(placement) == _orders(against):
        said = "this is the naive placement: none that was tried is cheaper"
    else:
        saved = (other.seconds - cost.seconds) / (other.seconds or 1.0)
        order, devices = _orders(against)
        said = (f"naive: rank order {order}, device order {devices}; the chosen placement's messages take "
                f"{abs(100 * saved):.0f} % {'less' if saved >= 0 else 'more'}")  # fmt: skip
    order, devices = _orders(placement)
    return "\n".join([
        f"placement on {cluster.name}: {layout.world_size} ranks on {nodes} node{'s' * (nodes > 1)} = "
        f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}",
        f"rank order {order}, device order {devices}", table.text(width), _wrapped(said, width),
        *(_wrapped(f"note: {note}", width) for note in placement.notes),
    ])  # fmt: skip


def render_comparison(placements: Iterable[tuple[str, Placement]], width: int = 100) -> str:
    """A line for each placement: both orders, seconds by direction, and its names; placements alike are one line."""
    names: dict[tuple[str, str], list[str]] = {}
    costs = {}
    for name, placement in placements:
        key = _orders(placement)
        names.setdefault(key, []).extend([name] if name else [])
        costs[key] = [*map(placement.cost.seconds_of, _DIRECTIONS), placement.cost.seconds]
    rows = [(*key, *map(_seconds, cost), "; ".join(names[key])) for key, cost in costs.items()]
    columns = ("rank order", "device order", "tensor s", "pipeline s", "data s", "all s", "which")
    return Table("", columns, rows).text(width)


def render_nodes(placement: Placement, first: int = 2, width: int = 100) -> str:
    """The first nodes, device by device: rank, network card, place in the model."""
    cluster, layout, rows = placement.cluster, placement.layout, []
    for rank in range(min(first * len(placement.device_order), layout.world_size)):
        node, device = placement.place(rank)
        tp, dp, pp = layout.coordinates(rank)
        low, high = cluster.cores_of_device[device]
        card = cluster.nics[cluster.nic_of_device[device]]
        rows.append((*map(str, (node, device, rank)), card, f"{low}-{high}", *map(str, (tp, pp, dp))))
    return Table("", ("node", "device", "rank", "card", "cores", "tp", "pp", "dp"), rows).text(width)


def _orders(placement: Placement) -> tuple[str, str]:
    return placement.layout.order, ",".join(map(str, placement.device_order))


def _amount(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 99.5 else f"{value:.2f}" if value >= 0.995 else f"{value:.3f}"


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False)
