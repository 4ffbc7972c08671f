"""Flags of Megatron-LM, Megatron-DeepSpeed, their forks and Primus that are no settings here.

They stand in flags_of_others.toml, by family. It is read when a command line has a flag that is
none of ours, and for --help: most runs do without.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".toml")
_OFF = ("none", "null")  # of a flag that takes values: leaves every feature off
_HOW_MANY = {"0": "no value", "1": "one value", "?": "at most one value"}


@dataclass(frozen=True)
class Family:
    """Flags that are treated alike for one reason; `flags` as they stand in the file."""

    name: str
    refused: bool
    reason: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Foreign:
    """One such flag. `values`: how many it takes, '0', '1', '?' or '*'. `harmless`: those that
    leave a feature off.
    """

    name: str
    family: Family
    values: str = "0"
    harmless: tuple[str, ...] = ()

    def miscounted(self, words: list[str]) -> str:
        """What number of values it takes, where these are another; else nothing."""
        switched = self.values == "0" and len(words) == 1 and words[0].lower() in ("true", "false")
        fits = {"0": not words or switched, "1": len(words) == 1, "?": len(words) <= 1, "*": True}[
            self.values
        ]
        return "" if fits else f"takes {_HOW_MANY[self.values]}, got {len(words)}"

    def is_harmless(self, words: list[str], value_of: Callable[[str], Any]) -> bool:
        """Whether these words leave the feature off; numbers compare as numbers. `value_of` gives
        the value of a setting, for what is @setting in the file."""
        if self.miscounted(words):
            return False
        if self.values == "0":
            return [word.lower() for word in words] == ["false"]
        allowed = [
            str(value_of(value[1:])) if value.startswith("@") else value for value in self.harmless
        ]
        given = words or (["true"] if self.values == "?" else [])
        return all(any(_equal(word, value) for value in (*allowed, *_OFF)) for word in given)


def _equal(a: str, b: str) -> bool:
    try:
        return float(a) == float(b)
    except ValueError:
        return a.lower() == b.lower()


@functools.cache
def families() -> tuple[Family, ...]:
    """All families, in the order of the file."""
    is_refused = {"no-op": False, "refused": True}
    return tuple(
        Family(name, is_refused[table["verdict"]], table["reason"], tuple(table["flags"].split()))
        for name, table in tomllib.loads(FILE.read_text(encoding="utf-8")).items()
    )


@functools.cache
def _entries() -> Mapping[str, tuple[str, Family]]:
    """A flag's name with dashes -> what the file says about it."""
    entries: dict[str, tuple[str, Family]] = {}
    for family in families():
        for entry in family.flags:
            name = _plain(entry.partition("=")[0].partition(":")[0])
            assert name not in entries, f"{name} stands twice in {FILE.name}"
            entries[name] = entry, family
    return entries


def _plain(name: str) -> str:
    return name.replace("_", "-")


def find(spelling: str) -> Foreign | None:
    """The flag of this spelling; dashes and underscores are the same, as Primus writes its keys
    with underscores.
    """
    found = _entries().get(_plain(spelling[2:])) if spelling.startswith("--") else None
    if found is None:
        return None
    entry, family = found
    head, equals, harmless = entry.partition("=")
    name, _, values = head.partition(":")
    return Foreign(
        name,
        family,
        values or ("1" if equals else "0"),
        tuple(harmless.split("|")) if equals else (),
    )


def spellings() -> Iterator[str]:
    """Every such flag, as its framework spells it."""
    return ("--" + entry.partition("=")[0].partition(":")[0] for entry, _ in _entries().values())
