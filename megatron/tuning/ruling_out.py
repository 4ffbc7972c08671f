"""What needs no trial: where a layout ran out of memory, those that the planner says need at least as much."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron.tuning.types import DONE, FAILED, INVALID, OUT_OF_MEMORY, Candidate, Trial


def ruled_out(candidates: Sequence[Candidate], ended: Iterable[Trial]) -> frozenset[int]:
    """Indices of candidates that need, by the planner, no less memory than one that ran out of it.

    The planner's figures are not exact: a trial that ran out is no argument where another one fitted that should need
    as much or more. On a CPU node all processes share its memory, so that a trial is compared only with candidates of
    as many processes a node or more.
    """
    failed, fitted = list[tuple[float, float]](), list[tuple[float, float]]()
    for trial in ended:
        result, needs = trial.result, _needs(trial.candidate)
        if result is None or needs is None:
            continue
        if result.status == FAILED and result.kind == OUT_OF_MEMORY:
            failed.append(needs)
        elif result.status in (DONE, INVALID):
            fitted.append(needs)
    limits = [limit for limit in failed if not any(_covers(fits, limit) for fits in fitted)]
    if not limits:
        return frozenset()
    return frozenset(
        candidate.index
        for candidate in candidates
        if (needs := _needs(candidate)) is not None and any(_covers(needs, limit) for limit in limits)
    )


def _needs(candidate: Candidate) -> tuple[float, float] | None:
    """(bytes of a device, processes of a node)."""
    if candidate.memory_bytes is None:
        return None
    return candidate.memory_bytes, candidate.processes / max(1, candidate.nodes)


def _covers(more: tuple[float, float], less: tuple[float, float]) -> bool:
    return more[0] >= less[0] and more[1] >= less[1]
