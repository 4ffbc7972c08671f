"""Flags of Megatron-LM, Megatron-DeepSpeed, their forks and Primus that have no setting here.

flags_of_others.toml lists them by family.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.config.settings import Settings, all_options

FILE = Path(__file__).with_suffix(".toml")
_OFF = ("none", "null")  # values that leave every feature off
_HOW_MANY = {"0": "no value", "1": "one value", "?": "at most one value"}


@dataclass(frozen=True)
class Foreign:
    """A flag of another framework.

    All flags of a family are handled in the same way, for the same reason.

    refused   whether the flag is an error unless its value leaves the feature off; otherwise it is
              accepted without effect
    reason    why, and for a refused flag what to do instead
    model     whether the flag changes the function computed by given weights
    values    number of values that the flag takes: '0', '1', '?' (at most one) or '*' (any)
    harmless  values that leave the feature off; '@NAME' is the value of the setting NAME
    """

    refused: bool
    reason: str
    model: bool
    values: str
    harmless: tuple[str, ...]

    def judge(self, settings: Settings, spelling: str, words: list[str]) -> None:
        """Add a notice to `settings` if the flag has no effect with these words, else a problem."""
        written = " ".join([spelling, *words])
        reason = self.reason
        switched = len(words) == 1 and words[0].lower() in ("true", "false")
        counts = {"0": switched or not words, "1": len(words) == 1, "?": len(words) <= 1}
        fits = counts.get(self.values, True)
        if fits and self.refused and self._is_harmless(settings, words):
            settings.notices.append(f"{written} has no effect: this is always the case")
        elif self.refused:
            settings.problems.append(f"{written} is not supported: {reason}")
        elif fits:
            settings.notices.append(f"{written} has no effect: {reason}")
        else:
            many = _HOW_MANY[self.values]
            settings.problems.append(f"{spelling} takes {many}, got {len(words)}")

    def _is_harmless(self, settings: Settings, words: list[str]) -> bool:
        """Return whether these words leave the feature off. Numbers are compared as numbers."""
        if self.values == "0":
            return [word.lower() for word in words] == ["false"]
        allowed = list(_OFF)
        for value in self.harmless:
            if value.startswith("@"):  # the value of this setting
                name = value[1:]
                value = str(settings.explicit.get(name, all_options()[name].default))
            allowed.append(value)
        explicit = words or (["true"] if self.values == "?" else [])
        return all(any(_equal(word, value) for value in allowed) for word in explicit)


def changes_model(name: str, value: object, arguments: Mapping[str, object]) -> bool:
    """Return whether an argument of Megatron makes the weights compute an unsupported function.

    name       name of the argument, whose flag has no setting here
    value      its value: one that leaves the feature off changes nothing
    arguments  all arguments, since a harmless value may be that of another argument
    """
    foreign = foreign_flags().get(f"--{name.replace('_', '-')}")
    if foreign is None or not foreign.model or value is False:
        return False
    if not isinstance(value, bool | int | float | str | list | tuple):
        return False
    off = (arguments.get(h[1:], h) if h.startswith("@") else h for h in foreign.harmless)
    return not any(_equal(str(value), str(one)) for one in (*_OFF, "", *off))


def _equal(a: str, b: str) -> bool:
    try:
        return float(a) == float(b)
    except ValueError:
        return a.lower() == b.lower()


@functools.cache
def foreign_flags() -> Mapping[str, Foreign]:
    """Return the flags of other frameworks by spelling, in the order of flags_of_others.toml."""
    flags: dict[str, Foreign] = {}
    for table in tomllib.loads(FILE.read_text(encoding="utf-8")).values():
        for entry in table["flags"].split():
            head, equals, harmless = entry.partition("=")
            name, _, values = head.partition(":")
            assert f"--{name}" not in flags, f"{name} occurs twice in {FILE.name}"
            flags[f"--{name}"] = Foreign(
                table["verdict"] == "refused",
                table["reason"],
                table.get("model", False),
                values or ("1" if equals else "0"),
                tuple(harmless.split("|")) if equals else (),
            )
    return flags
