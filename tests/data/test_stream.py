"""Streams of data: over any changes of a run, each token of an epoch is read once before the next."""

import dataclasses
import itertools

import numpy as np
import pytest

from megatron.data import cuts
from megatron.data.history import (
    DataPhase,
    PhaseSource,
    Scheduled,
    changes_from,
    continued_phases,
    from_record,
    named,
    to_record,
)
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.stream import Opening, StreamDataset
from megatron.errors import DataError

PACKINGS = ("concat", "best-fit")


def write(prefix, sizes):
    """Write documents whose tokens are numbered from 0 on."""
    with IndexedDatasetWriter(prefix, "int32") as writer:
        tokens = np.arange(sum(sizes), dtype=np.int32)
        writer.add_batch(tokens, list(sizes), [1] * len(sizes))
    return str(prefix)


class Reader:
    """Reads samples of streams and counts how often each token was an input in the loss."""

    def __init__(self, sizes_by_prefix):
        self.sizes = sizes_by_prefix
        self.counts = {
            prefix: np.zeros(sum(sizes), int) for prefix, sizes in sizes_by_prefix.items()
        }
        self.ends = {prefix: np.cumsum(sizes) - 1 for prefix, sizes in sizes_by_prefix.items()}

    def read(self, dataset, position):
        stream, _ = dataset.find(position)
        tokens = dataset[position]
        segments = dataset.segments(position)
        marks = dataset.loss_tokens(position)
        ends = self.ends[stream.name]
        first = set((ends + 1 - np.array(self.sizes[stream.name])).tolist())
        in_loss = np.ones(len(tokens) - 1, bool) if marks is None else marks[1:].astype(bool)
        if segments is not None:
            bounds = np.cumsum(segments)
            in_loss &= np.arange(1, len(tokens)) < bounds[-1]
            in_loss[bounds[:-1] - 1] = False
        for token, label in zip(
            tokens[:-1][in_loss].tolist(), tokens[1:][in_loss].tolist(), strict=True
        ):
            assert label == token + 1 or (segments is None and token in ends and label in first)
        used = tokens[:-1][in_loss]
        counts = self.counts[stream.name]
        np.add.at(counts, used, 1)
        inner = np.delete(counts, ends)
        assert inner.max() - inner.min() <= 1, (stream.name, position)
        return len(used), stream

    def check_place(self, stream, number):
        place = stream.place(number)
        sizes = self.sizes[stream.name]
        assert stream[number][0] == sum(sizes[: place.sequence]) + place.token
        assert 0 <= place.read < place.samples and 1 <= place.window <= place.windows
        counts = np.delete(self.counts[stream.name], self.ends[stream.name])
        assert {counts.min(), counts.max()} <= {place.epoch - 1, place.epoch}
        return place


@pytest.mark.parametrize("case", range(24))
def test_each_token_of_an_epoch_once_over_any_changes(case, tmp_path, monkeypatch):
    random = np.random.RandomState(case)
    monkeypatch.setattr(cuts, "WINDOW", int(random.choice([60, 300, 1 << 28])))
    longest = random.choice([3, 12, 90])
    sizes = {
        write(tmp_path / name, sizes): sizes
        for name in "abc"
        if (sizes := random.randint(1, longest + 1, random.randint(2, 40)).tolist() + [5])
    }
    opened = {prefix: IndexedDataset(prefix) for prefix in sizes}
    reader = Reader(sizes)
    packings = [random.choice(PACKINGS)] if case % 3 else PACKINGS
    phases, position = (), 0
    for _ in range(8):
        some = [prefix for prefix in sizes if random.rand() < 0.7] or list(sizes)[:1]
        sources = tuple(
            PhaseSource(float(1 - 0.95 * random.rand()), p, p, 0, len(sizes[p])) for p in some
        )
        length = int(random.choice([1, 4, 7, 16, 33]))
        packing = str(random.choice(packings))
        now = DataPhase(0, length, packing, int(random.randint(3)), sources)
        phases = from_record(to_record(continued_phases(phases, position, [Scheduled(0, now)])))
        stop = position + random.randint(1, 200)
        dataset = StreamDataset(phases, position, stop, Opening(opened.__getitem__))
        for index in range(position, stop):
            count, stream = reader.read(dataset, index)
            if index % 4:  # the rest takes as long as all else
                continue
            _, number = dataset.find(index)
            assert stream.tokens_in(np.array([number])) == count
            assert stream.spans(np.array([number]))[1].sum() == count
            reader.check_place(stream, number + 1)
        position = stop


def test_phases_of_a_schedule():
    sources = [(PhaseSource(1.0, p, p, 0, 9),) for p in "ab"]
    first, second = (DataPhase(0, 10, "concat", 1, s) for s in sources)
    schedule = [Scheduled(0, first), Scheduled(95, second)]
    begun = continued_phases((), 0, schedule)
    assert [phase.start for phase in begun] == [0, 10]
    for position in (1, 5, 9, 10, 11):
        past = tuple(phase for phase in begun if phase.start < position)
        assert continued_phases(past, position, schedule) == begun
    longer = [
        dataclasses.replace(s, phase=dataclasses.replace(s.phase, seq_length=20)) for s in schedule
    ]
    assert [p.start for p in continued_phases(begun[:1], 4, longer)] == [0, 4, 7]


def test_windows_are_read_one_after_another(tmp_path, monkeypatch):
    monkeypatch.setattr(cuts, "WINDOW", 40)
    prefix = write(tmp_path / "a", [30] * 10)
    phase = DataPhase(0, 10, "concat", 1, (PhaseSource(1.0, prefix, prefix, 0, 10),))
    dataset = StreamDataset((phase,), 0, 0, Opening(IndexedDataset))
    stream = dataset.stream((prefix, 0))
    places = [stream.place(number) for number in range(61)]
    # 300 tokens: 30 samples in round(300 / 40) windows of 3 or 4 samples
    sizes = [places[0].samples]
    for before, now in itertools.pairwise(places[:30]):
        if before.read + 1 < before.samples:
            assert (now.window, now.read) == (before.window, before.read + 1)
        else:
            assert (now.window, now.read) == (before.window + 1, 0)
            sizes.append(now.samples)
    assert sum(sizes) == 30 and len(sizes) == places[0].windows == 8 and set(sizes) == {3, 4}
    assert [places[number].epoch for number in (0, 29, 30, 60)] == [1, 1, 2, 3]
    assert [places[number].epochs for number in (0, 15, 30, 60)] == [0, 0.5, 1, 2]


def test_phases_shorter_than_a_sample_are_left_out():
    first, second, third = (DataPhase(0, 10, "concat", 1, (source(p),)) for p in "abc")
    schedule = [Scheduled(0, first), Scheduled(92, second), Scheduled(98, third)]
    for past, position in (((), 0), ((first,), 9)):
        phases = continued_phases(past, position, schedule)
        assert phases == (first, dataclasses.replace(third, start=10))
        assert from_record(to_record(phases)) == phases


def source(prefix, first=0, stop=9, name=None):
    return PhaseSource(1.0, prefix, name or prefix, first, stop)


def test_each_source_of_a_phase_has_a_stream_of_its_own():
    def phase(start, *sources):
        return DataPhase(start, 10, "concat", 1, sources)

    def names(*sources, past):
        return [each.name for each in named(sources, past)]

    whole, part = source("a"), source("a", 0, 5)
    past = (phase(0, whole), phase(5, part))  # the part took the stream over
    assert names(part, past=past) == names(whole, past=past) == ["a"]
    assert names(whole, part, past=past) == ["a@0:9", "a"]
    past = (phase(0, source("moved", name="a")),)
    assert names(source("moved"), source("a"), past=past) == ["a", "a (2)"]
    record = to_record([phase(0, whole, dataclasses.replace(part, name="a"))])
    with pytest.raises(ValueError):
        from_record(record)


def test_changes_of_a_later_phase_need_consent_too():
    both = DataPhase(0, 10, "concat", 1, (source("a"), source("b")))
    one = DataPhase(5, 10, "concat", 1, (source("a"),))
    other = PhaseSource(1.0, "b", "b", 0, 9, generation=1)
    again = dataclasses.replace(both, start=20, sources=(source("a"), other))
    assert [change.needs for change in changes_from((both, one), (both, one, again), 8)] == [
        "files"
    ]


def test_a_history_beyond_the_file_is_refused(tmp_path):
    prefix = write(tmp_path / "a", [7] * 10)
    phases = tuple(
        DataPhase(start, 10, "concat", 1, (source(prefix, 0, stop),))
        for start, stop in ((0, 11), (5, 10))
    )
    with pytest.raises(DataError, match="10 sequences"):
        StreamDataset(phases, 5, 9, Opening(IndexedDataset))


def test_going_back_before_a_resume(tmp_path):
    """Samples of another length cannot be read again: the new phase then begins earlier."""
    prefix = write(tmp_path / "a", [50] * 20)
    opened = IndexedDataset(prefix)
    short, long, other = (
        DataPhase(start, length, "concat", 1, (PhaseSource(weight, prefix, prefix, 0, 20),))
        for start, length, weight in ((0, 4, 1.0), (10, 8, 1.0), (20, 8, 2.0))
    )
    phases = (short, long, other)

    def resumed():
        return StreamDataset(
            phases,
            20,
            40,
            Opening(lambda _: opened),
            [Scheduled(0, dataclasses.replace(other, start=0))],
        )

    before = [resumed()[number].tolist() for number in range(40)]
    near, far = resumed(), resumed()
    near.go_back(phases[:2], 12)
    assert near.readable_from == 10 and near.phases == phases
    assert [near[number].tolist() for number in range(40)] == before
    far.go_back(phases[:1], 6)
    assert far.phases == (short, dataclasses.replace(other, start=6))
    assert [far[number].tolist() for number in range(6)] == before[:6]
    assert {len(far[number]) for number in range(6, 40)} == {9}
