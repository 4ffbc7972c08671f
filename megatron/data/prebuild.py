"""Builds the indices of a run before it starts, and says what is there."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron.data import index_cache
from megatron.data.datasets import WHOLE, DatasetBuilder, Datasets, SplitPlan, build_datasets, plan_splits
from megatron.data.index_cache import CacheEntry
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.splits import samples_of_part, split_bounds

if TYPE_CHECKING:
    from megatron.config import Config

Say = Callable[[str], None]
_NAMES = re.compile(r"^(Data prefix|Dataset name|Sequences|Number of epochs) (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Index:
    """An index of the run. `seconds` is how long it took to build, None when it was there."""

    entry: CacheEntry
    seconds: float | None

    @property
    def size_bytes(self) -> int:
        return sum(self.entry.part_path(part).stat().st_size for part in self.entry.parts)

    @property
    def title(self) -> str:
        """What it is the index of, from the text that names it: split and prefix, or a blend of so many."""
        kind = self.entry.description.split("\n")[0]
        names = _NAMES.findall(self.entry.description)
        prefixes = [value for name, value in names if name == "Data prefix"]
        split = next((value for name, value in names if name == "Dataset name"), "")
        if len(prefixes) > 1:
            return f"{split} blend of {len(prefixes)} data sets".strip()
        note = ""
        if kind.startswith("Packed"):
            epochs = [f", order of {value} epoch(s)" for name, value in names if name == "Number of epochs"]
            note = f", sequences {dict(names)['Sequences']}, packed{''.join(epochs)}"
        return f"{split} {prefixes[0] if prefixes else ''}{note}".strip()

    def __str__(self) -> str:
        how = "found" if self.seconds is None else f"built in {self.seconds:.1f} s"
        place = self.entry.directory / self.entry.key
        return f"{self.title}: {how}, {self.size_bytes / 1e6:.2f} MB, {place}_*"


def prebuild(
    config: Config, train_samples: int, valid_samples: int, test_samples: int, *, workers: int = 1, say: Say
) -> Datasets:
    """build_datasets, with up to `workers` of the indices of different data sets built at the same time.

    `say` gets a line for each index, and one for them all. Each worker needs the memory of one index. Raises as
    build_datasets does.
    """
    counts = (train_samples, valid_samples, test_samples)
    start = time.perf_counter()
    with _watched(say) as indices:
        if workers > 1 and not config.data.mock_data:
            with ThreadPoolExecutor(workers) as pool:
                for future in [pool.submit(task) for task in _tasks(config, counts)]:
                    future.result()
        datasets = build_datasets(config, *counts, verify=True)
    seconds = time.perf_counter() - start
    built = sum(index.seconds is not None for index in indices.values())
    size = sum(index.size_bytes for index in indices.values())
    say(f"{len(indices)} indices, {built} of them new, {size / 1e6:.2f} MB, {seconds:.1f} s")
    if not config.data.mock_data:
        blended = any(plan and len(plan.blend) > 1 for plan in plan_splits(config.data))
        if blended and not config.data.data_cache_path:
            say("note: the order of a blend is kept only with --data-cache-path; without, each process makes its own")
    return datasets


def _tasks(config: Config, counts: tuple[int, int, int]) -> Iterator[Callable[[], object]]:
    """The data sets of all splits, each to be built alone as build_datasets will ask for it in its blend."""
    builder = DatasetBuilder(config, {}, 0)
    exact = config.data.train_data_exact_num_epochs is not None
    for index, (plan, count) in enumerate(zip(plan_splits(config.data), counts, strict=True)):
        if plan is None or count == 0:
            continue
        if len(plan.blend) == 1 or exact:
            yield partial(builder.build, index, plan, count)
            continue
        parts = [part for part in plan.blend if _has_tokens(part.prefix, plan.split, index)]
        total = sum(part.weight for part in parts)
        for part in parts:
            yield partial(
                builder.build, index, SplitPlan((part,), plan.split), samples_of_part(count, part.weight / total)
            )


def _has_tokens(prefix: str, split: str, index: int) -> bool:
    indexed = IndexedDataset(prefix)
    bounds = (0, len(indexed)) if split == WHOLE else split_bounds(split, len(indexed))[index]
    return indexed.tokens_between(*bounds) > 0


@contextlib.contextmanager
def _watched(say: Say) -> Iterator[dict[str, Index]]:
    """The indices that this process finds or builds inside of the block, by key; a line is said for each."""
    indices: dict[str, Index] = {}

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            entry: CacheEntry = record.__dict__["entry"]
            if record.msg.startswith("building"):
                return
            if record.msg.startswith("waiting"):
                say(record.getMessage())
            elif entry.key not in indices:
                indices[entry.key] = Index(entry, record.__dict__.get("seconds"))
                say(str(indices[entry.key]))

    handler = Collect()
    level, propagate = index_cache.log.level, index_cache.log.propagate
    index_cache.log.addHandler(handler)
    index_cache.log.setLevel(logging.INFO)
    index_cache.log.propagate = False
    try:
        yield indices
    finally:
        index_cache.log.removeHandler(handler)
        index_cache.log.setLevel(level)
        index_cache.log.propagate = propagate
