"""Progress of tools that go through bytes."""
from __future__ import annotations

import io
import re

from megatron.data.prepare.byte_progress import ByteProgress
from tests.helpers.clock import VirtualClock


def test_lines_in_a_log_file() -> None:
    clock, stream = VirtualClock(), io.StringIO()
    with ByteProgress("merged", 4_000_000, stream, clock=clock) as progress:
        for second, done in ((1, 1), (9.9, 2), (10, 1_000_000), (15, 1_500_000), (20, 3_000_000)):
            clock.at(second, lambda done=done: progress.update(done))
        clock.advance(20)
        progress.say("notice")
    first, second, last = stream.getvalue().splitlines()
    assert re.findall("[0-9.]+", first) == ["1", "4", "25", "0.1", "30"]
    assert re.findall("[0-9.]+", second) == ["3", "4", "75", "0.1", "7"] and last == "notice"
