"""The figures of a proof of the tuner as Markdown, and whether its limits hold."""
from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from predict import spearman
from tuner_replay import CONFIRM, HALF, QUARTER, Replay, Search
from tuner_table import NEAR, Table


@dataclass(frozen=True)
class Row:
    """One search over its seeds. trials: until one is within 3 % of the best (None: none was, of so many `tried`);
    allowed: the limit in trials, None for what is only compared; regrets: of the layout named after a quarter and after
    half of the trials, by seed; confirmed: of the one named at the end, by seed, by how many trials measured again."""

    search: Search
    trials: tuple[int | None, ...]
    tried: int
    allowed: int | None
    regrets: dict[int, tuple[float, ...]]
    confirmed: dict[int, tuple[float, ...]]

    @property
    def holds(self) -> bool:
        """Whether the limit is met with every seed."""
        return self.allowed is None or all(n is not None and n <= self.allowed for n in self.trials)


def rows_of(table: Table, replays: Sequence[Replay]) -> list[Row]:
    """One row for each search, in the order in which they come."""
    size, rows = len(table.candidates), []
    for search in dict.fromkeys(replay.search for replay in replays):
        same = sorted((r for r in replays if r.search == search), key=lambda r: r.seed)
        rows.append(
            Row(
                search, tuple(r.found_at(table) for r in same), max(len(r.tried) for r in same),
                None if search.limit is None else size // search.limit,
                {part: tuple(r.regret(table, size // part) for r in same) for part in (QUARTER, HALF)},
                {most: tuple(r.regret_confirmed(table, most) for r in same) for most in CONFIRM},
            )
        )  # fmt: skip
    return rows


def replay_table(table: Table, rows: Sequence[Row]) -> str:
    """Markdown: one line for each search."""
    lines = [
        "| search | prior | trials until one is within 3 %, by seed | median | worst | of the space | limit | holds "
        "| named after a quarter: median, worst | after half | "
        + " | ".join(f"at the end, {n} measured again" for n in CONFIRM) + " |",
        "|" + (10 + len(CONFIRM)) * "---|",
    ]
    for row in rows:
        counts = [row.tried + 1 if n is None else n for n in row.trials]
        shown = [f"> {row.tried}" if n is None else str(n) for n in row.trials]
        middle, worst = statistics.median(counts), max(counts)
        limit, holds = ("", "") if row.allowed is None else (str(row.allowed), "yes" if row.holds else "**no**")
        regrets = " | ".join(
            f"{_percent(statistics.median(found))}, {_percent(max(found))}"
            for found in (*row.regrets.values(), *row.confirmed.values())
        )
        lines.append(
            f"| {row.search.label} | {'yes' if row.search.prior else 'no'} | {', '.join(shown)} "
            f"| {_count(middle, row.tried)} | {_count(worst, row.tried)} "
            f"| {100 * min(worst / len(table.candidates), 1):.0f} % | {limit} | {holds} | {regrets} |"
        )
    return "\n".join(lines)


def _count(trials: float, tried: int) -> str:
    return f"> {tried}" if trials > tried else f"{trials:g}"


def _percent(regret: float) -> str:
    return f"{100 * regret:+.1f} %" if math.isfinite(regret) else "none"


def sweep_summary(table: Table) -> str:
    """Of the table: its size, its noise, how well the planner knew it and what blind search would take."""
    size, near = len(table.candidates), table.near()
    known = [c for c in table.candidates if math.isfinite(table.truth[c.index])]
    best = table.candidates[table.best]
    failed = [sum(m.step_s is None for m in measured.values()) for measured in table.passes]
    steps = [math.exp(table.truth[c.index]) * c.tokens for c in known]
    lines = [
        f"{table.title}: {size} layouts of {', '.join(p.name for p in table.parameters)}, "
        f"{len(table.passes)} passes; failed in each: {', '.join(map(str, failed))}",
        f"steps of {min(steps):.3f} to {max(steps):.3f} s (median {statistics.median(steps):.3f} s); best {best.key}; "
        f"{len(near)} within {100 * NEAR:.0f} % of it: " + "; ".join(table.candidates[i].key for i in sorted(near)),
    ]
    noise = table.noise()
    if noise is not None:
        lines.append(
            f"between the passes: medians of a layout {100 * noise.median:.1f} % apart in the median, "
            f"{100 * noise.high:.1f} % in 19 of 20, beside a shift of all by {100 * noise.shift:+.1f} %"
        )
    prior = table.prior()
    order = sorted((c.index for c in known), key=prior.__getitem__)
    errors = sorted(abs(math.expm1(prior[i] - table.truth[i])) for i in order)
    ranks = spearman([prior[i] for i in order], [table.truth[i] for i in order])
    lines.append(
        f"planner, calibrated before: median error {100 * statistics.median(errors):.1f} %, worst "
        f"{100 * errors[-1]:.1f} %, Spearman {ranks:.3f}; the best is its number {order.index(table.best) + 1}, its "
        f"first is {100 * table.regret(order[0]):.1f} % from the best"
    )
    lines.append(
        f"drawn without looking, the first of {len(near)} among {size} is expected at trial "
        f"{(size + 1) / (len(near) + 1):.1f}"
    )
    return "\n".join(lines)


def as_json(table: Table, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows for a file; an infinite regret (nothing valid was tried) is null."""
    return [
        {
            "search": row.search.name, "prior": row.search.prior, "trials": row.trials, "tried": row.tried,
            "allowed": row.allowed, "holds": row.holds, "layouts": len(table.candidates),
            "regret_after_a_quarter": [_finite(r) for r in row.regrets[QUARTER]],
            "regret_after_half": [_finite(r) for r in row.regrets[HALF]],
            "regret_confirmed": {most: [_finite(r) for r in found] for most, found in row.confirmed.items()},
        }
        for row in rows
    ]  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
