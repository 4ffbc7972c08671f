"""Command line that shows schedules."""

import pytest

from tests.helpers.launching import Script
from tests.prove.hostile_files import timeline


def show(folder, *arguments):
    with Script("tools/show_schedule.py", arguments, folder / "log") as script:
        return script.wait()


@pytest.mark.slow
def test_text_picture_and_refusal(tmp_path):
    picture = tmp_path / "schedule.png"
    schedule = ("--schedule", "interleaved", "--pipeline-size", "2", "--micro-batches", "2")
    code, text = show(tmp_path, *schedule, "--plot", str(picture))
    assert code == 0, text
    # Two ranks, two chunks: 3 * 2 * 2 of computing per rank and a bubble of 3 * (2 - 1); 3
    # boundaries there and back.
    assert all(f" {figure}" in text for figure in ("15", "20.0%", "12"))
    assert text.startswith("rank  0 |F0.0 F1.0 F0.1 ")
    assert picture.read_bytes().startswith(b"\x89PNG")
    # Two passes of 5 us on each of two ranks, in 25 us.
    timeline(tmp_path)
    code, text = show(tmp_path, "--timeline", str(tmp_path / "timeline.json"))
    assert code == 0 and "iteration 10" in text and "60.0%" in text, text
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "timeline.json").write_text('{"traceEvents": [{"ph": "M"}]}')
    code, text = show(tmp_path, "--timeline", str(tmp_path / "timeline.json"))
    assert code == 2 and f"{tmp_path}/timeline.json" in text
    code, text = show(tmp_path, "--schedule", "1f1b", "--chunks", "3")
    assert code == 2 and text.startswith("error: ") and "'1f1b'" in text and "3" in text
