"""Conversion of texts (JSON lines, parquet or plain text) to token files.

The result is the same for any number of processes.

The input is cut into blocks (sources.py); workers turn blocks into arrays of tokens (encode.py);
this process writes them in input order and keeps a journal. A run that was stopped or killed at any
time resumes from its journal when the command is repeated, with byte-identical output.

Until the output is complete, everything is in the folder PREFIX_partial:

| file | content |
|---|---|
| job.json | inputs, options and tokenizer of the run: a resumed run must have the same |
| journal.json | input position, lengths of part files; replaced atomically, after they are synced |
| bad_input.txt | the documents left out so far |
| *.part | the part files of the data sets (indexed_writer.py) |

PREFIX_partial.lock names the process that works there. Without journal.json there is nothing to
resume.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from megatron.data.added_tokens import files_beside
from megatron.data.file_lock import FileLock, flush_directory, flush_to_disk, renamed_into
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter, WriterPosition, open_at
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.data.tokenizer_record import read_record, record_of
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.untrusted import is_count, read_json
from megatron_preparation.encode import BadInput, EncodedBlock, PreprocessOptions, encode_blocks
from megatron_preparation.sources import Block, InputFile, InputPosition, find_sources, read_sources

JOURNAL_INTERVAL_S = 15.0
ON_BAD_INPUT = ("fail", "skip")
COUNTS = (
    "documents",
    "tokens",
    "empty_documents",
    "bad_documents",
    "input_bytes",
    "file_bytes",
    "largest_id",
)
FORMAT = 1
_TOKENIZER_FILES = ("vocab_file", "merge_file", "tokenizer_model")
_HASHED_IN_FOLDERS = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens*",
    "added_tokens*",
    "*.model",
)
_MOST_BYTES = 1 << 28  # of a journal: an entry for each of a million input files
_SHOWN_DIFFERENCES = 5
_ABSENT = "not given"
_DAMAGE = (ValueError, KeyError, IndexError, TypeError, AttributeError, DataError)


class PreprocessStopped(MegatronError):
    """Stop of a run on request; the message explains how to resume it."""


@dataclass
class Totals:
    """Counts so far, including those of an interrupted run.

    documents, tokens, empty_documents: over all keys; empty ones have no tokens and are left out.
    bad_documents: documents that were skipped. largest_id: of all tokens.
    input_bytes: text after decompression. file_bytes: read from disk, of `total_file_bytes`.
    earlier_documents, earlier_bytes, earlier_file_bytes: the part done before this run.
    outputs: prefixes of the data sets. bad_input: the file that names the bad documents, if there
    are any. unchanged: an earlier run had written all files.
    """

    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    bad_documents: int = 0
    largest_id: int = 0
    input_bytes: int = 0
    file_bytes: int = 0
    total_file_bytes: int = 0
    earlier_documents: int = 0
    earlier_bytes: int = 0
    earlier_file_bytes: int = 0
    outputs: list[str] = field(default_factory=list)
    bad_input: str = ""
    unchanged: bool = False


@dataclass(frozen=True)
class Listeners:
    """Functions that are called during a run.

    on_progress: after each block. on_note: with a sentence for the user. on_bad: with a document
    that is skipped. should_stop: several times a second; the run ends if it returns True.
    """

    on_progress: Callable[[Totals], None] = lambda _: None
    on_note: Callable[[str], None] = lambda _: None
    on_bad: Callable[[BadInput], None] = lambda _: None
    should_stop: Callable[[], bool] = lambda: False


def preprocess(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    options: PreprocessOptions,
    *,
    workers: int = 1,
    on_bad_input: str = "fail",
    restart: bool = False,
    journal_interval_s: float = JOURNAL_INTERVAL_S,
    listeners: Listeners = Listeners(),
) -> Totals:
    """Write `{output_prefix}_{key}_{level}.bin/.idx` for each key; return totals with prefixes.

    With `options.chat` each data set has a loss mask beside it, which gets its final name first.
    The files are the same for any number of workers, and appear only when all input has been read;
    until then, existing files of these names are kept. An unfinished run of the same inputs and
    options is resumed, and files of a finished one are kept; `restart` begins again in both cases.
    With `on_bad_input` 'skip', unusable documents are
    left out and listed in `{output_prefix}_bad_input.txt`. The journal is written every
    `journal_interval_s` seconds.

    Raises DataError for unusable input, with file and line, for output that cannot be written, and
    if a different run of this prefix is unfinished or another process is writing it; ConfigError
    for invalid options; PreprocessStopped if a listener asks to stop.
    """
    keys = options.json_keys
    if not keys or len(set(keys)) != len(keys):
        raise ConfigError(f"--json-keys {list(keys)}: expected one or more different keys")
    if any(not key or "/" in key or "\0" in key for key in keys):
        raise ConfigError(
            f"--json-keys {list(keys)}: a key becomes part of a file name, so it cannot be empty "
            "or contain /"
        )
    sources = find_sources(inputs, options.input_format)
    for source in sources if options.chat is not None else ():
        if source.kind != "jsonl":
            raise ConfigError(f"{source.path}: --chat reads JSON lines, but this is {source.kind}")
    # built first, so that its errors come before any work
    tokenizer = build_tokenizer(**options.tokenizer, num_threads=1)
    prefix = os.fspath(output_prefix)
    try:
        Path(f"{prefix}_").parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(Path(f"{prefix}_partial.lock"))
        if not lock.acquire_from_the_dead(listeners.on_note):
            raise DataError(
                f"{prefix}: {lock.describe()} is writing it: wait for it to end, or choose another "
                f"--output-prefix (its lock is {lock.path})"
            )
        try:
            return _Run(prefix, options, sources, listeners, tokenizer).run(
                workers, on_bad_input, restart, journal_interval_s
            )
        finally:
            lock.release()
    except OSError as error:
        raise DataError(
            f"{error.filename or prefix}: cannot be written: {error.strerror}"
        ) from error


@dataclass(frozen=True)
class Journal:
    """State of a run: the input before `place` is in the part files, up to `positions`.

    positions: one per output, in order. sealed: all input is written, and only the data sets have
    to be renamed. bad_bytes: the valid length of bad_input.txt. counts: the fields of Totals in
    COUNTS.
    """

    sealed: bool
    place: InputPosition
    positions: tuple[WriterPosition, ...]
    bad_bytes: int
    counts: dict[str, int]


class PartialFolder:
    """Folder of an unfinished run. Methods raise OSError; `read` and `check_job` also DataError."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(f"{prefix}_partial")
        self.bad_input, self.journal, self.job = (
            self.path / name for name in ("bad_input.txt", "journal.json", "job.json")
        )

    def read(self) -> Journal | None:
        """Return the journal of an earlier run; None if no run got that far."""
        if not self.journal.exists():
            return None
        try:
            values = read_json(self.journal, _MOST_BYTES, error=DataError)
            counts = {"largest_id": 0} | values["counts"]  # older journals lack it
            counts = {name: counts[name] for name in COUNTS}
            numbers = [*values["place"].values(), *counts.values(), values["bad_bytes"]]
            numbers += [number for position in values["positions"] for number in position.values()]
            if not all(map(is_count, numbers)):
                raise ValueError("a number that is not a count")
            positions = tuple(WriterPosition(**position) for position in values["positions"])
            return Journal(
                values["sealed"] is True,
                InputPosition(**values["place"]),
                positions,
                values["bad_bytes"],
                counts,
            )
        except _DAMAGE as error:
            raise DataError(
                f"{self.journal}: damaged ({error!r}); --restart begins again"
            ) from None

    def write(self, path: Path, values: dict[str, Any]) -> None:
        """Replace a JSON file atomically. All data that a journal covers must be synced before."""
        with renamed_into(path) as file:
            file.write(json.dumps(values).encode())
        flush_directory(self.path)

    def begin(self, job: dict[str, Any]) -> None:
        """Create an empty folder for a job."""
        self.remove()
        self.path.mkdir()
        self.write(self.job, job)

    def check_job(self, job: dict[str, Any], journal: Journal, outputs: int) -> None:
        """Raise DataError with the differences if the folder is another job's."""
        try:
            before = _named(
                read_json(self.job, _MOST_BYTES, error=DataError) if self.job.exists() else {}
            )
            now = _named(json.loads(json.dumps(job)))
        except _DAMAGE as error:
            raise DataError(f"{self.job}: damaged ({error!r}); --restart begins again") from None
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if names:
            differences = [
                f"{name} was {before.get(name, _ABSENT):.300}, now {now.get(name, _ABSENT):.300}"
                for name in names[:_SHOWN_DIFFERENCES]
            ]
            raise DataError(
                f"{self.path} has {journal.counts['documents']} documents of an unfinished run, "
                f"but this run differs: {'; '.join(differences)}. To finish that run, repeat its "
                "command; --restart discards it; another --output-prefix keeps it"
            )
        if journal.place.source >= len(job["inputs"]) or len(journal.positions) != outputs:
            raise DataError(
                f"{self.journal}: damaged (it belongs to other inputs or outputs); --restart "
                "begins again"
            )

    def remove(self) -> None:
        """Remove the folder, the journal first: without it the other files are ignored."""
        self.journal.unlink(missing_ok=True)
        if self.path.exists():
            flush_directory(self.path)
            for path in sorted(self.path.iterdir()):
                path.unlink()
            self.path.rmdir()


def describe_job(sources: Sequence[InputFile], options: PreprocessOptions) -> dict[str, Any]:
    """Return, as JSON, the inputs, options and tokenizer files that determine the output."""
    tokenizer = {key: value for key, value in options.tokenizer.items() if value is not None}
    for key in _TOKENIZER_FILES:
        if key in tokenizer:
            tokenizer[key] = _hash(Path(tokenizer[key]))
    library = _library_of(str(tokenizer.get("tokenizer_type")))
    return {
        "format": FORMAT,
        "options": {**asdict(options), "tokenizer": tokenizer},
        "library": f"{library} {importlib.metadata.version(library)}" if library else "",
        "inputs": [[source.path, source.kind, source.size, source.mtime_ns] for source in sources],
    }


def _named(job: dict[str, Any]) -> dict[str, str]:
    """Return the fields of a job under the names that users know."""
    options = dict(job["options"])
    options |= options.pop("tokenizer")
    named = {
        f"--{name.replace('_', '-')}": str(value)
        for name, value in options.items()
        if value is not None
    }
    named |= {"the format of the journal": str(job["format"]), "the library": job["library"]}
    named |= {
        path: f"{kind} of {size} bytes, changed at {ns} ns"
        for path, kind, size, ns in job["inputs"]
    }
    return named | {"--input": " ".join(path for path, *_ in job["inputs"])}


def _library_of(tokenizer_type: str) -> str:
    """Return the tokenizer's package: another version of it may give other ids."""
    name = tokenizer_type.lower()
    if "null" in name:
        return ""
    if "sentencepiece" in name or name.startswith("llama"):
        return "sentencepiece"
    return "tiktoken" if "tik" in name or "gpt2" in name else "tokenizers"


def _hash(path: Path) -> str:
    """Return a digest of a file and those beside it, or of the tokenizer's files in a folder."""
    files = (
        [path, *files_beside(path)]
        if path.is_file()
        else sorted({file for name in _HASHED_IN_FOLDERS for file in path.glob(name)})
    )
    digest = hashlib.sha256()
    for file in files:
        if file.is_file():
            digest.update(f"{file.name if file != path else ''}\0{file.stat().st_size}\0".encode())
            with open(file, "rb") as stream:  # in chunks: it may be larger than memory
                hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


class _WriteError(DataError):
    """Failed write: the files may differ from the counts, so only the journal on disk is valid."""


class _Run:
    """One call of `preprocess`, under the lock."""

    def __init__(
        self,
        prefix: str,
        options: PreprocessOptions,
        sources: Sequence[InputFile],
        listeners: Listeners,
        tokenizer: Tokenizer,
    ) -> None:
        self.prefix = prefix
        self.options = options
        self.sources = sources
        self.listeners = listeners
        self.tokenizer = tokenizer
        self.folder = PartialFolder(prefix)
        self.dtypes = options.outputs(prefix, tokenizer.vocab_size)
        self.totals = Totals(
            outputs=list(self.dtypes),
            total_file_bytes=sum(source.size for source in sources),
        )
        self.job = describe_job(sources, options)
        content = json.dumps(self.job, sort_keys=True).encode()
        self.job_digest = hashlib.sha256(content).hexdigest()
        self.journal: Journal | None = None  # as it is on disk
        self.position = InputPosition()
        self.writers: list[IndexedDatasetWriter] = []
        self.bad_file: BinaryIO

    def run(self, workers: int, on_bad_input: str, restart: bool, interval_s: float) -> Totals:
        if not restart and self._is_finished(on_bad_input):
            return self.totals
        self._begin(restart)
        try:
            if self.journal is None or not self.journal.sealed:
                with ExitStack() as stack:
                    self._open_parts(stack)
                    self._encode_all(workers, on_bad_input, interval_s)
                    self._seal()
            self._publish()
        except (MegatronError, OSError) as error:
            if isinstance(error, OSError):
                error = _cannot_write(error, self.folder.path)
            saved = ""
            if self.journal is not None:
                saved = (
                    f"; {self.journal.counts['documents']} documents are done and kept in "
                    f"{self.folder.path}: the same command resumes after them"
                )
            kind = DataError if isinstance(error, _WriteError) else type(error)
            raise kind(f"{error}{saved}") from error
        finally:
            with suppress(OSError):
                if not self.folder.journal.exists():  # nothing to resume
                    self.folder.remove()
        return self.totals

    def _is_finished(self, on_bad_input: str) -> bool:
        """Return whether an earlier run of the same job has written all files; fill the totals."""
        texts = self.totals.outputs[: len(self.options.json_keys)]
        bad = Path(f"{self.prefix}_bad_input.txt")
        if self.folder.journal.exists() or (bad.exists() and on_bad_input == "fail"):
            return False
        try:
            records = [read_record(output) for output in texts]
            datasets = [IndexedDataset(output) for output in self.totals.outputs]
        except DataError:
            return False
        if any(record is None or record.job != self.job_digest for record in records):
            return False
        self.totals.documents = sum(data.num_documents for data in datasets[: len(texts)])
        self.totals.tokens = sum(data.num_tokens for data in datasets[: len(texts)])
        self.totals.earlier_documents = self.totals.documents
        self.totals.unchanged = True
        if bad.exists():
            self.totals.bad_input = str(bad)
            self.totals.bad_documents = bad.read_bytes().count(b"\n")
        self.folder.remove()
        self.listeners.on_note(
            "nothing to do: an earlier run of this command, with these inputs, has written all "
            "files; --restart writes them again"
        )
        return True

    def _begin(self, restart: bool) -> None:
        job = self.job
        self.journal = None if restart else self.folder.read()
        if self.journal is None:
            self.folder.begin(job)
            return
        self.folder.check_job(job, self.journal, len(self.dtypes))
        totals = self.totals
        counts = self.journal.counts
        self.position = self.journal.place
        for name in COUNTS:
            setattr(totals, name, counts[name])
        totals.earlier_documents, totals.earlier_bytes = totals.documents, totals.input_bytes
        totals.earlier_file_bytes = totals.file_bytes
        source = self.sources[self.position.source]
        note = (
            f"resuming after {counts['documents']} documents, in {source.path} after the first "
            f"{self.position.documents} of that file"
        )
        if self.journal.sealed:
            note = "an earlier run has written all documents: only renaming the files"
        elif source.compression:
            note += f" ({self.position.offset / 1e6:.0f} MB are decompressed again)"
        self.listeners.on_note(note)

    def poll(self) -> None:
        """Raise PreprocessStopped if a listener asks to stop."""
        if self.listeners.should_stop():
            raise PreprocessStopped("stopped")

    def _open_parts(self, stack: ExitStack) -> None:
        try:
            for i, (output, dtype) in enumerate(self.dtypes.items()):
                position = self.journal.positions[i] if self.journal else None
                writer = IndexedDatasetWriter(
                    output, dtype, directory=self.folder.path, resume=position
                )
                stack.callback(writer.leave)
                self.writers.append(writer)
            self.bad_file = open_at(
                self.folder.bad_input, self.journal.bad_bytes if self.journal else 0
            )
            stack.callback(_close, self.bad_file)
        except (DataError, OSError) as error:
            if self.journal is None:
                raise
            raise DataError(
                f"{error}; if this cannot be repaired, --restart begins again"
            ) from error

    def _encode_all(self, workers: int, on_bad_input: str, interval_s: float) -> None:
        blocks = read_sources(
            self.sources, self.options.json_keys, self.position, on_skip=self.poll
        )
        due = time.monotonic() + interval_s
        try:
            with closing(
                encode_blocks(blocks, self.tokenizer, self.options, workers, self.poll)
            ) as encoded_blocks:
                for block, encoded in encoded_blocks:
                    if encoded.bad and on_bad_input == "fail":
                        raise DataError(
                            f"{encoded.bad[0]}; --on-bad-input skip leaves such documents out"
                        )
                    self._report_bad(encoded.bad)
                    self._write(block, encoded)
                    if time.monotonic() >= due:
                        self._write_journal()
                        due = time.monotonic() + interval_s
                    self.listeners.on_progress(self.totals)
        except _WriteError:
            raise
        except MegatronError:
            if self.totals.documents:
                self._write_journal()
            raise
        if not self.totals.documents:
            raise DataError(
                f"{', '.join(source.path for source in self.sources)}: no document with text in it"
            )

    def _report_bad(self, bad: Sequence[BadInput]) -> None:
        for document in bad:
            self.listeners.on_bad(document)
            try:
                self.bad_file.write(f"{document}\n".encode(errors="backslashreplace"))
            except OSError as error:
                raise _cannot_write(error, self.folder.bad_input) from error

    def _write(self, block: Block, encoded: EncodedBlock) -> None:
        totals = self.totals
        try:
            for writer, key in zip(self.writers, encoded.keys, strict=True):
                writer.add_batch(key.tokens, key.sequence_sizes, key.document_sequences)
                totals.empty_documents += key.empty_documents
            ids = [key.tokens for key in encoded.keys[: len(self.options.json_keys)]]
            totals.largest_id = max(totals.largest_id, *(int(i.max(initial=0)) for i in ids))
        except DataError as error:
            raise _WriteError(str(error)) from error
        texts = self.writers[: len(self.options.json_keys)]  # without masks
        totals.documents = sum(writer.num_documents for writer in texts)
        totals.tokens = sum(writer.num_tokens for writer in texts)
        totals.bad_documents += len(encoded.bad)
        totals.input_bytes += block.text_bytes
        totals.file_bytes = block.file_bytes
        self.position = block.after

    def _write_journal(self) -> None:
        """Sync all files, then write the journal that covers them."""
        try:
            positions = tuple(writer.position() for writer in self.writers)
            flush_to_disk(self.bad_file)
            counts = {name: getattr(self.totals, name) for name in COUNTS}
            journal = Journal(False, self.position, positions, self.bad_file.tell(), counts)
            self.folder.write(self.folder.journal, asdict(journal))
        except OSError as error:
            raise _cannot_write(error, self.folder.path) from error
        except DataError as error:
            raise _WriteError(str(error)) from error
        self.journal = journal

    def _seal(self) -> None:
        self._write_journal()
        for writer in self.writers:
            writer.seal()
        assert self.journal is not None
        self.folder.write(self.folder.journal, asdict(replace(self.journal, sealed=True)))

    def _publish(self) -> None:
        """Give the files their final names. A resumed run can repeat each step."""
        # A mask comes first: tokens must never appear without it.
        for output in reversed(self.totals.outputs):
            IndexedDatasetWriter.publish(output, self.folder.path)
        kind = self.options.tokenizer["tokenizer_type"]
        record = record_of(kind, self.tokenizer, self.totals.largest_id, self.job_digest)
        for output in self.totals.outputs[: len(self.options.json_keys)]:
            record.write(output)
        named = Path(f"{self.prefix}_bad_input.txt")
        if self.totals.bad_documents:
            self.totals.bad_input = str(named)
            if self.folder.bad_input.exists():
                os.replace(self.folder.bad_input, named)
        else:
            named.unlink(missing_ok=True)  # belongs to the previous files
        flush_directory(named.parent)
        self.folder.remove()


def _cannot_write(error: OSError, path: Path) -> _WriteError:
    return _WriteError(f"{error.filename or path}: cannot be written: {error.strerror}")


def _close(file: BinaryIO) -> None:
    with suppress(OSError):  # a full disk refuses what is still buffered; it was reported before
        file.close()
