"""Flags of Megatron-LM, Megatron-DeepSpeed, their forks and Primus that are not settings here.

flags_of_others.toml lists them by family. It is read only for --help and for a command line with a
flag that is not a setting.
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
    """Flags that are handled alike for one reason; `flags` as written in the file."""

    name: str
    refused: bool
    reason: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Foreign:
    """One such flag.

    values: how many it takes: '0', '1', '?' or '*'. harmless: values that leave the feature off.
    """

    name: str
    family: Family
    values: str = "0"
    harmless: tuple[str, ...] = ()

    def miscounted(self, words: list[str]) -> str:
        """Return the expected number of values if there are others, else an empty string."""
        switched = self.values == "0" and len(words) == 1 and words[0].lower() in ("true", "false")
        fits = {"0": not words or switched, "1": len(words) == 1, "?": len(words) <= 1, "*": True}[
            self.values
        ]
        return "" if fits else f"takes {_HOW_MANY[self.values]}, got {len(words)}"

    def is_harmless(self, words: list[str], value_of: Callable[[str], Any]) -> bool:
        """Return whether these words leave the feature off. Numbers are compared as numbers;
        `value_of` returns the setting for @setting in the file.
        """
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
    """Return all families in the order of the file."""
    is_refused = {"no-op": False, "refused": True}
    return tuple(
        Family(name, is_refused[table["verdict"]], table["reason"], tuple(table["flags"].split()))
        for name, table in tomllib.loads(FILE.read_text(encoding="utf-8")).items()
    )


@functools.cache
def _entries() -> Mapping[str, tuple[str, Family]]:
    """Return each flag's entry and family, by its name with dashes."""
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
    """Return the flag of this spelling, or None. Dashes and underscores are equivalent, since
    Primus writes underscores.
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
    """Yield every such flag as its framework spells it."""
    return ("--" + entry.partition("=")[0].partition(":")[0] for entry, _ in _entries().values())
