"""What a run says while it waits for its index files."""
from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np

from megatron.data import index_cache
from megatron.data.index_cache import Arrays, load_or_build
from megatron.training.index_progress import told_if_slow


def test_a_slow_build_is_told_and_a_quick_one_is_not(tmp_path: Path) -> None:
    said: list[str] = []

    def build() -> Arrays:
        deadline = time.monotonic() + 300
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        return {"part": np.arange(3)}

    with told_if_slow(said.append, interval_s=0.05):
        load_or_build("slow", ("part",), [tmp_path], build)
    assert "building" in said[0] and ".dsc" in said[0] and "s so far" in said[0]
    assert "ready after" in said[-1] and "tools/build_index.py" in said[-1]
    said.clear()
    with told_if_slow(said.append, interval_s=600):
        load_or_build("slow", ("part",), [tmp_path], build)
    assert said == []
    assert index_cache.log.level == logging.NOTSET and not index_cache.log.handlers
