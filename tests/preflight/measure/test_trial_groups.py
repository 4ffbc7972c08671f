"""Groups in which an allocation is tried: those of a layout, and one that does not come together."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.preflight.measure.links import Groups
from megatron.preflight.measure.trial_groups import KINDS, group_of, trial_layout


@pytest.mark.parametrize(("sizes", "layout"), [
    ([8, 8, 8, 8], (2, 4, 4)), ([8], (2, 2, 2)), ([2, 2], (2, 1, 2)), ([3, 4], (1, 1, 7)), ([8, 6, 8], (2, 1, 11)),
])  # fmt: skip
def test_members_agree_on_their_groups(sizes: list[int], layout: tuple[int, int, int]) -> None:
    found = trial_layout(sizes)
    assert (found.tensor, found.pipeline, found.data) == layout
    for kind in KINDS:
        of = {place: tuple(group_of(found, kind, place)) for place in range(sum(sizes))}
        assert all(of[other] == group and place in group for place, group in of.items() for other in group)
    tensor, pipeline, data = layout
    sizes_of = [len(group_of(found, kind, 0)) for kind in KINDS]
    ends, odd = min(pipeline, 2), 2 if pipeline > 2 else 1
    assert sizes_of == [tensor, data, tensor * pipeline, ends, pipeline, ends, odd, tensor * pipeline * data]


def test_neighbours_form_a_ring() -> None:
    layout = trial_layout([8] * 4)
    pairs = {tuple(group_of(layout, f"{word} neighbours", place)) for word in ("even", "odd") for place in range(32)}
    assert {pair for pair in pairs if 0 in pair} == {(0, 8), (0, 24)}
    assert {pair for pair in pairs if 16 in pair} == {(8, 16), (16, 24)} and len(pairs) == 32


def test_a_member_that_does_not_come_is_an_error() -> None:
    groups = Groups(dist.HashStore, 0, torch.device("cpu"))
    assert "error" in groups.reduce("x", [0, 1], 0.01)
    assert groups.reduce("y", [0], 60.0) == {}
