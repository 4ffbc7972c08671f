"""Data as streams: each source continues where it stopped, whatever changes in a run.

A sample is found from its position and the phases of the run (history.py): the phase says how many
samples of each source come before it, and the source's cuts (cuts.py) what these have read.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron.data.arrays import Int64Array, StrPath
from megatron.data.cuts import ConcatCut, Cut, PackedCut, Place
from megatron.data.epochs import EpochKey, Rest, Source
from megatron.data.gpt_dataset import (
    BySource,
    IndexFiles,
    SlicedDataset,
    SourcesDataset,
    Spans,
    check_count,
    damaged_index,
)
from megatron.data.history import (
    DataPhase,
    DataPhases,
    PhaseSource,
    Scheduled,
    begun,
    continued_phases,
    stretches,
)
from megatron.data.indexed_dataset import IndexedDataset, SequenceSlices
from megatron.errors import DataError

ENDLESS = 1 << 62  # samples
# A reader asks for tokens, pieces and marks of a sample one after another.
_SAMPLES_KEPT = 64


@dataclass(frozen=True)
class CutSettings:
    """Settings that a source's cut depends on; a change begins another cut."""

    seq_length: int
    packing: str
    seed: int
    first: int
    stop: int

    @classmethod
    def of(cls, phase: DataPhase, source: PhaseSource) -> CutSettings:
        return cls(phase.seq_length, phase.packing, phase.seed, source.first, source.stop)

    def cut(self, source: Source, rest: Rest) -> Cut:
        """Return the cut that goes on with `rest`."""
        key = EpochKey(self.seed, 0, self.first, self.stop)
        kind = PackedCut if self.packing == "best-fit" else ConcatCut
        return kind(source, key, self.seq_length, rest.within(source, self.first, self.stop))


class SourceStream(SlicedDataset):
    """The samples of one source in all phases, numbered from the first sample of the run on.

    `starts` has the number of the first sample of each cut, and `settings` what it depends on.
    """

    def __init__(
        self, source: Source, starts: Sequence[int], settings: Sequence[CutSettings], pad_id: int
    ) -> None:
        self.name = source.name
        self._source = source
        self._indexed = source.indexed
        self._pad_id = pad_id
        self._starts = list(starts)
        self._settings = list(settings)
        self._cuts = list[Cut]()
        self._lock = threading.Lock()
        self._cached_slices = lru_cache(_SAMPLES_KEPT)(self._checked)
        self.seq_length = settings[-1].seq_length
        self.description = f"stream of {source.name}"

    @property
    def source(self) -> Source:
        return self._source

    @cached_property
    def tokens_per_epoch(self) -> int:  # type: ignore[override]
        return self._cut(len(self._starts) - 1).tokens_per_epoch

    @property
    def samples_per_epoch(self) -> int:
        return self._cut(len(self._starts) - 1).samples_per_epoch

    @property
    def waste(self) -> float | None:  # type: ignore[override]
        cut = self._cut(len(self._starts) - 1)
        return cut.epoch_packing.waste if isinstance(cut, PackedCut) else None

    def _cut(self, index: int) -> Cut:
        """Return cut number `index`, built from those before it if needed."""
        with self._lock:
            while len(self._cuts) <= index:
                number = len(self._cuts)
                rest = Rest()
                if number:
                    rest = self._cuts[-1].left(self._starts[number] - self._starts[number - 1])
                self._cuts.append(self._settings[number].cut(self._source, rest))
            return self._cuts[index]

    def _cut_of(self, number: int) -> tuple[Cut, int]:
        """Return the cut of a sample, and the sample's number in it."""
        index = bisect.bisect_right(self._starts, number) - 1
        return self._cut(index), number - self._starts[index]

    def _by_cut(self, numbers: Int64Array) -> list[tuple[Cut, Int64Array]]:
        which = np.searchsorted(self._starts, numbers, side="right") - 1
        return [
            (self._cut(index), numbers[which == index] - self._starts[index])
            for index in np.unique(which).tolist()
        ]

    def _length(self, index: int) -> int:
        return self._cut_of(index)[0].seq_length

    def _slices(self, index: int) -> SequenceSlices:
        return self._cached_slices(index)

    def _checked(self, index: int) -> SequenceSlices:
        cut, number = self._cut_of(index)
        slices = cut.slices(number)
        tokens = int(slices.lengths.sum())
        packed = isinstance(cut, PackedCut)
        if tokens > cut.seq_length + 1 or not (packed or tokens == cut.seq_length + 1):
            raise damaged_index(self.name, index)
        return slices

    def __len__(self) -> int:
        raise TypeError("a stream has no end")

    def segments(self, index: int, /) -> Int64Array | None:
        """Return the length of each piece of a packed sample."""
        packed = isinstance(self._cut_of(index)[0], PackedCut)
        return self._slices(index).lengths if packed else None

    def loss_tokens(self, index: int, /) -> Int64Array | None:
        """Return which tokens the loss mask marks, without labels that do not follow their input."""
        marks = super().loss_tokens(index)
        cut, number = self._cut_of(index)
        excluded = cut.excluded(number)
        if excluded is not None and len(excluded):
            if marks is None:
                marks = np.ones(cut.seq_length + 1, np.int64)
            marks[excluded] = 0
        return marks

    def tokens_in(self, indices: Int64Array, /) -> int:
        return sum(cut.tokens_in(numbers) for cut, numbers in self._by_cut(indices))

    def spans(self, indices: Int64Array, /) -> Spans:
        some = [cut.inputs(numbers) for cut, numbers in self._by_cut(indices)]
        starts = [(p.sequences.astype(np.int64) << 32) + p.offsets for p in some]
        nothing = np.zeros(0, np.int64)
        return (
            np.concatenate([nothing, *starts]),
            np.concatenate([nothing, *(p.lengths for p in some)]),
        )

    def prepare(self, first: int, stop: int) -> None:
        """Build the index files for samples first .. stop - 1."""
        for index, start in enumerate(self._starts):
            end = self._starts[index + 1] if index + 1 < len(self._starts) else stop
            if first < min(end, stop) and start < stop:
                self._cut(index).prepare(max(first, start) - start, min(end, stop) - start)

    def epochs(self, first: int, stop: int) -> float:
        """Return how often samples first .. stop - 1 read the source."""
        if first >= stop:
            return 0.0
        cut, start = self._cut_of(first)
        return cut.epochs(start + stop - first) - cut.epochs(start)

    def place(self, number: int) -> Place:
        """Return where the reading stands after `number` samples."""
        cut, taken = self._cut_of(number)
        return cut.place(taken)


@dataclass(frozen=True)
class Opening:
    """Means of opening a stream's files by prefix, and its index files."""

    open: Callable[[str], IndexedDataset]
    pad_id: int = 0
    data_cache_path: StrPath | None = None
    verify: bool = False
    workers: int = 1

    def source(self, prefix: str, name: str) -> Source:
        indexed = self.open(prefix)
        check_count(prefix, len(indexed))
        return Source(indexed, IndexFiles(indexed, self.data_cache_path, self.verify), name)


class StreamDataset(SourcesDataset):
    """A blend of streams, in the order of the phases. Sample `index` is the one at this position.

    phases     those of the past included; their sources are opened only when they are read
    start      position at which the run began or resumed
    size       number of samples that the run is planned to read
    ends       whether the data end there; otherwise they have no end
    schedule   the phases of the settings, for a run that goes back to an earlier position
    prepare    whether to open the sources and build their index files now, not when they are read
    """

    def __init__(
        self,
        phases: DataPhases,
        start: int,
        size: int,
        opening: Opening,
        schedule: Sequence[Scheduled] = (),
        *,
        ends: bool = False,
        prepare: bool = True,
    ) -> None:
        self.phases = phases
        self._start = start
        self._ends = ends
        self._size = size
        self._schedule = schedule
        self._opening = opening
        self._cached_find = lru_cache(_SAMPLES_KEPT)(self._find)
        self._starts = [phase.start for phase in phases]
        self._orders = [phase.interleaving() for phase in phases]
        # for each phase, the number of samples that each of its streams gives before it
        self._before = list[list[int]]()
        counted = dict[tuple[str, int], int]()
        chains = dict[tuple[str, int], list[tuple[int, CutSettings]]]()
        prefixes = dict[tuple[str, int], str]()
        for phase, samples in stretches(phases, phases[-1].start):
            self._before.append([counted.get(each.stream, 0) for each in phase.sources])
            for source, before in zip(phase.sources, self._before[-1], strict=True):
                chain = chains.setdefault(source.stream, [])
                settings = CutSettings.of(phase, source)
                if chain and chain[-1][0] == before:  # nothing was read with the last ones
                    chain.pop()
                if not chain or chain[-1][1] != settings:
                    chain.append((before, settings))
                prefixes[source.stream] = source.prefix
            for stream, count in phase.counts(samples).items():
                counted[stream] = counted.get(stream, 0) + count
        self._chains = chains
        self._prefixes = prefixes
        self._streams = dict[tuple[str, int], SourceStream]()
        self._current = tuple(
            dict.fromkeys(
                source.stream
                for phase, stop in zip(phases, [*self._starts[1:], None], strict=True)
                if stop is None or stop > self._start
                for source in phase.sources
            )
        )
        if prepare:
            with ThreadPoolExecutor(opening.workers) as pool:
                list(pool.map(self._prepare, self._current))

    def stream(self, stream: tuple[str, int]) -> SourceStream:
        """Return a stream of any phase; its files are opened at the first call."""
        if stream not in self._streams:
            starts, settings = zip(*self._chains[stream], strict=True)
            source = self._opening.source(self._prefixes[stream], stream[0])
            if (size := len(source.indexed)) < (stop := max(each.stop for each in settings)):
                raise DataError(
                    f"{source.indexed.prefix} has {size} sequences, but the run has read from {stop} "
                    "of it: put the former files back, or give the new ones another name"
                )
            pad_id = self._opening.pad_id
            self._streams[stream] = SourceStream(source, starts, settings, pad_id)
        return self._streams[stream]

    def _prepare(self, stream: tuple[str, int]) -> None:
        first, stop = (
            self.taken(position)[stream] for position in (self._start, max(self._start, len(self)))
        )
        self.stream(stream).prepare(first, stop)

    def taken(self, position: int) -> dict[tuple[str, int], int]:
        """Return how many samples each stream gives before a position."""
        taken = dict.fromkeys(self._chains, 0)
        for phase, samples in stretches(self.phases, position):
            for stream, count in phase.counts(samples).items():
                taken[stream] += count
        return taken

    def epochs(self, first: int, stop: int) -> dict[str, float]:
        """Return how often samples first .. stop - 1, none of them of the past, read each source."""
        before, after = self.taken(first), self.taken(stop)
        return {
            stream[0]: self.stream(stream).epochs(before[stream], after[stream])
            for stream in self._current
        }

    def go_back(self, past: DataPhases, position: int) -> None:
        """Continue from an earlier position; if it is too early to be read again, in new phases.

        `past` has the phases that had begun there.
        """
        if position < self.readable_from:
            phases = continued_phases(past, position, self._schedule)
            vars(self).update(
                vars(StreamDataset(phases, position, self._size, self._opening, self._schedule))
            )

    def begun(self, position: int) -> DataPhases:
        """Return the phases that have begun before a position."""
        return begun(self.phases, position)

    @property
    def sources(self) -> tuple[SourceStream, ...]:
        return tuple(map(self.stream, self._current))

    def by_source(self, indices: Int64Array) -> BySource:
        phases = np.searchsorted(self._starts, indices, side="right") - 1
        for number in np.unique(phases).tolist():
            phase = self.phases[number]
            which, samples = self._orders[number].find(indices[phases == number] - phase.start)
            for index in np.unique(which).tolist():
                stream = self.stream(phase.sources[index].stream)
                yield stream, samples[which == index] + self._before[number][index]

    def __len__(self) -> int:
        return self._size

    @property
    def first(self) -> int:
        return self._start

    @property
    def readable_from(self) -> int:
        now = self.phases[-1]
        start = self._start
        for phase in reversed(self.phases):
            streams = {source.stream for source in phase.sources}
            alike = (phase.seq_length, phase.packing) == (now.seq_length, now.packing)
            if not (alike and streams <= set(self._current)):
                break
            start = min(start, phase.start)
        return start

    @property
    def available(self) -> int:
        return self._size if self._ends else ENDLESS

    def find(self, index: int, /) -> tuple[SourceStream, int]:
        return self._cached_find(index)

    def _find(self, index: int) -> tuple[SourceStream, int]:
        number = bisect.bisect_right(self._starts, index) - 1
        phase = self.phases[number]
        (which,), (sample,) = self._orders[number].find(np.array([index - phase.start]))
        stream = self.stream(phase.sources[which].stream)
        return stream, int(sample) + self._before[number][which]
