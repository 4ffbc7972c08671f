"""Progress of tools that go through bytes."""

from __future__ import annotations

import io

from megatron.data.prepare.byte_progress import ByteProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_in_a_log_file() -> None:
    now = [100.0]
    stream = io.StringIO()
    with ByteProgress("merged", 4_000_000, stream, clock=lambda: now[0]) as progress:
        for seconds, done in ((1, 1), (9.9, 2), (10, 1_000_000), (15, 1_500_000), (20, 3_000_000)):
            now[0] = 100.0 + seconds
            progress.update(done)
        progress.say("notice")
    assert stream.getvalue() == (
        " merged: 1 of 4 MB (25%), 0.1 MB/s, 30 s left\n merged: 3 of 4 MB (75%), 0.1 MB/s, 7 s left\nnotice\n"
    )


def test_bar_on_a_terminal() -> None:
    stream = Terminal()
    with ByteProgress("checked data/[corpus]", 2_000_000, stream) as progress:
        progress.update(1_000_000)
        progress.say("a notice")
    assert "2.0 MB" in stream.getvalue() and "a notice" in stream.getvalue()
