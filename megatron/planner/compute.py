"""Figures for a machine's compute and communication speed, each with its source.

A figure is one number or a set of points: rows whose last column is the value and whose other
columns are its arguments. In a machine's file (`clusters/*.toml`) it is a table under [compute],
with `value` or `points`, a `basis` and, if known, a `range`: the true value may lie anywhere from
the first factor (at most 1) to the second (at least 1) times the figure. Its source is in
[sources], under `compute_` plus its name with underscores for dots, or under a prefix of this key.
Most figures that are missing from a file are assumed (`assumed.toml`), with rates as a share of the
peak.

Names of figures, columns, units:

    products.DTYPE             m, n, k, TFLOP/s of [m, k] x [k, n]
    attention.DTYPE.forward    sequence length, head size, TFLOP/s of causal attention, counting
                               half of all pairs
    attention.DTYPE.backward   the same, counting 2.5 times the operations of the forward pass
    attention_KERNEL.forward, attention_KERNEL.backward
                               the same in 16 bits by other kernels (cudnn, flash1, flash3, triton),
                               for comparisons with runs that used them
    memory.WORK                bytes that a kernel reads and writes, GB/s; or only GB/s. WORK is
                               copy, norm, activation, residual, loss or embedding; copy stands in
                               for a missing figure
    kernel_s                   s that the shortest kernel takes
    update_gb_per_s            GB/s of the optimizer's update, counting bytes read and written
    layer_overhead_s           s of host time per layer's pass that device work does not hide; also
                               layer_forward_overhead_s and layer_backward_overhead_s if these
                               passes differ
    instruction_overhead_s     s of host time per instruction of the pipeline's schedule; 0 if
                               missing
    step_overhead_s            s of host time per step
    launch_s                   s of host time to start a kernel. Passes take at least this long for
                               each of their kernels, unless they are recorded as graphs
    speed_beside_messages      share of its speed that a computation keeps while its device sends
                               and receives
    device_variation           standard deviation of the sustained speed of a machine's devices, as
                               a share of their mean. A step waits for the slowest device
    pass_variation             standard deviation of the time of a device's passes for a micro-batch
    run_variation              standard deviation of the step times of identical runs, as a share
    bandwidth_by_nodes         nodes of a group, share of the bandwidth between nodes that its
                               collectives keep; 1 if missing. For all-to-alls:
                               exchange_by_nodes
    collective_start_s         s that a collective takes to start
    hop_within_s, hop_between_s          s of one step of a collective, within or between nodes
    ring_hop_between_s         s of one step between nodes of a ring whose ranks send many bytes;
                               hop_between_s if missing
    message_within_s, message_between_s  s from sending to arrival of an empty message
    collectives.KIND           ranks from one member to the next, members, nodes, bytes of the whole
                               tensor, s. KIND is all_reduce, all_gather, reduce_scatter, reduce
                               (to one member) or all_to_all. If missing, computed from the links
    messages                   1 within a node or 2 between nodes, bytes, s. If missing, computed
                               from the links

DTYPE is float16, bfloat16 or float32. This module does not need torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

MEASURED = "measured"
PUBLISHED = "published"
ASSUMED = "assumed"
BASES = (MEASURED, PUBLISHED, ASSUMED)
"""Bases of figures, from the most to the least reliable."""

DTYPES = ("float32", "float16", "bfloat16")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "reduce", "all_to_all")

ATTENTIONS = ("cudnn", "flash1", "flash3", "triton")
"""Other kernels for attention than this code's."""

SCALARS = (
    "kernel_s update_gb_per_s layer_overhead_s layer_forward_overhead_s layer_backward_overhead_s "
    "instruction_overhead_s step_overhead_s launch_s collective_start_s hop_within_s hop_between_s "
    "ring_hop_between_s message_within_s message_between_s speed_beside_messages device_variation "
    "pass_variation run_variation"
).split()

COLUMNS: dict[str, int] = {
    **dict.fromkeys((f"products.{dtype}" for dtype in DTYPES), 4),
    **dict.fromkeys(
        (
            f"attention{kind}.{direction}"
            for kind in (*(f".{dtype}" for dtype in DTYPES), *(f"_{name}" for name in ATTENTIONS))
            for direction in ("forward", "backward")
        ),
        3,
    ),
    **dict.fromkeys(SCALARS, 1),
    **dict.fromkeys(
        (f"memory.{w}" for w in ("copy", "norm", "activation", "residual", "loss", "embedding")), 2
    ),
    **dict.fromkeys((f"collectives.{kind}" for kind in KINDS), 5),
    "bandwidth_by_nodes": 2,
    "exchange_by_nodes": 2,
    "messages": 3,
}
"""Names of all figures, each with the number of columns of its points."""

_COLUMNS_OF = {
    "products": "m, n, k, TFLOP/s",
    "attention": "sequence length, head size, TFLOP/s",
    "memory": "bytes, GB/s",
    "collectives": "ranks from one member to the next, members, nodes, bytes, s",
    "bandwidth_by_nodes": "nodes, share",
    "exchange_by_nodes": "nodes, share",
    "messages": "1 within a node or 2 between nodes, bytes, s",
}


def columns_of(figure: str) -> str:
    """Describe the columns of a figure's points, or the unit of a single number.

    >>> columns_of("products.float16"), columns_of("launch_s"), columns_of("run_variation")
    ('m, n, k, TFLOP/s', 'seconds', 'a share')
    """
    family = "attention" if figure.startswith("attention") else figure.split(".")[0]
    if family in _COLUMNS_OF:
        return _COLUMNS_OF[family]
    if figure.endswith("_per_s"):
        return "GB/s"
    return "seconds" if is_time(figure) else "a share"


Points = tuple[tuple[float, ...], ...]


def is_time(name: str) -> bool:
    """Return whether a figure is in seconds."""
    return (name.endswith("_s") and not name.endswith("_per_s")) or name.startswith(
        ("messages", "collectives.")
    )


def is_rate(name: str) -> bool:
    """Return whether a figure is a device's rate, which is about proportional to its peak."""
    return name.startswith(("products.", "attention", "memory.")) or name.endswith("_per_s")


def is_cost(name: str) -> bool:
    """Return whether steps are longer the larger the figure is; otherwise they are shorter."""
    return is_time(name) or name.endswith("_variation")


@dataclass(frozen=True)
class Figure:
    """Numbers and their source.

    points     rows of arguments and a value; the arguments of a single number are 1
    basis      one of BASES
    low, high  factors between which the true value may lie, relative to the figure
    """

    name: str
    points: Points
    basis: str
    source: str
    low: float = 1.0
    high: float = 1.0

    @property
    def value(self) -> float:
        """Value of a figure with a single point."""
        return self.points[0][-1]

    def scaled(self, factor: float) -> Figure:
        """Return the figure with its last column multiplied by `factor`."""
        return replace(
            self, points=tuple((*point[:-1], point[-1] * factor) for point in self.points)
        )

    @functools.cached_property
    def used(self) -> Used:
        """Summarize the figure by its value, or by the range of its points."""
        values = [point[-1] for point in self.points]
        low = min(values)
        high = max(values)
        text = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
        return Used(self.name, text, self.basis, self.source)


class Used(NamedTuple):
    """Summary of a figure that an estimate uses: name, short values, basis and source."""

    figure: str
    value: str
    basis: str
    source: str


class FigureReader:
    """Reader of a machine's figures that records which of them are used."""

    def __init__(self, figures: Mapping[str, Figure]) -> None:
        self.figures = figures
        self._used: dict[str, Used] = {}

    @property
    def used(self) -> set[Used]:
        """Figures on which the results so far are based."""
        return set(self._used.values())

    def take(self, name: str) -> Figure:
        """Return a figure, and record that it is used."""
        figure = self.figures[name]
        self._used.setdefault(name, figure.used)
        return figure


@dataclass(frozen=True)
class Confidence:
    """Figures that an estimate uses, most reliable first."""

    used: tuple[Used, ...]

    @property
    def worst(self) -> str:
        """Least reliable basis; "measured" if no figure is used."""
        return self.used[-1].basis if self.used else MEASURED

    @property
    def by_basis(self) -> dict[str, list[str]]:
        """Names of the figures used, by basis."""
        return {
            basis: [used.figure for used in self.used if used.basis == basis] for basis in BASES
        }

    def describe(self) -> str:
        """Return one line: the number of figures by basis, and the names of the assumed ones."""
        counts = [f"{len(names)} {basis}" for basis, names in self.by_basis.items() if names]
        assumed = self.by_basis[ASSUMED]
        return f"inputs: {', '.join(counts) or 'none'}" + (
            f" ({', '.join(assumed)})" if assumed else ""
        )
