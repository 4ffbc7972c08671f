"""The training, validation and test data that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.data.gpt_dataset import BlendedDataset, GPTDataset, MockDataset, OwnDataset, Source
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.packing import PackedDataset
from megatron.data.splits import (
    SPLIT_NAMES,
    BlendPart,
    parse_data_path,
    read_data_file_list,
    samples_of_part,
    split_bounds,
)
from megatron.errors import ConfigError, DataError
from megatron.protocols import MakeDatasets

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.config.files import DataConfig

# In place of --split in the description of an index over a whole data set (--train-data-path and its siblings), whose
# documents are others than those of the split that the run may also name.
WHOLE = "whole"
TRAIN = SPLIT_NAMES.index("train")


@dataclass(frozen=True)
class Datasets:
    """The three data sets; None for one that has no data or that no sample is wanted of."""

    train: Source | BlendedDataset | None = None
    valid: Source | BlendedDataset | None = None
    test: Source | BlendedDataset | None = None


@dataclass(frozen=True)
class SplitPlan:
    """The data sets of one split and the part of each that it takes: a --split text, or WHOLE."""

    blend: tuple[BlendPart, ...]
    split: str


def plan_splits(data: DataConfig) -> tuple[SplitPlan | None, SplitPlan | None, SplitPlan | None]:
    """What the data flags name for training, validation and test; None where they name nothing.

    Raises ConfigError for contradictory flags and none at all, DataError for a --data-file-list that cannot be read.
    """
    per_split = (data.train_data_path, data.valid_data_path, data.test_data_path)
    shared = bool(data.data_path) + bool(data.data_file_list)
    if shared + any(per_split) > 1:
        raise ConfigError(
            "--data-path, --data-file-list and --train-data-path/--valid-data-path/--test-data-path exclude each "
            "other: give one of the three"
        )
    if shared:
        blend = parse_data_path(data.data_path) if data.data_path else read_data_file_list(str(data.data_file_list))
        plan = SplitPlan(blend, data.split)
        return plan, plan, plan
    if not any(per_split):
        raise ConfigError(
            "no data: give --data-path (or --train-data-path, --data-file-list), or --mock-data to try without"
        )
    train, valid, test = (
        SplitPlan(parse_data_path(paths, f"--{name}-data-path"), WHOLE) if paths else None
        for name, paths in zip(SPLIT_NAMES, per_split, strict=True)
    )
    return train, valid, test


def data_prefixes(config: Config) -> list[str]:
    """The prefixes of all files that the run reads, training data first, each once. Raises as plan_splits does."""
    if config.data.mock_data or config.pieces.datasets is not None:
        return []
    return list(dict.fromkeys(part.prefix for plan in plan_splits(config.data) if plan for part in plan.blend))


def build_datasets(
    config: Config,
    train_samples: int,
    valid_samples: int,
    test_samples: int,
    *,
    locations: Mapping[str, str] | None = None,
    pad_id: int = 0,
    verify: bool = False,
    workers: int = 1,
) -> Datasets:
    """The data sets of a run, with at least as many samples as asked for; 0 asks for none.

    `locations` says where a copy of a prefix is to be read from (--stage-data-to), `pad_id` fills packed samples,
    `verify` reads all of an index that is found and compares it with its digest, which one rank of a job does for all.
    `workers` indices of a blend are built at the same time.
    Every rank calls this; one builds each index and the others wait for its files. Raises DataError for files that are
    missing or damaged, and for training without data; ConfigError for contradictory data flags.
    """
    counts = (train_samples, valid_samples, test_samples)
    if config.pieces.datasets is not None:
        return _own(config, counts)
    if config.data.mock_data:
        return Datasets(*(_mock(config, name, count) for name, count in zip(SPLIT_NAMES, counts, strict=True)))
    builder = _Builder(config, locations or {}, pad_id, verify, workers)
    plans = plan_splits(config.data)
    datasets = Datasets(*(builder.build(i, plans[i], counts[i]) for i in range(len(SPLIT_NAMES))))
    if train_samples and datasets.train is None:
        flag = f"--split is {config.data.split!r}" if plans[TRAIN] is not None else "give --train-data-path"
        raise DataError(f"there is no training data: {flag}")
    return datasets


def _own(config: Config, counts: tuple[int, int, int]) -> Datasets:
    """What pieces of one's own make, as a run takes it. Raises DataError where too little is made."""
    make: MakeDatasets | None = config.pieces.datasets
    assert make is not None
    made = list(make(config, *counts))
    if len(made) != len(SPLIT_NAMES):
        raise DataError(f"{len(made)} data sets of your own: give {len(SPLIT_NAMES)}, None for one without data")
    found: list[Any] = []
    for name, count, own in zip(SPLIT_NAMES, counts, made, strict=True):
        short = own is not None and name == "train" and config.data.dataloader_type == "single" and len(own) < count
        if count and name == "train" and (own is None or short):
            raise DataError(
                f"the data set of your own has {0 if own is None else len(own)} training samples and the run takes "
                f"{count}: make so many, or give --dataloader-type cyclic"
            )
        found.append(None if own is None or not count else OwnDataset(own, name, config.model.seq_length))
    return Datasets(*found)


def _mock(config: Config, name: str, count: int) -> MockDataset | None:
    vocab_size = config.model.vocab_size
    if vocab_size is None:
        raise ConfigError("--mock-data needs to know the vocabulary: give --vocab-size or a tokenizer")
    return MockDataset(name, count, config.model.seq_length, vocab_size, config.training.seed) if count else None


class _Builder:
    """Builds the splits of one run; a pair of files that several splits read is opened once."""

    def __init__(self, config: Config, locations: Mapping[str, str], pad_id: int, verify: bool, workers: int) -> None:
        self._data, self._locations, self._pad_id, self._verify = config.data, locations, pad_id, verify
        self._workers = workers
        self._seq_length, self._seed = config.model.seq_length, config.training.seed
        self._opened: dict[str, IndexedDataset] = {}

    def build(self, index: int, plan: SplitPlan | None, num_samples: int) -> Source | BlendedDataset | None:
        """Split number `index` (train, valid, test); None without data or samples.

        A data set too small to have a part in this split is left out and the others' weights grow in proportion.
        """
        if plan is None or num_samples == 0:
            return None
        parts = []
        for part in plan.blend:
            indexed = self._open(part.prefix)
            whole = plan.split == WHOLE
            bounds = (0, len(indexed)) if whole else split_bounds(plan.split, len(indexed))[index]
            if indexed.tokens_between(*bounds):
                parts.append((part.weight, indexed, bounds))
        if not parts:
            return None
        if index == TRAIN and self._data.train_data_exact_num_epochs is not None:
            return self._exact_epochs([indexed for _, indexed, _ in parts], parts[0][2], plan.split, num_samples)
        total = sum(weight for weight, _, _ in parts)
        alone = len(plan.blend) == 1
        wanted = [num_samples if alone else samples_of_part(num_samples, weight / total) for weight, _, _ in parts]
        with ThreadPoolExecutor(self._workers) as pool:
            futures = [
                pool.submit(self._source, indexed, index, plan.split, bounds, count)
                for (_, indexed, bounds), count in zip(parts, wanted, strict=True)
            ]
            datasets = [future.result() for future in futures]
        if len(datasets) == 1:
            return datasets[0]
        weights = [weight for weight, _, _ in parts]
        return BlendedDataset(
            datasets, weights, num_samples, data_cache_path=self._data.data_cache_path, verify=self._verify
        )

    def _source(
        self, indexed: IndexedDataset, index: int, split: str, bounds: tuple[int, int], num_samples: int
    ) -> Source:
        options: dict[str, Any] = dict(
            name=SPLIT_NAMES[index], split=split, bounds=bounds, num_samples=num_samples, seq_length=self._seq_length,
            seed=self._seed, data_cache_path=self._data.data_cache_path, verify=self._verify,
        )  # fmt: skip
        if self._data.data_packing == "best-fit":
            return PackedDataset(indexed, **options, pad_id=self._pad_id)
        return GPTDataset(indexed, **options)

    def _exact_epochs(
        self, parts: Sequence[IndexedDataset], bounds: tuple[int, int], split: str, num_samples: int
    ) -> Source:
        """The training split repeated --train-data-exact-num-epochs times and shuffled together, whatever the length
        of the run."""
        epochs = self._data.train_data_exact_num_epochs
        assert epochs is not None, "the flag was given"
        if len(parts) > 1:
            raise ConfigError(
                f"--train-data-exact-num-epochs {epochs} is for one data set, {len(parts)} are given: in a blend the "
                f"weights and the length of the run decide how often each is repeated"
            )
        tokens = parts[0].tokens_between(*bounds)
        available = (epochs * tokens - 1) // self._seq_length
        if available < num_samples and self._data.dataloader_type != "cyclic":
            raise ConfigError(
                f"--train-data-exact-num-epochs {epochs} gives {available} samples of {self._seq_length} tokens, and "
                f"the run takes {num_samples}: use --train-samples {available} or less, or --dataloader-type cyclic"
            )
        return self._source(parts[0], TRAIN, split, bounds, available)

    def _open(self, prefix: str) -> IndexedDataset:
        if prefix not in self._opened:
            location = self._locations.get(prefix)
            self._opened[prefix] = IndexedDataset(prefix, mmap=self._data.mmap_bin_files, location=location)
        return self._opened[prefix]
