"""Streams of tokens to evaluate, from texts or token files, and their windows.

Tokens are in the order and form of training data: an end-of-document token (EOD) precedes every
document of a text. The EOD before the first document is the context of that document's first token.
Memory is bounded by the longest document; long plain texts are read in blocks.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.data.indexed_dataset import IndexedDataset, SequenceSlices
from megatron.data.tokenizer import Tokenizer
from megatron.errors import DataError
from megatron_preparation.encode import PreprocessOptions, texts_of_block
from megatron_preparation.sources import (
    MAX_DOCUMENT_BYTES,
    InputFile,
    find_sources,
    open_source,
    read_errors,
    read_sources,
)

Ids = npt.NDArray[np.int64]
TEXT_BLOCK_BYTES = 1 << 20  # of a plain text that are read at once
SEGMENT_TOKENS = 1 << 20  # maximum number of tokens of a token file that are read at once
_CONTEXT_BYTES = 256  # on both sides of a cut, in which the tokens must not change
_CUTS = 64  # line ends that are tried before more text is read
_ROWS = {".jsonl", ".json", ".ndjson", ".parquet", ".pq"}


@dataclass(frozen=True)
class TokenSegment:
    """Consecutive tokens, the bytes of their text, and the bytes of the input read so far.

    text_bytes   in UTF-8, without EOD; None if it was not asked for or there is no tokenizer
    """

    tokens: Ids
    text_bytes: int | None
    read_bytes: int


@dataclass(frozen=True)
class Window:
    """Tokens int64 [context + 1], of which the predictions `start` to `stop` - 1 count.

    Prediction i is of token i + 1 from tokens 0 to i.
    """

    tokens: Ids
    start: int
    stop: int


def text_sources(paths: Sequence[str]) -> list[InputFile]:
    """Return the files of `paths`: JSON lines and parquet by their suffix, others as plain text.

    Raises DataError for a missing or empty file.
    """
    sources = []
    for source in (one for path in paths for one in find_sources([path])):
        rows = _ROWS & set(Path(source.path).suffixes)
        sources.append(source if rows else replace(source, kind="text"))
        if not source.size:
            raise DataError(f"{source.path}: the file is empty: there is nothing to evaluate")
    return sources


def text_segments(
    sources: Sequence[InputFile], json_key: str, tokenizer: Tokenizer
) -> Iterator[TokenSegment]:
    """Yield the tokens of the texts in files; `json_key` is the key or column of the text.

    Raises DataError, with file and location, for a text that cannot be read, decoded or tokenized.
    """
    options = PreprocessOptions({}, (json_key,))
    before = 0
    for source in sources:
        if source.kind == "text":
            opened = False
            for text, read in _text_blocks(source, tokenizer):
                tokens, _ = _encode([text], source, tokenizer)
                if len(tokens) and not opened:
                    tokens = np.insert(tokens, 0, tokenizer.eod)
                    opened = True
                yield TokenSegment(tokens, len(text.encode()), before + read)
        else:
            for block in read_sources([source], [json_key]):
                (texts,) = texts_of_block(block, options)
                tokens, sizes = _encode(texts, source, tokenizer)
                starts = (np.cumsum(sizes, dtype=np.int64) - sizes)[sizes > 0]
                bytes_ = sum(len(text.encode()) for text in texts)
                tokens = np.insert(tokens, starts, tokenizer.eod)
                yield TokenSegment(tokens, bytes_, before + block.file_bytes)
        before += source.size


def _encode(
    texts: Sequence[str], source: InputFile, tokenizer: Tokenizer
) -> tuple[Ids, npt.NDArray[np.int32]]:
    try:
        ids, sizes = tokenizer.encode_batch_arrays(texts, np.int64)
    except DataError as error:
        raise DataError(f"{source.path}: {error}") from error
    tokens = ids.astype(np.int64, copy=False)
    if tokenizer.behind:  # EOD precedes every document: drop the one that the tokenizer appends
        ends = np.cumsum(sizes, dtype=np.int64)[sizes > 0] - 1
        ended = tokens[ends] == tokenizer.eod
        tokens = np.delete(tokens, ends[ended])
        sizes[sizes > 0] -= ended
    return tokens, sizes


def _text_blocks(source: InputFile, tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Yield blocks of a text, and the bytes of the file read so far.

    The text is cut where this does not change the tokens.
    """
    buffer = bytearray()
    done = 0

    def decoded(size: int) -> str:
        try:
            return buffer[:size].decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source.path}: not UTF-8: {error.reason} at byte {done + error.start}"
            ) from None

    try:
        with open_source(source) as (stream, read_bytes):
            while block := stream.read(TEXT_BLOCK_BYTES):
                buffer += block if done or buffer else block.removeprefix(codecs.BOM_UTF8)
                if size := _cut(buffer, tokenizer):
                    yield decoded(size), read_bytes()
                    done += size
                    del buffer[:size]
                elif len(buffer) > MAX_DOCUMENT_BYTES:
                    raise DataError(
                        f"{source.path}: more than {MAX_DOCUMENT_BYTES} bytes from byte {done} on "
                        "without a line end at which the text can be cut for this tokenizer: give "
                        "JSON lines with shorter documents"
                    )
            if buffer:
                yield decoded(len(buffer)), source.size
    except read_errors() as error:
        raise DataError(f"{source.path}: cannot be read: {error}") from error


def _cut(buffer: bytearray, tokenizer: Tokenizer) -> int:
    """Return how many bytes to tokenize, up to one of the last line ends; 0 if no cut is safe.

    A cut is safe if the tokens on both sides of it are the same with and without it. Tokenizers
    that add a prefix to every text have no safe cuts.
    """
    end = len(buffer) - _CONTEXT_BYTES
    for _ in range(_CUTS):
        end = buffer.rfind(b"\n", 0, max(end, 0)) + 1
        if not end:
            return 0
        first = max(end - _CONTEXT_BYTES, 0)
        left, right = (
            bytes(side).decode(errors="ignore")
            for side in (buffer[first:end], buffer[end : end + _CONTEXT_BYTES])
        )
        joined, *separate = tokenizer.encode_batch([left + right, left, right])
        if joined == [i for side in separate for i in side]:
            return end
        end -= 1
    return 0


def file_segments(
    prefixes: Sequence[str], vocab_size: int, tokenizer: Tokenizer | None, *, count_bytes: bool
) -> Iterator[TokenSegment]:
    """Yield the tokens of token files as they are stored.

    If there is a tokenizer, an EOD is added before the first token of each file, and an EOD at the
    very end of a file is left out, since none follows the last document of a text. `count_bytes`:
    decode the tokens to count the bytes of the text; a sequence of more than SEGMENT_TOKENS tokens
    is decoded in segments. Raises DataError for damaged files and for ids of another vocabulary.
    """
    marks = [] if tokenizer is None else _marks(tokenizer)
    before = 0
    for prefix in prefixes:
        data = IndexedDataset(prefix)
        left = data.num_tokens
        if tokenizer is not None:
            yield TokenSegment(np.array([tokenizer.eod], np.int64), 0, before)
            empty = int(np.argmax(data.sizes[::-1] > 0)) if len(data) else 0  # at the end
            last = data[len(data) - 1 - empty] if len(data) else np.empty(0)
            left -= len(last) > 0 and int(last[-1]) == tokenizer.eod
        for slices in _runs(data.sizes):
            tokens = np.empty(int(slices.lengths.sum()), np.int64)
            data.gather(slices, tokens)
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
                raise DataError(
                    f"{prefix}: token ids from {tokens.min()} to {tokens.max()}, but the model has "
                    f"a vocabulary of {vocab_size}: the data were written with another tokenizer"
                )
            before += len(tokens) * data.dtype.itemsize
            text_bytes = None
            if count_bytes and tokenizer is not None:
                texts = np.split(tokens, np.cumsum(slices.lengths)[:-1])
                text_bytes = sum(
                    len(tokenizer.decode(ids[~np.isin(ids, marks)].tolist()).encode())
                    for ids in texts
                )
            yield TokenSegment(tokens[:left], text_bytes, before)
            left -= len(tokens)


def first_bytes(tokens: Ids, before: int | None, tokenizer: Tokenizer) -> int:
    """Return the bytes of text in the tokens that follow an EOD; `before` precedes `tokens`.

    A character that such a token does not complete belongs to the next one.
    """
    follow = np.concatenate([[before == tokenizer.eod], tokens[:-1] == tokenizer.eod])
    firsts = tokens[follow[: len(tokens)] & ~np.isin(tokens, _marks(tokenizer))]
    ids, counts = np.unique(firsts, return_counts=True)
    sizes = [len(tokenizer.decode([i]).rstrip("\ufffd").encode()) for i in ids.tolist()]
    return int(np.dot(sizes, counts))


def _marks(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that separate or surround texts, and are no part of them."""
    return [tokenizer.eod, *tokenizer.encode("")]


def _runs(sizes: npt.NDArray[np.int32]) -> Iterator[SequenceSlices]:
    """Yield runs of slices of sequences; a run has at most SEGMENT_TOKENS tokens in total."""
    first = 0
    while first < len(sizes):
        ends = np.cumsum(sizes[first : first + SEGMENT_TOKENS], dtype=np.int64)
        count = max(1, int(np.searchsorted(ends, SEGMENT_TOKENS, side="right")))
        size = int(ends[0])
        if size > SEGMENT_TOKENS:
            for offset in range(0, size, SEGMENT_TOKENS):
                length = min(SEGMENT_TOKENS, size - offset)
                yield SequenceSlices(*np.array([[first], [offset], [length]]))
        else:
            sequences = np.arange(first, first + count)
            yield SequenceSlices(
                sequences, np.zeros_like(sequences), sizes[sequences].astype(np.int64)
            )
        first += count


def windows(arrays: Iterable[Ids], context: int, stride: int) -> Iterator[Window]:
    """Yield windows of `context` + 1 tokens that begin every `stride` tokens of the arrays.

    Every token but the very first is predicted once: a window predicts the tokens that the windows
    before it did not reach, from at least context - stride + 1 tokens, except at the very
    beginning. The last window is padded with zeros.
    """
    buffer = np.empty(0, np.int64)
    start = 0
    for ids in arrays:
        buffer = np.concatenate([buffer, ids])
        while len(buffer) > context:
            yield Window(buffer[: context + 1], start, context)
            buffer = buffer[stride:]
            start = context - stride
    stop = len(buffer) - 1
    if stop > start:
        yield Window(np.pad(buffer, (0, context - stop)), start, stop)
