"""What stands for and against a submission, and where in the script it is to be mended."""
from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ERROR, WARNING, NOTE = "error", "warning", "note"
_FLAG = re.compile(r"--[A-Za-z][\w-]*")


@dataclass(frozen=True)
class Place:
    """A file and a line of it (0: no certain one); "command line" and the like are files without lines."""

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Finding:
    """One thing to know. `about` is its subject in a word or two."""

    level: str
    about: str
    text: str
    place: Place = Place()

    def to_dict(self) -> dict[str, Any]:
        return {"level": self.level, "about": self.about, "text": self.text, "place": str(self.place)}


def error(about: str, text: str, place: Place = Place()) -> Finding:
    return Finding(ERROR, about, text, place)


def warning(about: str, text: str, place: Place = Place()) -> Finding:
    return Finding(WARNING, about, text, place)


def note(about: str, text: str, place: Place = Place()) -> Finding:
    return Finding(NOTE, about, text, place)


@dataclass
class Sources:
    """The texts in which a flag may stand: the words of preflight's own command line, then files, the nearest first."""

    words: tuple[str, ...] = ()
    files: dict[str, list[str]] = field(default_factory=dict)

    def add(self, file: str) -> None:
        """Look into this file, too; one that cannot be read is left out."""
        if file in self.files:
            return
        try:
            self.files[file] = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return

    def find(self, text: str) -> Place | None:
        """Where a flag is given: the last line with it that is no comment, in the first file that has one."""
        pattern = re.compile(rf"(?<![\w-]){re.escape(text)}(?![\w-])")
        if any(pattern.search(word.split("=")[0]) for word in self.words):
            return Place("command line")
        for file, lines in self.files.items():
            for number in range(len(lines), 0, -1):
                line = lines[number - 1]
                if pattern.search(line) and (not line.lstrip().startswith("#") or line.startswith("#SBATCH")):
                    return Place(file, number)
        return None

    def of_flags(self, text: str, otherwise: Place) -> Place:
        """The place of the first flag that a message names and some text has."""
        return self.first(_FLAG.findall(text), otherwise)

    def first(self, flags: Iterable[str], otherwise: Place) -> Place:
        return next((place for flag in flags if (place := self.find(flag))), otherwise)
