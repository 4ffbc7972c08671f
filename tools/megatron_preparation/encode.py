"""Tokenization of blocks of documents, in one process or several.

Unusable documents are left out and reported. Encoded blocks are returned in the order of the input.
A few blocks per worker are in flight, so that no worker is idle and memory does not grow when one
block takes long.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.indexed_dataset import MASK_DTYPE, mask_prefix, token_dtype
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.errors import DataError
from megatron.limited import LimitError
from megatron_preparation import sources
from megatron_preparation.chat import Chat
from megatron_preparation.sources import Block

POLL_S = 0.2
_PENDING_PER_WORKER = 4
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


@dataclass(frozen=True)
class PreprocessOptions:
    """Options that determine the output.

    tokenizer        arguments of build_tokenizer
    json_keys        keys of a JSON line, or columns of a parquet file, to tokenize, each into
                     separate files; plain text is written under each of the keys
    append_eod       end every document with the tokenizer's eod, unless it already does
    split_sentences  one sequence per sentence, cut after . ! ? and at line ends
    keep_newlines    keep white space between sentences, at the end of the earlier one
    input_format     'jsonl', 'text' (one document per file), 'parquet', or 'auto' (by suffix);
                     .gz, .zst and .zstd are always decompressed
    chat             read JSON lines of messages, or of prompt and completion, and also write a loss
                     mask; json_keys is then the single key in the output's name
    """

    tokenizer: dict[str, Any]
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    keep_newlines: bool = False
    input_format: str = "auto"
    chat: Chat | None = None

    @property
    def level(self) -> str:
        """Return the word in the output's file names for the kind of sequence."""
        return "sentence" if self.split_sentences else "document"

    def outputs(self, prefix: str, vocab_size: int) -> dict[str, np.dtype[Any]]:
        """Return prefix and dtype of each data set to write: first the tokens, then loss masks."""
        dtypes = {f"{prefix}_{key}_{self.level}": token_dtype(vocab_size) for key in self.json_keys}
        return dtypes | {mask_prefix(name): MASK_DTYPE for name in dtypes if self.chat is not None}


@dataclass(frozen=True)
class BadInput:
    """Unusable document: file and line, and the reason."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass
class ParsedDocuments:
    """Usable documents of a block: their numbers, and their texts for each of the json_keys.

    With `PreprocessOptions.chat` each text is a Conversation. `bad` has the number of each unusable
    document and the reason.
    """

    numbers: list[int]
    texts: list[list[Any]]
    bad: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class EncodedKey:
    """Tokens of a block for one key, without documents that have no tokens.

    sequence_sizes      number of tokens of each sequence
    document_sequences  number of sequences of each document
    empty_documents     number of documents without tokens
    """

    tokens: npt.NDArray[Any]
    sequence_sizes: npt.NDArray[np.int32]
    document_sequences: npt.NDArray[np.int64]
    empty_documents: int


@dataclass(frozen=True)
class EncodedBlock:
    """One EncodedKey for each of the outputs, and the left-out documents in order."""

    keys: tuple[EncodedKey, ...]
    bad: tuple[BadInput, ...]


def encode_block(block: Block, tokenizer: Tokenizer, options: PreprocessOptions) -> EncodedBlock:
    """Return the tokens of a block.

    Raises LimitError, with file and line, if the tokenizer or template exceeds its limits.
    """
    documents = parse_block(block, options.json_keys, options.chat)
    try:
        keys = _encode_documents(documents.texts, tokenizer, options)
    except LimitError as error:
        raise LimitError(f"{block.where(block.first)} or after it: {error}") from None
    except BaseException as error:
        if not _is_text_error(error):
            raise
        _drop_unencodable(documents, tokenizer, options)
        keys = _encode_documents(documents.texts, tokenizer, options)
    bad = tuple(BadInput(block.where(number), why) for number, why in sorted(documents.bad))
    return EncodedBlock(tuple(keys), bad)


def texts_of_block(block: Block, options: PreprocessOptions) -> list[list[str]]:
    """Return the texts of a block's documents, a list for each of the json_keys.

    Raises DataError, with file and line, for the first unusable document.
    """
    documents = parse_block(block, options.json_keys)
    if documents.bad:
        number, why = documents.bad[0]
        raise DataError(f"{block.where(number)}: {why}")
    return documents.texts


def parse_block(
    block: Block, json_keys: Sequence[str], chat: Chat | None = None
) -> ParsedDocuments:
    """Return the texts, or the conversations of `chat`, and the bad documents of a block.

    Raises LimitError, with file and line, if the chat template exceeds its limits.
    """
    documents = ParsedDocuments([], [[] for _ in json_keys])
    if block.problem:
        documents.bad.append((block.first, block.problem))
        return documents
    for number, content in _contents(block):
        try:
            texts = _texts(content, block.kind, json_keys, chat)
        except LimitError as error:
            raise LimitError(f"{block.where(number)}: {error}") from None
        except (ValueError, DataError) as error:
            documents.bad.append((number, str(error)))
            continue
        if texts is None:
            continue
        documents.numbers.append(number)
        for text, texts_of_key in zip(texts, documents.texts, strict=True):
            texts_of_key.append(text)
    return documents


def _contents(block: Block) -> Iterable[tuple[int, Any]]:
    """Yield the number and content of each document.

    The content is the bytes of parquet columns, otherwise str, or bytes if a document of the block
    is not UTF-8.
    """
    content: Any = block.content
    if block.kind != "parquet":
        with suppress(UnicodeDecodeError):
            content = content.decode()  # all lines at once, which is fast
        content = (
            [content]
            if block.kind == "text"
            else content.split("\n" if isinstance(content, str) else b"\n")
        )
    return enumerate(content, block.first)


def _texts(
    content: Any, kind: str, keys: Sequence[str], chat: Chat | None = None
) -> list[Any] | None:
    """Return a document's texts; None for an empty line. Raises ValueError or DataError."""
    if kind == "parquet":
        return [_decode(column or b"") for column in content]
    text = content if isinstance(content, str) else _decode(content)
    text = text.removeprefix("\ufeff")  # a byte order mark, which some editors write
    if kind == "text":
        return [text] * len(keys)
    if not text or text.isspace():
        return None
    try:
        document = json.loads(text)
    except RecursionError:
        raise DataError("not a readable JSON line: nested too deeply") from None
    except ValueError as error:
        raise DataError(f"not a JSON line: {error}") from None
    if not isinstance(document, dict):
        raise DataError(
            f'expected an object such as {{"text": ...}}, got {type(document).__name__}'
        )
    if chat is not None:
        return [chat.read(document)]
    return [_text_of(document, key) for key in keys]


def _decode(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        location = f"byte {error.start}" + (f", line {line}" if line > 1 else "")
        raise DataError(f"not UTF-8: {error.reason} at {location}") from None


def _text_of(document: dict[str, Any], key: str) -> str:
    if key not in document:
        raise DataError(
            f"no key {key!r}: the keys are {sorted(document)!s:.300}; choose with --json-keys"
        )
    text = document[key]
    if not isinstance(text, str):
        raise DataError(f"{key!r} holds {type(text).__name__}, expected a string")
    try:
        text.isascii() or text.encode()  # UTF-8 has no surrogates, but JSON can spell them
    except UnicodeEncodeError:
        raise DataError(f"{key!r} holds a lone surrogate, which is not a character") from None
    return text


def _encode_documents(
    texts: Sequence[Sequence[Any]], tokenizer: Tokenizer, options: PreprocessOptions
) -> list[EncodedKey]:
    """Return the tokens of documents for each of the outputs."""
    if options.chat is None:
        return [_encode_texts(of_key, tokenizer, options) for of_key in texts]
    encoded = [
        options.chat.encode(conversation, tokenizer, append_eod=options.append_eod)
        for conversation in texts[0]
    ]
    sizes = np.fromiter((len(ids) for ids, _ in encoded), np.int32, len(encoded))
    ids = np.array([i for ids, _ in encoded for i in ids], token_dtype(tokenizer.vocab_size))
    marks = np.concatenate([np.empty(0, MASK_DTYPE), *(marks for _, marks in encoded)])
    ones = np.ones(len(encoded), np.int64)
    return [EncodedKey(ids, sizes, ones, 0), EncodedKey(marks, sizes, ones, 0)]


def _encode_texts(
    texts: Sequence[str], tokenizer: Tokenizer, options: PreprocessOptions
) -> EncodedKey:
    sequences = np.ones(len(texts), np.int64)
    if options.split_sentences:
        sentences = [split_sentences(text, options.keep_newlines) for text in texts]
        sequences = np.fromiter(map(len, sentences), np.int64, len(sentences))
        texts = [sentence for document in sentences for sentence in document]
    dtype = token_dtype(tokenizer.vocab_size)
    tokens, sizes = tokenizer.encode_batch_arrays(texts, dtype)
    owner = np.repeat(np.arange(len(sequences)), sequences)[sizes > 0]
    sizes = sizes[sizes > 0]
    counts = np.bincount(owner, minlength=len(sequences))
    document_sequences = counts[counts > 0]
    if options.append_eod and len(sizes):
        last = np.cumsum(document_sequences) - 1
        ends = np.cumsum(sizes, dtype=np.int64)
        last = last[tokens[ends[last] - 1] != tokenizer.eod]  # the tokenizer may append one itself
        tokens = np.insert(tokens, ends[last], tokenizer.eod)
        sizes[last] += 1
    return EncodedKey(tokens, sizes, document_sequences, len(counts) - len(document_sequences))


def _is_text_error(error: BaseException) -> bool:
    """Return whether a text may be the cause; a panic in Rust is not a subclass of Exception."""
    return not isinstance(
        error,
        LimitError | MemoryError | KeyboardInterrupt | SystemExit | GeneratorExit | AssertionError,
    )


def _drop_unencodable(
    documents: ParsedDocuments, tokenizer: Tokenizer, options: PreprocessOptions
) -> None:
    """Move the documents that cannot be encoded to the bad ones: one fails a whole batch."""
    accepted = []
    for i, number in enumerate(documents.numbers):
        try:
            one = [texts[i : i + 1] for texts in documents.texts]
            _encode_documents(one, tokenizer, options)
        except BaseException as error:
            if not _is_text_error(error):
                raise
            known = isinstance(error, DataError)
            why = str(error) if known else f"the tokenizer fails: {type(error).__name__}: {error}"
            documents.bad.append((number, why))
        else:
            accepted.append(i)
    documents.numbers = [documents.numbers[i] for i in accepted]
    documents.texts = [[texts[i] for i in accepted] for texts in documents.texts]


def split_sentences(text: str, keep_newlines: bool = False) -> list[str]:
    """Split a text by a simple rule: white space after . ! ? and line ends separate sentences.

    >>> split_sentences("One. Two!\\nThree")
    ['One.', 'Two!', 'Three']
    >>> split_sentences("One. Two!\\nThree", keep_newlines=True)
    ['One. ', 'Two!\\n', 'Three']
    """
    sentences = []
    start = 0
    for end in _SENTENCE_END.finditer(text):
        sentences.append(text[start : end.end() if keep_newlines else end.start()])
        start = end.end()
    return [sentence for sentence in [*sentences, text[start:]] if sentence]


def encode_blocks(
    blocks: Iterator[Block],
    tokenizer: Tokenizer,
    options: PreprocessOptions,
    workers: int,
    poll: Callable[[], None] = lambda: None,
) -> Generator[tuple[Block, EncodedBlock], None, None]:
    """Yield blocks with their tokens, in order.

    A single worker is this process, with `tokenizer`; several are separate processes, which build
    their own tokenizers. `poll` is called at least every POLL_S seconds, but not while this process
    encodes. Raises DataError if a worker dies.
    """
    if workers == 1:
        for block in blocks:
            poll()
            yield block, encode_block(block, tokenizer, options)
        return
    # Not forked: the tokenizer libraries have threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _init_worker, (options,))
    children: dict[int, BaseProcess] = {}
    try:
        yield from _in_order(pool, children, blocks, workers, poll)
    except BrokenProcessPool:
        raise _worker_error(pool, children.values()) from None
    except MemoryError:
        raise DataError("there is not enough memory: try fewer --workers") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children.values():
            child.kill()  # it has no state to lose
        for child in children.values():
            child.join()


def _in_order(
    pool: ProcessPoolExecutor,
    children: dict[int, BaseProcess],
    blocks: Iterator[Block],
    workers: int,
    poll: Callable[[], None],
) -> Iterator[tuple[Block, EncodedBlock]]:
    pending: deque[tuple[Block, Future[EncodedBlock]]] = deque()
    pending_bytes = 0
    more = True
    while more or pending:
        poll()
        # The bytes in flight are limited, too: documents may be large.
        while (
            more
            and len(pending) < _PENDING_PER_WORKER * workers
            and (pending_bytes < _PENDING_PER_WORKER * workers * sources.BLOCK_BYTES)
        ):
            block = next(blocks, None)
            more = block is not None
            if block is not None:
                # Ctrl-C reaches all processes of a terminal. Signals blocked here stay blocked in a
                # new process.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
                try:
                    pending.append((block, pool.submit(_encode, block)))
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                children.update(pool._processes)
                pending_bytes += block.text_bytes
        if pending and wait([pending[0][1]], POLL_S).done:
            block, future = pending.popleft()
            pending_bytes -= block.text_bytes
            yield block, future.result()


def _worker_error(pool: ProcessPoolExecutor, children: Collection[BaseProcess]) -> DataError:
    """Return the error for a worker that ended, and end the others."""
    ended = multiprocessing.connection.wait([child.sentinel for child in children], timeout=5)
    # The pool's thread waits for the workers too. While it does, an exit code may look unknown
    # here.
    for child in children:
        child.kill()
    pool.shutdown(cancel_futures=True)
    how = "ended"
    for child in children:
        if child.sentinel in ended:
            code = child.exitcode or 0
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with code {code}"
            )
            break
    return DataError(f"a worker process {how}, possibly for lack of memory: try fewer --workers")


_worker_state: tuple[Tokenizer, PreprocessOptions] | None = None  # of a worker process


def _init_worker(options: PreprocessOptions) -> None:
    """Prepare a worker process: it uses one core and ends with its parent."""
    global _worker_state
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent process"

    def end_with_parent() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _worker_state = build_tokenizer(**options.tokenizer, num_threads=1), options


def _encode(block: Block) -> EncodedBlock:
    assert _worker_state is not None, "_init_worker ran before"
    return encode_block(block, *_worker_state)
