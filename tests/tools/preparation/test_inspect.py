"""Inspection of data sets: statistics against numpy on plain lists, and deliberate damage."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.indexed_dataset import map_index
from megatron_inspection import dataset as library
from megatron_inspection.dataset import count_lengths, inspect
from tests.data.struct_format import packed, write
from tools import inspect_dataset

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "50"]


def texts(prefix, **options):
    return [str(problem) for problem in inspect(prefix, **options).problems]


@pytest.mark.slow
@given(
    documents=st.lists(
        st.lists(st.lists(st.just(1), max_size=40), max_size=3), min_size=1, max_size=20
    ),
    block=st.sampled_from([1, 2, 1 << 20]),
)
def test_lengths(tmp_path_factory, documents, block):
    prefix = write(tmp_path_factory.mktemp("lengths") / "a", documents)
    expected = np.array([sum(map(len, document)) for document in documents])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_BLOCK_ENTRIES", block)
        lengths = count_lengths(map_index(Path(f"{prefix}.idx")))
    assert (lengths.documents, lengths.tokens) == (len(documents), expected.sum())
    summary = lengths.summary()
    assert summary["empty"] == (expected == 0).sum() and summary["mean"] == pytest.approx(
        expected.mean()
    )
    for fraction in (0.0, 0.01, 0.25, 0.5, 0.99, 1.0):
        assert lengths.quantile(fraction) == np.quantile(expected, fraction, method="inverted_cdf")


def test_an_id_that_the_tokenizer_lacks(tmp_path, capsys):
    good = write(tmp_path / "good", [[[1, 2]], [[3]]])
    bad = write(tmp_path / "bad", [[[1]], [[60]]])
    assert inspect_dataset.main([good, bad, "--validate", "--documents", "1", *NULL]) == 2
    first, second = capsys.readouterr().out.split(f"{bad}\n")
    assert (
        "min 1, median 1, mean 1.5, p99 2, max 2, empty 0" in first
        and "problem:" not in first
        and "| 3\n" in first
    )
    assert f"problem: {bad}.bin: byte 2: id 60" in second and "| <id 60>\n" in second


def test_a_damaged_record_of_the_tokenizer_is_named(tmp_path):
    prefix = write(tmp_path / "a", [[[1, 2]], [[60]]])
    Path(f"{prefix}.tokenizer.json").write_text("{")
    record, *tokens = texts(prefix, vocab_size=50, validate=True)
    assert record.startswith(f"{prefix}.tokenizer.json: ")
    assert tokens and all(problem.startswith(f"{prefix}.bin: ") for problem in tokens)


@pytest.mark.slow
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=3), min_size=1, max_size=5
    ),
    fraction=st.floats(0, 1, exclude_max=True),
    new=st.integers(0, 255),
    cut=st.booleans(),
    in_bin=st.booleans(),
    block=st.sampled_from([1, 2, 1 << 20]),
)
def test_any_inconsistency_is_found(
    tmp_path_factory,
    documents,
    fraction,
    new,
    cut,
    in_bin,
    block,
):
    """One changed byte of either file, or truncation, is found.

    The exception is a result that is a valid data set: another order of ids within the vocabulary,
    or a document that starts elsewhere.
    """
    data, index = packed(documents, "<u2")
    content = data if in_bin else index
    at = int(fraction * len(content))
    damaged = content[:at] if cut else content[:at] + bytes([new]) + content[at + 1 :]
    folder = tmp_path_factory.mktemp("any")
    prefix = str(folder / "a")
    (folder / "a.bin").write_bytes(damaged if in_bin else data)
    (folder / "a.idx").write_bytes(index if in_bin else damaged)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_BLOCK_ENTRIES", block)
        patch.setattr(library, "_BLOCK_BYTES", 2 * block)
        problems = inspect(prefix, vocab_size=100, validate=True, num_samples=3).problems
    if damaged == content:
        assert not problems
        return
    count = sum(map(len, documents))
    if not in_bin and not cut and at >= 34 + 12 * count:
        starts = struct.unpack(f"<{len(documents) + 1}q", damaged[34 + 12 * count :])
        consistent = starts[0] == 0 and starts[-1] == count and sorted(starts) == list(starts)
    elif in_bin and len(damaged) == len(data):
        consistent = max(struct.unpack(f"<{len(data) // 2}H", damaged)) < 100
    elif not in_bin and not cut and at == 17:
        # Other types of 2 bytes hold these ids too, and without tokens any type works.
        consistent = new == 3 or (not data and 1 <= new <= 8)
    else:
        consistent = False
    assert bool(problems) != consistent, problems


def test_ids_out_of_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "_BLOCK_BYTES", 64)
    ids = np.arange(1000) % 90
    ids[[333, 700, 701]] = [100, 99, 65535]
    prefix = write(tmp_path / "a", [[ids[:300].tolist(), []], [ids[300:].tolist()]])
    problems = texts(prefix, vocab_size=99, validate=True)
    assert [
        re.findall(r"\d+", problem.removeprefix(f"{prefix}.bin: ")) for problem in problems
    ] == [
        ["666", "100", "2", "99"],
        ["1400", "99", "2", "99"],
        ["1402", "65535", "2", "99"],
        ["3", "1000"],
    ]
    assert not texts(prefix, validate=True) and not texts(prefix, vocab_size=65536, validate=True)
    assert not texts(prefix, vocab_size=99)  # the index alone
