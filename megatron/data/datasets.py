"""The training, validation and test data that a configuration describes."""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from megatron.config.io import (
    Blend,
    BlendSource,
    normalised,
    parse_blend,
    parse_blend_schedule,
)
from megatron.data.gpt_dataset import (
    BlendedDataset,
    GPTDataset,
    IndexRequest,
    MockDataset,
    SourceDataset,
    TokenDataset,
    UserDataset,
)
from megatron.data.history import (
    DataPhase,
    DataPhases,
    PhaseSource,
    Scheduled,
    changes_from,
    continued_phases,
    named,
    shown,
)
from megatron.data.indexed_dataset import IndexedDataset, build_blend_index, data_files
from megatron.data.packed_dataset import PackedDataset
from megatron.data.stream import Opening, StreamDataset
from megatron.errors import ConfigError, DataError
from megatron.untrusted import read_text

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.config.io import DataConfig

SPLIT_NAMES = ("train", "valid", "test")
# Stands for --split in the description of an index over a whole data set (--train-data-path and its
# siblings), so that a cached index of a split of the same data set is not taken for it.
UNSPLIT = "whole"
_MOST_BYTES = 1 << 24  # of a --data-file-list


@dataclass(frozen=True)
class Datasets:
    """The three data sets of a run; None for one without data, or of which 0 samples are requested.

    corpora   named validation sets, each of one epoch; they replace `valid`
    """

    train: TokenDataset | None = None
    valid: TokenDataset | None = None
    test: TokenDataset | None = None
    corpora: Mapping[str, TokenDataset] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class ContinuedData:
    """State of the data of a resumed run.

    past       {split: phases that have begun}
    positions  {split: position of the next sample}
    replaced   prefixes of files that have other content than before
    epochs     {name of a source of training data: epochs read so far}
    end        position in the training data at which the run ends
    unread     records of the files that earlier jobs read and this one does not
    """

    past: Mapping[str, DataPhases] = field(default_factory=dict)
    positions: Mapping[str, int] = field(default_factory=dict)
    replaced: frozenset[str] = frozenset()
    unread: tuple[Mapping[str, object], ...] = ()
    epochs: Mapping[str, float] = field(default_factory=dict)
    end: int | None = None


@dataclass(frozen=True)
class SplitPlan:
    """The data sets of one split, and the part of each that the split takes.

    blend   the data sets and their weights
    split   value of --split; UNSPLIT: the split takes each data set, or the part that the blend has
    later   (tokens, blend) of each blend that replaces the one before after this many tokens of
            training (--blend-schedule)
    """

    blend: Blend
    split: str
    later: tuple[tuple[int, Blend], ...] = ()

    @property
    def schedule(self) -> tuple[tuple[int, Blend], ...]:
        """Return all blends, with the number of tokens from which on each holds."""
        return ((0, self.blend), *self.later)

    def bounds(self, source: BlendSource, index: int, size: int) -> tuple[int, int]:
        """Return the sequences of split `index`, out of `size`, as (first, past the last)."""
        if self.split == UNSPLIT:  # parts are rounded as in BigScience's Megatron-DeepSpeed
            return round(source.start * size), round(source.end * size)
        return split_bounds(self.split, size)[index]

    @property
    def corpora(self) -> dict[str, SplitPlan]:
        """Return the plan of each named corpus."""
        names = dict.fromkeys(source.corpus for source in self.blend if source.corpus)
        return {
            name: SplitPlan(tuple(s for s in self.blend if s.corpus == name), self.split)
            for name in names
        }


@dataclass(frozen=True)
class Reading:
    """Options for reading data files.

    locations  {prefix: the copy to read} (--stage-data-to)
    pad_id     token id that fills the rest of packed samples
    verify     read all of an existing index and compare it with its digests; in a job, one rank
               does this for all ranks
    workers    number of a blend's indices that are built at the same time
    """

    locations: Mapping[str, str] = field(default_factory=dict)
    pad_id: int = 0
    verify: bool = False
    workers: int = 1


def split_bounds(split: str, num_sequences: int) -> tuple[tuple[int, int], ...]:
    """Return (first, past the last) of the sequences for training, validation and test.

    `split` is up to three numbers, separated by commas or slashes, which the configuration has
    checked. Rounding is Megatron's: each split ends round(share * N) sequences after the previous
    one, and the surplus of the last end over N is subtracted from all ends.

    >>> split_bounds("969, 30, 1", 1000)
    ((0, 969), (969, 999), (999, 1000))
    """
    shares = [float(share) for share in split.replace("/", ",").split(",")] + [0.0, 0.0]
    total = sum(shares)
    cuts = [0]
    for share in shares[:3]:
        cuts.append(cuts[-1] + round(share / total * float(num_sequences)))
    surplus = cuts[-1] - num_sequences
    ends = [max(0, cut - surplus) for cut in cuts[1:]]
    return tuple(pairwise([0, *ends]))


def read_data_file_list(path: str) -> Blend:
    """Read a blend from a file with lines `weight prefix [corpus]`.

    Empty lines and lines that begin with # are skipped. Raises DataError if the file cannot be
    read, and ConfigError for a malformed line, with its number, or if no weight is positive.
    """
    lines = read_text(path, _MOST_BYTES, error=DataError).splitlines()
    sources = []
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        try:
            weight = float(fields[0])
            prefix = fields[1]
            if not 0 <= weight < math.inf:
                raise ValueError("not a weight")
        except (ValueError, IndexError):
            raise ConfigError(
                f"{path}:{number}: expected 'weight prefix [corpus]', with a weight of 0 or more, "
                f"got {line!r}"
            ) from None
        sources.append(BlendSource(weight, prefix))
    try:
        if blend := normalised(sources):
            return blend
    except ValueError as error:
        raise ConfigError(f"--data-file-list {path}: {error}") from None
    raise ConfigError(f"--data-file-list {path} names no data set")


def samples_of_component(num_samples: int, weight: float) -> int:
    """Return the number of samples to prepare from one data set of a blend.

    It is half a percent more than the data set's share, as in Megatron.
    """
    return math.ceil(num_samples * weight * 1.005)


def plan_splits(data: DataConfig) -> list[SplitPlan | None]:
    """Return the data that the flags give for each split; None if they give none.

    The splits are training, validation and test. Raises ConfigError if no split has data, and for a
    name in --blend-schedule that several sources have, and the errors of `read_data_file_list`.
    """
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    blends: list[Blend | None] = [
        parse_blend(words, named=name == "valid") if words else None
        for name, words in zip(SPLIT_NAMES, paths, strict=True)
    ]
    if data.data_path or data.data_file_list:
        blend = (
            parse_blend(data.data_path)
            if data.data_path
            else read_data_file_list(str(data.data_file_list))
        )
        blends = [blend] * len(SPLIT_NAMES)
    later: tuple[tuple[int, Blend], ...] = ()
    if data.blend_schedule:
        later = _with_prefixes(parse_blend_schedule(data.blend_schedule), blends[0] or ())
        if later[0][0] == 0:
            (_, first), *rest = later
            unnamed = data.uses_split and blends[0] is None
            blends = [first] * len(SPLIT_NAMES) if unnamed else [first, *blends[1:]]
            later = tuple(rest)
    if not any(blends):
        raise ConfigError(
            "no data: give --data-path (or --train-data-path, --data-file-list), or --mock-data "
            "for generated data"
        )
    split = data.split if data.uses_split else UNSPLIT
    return [
        SplitPlan(blend, split, later if name == "train" else ()) if blend else None
        for name, blend in zip(SPLIT_NAMES, blends, strict=True)
    ]


def _with_prefixes(
    schedule: Iterable[tuple[int, Blend]], known: Blend
) -> tuple[tuple[int, Blend], ...]:
    """Return a schedule of blends with the prefixes of the `known` sources that it names.

    The name of a source is its prefix, or this without its folder, also without the ending that
    tools/preprocess_data.py adds; other names are prefixes. A source without a part has that of the
    known one. Raises ConfigError for a name that several sources have.
    """

    def names(prefix: str) -> set[str]:
        base = os.path.basename(prefix)
        return {base, base.removesuffix("_text_document")}

    def resolved(source: BlendSource) -> BlendSource:
        name = source.prefix
        meant = [s for s in known if s.prefix == name] or [
            s for s in known if name in names(s.prefix)
        ]
        if source.documents:
            meant = [replace(each, start=source.start, end=source.end) for each in meant]
        meant = list(dict.fromkeys(replace(each, weight=source.weight) for each in meant))
        if len(meant) > 1:
            words = [f"{each.prefix}@{each.documents or '0:1'}" for each in meant]
            raise ConfigError(
                f"--blend-schedule: {name!r} could be each of {', '.join(words)}: write the one that "
                "you mean in this way"
            )
        return meant[0] if meant else source

    return tuple((tokens, tuple(map(resolved, blend))) for tokens, blend in schedule)


def data_prefixes(config: Config) -> list[str]:
    """Return the prefixes of all files that the run reads, training data first.

    Raises the errors of plan_splits.
    """
    if config.data.mock_data or config.pieces.datasets is not None:
        return []
    plans = [plan for plan in plan_splits(config.data) if plan is not None]
    blends = [blend for plan in plans for _, blend in plan.schedule]
    return list(dict.fromkeys(source.prefix for blend in blends for source in blend))


def _with_tokens(
    plan: SplitPlan, blend: Blend, opened: Callable[[str], IndexedDataset], index: int
) -> Iterator[tuple[BlendSource, IndexedDataset, tuple[int, int], int]]:
    """Yield each source with tokens in split number `index`: files, sequences, number of tokens."""
    for source in blend:
        indexed = opened(source.prefix)
        bounds = plan.bounds(source, index, len(indexed))
        tokens = indexed.tokens_between(*bounds)
        if tokens:
            yield source, indexed, bounds, tokens


def scheduled_phases(
    config: Config,
    plan: SplitPlan,
    opened: Callable[[str], IndexedDataset],
    index: int,
    past: Sequence[DataPhase],
    replaced: Collection[str] = (),
) -> list[Scheduled]:
    """Return the phases of split number `index` (train, valid, test); [] if it has no data.

    A source of which the split has no tokens is omitted, and the weights of the others grow in
    proportion. Sources that the `past` phases of the run read keep their names. Raises DataError if
    only some phases have data.
    """
    listed = [
        (
            tokens,
            [
                PhaseSource(source.weight, source.prefix, source.prefix, *bounds)
                for source, _, bounds, _ in _with_tokens(plan, blend, opened, index)
            ],
        )
        for tokens, blend in plan.schedule
    ]
    # a source has one name in all phases, also if a later one has another part of its file
    everywhere = named([each for _, sources in listed for each in sources], past, replaced)
    streams = {(each.prefix, each.first, each.stop): each for each in everywhere}
    scheduled = list[Scheduled]()
    for tokens, sources in listed:
        weights = dict.fromkeys(((s.prefix, s.first, s.stop) for s in sources), 0.0)
        for each in sources:
            weights[each.prefix, each.first, each.stop] += each.weight
        total = sum(weights.values())
        phase = DataPhase(
            start=0,
            seq_length=config.model.seq_length,
            packing=config.data.data_packing,
            seed=config.training.seed,
            sources=tuple(
                replace(streams[key], weight=weight / total) for key, weight in weights.items()
            ),
        )
        scheduled.append(Scheduled(tokens, phase))
    empty = [each.tokens for each in scheduled if not each.phase.sources]
    if len(empty) == len(scheduled):
        return []
    if empty:
        raise DataError(
            f"there is no training data from {empty[0]:,} tokens on: change --split {plan.split!r} or "
            "--blend-schedule"
        )
    return scheduled


def open_data(prefix: str, data: DataConfig, location: str | None = None) -> IndexedDataset:
    """Open the data set with a prefix, and its loss mask if --loss-mask selects it.

    `location` is the prefix of a copy to read. Raises DataError for files that are missing or
    damaged, and for a mask without --loss-mask.
    """
    try:
        dataset = IndexedDataset(prefix, mmap=data.mmap_bin_files, location=location)
    except DataError as error:
        phases = parse_blend_schedule(data.blend_schedule) if data.blend_schedule else ()
        if os.path.dirname(prefix) or all(prefix != s.prefix for _, blend in phases for s in blend):
            raise
        raise DataError(
            f"{error}. Or is {prefix!r} in --blend-schedule a misspelt name of a source that another "
            "flag gives?"
        ) from None
    _, _, *mask = data_files(dataset.location)
    if data.loss_mask is None and mask:
        raise DataError(
            f"{mask[0]}: this data set has a loss mask, but no flag says whether to use it: "
            "--loss-mask required trains on the tokens that it marks, --loss-mask ignore on all "
            "tokens"
        )
    if data.loss_mask == "required" or (data.loss_mask == "optional" and mask):
        dataset.open_mask()
    return dataset


def build_datasets(
    config: Config,
    train_samples: int,
    valid_samples: int,
    test_samples: int,
    *,
    reading: Reading = Reading(),
    plans: Sequence[SplitPlan | None] | None = None,
    continued: ContinuedData = ContinuedData(),
) -> Datasets:
    """Return the data sets of a run, with at least as many samples as requested; 0 requests none.

    With --dataloader-type cyclic, which repeats samples, the user's own data sets and
    --train-data-exact-num-epochs may give fewer; the user's own validation and test data always
    may. A named corpus has one epoch. If several processes call this function, one builds each
    index and the others wait for its files. `plans` replaces the data that the flags give, and
    `continued` says where streams continue. Raises
    DataError for files that are missing or damaged, and for training data that is missing or too
    short; ConfigError for contradictory data flags.
    """
    counts = (train_samples, valid_samples, test_samples)
    if config.pieces.datasets is not None:
        return _user_datasets(config, counts)
    if config.data.mock_data:
        vocabulary = config.model.vocab_size
        if vocabulary is None:
            raise ConfigError(
                "--mock-data needs the size of the vocabulary: give --vocab-size or a tokenizer"
            )
        mock = partial(
            MockDataset,
            seq_length=config.model.seq_length,
            vocab_size=vocabulary,
            seed=config.training.seed,
        )
        pairs = zip(SPLIT_NAMES, counts, strict=True)
        return Datasets(*(mock(name, count) if count else None for name, count in pairs))
    opened = cache(lambda prefix: open_data(prefix, config.data, reading.locations.get(prefix)))
    build: Callable[[int, SplitPlan, int], TokenDataset | None]
    build = partial(_build_split, config, reading, opened)
    corpus: Callable[[SplitPlan], TokenDataset] = partial(_corpus, config, opened, build)
    if config.data.data_order == "stream":
        opening = Opening(
            opened,
            reading.pad_id,
            data_cache_path=config.data.data_cache_path,
            verify=reading.verify,
            workers=reading.workers,
        )
        build = partial(_build_stream, config, opening, continued)
        corpus = partial(_stream_corpus, config, opening)
    made = list[TokenDataset | None]()
    corpora: dict[str, TokenDataset] = {}
    for index, (plan, count) in enumerate(
        zip(plans or plan_splits(config.data), counts, strict=True)
    ):
        if plan is None or count == 0:
            made.append(None)
            continue
        made.append(None if plan.corpora else build(index, plan, count))
        for name, of_corpus in plan.corpora.items():
            for source in of_corpus.blend:
                indexed = opened(source.prefix)
                tokens = indexed.tokens_between(*of_corpus.bounds(source, 1, len(indexed)))
                if tokens <= config.model.seq_length:
                    raise DataError(
                        f"--valid-data-path {name}={source.prefix}: {tokens} tokens are fewer than "
                        f"one sample of {config.model.seq_length + 1}: leave this corpus out"
                    )
            corpora[name] = corpus(of_corpus)
    if train_samples and made[0] is None:
        raise DataError(
            f"there is no training data: change --split {config.data.split!r}, or give "
            "--train-data-path"
        )
    return Datasets(*made, corpora=corpora)


def _corpus(
    config: Config,
    opened: Callable[[str], IndexedDataset],
    build: Callable[[int, SplitPlan, int], TokenDataset | None],
    plan: SplitPlan,
) -> TokenDataset:
    """Return the data set of a named corpus, in Megatron's order.

    It is one epoch, or the samples of an evaluation by a blend, which ends before a file's samples
    repeat.
    """
    sources = []
    for source in plan.blend:
        built = build(1, SplitPlan((source,), plan.split), 1)
        assert isinstance(built, SourceDataset), "a data set with tokens has samples"
        sources.append(built)
    if len(sources) == 1:
        return sources[0]
    weights = [source.weight for source in plan.blend]
    size = max(1, config.training.eval_iters * config.batch.global_batch_size)
    which, sample = build_blend_index(weights, size)
    over = sample >= np.array(list(map(len, sources)))[which]
    return BlendedDataset(sources, weights, int(np.argmax(over)) if over.any() else size)


def _build_stream(
    config: Config,
    opening: Opening,
    continued: ContinuedData,
    index: int,
    plan: SplitPlan,
    num_samples: int,
) -> StreamDataset | None:
    """Return split number `index` (train, valid, test) as a blend of streams; None without data.

    Raises the errors of `refuse_changes`.
    """
    split = SPLIT_NAMES[index]
    past = continued.past.get(split, ())
    position = continued.positions.get(split, 0)
    schedule = scheduled_phases(config, plan, opening.open, index, past, continued.replaced)
    if not schedule:
        return None
    phases = continued_phases(past, position, schedule)
    if split == "train":
        refuse_changes(config.data, past, phases, position)
    return StreamDataset(phases, position, num_samples, opening, schedule)


def refuse_changes(data: DataConfig, past: DataPhases, phases: DataPhases, position: int) -> None:
    """Raise ConfigError for a change of the training data that --allow-data-changes does not have."""
    refused = [
        change
        for change in changes_from(past, phases, position)
        if change.needs and change.needs not in data.allow_data_changes
    ]
    if refused:
        needed = " ".join(dict.fromkeys(change.needs for change in refused))
        texts = shown(refused)
        listed = f" {texts[0]}. " if len(texts) == 1 else "\n  ".join(["", *texts]) + "\n"
        raise ConfigError(
            f"the data differ from those of the checkpoint's run:{listed}Undo the change, or accept "
            f"what follows from it with --allow-data-changes {needed}"
        )


def _stream_corpus(config: Config, opening: Opening, plan: SplitPlan) -> StreamDataset:
    """Return the data set of a named corpus; see _corpus."""
    (scheduled,) = scheduled_phases(config, plan, opening.open, 1, ())
    phase = scheduled.phase
    dataset = StreamDataset((phase,), 0, 0, opening)
    most = [source.samples_per_epoch for source in dataset.sources]
    size = most[0]
    if len(most) > 1:
        size = max(1, config.training.eval_iters * config.batch.global_batch_size)
        order = phase.interleaving()

        def repeats(last: int) -> bool:
            return bool((order.counts(last + 1) > most).any())

        size = bisect.bisect_left(range(size), True, key=repeats)
    return StreamDataset((phase,), 0, size, opening, ends=True)


def _user_datasets(config: Config, counts: tuple[int, int, int]) -> Datasets:
    """Return the user's own data sets in the form that a run reads.

    Raises DataError if there are not three, or if the training data has too few samples.
    """
    assert config.pieces.datasets is not None, "the user gave a function for data sets"
    made = list(config.pieces.datasets(config, *counts))
    if len(made) != len(SPLIT_NAMES):
        raise DataError(
            f"your function returned {len(made)} data sets: return {len(SPLIT_NAMES)}, with None "
            "for one without data"
        )
    datasets: list[UserDataset | None] = []
    for name, count, dataset in zip(SPLIT_NAMES, counts, made, strict=True):
        size = 0 if dataset is None else len(dataset)
        needed = count if config.data.dataloader_type == "single" else min(count, 1)
        if name == "train" and size < needed:
            raise DataError(
                f"your data set has {size} training samples but the run takes {count}: provide "
                + ("enough, or give --dataloader-type cyclic" if size else "some")
            )
        used = dataset is not None and count
        datasets.append(UserDataset(dataset, name, config.model.seq_length) if used else None)
    return Datasets(*datasets)


def _build_split(
    config: Config,
    reading: Reading,
    opened: Callable[[str], IndexedDataset],
    index: int,
    plan: SplitPlan,
    num_samples: int,
) -> TokenDataset | None:
    """Build split number `index` (train, valid, test) from `opened` files; None if it has no data.

    A data set of which this split has no tokens is omitted, and the weights of the others grow in
    proportion.
    """
    data = config.data
    seq_length = config.model.seq_length
    available = list(_with_tokens(plan, plan.blend, opened, index))
    if not available:
        return None
    if index == 0 and data.train_data_exact_num_epochs is not None:
        num_samples = _samples_of_exact_epochs(
            data, [tokens for *_, tokens in available], seq_length, num_samples
        )
    weights = [source.weight for source, *_ in available]
    total = sum(weights)
    alone = len(plan.blend) == 1
    counts = [
        num_samples if alone else samples_of_component(num_samples, weight / total)
        for weight in weights
    ]
    make: Callable[..., SourceDataset] = partial(
        PackedDataset if data.data_packing == "best-fit" else GPTDataset,
        pad_id=reading.pad_id,
        data_cache_path=data.data_cache_path,
        verify=reading.verify,
    )
    with ThreadPoolExecutor(reading.workers) as pool:
        futures = []
        for (source, indexed, bounds, tokens), count in zip(available, counts, strict=True):
            request = IndexRequest(
                indexed.prefix,
                SPLIT_NAMES[index],
                plan.split + (source.documents and f" {source.documents}"),
                *bounds,
                tokens,
                max(count, 1),  # a split without a whole sample is repeated until it has one
                seq_length,
                config.training.seed,
                indexed.sizes,
            )
            futures.append(pool.submit(make, indexed, request))
        datasets = [future.result() for future in futures]
    if len(datasets) == 1:
        return datasets[0]
    return BlendedDataset(
        datasets, weights, num_samples, data_cache_path=data.data_cache_path, verify=reading.verify
    )


def _samples_of_exact_epochs(
    data: DataConfig, tokens: Sequence[int], seq_length: int, num_samples: int
) -> int:
    """Return the number of samples in --train-data-exact-num-epochs epochs.

    It does not depend on the length of the run. `tokens` has the number of tokens in each data set.
    Raises ConfigError for a blend, and for a run that needs more samples, unless
    --dataloader-type cyclic repeats them.
    """
    epochs = data.train_data_exact_num_epochs
    assert epochs is not None, "the flag was given"
    if len(tokens) > 1:
        raise ConfigError(
            f"--train-data-exact-num-epochs {epochs} is for one data set, but {len(tokens)} are "
            "given: in a blend, the weights and the length of the run decide how often each is "
            "repeated"
        )
    available = (epochs * tokens[0] - 1) // seq_length
    if available < num_samples and data.dataloader_type != "cyclic":
        raise ConfigError(
            f"--train-data-exact-num-epochs {epochs} gives {available} samples of {seq_length} "
            f"tokens, and the run takes {num_samples}: use --train-samples {available} or less, or "
            "--dataloader-type cyclic"
        )
    return available
