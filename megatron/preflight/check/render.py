"""The report for people (tables) and for programs (one dictionary)."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.planning.placement import RankRow
from megatron.preflight.check.findings import ERROR, NOTE, WARNING
from megatron.preflight.check.report import Report, TrainingReport

_STYLES = {ERROR: "bold red", WARNING: "yellow", NOTE: "dim"}
_SHOWN = (
    "nodes", "ntasks-per-node", "cpus-per-task", "time", "partition", "qos", "account", "constraint", "signal",
    "requeue", "open-mode", "network",
)  # fmt: skip


def render(report: Report, console: Console) -> None:
    """Print everything, the findings last: they are what one looks for."""
    console.print(Text(report.submission.name, style="bold"))
    _pairs(console, "job", list(_job_rows(report)))
    for one in report.trainings:
        _training(report, one, console)
    _findings(report, console)


def _table(title: str, show_header: bool = True) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=show_header, pad_edge=False
    )


def _pairs(console: Console, title: str, rows: list[tuple[str, str, str]]) -> None:
    table = _table(title, show_header=False)
    for column in ("", "", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _job_rows(report: Report) -> Iterator[tuple[str, str, str]]:
    sizes = report.job.sizes
    if report.submission.is_batch:
        for name in _SHOWN:
            given = report.job.options.get(name)
            if given is not None:
                yield name, given.value or "yes", given.where
    else:
        yield "nodes", str(sizes.nodes), ""
    if report.cluster is not None:
        yield "cluster", report.cluster.title, ""


def _training(report: Report, one: TrainingReport, console: Console) -> None:
    t = one.training
    how = f"{t.launcher}, {t.sizes.tasks} processes"
    if t.srun:
        how = f"srun: {t.sizes.nodes} nodes, {t.sizes.tasks} tasks"
    rows = [("started at", str(t.place), how), ("program", t.program, "")]
    rows += list(_config_rows(one))
    rows += list(_figure_rows(report, one))
    _pairs(console, "training", rows)
    if one.layout is not None:
        console.print(Text(one.layout.text), soft_wrap=True)
        _nodes(report, one, console)


def _config_rows(one: TrainingReport) -> Iterator[tuple[str, str, str]]:
    config = one.config
    if config is None:
        return
    model, parallel, batch = config.model, config.parallel, config.batch
    yield "model", (f"{model.num_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads, "
                    f"sequence length {model.seq_length}"), ""  # fmt: skip
    chunks = f" x {parallel.num_chunks} chunks" if parallel.num_chunks > 1 else ""
    more = ", sequence parallel" if parallel.sequence_parallel else ""
    yield "layout", (f"TP {parallel.tensor_model_parallel_size} x PP "
        f"{parallel.pipeline_model_parallel_size}{chunks} x DP "
                     f"{parallel.data_parallel_size}{more}, {parallel.schedule}, ZeRO-{config.engine.zero_stage}"), ""
    yield "batch", (f"{batch.global_batch_size} samples = {batch.micro_batch_size} x "
        f"{parallel.data_parallel_size} replicas x "
                    f"{config.num_micro_batches()} micro-batches"), config.origin("global_batch_size")  # fmt: skip
    again = config.recompute.recompute_granularity or "none"
    yield "precision", f"{config.precision.dtype_name}, recomputation {again}", ""
    rate = config.optimizer
    yield "learning rate", f"{rate.lr:g} to {rate.min_lr:g}, {rate.lr_decay_style}", ""


def _figure_rows(report: Report, one: TrainingReport) -> Iterator[tuple[str, str, str]]:
    if one.resumption.end is not None:
        where = f"from {one.resumption.folder}" if one.resumption.folder else "from initial weights"
        yield "iterations", f"{one.resumption.iteration} to {one.resumption.end}", where
    if one.memory is not None:
        m, gib = one.memory, 2**30
        of = f" of {report.cluster.memory_gib:g}" if report.cluster else ""
        yield "memory", f"{m.total / gib:.1f} GiB{of} on the fullest device (pipeline rank {m.rank})", (
            f"weights {m.weights / gib:.1f}, gradients {m.gradients / gib:.1f}, optimizer {m.optimizer / gib:.1f}, "
            f"activations {m.activations / gib:.1f}, temporary {m.temporary / gib:.1f}; without what the runtime takes"
        )
    if one.storage is not None:
        kept = f", up to {one.storage.at_once} at once" if one.storage.at_once else ", all are kept"
        yield "checkpoint", f"{one.storage.checkpoint / 1e9:.1f} GB{kept}", (
            f"{one.storage.free / 1e9:.0f} GB {one.storage.limit}"
        )
        yield "a save", f"about {one.storage.save_s:.0f} s", (
            f"assumed: {one.storage.gb_per_s:.1f} GB/s, 0.1 for each rank, as training assumes until its first save"
        )
    if one.data.tokens:
        tokens = sum(one.data.tokens.values())
        built = f"{one.data.built} of {one.data.indices} indices built"
        yield "data", f"{tokens:,} tokens in {len(one.data.tokens)} file(s)", built
    if one.start_up is not None and one.start_up.seconds is not None:
        yield "start-up", f"{one.start_up.seconds:g} s until Python runs (published for 8 nodes)", one.start_up.how
    if one.start_up is not None and one.start_up.meeting_s >= 0.01:
        yield "", f"{one.start_up.meeting_s:g} s of rank 0's work until all ranks have met", (
            "measured without a network (benchmarks/scale.py)"
        )


_ALL_RANKS = "all ranks: tools/show_placement.py --table FILE.csv with the flags of the training"


def _nodes(report: Report, one: TrainingReport, console: Console) -> None:
    assert one.layout is not None and report.cluster is not None, "there is a layout"
    for rows in (one.layout.first, one.layout.last):
        if not rows:
            continue
        table = _table(f"node {rows[0].node}")
        for name in ("device", "rank", "tp", "pp", "dp", "layers", "NIC", "cores"):
            table.add_column(name, justify="left" if name in ("layers", "NIC", "cores") else "right")
        for row in sorted(rows, key=lambda row: row.device):
            low, high = report.cluster.cores_of_device[row.device]
            numbers = (row.device, row.rank, row.tp, row.pp, row.dp)
            table.add_row(*map(str, numbers), _layers(row), row.nic, f"{low}-{high}")
        console.print(table)
    console.print(Text(_ALL_RANKS, style="dim"), soft_wrap=True)


def _layers(row: RankRow) -> str:
    return ", ".join(f"{chunk.start}-{chunk.stop - 1}" if len(chunk) > 1 else str(chunk.start) for chunk in row.chunks)


def _findings(report: Report, console: Console) -> None:
    for finding in report.findings:
        line = Text(f"{finding.level}: ", style=_STYLES[finding.level])
        line.append(f"{finding.about}: {finding.text}", style="")
        if str(finding.place):
            line.append(f" [{finding.place}]", style="cyan")
        console.print(line, soft_wrap=True)
    console.print(Text(verdict(report), style="bold"), soft_wrap=True)


def verdict(report: Report) -> str:
    """The last line."""
    errors, warnings = report.count(ERROR), report.count(WARNING)

    def many(n: int, what: str) -> str:
        return f"{n} {what}{'' if n == 1 else 's'}"

    if errors:
        return f"not to be submitted: {many(errors, 'error')}, {many(warnings, 'warning')}"
    return f"nothing stands against submitting it: {many(warnings, 'warning')}"


def to_dict(report: Report) -> dict[str, Any]:
    """What --json prints."""
    cluster = report.cluster
    return {
        "script": report.submission.name,
        "cluster": cluster.name if cluster else None,
        "job": {name: given.value for name, given in sorted(report.job.options.items())}
        | {"nodes": report.job.sizes.nodes},
        "trainings": [_training_dict(one) for one in report.trainings],
        "findings": [finding.to_dict() for finding in report.findings],
        "errors": report.count(ERROR),
        "warnings": report.count(WARNING),
        "seconds": round(report.seconds, 3),
    }


def _training_dict(one: TrainingReport) -> dict[str, Any]:
    layout = None
    if one.layout is not None:
        placement = one.layout.placement
        layout = {
            "rank_order": placement.layout.order,
            "device_order": list(placement.device_order),
            "seconds_per_step": placement.cost.seconds,
            "ranks": [_row_dict(row) for row in (*one.layout.first, *one.layout.last)],
        }
    return {
        "place": str(one.training.place),
        "arguments": list(one.training.arguments),
        "nodes": one.training.sizes.nodes,
        "tasks": one.training.sizes.tasks,
        "config": one.config.to_dict() if one.config else None,
        "layout": layout,
        "memory_bytes": dataclasses.asdict(one.memory) | {"total": one.memory.total} if one.memory else None,
        "storage": dataclasses.asdict(one.storage) if one.storage else None,
        "start_up": dataclasses.asdict(one.start_up) if one.start_up else None,
        "data": dataclasses.asdict(one.data),
        "resumption": dataclasses.asdict(one.resumption),
    }


def _row_dict(row: RankRow) -> dict[str, Any]:
    return row._asdict() | {"chunks": [[chunk.start, chunk.stop] for chunk in row.chunks]}


