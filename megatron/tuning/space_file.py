"""Read and check a space: a TOML file, or one of those that come with this package (`spaces/`).

    [parameters]   name = [values], or { from = 1, to = 8, step = 1 }, or { from = 1, to = 64, times = 2 }
    [variables]    the same, for names that are no flags
    [derived]      name = "expression"
    [constraints]  "reason that is shown" = "expression that must hold"
    [trial]        iterations, warm_up

beside title, source, flags and cluster. A name is any flag of pretrain_gpt.py or a short one (names.py).
"""
from __future__ import annotations

import functools
import keyword
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.config.command_line import scan
from megatron.config.settings import did_you_mean, raise_problems
from megatron.errors import ConfigError
from megatron.tuning.expressions import RESERVED, Expression, ExpressionError, parse_expression
from megatron.tuning.names import READ_ONLY, settings_of_flags, subject
from megatron.tuning.space import Space, ordered, write_key
from megatron.tuning.types import Parameter, Value
from megatron.untrusted import read_toml

SPACES = Path(__file__).with_name("spaces")
_MOST_BYTES = 1 << 22  # of a file
_MOST_VALUES = 10_000
_MOST = 2**63  # of a whole number: what any setting can be
_LONGEST_SHOWN = 60
_TEXTS = ("title", "source", "cluster")
_TABLES = ("parameters", "variables", "derived", "constraints", "trial")
_RANGE = ("from", "to", "step", "times")
ITERATIONS, WARM_UP = 5, 3


@functools.cache
def known_spaces() -> Mapping[str, str]:
    """Name -> title of the spaces that come with this package."""
    return {path.stem: _load(path).title for path in _files()}


def _files() -> list[Path]:
    return sorted(SPACES.glob("*.toml"), key=lambda path: path.stem)


def load_space(name_or_path: str) -> Space:
    """The space of this name, or of this file.

    Raises ConfigError for an unknown name, a file that cannot be read, and everything in it that is unknown, cannot be
    read or is said twice; with the file, the table and the key.
    """
    text = str(name_or_path)
    if (SPACES / f"{text}.toml").is_file() and "/" not in text:
        return _load(SPACES / f"{text}.toml")
    if Path(text).is_file():
        return _load(Path(text))
    names = [path.stem for path in _files()]
    raise ConfigError(f"--space {text} is neither a file nor a space that is known{did_you_mean(text, names)}; known: "
                      f"{', '.join(names)}")  # fmt: skip


def _load(path: Path) -> Space:
    return _Reader(path, read_toml(path, _MOST_BYTES, error=ConfigError)).space()


class _Reader:
    def __init__(self, path: Path, tables: dict[str, Any]) -> None:
        self._path, self._tables = path, tables

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: {key}: {problem}")

    def space(self) -> Space:
        for key in self._tables:
            known = ("flags", *_TEXTS, *_TABLES)
            if key not in known:
                raise self.error(key, f"is not known here{did_you_mean(key, known)}; known: {', '.join(known)}")
        flags = self._flags()
        parameters = [*self._parameters(), *self._variables()]
        if not parameters:
            raise self.error("[parameters]", "nothing varies: give at least one, such as tp = [1, 2, 4]")
        variables = frozenset(self._table("variables"))
        iterations, warm_up = self._trial()
        found = Space(
            name=self._path.stem, title=self._text("title") or self._path.stem, source=self._text("source"),
            path=str(self._path), parameters=tuple(parameters), variables=variables, flags=tuple(flags),
            cluster=self._text("cluster") or None, derived=self._derived(variables),
            constraints=dict(self._constraints(variables)), iterations=iterations, warm_up=warm_up,
        )  # fmt: skip
        self._check_once(found)
        read = {name for rule in (*found.derived.values(), *found.constraints.values()) for name in rule.names}
        for name in sorted(variables - read):
            raise self.error(f"[variables] {name}", "stands in no expression, so that it changes nothing")
        return found

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _text(self, key: str) -> str:
        value = self._tables.get(key, "")
        if not isinstance(value, str):
            raise self.error(key, f"expected text, got {value!r}")
        return value

    def _table(self, name: str) -> dict[str, Any]:
        table = self._tables.get(name, {})
        if not isinstance(table, dict):
            raise self.error(name, f"expected a table [{name}], got {table!r}")
        return table

    def _flags(self) -> list[str]:
        flags = self._tables.get("flags", [])
        if not isinstance(flags, list) or not all(type(word) in (str, int, float) for word in flags):
            raise self.error("flags", 'expected a list of words, such as ["--preset", "gpt-22b"]')
        words = [str(word) for word in flags]
        try:
            scanned = scan(words)
            raise_problems(scanned.problems)
            settings_of_flags(scanned.flags)
        except ConfigError as error:
            raise self.error("flags", str(error)) from None
        return words

    def _parameters(self) -> Iterator[Parameter]:
        seen: dict[str, str] = {}
        for key, given in self._table("parameters").items():
            where, name = f"[parameters] {key}", key.lstrip("-").replace("-", "_")
            try:
                meant = subject(key)
            except ConfigError as error:
                raise self.error(where, str(error)) from None
            for setting in meant.settings:
                if setting in seen:
                    raise self.error(where, f"says the same as '{seen[setting]}': leave one out")
                seen[setting] = key
            yield Parameter(name, *self._values(where, given, meant.accept))

    def _variables(self) -> Iterator[Parameter]:
        for key, given in self._table("variables").items():
            where = f"[variables] {key}"
            if not key.isidentifier() or keyword.iskeyword(key) or key in RESERVED:
                raise self.error(where, "is no name that could stand in an expression")
            if key in READ_ONLY or _is_flag(key):
                raise self.error(where, "is a flag or a short name: put it into [parameters]")
            yield Parameter(key, *self._values(where, given, _plain))

    def _values(self, where: str, given: Any, accept: Any) -> tuple[tuple[Value, ...], bool]:
        values = self._range(where, given) if isinstance(given, dict) else given
        if not isinstance(values, list) or not values:
            raise self.error(where, f"expected values such as [1, 2, 4] or {{ from = 1, to = 4, step = 1 }}, "
                                    f"got {given!r}")  # fmt: skip
        found, keys = list[Value](), set[str]()
        for value in values:
            try:
                if not isinstance(value, bool) and isinstance(value, (int, float)) and _endless(value):
                    raise ValueError("is no number that could be used")
                accepted = accept(value)
            except ValueError as error:
                raise self.error(where, f"{_shown(value)} {error}") from None
            # As journals and reports tell them apart: true and 'on' are one.
            key = write_key({"": accepted})
            if key in keys:
                raise self.error(where, f"{_shown(value)} is given twice")
            keys.add(key)
            found.append(accepted)
        if not ordered(found):
            return tuple(found), False
        # Neighbours are alike; of those that are not given nobody knows.
        return tuple(sorted(found, key=lambda v: (v is not None, v or 0))), True

    def _range(self, where: str, given: dict[str, Any]) -> list[Value]:
        for key in given:
            if key not in _RANGE:
                raise self.error(where, f"'{key}' is not known{did_you_mean(key, _RANGE)}; known: {', '.join(_RANGE)}")
        for key, value in given.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or _endless(value):
                raise self.error(where, f"{key} = {_short(value)} is no number that could be used")
        if "from" not in given or "to" not in given or ("step" in given) == ("times" in given):
            raise self.error(where, "a range is { from = A, to = B, step = C } or { from = A, to = B, times = C }")
        low, high = given["from"], given["to"]
        if low > high:
            raise self.error(where, f"from = {low} is beyond to = {high}")
        if "step" in given and given["step"] <= 0:
            raise self.error(where, f"step = {given['step']} must be above 0")
        if "times" in given and (given["times"] <= 1 or low <= 0):
            raise self.error(where, "a range with times needs from above 0 and times above 1")
        return list(self._steps(where, given))

    def _steps(self, where: str, given: dict[str, Any]) -> Iterator[Value]:
        value, count = given["from"], 0
        # 0.1 + 0.2 is a little more than 0.3: the end belongs to the range all the same.
        while value <= given["to"] * (1 + 1e-12) if given["to"] > 0 else value <= given["to"]:
            yield value
            count += 1
            if count > _MOST_VALUES:
                raise self.error(where, f"has more than {_MOST_VALUES:,} values")
            value = given["from"] + count * given["step"] if "step" in given else value * given["times"]
            value = round(value, 12) if isinstance(value, float) else value

    def _derived(self, variables: frozenset[str]) -> dict[str, Expression]:
        found = {}
        for key, text in self._table("derived").items():
            where = f"[derived] {key}"
            try:
                subject(key)
            except ConfigError as error:
                raise self.error(where, str(error)) from None
            found[key.lstrip("-").replace("-", "_")] = self._expression(where, text, variables)
        return found

    def _constraints(self, variables: frozenset[str]) -> Iterator[tuple[str, Expression]]:
        for reason, text in self._table("constraints").items():
            yield reason, self._expression(f"[constraints] '{reason}'", text, variables)

    def _expression(self, where: str, text: Any, variables: frozenset[str]) -> Expression:
        if not isinstance(text, str):
            text = str(text).lower() if isinstance(text, bool) else str(text)
        try:
            found = parse_expression(text)
        except ExpressionError as error:
            raise self.error(where, f"'{text}': {error}") from None
        for name, column in found.names.items():
            if name not in variables and name not in READ_ONLY:
                try:
                    subject(name)
                except ConfigError as error:
                    raise self.error(where, f"'{text}': column {column}: {error}") from None
        return found

    def _trial(self) -> tuple[int, int]:
        trial, found = self._table("trial"), {"iterations": ITERATIONS, "warm_up": WARM_UP}
        for key, value in trial.items():
            if key not in found:
                raise self.error(f"[trial] {key}", f"is not known{did_you_mean(key, found)}; known: "
                                                   f"{', '.join(found)}")  # fmt: skip
            least = 1 if key == "iterations" else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise self.error(f"[trial] {key}", f"expected a whole number of at least {least}, got {value!r}")
            found[key] = value
        return found["iterations"], found["warm_up"]

    def _check_once(self, space: Space) -> None:
        """Raises ConfigError for a setting that a parameter, a derived name or a flag says, and another one too."""
        said = settings_of_flags(scan(space.flags).flags)
        by = {setting: f"flags has {written}" for setting, written in said.items()}
        varied = [p.name for p in space.parameters if p.name not in space.variables]
        for table, names in (("parameters", varied), ("derived", list(space.derived))):
            for name in names:
                for setting in subject(name).settings:
                    if setting in by:
                        raise self.error(f"[{table}] {name}", f"{by[setting]}, which says the same: leave one out")
                    by[setting] = f"[{table}] has {name}"


def _is_flag(name: str) -> bool:
    try:
        subject(name)
    except ConfigError:
        return False
    return True


def _endless(number: float) -> bool:
    """Of a whole number that no setting can be, too, which has no place among floats."""
    return abs(number) > _MOST if isinstance(number, int) else not math.isfinite(number)


def _plain(value: Any) -> Value:
    if not isinstance(value, (int, float, str)):
        raise ValueError("is neither a number, nor text, nor true or false")
    if isinstance(value, str) and not value.isprintable():
        raise ValueError("has a line break or another character that cannot be printed")
    return value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else _short(value)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
