"""Builds the indices of a run before it starts, and says what is there."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.data import index_cache
from megatron.data.datasets import Datasets, build_datasets
from megatron.data.index_cache import CacheEntry

if TYPE_CHECKING:
    from megatron.config import Config

_NAMES = re.compile(r"^(?:Data prefix|Dataset name) (.*)$", re.MULTILINE)


def prebuild(
    config: Config, train_samples: int, valid_samples: int, test_samples: int, *, workers: int = 1,
    say: Callable[[str], None],
) -> Datasets:
    """build_datasets, with up to `workers` of the indices of a blend built at the same time.

    `say` gets a line for each index, and one for them all. Each worker needs the memory of one index. Raises as
    build_datasets does.
    """
    start = time.perf_counter()
    new: dict[str, bool] = {}
    total_bytes = 0

    def listen(record: logging.LogRecord) -> None:
        nonlocal total_bytes
        entry: CacheEntry = record.__dict__["entry"]
        if record.msg.startswith("waiting"):
            say(record.getMessage())
        elif record.msg.startswith(("found", "built")) and entry.key not in new:
            seconds: float | None = record.__dict__.get("seconds")
            size = sum(entry.part_path(part).stat().st_size for part in entry.parts)
            new[entry.key], total_bytes = seconds is not None, total_bytes + size
            how = "found" if seconds is None else f"built in {seconds:.1f} s"
            say(f"{_title(entry)}: {how}, {size / 1e6:.2f} MB, {entry.directory / entry.key}_*")

    with index_cache.heard(listen):
        datasets = build_datasets(
            config, train_samples, valid_samples, test_samples, verify=True, workers=workers
        )
    seconds = time.perf_counter() - start
    say(f"{len(new)} indices, {sum(new.values())} of them new, {total_bytes / 1e6:.2f} MB, {seconds:.1f} s")
    return datasets


def _title(entry: CacheEntry) -> str:
    """What an entry is the index of, from the text that names it: kind, split and prefix, or a blend."""
    kind, *_ = entry.description.split("\n")
    names = _NAMES.findall(entry.description)
    return f"{kind} of {len(names)} parts" if "blend" in kind else " ".join([kind, *names])
