"""How sure the best layout is: what may be as good, and what failed when it was run again."""
from __future__ import annotations

import math

from megatron.tuning.confirming import reach
from megatron.tuning.layouts import Layout
from megatron.tuning.report.context import ReportContext, percent, state_of
from megatron.tuning.types import seconds_cost


def doubts(context: ReportContext, best: Layout) -> list[str]:
    """As sentences; none where there is nothing to compare it with."""
    lines = []
    if best.failures:
        said = ", ".join(f"trial {trial.number}: {state_of(trial)}" for trial in best.failures)
        lines.append(f"{len(best.failures)} of its {len(best.runs) + len(best.failures)} trials gave no valid figures "
                     f"({said}): see to the reason before a long run.")  # fmt: skip
    lines += _faster_but_failing(context, best)
    others = [one for one in context.valid if one.candidate.key != best.candidate.key]
    return [*lines, _next(context, best, min(others, key=context.cost))] if others else lines


def _next(context: ReportContext, best: Layout, other: Layout) -> str:
    behind = math.log(context.cost(other) / context.cost(best))
    within = reach(context.noise, len(other.runs), len(best.runs))
    where = f"The next, {other.candidate.key} ({other.numbers}), is {percent(context.loss(other))} behind"
    scatter = f"trials of one layout scatter by some {percent(context.noise)}"
    if behind > within:
        return f"{where}, more than noise explains ({scatter})."
    return f"{where}, within the noise ({scatter}): it may be as good; a larger --confirm measures both again."


def _faster_but_failing(context: ReportContext, best: Layout) -> list[str]:
    """Layouts that are not named although a run of them was faster."""
    lines = []
    for one in context.layouts:
        steps = [t.result.step_s for t in one.runs if t.result is not None and t.result.step_s is not None]
        if one.valid or not steps or seconds_cost(min(steps), one.candidate, context.objective) >= context.cost(best):
            continue
        said = ", ".join(f"trial {trial.number}: {state_of(trial)}" for trial in one.failures)
        lines.append(f"{one.candidate.key} was better in trial {one.runs[0].number}, but is not named: {said}.")
    return lines
