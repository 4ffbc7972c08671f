"""How sure the best layout is: what may be as good, and what failed when it was run again."""
from __future__ import annotations

import math

from megatron.tuning.confirming import reach
from megatron.tuning.layouts import Layout
from megatron.tuning.report.context import ReportContext, percent, state_of
from megatron.tuning.types import objective_value, seconds_cost


def doubts(context: ReportContext, best: Layout) -> list[str]:
    """As sentences; none where there is nothing to compare it with."""
    lines = []
    if best.failures:
        said = ", ".join(f"trial {trial.number}: {state_of(trial)}" for trial in best.failures)
        lines.append(f"{len(best.failures)} of its {len(best.runs) + len(best.failures)} trials gave no valid figures "
                     f"({said}): see to the reason before a long run.")  # fmt: skip
    lines += failing(context, best)
    others = [one for one in context.valid if one.candidate.key != best.candidate.key]
    return [*lines, _next(context, best, min(others, key=context.cost))] if others else lines


def _next(context: ReportContext, best: Layout, other: Layout) -> str:
    behind = math.log(context.cost(other) / context.cost(best))
    within = reach(context.noise, len(other.runs), len(best.runs))
    by = f"is {percent(context.loss(other))} behind"
    if context.objective == "node_hours":
        by = f"takes {percent(math.expm1(behind))} more node-hours"
    where = f"The next, {other.candidate.key} ({other.numbers}), {by}"
    scatter = f"trials of one layout scatter by some {percent(context.noise)}"
    if behind > within:
        return f"{where}, more than noise explains ({scatter})."
    # What failed when it was run again is not measured once more (confirming.py).
    more = "" if best.failures or other.failures else "; a larger --confirm measures both again"
    return f"{where}, within the noise ({scatter}): it may be as good{more}."


def failing(context: ReportContext, best: Layout | None) -> list[str]:
    """Layouts that are not named although a run of them was better than the best, or there is none."""
    lines = []
    for one in context.layouts:
        steps = [t.result.step_s for t in one.runs if t.result is not None and t.result.step_s is not None]
        if one.valid or not steps:
            continue
        cost = seconds_cost(min(steps), one.candidate, context.objective)
        if best is not None and cost >= context.cost(best):
            continue
        said = ", ".join(f"trial {trial.number}: {state_of(trial)}" for trial in one.failures)
        first = next(t for t in one.runs if t.result is not None and t.result.step_s == min(steps))
        had = "was better" if best is not None else f"had {context.written(objective_value(cost, context.objective))}"
        lines.append(f"{one.candidate.key} {had} in trial {first.number}, but is not named: {said}.")
    return lines
