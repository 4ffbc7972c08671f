"""Figures of `make bench`: medians with spread, JSON of a run, comparison with earlier runs, tables.

A figure is {"median", "min", "max", "count", "spread"}. `spread` is the share of the median that
should contain nineteen of twenty figures of another run on the same machine: half the range of the
values, or the minimum of its kind if that is larger. Values of a few minutes do not show the
variation between days (pages, temperature, neighbours on the same host); the minima account for it.
They are the largest differences of such figures between three runs of one machine, hours apart,
rounded up: 9.4 % of a step, 9.6 % of a ratio, 7.3 % of a rate of matrix products, 23 % of a start,
51 and 73 % of memory-bound operations of a few milliseconds, 57 % of writing a file.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared import Record, Table, markdown

FLOOR = 0.10  # of steps, ratios, memory and rates of matrix products
START_FLOOR = 0.25  # seconds to the first step: imports from the page cache or from the disk
SHORT_FLOOR = 0.75
DISK_FLOOR = 0.60
_FLOORS = {"start_s": START_FLOOR}
# Key of a row, its unit, and whether less is better. A peer's ratio is its time over ours: more is
# better for us.
_COMPARED = (
    ("step_s", "s/step", True),
    ("ratio", "step / ours", False),
    ("memory_bytes", "peak bytes", True),
    ("start_s", "s to the first step", True),
)
Figure = dict[str, float]
GIB = 2**30


def figure(values: Sequence[float], floor: float = FLOOR) -> Figure:
    """Return the figure of one or more values.

    >>> figure([1.0, 1.2, 1.4])["spread"] == (1.4 - 1.0) / 2 / 1.2
    True
    """
    middle = statistics.median(values)
    low = min(values)
    high = max(values)
    spread = (high - low) / 2 / middle if middle else 0.0
    return {
        "median": middle,
        "min": low,
        "max": high,
        "count": len(values),
        "spread": max(floor, spread),
    }


def row_of(
    case: Any, side: Any, rounds: Sequence[Any], reference: Sequence[Any], ceiling: float | None
) -> Record:
    """Return the row of a side.

    rounds     its outcomes
    reference  outcomes in the same rounds of the side that it is compared with
    ceiling    FLOP/s of matrix products on all devices or threads of the case

    The ratio is the seconds of a step over those of the reference in the same round: above 1 the
    reference is faster.
    """
    row: Record = {
        "workload": case.workload,
        "case": case.name,
        "side": side.name,
        "dtype": case.dtype,
        "less": side.less,
        "sequence": case.sequence,
        "processes": case.processes,
        "tokens": case.tokens,
        "flops": case.flops,
        "parameters": case.parameters,
        "reason": next((o.reason for o in rounds if o.reason), ""),
        "wall_s": sum(o.wall_s for o in rounds),
    }
    good = [(o, r) for o, r in zip(rounds, reference, strict=True) if o.step_s]
    if not good:
        return row
    step = figure([s for o, _ in good for s in o.step_s])
    row |= {
        "step_s": step,
        "tokens_per_s": case.tokens / step["median"],
        "flops_per_s": case.flops / step["median"],
    }
    if ceiling:
        row["share_of_ceiling"] = row["flops_per_s"] / ceiling
    ratios = [
        statistics.median(o.step_s) / statistics.median(r.step_s) for o, r in good if r.step_s
    ]
    if ratios:
        row["ratio"] = figure(ratios)
    for name in ("start_s", "memory_bytes", "first_loss"):
        values = [getattr(o, name) for o, _ in good if getattr(o, name) is not None]
        if values:
            row[name] = (
                values[0] if name == "first_loss" else figure(values, _FLOORS.get(name, FLOOR))
            )
    optimizer = [s for o, _ in good for s in o.optimizer_s]
    if optimizer:
        row["optimizer_s"] = figure(optimizer, SHORT_FLOOR)
    return row


# ---- files ---------------------------------------------------------------------------------------


def write(record: Record, folder: Path) -> Path:
    """Write a run to a file named after the time at which it began; return its path."""
    path = (
        folder
        / f"{record['date'].replace(':', '').replace('-', '')}{'-quick' if record['quick'] else ''}.json"
    )
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def last_of(folder: Path, record: Record) -> Record | None:
    """Return the newest earlier run on the same machine that has a figure in common with this one.

    The runs must be of one kind: of the same device, and both quick or neither.
    """

    def kind(r: Record) -> tuple[Any, ...]:
        of_machine = [
            r.get("machine", {}).get(key) for key in ("processor", "threads", "memory_gib", "gpu")
        ]
        return (r.get("quick"), r.get("device"), r.get("threads"), *of_machine)

    candidates = []
    for path in folder.glob("*.json"):
        try:
            earlier = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if not isinstance(earlier, dict):
            continue
        older = earlier.get("date", "") < record["date"]
        if (
            older
            and kind(earlier) == kind(record)
            and figures_of(earlier).keys() & figures_of(record).keys()
        ):
            candidates.append(earlier)
    return max(candidates, key=lambda r: r["date"], default=None)


def figures_of(record: Record) -> dict[str, tuple[Figure, bool]]:
    """Return {name: (figure, whether less is better)} of the comparable figures of a run."""
    figures: dict[str, tuple[Figure, bool]] = {}
    for name, value in record.get("ceiling", {}).items():
        figures[f"ceiling, {name}, GFLOP/s"] = (value, False)
    for row in record.get("rows", []):
        name = f"{row['workload']} {row['case']}, {row['side']}"
        for key, unit, less_is_better in _COMPARED:
            # without the ratio of ours to itself
            if key in row and not (key == "ratio" and row[key]["median"] == 1.0):
                figures[f"{name}, {unit}"] = (row[key], less_is_better)
    for row in record.get("parts", []):
        if "value" in row:
            figures[f"{row['name']}, {row['side']}, {row['unit']}"] = (row["value"], True)
    return figures


def compare(new: Record, old: Record) -> list[tuple[str, float, float, float, str]]:
    """Return (name, old median, new median, change, verdict) of every figure that both runs have.

    The change is new / old - 1. The verdict is "within spread" up to the larger of the two spreads,
    and "better" or "worse" beyond it. If the ceiling changed beyond its spread, the machine itself
    was faster or slower, and so the other changes say little about the code.
    """
    before = figures_of(old)
    lines = []
    for name, (figure_now, less_is_better) in figures_of(new).items():
        if name not in before or not before[name][0]["median"]:
            continue
        figure_then = before[name][0]
        change = figure_now["median"] / figure_then["median"] - 1
        verdict = "within spread"
        if abs(change) > max(figure_now["spread"], figure_then["spread"]):
            verdict = "better" if (change < 0) == less_is_better else "worse"
        lines.append((name, figure_then["median"], figure_now["median"], change, verdict))
    return lines


# ---- tables --------------------------------------------------------------------------------------


def rate_table(rows: Iterable[Record]) -> Table:
    """Tabulate the sides of all cases, a line for each."""
    rows = list(rows)
    used = ["MFU"] if any("mfu" in row for row in rows) else []
    table = [
        [
            "case",
            "side",
            "ms/step",
            "±",
            "tokens/s",
            *used,
            "of ceiling",
            "step / ours",
            "of W0",
            "peak GiB",
            "to 1st step",
        ]
    ]
    for row in rows:
        head = [f"{row['workload']} {row['case']}", row["side"]]
        if "step_s" not in row:
            table.append([*head, row["reason"] or "no figures", *[""] * (len(table[0]) - 3)])
            continue
        step = row["step_s"]
        share = row.get("share_of_ceiling")
        memory = row.get("memory_bytes")
        start = row.get("start_s")
        table.append(
            [
                *head,
                f"{1e3 * step['median']:,.0f}",
                f"{100 * step['spread']:.0f} %",
                f"{row['tokens_per_s']:,.0f}",
                *[f"{100 * row['mfu']:.1f} %" if "mfu" in row else "" for _ in used],
                f"{100 * share:.1f} %" if share else "",
                f"{row['ratio']['median']:.2f}" if "ratio" in row else "",
                f"{row['of_one_process']:.2f}" if "of_one_process" in row else "",
                f"{memory['median'] / GIB:.2f}" if memory else "",
                f"{start['median']:.1f} s" if start else "",
            ]
        )
    return table


def part_table(rows: Iterable[Record]) -> Table:
    """Tabulate optimizer step, save and kernels."""
    table = [["part", "side", "value", "unit", "±", "note"]]
    for row in rows:
        value = row.get("value")
        shown = ["", "", ""]
        if value:
            shown = [f"{value['median']:,.4g}", row["unit"], f"{100 * value['spread']:.0f} %"]
        table.append([row["name"], row["side"], *shown, row.get("note", "")])
    return table


def ceiling_table(ceiling: dict[str, Figure]) -> Table:
    """Tabulate the measured rates of matrix products."""
    table = [["matrix products", "GFLOP/s", "±"]]
    for name, value in ceiling.items():
        table.append([name, f"{value['median']:,.0f}", f"{100 * value['spread']:.0f} %"])
    return table


def comparison_table(lines: Iterable[tuple[str, float, float, float, str]]) -> Table:
    """Tabulate the lines of `compare` that are beyond the spread."""
    table = [["figure", "then", "now", "change", ""]]
    for name, then, now, change, verdict in lines:
        if verdict != "within spread":
            table.append([name, f"{then:,.4g}", f"{now:,.4g}", f"{100 * change:+.1f} %", verdict])
    return table


def heading(record: Record) -> list[str]:
    """Describe the run and its machine in a few lines."""
    machine = record["machine"]
    git = record["git"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    gpu = f", {machine['gpu']}" if machine.get("gpu") else ""
    return [
        f"{record['date']}, revision "
        f"{git['revision'][:12]}{' with changes' if git['changed'] else ''}, "
        f"{record['seconds'] / 60:.1f} minutes, {record['rounds']} round(s) of {record['steps']} "
        f"steps after {record['warm_up']} warm-up step(s)",
        f"{machine['processor']}{gpu}, {record['threads']} thread(s), {machine['memory_gib']} GiB, "
        f"{machine['system']}, {machine['libc']}, load {machine['load']} at the start",
        f"Python {machine['python']}, {versions}",
    ]


def notes(record: Record) -> list[str]:
    """List sides that do less work, failures in later rounds, and figures from fewer rounds."""
    lines = [
        f"{r['workload']} {r['case']}, {r['side']}: {r['less']}"
        for r in record["rows"]
        if r["less"]
    ]
    lines += [
        f"{r['workload']} {r['case']}, {r['side']}: failed in a later round: {r['reason']}"
        for r in record["rows"]
        if r["reason"] and "step_s" in r
    ]
    fewer: dict[int, list[str]] = {}
    for r in record["rows"]:
        count = r.get("ratio", {}).get("count", record.get("rounds", 0))
        if count < record.get("rounds", 0):
            fewer.setdefault(count, []).append(f"{r['workload']} {r['case']}, {r['side']}")
    return lines + [
        f"in {count} round(s) only: {'; '.join(names)}" for count, names in fewer.items()
    ]


def tables(record: Record) -> list[tuple[str, Table]]:
    """Return the tables of a run, with their titles."""
    return [
        ("ceiling", ceiling_table(record["ceiling"])),
        ("training", rate_table(record["rows"])),
        ("parts", part_table(record["parts"])),
    ]


def report(record: Record) -> str:
    """Return the run as Markdown, as in docs/measured/training.md."""
    text = [*heading(record), ""]
    for title, table in tables(record):
        if len(table) > 1:
            text += [f"**{title}**", "", *markdown(table), ""]
    return "\n".join([*text, *(f"- {note}" for note in notes(record))]) + "\n"
