"""The list that a rank builds for itself is the one that build_schedule gives it."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline import schedule as schedule_module
from megatron.pipeline.schedule import build_rank_schedule, build_schedule

KINDS = [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 3)]


@given(st.sampled_from([*KINDS, ("interleaved", 5)]), st.integers(1, 16), st.integers(1, 40), st.booleans())
def test_any_pipeline(kind: tuple[str, int], size: int, micro_batches: int, forward_only: bool) -> None:
    full = build_schedule(kind[0], size, kind[1], micro_batches, forward_only)
    for rank in range(size):
        assert build_rank_schedule(kind[0], size, kind[1], micro_batches, rank, forward_only) == full[rank], rank


def test_a_rank_does_without_the_lists_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("all ranks' lists were built")

    monkeypatch.setattr(schedule_module, "build_schedule", refuse)
    for name, chunks in KINDS:
        assert build_rank_schedule(name, 4, chunks, 8, 1)
        assert build_rank_schedule(name, 4, chunks, 8, 1, forward_only=True)
