"""Input files as blocks of documents: JSON lines, plain text and parquet, read by streaming.

A block is some consecutive documents as bytes; nothing is parsed here. Each block knows where the next one begins, so
that reading can go on there later.
"""

from __future__ import annotations

import glob
import gzip
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from megatron.errors import DataError

if TYPE_CHECKING:
    import pyarrow

BLOCK_BYTES = 1 << 19  # large beside the cost of passing a block on, small beside the memory of its tokens
# A tokenizer takes a document whole, with 7 (tiktoken), 45 (SentencePiece) or 130 (tokenizers) bytes for each of text.
MAX_DOCUMENT_BYTES = 1 << 30
_STREAM_BYTES = 1 << 20
FORMATS = ("auto", "jsonl", "text", "parquet")
_TEXT_SUFFIXES = (".txt", ".text")
_PARQUET_SUFFIXES = (".parquet", ".pq")
_PACKED_SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_OTHER_PACKED_SUFFIXES = (".bz2", ".xz", ".lzma", ".lz4", ".zip", ".7z", ".tar", ".tgz", ".br")


@dataclass(frozen=True)
class Source:
    """One input file. `kind` is 'jsonl', 'text' or 'parquet'; `packing` 'gzip', 'zstd' or ''."""

    path: str
    kind: str
    packing: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Place:
    """A place in the input: `documents` lines or rows of file number `source` lie before it, in `offset` bytes after
    unpacking (0 for parquet)."""

    source: int = 0
    offset: int = 0
    documents: int = 0


@dataclass(frozen=True)
class Block:
    """Consecutive documents of one file, of which the first has the number `first`, counted from 1.

    data: lines with their ends, or one text. rows: for parquet the columns of each row, None where one has no value.
    problem: why the document (one, then) cannot be used, '' if it can.
    text_bytes: size after unpacking. file_bytes: size on disk of what lies before `after`, over all files.
    after: where the next block begins.
    """

    path: str
    kind: str
    first: int
    after: Place
    text_bytes: int
    file_bytes: int
    data: bytes = b""
    rows: tuple[tuple[bytes | None, ...], ...] = ()
    problem: str = ""

    def where(self, number: int) -> str:
        """Names document `number`, counted from 1 in the file, for messages."""
        if self.kind == "text":
            return self.path
        return f"{self.path}: row {number}" if self.kind == "parquet" else f"{self.path}:{number}"


def find_sources(inputs: Sequence[str | os.PathLike[str]], input_format: str = "auto") -> list[Source]:
    """The files that `inputs` name, in this order; those of a pattern (* ? [ ], and ** for any folders) by name.

    Raises DataError for a file that is missing or packed in a way that is not read, and for a pattern without files.
    """
    sources = []
    for name in inputs:
        given = os.fspath(name)
        paths = [given]
        if glob.has_magic(given) and not os.path.exists(given):
            paths = sorted(path for path in glob.glob(given, recursive=True) if os.path.isfile(path))
            if not paths:
                raise DataError(f"{given}: no file matches this pattern")
        sources += [_source(Path(path), input_format) for path in paths]
    return sources


def _source(path: Path, input_format: str) -> Source:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: this input cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"{path}: is a folder: name its files, for example '{path}/*.jsonl'")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a file; a pipe cannot be read again by a run that continues")
    packing = _PACKED_SUFFIXES.get(path.suffix, "")
    suffix = Path(path.stem).suffix if packing else path.suffix
    if suffix in _OTHER_PACKED_SUFFIXES:
        raise DataError(f"{path}: {suffix} files are not read: unpack it, or pack it as .gz or .zst")
    kind = input_format
    if kind == "auto":
        kind = "text" if suffix in _TEXT_SUFFIXES else "parquet" if suffix in _PARQUET_SUFFIXES else "jsonl"
    if kind == "parquet" and packing:
        raise DataError(f"{path}: a parquet file inside {path.suffix}: unpack it, parquet packs its pages itself")
    return Source(os.path.abspath(path), kind, packing, status.st_size, status.st_mtime_ns)


def read_blocks(
    inputs: Sequence[str | os.PathLike[str]], input_format: str = "auto", json_keys: Sequence[str] = ("text",)
) -> Iterator[Block]:
    """The documents of the files, in order. Raises DataError for files that are missing or damaged."""
    return read_sources(find_sources(inputs, input_format), json_keys)


def read_sources(
    sources: Sequence[Source],
    json_keys: Sequence[str],
    start: Place = Place(),
    *,
    on_skip: Callable[[], None] = lambda: None,
) -> Iterator[Block]:
    """The documents from `start` on. `json_keys` are the columns of parquet files.

    `on_skip` is called again and again on the way to `start`, which is long in a packed file: it has to be unpacked.
    Raises DataError, naming the file and the place in it, for what is missing or damaged.
    """
    before = sum(source.size for source in sources[: start.source])
    for number in range(start.source, len(sources)):
        source = sources[number]
        place = start if number == start.source else Place(number)
        try:
            for block in _READERS[source.kind](source, place, before, tuple(json_keys), on_skip):
                yield block
                place = block.after
        except _unreadable() as error:
            unit = "row" if source.kind == "parquet" else "line"
            raise DataError(f"{source.path}: cannot be read after {unit} {place.documents}: {error}") from error
        before += source.size


def _unreadable() -> tuple[type[Exception], ...]:
    """What the libraries raise for files that are damaged. pyarrow's errors are known only when it is in use."""
    loaded = sys.modules.get("pyarrow")
    return OSError, EOFError, zlib.error, *((loaded.ArrowException,) if loaded else ())


@contextmanager
def _open(source: Source) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The unpacked content, and a function that tells how many bytes of the file were read."""
    if source.packing == "zstd":
        import pyarrow

        with pyarrow.OSFile(source.path) as packed, pyarrow.CompressedInputStream(packed, "zstd") as stream:
            yield BufferedReader(stream, _STREAM_BYTES), packed.tell
        return
    with open(source.path, "rb", buffering=_STREAM_BYTES) as raw:
        if source.packing:  # Python's own: it checks the sums of every member and bears zeros after the last
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast(BinaryIO, unpacked), raw.tell
        else:
            yield raw, raw.tell


def _read_lines(
    source: Source, place: Place, before: int, keys: tuple[str, ...], on_skip: Callable[[], None]
) -> Iterator[Block]:
    with _open(source) as (stream, read_bytes):
        _skip(stream, place.offset, source, on_skip)
        pieces: list[bytes] = []
        offset, lines, size = place.offset, place.documents, 0

        def block(size: int, count: int, data: bytes = b"", problem: str = "") -> Block:
            nonlocal offset, lines
            offset, lines = offset + size, lines + count
            after, file_bytes = Place(place.source, offset, lines), before + min(read_bytes(), source.size)
            first = lines - count + 1
            return Block(source.path, "jsonl", first, after, size, file_bytes, data=data, problem=problem)

        while True:
            line = stream.readline(MAX_DOCUMENT_BYTES + 1)
            too_long = len(line) > MAX_DOCUMENT_BYTES
            if pieces and (too_long or not line or size >= BLOCK_BYTES):
                yield block(size, len(pieces), b"".join(pieces))
                pieces, size = [], 0
            if not line:
                return
            if too_long:
                length = len(line)
                while line and not line.endswith(b"\n"):
                    line = stream.readline(_STREAM_BYTES)
                    length += len(line)
                yield block(length, 1, problem=f"{length} bytes, and {MAX_DOCUMENT_BYTES} is the most for one document")
                continue
            pieces.append(line)
            size += len(line)


def _skip(stream: BinaryIO, offset: int, source: Source, on_skip: Callable[[], None]) -> None:
    if not source.packing:
        stream.seek(offset)
        return
    left = offset
    while left:
        on_skip()
        chunk = stream.read(min(left, _STREAM_BYTES))
        if not chunk:
            raise EOFError(f"it ends {left} bytes before the place where an earlier run stopped: it was changed")
        left -= len(chunk)


def _read_text(
    source: Source, place: Place, before: int, keys: tuple[str, ...], on_skip: Callable[[], None]
) -> Iterator[Block]:
    if place.documents:
        return
    with _open(source) as (stream, _):
        data = stream.read(MAX_DOCUMENT_BYTES + 1)
    problem, size = "", len(data)
    if size > MAX_DOCUMENT_BYTES:
        data = b""
        problem = f"more than {MAX_DOCUMENT_BYTES} bytes, the most for one document: a text file is one; cut it up"
    after, file_bytes = Place(place.source, size, 1), before + source.size
    yield Block(source.path, "text", 1, after, size, file_bytes, data=data, problem=problem)


def _read_parquet(
    source: Source, place: Place, before: int, keys: tuple[str, ...], on_skip: Callable[[], None]
) -> Iterator[Block]:
    from pyarrow import parquet

    # Pages are read as they are needed: without the buffer, a whole column of a row group would be in memory.
    file = parquet.ParquetFile(source.path, pre_buffer=False, buffer_size=_STREAM_BYTES)
    with closing(file):
        _check_columns(source, file.schema_arrow, keys)
        metadata, row = file.metadata, 0
        for group in range(metadata.num_row_groups):
            rows = metadata.row_group(group).num_rows
            if row + rows <= place.documents:
                row += rows
                continue
            batch_rows = _rows_per_batch(metadata.row_group(group), keys)
            batches = file.iter_batches(batch_rows, row_groups=[group], columns=list(keys), use_threads=False)
            for batch in batches:
                done = min(max(place.documents - row, 0), batch.num_rows)
                row += done
                if done:
                    on_skip()
                for rows in _cut(_rows(batch.slice(done), keys)):
                    row += len(rows)
                    size = sum(len(value or b"") for values in rows for value in values)
                    after, file_bytes = Place(place.source, 0, row), before + source.size * row // metadata.num_rows
                    problem = ""
                    if any(len(value or b"") > MAX_DOCUMENT_BYTES for value in rows[0]):
                        problem = f"{size} bytes, and {MAX_DOCUMENT_BYTES} is the most for one document"
                    first, rows = row - len(rows) + 1, () if problem else rows
                    yield Block(source.path, "parquet", first, after, size, file_bytes, rows=rows, problem=problem)


def _check_columns(source: Source, schema: pyarrow.Schema, keys: tuple[str, ...]) -> None:
    import pyarrow

    for key in keys:
        found = schema.get_all_field_indices(key)
        if len(found) != 1:
            what = f"{len(found)} columns" if found else "no column"
            raise DataError(f"{source.path}: {what} {key!r}: there are {schema.names}; choose with --json-keys")
        kind = schema.field(found[0]).type
        plain = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if plain not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.null()):
            raise DataError(f"{source.path}: column {key!r} holds {kind}, expected strings; choose with --json-keys")


def _rows_per_batch(group: Any, keys: tuple[str, ...]) -> int:
    """Rows that are about a block, by the sizes in the file's metadata."""
    columns = (group.column(i) for i in range(group.num_columns))
    size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema in keys)
    return int(max(1, min(group.num_rows, 16384, BLOCK_BYTES * group.num_rows // max(size, 1))))


def _rows(batch: pyarrow.RecordBatch, keys: tuple[str, ...]) -> Iterator[tuple[bytes | None, ...]]:
    import pyarrow

    # Strings are not checked to be UTF-8 on the way: whoever decodes them names the row.
    texts = (batch.column(key).cast(pyarrow.large_string()) for key in keys)
    return zip(*(text.cast(pyarrow.large_binary()).to_pylist() for text in texts), strict=True)


def _cut(rows: Iterator[tuple[bytes | None, ...]]) -> Iterator[tuple[tuple[bytes | None, ...], ...]]:
    """Runs of rows of about BLOCK_BYTES together; a row that is too long is one of its own."""
    run: list[tuple[bytes | None, ...]] = []
    total = 0
    for row in rows:
        sizes = [len(value or b"") for value in row]
        if run and (total + sum(sizes) > BLOCK_BYTES or max(sizes) > MAX_DOCUMENT_BYTES):
            yield tuple(run)
            run, total = [], 0
        run.append(row)
        total += sum(sizes)
    if run:
        yield tuple(run)


_READERS = {"jsonl": _read_lines, "text": _read_text, "parquet": _read_parquet}
