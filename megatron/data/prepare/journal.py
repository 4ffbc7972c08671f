"""What a run that was killed needs to go on: the folder `PREFIX_partial` beside the output.

| file | content |
|---|---|
| job.json | what the run makes of which files: another run must be the same to go on |
| journal.json | how far the part files are good; written when they are on disk, and replaced in one step |
| bad_input.txt | what was left out so far |
| *.part | the part files of the data sets (indexed_writer.py) |

`PREFIX_partial.lock` says which process works there. Without journal.json there is nothing to continue; without the
folder there is no unfinished run.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.data.file_lock import flush_directory, renamed_into
from megatron.data.indexed_writer import WriterPosition
from megatron.data.prepare.encode import PreprocessOptions
from megatron.data.prepare.sources import Place, Source
from megatron.errors import DataError
from megatron.untrusted import is_count, read_json

FORMAT = 1
_TOKENIZER_FILES = ("vocab_file", "merge_file", "tokenizer_model")
_HASHED_IN_FOLDERS = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*.model")
_MOST_BYTES = 1 << 28  # of a journal: an entry for each of a million input files
_SHOWN_DIFFERENCES = 5
_ABSENT = "not given"
_DAMAGE = (ValueError, KeyError, IndexError, TypeError, AttributeError, DataError)


@dataclass(frozen=True)
class Journal:
    """The state of a run: what lies before `place` is in the part files up to `positions`, one for each key.

    sealed: all input is, and the data sets only have to be given their names. counts: the fields of Totals.
    """

    sealed: bool
    place: Place
    positions: tuple[WriterPosition, ...]
    bad_bytes: int
    counts: dict[str, int]


@dataclass(frozen=True)
class PartialFolder:
    """The folder of an unfinished run. Its methods raise OSError; `read` and `check_job` raise DataError too."""

    prefix: str

    @property
    def path(self) -> Path:
        return Path(f"{self.prefix}_partial")

    @property
    def bad_input(self) -> Path:
        return self.path / "bad_input.txt"

    @property
    def _journal(self) -> Path:
        return self.path / "journal.json"

    @property
    def _job(self) -> Path:
        return self.path / "job.json"

    def has_journal(self) -> bool:
        """Whether there is something to continue."""
        return self._journal.exists()

    def read(self, counts: Sequence[str]) -> Journal | None:
        """The journal of an earlier run, with these counts; None when none got so far."""
        if not self._journal.exists():
            return None
        try:
            values = read_json(self._journal, _MOST_BYTES, error=DataError)
            place, positions = values["place"], values["positions"]
            counted = {name: values["counts"][name] for name in counts}
            numbers = [*place.values(), *counted.values(), values["bad_bytes"]]
            numbers += [number for position in positions for number in position.values()]
            if not all(map(is_count, numbers)):
                raise ValueError("a number that is no count")
            writers = tuple(WriterPosition(**position) for position in positions)
            return Journal(values["sealed"] is True, Place(**place), writers, values["bad_bytes"], counted)
        except _DAMAGE as error:
            raise DataError(f"{self._journal}: damaged ({error!r}); --restart begins anew") from None

    def write(self, journal: Journal) -> None:
        """Everything that the journal counts must be on disk."""
        _write(self._journal, asdict(journal))

    def begin(self, job: dict[str, Any]) -> None:
        """Make an empty folder for a job."""
        self.remove()
        self.path.mkdir()
        _write(self._job, job)

    def check_job(self, job: dict[str, Any], journal: Journal) -> None:
        """Raise DataError that names the differences when the folder is another job's."""
        try:
            before = _named(read_json(self._job, _MOST_BYTES, error=DataError) if self._job.exists() else {})
            now = _named(json.loads(json.dumps(job)))
        except _DAMAGE as error:
            raise DataError(f"{self._job}: damaged ({error!r}); --restart begins anew") from None
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if names:
            differences = [
                f"{name} was {before.get(name, _ABSENT):.300}, now {now.get(name, _ABSENT):.300}"
                for name in names[:_SHOWN_DIFFERENCES]
            ]
            raise DataError(
                f"{self.path} holds {journal.counts['documents']} documents of a run that was not finished, and this "
                f"one differs: {'; '.join(differences)}. To finish that run give its command again; --restart throws "
                f"it away and begins anew; another --output-prefix leaves it alone"
            )
        if journal.place.source >= len(job["inputs"]) or len(journal.positions) != len(job["options"]["json_keys"]):
            raise DataError(f"{self._journal}: damaged (it is of other inputs or outputs); --restart begins anew")

    def remove(self) -> None:
        """Remove the folder, the journal first: what lies there without it is nothing."""
        self._journal.unlink(missing_ok=True)
        if self.path.exists():
            flush_directory(self.path)
            for path in sorted(self.path.iterdir()):
                path.unlink()
            self.path.rmdir()


def _write(path: Path, values: dict[str, Any]) -> None:
    with renamed_into(path) as file:
        file.write(json.dumps(values).encode())
    flush_directory(path.parent)


def describe_job(sources: Sequence[Source], options: PreprocessOptions) -> dict[str, Any]:
    """All that decides about the output, as JSON: the inputs' sizes and times, the options, the tokenizer's files."""
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
    """The parts of a job by the names that users know."""
    options = dict(job["options"])
    options |= options.pop("tokenizer")
    named = {f"--{name.replace('_', '-')}": str(value) for name, value in options.items() if value is not None}
    named |= {"the format of the journal": str(job["format"]), "the library": job["library"]}
    named |= {path: f"{kind} of {size} bytes, changed at {ns} ns" for path, kind, size, ns in job["inputs"]}
    return named | {"--input": " ".join(path for path, *_ in job["inputs"])}


def _library_of(tokenizer_type: str) -> str:
    """The package that turns text into ids: another version of it may do so differently."""
    name = tokenizer_type.lower()
    if "null" in name:
        return ""
    if "sentencepiece" in name or name.startswith("llama"):
        return "sentencepiece"
    return "tiktoken" if "tik" in name or "gpt2" in name else "tokenizers"


def _hash(path: Path) -> str:
    """Of a folder, only of a tokenizer's files: models lie in such folders."""
    files = [path] if path.is_file() else sorted({file for name in _HASHED_IN_FOLDERS for file in path.glob(name)})
    digest = hashlib.sha256()
    for file in files:
        if file.is_file():
            digest.update(f"{file.name if path.is_dir() else ''}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
