"""A search before it is begun: which layouts there are, what the planner says of them, and what they may cost."""
from __future__ import annotations

import shlex
from collections.abc import Sequence

from megatron.config.duration import show_duration
from megatron.planning.search.judging import GIB
from megatron.planning.search.show import Show
from megatron.planning.search.space import Rejections
from megatron.planning.search.tables import first_problem
from megatron.planning.table import Table
from megatron.tuning.candidates import Enumeration
from megatron.tuning.live import show_value
from megatron.tuning.report.context import value_text
from megatron.tuning.setup import Setup
from megatron.tuning.trial_folder import trial_flags
from megatron.tuning.types import Candidate, seconds_cost

_TOP = 10


def dry_run(setup: Setup, found: Enumeration, show: Show) -> None:
    """Print it."""
    for line in headline(setup, found):
        show.text(line)
    show.table(_parameters(setup))
    if found.rejections.counts:
        show.table(rejection_table(found.rejections))
    if not found.candidates:
        show.text("Nothing can be tried: the table above says why.")
        return
    first = ranked(setup, found.candidates)
    show.table(_best_table(setup, first[:_TOP]))
    show.text("a trial of the first is, on each of its processes:")
    show.text("    pretrain_gpt.py " + shlex.join(trial_flags(first[0], setup.trial_settings())))
    for line in costs(setup, first):
        show.text(line)


def headline(setup: Setup, found: Enumeration) -> list[str]:
    """What is searched, where."""
    space, place = setup.space, setup.place
    where = f"{setup.machine.processes_per_node} process(es) of this machine"
    if place.launcher == "slurm":
        where = f"{setup.machine.max_nodes} node(s) of {setup.machine.processes_per_node} processes"
    by = f", described by {setup.cluster.name}" if setup.cluster is not None else ""
    lines = [f"{space.name}: {space.title}", *([f"source: {space.source}"] if space.source else []),
             f"on {where}{by}; searched by {setup.search_in_words}"]  # fmt: skip
    if space.flags:
        lines.append(f"flags of the space: {shlex.join(space.flags)}")
    if setup.flags:
        lines.append(f"flags after --, which win: {shlex.join(setup.flags)}")
    looked = "" if found.sampled is None else f", of which {found.sampled:,} were looked at (a sample, by --seed)"
    lines.append(f"{found.combinations:,} combinations{looked}: {len(found.candidates):,} layouts can be tried")
    if setup.machine.capacity_bytes is not None and setup.memory_bytes is not None:
        lines.append(f"they fit into {setup.machine.capacity_bytes / GIB:.1f} of {setup.memory_bytes / GIB:.1f} GiB of "
                     "a device by the planner's figures")  # fmt: skip
    return lines


def _parameters(setup: Setup) -> Table:
    rows = [(p.name, ", ".join(map(value_text, p.values))) for p in setup.space.parameters]
    return Table("what varies", ("parameter", "values"), rows)


def rejection_table(rejections: Rejections) -> Table:
    """Combinations that are no layouts, and why."""
    rows = [
        (f"{count:,}", reason, first_problem(rejections.examples.get((unit, reason), "")))
        for (unit, reason), count in rejections.counts.most_common()
    ]
    return Table("cannot be tried", ("how many", "why", "for example"), rows)


def ranked(setup: Setup, candidates: Sequence[Candidate]) -> list[Candidate]:
    """By the planner's estimates, or as they come."""

    def key(candidate: Candidate) -> tuple[float, int]:
        cost = 0.0 if candidate.step_s is None else seconds_cost(candidate.step_s, candidate, setup.objective)
        return cost, candidate.index

    return sorted(candidates, key=key)


def _best_table(setup: Setup, first: Sequence[Candidate]) -> Table:
    estimated = all(candidate.step_s is not None for candidate in first)
    title = "best by the planner, none of it measured" if estimated else "the first of them (no machine, no estimates)"
    heads = ("layout", "nodes", "processes", "tokens a step", *(("GiB", "s/step", "value") if estimated else ()))
    return Table(title, heads, [_row(setup, candidate) for candidate in first])


def _row(setup: Setup, candidate: Candidate) -> tuple[str, ...]:
    sizes = candidate.key, f"{candidate.nodes:,}", f"{candidate.processes:,}", f"{candidate.tokens:,}"
    if candidate.step_s is None:
        return sizes
    memory = "" if candidate.memory_bytes is None else f"{candidate.memory_bytes / GIB:.2f}"
    value = show_value(seconds_cost(candidate.step_s, candidate, setup.objective), setup.objective)
    return (*sizes, memory, f"{candidate.step_s:.3g}", value)


def costs(setup: Setup, first: Sequence[Candidate]) -> list[str]:
    """What the search may take. first: candidates as the planner ranks them."""
    count = len(first) if setup.max_trials is None else min(setup.max_trials, len(first))
    steps = setup.warm_up + setup.iterations
    dearest = sorted((c.nodes * setup.trial_limit_s(c) / 3600 for c in first), reverse=True)[:count]
    longest = max(setup.trial_limit_s(candidate) for candidate in first)
    again = setup.confirm if count > 1 else 0  # of a single layout there is nothing to confirm
    more = f" and {again:,} more that measure the leading ones again" if again else ""
    lines = [f"at most {count:,} trials of {setup.warm_up} + {setup.iterations} steps{more}, none longer than "
             f"{show_duration(longest)}: at most {sum(dearest) + again * dearest[0]:,.1f} node-hours"]  # fmt: skip
    timed = [c.nodes * c.step_s * steps / 3600 for c in first[:count] if c.step_s is not None]
    if len(timed) == count:
        lines.append(f"the steps of the planner's first {count:,} take {sum(timed):,.2f} node-hours by its estimates, "
                     "start-up not counted")  # fmt: skip
    if setup.walltime_s is not None:
        lines.append(f"--walltime ends it after {show_duration(setup.walltime_s)}: what is left is for another start")
    if setup.max_trials is None:
        lines.append("no --max-trials: it goes on until nothing is left to try")
    return lines
