"""Tables of a search for a terminal and for Markdown, and its files table.csv and table.json."""
from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config.layout import Layout, write_value
from megatron.model import formulas
from megatron.planner import error_bars
from megatron.planner.cluster import Cluster
from megatron.planner.memory import sized_model
from megatron.planner.search.find import ESTIMATED, GIB, OF_EACH_VALUE, Found, Search
from megatron.planner.search.outcome import Effect, Run, run_of, write_losses
from megatron.planner.table import Table
from megatron.planner.timing import PARTS, Estimate, estimate
from megatron.untrusted import write_text


def write_recompute(text: str) -> str:
    """'mlp_act, layernorm', 'groups of 2 layers', 'first 3 layers of a stage'."""
    kind, _, rest = text.partition(":")
    if kind == "selective":
        return rest.replace("+", ", ")
    if kind == "none":
        return "none"
    method, count = rest.split(":")
    if method == "block":
        return f"first {count} of a stage"
    return "every layer" if count == "1" else f"groups of {count}"


def _switches(layout: Layout) -> str:
    words = [word for word, on in (("sp", layout.sp), ("overlap", layout.overlap), ("ZeRO", layout.zero)) if on]
    return ", ".join(words) or "-"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _step(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 0.995 else f"{seconds:.3g}"


def _amount(value: float) -> str:
    """Three digits, with thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:.3g}"


def layout_table(
    title: str, chosen: Sequence[tuple[Layout, Estimate]], capacity: float, tokens: float | None, *, papers: bool
) -> Table:
    """Layouts: sizes, time, use of the peak, cost of a run, memory of the fullest rank and what is left; with `papers`
    the TFLOP/s of a device as Dash et al. count them, too."""
    several_nodes = len({e.nodes for _, e in chosen}) > 1
    columns = ["#", "TP", "PP", "DP", "chunks", "schedule", "mbs", "batch", "recompute", "also on", "s/step",
               "MFU", "HFU", "Gtok/day"]  # fmt: skip
    if several_nodes:
        columns.insert(1, "nodes")
    columns += ["TFLOP/s (paper)"] if papers else []
    columns += ["days", "node-hours"] if tokens else ["node-h/Gtok"]
    columns += ["GiB", "left"]
    rows = []
    for number, (layout, found) in enumerate(chosen, 1):
        most = max(rank.total for rank in found.memory)
        row = [str(number), str(layout.tp), str(layout.pp), str(layout.replicas), str(layout.chunks), layout.schedule,
               str(layout.micro), f"{layout.batch:,}",
               write_recompute(layout.recompute), _switches(layout), _step(found.seconds), _percent(found.mfu),
               _percent(found.hfu), _amount(found.tokens_per_day / 1e9)]  # fmt: skip
        if several_nodes:
            row.insert(1, f"{found.nodes:,}")
        if papers:
            row.append(_paper_tflops(found))
        if tokens:
            run = run_of(found, tokens)
            row += [_amount(run.days), _amount(run.node_hours)]
        else:
            row.append(_amount(found.node_hours(1e9)))
        rows.append((*row, f"{most / GIB:.1f}", f"{(capacity - most) / GIB:.1f}"))
    return Table(title, tuple(columns), rows)


def _paper_tflops(found: Estimate) -> str:
    """Of a device by `formulas.paper_flops`; a dash for a model that is not the GPT which it counts."""
    config, model = found.config, sized_model(found.config)
    plain = model.ffn_hidden_size == 4 * model.hidden_size and model.num_key_value_heads == model.num_attention_heads
    if not plain or model.activation == "swiglu":
        return "-"
    flops = formulas.paper_flops(
        config.batch.global_batch_size, model.seq_length, model.num_layers, model.hidden_size,
        model.padded_vocab_size(config.parallel.tensor_model_parallel_size),
        checkpointing=config.recompute.recompute_granularity == "full",
    )  # fmt: skip
    return f"{formulas.achieved_tflops(flops, found.seconds, found.devices):.1f}"


def bounds_table(chosen: Sequence[tuple[Layout, Estimate]]) -> Table:
    """How far the seconds of a step may be off, and what they would be at the device's peak."""
    columns = ("#", "s/step", "fast ends", "slow ends", "+-", "at the peak", "moved most by")
    rows = []
    for number, (_, found) in enumerate(chosen, 1):
        dtype = found.config.precision.dtype_name
        spread = error_bars.spread(functools.partial(_seconds_on, found), found.cluster, dtype)
        times = map(_step, (spread.value, spread.low, spread.high, spread.likely))
        peak = "-" if found.hfu is None else _step(found.hfu * found.seconds)
        rows.append((str(number), *times, peak, spread.effects[0].figure))
    title = (
        "bounds of the seconds of a step: all figures at the fast, or the slow ends of their ranges; +-: off "
        "independently; all operations at the device's peak"
    )
    return Table(title, columns, rows)


def _seconds_on(found: Estimate, cluster: Cluster) -> float:
    """Of the same step on the machine with other figures."""
    return estimate(found.config, cluster, found.placement).seconds


def parts_table(chosen: Sequence[tuple[Layout, Estimate]]) -> Table:
    """Where the seconds of a step go, as the pipeline rank spends them that computes most."""
    used = [part for part in PARTS if any(found.parts.get(part) for _, found in chosen)]
    rows = []
    for number, (_, found) in enumerate(chosen, 1):
        rows.append((str(number), *(_seconds(found.parts.get(part, 0.0)) for part in used), _step(found.seconds)))
    return Table("seconds of a step, on the pipeline rank that computes most", ("#", *used, "all"), rows)


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.995 else f"{value:.3f}" if value else "0"


def placement_table(chosen: Sequence[tuple[Layout, Estimate]]) -> Table:
    """Each placement with the numbers of the layouts that have it."""
    users: dict[tuple[str, ...], list[str]] = {}
    for number, (layout, _) in enumerate(chosen, 1):
        users.setdefault((layout.rank_order, ",".join(map(str, layout.device_order))), []).append(str(number))
    rows = [(", ".join(numbers), *placement) for placement, numbers in users.items()]
    return Table("placement", ("#", "rank order", "device order"), rows)


def values_table(found: Found, given: Search, name: str, title: str) -> Table:
    """For each value of one dimension the best layout that has it."""
    rows, by_value = [], found.by_value(given.space.cluster.devices_per_node)
    for value, best in sorted((v[1], best) for v, best in by_value.items() if v[0] == name):
        rows.append((f"{value:,}", _step(best.seconds), _amount(best.tokens_per_s * 86400 / 1e9), _percent(best.mfu),
                     f"{best.memory / GIB:.1f}", short(best.layout, given)))  # fmt: skip
    return Table(f"best layout for each {title}", (title, "s/step", "Gtok/day", "MFU", "GiB", "layout"), rows)


def short(layout: Layout, given: Search) -> str:
    """A layout without what all layouts of the search have in common and without its placement."""
    fixed = {"nodes": len(given.space.worlds) == 1, "gbs": len(given.space.batches) == 1}
    words = layout._replace(rank_order="", device_order=()).write(given.space.cluster.devices_per_node).split(",")
    return ",".join(word for word in words if not fixed.get(word.partition("=")[0], False))


def sensitivity_table(effects: Sequence[Effect]) -> Table:
    rows = [(e.title, f"-{100 * e.blind:.1f} %", f"-{100 * e.worst:.1f} %", write_losses(e)) for e in effects]
    return Table("what each choice is worth: throughput with it fixed and all else searched; blindly: with a value by "
                 "chance of those that fit", ("choice", "blindly", "worst value", "values"), rows)  # fmt: skip


def rejection_table(found: Found) -> Table:
    """What was not estimated, and why."""
    rows = [
        (f"{count:,}", unit, reason, first_problem(found.rejections.examples[unit, reason]))
        for (unit, reason), count in sorted(found.rejections.counts.items(), key=lambda item: -item[1])
    ]
    if found.counts["outdone"]:
        why = f"slower than {ESTIMATED} others by a formula, and than {OF_EACH_VALUE} with each of their choices"
        rows.append((f"{found.counts['outdone']:,}", "layouts", why, ""))
    return Table("rejected", ("how many", "of", "why", "for example"), rows)


def first_problem(text: str) -> str:
    r"""The first of the problems that a configuration has, on one line.

    >>> first_problem("the configuration has 2 problems:\n  1. this\n  2. that")
    'this'
    """
    if not text.startswith("the configuration has "):
        return " ".join(text.split())
    first = text.splitlines()[1] if "\n" in text else text
    return " ".join(first.split()).partition(". " if "\n" in text else "problem: ")[2]


# -- files -------------------------------------------------------------------------------------------------------------


def record(layout: Layout, found: Estimate, given: Search, run: Run | None) -> dict[str, Any]:
    """A layout as one flat row."""
    most = max(found.memory, key=lambda rank: (rank.total, -rank.rank))
    row: dict[str, Any] = {
        "nodes": found.nodes, "devices": layout.world, "global_batch": layout.batch, "tp": layout.tp, "pp": layout.pp,
        "dp": layout.replicas, "chunks": layout.chunks, "schedule": layout.schedule, "micro_batch": layout.micro,
        "sequence_parallel": layout.sp, "tp_comm_overlap": layout.overlap, "zero_stage": layout.zero,
        "recompute": layout.recompute, "rank_order": layout.rank_order,
        "device_order": write_value(layout.device_order), "seconds_per_step": found.seconds, "mfu": found.mfu,
        "hfu": found.hfu, "tokens_per_s": found.tokens_per_s, "tokens_per_day": found.tokens_per_day,
        "memory_gib": most.total / GIB, "fullest_pipeline_rank": most.rank,
        "left_gib": (given.capacity - most.total) / GIB,
    }  # fmt: skip
    row |= {f"{part.replace(' ', '_').replace('-', '_')}_s": found.parts.get(part, 0.0) for part in PARTS}
    if run is not None:
        row |= {"steps": run.steps, "days": run.days, "node_hours": run.node_hours, "jobs": run.jobs}
    else:
        row["node_hours_per_gtoken"] = found.node_hours(1e9)
    return row


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["nodes"])
    writer.writeheader()
    writer.writerows(rows)
    return write_text(path, text.getvalue(), choose="another --output folder")


def write_json(path: Path, content: dict[str, Any]) -> Path:
    return write_text(path, json.dumps(content, indent=1, default=str) + "\n", choose="another --output folder")


def everything(
    given: Search, found: Found, rows: Sequence[dict[str, Any]], effects: Sequence[Effect], confidence: Any
) -> dict[str, Any]:
    """All of a search for a program to read."""
    return {
        "model": given.space.base.name, "cluster": given.space.cluster.name,
        "capacity_gib": given.capacity / GIB, "worlds": given.space.worlds, "batches": given.space.batches,
        "best": list(rows),
        "front": [
            {"layout": j.layout.write(given.space.cluster.devices_per_node), "memory_gib": j.memory / GIB,
             "tokens_per_s": j.tokens_per_s, "seconds_per_step": j.seconds} for j in found.front
        ],
        "sensitivity": [
            {"choice": e.dimension, "losses": {write_value(v): loss for v, loss in e.losses}} for e in effects
        ],
        "rejected": [
            {"how_many": n, "of": unit, "why": why, "example": found.rejections.examples[unit, why]}
            for (unit, why), n in found.rejections.counts.items()
        ],
        "counts": dict(found.counts),
        "inputs": [used._asdict() for used in confidence.used],
    }  # fmt: skip
