"""A rehearsal as text: a table of the kinds of ranks, what was checked, what is wrong."""
from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from megatron.config import Config
from megatron.model.size import total_parameters
from megatron.planner.dryrun.kinds import layout_of
from megatron.planner.dryrun.memory_kinds import CATEGORIES, Unit
from megatron.planner.dryrun.rehearsal import RESERVE_GIB, RankRehearsal, Rehearsal

WIDTH = 120
_ACROSS = 8  # kinds of ranks in one table


def heading(config: Config, machine: str) -> str:
    """What is rehearsed; `machine` names what the ranks run on."""
    layout, chunks = layout_of(config), config.parallel.num_chunks
    return (
        f"dry run: {layout.world_size} rank{'s' * (layout.world_size > 1)} = tensor {layout.tensor} x pipeline "
        f"{layout.pipeline} x data {layout.data} ({layout.order}) on {machine}, {config.precision.dtype_name}, "
        f"{config.schedule_name}{f' of {chunks} chunks' if chunks > 1 else ''}\n"
        f"model: {total_parameters(config):,} parameters; a step is {config.num_micro_batches()} "
        f"micro-batches of {config.batch.micro_batch_size} x {config.model.seq_length} tokens on each replica"
    )


def render(found: Rehearsal, width: int = WIDTH) -> str:
    """The table of memory, what it rests on, what was checked and what is wrong."""
    unit = Unit.of(max((rank.needed_bytes for rank in found.ranks), default=0))
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        for first in range(0, len(found.ranks), _ACROSS):
            console.print(_table(found, found.ranks[first : first + _ACROSS], unit))
        for line in _foot(found, unit):
            wrapped = textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False)
            console.print("\n".join(wrapped), markup=False)
    return capture.get().rstrip("\n")


def _table(found: Rehearsal, ranks: Sequence[RankRehearsal], unit: Unit) -> Table:
    """Categories down, kinds of ranks across."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{unit.name} on each device", no_wrap=True)
    for rank in ranks:
        table.add_column(f"pp rank {rank.pipeline_rank}", justify="right", no_wrap=True)
    table.add_row("rank", *(str(rank.rank) for rank in ranks))
    table.add_row("stages", *(_stages(rank.stages) for rank in ranks))
    table.add_row("stands for ranks", *(str(rank.stands_for) for rank in ranks))
    table.add_row("parameters", *(_count(rank.parameters) for rank in ranks), end_section=True)
    for name in CATEGORIES:
        table.add_row(name, *(unit.show(rank.peak[name]) for rank in ranks))
    table.add_row("in all, at the fullest", *(unit.show(rank.total_peak_bytes) for rank in ranks), end_section=True)
    table.add_row("before the first step", *(unit.show(rank.setup_peak_bytes) for rank in ranks))
    if found.capacity_bytes is not None:
        table.add_row("left", *(unit.show(found.capacity_bytes - rank.needed_bytes) for rank in ranks))
    return table


def _foot(found: Rehearsal, unit: Unit) -> Iterator[str]:
    if found.capacity_bytes is not None:
        reserve = (
            f", {RESERVE_GIB:g} GiB less than a device has: an assumption for the runtime, the communication library "
            f"and what the allocator cannot reuse" if found.device == "gpu" else ""
        )
        yield f"There are {unit.show(found.capacity_bytes)} {unit.name} for each rank{reserve}."
    host = max((rank.host_bytes for rank in found.ranks), default=0)
    if host:
        yield f"Set-up keeps up to {unit.show(host)} {unit.name} in host memory, for each rank of a node."
    copy = max((rank.copy_bytes for rank in found.ranks), default=0)
    if copy:
        size = f"{unit.show(copy)} {unit.name}"
        yield f"--async-save keeps a copy of up to {size} in host memory, for each rank of a node."
    count = found.config.num_micro_batches()
    if found.micro_batches < count:
        yield (
            f"Each rank took {found.micro_batches} of the {count} micro-batches: after its warm-up it alternates "
            f"between forward and backward passes, so that what it holds repeats."
        )
    yield from (f"assumed: {text}." for text in found.assumptions)
    yield from (f"checked: {text}." for text in found.checked)
    for finding in found.findings:
        yield f"{_TITLES[finding.kind]}: rank {finding.rank}: {finding.text}."
    if not found.findings:
        yield "It runs, and it fits." if found.capacity_bytes is not None else (
            "It runs. Whether it fits is not known: --cluster names a machine to compare with."
        )


_TITLES = {
    "memory": "DOES NOT FIT", "messages": "MESSAGES DIFFER", "parameters": "PARAMETERS DIFFER", "error": "CANNOT RUN",
}  # fmt: skip


def _count(n: int) -> str:
    return f"{n / 1e9:.3f} B" if n >= 1e8 else f"{n / 1e6:.2f} M"


def _stages(stages: tuple[int, ...]) -> str:
    return ",".join(map(str, stages)) if len(stages) <= 3 else f"{stages[0]},{stages[1]},..{stages[-1]}"
