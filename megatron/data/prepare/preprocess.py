"""Texts to token files: JSON lines or plain text, in one process or several, with the same result.

The input is cut into blocks of lines. Workers turn blocks into arrays of tokens; this process writes them in the order
of the input.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.indexed_dataset import token_dtype
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.errors import ConfigError, DataError

BLOCK_BYTES = 1 << 20
BLOCK_DOCUMENTS = 1000
TEXT_SUFFIXES = (".txt", ".text")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


@dataclass(frozen=True)
class PreprocessOptions:
    """What to make of the input.

    tokenizer: the arguments of build_tokenizer.
    json_keys: keys of a JSON line to tokenize, each into files of its own. Plain text counts as the key "text".
    append_eod: end every document with the tokenizer's eod.
    split_sentences: one sequence per sentence, cut after . ! ? and at line ends; with `keep_newlines` the white space
        between sentences stays, at the end of the earlier one.
    input_format: 'jsonl', 'text' (one document per file), or 'auto', by the suffix; .gz is unpacked in any case.
    """

    tokenizer: dict[str, Any]
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    keep_newlines: bool = False
    input_format: str = "auto"

    @property
    def level(self) -> str:
        return "sentence" if self.split_sentences else "document"


@dataclass
class Totals:
    """Counts so far, over all keys. `input_bytes` is text after unpacking, `file_bytes` what was read from disk."""

    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    input_bytes: int = 0
    file_bytes: int = 0
    outputs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Block:
    """Some consecutive documents of one file; `first_line` is the number of the first."""

    path: str
    first_line: int
    is_json: bool
    lines: tuple[bytes, ...]
    file_bytes: int


@dataclass(frozen=True)
class EncodedKey:
    """The documents of one block for one key: all tokens, tokens of each sequence, sequences of each document."""

    tokens: npt.NDArray[Any]
    sequence_sizes: tuple[int, ...]
    document_sequences: tuple[int, ...]
    empty_documents: int


def preprocess(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    options: PreprocessOptions,
    *,
    workers: int = 1,
    on_progress: Callable[[Totals], None] = lambda _: None,
) -> Totals:
    """Write `{output_prefix}_{key}_{level}.bin/.idx` for each key; returns the totals with the prefixes written.

    The files are the same for any number of workers, and appear only when all input was read. `on_progress` is called
    after each block. Raises DataError with file and line for input that cannot be used, and for output that cannot be
    written; ConfigError for options that make no sense.
    """
    if workers < 1:
        raise ConfigError(f"--workers {workers}: expected 1 or more")
    if not options.json_keys or len(set(options.json_keys)) != len(options.json_keys):
        raise ConfigError(f"--json-keys {list(options.json_keys)}: expected one or more different keys")
    tokenizer = build_tokenizer(**options.tokenizer)  # also when workers build their own: errors come before any work
    dtype = token_dtype(tokenizer.vocab_size)
    totals = Totals(outputs=[f"{os.fspath(output_prefix)}_{key}_{options.level}" for key in options.json_keys])
    blocks = read_blocks(inputs, options.input_format)
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedDatasetWriter(output, dtype)) for output in totals.outputs]
        for block, encoded in _encode_all(blocks, tokenizer, options, workers):
            for writer, key in zip(writers, encoded, strict=True):
                _write(writer, key)
                totals.empty_documents += key.empty_documents
            totals.documents = sum(writer.num_documents for writer in writers)
            totals.tokens = sum(writer.num_tokens for writer in writers)
            totals.input_bytes += sum(map(len, block.lines))
            totals.file_bytes += block.file_bytes
            on_progress(totals)
        if not totals.documents:
            raise DataError(f"{', '.join(map(str, inputs))}: no document with text in it")
    return totals


def _write(writer: IndexedDatasetWriter, encoded: EncodedKey) -> None:
    token = sequence = 0
    for sequences in encoded.document_sequences:
        for size in encoded.sequence_sizes[sequence : sequence + sequences]:
            writer.add_sequence(encoded.tokens[token : token + size])
            token += size
        sequence += sequences
        writer.end_document()


def read_blocks(inputs: Sequence[str | os.PathLike[str]], input_format: str = "auto") -> Iterator[Block]:
    """The documents of the files, in order. Raises DataError for files that are missing or damaged."""
    for path in map(Path, inputs):
        if not path.is_file():
            raise DataError(f"{path}: no such input file")
    for path in map(Path, inputs):
        packed = path.suffix == ".gz"
        is_text = input_format == "text" or (
            input_format == "auto" and Path(path.stem if packed else path.name).suffix in TEXT_SUFFIXES
        )
        try:
            with path.open("rb") as raw:
                # A type that has both: gzip for .gz, and otherwise the file itself.
                file: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw
                documents = (b"".join(file),) if is_text else file
                yield from _blocks_of(str(path), documents, not is_text, raw.tell)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error


def _blocks_of(path: str, documents: Iterable[bytes], is_json: bool, position: Callable[[], int]) -> Iterator[Block]:
    lines: list[bytes] = []
    size, first, before = 0, 1, 0
    for number, line in enumerate(documents, 1):
        lines.append(line)
        size += len(line)
        if size >= BLOCK_BYTES or len(lines) >= BLOCK_DOCUMENTS:
            now = position()
            yield Block(path, first, is_json, tuple(lines), now - before)
            lines, size, first, before = [], 0, number + 1, now
    if lines:
        yield Block(path, first, is_json, tuple(lines), position() - before)


def _encode_all(
    blocks: Iterator[Block], tokenizer: Tokenizer, options: PreprocessOptions, workers: int
) -> Iterator[tuple[Block, list[EncodedKey]]]:
    """Blocks with their tokens, in order. A few blocks per worker are in flight, so memory does not grow."""
    if workers == 1:
        for block in blocks:
            yield block, encode_block(block, tokenizer, options)
        return
    pending: deque[tuple[Block, Future[list[EncodedKey]]]] = deque()
    # Not forked: the tokenizer libraries have threads of their own.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (options,)) as pool:
        try:
            for block in blocks:
                pending.append((block, pool.submit(_encode_in_worker, block)))
                if len(pending) >= 3 * workers:
                    done, future = pending.popleft()
                    yield done, future.result()
            while pending:
                done, future = pending.popleft()
                yield done, future.result()
        except BrokenProcessPool as error:
            raise DataError("a worker process died, perhaps for lack of memory: try fewer --workers") from error
        finally:
            for _, future in pending:
                future.cancel()


_worker_state: list[tuple[Tokenizer, PreprocessOptions]] = []


def _start_worker(options: PreprocessOptions) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker, one core
    _worker_state[:] = [(build_tokenizer(**options.tokenizer), options)]


def _encode_in_worker(block: Block) -> list[EncodedKey]:
    return encode_block(block, *_worker_state[0])


def encode_block(block: Block, tokenizer: Tokenizer, options: PreprocessOptions) -> list[EncodedKey]:
    """The tokens of a block, one EncodedKey for each of the json_keys. Raises DataError with file and line."""
    return [_encode_texts(texts, block, tokenizer, options) for texts in texts_of_block(block, options)]


def texts_of_block(block: Block, options: PreprocessOptions) -> list[list[str]]:
    """The documents of a block, one list for each of the json_keys. Raises DataError with file and line."""
    texts: list[list[str]] = [[] for _ in options.json_keys]
    for number, line in enumerate(block.lines, block.first_line):
        where = f"{block.path}:{number}" if block.is_json else block.path
        document = _parse(line, where, block.is_json)
        if document is None:
            continue
        for key, found in zip(options.json_keys, texts, strict=True):
            found.append(_text_of(document, key, where))
    return texts


def _parse(line: bytes, where: str, is_json: bool) -> dict[str, Any] | None:
    """The document of a line; None for an empty line."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from None
    if not is_json:
        return {"text": text}
    if not text.strip():
        return None
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: not a JSON line: {error}") from None
    if not isinstance(document, dict):
        raise DataError(f'{where}: expected an object such as {{"text": ...}}, got {type(document).__name__}')
    return document


def _text_of(document: dict[str, Any], key: str, where: str) -> str:
    if key not in document:
        raise DataError(f"{where}: no key {key!r}: there are {sorted(document)}; choose with --json-keys")
    text = document[key]
    if not isinstance(text, str):
        raise DataError(f"{where}: {key!r} holds {type(text).__name__}, expected a string")
    if _SURROGATE.search(text):
        raise DataError(f"{where}: {key!r} holds half of a surrogate pair, which is no character")
    return text


def _encode_texts(texts: Sequence[str], block: Block, tokenizer: Tokenizer, options: PreprocessOptions) -> EncodedKey:
    pieces = [split_sentences(text, options.keep_newlines) if options.split_sentences else [text] for text in texts]
    try:
        ids = iter(tokenizer.encode_batch([piece for document in pieces for piece in document]))
    except DataError as error:
        raise DataError(f"{block.path}: from line {block.first_line}: {error}") from error
    sequence_sizes: list[int] = []
    document_sequences: list[int] = []
    tokens: list[npt.NDArray[Any]] = []
    empty = 0
    dtype = token_dtype(tokenizer.vocab_size)
    for document in pieces:
        sequences = [sequence for _ in document if (sequence := next(ids))]
        if not sequences:
            empty += 1
            continue
        if options.append_eod:
            sequences[-1] = [*sequences[-1], tokenizer.eod]
        document_sequences.append(len(sequences))
        for sequence in sequences:
            sequence_sizes.append(len(sequence))
            tokens.append(np.array(sequence, dtype))
    joined = np.concatenate(tokens) if tokens else np.empty(0, dtype)
    return EncodedKey(joined, tuple(sequence_sizes), tuple(document_sequences), empty)


def split_sentences(text: str, keep_newlines: bool = False) -> list[str]:
    """Sentences by a plain rule: white space after . ! ? and line ends separate them.

    >>> split_sentences("One. Two!\\nThree")
    ['One.', 'Two!', 'Three']
    >>> split_sentences("One. Two!\\nThree", keep_newlines=True)
    ['One. ', 'Two!\\n', 'Three']
    """
    sentences, start = [], 0
    for end in _SENTENCE_END.finditer(text):
        sentences.append(text[start : end.end() if keep_newlines else end.start()])
        start = end.end()
    return [sentence for sentence in [*sentences, text[start:]] if sentence]
