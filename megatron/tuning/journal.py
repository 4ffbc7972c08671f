"""The tuner's journal: a JSON record on each line, written before it is acted upon, from which a search goes on.

    begin        identity (what must not change while a search goes on) and settings (what may)
    resumed      settings of another start
    proposed     number, by, folder, candidate: a trial that is to be run; by "confirm": of a layout that was tried
    started      number, hosts; again for another attempt
    ended        number, started, ended, hosts, result
    interrupted  number, why: it is to be run again
    retried      number: a failed trial that is to be run again
    closed       why: how this start ended
"""
from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.data.file_lock import flush_directory
from megatron.errors import ConfigError
from megatron.tuning.types import Candidate, Result, Trial, checked
from megatron.untrusted import read_bytes

NAME = "journal.jsonl"
_FORMAT = 1
_MOST_BYTES = 1 << 30
_LEFT_OUT = ("index",)  # the place of a candidate may be another one in another allocation


@dataclass
class Saved:
    """What a journal tells.

    identity  of the search; {} where there is none yet
    trials    by number; ends: numbers in the order in which they ended
    """

    identity: Mapping[str, Any] = field(default_factory=dict)
    trials: dict[int, Trial] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)

    def take(self, record: Mapping[str, Any]) -> None:
        """Count one more record. Raises KeyError, TypeError or ValueError for one that is none of ours."""
        event = record["event"]
        if event == "begin":
            if record["format"] != _FORMAT:
                raise ValueError(f"is of format {record['format']}, this program writes {_FORMAT}")
            self.identity = dict(record["identity"])
        elif event == "proposed":
            number = int(record["number"])
            candidate = _candidate(record["candidate"])
            self.trials[number] = checked(Trial(number, candidate, record["by"], record["folder"]))
        elif event in ("started", "ended", "interrupted", "retried"):
            self._take_trial(event, record)
        elif event not in ("resumed", "closed"):
            raise ValueError(f"is of an unknown kind {event!r}")

    def _take_trial(self, event: str, record: Mapping[str, Any]) -> None:
        number = int(record["number"])
        trial = dataclasses.replace(self.trials[number], hosts=tuple(record.get("hosts") or self.trials[number].hosts))
        if number in self.ends:
            self.ends.remove(number)
        if event == "started":
            trial = dataclasses.replace(trial, started=record["time"], ended=None, result=None)
        elif event == "ended":
            self.ends.append(number)
            result = Result.from_json(record["result"])
            trial = dataclasses.replace(trial, started=record["started"], ended=record["ended"], result=result)
        elif event == "interrupted":
            trial = dataclasses.replace(trial, ended=record["time"], result=None)
        else:
            trial = dataclasses.replace(trial, started=None, ended=None, result=None)
        self.trials[number] = checked(trial)


def read_journal(path: Path) -> Saved:
    """What a journal tells; nothing where there is none. A last line that was cut short counts as not written.

    Raises ConfigError for any other line that cannot be read.
    """
    saved, lines = Saved(), _whole(path).decode(errors="replace").split("\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            saved.take(json.loads(line))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            why = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"{path}, line {number}: a record of the tuner's journal {why}: put the line right, or give another "
                f"--out"
            ) from error
    if lines and not saved.identity:
        raise ConfigError(f"{path} does not begin as a tuner's journal does: give another --out")
    return saved


def _whole(path: Path) -> bytes:
    """The lines that were written to their end."""
    content = read_bytes(path, _MOST_BYTES, error=ConfigError) if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


class Journal:
    """A journal that is written to. Each record is on the disk before its method returns.

    Whoever opens one holds a claim on its folder: two writers would each repeat what the other does.
    """

    def __init__(self, path: Path, saved: Saved) -> None:
        self.path, self._saved = path, saved
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(self._file, len(_whole(path)))
        flush_directory(path.parent)  # so that a new file's name outlasts a node that goes down

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any], settings: Mapping[str, Any]) -> Journal:
        """Begin the journal of a folder, or go on with it.

        Raises ConfigError where the folder has the journal of another search, or one that cannot be read.
        """
        path = folder / NAME
        saved = read_journal(path)
        identity = json.loads(json.dumps(dict(identity)))
        if saved.identity:
            check_identity(path, saved.identity, identity)
        journal = cls(path, saved)
        if saved.identity:
            journal._write("resumed", settings=dict(settings))
        else:
            journal._write("begin", format=_FORMAT, identity=identity, settings=dict(settings))
        return journal

    @property
    def trials(self) -> list[Trial]:
        """All of them, by number."""
        return [self._saved.trials[number] for number in sorted(self._saved.trials)]

    @property
    def ended(self) -> list[Trial]:
        """Those with a result, in the order in which they ended."""
        return [self._saved.trials[number] for number in self._saved.ends]

    def proposed(self, trial: Trial) -> None:
        candidate = dataclasses.asdict(trial.candidate)
        kept = {name: value for name, value in candidate.items() if name not in _LEFT_OUT}
        self._write("proposed", number=trial.number, by=trial.by, folder=trial.folder, candidate=kept)

    def started(self, trial: Trial) -> None:
        self._write("started", number=trial.number, hosts=list(trial.hosts))

    def finished(self, trial: Trial) -> None:
        """Of a trial with its result."""
        assert trial.result is not None, "a trial ends with a result, or it is interrupted"
        result = {name: _finite(value) for name, value in trial.result.as_json().items()}
        self._write("ended", number=trial.number, started=trial.started, ended=trial.ended, hosts=list(trial.hosts),
                    result=result)  # fmt: skip

    def interrupted(self, trial: Trial, why: str) -> None:
        self._write("interrupted", number=trial.number, why=why)

    def retried(self, trial: Trial) -> None:
        self._write("retried", number=trial.number)

    def close(self, why: str) -> None:
        self._write("closed", why=why)
        os.close(self._file)

    def _write(self, event: str, **values: Any) -> None:
        record = {"event": event, "time": time.time(), **values}
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        size = os.fstat(self._file).st_size
        written = os.write(self._file, line)
        if written != len(line):
            os.ftruncate(self._file, size)  # before another record follows it
            raise OSError(f"{self.path}: only {written} of {len(line)} bytes could be written; is the disk full?")
        os.fsync(self._file)
        self._saved.take(json.loads(line))


def check_identity(path: Path, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ConfigError that names the first thing in which a search differs from that of a journal."""
    for name in now:
        if there.get(name) != now[name]:
            raise ConfigError(
                f"{path} is the journal of another search: {name.replace('_', ' ')} was {_shown(there.get(name))}, now "
                f"it is {_shown(now[name])}. Give the same again to go on with it, or another --out to begin anew"
            )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return shlex.join(map(str, value)) or "none"
    return "yes" if value is True else "no" if value is False else "not given" if value is None else str(value)


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN; a figure of a broken trial may be one."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _candidate(record: Mapping[str, Any]) -> Candidate:
    made = Candidate(**{**record, "index": -1, "flags": tuple(record["flags"]), "values": dict(record["values"])})
    candidate: Candidate = checked(made)
    return candidate
