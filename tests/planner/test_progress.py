"""What the planner's searches show on stderr while they run."""

import io

import pytest

from megatron.planner.progress import LINE_S, QUIET_S, SearchProgress
from tests.helpers.clock import VirtualClock


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.mark.parametrize("terminal", [False, True])
def test_short_searches_are_silent_and_long_ones_estimate_the_rest(terminal, monkeypatch):
    """A quarter is done after 5 s: 15 s are left, and 30 s if nothing more is done until 10 s."""
    monkeypatch.setenv("COLUMNS", "80")
    clock = VirtualClock()
    stream = Stream(terminal)
    progress = SearchProgress(stream, clock)
    progress("ranking layouts", "sizes", 0, 4000)
    clock.advance(QUIET_S * 0.9)
    progress("ranking layouts", "sizes", 10, 4000)
    assert stream.getvalue() == ""
    clock.advance(5.0 - QUIET_S * 0.9)
    progress("ranking layouts", "sizes", 1000, 4000)
    (first,) = stream.getvalue().splitlines()[-1:]
    assert all(part in first for part in ("ranking layouts", "1,000 of 4,000", "25%", "0:15"))
    progress("ranking layouts", "sizes", 1001, 4000)  # at the same time
    assert stream.getvalue().count("ranking") == 1
    progress("ranking layouts", "sizes", 1000, 4000)
    clock.advance(5.0)
    progress.show()
    seen = stream.getvalue()
    assert ("0:30" in seen) == terminal
    clock.advance(LINE_S)
    progress.show()
    seen = stream.getvalue()
    assert (seen.count("\r"), seen.count("\n")) == ((3, 0) if terminal else (0, 2))
    assert max(map(len, seen.replace("\x1b[K", "").replace("\r", "\n").splitlines())) <= 79
    with progress:
        pass
    assert stream.getvalue().endswith("\r\x1b[K") == terminal  # the line is removed
