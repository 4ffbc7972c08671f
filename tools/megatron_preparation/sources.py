"""Streaming of input files (JSON lines, plain text, parquet) as blocks of documents.

A block is a run of consecutive documents as bytes; nothing is parsed here. Each block records the
start of the next one, so that reading can resume there.
"""

from __future__ import annotations

import glob
import gzip
import os
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from megatron.errors import DataError

if TYPE_CHECKING:
    import pyarrow

BLOCK_BYTES = 1 << 19  # large enough to amortise sending a block to a worker, small in memory
# Tokenizers need an entire document in memory, plus 7 (tiktoken), 45 (SentencePiece) or 130
# (tokenizers) bytes per byte of text.
MAX_DOCUMENT_BYTES = 1 << 30
_STREAM_BYTES = 1 << 20
_ARROWS_WINDOW_BYTES = 1 << 27  # largest window that pyarrow decompresses
FORMATS = ("auto", "jsonl", "text", "parquet")
_TEXT_SUFFIXES = (".txt", ".text")
_PARQUET_SUFFIXES = (".parquet", ".pq")
_COMPRESSED_SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_UNSUPPORTED_SUFFIXES = (".bz2", ".xz", ".lzma", ".lz4", ".zip", ".7z", ".tar", ".tgz", ".br")


Rows = tuple[tuple[bytes | None, ...], ...]
# The next block: number of documents, their bytes after decompression, bytes of the file read so
# far, content and problem.
RawBlock = tuple[int, int, int, bytes | Rows, str]


@dataclass(frozen=True)
class InputFile:
    """Input file. `kind`: 'jsonl', 'text' or 'parquet'; `compression`: 'gzip', 'zstd' or ''."""

    path: str
    kind: str
    compression: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class InputPosition:
    """Position in the input, after `documents` lines or rows of file number `source`.

    `offset` counts their bytes after decompression (0 for parquet).
    """

    source: int = 0
    offset: int = 0
    documents: int = 0


@dataclass(frozen=True)
class Block:
    """Consecutive documents of one file; `first` is the number of the first one, counted from 1.

    content: lines with their ends as bytes, a text as bytes, or for parquet the columns of each row
    as bytes, None for missing values.
    problem: the reason why the only document is unusable, or ''.
    text_bytes: size after decompression. file_bytes: size on disk of everything before `after`,
    over all files. after: the start of the next block.
    """

    path: str
    kind: str
    first: int
    after: InputPosition
    text_bytes: int
    file_bytes: int
    content: bytes | Rows = b""
    problem: str = ""

    def where(self, number: int) -> str:
        """Return the name of document `number`, counted from 1 in the file, for messages."""
        if self.kind == "text":
            return self.path
        return f"{self.path}: row {number}" if self.kind == "parquet" else f"{self.path}:{number}"


def find_sources(
    inputs: Sequence[str | os.PathLike[str]], input_format: str = "auto"
) -> list[InputFile]:
    """Return the files of `inputs` in order; patterns (* ? [ ], ** for folders) sorted by name.

    Raises DataError for a missing file, anything but a regular file, an unsupported compression, or
    a pattern that matches no file.
    """
    sources = []
    for name in inputs:
        pattern = os.fspath(name)
        paths = [pattern]
        if glob.has_magic(pattern) and not os.path.exists(pattern):
            paths = sorted(
                path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)
            )
            if not paths:
                raise DataError(f"{pattern}: no file matches this pattern")
        sources += [_input_file(Path(path), input_format) for path in paths]
    return sources


def _input_file(path: Path, input_format: str) -> InputFile:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: this input cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"{path}: is a folder: name its files, for example '{path}/*.jsonl'")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file: a run that resumes could not read it again")
    compression = _COMPRESSED_SUFFIXES.get(path.suffix, "")
    suffix = Path(path.stem).suffix if compression else path.suffix
    if suffix in _UNSUPPORTED_SUFFIXES:
        raise DataError(
            f"{path}: {suffix} files are not supported: decompress it, or compress it as .gz or "
            ".zst"
        )
    kind = input_format
    if kind == "auto":
        kind = (
            "text"
            if suffix in _TEXT_SUFFIXES
            else "parquet"
            if suffix in _PARQUET_SUFFIXES
            else "jsonl"
        )
    if kind == "parquet" and compression:
        raise DataError(
            f"{path}: a parquet file inside {path.suffix}: decompress it; parquet compresses its "
            "own pages"
        )
    return InputFile(os.path.abspath(path), kind, compression, status.st_size, status.st_mtime_ns)


def read_blocks(
    inputs: Sequence[str | os.PathLike[str]],
    input_format: str = "auto",
    json_keys: Sequence[str] = ("text",),
) -> Iterator[Block]:
    """Yield the files' documents in blocks. Raises DataError for missing or damaged files."""
    return read_sources(find_sources(inputs, input_format), json_keys)


def read_sources(
    sources: Sequence[InputFile],
    json_keys: Sequence[str],
    start: InputPosition = InputPosition(),
    *,
    on_skip: Callable[[], None] = lambda: None,
) -> Iterator[Block]:
    """Yield the documents from `start` on in blocks. `json_keys`: the columns of parquet files.

    `on_skip` is called repeatedly on the way to `start`: a compressed file has to be decompressed
    up to there. Raises DataError, with the file and the location, for missing or damaged data.
    """
    before = sum(source.size for source in sources[: start.source])
    for number in range(start.source, len(sources)):
        source = sources[number]
        current = start if number == start.source else InputPosition(number)
        try:
            for count, size, file_bytes, content, problem in _READERS[source.kind](
                source, current, json_keys, on_skip
            ):
                first = current.documents + 1
                offset = 0 if source.kind == "parquet" else current.offset + size
                current = InputPosition(number, offset, current.documents + count)
                yield Block(
                    source.path,
                    source.kind,
                    first,
                    current,
                    size,
                    before + file_bytes,
                    content,
                    problem,
                )
        except read_errors() as error:
            unit = "row" if source.kind == "parquet" else "line"
            raise DataError(
                f"{source.path}: cannot be read after {unit} {current.documents}: {error}"
            ) from error
        before += source.size


def read_errors() -> tuple[type[Exception], ...]:
    """Return the errors that libraries raise for damaged files; pyarrow's only if it is loaded."""
    loaded = sys.modules.get("pyarrow")
    return OSError, EOFError, zlib.error, *((loaded.ArrowException,) if loaded else ())


@contextmanager
def open_source(source: InputFile) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Yield a decompressed stream and a function that returns the bytes of the file read so far.

    Reading a damaged file raises one of read_errors(). Raises DataError if the zstd program is
    needed and missing.
    """
    if source.compression == "zstd" and _window_bytes(source.path) > _ARROWS_WINDOW_BYTES:
        with _by_program(source) as opened:
            yield opened
        return
    if source.compression == "zstd":
        import pyarrow

        with (
            pyarrow.OSFile(source.path) as compressed,
            pyarrow.CompressedInputStream(compressed, "zstd") as stream,
        ):
            yield BufferedReader(stream, _STREAM_BYTES), compressed.tell
        return
    with open(source.path, "rb", buffering=_STREAM_BYTES) as raw:
        # Python's gzip checks the CRC of every member and accepts zeros after the last one
        if source.compression:
            with gzip.GzipFile(fileobj=raw) as decompressed:
                yield cast(BinaryIO, decompressed), raw.tell
        else:
            yield raw, raw.tell


def _window_bytes(path: str) -> int:
    """Return the window size of a file's first zstd frame (RFC 8878, 3.1.1.1); 0 if unknown."""
    with open(path, "rb") as file:
        head = file.read(18)
    if len(head) < 18 or head[:4] != b"\x28\xb5\x2f\xfd":
        return 0
    flags = head[4]
    if not flags & 0x20:
        return (1 << 10 + (head[5] >> 3)) * (8 + (head[5] & 7)) // 8
    first = 5 + (0, 1, 2, 4)[flags & 3]  # after the dictionary ID
    return int.from_bytes(head[first : first + (1, 2, 4, 8)[flags >> 6]], "little")


class _ProgramOutput(RawIOBase):
    """Standard output of a program; reading its end raises OSError if the program failed."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        assert self._process.stdout is not None and self._process.stderr is not None
        count = self._process.stdout.readinto(buffer)  # type: ignore[attr-defined]
        if not count and self._process.wait():
            raise OSError(self._process.stderr.read(300).decode(errors="replace").strip())
        return int(count)


@contextmanager
def _by_program(source: InputFile) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Decompress with the zstd program, because pyarrow has no setting for long windows.

    Yields as open_source does. Raises DataError if the program is missing.
    """
    with open(source.path, "rb", buffering=0) as compressed:
        try:
            process = subprocess.Popen(
                ["zstd", "--decompress", "--stdout", "--long=31"],
                stdin=compressed,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except FileNotFoundError:
            raise DataError(
                f"{source.path}: compressed with a window of "
                f"{_window_bytes(source.path) >> 20} MiB (zstd --long): this needs the program "
                "zstd, which is not on PATH"
            ) from None
        with process:
            try:
                yield BufferedReader(_ProgramOutput(process), _STREAM_BYTES), compressed.tell
            finally:
                process.kill()


def _read_lines(
    source: InputFile, start: InputPosition, keys: Sequence[str], on_skip: Callable[[], None]
) -> Iterator[RawBlock]:
    with open_source(source) as (stream, read_bytes):
        _skip(stream, start.offset, source, on_skip)
        lines: list[bytes] = []
        size = 0
        while True:
            line = stream.readline(MAX_DOCUMENT_BYTES + 1)
            too_long = len(line) > MAX_DOCUMENT_BYTES
            if lines and (too_long or not line or size >= BLOCK_BYTES):
                yield len(lines), size, min(read_bytes(), source.size), b"".join(lines), ""
                lines = []
                size = 0
            if not line:
                return
            if too_long:
                length = len(line)
                while line and not line.endswith(b"\n"):
                    line = stream.readline(_STREAM_BYTES)
                    length += len(line)
                problem = f"{length} bytes, but a document can have at most {MAX_DOCUMENT_BYTES}"
                yield 1, length, min(read_bytes(), source.size), b"", problem
                continue
            lines.append(line)
            size += len(line)


def _skip(stream: BinaryIO, offset: int, source: InputFile, on_skip: Callable[[], None]) -> None:
    if not source.compression:
        stream.seek(offset)
        return
    left = offset
    while left:
        on_skip()
        chunk = stream.read(min(left, _STREAM_BYTES))
        if not chunk:
            raise EOFError(
                f"it ends {left} bytes before the point where an earlier run stopped: the file was "
                "changed"
            )
        left -= len(chunk)


def _read_text(
    source: InputFile, start: InputPosition, keys: Sequence[str], on_skip: Callable[[], None]
) -> Iterator[RawBlock]:
    if start.documents:
        return
    with open_source(source) as (stream, _):
        data = stream.read(MAX_DOCUMENT_BYTES + 1)
    problem = ""
    size = len(data)
    if size > MAX_DOCUMENT_BYTES:
        data = b""
        problem = (
            f"more than {MAX_DOCUMENT_BYTES} bytes, the limit for a document: a text file is "
            "one document; split it"
        )
    yield 1, size, source.size, data, problem


def _read_parquet(
    source: InputFile, start: InputPosition, keys: Sequence[str], on_skip: Callable[[], None]
) -> Iterator[RawBlock]:
    from pyarrow import parquet

    # Read pages on demand: otherwise a whole column of a row group would be in memory.
    file = parquet.ParquetFile(source.path, pre_buffer=False, buffer_size=_STREAM_BYTES)
    with closing(file):
        _check_columns(source, file.schema_arrow, keys)
        metadata = file.metadata
        row = 0
        for group in range(metadata.num_row_groups):
            num_rows = metadata.row_group(group).num_rows
            if row + num_rows <= start.documents:
                row += num_rows
                continue
            batch_rows = _rows_per_batch(metadata.row_group(group), keys)
            batches = file.iter_batches(
                batch_rows, row_groups=[group], columns=list(keys), use_threads=False
            )
            for batch in batches:
                done = min(max(start.documents - row, 0), batch.num_rows)
                row += done
                if done:
                    on_skip()
                for rows in _cut(_rows(batch.slice(done), keys)):
                    row += len(rows)
                    size = sum(len(value or b"") for values in rows for value in values)
                    problem = ""
                    if any(len(value or b"") > MAX_DOCUMENT_BYTES for value in rows[0]):
                        problem = (
                            f"{size} bytes, but a document can have at most {MAX_DOCUMENT_BYTES}"
                        )
                    file_bytes = source.size * row // metadata.num_rows
                    yield len(rows), size, file_bytes, () if problem else rows, problem


def _check_columns(source: InputFile, schema: pyarrow.Schema, keys: Sequence[str]) -> None:
    import pyarrow

    for key in keys:
        indices = schema.get_all_field_indices(key)
        if len(indices) != 1:
            what = f"{len(indices)} columns" if indices else "no column"
            raise DataError(
                f"{source.path}: {what} {key!r}: the columns are {schema.names}; choose with "
                "--json-keys"
            )
        kind = schema.field(indices[0]).type
        plain = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if plain not in (
            pyarrow.string(),
            pyarrow.large_string(),
            pyarrow.string_view(),
            pyarrow.null(),
        ):
            raise DataError(
                f"{source.path}: column {key!r} holds {kind}, expected strings; choose with "
                "--json-keys"
            )


def _rows_per_batch(group: Any, keys: Sequence[str]) -> int:
    """Return the number of rows in about one block, according to the file's metadata."""
    columns = (group.column(i) for i in range(group.num_columns))
    size = sum(
        column.total_uncompressed_size for column in columns if column.path_in_schema in keys
    )
    return int(max(1, min(group.num_rows, 16384, BLOCK_BYTES * group.num_rows // max(size, 1))))


def _rows(batch: pyarrow.RecordBatch, keys: Sequence[str]) -> Iterator[tuple[bytes | None, ...]]:
    import pyarrow

    # Strings are not checked for UTF-8 here: the error when they are decoded names the row.
    texts = (batch.column(key).cast(pyarrow.large_string()) for key in keys)
    return zip(*(text.cast(pyarrow.large_binary()).to_pylist() for text in texts), strict=True)


def _cut(rows: Iterator[tuple[bytes | None, ...]]) -> Iterator[Rows]:
    """Yield runs of rows of about BLOCK_BYTES; a longer row is a separate run."""
    run: list[tuple[bytes | None, ...]] = []
    total = 0
    for row in rows:
        sizes = [len(value or b"") for value in row]
        if run and (total + sum(sizes) > BLOCK_BYTES or max(sizes) > MAX_DOCUMENT_BYTES):
            yield tuple(run)
            run = []
            total = 0
        run.append(row)
        total += sum(sizes)
    if run:
        yield tuple(run)


_READERS = {"jsonl": _read_lines, "text": _read_text, "parquet": _read_parquet}
