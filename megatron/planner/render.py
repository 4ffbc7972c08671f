"""A placement as text: what the messages of a step cost, beside another placement."""
from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from megatron.planner.table import Table

if TYPE_CHECKING:
    from megatron.planner.placement import Placement

_DIRECTIONS = {"tp": "tensor", "pp": "pipeline", "dp": "data"}


def render_placement(placement: Placement, against: Placement, width: int = 100) -> str:
    """Render the layout, both orders, and a table of its messages, with the seconds of the naive placement beside them.
    GB/s that were estimated have a ~."""
    layout, cost, other = placement.layout, placement.cost, against.cost
    naive = {(part.direction, part.name): part.seconds for part in other.parts}
    rows = [
        (title, part.name, f"{part.bytes / 1e9:.3g}", f"{'' if part.basis == 'published' else '~'}{part.gb_per_s:.3g}",
         f"{part.seconds:.3g}", f"{naive[direction, part.name]:.3g}" if (direction, part.name) in naive else "-",
         part.limit)
        for direction, title in _DIRECTIONS.items() for part in cost.of(direction)
    ]  # fmt: skip
    rows.append(("all", "nothing hidden", "", "", f"{cost.seconds:.3g}", f"{other.seconds:.3g}", ""))
    table = Table("", ("direction", "messages", "GB", "GB/s", "s", "naive s", "limited by"), rows)
    nodes = -(-layout.world_size // len(placement.device_order))
    return "\n".join([
        f"placement on {placement.cluster.name}: {layout.world_size} ranks on {nodes} node(s) = tensor {layout.tensor} "
        f"x pipeline {layout.pipeline} x data {layout.data}",
        _orders(placement), table.text(width), f"naive: {_orders(against)}",
        *(textwrap.fill(f"note: {note}", width, subsequent_indent="  ") for note in placement.notes),
    ])  # fmt: skip


def _orders(placement: Placement) -> str:
    return f"rank order {placement.layout.order}, device order {','.join(map(str, placement.device_order))}"
