"""Contents of .bin/.idx data sets, their problems, samples, and the lengths of their documents."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron import drawing
from megatron.data.indexed_dataset import (
    HEADER,
    MASK_DTYPE,
    Index,
    IndexedDataset,
    bin_path,
    data_files,
    idx_path,
    map_index,
    mask_prefix,
    record_path,
)
from megatron.data.tokenizer import Tokenizer
from megatron.data.tokenizer_record import TokenizerRecord, digest, read_record
from megatron.errors import ConfigError, DataError, NodeError

PROBLEMS_PER_KIND = 5
BINS_PER_DECADE = 8
_BLOCK_ENTRIES = 1 << 18
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class LengthCounts:
    """Number of documents of each length, in tokens.

    The counts are exact, and small for any number of documents: n distinct lengths need at least
    n * (n - 1) / 2 tokens.

    values   int64 [n], the distinct lengths, ascending
    counts   int64 [n], the number of documents of each
    """

    values: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @property
    def documents(self) -> int:
        """Return the number of documents."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all documents."""
        return int((self.values * self.counts).sum())

    def summary(self) -> dict[str, float]:
        """Return statistics of the lengths, and the number of empty documents."""
        shares = {"min": 0.0, "median": 0.5, "mean": None, "p99": 0.99, "max": 1.0}
        mean = self.tokens / self.documents if self.documents else 0.0
        statistics = {
            name: mean if share is None else self.quantile(share) for name, share in shares.items()
        }
        return {**statistics, "empty": int(self.counts[self.values == 0].sum())}

    def quantile(self, fraction: float) -> int:
        """Return the shortest length that this fraction of the documents does not exceed."""
        if not self.documents:
            return 0
        at = int(np.searchsorted(np.cumsum(self.counts), (fraction - 1e-9) * self.documents))
        return int(self.values[min(at, len(self.values) - 1)])


@dataclass(frozen=True)
class Sample:
    """Beginning of a document.

    document   number of the document, from 0
    tokens     number of tokens of the whole document
    ids        the first token ids
    text       text of these ids; None without a tokenizer
    runs       ("+", ids or text) of consecutive tokens in the loss, ("-", ...) of those outside it;
               None without a mask
    """

    document: int
    tokens: int
    ids: list[int]
    text: str | None
    runs: list[tuple[str, str]] | None = None


@dataclass
class Inspection:
    """Report on a data set.

    prefix           path of its files without the suffix
    index            its index; None if .idx cannot be read at all
    file_bytes       {suffix: size in bytes} of the files that exist
    problems         problems, each with its file and, if known, byte; at most PROBLEMS_PER_KIND of
                     each kind in `counts`
    counts           number of all problems of a kind, for the kinds that can be frequent
    tokens_scanned   number of tokens that were read and checked
    lengths          lengths of its documents; None if the index is damaged, or .bin is missing or
                     of another length
    samples          beginnings of documents
    mask             report on its loss mask, whose problems are in `problems`, too; None without
    record           record of the tokenizer that wrote it; None if unknown
    ones             number of scanned tokens with id 1
    """

    prefix: str
    index: Index | None = None
    file_bytes: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    tokens_scanned: int = 0
    lengths: LengthCounts | None = None
    samples: list[Sample] = field(default_factory=list)
    mask: Inspection | None = None
    record: TokenizerRecord | None = None
    ones: int = 0

    @property
    def sound(self) -> bool:
        """Return whether there are no problems."""
        return not self.problems

    def add(self, file: Path, byte: int | None, text: str) -> None:
        """Add a problem at a byte of a file, or of the whole file."""
        self.problems.append(f"{file}: {'' if byte is None else f'byte {byte}: '}{text}")

    def count_problems(self, kind: str, wrong: npt.NDArray[np.bool_]) -> list[int]:
        """Count the true entries as problems of a kind; return the positions of those to list."""
        room = max(PROBLEMS_PER_KIND - self.counts[kind], 0)
        positions = np.flatnonzero(wrong)
        self.counts[kind] += len(positions)
        listed: list[int] = positions[:room].tolist()
        return listed


def inspect(
    prefix: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    validate: bool = False,
    documents: Sequence[int] = (),
    num_samples: int = 0,
    sample_tokens: int = 128,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Inspection:
    """Check a data set, count its lengths, and decode some documents.

    The entire index is checked; with `validate`, so are all tokens of an integer type. Ids must not
    be negative. They must be in the vocabulary of `tokenizer`; without `tokenizer`, below
    `vocab_size`; without either, in the vocabulary of the tokenizer that wrote the data, if that is
    known. A loss mask next to the data is checked in the same way.

    tokenizer       decodes the samples; it is a problem if another one wrote the data
    documents       the documents to sample; if empty, the first `num_samples`. Unreadable ones are
                    omitted
    sample_tokens   maximum length of a sample
    on_progress     called with the number of bytes of .bin read so far, then with those of the
                    mask's .bin

    Raises DataError if there are no files at all, and ConfigError for documents that the data set
    does not have.
    """
    name = os.fspath(prefix)
    files = {path.suffix: path for path in (bin_path(name), idx_path(name))}
    inspection = Inspection(
        name, file_bytes={end: path.stat().st_size for end, path in files.items() if path.is_file()}
    )
    if not inspection.file_bytes:
        raise DataError(
            f"{name}.idx, {name}.bin: no such files: give the common part of both names, without "
            "the suffix"
        )
    for suffix in (".idx", ".bin"):
        if suffix not in inspection.file_bytes:
            inspection.add(files[suffix], None, "no such file")
    try:
        if ".idx" in inspection.file_bytes:
            inspection.index = map_index(files[".idx"])
            _check_sequences(inspection, inspection.index)
            _check_documents(inspection, inspection.index)
            if inspection.sound:
                inspection.lengths = count_lengths(inspection.index)
            record = None
            try:
                inspection.record = record = read_record(name)
            except DataError as error:
                path = record_path(name)
                inspection.add(path, None, str(error).removeprefix(str(path)).lstrip(": "))
            if (
                tokenizer is not None
                and record is not None
                and record.digest
                and digest(tokenizer, record.vocab_size) not in (record.digest, "")
            ):
                inspection.add(record_path(name), None, "another tokenizer wrote the data")
            if validate and ".bin" in inspection.file_bytes and inspection.index.dtype.kind in "iu":
                limit = tokenizer.vocab_size if tokenizer is not None else vocab_size
                if limit is None and record is not None:
                    limit = record.vocab_size
                _check_tokens(inspection, inspection.index, limit, on_progress)
    except DataError as error:
        inspection.add(files[".idx"], None, str(error).removeprefix(f"{files['.idx']}: "))
    except OSError as error:
        inspection.add(Path(error.filename or name), None, f"cannot be read: {error.strerror}")
    mask = mask_prefix(name)
    if len(data_files(name)) > len(files):
        inspection.mask = inspect(mask, vocab_size=2, validate=validate, on_progress=on_progress)
        inspection.problems += inspection.mask.problems
        if inspection.sound and not _same_structure(inspection, inspection.mask):
            inspection.add(
                idx_path(mask), None, "its type, sequences or documents do not fit the data"
            )
    if inspection.index is not None:
        selected = list(documents) or list(
            range(min(num_samples, len(inspection.index.document_indices) - 1))
        )
        inspection.samples = _take_samples(name, selected, tokenizer, sample_tokens)
    return inspection


def _same_structure(inspection: Inspection, mask: Inspection) -> bool:
    """Return whether a mask has a mask's type, and the lengths of the data's sequences."""
    assert inspection.index is not None and mask.index is not None, "both are sound"
    return mask.index.dtype == MASK_DTYPE and all(
        np.array_equal(getattr(inspection.index, name), getattr(mask.index, name))
        for name in ("sizes", "document_indices")
    )


def _check_sequences(inspection: Inspection, index: Index) -> None:
    """Check sizes and pointers, and that the last sequence ends at the end of .bin."""
    path = idx_path(inspection.prefix)
    itemsize = index.dtype.itemsize
    count = len(index.sizes)
    end = 0
    for start in range(0, count, _BLOCK_ENTRIES):
        sizes = index.sizes[start : start + _BLOCK_ENTRIES].astype(np.int64)
        pointers = index.pointers[start : start + _BLOCK_ENTRIES]
        with np.errstate(over="ignore"):  # pointers may be anything
            ends = pointers + sizes * itemsize
        expected = np.concatenate(([end], ends[:-1]))
        for at in inspection.count_problems("size", sizes < 0):
            inspection.add(
                path,
                HEADER.size + 4 * (start + at),
                f"sequence {start + at} has {sizes[at]} tokens",
            )
        for at in inspection.count_problems("pointer", pointers != expected):
            text = (
                f"sequence {start + at} starts at byte {pointers[at]} of .bin, not at the end of "
                "the previous one, "
            )
            inspection.add(
                path, HEADER.size + 4 * count + 8 * (start + at), f"{text}{expected[at]}"
            )
        end = int(ends[-1])
    actual = inspection.file_bytes.get(".bin", end)
    if actual < end:
        sequence = _sequence_at(index, actual)
        text = f"truncated: {actual} of {end} bytes; sequences from {sequence} on are cut off"
        inspection.add(bin_path(inspection.prefix), actual, text)
    elif actual > end:
        text = (
            f"{actual - end} bytes follow the last sequence, if tokens are {index.dtype} as "
            ".idx says"
        )
        inspection.add(bin_path(inspection.prefix), max(end, 0), text)


def _check_documents(inspection: Inspection, index: Index) -> None:
    """Check that document boundaries ascend from 0 to the number of sequences."""
    path = idx_path(inspection.prefix)
    boundaries = index.document_indices
    count = len(index.sizes)
    first = HEADER.size + 12 * count
    for at, expected, name in ((0, 0, "first"), (len(boundaries) - 1, count, "last")):
        if boundaries[at] != expected:
            inspection.add(
                path,
                first + 8 * at,
                f"the {name} document boundary is {boundaries[at]}, not {expected}",
            )
    for start in range(1, len(boundaries), _BLOCK_ENTRIES):
        block = boundaries[start - 1 : start + _BLOCK_ENTRIES]
        for at in inspection.count_problems("boundary", block[1:] < block[:-1]):
            text = (
                f"document boundary {start + at} is {block[at + 1]}, less than the previous one, "
                f"{block[at]}"
            )
            inspection.add(path, first + 8 * (start + at), text)


def _check_tokens(
    inspection: Inspection, index: Index, vocab_size: int | None, on_progress: Callable[[int], None]
) -> None:
    """Check that every id is at least 0 and in the vocabulary, if its size is known."""
    path = bin_path(inspection.prefix)
    itemsize = index.dtype.itemsize
    position = 0
    limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size - 1
    with path.open("rb") as file:
        while data := file.read(_BLOCK_BYTES):
            tokens: npt.NDArray[Any] = np.frombuffer(data, index.dtype, len(data) // itemsize)
            if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) > limit):
                for at in inspection.count_problems(
                    "vocabulary", (tokens < 0) | (tokens.astype(np.int64) > limit)
                ):
                    byte = position + at * itemsize
                    what = (
                        "negative" if tokens[at] < 0 else f"not in the vocabulary of {vocab_size}"
                    )
                    text = f"id {tokens[at]} (sequence {_sequence_at(index, byte)}) is {what}"
                    inspection.add(path, byte, text)
            position += len(data)
            inspection.tokens_scanned += len(tokens)
            inspection.ones += int(np.count_nonzero(tokens == 1))
            on_progress(position)
    if wrong := inspection.counts["vocabulary"]:
        text = (
            f"{wrong} of {inspection.tokens_scanned} tokens have wrong ids; if most do, the type "
            "in .idx may be wrong"
        )
        inspection.add(path, None, text)


def _sequence_at(index: Index, byte: int) -> int:
    """Return the sequence at a byte of .bin.

    numpy.searchsorted would copy the pointers, which are not aligned.
    """
    return max(bisect_right(index.pointers, byte) - 1, 0)


def count_lengths(index: Index) -> LengthCounts:
    """Count the tokens per document of an undamaged index, in blocks."""
    totals: Counter[int] = Counter()
    boundaries = index.document_indices
    count = len(index.sizes)
    end = int(index.pointers[-1]) + int(index.sizes[-1]) * index.dtype.itemsize if count else 0
    for start in range(0, len(boundaries) - 1, _BLOCK_ENTRIES):
        at = boundaries[start : start + _BLOCK_ENTRIES + 1]
        bytes_before = np.full(len(at), end, np.int64)
        bytes_before[at < count] = index.pointers[at[at < count]]
        lengths, number = np.unique(
            np.diff(bytes_before) // index.dtype.itemsize, return_counts=True
        )
        totals.update(dict(zip(lengths.tolist(), number.tolist(), strict=True)))
    values = sorted(totals)
    return LengthCounts(
        np.array(values, np.int64), np.array([totals[value] for value in values], np.int64)
    )


def _take_samples(
    name: str, documents: Sequence[int], tokenizer: Tokenizer | None, sample_tokens: int
) -> list[Sample]:
    """Return the beginnings of the documents that can be read.

    Raises ConfigError for a document that the data set does not have.
    """
    try:
        dataset = IndexedDataset(name, mmap=False)
        if len(data_files(name)) > 2:
            dataset.open_mask()
    except (DataError, NodeError):  # its problems are listed already
        return []
    samples = []
    for document in documents:
        if not 0 <= document < dataset.num_documents:
            raise ConfigError(
                f"--documents {document}: {name} has {dataset.num_documents} documents, numbered "
                "from 0"
            )
        first, stop = dataset.document_indices[document : document + 2].tolist()
        ids: list[int] = []
        marks: list[int] = []
        try:
            total = dataset.tokens_between(first, stop)
            while first < stop and len(ids) < sample_tokens:
                length = min(sample_tokens - len(ids), int(dataset.sizes[first]))
                ids += dataset.read(first, 0, length).tolist()
                if dataset.mask is not None:
                    marks += dataset.mask.read(first, 0, length).tolist()
                first += 1
        except (DataError, NodeError, IndexError):
            continue
        samples.append(
            Sample(
                document,
                total,
                ids,
                None if tokenizer is None else decode_leniently(tokenizer, ids),
                None if dataset.mask is None else _runs(ids, marks, tokenizer),
            )
        )
    return samples


def _runs(
    ids: Sequence[int], marks: Sequence[int], tokenizer: Tokenizer | None
) -> list[tuple[str, str]]:
    """Return the runs of tokens inside and outside the loss, as ids or text; see `Sample`."""
    runs = []
    for marked, pairs in groupby(zip(ids, marks, strict=True), lambda pair: pair[1] == 1):
        ((_, text),) = text_of([i for i, _ in pairs], None, tokenizer)
        runs.append(("+" if marked else "-", text))
    return runs


def text_of(
    ids: Sequence[int], marks: Sequence[int] | None, tokenizer: Tokenizer | None
) -> list[tuple[str, str]]:
    """Return the runs of tokens inside and outside the loss as in `Sample`; ("", all) without marks."""
    if marks is not None:
        return _runs(ids, marks, tokenizer)
    text = " ".join(map(str, ids)) if tokenizer is None else decode_leniently(tokenizer, ids)
    return [("", text)]


def decode_leniently(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of ids; those outside of the vocabulary are shown as <id N>."""
    runs = groupby(ids, lambda i: 0 <= i < tokenizer.vocab_size)
    return "".join(
        tokenizer.decode(list(run)) if known else "".join(f"<id {i}>" for i in run)
        for known, run in runs
    )


def plot_lengths(results: Sequence[Inspection], output: str | os.PathLike[str]) -> None:
    """Draw the lengths of documents, a row for each data set.

    Raises ConfigError if matplotlib cannot be imported, if `output` cannot be written, or if no
    data set has lengths to draw.
    """
    shown = [(r.prefix, r.lengths) for r in results if r.lengths is not None and r.lengths.tokens]
    if not shown:
        raise ConfigError(f"--plot {output}: no data set has a document with tokens in it")
    pyplot = drawing.pyplot(instead="leave --plot out")
    figure, rows = pyplot.subplots(
        len(shown),
        1,
        figsize=(8, 1.2 + 2.8 * len(shown)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for (prefix, lengths), axes in zip(shown, rows[:, 0], strict=True):
        bins = int(np.ceil(np.log10(lengths.values.max() + 1) * BINS_PER_DECADE)) + 1
        # Lengths are integers: distinct edges between integers leave no bin that must be empty.
        edges = np.unique(np.floor(10 ** (np.arange(bins + 1) / BINS_PER_DECADE))) - 0.5
        for label, weights, style in (
            (
                "documents",
                lengths.counts,
                {"histtype": "stepfilled", "color": "tab:blue", "alpha": 0.35},
            ),
            (
                "tokens",
                lengths.counts * lengths.values,
                {"histtype": "step", "color": "tab:orange", "linewidth": 1.8},
            ),
        ):
            shares = weights / weights[lengths.values > 0].sum()
            axes.hist(lengths.values, edges, weights=shares, label=label, **style)
        summary = lengths.summary()
        for name, line in (("median", ":"), ("mean", "-"), ("p99", "--")):
            label = f"{name} {summary[name]:,.0f}"
            axes.axvline(summary[name], color="0.25", linewidth=1, linestyle=line, label=label)
        axes.set_xscale("log")
        axes.set_ylabel("share")
        axes.set_title(
            f"{os.path.basename(prefix)}: {lengths.documents:,} documents, {lengths.tokens:,} "
            "tokens",
            fontsize=10,
        )
        drawing.tidy(axes)
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    rows[-1, 0].set_xlabel("tokens per document")
    drawing.save(figure, Path(output), dpi=120, choose="another file for --plot")
