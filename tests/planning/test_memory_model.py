"""The memory model beside the dry run and real processes: a part of what benchmarks/memory_model.py compares."""
from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import memory_model
from benchmarks.memory_layouts import RUNS, SHAPES

QUICK = (
    "PP 4, 2 chunks (gpu)", "TP 2, SP, PP 4, zb-h1 (gpu)", "PP 2, full, fp16 (cpu)", "PP 8, 1 micro-batch (gpu)",
    "ALiBi, GQA (gpu)", "gradients through autograd (gpu)", "RMSNorm of torch (gpu)", "cross entropy of torch (gpu)",
)


@pytest.mark.parametrize("shape", [
    pytest.param(shape, id=name, marks=() if name in QUICK else pytest.mark.slow)
    for shape in SHAPES
    for name in [f"{shape.name} ({shape.device})"]
])
def test_the_closed_form_is_what_the_code_allocates(shape):
    if shape.device == "cpu":  # attention in blocks is rehearsed block by block, as many as the square of the tokens
        few = {"num_layers": 4} if shape.config().parallel.schedule == "1f1b" else {}
        shape = replace(shape, fields={**shape.fields, "seq_length": 512, **few})
    rows = memory_model.compare_formula(shape)
    assert rows
    for row in rows:
        assert row.model == pytest.approx(row.found, rel=memory_model.TOTAL_LIMIT), row
        assert abs(row.worst_error) <= memory_model.CATEGORY_LIMIT, row


@pytest.mark.slow
def test_a_run_needs_what_its_rehearsal_said():
    (run,) = (run for run in RUNS if run.name == "TP 2, SP")
    for row in memory_model.compare_run(run):
        assert row.model == pytest.approx(row.found, rel=memory_model.RUN_LIMIT), row


def test_the_command_fails_where_a_limit_does_not_hold():
    good = memory_model.Compared("one", 0, 1.02, 1.0)
    assert memory_model.holds([good], 0.03)
    assert not memory_model.holds([good, memory_model.Compared("two", 1, 1.04, 1.0)], 0.03)
    assert not memory_model.holds([memory_model.Compared("three", 0, 1.0, 1.0, "logits", -0.06)], 0.03)
