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
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.data.file_lock import STALE_S, FileLock, Owner, flush_directory, flush_to_disk, remove_remains
from megatron.data.indexed_writer import WriterPosition
from megatron.data.prepare.encode import PreprocessOptions
from megatron.data.prepare.sources import Place, Source
from megatron.errors import DataError
from megatron.untrusted import is_count, read_json

FORMAT = 1
_TOKENIZER_FILES = ("vocab_file", "merge_file", "tokenizer_model")
_HASHED_IN_FOLDERS = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*.model")
_LOOK_S = 1.0
_MOST_BYTES = 1 << 28  # of a journal: an entry for each of a million input files
_SHOWN_DIFFERENCES = 5


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
        return self._journal.exists()

    def read(self, counts: Sequence[str]) -> Journal | None:
        """Place where an earlier run stopped, with these counts; None when none got so far."""
        if not self._journal.exists():
            return None
        try:
            values = read_json(self._journal, _MOST_BYTES, error=DataError)
            place = Place(**_counted(values["place"]))
            positions = tuple(WriterPosition(**_counted(position)) for position in values["positions"])
            bad_bytes = _counted({"": values["bad_bytes"]})[""]
            counted = _counted({name: values["counts"][name] for name in counts})
            journal = Journal(values["sealed"] is True, place, positions, bad_bytes, counted)
        except (ValueError, KeyError, TypeError, AttributeError, DataError) as error:
            raise DataError(f"{self._journal}: damaged ({error!r}); --restart begins anew") from None
        return journal

    def write(self, journal: Journal) -> None:
        """Everything that the journal counts must be on disk."""
        _replace(self._journal, asdict(journal))

    def begin(self, job: dict[str, Any]) -> None:
        """Make an empty folder for a job."""
        self.remove()
        self.path.mkdir()
        _replace(self._job, job)

    def check_job(self, job: dict[str, Any], journal: Journal) -> None:
        """Raises DataError that names the differences when the folder is another job's."""
        try:
            earlier = read_json(self._job, _MOST_BYTES, error=DataError) if self._job.exists() else {}
            differences = list(_differences(earlier, json.loads(json.dumps(job))))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, DataError) as error:
            raise DataError(f"{self._job}: damaged ({error!r}); --restart begins anew") from None
        if differences:
            shown = differences[:_SHOWN_DIFFERENCES]
            if len(differences) > len(shown):
                shown.append(f"and {len(differences) - len(shown)} more")
            raise DataError(
                f"{self.path} holds {journal.counts['documents']} documents of a run that was not finished, and this "
                f"one differs: {'; '.join(shown)}. To finish that run give its command again; --restart throws it away "
                f"and begins anew; another --output-prefix leaves it alone"
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


def _counted(values: dict[str, Any]) -> dict[str, Any]:
    """The same, all of which must be sizes or counts. Raises ValueError."""
    for name, value in values.items():
        if not is_count(value):
            raise ValueError(f"{name} {value!r}")
    return values


def _replace(path: Path, values: dict[str, Any]) -> None:
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(json.dumps(values).encode())
        flush_to_disk(file)
    os.replace(new, path)
    flush_directory(path.parent)


def describe_job(sources: Sequence[Source], options: PreprocessOptions) -> dict[str, Any]:
    """All that decides about the output, as JSON: the inputs' sizes and times, the options, the tokenizer's files."""
    tokenizer = {key: value for key, value in options.tokenizer.items() if value is not None}
    for key in _TOKENIZER_FILES:
        if key in tokenizer:
            tokenizer[key] = _hash(Path(tokenizer[key]))
    settings = {**asdict(options), "tokenizer": tokenizer}
    library = _library_of(str(tokenizer.get("tokenizer_type")))
    return {
        "format": FORMAT,
        "options": settings,
        "library": f"{library} {importlib.metadata.version(library)}" if library else "",
        "inputs": [[source.path, source.kind, source.size, source.mtime_ns] for source in sources],
    }


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


def _differences(earlier: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if earlier.get("format") != now["format"]:
        yield f"it was begun by a version of this tool with format {earlier.get('format')}, this is {now['format']}"
        return
    before, after = dict(earlier["options"]), dict(now["options"])
    before |= before.pop("tokenizer")
    after |= after.pop("tokenizer")
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            flag = f"--{name.replace('_', '-')}"
            if name in _TOKENIZER_FILES and name in before and name in after:
                yield f"the file of {flag} has another content"
            else:
                yield f"{flag} was {_shown(before.get(name))}, now {_shown(after.get(name))}"
    if earlier["library"] != now["library"]:
        yield f"it ran with {earlier['library']}, this is {now['library']}"
    yield from _input_differences(earlier["inputs"], now["inputs"])


def _input_differences(before: list[list[Any]], after: list[list[Any]]) -> Iterator[str]:
    if [file[0] for file in before] != [file[0] for file in after]:
        missing = sorted({file[0] for file in before} - {file[0] for file in after})
        added = sorted({file[0] for file in after} - {file[0] for file in before})
        details = [f"without {path}" for path in missing[:2]] + [f"with {path}" for path in added[:2]]
        yield f"--input named {len(before)} files, now {len(after)}, {', '.join(details) or 'in another order'}"
        return
    for earlier, now in zip(before, after, strict=True):
        if earlier != now:
            what = f"had {earlier[2]} bytes, now {now[2]}" if earlier[2] != now[2] else "was written to since"
            yield f"{now[0]} {what}" if earlier[1] == now[1] else f"{now[0]} was read as {earlier[1]}, now as {now[1]}"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else "not given" if value is None else str(value)


@contextmanager
def locked(
    prefix: str, say: Callable[[str], None], poll: Callable[[], None] = lambda: None, stale_s: float = STALE_S, *,
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
) -> Iterator[FileLock]:
    """Hold the lock of the output prefix; DataError when another process has it and is alive.

    That a process of this host has ended is seen at once. Of another host's, only that it touches its lock every few
    seconds: so a run whose node died is continued elsewhere after `stale_s` seconds.
    """
    lock = FileLock(Path(f"{prefix}_partial.lock"), stale_s, clock, sleep)
    if not lock.acquire():
        _wait_for_the_dead(lock, prefix, say, poll)
    try:
        remove_remains(lock, lock.path.name)
        yield lock
    finally:
        lock.release()


def _wait_for_the_dead(lock: FileLock, prefix: str, say: Callable[[str], None], poll: Callable[[], None]) -> None:
    touched, said = _touched(lock.path), False
    while not lock.acquire():
        poll()
        owner = _owner(lock.path)
        here = owner is not None and owner.machine == Owner.this_process().machine
        alive_here = here and owner is not None and not owner.is_gone()
        if alive_here or (touched is not None and _touched(lock.path) not in (touched, None)):
            raise DataError(
                f"{prefix}: {lock.describe()} is writing it: wait for its end, or choose another --output-prefix (its "
                f"lock is {lock.path})"
            )
        if not here and not said:
            say(f"{lock.path} is {lock.describe()}'s: looking for up to {lock.stale_s:.0f} s whether that still runs")
            said = True
        lock.wait(_LOOK_S)


def _owner(path: Path) -> Owner | None:
    try:
        return Owner.read(path.read_text(errors="replace"))
    except FileNotFoundError:
        return None


def _touched(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
