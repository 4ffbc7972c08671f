"""The training, validation and test data that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.data.gpt_dataset import BlendedDataset, GPTDataset, MockDataset, TokenDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.splits import (
    SPLIT_NAMES,
    BlendPart,
    parse_data_path,
    read_data_file_list,
    samples_of_part,
    split_bounds,
)
from megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron.config import Config

# In place of --split in the description of an index over a whole data set (--train-data-path and its siblings), whose
# documents are others than those of the split that the run may also name.
WHOLE = "whole"


@dataclass(frozen=True)
class Datasets:
    """The three data sets; None for one that has no data or that no sample is wanted of."""

    train: TokenDataset | None = None
    valid: TokenDataset | None = None
    test: TokenDataset | None = None


def build_datasets(config: Config, train_samples: int, valid_samples: int, test_samples: int) -> Datasets:
    """The data sets of a run, with at least as many samples as asked for; 0 asks for none.

    Every rank calls this; one builds each index and the others wait for its files. Raises DataError for files that are
    missing or damaged, and for training without data; ConfigError for contradictory data flags.
    """
    data, seq_length, seed = config.data, config.model.seq_length, config.training.seed
    counts = (train_samples, valid_samples, test_samples)
    if data.mock_data:
        if config.model.vocab_size is None:
            raise ConfigError("--mock-data needs to know the vocabulary: give --vocab-size or a tokenizer")
        vocab_size = config.model.vocab_size
        return Datasets(
            *(
                MockDataset(name, count, seq_length, vocab_size, seed) if count else None
                for name, count in zip(SPLIT_NAMES, counts, strict=True)
            )
        )
    builder = DatasetBuilder(seq_length, seed, data.data_cache_path, mmap=data.mmap_bin_files)
    per_split = (data.train_data_path, data.valid_data_path, data.test_data_path)
    shared = bool(data.data_path) + bool(data.data_file_list)
    if shared + any(per_split) > 1:
        raise ConfigError(
            "--data-path, --data-file-list and --train-data-path/--valid-data-path/--test-data-path exclude each "
            "other: give one of the three"
        )
    if any(per_split):
        blends = [
            parse_data_path(paths, f"--{name}-data-path") if paths else None
            for name, paths in zip(SPLIT_NAMES, per_split, strict=True)
        ]
        datasets = Datasets(*(builder.build(i, blend, WHOLE, counts[i]) for i, blend in enumerate(blends)))
    elif shared:
        blend = parse_data_path(data.data_path) if data.data_path else read_data_file_list(str(data.data_file_list))
        datasets = Datasets(*(builder.build(i, blend, data.split, counts[i]) for i in range(3)))
    else:
        raise ConfigError(
            "no data: give --data-path (or --train-data-path, --data-file-list), or --mock-data to try without"
        )
    if train_samples and datasets.train is None:
        raise DataError(
            "there is no training data: "
            + ("give --train-data-path" if any(per_split) else f"--split is {data.split!r}")
        )
    return datasets


class DatasetBuilder:
    """Builds blends for one sequence length and seed; a pair of files that several splits read is opened once."""

    def __init__(self, seq_length: int, seed: int, data_cache_path: str | None = None, *, mmap: bool = True) -> None:
        self._seq_length, self._seed, self._cache, self._mmap = seq_length, seed, data_cache_path, mmap
        self._opened: dict[str, IndexedDataset] = {}

    def build(self, index: int, blend: Sequence[BlendPart] | None, split: str, num_samples: int) -> TokenDataset | None:
        """Split number `index` (train, valid, test) of a blend; None without data or samples.

        `split` is a --split text, or WHOLE for all sequences. A data set too small to have a part in this split is left
        out and the others' weights grow in proportion.
        """
        if blend is None or num_samples == 0:
            return None
        parts = []
        for part in blend:
            indexed = self._open(part.prefix)
            bounds = (0, len(indexed)) if split == WHOLE else split_bounds(split, len(indexed))[index]
            if indexed.tokens_between(*bounds):
                parts.append((part.weight, indexed, bounds))
        if not parts:
            return None
        total = sum(weight for weight, _, _ in parts)
        datasets = [
            GPTDataset(
                indexed,
                name=SPLIT_NAMES[index],
                split=split,
                bounds=bounds,
                num_samples=num_samples if len(blend) == 1 else samples_of_part(num_samples, weight / total),
                seq_length=self._seq_length,
                seed=self._seed,
                data_cache_path=self._cache,
            )
            for weight, indexed, bounds in parts
        ]
        if len(datasets) == 1:
            return datasets[0]
        return BlendedDataset(datasets, [weight for weight, _, _ in parts], num_samples, data_cache_path=self._cache)

    def _open(self, prefix: str) -> IndexedDataset:
        if prefix not in self._opened:
            self._opened[prefix] = IndexedDataset(prefix, mmap=self._mmap)
        return self._opened[prefix]
