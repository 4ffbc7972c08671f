"""Show what a change in the middle of a run repeats and skips, in each --data-order.

    python benchmarks/data_changes.py

Three runs are changed: one is made longer, one gets another blend, one longer samples. Tokens are
numbered, and counted as they are read. One is repeated if it is read again before all others of its
source; one is skipped if the order after the change places it before the change, and it was not
read. Exit code 1 if --data-order stream repeats or skips any.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.shared import markdown, parser
from megatron.config import Config
from megatron.data.arrays import Int64Array
from megatron.data.datasets import ContinuedData, build_datasets
from megatron.data.gpt_dataset import TokenDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.stream import StreamDataset

SAMPLES = 1000
LENGTH = 64
HEAD = ("change", "order", "tokens to come", "repeated", "skipped")


@dataclass(frozen=True)
class Case:
    """A run over SAMPLES samples that changes after `done` of them.

    weights  of the sources, each of which has SAMPLES samples
    after    what is other after the change
    to_come  number of samples that are looked at after it
    """

    name: str
    done: int
    to_come: int
    weights: tuple[str, ...] = ("1",)
    after: Mapping[str, Any] = field(default_factory=dict)


CASES = (
    Case("1,500 samples instead of 1,000", 800, 200, after={"train_samples": 1500}),
    Case("blend 0.1, 0.9 instead of 0.5, 0.5", 500, 500, ("1", "1"), {"weights": ("1", "9")}),
    Case("samples of 128 tokens instead of 64", 400, 300, after={"seq_length": 2 * LENGTH}),
)


class Reader:
    """Counts how often each token was an input in the loss.

    The last tokens of documents are left out, whose predictions depend on how samples are cut.
    """

    def __init__(self, ends: Int64Array, size: int) -> None:
        self.counts = np.zeros((size, SAMPLES * LENGTH + 1), np.int64)
        self.counts[:, ends] = -1
        self._levels = [Counter({0: self.counts.shape[1] - len(ends)}) for _ in range(size)]

    def read(self, tokens: Iterable[int]) -> int:
        """Read tokens; return how many are repeated."""
        repeated = 0
        for token in tokens:
            source, place = divmod(token, self.counts.shape[1])
            if (count := self.counts[source, place]) < 0:
                continue
            levels = self._levels[source]
            levels[count] -= 1
            levels[count + 1] += 1
            repeated += any(levels[level] > 0 for level in range(count))
            self.counts[source, place] += 1
        return repeated

    def unread(self, tokens: Iterable[int]) -> int:
        """Return how many of these tokens have not been read."""
        return int((self.counts.ravel()[list(set(tokens))] == 0).sum())


def write(folder: Path) -> Int64Array:
    """Write two sources of SAMPLES samples; return the places of the last tokens of documents."""
    sizes = np.random.RandomState(1).randint(20, 400, SAMPLES)
    ends = np.cumsum(sizes)
    total = SAMPLES * LENGTH + 1
    ends = np.append(ends[ends < total], total)
    for number, name in enumerate("ab"):
        with IndexedDatasetWriter(folder / name, "int32") as writer:
            tokens = np.arange(total) + number * total
            writer.add_batch(tokens, np.diff(ends, prepend=0).tolist(), [1] * len(ends))
    return ends - 1


def dataset_of(folder: Path, order: str, continued: ContinuedData, **fields: Any) -> TokenDataset:
    """Return the training data of a run."""
    blend = zip(fields.pop("weights"), ("a", "b"), strict=False)
    settings: dict[str, Any] = dict(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=1,
        position_embedding_type="rope",
        vocab_size=1 << 18,
        seq_length=LENGTH,
        train_samples=SAMPLES,
        micro_batch_size=1,
        lr=1e-3,
        data_path=[word for weight, name in blend for word in (weight, str(folder / name))],
        split="1",
        data_order=order,
    )
    config = Config.create(**settings | fields)
    assert config.batch.train_samples is not None, "the length was given"
    dataset = build_datasets(config, config.batch.train_samples, 0, 0, continued=continued).train
    assert dataset is not None, "training data were asked for"
    return dataset


def tokens_of(dataset: TokenDataset, samples: range) -> Iterator[int]:
    """Yield the inputs in the loss of these samples."""
    for index in samples:
        marks = dataset.loss_tokens(index)
        tokens = dataset[index][:-1]
        yield from (tokens if marks is None else tokens[marks[1:] > 0]).tolist()


def measure(case: Case, order: str, folder: Path, ends: Int64Array) -> tuple[int, int, int]:
    """Return the numbers of tokens to come, of repeated and of skipped ones."""
    reader = Reader(ends, len(case.weights))
    continued = ContinuedData()
    before = dataset_of(folder, order, continued, weights=case.weights)
    reader.read(tokens_of(before, range(case.done)))
    if isinstance(before, StreamDataset):
        continued = ContinuedData({"train": before.begun(case.done)}, {"train": case.done})
    after = dataset_of(folder, order, continued, **{"weights": case.weights, **case.after})
    skipped = reader.unread(tokens_of(after, range(case.done)))
    to_come = list(tokens_of(after, range(case.done, case.done + case.to_come)))
    return len(to_come), reader.read(to_come), skipped


def main() -> int:
    parser(__doc__).parse_args()
    table = [list(HEAD)]
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        ends = write(Path(name))
        for case in CASES:
            for order in ("megatron", "stream"):
                to_come, *counts = measure(case, order, Path(name), ends)
                shown = (f"{n:,} ({n / to_come:.0%})" for n in counts)
                table.append([f"{case.name}, after {case.done}", order, f"{to_come:,}", *shown])
                wrong += sum(counts) if order == "stream" else 0
    print("\n".join(markdown(table)))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
