"""The three changes of benchmarks/data_changes.py: in Megatron's order they repeat and skip data."""

import pytest

from benchmarks.data_changes import CASES, measure, write


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_stream_repeats_and_skips_nothing(case, tmp_path):
    ends = write(tmp_path)
    _, repeated, skipped = measure(case, "megatron", tmp_path, ends)
    assert repeated > 3000 and skipped > 10000
    to_come, *counts = measure(case, "stream", tmp_path, ends)
    assert to_come > 12000 and counts == [0, 0]
