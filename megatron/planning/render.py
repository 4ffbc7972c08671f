"""Placements as text: what the messages of a step cost, beside another placement; all orders; the map of the nodes."""
from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from megatron.planning.cost import CostPart
from megatron.planning.links import node_links

if TYPE_CHECKING:
    from megatron.planning.placement import Placement

_DIRECTIONS = {"tp": "tensor", "pp": "pipeline", "dp": "data"}

CAVEAT = (
    "seconds are those of messages that nothing hides: a measure to compare placements by, no forecast of a step. "
    "GB/s are published for exactly these devices or, with ~, estimated from the link table; none was measured here"
)


def render_placement(placement: Placement, against: Placement | None = None, width: int = 100) -> str:
    """The orders of a placement and a table of its messages, with the seconds of `against` beside them."""
    parts = [describe(placement), _table(_cost_table(placement, against), width)]
    if against is not None:
        parts.append(_wrapped(_difference(placement, against), width))
    parts += [_wrapped(f"note: {note}", width) for note in placement.notes]
    return "\n".join(part.rstrip("\n") for part in parts)


def describe(placement: Placement) -> str:
    """The layout and both orders, in two lines."""
    layout, cluster = placement.layout, placement.cluster
    nodes = -(-layout.world_size // len(placement.device_order))
    return (
        f"placement on {cluster.name}: {layout.world_size} ranks on {nodes} node{'s' * (nodes > 1)} = "
        f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}\n"
        f"rank order {layout.order}, device order {_order(placement)}"
    )


def render_comparison(placements: Iterable[tuple[str, Placement]], width: int = 100) -> str:
    """A line for each placement: both orders, seconds by direction, and its names; placements alike are one line."""
    table = _new_table()
    for name in ("rank order", "device order"):
        table.add_column(name, no_wrap=True)
    for name in ("tensor s", "pipeline s", "data s", "all s"):
        table.add_column(name, justify="right")
    table.add_column("which")
    names: dict[tuple[str, str], list[str]] = {}
    costs = {}
    for name, placement in placements:
        key = (placement.layout.order, _order(placement))
        names.setdefault(key, []).extend([name] if name else [])
        costs[key] = placement.cost
    for key, cost in costs.items():
        seconds = [_seconds(cost.seconds_of(direction)) for direction in _DIRECTIONS]
        table.add_row(*key, *seconds, _seconds(cost.seconds), "; ".join(names[key]))
    return _table(table, width).rstrip("\n")


def render_nodes(placement: Placement, first: int = 2, width: int = 100) -> str:
    """The first nodes, device by device: rank, network card, place in the model."""
    table = _new_table()
    for name in ("node", "device", "rank", "card", "cores", "tp", "pp", "dp"):
        table.add_column(name, justify="left" if name in ("card", "cores") else "right")
    cluster, layout = placement.cluster, placement.layout
    each = len(placement.device_order)
    for rank in range(min(first * each, layout.world_size)):
        node, device = placement.place(rank)
        tp, dp, pp = layout.coordinates(rank)
        low, high = cluster.cores_of_device[device]
        card = cluster.nics[cluster.nic_of_device[device]]
        row = [node, device, rank, card, f"{low}-{high}", tp, pp, dp]
        table.add_row(*map(str, row), end_section=(rank + 1) % each == 0)
    return _table(table, width).rstrip("\n")


def render_explanation(placement: Placement, width: int = 100) -> str:
    """Where the figures are from, and what is assumed."""
    links, sources = node_links(placement.cluster), placement.cluster.sources
    widths = sorted(set(placement.cluster.links.values()), reverse=True)
    rates = ", ".join(
        f"{links.rate_of_link(w):.4g} of {w:g} ({'published' if links.was_measured(w) else 'on the line between'})"
        for w in widths
    )
    lines = [
        CAVEAT,
        f"links: {sources.get('links', 'no source given')}",
        f"collectives: {sources.get('collectives', 'no source given')}",
        f"a link carries, GB/s: {rates}",
        f"several links across the narrowest cut of a group carry {links.cut:.2f} of their sum, a way through other "
        f"devices {links.detour:.2f} of its narrowest link, network cards {links.card:.2f} of theirs: each the lowest "
        f"part that a published figure gives",
        "assumed: messages between nodes reach the same part of a card as collectives do",
        "assumed: RCCL finds a ring that goes there and back over a spanning tree of links. If it does not, a group "
        "such as 0,1,6,7 does no better than its narrowest cut allows, which is that of 0,1,2,3: then both are equal",
        "not counted: latency, switches and groups of the network, which nodes a job gets, what computation hides",
        "tensor-parallel collectives decide first, because every layer waits for them; then the sum",
    ]
    return "\n".join(_wrapped(f"- {line}", width) for line in lines)


def _cost_table(placement: Placement, against: Placement | None) -> Any:
    table = _new_table()
    table.add_column("direction", no_wrap=True)
    table.add_column("messages")
    for name in ("GB", "GB/s", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    if against is not None:
        table.add_column("naive s", justify="right", no_wrap=True)
    table.add_column("limited by")
    for direction, title in _DIRECTIONS.items():
        parts = placement.cost.of(direction)
        others: Sequence[CostPart] = against.cost.of(direction) if against is not None else ()
        for i, part in enumerate(parts):
            row = [title if i == 0 else "", part.name, _amount(part.bytes / 1e9), _rate(part), _seconds(part.seconds)]
            if against is not None:
                other = next((o for o in others if o.name == part.name), None)
                row.append(_seconds(other.seconds) if other is not None else "-")
            table.add_row(*row, part.limit if i == 0 or part.limit != parts[i - 1].limit else "same")
    table.add_section()
    total = ["all", "nothing hidden", "", "", _seconds(placement.cost.seconds)]
    if against is not None:
        total.append(_seconds(against.cost.seconds))
    table.add_row(*total, "")
    return table


def _difference(placement: Placement, against: Placement) -> str:
    """In words, by direction."""
    same = (placement.layout.order, placement.device_order) == (against.layout.order, against.device_order)
    if same:
        return "this is the naive placement: none that was tried is cheaper"
    saved = against.cost.seconds - placement.cost.seconds
    share = 100 * saved / against.cost.seconds if against.cost.seconds else 0.0
    return (
        f"naive: rank order {against.layout.order}, device order {_order(against)}; "
        f"the chosen placement's messages take {abs(share):.0f} % {'less' if saved >= 0 else 'more'}"
    )


def _order(placement: Placement) -> str:
    return ",".join(map(str, placement.device_order))


def _rate(part: CostPart) -> str:
    return f"{'~' if part.basis != 'published' else ''}{_amount(part.gb_per_s)}"


def _amount(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 99.5 else f"{value:.2f}" if value >= 0.995 else f"{value:.3f}"


def _new_table() -> Any:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))


def _table(table: Any, width: int) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False)
