"""What is in a data set: counts, lengths of documents, decoded samples, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron import drawing
from megatron.data.indexed_dataset import Index, IndexedDataset, bin_path, idx_path
from megatron.data.prepare.check import Findings, check
from megatron.data.tokenizer import Tokenizer
from megatron.errors import ConfigError, DataError

_BLOCK_ENTRIES = 1 << 18
BINS_PER_DECADE = 8


@dataclass(frozen=True)
class LengthCounts:
    """How many documents have which number of tokens: `values` int64 ascending, `counts` int64 of each.

    Exact, and small for any number of documents: n different lengths need n * n / 2 tokens.
    """

    values: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @property
    def documents(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int((self.values * self.counts).sum())

    @property
    def empty(self) -> int:
        return int(self.counts[self.values == 0].sum())

    @property
    def mean(self) -> float:
        return self.tokens / self.documents if self.documents else 0.0

    def quantile(self, fraction: float) -> int:
        """The smallest length that at least this fraction of the documents does not exceed."""
        if not self.documents:
            return 0
        rank = fraction * self.documents
        at = int(np.searchsorted(np.cumsum(self.counts), rank - 1e-9 * self.documents))
        return int(self.values[min(at, len(self.values) - 1)])

    def histogram(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(edges [n + 1], documents [n], tokens [n]) over bins of equal width in the logarithm; without empty ones."""
        values, counts = self.values[self.values > 0], self.counts[self.values > 0]
        if not len(values):
            return np.array([1.0, 10.0]), np.zeros(1, np.int64), np.zeros(1, np.int64)
        # Lengths are whole numbers: edges between them, none of them twice, leave no bin that must be empty.
        last = int(np.ceil(np.log10(values[-1] + 1) * BINS_PER_DECADE)) + 1
        edges = np.unique(np.floor(10 ** (np.arange(last + 1) / BINS_PER_DECADE))) - 0.5
        first = int(np.searchsorted(edges, values[0])) - 1
        edges = edges[first : int(np.searchsorted(edges, values[-1])) + 1]
        which = np.searchsorted(edges, values) - 1
        documents, tokens = np.zeros(len(edges) - 1, np.int64), np.zeros(len(edges) - 1, np.int64)
        np.add.at(documents, which, counts)
        np.add.at(tokens, which, counts * values)
        return edges, documents, tokens


@dataclass(frozen=True)
class Sample:
    """The beginning of a document: its ids, and their text where there is a tokenizer."""

    document: int
    tokens: int
    ids: list[int]
    text: str | None


@dataclass
class Inspection:
    """All that is known of a data set. `lengths` is None when the index is too damaged to have any."""

    findings: Findings
    file_bytes: dict[str, int] = field(default_factory=dict)
    lengths: LengthCounts | None = None
    samples: list[Sample] = field(default_factory=list)

    @property
    def prefix(self) -> str:
        return self.findings.prefix

    @property
    def sound(self) -> bool:
        return not self.findings.problems


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
    """Check a data set, count its lengths, and decode the beginnings of `documents` or of the first `num_samples`.

    Ids are checked against the tokenizer's vocabulary, or `vocab_size`. The whole .bin is read with `validate` only.
    Samples are taken of sound data sets, and of damaged ones as far as they can be read. Raises DataError when there
    are no files at all and ConfigError for documents that the data set does not have.
    """
    name = os.fspath(prefix)
    if not idx_path(name).is_file() and not bin_path(name).is_file():
        raise DataError(
            f"{name}.idx, {name}.bin: no such files: give the common part of both names, without the suffix"
        )
    limit = tokenizer.vocab_size if tokenizer is not None else vocab_size
    findings = check(name, vocab_size=limit, full=validate, on_progress=on_progress)
    result = Inspection(findings, {p.suffix: p.stat().st_size for p in (bin_path(name), idx_path(name)) if p.is_file()})
    if findings.index is None:
        return result
    if not any(findings.counts[kind] for kind in ("size", "pointer", "width", "boundary")):
        result.lengths = count_lengths(findings.index)
    wanted = list(documents) or list(range(min(num_samples, len(findings.index.document_indices) - 1)))
    if wanted:
        result.samples = _take_samples(name, wanted, tokenizer, sample_tokens)
    return result


def count_lengths(index: Index) -> LengthCounts:
    """Tokens per document, in blocks: memory does not grow with the number of documents."""
    values, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    num_sequences, boundaries = len(index.sizes), index.document_indices
    if num_sequences:
        end = int(index.pointers[-1]) + int(index.sizes[-1]) * index.dtype.itemsize
    else:
        end = 0
    for start in range(0, len(boundaries) - 1, _BLOCK_ENTRIES):
        at = boundaries[start : start + _BLOCK_ENTRIES + 1]
        bytes_before = np.full(len(at), end, np.int64)
        inside = at < num_sequences
        bytes_before[inside] = index.pointers[at[inside]]
        lengths, number = np.unique(np.diff(bytes_before) // index.dtype.itemsize, return_counts=True)
        joined, place = np.unique(np.concatenate([values, lengths]), return_inverse=True)
        total = np.zeros(len(joined), np.int64)
        np.add.at(total, place, np.concatenate([counts, number]))
        values, counts = joined, total
        index.release()
    return LengthCounts(values, counts)


def _take_samples(name: str, wanted: Sequence[int], tokenizer: Tokenizer | None, sample_tokens: int) -> list[Sample]:
    try:
        dataset = IndexedDataset(name, mmap=False)
    except DataError:  # its problems are in the findings
        return []
    samples = []
    for document in wanted:
        if not 0 <= document < dataset.num_documents:
            raise ConfigError(f"--documents {document}: {name} has {dataset.num_documents} documents, the first is 0")
        try:
            samples.append(_sample(dataset, document, tokenizer, sample_tokens))
        except (DataError, IndexError):
            continue
    return samples


def _sample(dataset: IndexedDataset, document: int, tokenizer: Tokenizer | None, sample_tokens: int) -> Sample:
    first, stop = dataset.document_indices[document : document + 2].tolist()
    total = dataset.tokens_between(first, stop)
    parts: list[npt.NDArray[Any]] = []
    left = sample_tokens
    for sequence in range(first, stop):
        if left <= 0:
            break
        parts.append(dataset.read(sequence, 0, min(left, int(dataset.sizes[sequence]))))
        left -= len(parts[-1])
    ids = np.concatenate(parts).tolist() if parts else []
    return Sample(document, total, ids, None if tokenizer is None else decode_leniently(tokenizer, ids))


def decode_leniently(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids, of which some may be no entries of the vocabulary: they are shown as <id N>."""
    parts: list[str] = []
    run: list[int] = []
    for i in ids:
        if 0 <= i < tokenizer.vocab_size:
            run.append(int(i))
            continue
        parts += [tokenizer.decode(run), f"<id {i}>"] if run else [f"<id {i}>"]
        run = []
    return "".join([*parts, tokenizer.decode(run)] if run else parts)


def as_json(result: Inspection) -> dict[str, Any]:
    """All of an inspection in what JSON can hold."""
    findings, index, lengths = result.findings, result.findings.index, result.lengths
    record: dict[str, Any] = {"prefix": result.prefix, "sound": result.sound, "files": result.file_bytes}
    if index is not None:
        record |= {
            "dtype": str(index.dtype),
            "sequences": len(index.sizes),
            "documents": len(index.document_indices) - 1,
            "has_modes": index.modes is not None,
        }
    if lengths is not None:
        edges, documents, tokens = lengths.histogram()
        record["tokens"] = lengths.tokens
        record["tokens_per_document"] = {
            "min": lengths.quantile(0.0),
            "median": lengths.quantile(0.5),
            "mean": lengths.mean,
            "p99": lengths.quantile(0.99),
            "max": lengths.quantile(1.0),
            "empty": lengths.empty,
        }
        record["histogram"] = {
            "edges": edges.tolist(),
            "documents": documents.tolist(),
            "tokens": tokens.tolist(),
        }
    record["tokens_scanned"], record["scanned_all"] = findings.tokens_scanned, findings.scanned_all
    record["problem_counts"] = {kind: count for kind, count in findings.counts.items() if count}
    record["problems"] = [vars(problem) for problem in findings.problems]
    record["samples"] = [vars(sample) for sample in result.samples]
    return record


def plot_lengths(results: Sequence[Inspection], output: str | os.PathLike[str]) -> None:
    """Draw the lengths of documents, a row for each data set. Raises ConfigError when `output` cannot be written or
    no data set has lengths to draw."""
    shown = [r for r in results if r.lengths is not None and r.lengths.documents > r.lengths.empty]
    if not shown:
        raise ConfigError(f"--plot {output}: no data set has a document with tokens in it")
    pyplot = drawing.pyplot(instead="leave --plot out")
    figure, rows = pyplot.subplots(
        len(shown), 1, figsize=(8, 1.2 + 2.8 * len(shown)), sharex=True, squeeze=False, layout="constrained"
    )
    for result, axes in zip(shown, rows[:, 0], strict=True):
        assert result.lengths is not None, "filtered above"
        _draw_lengths(axes, os.path.basename(result.prefix), result.lengths)
    rows[-1, 0].set_xlabel("tokens per document")
    drawing.save(figure, Path(output), dpi=120, choose="another file for --plot")


def _draw_lengths(axes: Any, name: str, lengths: LengthCounts) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter

    edges, documents, tokens = lengths.histogram()
    axes.stairs(documents / documents.sum(), edges, fill=True, color="tab:blue", alpha=0.35, label="documents")
    axes.stairs(tokens / tokens.sum(), edges, color="tab:orange", linewidth=1.8, label="tokens")
    axes.set_ylim(0, 1.25 * max((documents / documents.sum()).max(), (tokens / tokens.sum()).max()))
    marks = (
        ("median", lengths.quantile(0.5), ":"),
        ("mean", lengths.mean, "-"),
        ("99 %", lengths.quantile(0.99), "--"),
    )
    for label, value, style in marks:
        if value > 0:
            axes.axvline(value, color="0.25", linewidth=1, linestyle=style, label=f"{label} {value:,.0f}")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel("share")
    empty = f", {lengths.empty:,} empty" if lengths.empty else ""
    axes.set_title(f"{name}: {lengths.documents:,} documents{empty}, {lengths.tokens:,} tokens", fontsize=10)
    drawing.tidy(axes)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
