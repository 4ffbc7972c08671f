"""What is wrong with a data set: its .idx against its .bin, and its ids against a vocabulary.

Everything is read in blocks, so memory does not grow with the data, and what is found is listed up to a limit per kind.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.indexed_dataset import DTYPE_CODES, HEADER, Index, bin_path, idx_path, map_index
from megatron.errors import DataError

PROBLEMS_PER_KIND = 5
_BLOCK_ENTRIES = 1 << 18
_BLOCK_BYTES = 1 << 22
_SAMPLE_BYTES = 1 << 16  # a quick look reads this much at the start, in the middle and at the end
_TYPE_CODE_AT = 17  # in .idx, after magic and version
_SUSPICIOUS_TOKENS = 64
_CANDIDATES = tuple(dtype for dtype in DTYPE_CODES.values() if dtype.kind in "iu")


@dataclass(frozen=True)
class Problem:
    """One fault. `byte` is the offset in `file` where it is or begins, None where it has no place."""

    kind: str
    file: str
    byte: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {'' if self.byte is None else f'byte {self.byte}: '}{self.text}"


@dataclass
class Findings:
    """Problems, `PROBLEMS_PER_KIND` of each kind at most; `counts` has how many there are of each.

    `index` is None when .idx cannot be read at all. `scanned_all` says whether every token was looked at;
    `out_of_range` of the `tokens_scanned` are no entries of the vocabulary.
    """

    prefix: str
    index: Index | None = None
    bin_bytes: int | None = None
    problems: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    scanned_all: bool = False
    tokens_scanned: int = 0
    out_of_range: int = 0

    def add(self, kind: str, file: Path, byte: int | None, text: str, count: int = 1) -> None:
        if self.room(kind):
            self.problems.append(Problem(kind, str(file), byte, text))
        self.counts[kind] += count

    def room(self, kind: str) -> int:
        """How many more problems of a kind are listed."""
        return max(PROBLEMS_PER_KIND - self.counts[kind], 0)


def check(
    prefix: str,
    *,
    vocab_size: int | None = None,
    full: bool = False,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Findings:
    """Look for every kind of damage that the format lets one see.

    .idx is read as a whole. Of .bin, all is read with `full`, otherwise a little at three places. Ids are to be in
    0..vocab_size-1, or not negative where `vocab_size` is None. `on_progress` gets the bytes of .bin read. Finds what
    is wrong instead of raising.
    """
    findings = Findings(prefix)
    for path in (idx_path(prefix), bin_path(prefix)):
        if not path.is_file():
            findings.add("missing", path, None, "no such file")
    try:
        if bin_path(prefix).is_file():
            findings.bin_bytes = bin_path(prefix).stat().st_size
        if idx_path(prefix).is_file():
            findings.index = map_index(idx_path(prefix))
    except DataError as error:
        findings.add("index", idx_path(prefix), None, str(error).removeprefix(f"{idx_path(prefix)}: "))
    except OSError as error:
        findings.add("unreadable", Path(error.filename or prefix), None, f"cannot be read: {error.strerror}")
    if findings.index is None:
        return findings
    total = _check_sequences(findings, findings.index)
    _explain_pointers(findings, findings.index)
    _check_documents(findings, findings.index)
    if findings.bin_bytes is None:
        return findings
    _check_length(findings, findings.index, total, findings.bin_bytes)
    try:
        _check_tokens(findings, findings.index, vocab_size, full, on_progress)
    except OSError as error:
        findings.add("unreadable", bin_path(prefix), None, f"cannot be read: {error.strerror}")
    return findings


def _check_sequences(findings: Findings, index: Index) -> int:
    """Sizes against pointers, each with its neighbour. Returns the tokens that the sizes add up to."""
    path, itemsize, count = idx_path(findings.prefix), index.dtype.itemsize, len(index.sizes)
    at_pointers = HEADER.size + 4 * count
    total, expected_first = 0, 0
    for start in range(0, count, _BLOCK_ENTRIES):
        sizes = index.sizes[start : start + _BLOCK_ENTRIES].astype(np.int64)
        pointers = index.pointers[start : start + _BLOCK_ENTRIES]
        total += int(sizes[sizes > 0].sum())
        negative = np.flatnonzero(sizes < 0)
        for at in negative[: findings.room("size")].tolist():
            findings.add(
                "size", path, HEADER.size + 4 * (start + at), f"sequence {start + at} has {sizes[at]} tokens", 0
            )
        findings.counts["size"] += len(negative)
        with np.errstate(over="ignore"):  # pointers may be anything
            ends = pointers + sizes * itemsize
        expected = np.concatenate(([expected_first], ends[:-1]))
        wrong = np.flatnonzero(pointers != expected)
        for at in wrong[: findings.room("pointer")].tolist():
            sequence = start + at
            where = "it is the first" if sequence == 0 else f"the one before it ends at {expected[at]}"
            text = f"sequence {sequence} starts at byte {pointers[at]} of .bin, and {where}"
            findings.add("pointer", path, at_pointers + 8 * sequence, text, 0)
        findings.counts["pointer"] += len(wrong)
        expected_first = int(ends[-1])
        index.release()
    return total


def _explain_pointers(findings: Findings, index: Index) -> None:
    """Where pointers are wrong because the type is, say so once instead of at every sequence."""
    for width in (1, 2, 4, 8) if findings.counts["pointer"] else ():
        if _pointers_fit(index, width):
            findings.problems = [p for p in findings.problems if p.kind != "pointer"]
            findings.counts["pointer"] = 0
            text = f"the type is {index.dtype}, but the pointers count {width} bytes per token"
            findings.add("width", idx_path(findings.prefix), _TYPE_CODE_AT, text)
            return


def _pointers_fit(index: Index, width: int) -> bool:
    """Whether sequences lie one after the other when a token has so many bytes."""
    end = 0
    for start in range(0, len(index.sizes), _BLOCK_ENTRIES):
        ends = end + np.cumsum(index.sizes[start : start + _BLOCK_ENTRIES], dtype=np.int64) * width
        starts = np.concatenate(([end], ends[:-1]))
        if not np.array_equal(index.pointers[start : start + _BLOCK_ENTRIES], starts):
            return False
        end = int(ends[-1])
        index.release()
    return True


def _check_documents(findings: Findings, index: Index) -> None:
    path, boundaries, count = idx_path(findings.prefix), index.document_indices, len(index.sizes)
    at_documents = HEADER.size + 12 * count
    for at, wanted, name in ((0, 0, "first"), (len(boundaries) - 1, count, "last")):
        if boundaries[at] != wanted:
            text = f"the {name} document boundary is {boundaries[at]}, not {wanted}"
            findings.add("boundary", path, at_documents + 8 * at, text)
    for start in range(1, len(boundaries), _BLOCK_ENTRIES):
        block = boundaries[start - 1 : start + _BLOCK_ENTRIES]
        falls = np.flatnonzero(block[1:] < block[:-1])
        for at in falls[: findings.room("boundary")].tolist():
            text = f"document boundary {start + at} is {block[at + 1]}, less than {block[at]}, the one before it"
            findings.add("boundary", path, at_documents + 8 * (start + at), text, 0)
        findings.counts["boundary"] += len(falls)
        index.release()


def _check_length(findings: Findings, index: Index, total: int, bin_bytes: int) -> None:
    """Length of .bin against the tokens that .idx describes, and whether another type would fit."""
    path, itemsize = bin_path(findings.prefix), index.dtype.itemsize
    expected = total * itemsize
    if findings.counts["size"]:  # then only the pointers tell
        expected = max(int(index.pointers[-1]) + max(int(index.sizes[-1]), 0) * itemsize, 0)
        total = 0
    if bin_bytes == expected:
        return
    others = sorted({str(d) for d in _CANDIDATES if total and d.itemsize * total == bin_bytes})
    if others:
        text = f"{bin_bytes} bytes are {total} tokens of type {' or '.join(others)}, but .idx says {index.dtype}"
        findings.add("type", path, None, text)
    elif bin_bytes < expected:
        inside = _sequence_at(index, bin_bytes)
        text = f"truncated: {bin_bytes} of {expected} bytes; sequences from {inside} on are cut off"
        findings.add("truncated", path, bin_bytes, text)
    else:
        findings.add("trailing", path, expected, f"{bin_bytes - expected} bytes follow the last sequence")


def _sequence_at(index: Index, byte: int) -> int:
    """The sequence that holds a byte of .bin. Numpy's search would copy the pointers, which are not aligned."""
    return max(bisect_right(index.pointers, byte) - 1, 0)


def _check_tokens(
    findings: Findings, index: Index, vocab_size: int | None, full: bool, on_progress: Callable[[int], None]
) -> None:
    if index.dtype.kind == "f":
        return  # features of other models; ids are whole numbers
    path, done = bin_path(findings.prefix), 0
    for position, tokens in _token_blocks(path, index.dtype, findings.bin_bytes or 0, full):
        _check_ids(findings, index, position, tokens, vocab_size)
        if not done:
            _check_padding(findings, index, tokens)
        done += tokens.nbytes
        findings.tokens_scanned += len(tokens)
        on_progress(done)
    findings.scanned_all = full
    if findings.out_of_range:
        limit = "negative" if vocab_size is None else f"outside of 0..{vocab_size - 1}"
        scope = "all" if full else "the"
        text = f"{findings.out_of_range} of {scope} {findings.tokens_scanned} tokens looked at are {limit}"
        better = _fitting_types(path, index.dtype, findings.bin_bytes or 0, vocab_size)
        if better:
            text += f"; as {' or '.join(better)} they are in range, so .idx may have the wrong type"
        first = next(at for at, problem in enumerate(findings.problems) if problem.kind == "vocabulary")
        findings.problems.insert(first, Problem("vocabulary", str(path), None, text))


def _token_blocks(path: Path, dtype: np.dtype[Any], size: int, full: bool) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """(byte, tokens) of all of a file, or of three places in it."""
    block = _BLOCK_BYTES if full else _SAMPLE_BYTES
    size -= size % dtype.itemsize
    if full or size <= 3 * block:
        places = range(0, size, block)
    else:
        middle, last = (at - at % dtype.itemsize for at in ((size - block) // 2, size - block))
        places = [0, middle, last]  # type: ignore[assignment]
    with path.open("rb") as file:
        for place in places:
            file.seek(place)
            data = file.read(min(block, size - place))
            yield place, np.frombuffer(data, dtype, len(data) // dtype.itemsize)


def _check_ids(
    findings: Findings, index: Index, position: int, tokens: npt.NDArray[Any], vocab_size: int | None
) -> None:
    """Ids of a block that starts at byte `position` against the vocabulary."""
    if not len(tokens):
        return
    limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size - 1
    if int(tokens.min()) >= 0 and int(tokens.max()) <= limit:
        return
    wrong = np.flatnonzero((tokens < 0) | (tokens.astype(np.int64) > limit))
    for at in wrong[: findings.room("vocabulary")].tolist():
        byte = position + at * index.dtype.itemsize
        sequence = _sequence_at(index, byte)
        offset = (byte - int(index.pointers[sequence])) // index.dtype.itemsize if len(index.pointers) else at
        text = f"id {tokens[at]} (sequence {sequence}, token {offset}) is "
        text += "negative" if tokens[at] < 0 else f"not in the vocabulary of {vocab_size}"
        findings.add("vocabulary", bin_path(findings.prefix), byte, text, 0)
    findings.counts["vocabulary"] += len(wrong)
    findings.out_of_range += len(wrong)


def _check_padding(findings: Findings, index: Index, tokens: npt.NDArray[Any]) -> None:
    step = _zero_step(tokens)
    if step > 1:
        width = index.dtype.itemsize * step
        text = f"of every {step} tokens all but the first are 0: this looks like ids of {width} bytes, "
        text += f"and .idx says {index.dtype}"
        findings.add("type", bin_path(findings.prefix), 0, text)


def _zero_step(tokens: npt.NDArray[Any]) -> int:
    """n where all but every n-th token is 0, as when ids of a wide type are read as a narrower one; 1 for others."""
    for step in (8, 4, 2):
        rows = tokens[: len(tokens) // step * step].reshape(-1, step)
        wide_enough = tokens.dtype.itemsize * step <= 8 and len(rows) >= _SUSPICIOUS_TOKENS
        if wide_enough and rows[:, 0].any() and not rows[:, 1:].any():
            return step
    return 1


def _fitting_types(path: Path, dtype: np.dtype[Any], size: int, vocab_size: int | None) -> list[str]:
    """Other integer types that make all ids at three places in the file fit the vocabulary."""
    if vocab_size is None:  # any unsigned type would do, so only the sign can be what is wrong
        return [str(other) for other in _CANDIDATES if other.kind == "u" and other.itemsize == dtype.itemsize]
    fitting = []
    for other in _CANDIDATES:
        # A type that cannot hold the vocabulary fits anything.
        if other == dtype or size % other.itemsize or np.iinfo(other).max < vocab_size - 1:
            continue
        blocks = [tokens for _, tokens in _token_blocks(path, other, size, False) if len(tokens)]
        in_range = all(int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size for tokens in blocks)
        if in_range and all(_zero_step(tokens) == 1 for tokens in blocks):
            fitting.append(str(other))
    return fitting
