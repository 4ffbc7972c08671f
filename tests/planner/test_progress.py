"""What the planner's searches show on stderr while they run."""

import io
import re

import pytest

from megatron.planner.progress import LINE_S, QUIET_S, STAGES, SearchProgress
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
    progress("checking layouts", "combinations", 0, 4000)
    clock.advance(QUIET_S * 0.9)
    progress("checking layouts", "combinations", 10, 4000)
    assert stream.getvalue() == ""
    clock.advance(5.0 - QUIET_S * 0.9)
    progress("checking layouts", "combinations", 1000, 4000)
    (first,) = stream.getvalue().splitlines()[-1:]
    assert all(part in first for part in ("checking layouts", "1,000 of 4,000", "25%", "0:15"))
    progress("checking layouts", "combinations", 1001, 4000)  # at the same time
    assert stream.getvalue().count("checking") == 1
    progress("checking layouts", "combinations", 1000, 4000)
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


def test_several_searches_are_one_whole():
    """Two searches that go on evenly: the share only grows, and the time left only falls.

    No layout of the second one fits: its memory is checked, and nothing is simulated.
    """
    clock = VirtualClock()
    stream = Stream(terminal=False)
    progress = SearchProgress(stream, clock, searches=2)
    for stages in (STAGES, [*STAGES][:2]):
        progress.begin()
        for what in stages:
            total = round(10 * STAGES[what])
            for done in range(total + 1):
                progress(what, "layouts", done, total)
                clock.advance(LINE_S * (done < total))
    lines = stream.getvalue().splitlines()
    shares = [int(line.partition("%")[0]) for line in lines]
    assert shares == [*range(5, 100, 5)]
    left = [re.search(r"(\d+):(\d+) left", line) for line in lines]
    assert [60 * int(m[1]) + int(m[2]) for m in left] == [*range(190, 0, -10)]
