"""What people see while a search runs: a line for each thing that happens, and on a terminal a table that lives."""
from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from megatron.config.duration import show_duration
from megatron.planning.search.judging import GIB
from megatron.tuning.layouts import Layout, layouts_of
from megatron.tuning.report.context import amount
from megatron.tuning.session import View
from megatron.tuning.types import INVALID, Trial, cost_of, objective_value

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_TOP = 10
_REFRESH_S, _TELL_S = 1.0, 10.0
UNITS = {"tokens_per_s": "tokens/s", "node_hours": "node-hours for a billion tokens"}
_HEADS = {"tokens_per_s": "tokens/s", "node_hours": "node-hours"}
_WIDE = 160  # of a log
_BETWEEN = 3  # columns of a terminal from one column of a table to the next


def show_value(cost: float, objective: str) -> str:
    """A cost as users read it, with its unit."""
    return f"{amount(objective_value(cost, objective))} {UNITS[objective]}"


def behind(cost: float, best: float, objective: str) -> float:
    """By which part of the best a trial is worse: in throughput, or in node-hours."""
    return cost / best - 1 if objective == "node_hours" else 1 - best / cost


def outcome(trial: Trial | Layout, objective: str) -> str:
    """How a trial ended, or what came of all those of a layout, in a few words."""
    cost, result = cost_of(trial, objective), trial.result
    if cost is not None:
        return show_value(cost, objective)
    if result is None:
        assert isinstance(trial, Trial), "a layout has a trial that has ended"
        return "interrupted" if trial.ended is not None else "running"
    what = "invalid" if result.status == INVALID else result.kind or result.status
    reason = result.reason or ""
    return reason if reason.startswith(what) else f"{what}: {reason}" if reason else what


def make_console() -> Console:
    """As wide as the terminal; a log is wide."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False, markup=False, emoji=False)


class Live:
    """Lines and, on a terminal, the table; `with` shows it. Also the Show of a session.

    folder  of the tuner, for the places of logs; device: what a figure of one is said to be per
    """

    def __init__(
        self, objective: str, folder: str, console: Console | None = None,
        clock: Callable[[], float] = time.monotonic, device: str = "device",
    ) -> None:  # fmt: skip
        from rich.live import Live as RichLive

        self._console = console or make_console()
        self._objective, self._folder, self._device = objective, folder, device
        self._live: RichLive | None = None
        if self._console.is_terminal:
            self._live = RichLive(console=self._console, auto_refresh=False, transient=True)
        self._clock = clock
        self._drawn, self._told = 0.0, clock()

    def __enter__(self) -> Live:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 where: TracebackType | None) -> None:  # fmt: skip
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(f" tune: {text}", soft_wrap=True)

    def progress(self, looked: int, combinations: int) -> None:
        """Of the enumeration, now and then: that of a large space takes minutes."""
        now = self._clock()
        if now - self._told >= _TELL_S and looked < combinations:
            self._told = now
            self.note(f"looked at {looked:,} of {combinations:,} combinations")

    def started(self, trial: Trial) -> None:
        candidate = trial.candidate
        expected = "" if candidate.step_s is None else f", {candidate.step_s:.3g} s a step predicted"
        place = f" on {_hosts(trial.hosts)}" if trial.hosts else ""
        how = "to confirm what was found" if trial.confirms else f"chosen by {trial.by}"
        self.note(f"trial {trial.number} {candidate.key}: {candidate.processes} process(es){place}, {how}{expected}")

    def ended(self, trial: Trial, layout: Layout, best: Layout | None, before: Layout | None) -> None:
        own, head = cost_of(trial, self._objective), f"trial {trial.number} {trial.candidate.key}"
        cost = cost_of(layout, self._objective)
        if own is None or cost is None or best is None:
            said = outcome(trial, self._objective)
            if own is not None:  # a good run of a layout that fails now and then
                said += f", but {outcome(layout, self._objective)}"
            self.note(f"{head}: {said}; {self._folder}/{trial.folder}")
            return
        compared = self._compared(cost, layout, best, before)
        if len(layout.runs) > 1:
            compared = (f"measured {len(layout.runs)} times, {100 * (layout.apart or 0.0):.1f} % apart: "
                        f"{show_value(cost, self._objective)}, {compared}")  # fmt: skip
        notes = "; ".join(trial.result.notes) if trial.result else ""
        self.note(f"{head}: {show_value(own, self._objective)} ({compared}){'; ' + notes if notes else ''}")

    def _compared(self, cost: float, layout: Layout, best: Layout, before: Layout | None) -> str:
        if best.number == layout.number:
            return "the best so far" if before is not None else "the first"
        part = 100 * behind(cost, cost_of(best, self._objective) or cost, self._objective)
        side = "above" if self._objective == "node_hours" else "below"
        return f"{part:.1f} % {side} the best, trial {best.number}"

    def update(self, view: View) -> None:
        now = self._clock()
        if self._live is not None and now - self._drawn >= _REFRESH_S:
            self._drawn = now
            self._live.update(self._drawing(view), refresh=True)

    def _drawing(self, view: View) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [Text("")]
        if view.best is not None:
            parts.append(best_table(view.trials, self._objective, _TOP, self._console.width, self._device))
        if view.running:
            parts.append(_running_table(view.running))
        parts.append(Text(progress(view, self._objective)))
        return Group(*parts)


def progress(view: View, objective: str) -> str:
    """One line: how far the search is, what failed, the best, the time."""
    ended = [trial for trial in view.trials if trial.result is not None]
    took = [trial.ended - trial.started for trial in ended if trial.ended and trial.started]
    failures = Counter(outcome(trial, objective).split(":")[0] for trial in ended if not trial.valid)
    said = [f"{len(ended)} of {view.planned} trials"]
    if took and view.planned > len(ended):
        at_once = max(1, len(view.running))
        said.append(f"about {show_duration(sum(took) / len(took) * (view.planned - len(ended)) / at_once)} to go")
    if view.left_s is not None:
        said.append(f"{show_duration(max(0.0, view.left_s))} left")
    said += [f"{count} {kind}" for kind, count in failures.most_common()]
    if view.ruled_out:
        said.append(f"{view.ruled_out} ruled out by memory")
    return ", ".join(said)


def best_table(
    trials: Sequence[Trial], objective: str, top: int, width: int, device: str = "device"
) -> Table:
    """The best layouts, with what the planner said of them: as many columns as fit into `width`."""
    from rich import box
    from rich.table import Table

    found = sorted((cost, one.number, one) for one in layouts_of(trials)
                   if (cost := cost_of(one, objective)) is not None)  # fmt: skip
    rows = [_row(one, cost, found[0][0], objective, device) for cost, _, one in found[:top]]
    least_first = (f"TFLOP/s per {device}", *_LEAST_FIRST)
    heads = [name for name in least_first if any(row.get(name) for row in rows)]
    while len(heads) > _FEWEST and _width(heads, rows) > width:
        heads.remove(next(name for name in least_first if name in heads))
    table = Table(title=f"best of {len(found)} layout(s) with valid figures", title_justify="left", box=box.SIMPLE_HEAD,
                  pad_edge=False)  # fmt: skip
    shown = [name for name in _row_order(rows) if name in heads]
    for name in shown:
        words = name == "layout"
        table.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


# Columns, those first that a narrow terminal goes without.
_LEAST_FIRST = (
    "GiB", "chosen by", "planned", "nodes", "spread", "s/step", "apart", "runs", "behind", *_HEADS.values(),
    "layout", "trial",
)  # fmt: skip
_FEWEST = 4


def _row(layout: Layout, cost: float, best: float, objective: str, device: str) -> dict[str, str]:
    result, candidate = layout.result, layout.candidate
    assert result.step_s is not None, "a layout with a cost has figures"
    memory = None if result.memory_bytes is None else result.memory_bytes / GIB
    return {
        "trial": f"{layout.number}", "layout": candidate.key, "chosen by": layout.by, "nodes": f"{candidate.nodes}",
        "runs": f"{len(layout.runs)}" if len(layout.runs) > 1 else "", "apart": _part(layout.apart),
        "s/step": f"{result.step_s:.3f}", "planned": _number(candidate.step_s, ".3f"), "spread": _part(result.spread),
        _HEADS[objective]: amount(objective_value(cost, objective)), "behind": _part(behind(cost, best, objective)),
        f"TFLOP/s per {device}": _number(result.hardware_tflops, ".3g"), "GiB": _number(memory, ".2f"),
    }  # fmt: skip


def _row_order(rows: Sequence[Mapping[str, str]]) -> list[str]:
    return list(rows[0]) if rows else []


def _width(heads: Sequence[str], rows: Sequence[Mapping[str, str]]) -> int:
    """Of a table in which nothing is folded."""
    return sum(max(len(name), *(len(row[name]) for row in rows)) + _BETWEEN for name in heads)


def _running_table(running: Sequence[Trial]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title="running", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("trial", "layout", "chosen by", "on", "for"):
        table.add_column(name, overflow="fold")
    for trial in running:
        elapsed = "" if trial.started is None else show_duration(time.time() - trial.started)
        table.add_row(f"{trial.number}", trial.candidate.key, trial.by, _hosts(trial.hosts), elapsed)
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _part(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.1f} %"


def _hosts(hosts: Sequence[str]) -> str:
    """Names of a few nodes, the first and last of many."""
    if len(hosts) <= 4:
        return ", ".join(hosts) or "this machine"
    return f"{len(hosts)} nodes, {hosts[0]} to {hosts[-1]}"
