"""The closed form of memory beside the dry run, in a part of the layouts of benchmarks/memory_model.py.

The campaign "memory" runs that program over all of them.
"""
from __future__ import annotations

import pytest

from benchmarks import memory_model
from benchmarks.memory_layouts import SHAPES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PP 4, 2 chunks", "TP 2, SP, PP 4, zb-h1"])
def test_the_closed_form_is_what_the_code_allocates(name):
    (shape,) = (shape for shape in SHAPES if (shape.name, shape.device) == (name, "gpu"))
    for row in memory_model.compare_formula(shape):
        assert row.model == pytest.approx(row.found, rel=memory_model.TOTAL_LIMIT), row
        assert abs(row.worst_error) <= memory_model.CATEGORY_LIMIT, row


def test_the_command_fails_where_a_limit_does_not_hold():
    good = memory_model.Compared("one", 0, 1.02, 1.0)
    assert memory_model.holds([good], 0.03)
    assert not memory_model.holds([good, memory_model.Compared("two", 1, 1.04, 1.0)], 0.03)
    assert not memory_model.holds([memory_model.Compared("three", 0, 1.0, 1.0, "logits", -0.06)], 0.03)
