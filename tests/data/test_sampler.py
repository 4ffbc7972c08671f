"""Orders of samples and streams of micro-batches, against a count by hand."""

import errno
import threading
from itertools import count, islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.data import sampler
from megatron.data.gpt_dataset import MockDataset
from megatron.data.order import are_ranges, around, merged, sample_order
from megatron.data.permutation import permute
from megatron.data.sampler import MicroBatchStream, Separation, Share
from megatron.errors import DataError, NodeError
from tests.helpers.examples import examples


class Counting:
    """Data set whose sample i is [i, i + 1, i + 2]."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index, /):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return np.arange(index, index + 3, dtype=np.int64)

    def loss_tokens(self, index, /):
        return None

    def segments(self, index, /):
        return None

    def where(self, index, token=0, /):
        return f"numbers.bin, document {index}, byte {8 * token}"


def samples(batches):
    return [int(token) for batch in batches for token in batch.tokens[:, 0]]


def in_order(per_rank):
    """Return the samples that all ranks took, in the order of consumption."""
    batches = sorted(
        (batch for rank in per_rank for batch in rank), key=lambda batch: batch.first_sample
    )
    return samples(batches)


RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda r: (r[0], r[0] + r[1])), max_size=6
)


def left_out(ranges):
    return {n for start, stop in ranges for n in range(start, stop)}


@given(ranges=RANGES, positions=st.lists(st.integers(0, 80), max_size=10))
def test_positions_are_counted_around_ranges(ranges, positions):
    disjoint = merged(ranges)
    assert left_out(list(disjoint)) == left_out(ranges) and are_ranges(list(map(list, disjoint)))
    assert all(a[1] < b[0] for a, b in pairwise(disjoint))
    remaining = list(islice((n for n in count() if n not in left_out(ranges)), 81))
    assert around(np.array(positions, np.int64), disjoint).tolist() == [
        remaining[p] for p in positions
    ]


def expected_order(kind, total, ranges, number):
    """Return the first samples of the order, one by one.

    After a single pass of `total`, the first ones come again.
    """
    remaining = list(islice((n for n in count() if n not in left_out(ranges)), 2 * total))

    def sample(n):
        if kind == "cyclic":
            return int(permute(np.array([n % total]), total, n // total)[0])
        return n if n < total else sample(remaining[n - total])

    return [sample(n) for n in remaining[:number]]


@pytest.mark.slow
@examples(25)
@given(
    kind=st.sampled_from(["single", "cyclic"]),
    total=st.integers(1, 80),
    ranges=st.just([]) | RANGES,
    phases=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(0, 4)),
        min_size=1,
        max_size=5,
    ),
)
def test_resizes_drop_and_repeat_nothing(
    kind,
    total,
    ranges,
    phases,
):
    """Resizes drop and repeat no sample, also around samples that are left out.

    The job changes data-parallel size, micro-batch size and workers, after any number of steps. A
    single pass keeps its length: the first samples replace those left out.
    """
    assume(len(left_out(ranges)) < total)
    consumed = 0
    read = []
    order = sample_order(kind, total, ranges)
    order.check(total)
    for dp, mbs, workers, steps in phases:
        steps = min(steps, (total - consumed) // (dp * mbs))
        streams = [
            MicroBatchStream(
                Counting(total), Share(mbs, rank, dp), consumed, order=order, num_workers=workers
            )
            for rank in range(dp)
        ]
        read += in_order([stream.take(steps) for stream in streams])
        for stream in streams:
            stream.close()
        consumed += steps * dp * mbs
    assert read == expected_order(kind, total, ranges, consumed)
    assert order.indices(np.arange(consumed)).tolist() == read


def test_nothing_left_is_an_error_and_not_an_endless_search():
    order = sample_order("single", 10, [(0, 4), (4, 12)])
    with pytest.raises(DataError, match=r"\b10\b"):
        order.check(1)
    assert sample_order("single", 10) == sample_order("single", 10, [(3, 3)])


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_workers_and_resuming_change_nothing(num_workers, kind):
    data = MockDataset("train", 30, 16, 40, seed=5)
    options = {"order": sample_order(kind, 30), "separation": Separation(39, True, True, True)}
    share = Share(2, 1, 2)
    plain = MicroBatchStream(data, share, **options).take(7)
    stream = MicroBatchStream(data, share, num_workers=num_workers, **options)
    # as the batch ramps up
    batches = stream.take(1) + stream.take(4) + stream.take(0) + stream.take(2)
    resumed = MicroBatchStream(data, share, 4 * 4, num_workers=num_workers, **options).take(3)
    for expected, got in zip(plain + plain[4:], batches + resumed, strict=True):
        assert expected.first_sample == got.first_sample
        for name in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens"):
            assert torch.equal(getattr(expected, name), getattr(got, name)), name
    stream.close()


class Failing(Counting):
    """Data set of which sample 6 cannot be read."""

    def __init__(self, error):
        super().__init__(20)
        self.error = error

    def __getitem__(self, index, /):
        if index == 6:
            raise self.error
        return super().__getitem__(index)


BYTE = DataError("a.bin: byte 7: cannot be read")
BROKEN = OSError(errno.EIO, "Input/output error", "a.bin")
REFUSED = OSError(errno.EACCES, "Permission denied", "a.bin")
NAMED = r"\b6\b.*numbers\.bin.* 6\b.* 0\b.*a\.bin"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("data", "share", "vocab_size", "expected", "kind", "match"),
    [
        (Counting(10), Share(2, 0, 2), None, [0, 1, 4, 5], DataError, r" 10 .* 11\b"),  # the end
        (
            *(Counting(10), Share(1), 5, [0, 1, 2], DataError),
            r"\b3\b.* 5\b.*numbers\.bin.* 3\b.* 16\b",
        ),
        (Failing(BYTE), Share(2, 1, 2), None, [2, 3], DataError, NAMED),
        (Failing(REFUSED), Share(2, 1, 2), None, [2, 3], DataError, NAMED),
        (Failing(BROKEN), Share(2, 1, 2), None, [2, 3], NodeError, NAMED),
    ],
)
def test_an_error_comes_when_its_sample_is_taken(
    num_workers, data, share, vocab_size, expected, kind, match
):
    """Reading ahead past the end, or over bad data, is no error."""
    stream = MicroBatchStream(data, share, num_workers=num_workers, vocab_size=vocab_size)
    assert samples(stream.take(len(expected) // share.micro_batch_size)) == expected
    with pytest.raises(kind, match=match):
        stream.take(1)
    assert stream.consumed_samples == len(expected) * share.size
    stream.close()


def test_closing_does_not_wait_for_a_read_without_end(monkeypatch):
    monkeypatch.setattr(sampler, "_READ_ENDS_S", 0.0)
    entered = threading.Event()
    release = threading.Event()
    busy = []

    class Stuck(Counting):
        def __getitem__(self, index, /):
            if index > 0:
                busy.append(threading.current_thread())
                entered.set()
                release.wait()
            return super().__getitem__(index)

    stream = MicroBatchStream(Stuck(100), Share(1), num_workers=2)
    assert samples(stream.take(1)) == [0]
    assert entered.wait(60)
    stream.close()
    # left behind; the process can end without them
    assert all(thread.is_alive() and thread.daemon for thread in busy)
    release.set()
    for thread in busy:
        thread.join(60)
        assert not thread.is_alive()
    assert len(busy) <= 2  # what had not been started was never read
