"""Texts to token files: JSON lines, parquet or plain text, in one process or several, with the same result.

The input is cut into blocks (sources.py); workers turn blocks into arrays of tokens (encode.py, pool.py); this process
writes them in the order of the input and keeps a journal (journal.py). A run that was stopped or killed at any moment
goes on from its journal when the same is asked again, and the files come out as if nothing had happened.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from megatron.data.file_lock import FileLock, flush_directory, flush_to_disk
from megatron.data.indexed_dataset import token_dtype
from megatron.data.indexed_writer import IndexedDatasetWriter, open_at
from megatron.data.prepare.encode import BadInput, EncodedBlock, PreprocessOptions
from megatron.data.prepare.journal import Journal, PartialFolder, describe_job
from megatron.data.prepare.pool import encode_blocks
from megatron.data.prepare.sources import Block, Place, Source, find_sources, read_sources
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.errors import ConfigError, DataError, MegatronError

JOURNAL_INTERVAL_S = 15.0
ON_BAD_INPUT = ("fail", "skip")
COUNTS = ("documents", "tokens", "empty_documents", "bad_documents", "input_bytes", "file_bytes")


class PreprocessStopped(MegatronError):
    """The run was asked to stop, and says how to go on."""


@dataclass
class Totals:
    """Counts so far, those of an interrupted run before included.

    documents, tokens, empty_documents: over all keys; empty ones have no tokens and are left out.
    bad_documents: lines or rows that were skipped.
    input_bytes: text after unpacking. file_bytes: what was read from disk, of `total_file_bytes`.
    earlier_documents, earlier_bytes, earlier_file_bytes: what of these was done before this run.
    outputs: prefixes of the data sets. bad_input: the file that names the bad documents, if there are any.
    """

    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    bad_documents: int = 0
    input_bytes: int = 0
    file_bytes: int = 0
    total_file_bytes: int = 0
    earlier_documents: int = 0
    earlier_bytes: int = 0
    earlier_file_bytes: int = 0
    outputs: list[str] = field(default_factory=list)
    bad_input: str = ""


@dataclass(frozen=True)
class Listeners:
    """Functions that are told what happens. `on_progress`: after each block. `on_note`: a sentence for the user.
    `on_bad`: a document that is skipped. `should_stop`: asked several times a second; True ends the run."""

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
    """Write `{output_prefix}_{key}_{level}.bin/.idx` for each key; returns the totals with the prefixes written.

    The files are the same for any number of workers, and appear only when all input was read; until then, files of
    these names stay as they are. An unfinished run of the same inputs and options is continued, `restart` begins anew.
    With `on_bad_input` 'skip', documents that cannot be used are left out and named in `{output_prefix}_bad_input.txt`.

    Raises DataError with file and line for input that cannot be used, for output that cannot be written, and when
    another run has left or is writing these files; ConfigError for options that make no sense; PreprocessStopped.
    """
    _check_keys(options.json_keys)
    sources = find_sources(inputs, options.input_format)
    tokenizer = build_tokenizer(**options.tokenizer, num_threads=1)  # errors of the tokenizer come before any work
    prefix = os.fspath(output_prefix)
    try:
        Path(f"{prefix}_").parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(Path(f"{prefix}_partial.lock"))
        if not lock.acquire_from_the_dead(listeners.on_note):
            raise DataError(
                f"{prefix}: {lock.describe()} is writing it: wait for its end, or choose another --output-prefix (its "
                f"lock is {lock.path})"
            )
        try:
            run = _Run(prefix, options, sources, listeners)
            return run.run(tokenizer, workers, on_bad_input, restart, journal_interval_s)
        finally:
            lock.release()
    except OSError as error:
        raise DataError(f"{error.filename or prefix}: cannot be written: {error.strerror}") from error


def _check_keys(keys: Sequence[str]) -> None:
    if not keys or len(set(keys)) != len(keys):
        raise ConfigError(f"--json-keys {list(keys)}: expected one or more different keys")
    if any(not key or "/" in key or "\0" in key for key in keys):
        raise ConfigError(f"--json-keys {list(keys)}: a key becomes part of a file name, so it cannot be '' or hold /")


class _WriteError(DataError):
    """What is on disk may not be what was counted: only the journal on disk is to be trusted."""


class _Run:
    """One call of `preprocess`, under the lock."""

    def __init__(
        self, prefix: str, options: PreprocessOptions, sources: Sequence[Source], listeners: Listeners
    ) -> None:
        self.prefix, self.options, self.sources, self.listeners = prefix, options, sources, listeners
        self.folder = PartialFolder(prefix)
        self.totals = Totals(
            outputs=[f"{prefix}_{key}_{options.level}" for key in options.json_keys],
            total_file_bytes=sum(source.size for source in sources),
        )
        self.journal: Journal | None = None  # as it is on disk
        self.place = Place()
        self.writers: list[IndexedDatasetWriter] = []
        self.bad_file: BinaryIO

    def run(self, tokenizer: Tokenizer, workers: int, on_bad_input: str, restart: bool, interval_s: float) -> Totals:
        self._begin(restart)
        try:
            if self.journal is None or not self.journal.sealed:
                with ExitStack() as stack:
                    self._open_parts(stack, tokenizer)
                    self._encode_all(tokenizer, workers, on_bad_input, interval_s)
                    self._seal()
            self._publish()
        except (MegatronError, OSError) as error:
            raise self._explained(error) from error
        finally:
            with suppress(OSError):
                if not self.folder.has_journal():  # nothing that could be continued
                    self.folder.remove()
        return self.totals

    def _begin(self, restart: bool) -> None:
        job = describe_job(self.sources, self.options)
        self.journal = None if restart else self.folder.read(COUNTS)
        if self.journal is None:
            self.folder.begin(job)
            return
        counts = self.journal.counts
        self.folder.check_job(job, self.journal)
        self.place = self.journal.place
        totals = self.totals
        for name in COUNTS:
            setattr(totals, name, counts[name])
        totals.earlier_documents, totals.earlier_bytes = totals.documents, totals.input_bytes
        totals.earlier_file_bytes = totals.file_bytes
        self.listeners.on_note(self._where_it_resumes(self.journal))

    def _where_it_resumes(self, journal: Journal) -> str:
        if journal.sealed:
            return "an earlier run has written all documents: giving the files their names"
        source, place = self.sources[self.place.source], self.place
        where = f"resuming after {self.totals.documents} documents, in {source.path} after {place.documents} of it"
        return f"{where} ({place.offset / 1e6:.0f} MB are unpacked again)" if source.packing else where

    def poll(self) -> None:
        """Raise PreprocessStopped when a listener asks for the end."""
        if self.listeners.should_stop():
            raise PreprocessStopped("stopped")

    def _open_parts(self, stack: ExitStack, tokenizer: Tokenizer) -> None:
        dtype = token_dtype(tokenizer.vocab_size)
        try:
            for i, output in enumerate(self.totals.outputs):
                position = self.journal.positions[i] if self.journal else None
                writer = IndexedDatasetWriter(output, dtype, directory=self.folder.path, resume=position)
                stack.callback(writer.leave)
                self.writers.append(writer)
            self.bad_file = open_at(self.folder.bad_input, self.journal.bad_bytes if self.journal else 0)
            stack.callback(_close, self.bad_file)
        except (DataError, OSError) as error:
            if self.journal is None:
                raise
            raise DataError(f"{error}; if this cannot be mended, --restart begins anew") from error

    def _encode_all(self, tokenizer: Tokenizer, workers: int, on_bad_input: str, interval_s: float) -> None:
        blocks = read_sources(self.sources, self.options.json_keys, self.place, on_skip=self.poll)
        due = time.monotonic() + interval_s
        try:
            with closing(encode_blocks(blocks, tokenizer, self.options, workers, self.poll)) as encoded_blocks:
                for block, encoded in encoded_blocks:
                    if encoded.bad:
                        self._report_bad(encoded.bad, on_bad_input)
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
            raise DataError(f"{', '.join(source.path for source in self.sources)}: no document with text in it")

    def _report_bad(self, bad: Sequence[BadInput], on_bad_input: str) -> None:
        if on_bad_input == "fail":
            raise DataError(f"{bad[0]}; --on-bad-input skip leaves such documents out")
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
        except DataError as error:
            raise _WriteError(str(error)) from error
        totals.documents = sum(writer.num_documents for writer in self.writers)
        totals.tokens = sum(writer.num_tokens for writer in self.writers)
        totals.bad_documents += len(encoded.bad)
        totals.input_bytes += block.text_bytes
        totals.file_bytes = block.file_bytes
        self.place = block.after

    def _write_journal(self) -> None:
        """Bring everything to disk, then the journal that counts it."""
        try:
            positions = tuple(writer.position() for writer in self.writers)
            flush_to_disk(self.bad_file)
            counts = {name: getattr(self.totals, name) for name in COUNTS}
            journal = Journal(False, self.place, positions, self.bad_file.tell(), counts)
            self.folder.write(journal)
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
        self.folder.write(replace(self.journal, sealed=True))

    def _publish(self) -> None:
        """Give the files their names. Each step may be done again after a run that was killed in it."""
        for output in self.totals.outputs:
            IndexedDatasetWriter.publish(output, self.folder.path)
        named = Path(f"{self.prefix}_bad_input.txt")
        if self.totals.bad_documents:
            self.totals.bad_input = str(named)
            if self.folder.bad_input.exists():
                os.replace(self.folder.bad_input, named)
        else:
            named.unlink(missing_ok=True)  # of the files that were here before
        flush_directory(named.parent)
        self.folder.remove()

    def _explained(self, error: MegatronError | OSError) -> MegatronError:
        """The error with what to do about the part that is done."""
        if isinstance(error, OSError):
            error = _cannot_write(error, self.folder.path)
        kept = ""
        if self.journal is not None:
            kept = (
                f"; {self.journal.counts['documents']} documents are done and kept in {self.folder.path}, the same "
                f"command goes on after them"
            )
        kind = DataError if isinstance(error, _WriteError) else type(error)
        return kind(f"{error}{kept}")


def _cannot_write(error: OSError, path: Path) -> _WriteError:
    return _WriteError(f"{error.filename or path}: cannot be written: {error.strerror}")


def _close(file: BinaryIO) -> None:
    with suppress(OSError):  # a full disk refuses what is still buffered; it was reported before
        file.close()
