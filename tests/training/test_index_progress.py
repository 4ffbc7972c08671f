"""What a run says while it waits for its index files."""
from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np

from megatron.data import index_cache
from megatron.data.index_cache import Arrays, load_or_build
from megatron.training.index_progress import INTERVAL_S, told_if_slow
from tests.helpers.clock import VirtualClock


def test_a_slow_build_is_told_and_a_quick_one_is_not(tmp_path: Path) -> None:
    said, clock, begun, told, left = list[str](), VirtualClock(), threading.Event(), threading.Event(), 2

    def build() -> Arrays:
        begun.set()
        assert left == 0 or told.wait(50)
        return {"part": np.arange(3)}

    def pause(done: threading.Event, seconds: float) -> bool:
        nonlocal left
        assert begun.wait(50)
        if not left:
            told.set()
            return done.wait(50)
        clock.advance(seconds)
        left -= 1
        return False

    with told_if_slow(said.append, clock, pause):
        load_or_build("slow", ("part",), [tmp_path / "a"], build)
    assert len(said) == 3 and all(f" {n * INTERVAL_S:.0f} s" in line for n, line in zip((1, 2, 2), said, strict=True))
    assert ".dsc" in said[1] and "tools/build_index.py" in said[2]
    said.clear()
    with told_if_slow(said.append, clock, pause):
        load_or_build("slow", ("part",), [tmp_path / "b"], build)
    assert said == []
    assert index_cache.log.level == logging.NOTSET and not index_cache.log.handlers
